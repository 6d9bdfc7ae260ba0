"""Runs everything and prints one table of ratios, with the targets beside it."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy

from . import measure, peers
from .problems import Problem, Unsupported, problems

HAND = "by hand"

#: Microseconds that autograd takes for the gradient of the formula on the machine that limits in µs are for: others'
#: times are compared after they have been scaled by what it takes there.
AUTOGRAD = 95.0

#: What is aimed at: (row, column) -> (limit, unit), where the unit is "x", times the baseline, or "µs".
TARGETS: dict[tuple[str, str], tuple[float, str]] = {
    ("grad: formula", "minidiff"): (25.0, "µs"),
    ("grad: formula", "minidiff jit"): (3.0, "µs"),
    ("grad: elementwise", "minidiff"): (1.6, "x"),
    ("grad: elementwise", "minidiff jit"): (1.0, "x"),
    ("value: elementwise", "minidiff"): (1.05, "x"),
    ("grad: MLP", "minidiff"): (1.25, "x"),
    ("grad: MLP", "minidiff jit"): (1.0, "x"),
    ("value: MLP", "minidiff"): (1.05, "x"),
    ("memory: MLP", "minidiff"): (1.2, "x"),
    ("grad: RNN", "minidiff"): (1.3, "x"),
    ("grad: RNN", "minidiff jit"): (1.0, "x"),
    ("value: RNN", "minidiff"): (1.05, "x"),
    ("memory: RNN", "minidiff"): (1.2, "x"),
    ("import", "minidiff"): (1.3, "x"),
    ("grad: transcendental", "minidiff jit"): (0.7, "x JAX jit"),
    ("grad: polynomial", "minidiff jit"): (1.0, "x JAX jit"),
    ("grad: Gaussian process", "minidiff jit"): (1.0, "x JAX jit"),
    ("grad: heat", "minidiff jit"): (1.0, "x JAX jit"),
}


def check(problem: Problem, runs: dict) -> None:
    """Raise AssertionError where a peer's loss or gradient is not that written by hand."""
    loss, grads = runs[HAND]()
    for name, run in runs.items():
        value, actual = run()
        tolerance, message = problem.tolerance, f"{problem.name}, {name}"
        near_zero = tolerance * numpy.asarray(problem.params[0]).size if tolerance > 1e-10 else 1e-10
        numpy.testing.assert_allclose(
            numpy.asarray(value), loss, rtol=tolerance, atol=near_zero, err_msg=f"{message}: loss"
        )
        for i, (g, expected) in enumerate(zip(actual, grads, strict=True)):
            g = numpy.asarray(g)
            scale = numpy.abs(expected).max()
            numpy.testing.assert_allclose(
                g, expected, rtol=tolerance, atol=tolerance * scale, err_msg=f"{message}: gradient {i}"
            )


def gradients(problem: Problem, prepare: dict, options) -> dict:
    """One row: the gradient by each peer that supports it."""
    runs = {HAND: peers.by_hand(problem), **{name: p(problem) for name, p in prepare.items()}}
    runs = {name: run for name, run in runs.items() if _is_supported(run)}
    check(problem, runs)
    return _row(f"grad: {problem.name}", measure.times(runs, options.rounds, options.seconds), HAND, 1e6, "µs")


def _is_supported(run: peers.Run) -> bool:
    try:
        run()
    except Unsupported:
        return False
    return True


def evaluations(problem: Problem, options) -> dict:
    """One row: the loss itself, by functions of minidiff.numpy and by NumPy's."""
    import minidiff.numpy

    runs = {
        HAND: lambda: problem.loss(numpy, problem.params, problem.data),
        "minidiff": lambda: problem.loss(minidiff.numpy, problem.params, problem.data),
    }
    return _row(f"value: {problem.name}", measure.times(runs, options.rounds, options.seconds), HAND, 1e6, "µs")


def memory(problem: Problem, prepare: dict) -> dict:
    """One row: the most bytes held at once. Only what allocates through Python can be seen."""
    seen = {name: p for name, p in prepare.items() if name not in ("PyTorch", "numba", "JAX", "JAX jit")}
    runs = {HAND: peers.by_hand(problem), **{name: p(problem) for name, p in seen.items()}}
    actual = {name: [measure.peak_memory(run)] for name, run in runs.items()}
    return _row(f"memory: {problem.name}", actual, HAND, 1e-6, "MB")


def imports(options) -> dict:
    actual = measure.import_times(["numpy", "minidiff"], options.rounds)
    return _row("import", {HAND: actual["numpy"], "minidiff": actual["minidiff"]}, HAND, 1e3, "ms")


def _row(name: str, actual: dict[str, list[float]], baseline: str, scale: float, unit: str) -> dict:
    """Ratios to the baseline, and the absolute numbers, of all that was measured."""
    return {
        "name": name,
        "unit": unit,
        "absolute": {k: statistics.median(v) * scale for k, v in actual.items()},
        "ratio": {k: measure.ratio(actual, k, baseline) for k in actual if k != baseline},
        "spread": {k: measure.spread(actual, k, baseline) for k in actual if k != baseline},
    }


def verdict(row: dict, column: str) -> str:
    """Return `met` or `missed` for a number and its target, or nothing where there is none."""
    limit, unit = TARGETS.get((row["name"], column), (None, "x"))
    value = row["absolute" if unit == "µs" else "ratio"].get(column)
    if limit is None or value is None:
        return ""
    if unit == "x JAX jit":
        if "JAX jit" not in row["ratio"]:
            return ""
        value /= row["ratio"]["JAX jit"]
        unit = f"x JAX jit ({value:.2f} here)"
    if unit == "µs" and "autograd" in row["absolute"]:
        value *= AUTOGRAD / row["absolute"]["autograd"]
        unit = f"µs where autograd takes {AUTOGRAD:g} ({value:.1f} here)"
    return f"{column} <= {limit:g} {unit}: {'met' if value <= limit else 'missed'}"


def table(rows: Sequence[dict], columns: Sequence[str], missing: dict[str, str]) -> str:
    """The rows as text: the baseline's and minidiff's absolute numbers, then everyone's ratio to the baseline."""
    head = ["", HAND, "minidiff", *columns, "targets"]
    lines = [head]
    for row in rows:
        absolute = [_number(row["absolute"].get(c), row["unit"]) for c in (HAND, "minidiff")]
        asked = row["name"].startswith("grad")
        ratios = ["missing" if c in missing and asked else _times(row["ratio"].get(c)) for c in columns]
        targets = "; ".join(filter(None, (verdict(row, c) for c in columns)))
        lines.append([row["name"], *absolute, *ratios, targets])
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    lines.insert(1, ["-" * w for w in widths])
    left = (0, len(head) - 1)
    padded = [[c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths))] for r in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _number(x: float | None, unit: str) -> str:
    return "" if x is None else f"{x:,.4g} {unit}" if x < 1e4 else f"{x:,.0f} {unit}"


def _times(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}x"


def run(options: argparse.Namespace) -> tuple[list[dict], dict[str, str]]:
    """All measurements that `options` ask for, and the peers that are missing."""
    prepare, missing = peers.load(options.peers)
    rows = []
    for problem in problems(options.quick):
        if not options.only or problem.name in options.only:
            rows.append(gradients(problem, prepare, options))
            if problem.name in ("formula", "elementwise", "MLP", "RNN"):
                rows.append(evaluations(problem, options))
            if problem.name in ("MLP", "RNN"):
                rows.append(memory(problem, prepare))
    if not options.only or "import" in options.only:
        rows.append(imports(options))
    return rows, missing


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = measure.options(
        __doc__, arguments, quick=False, json="", only=(), peers=tuple(peers.PEERS), rounds=0, seconds=0.0
    )
    options.rounds = options.rounds or (1 if options.quick else 25)
    options.seconds = options.seconds or (1e-4 if options.quick else 0.02)
    rows, missing = run(options)
    columns = [name for name in peers.PEERS if name in options.peers]
    print(table(rows, columns, missing))
    for name, why in missing.items():
        print(f"missing: {name} ({why})")
    result = {"rows": rows, "missing": missing}
    measure.save(options.json, result)
    return result
