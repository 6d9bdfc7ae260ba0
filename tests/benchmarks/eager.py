"""Eager calls and gradients on simulated ranks, beside the same function without ranks and a gradient by hand.

    python -m tests.benchmarks.eager [--only NAME …] [--rounds 15] [--json FILE]

The function is the mean of tanh(x @ w)². In each round all programs run in turn; a ratio is the median over rounds of a
program's time and its baseline's, with the quartiles. A program with a limit that it exceeds is marked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from typing import NamedTuple

for _name in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_name}_NUM_THREADS", "1")

import numpy  # noqa: E402

import minidiff as md  # noqa: E402
import minidiff.numpy as np  # noqa: E402
import spmd  # noqa: E402
from collectives import pmean  # noqa: E402
from spmd import P  # noqa: E402

from . import measure  # noqa: E402

REPEATS = 40  # calls before the first round: by then, what repeats is planned or compiled


class Row(NamedTuple):
    """A program, the row that it is compared with, and how many times as long it may take."""

    run: Callable[[], object]
    baseline: str
    limit: float


def rows(rows_of_x: int = 128, width: int = 16) -> dict[str, Row]:
    """Programs by name."""
    x = numpy.sin(numpy.arange(1.0 * rows_of_x * width)).reshape(rows_of_x, width)
    w = numpy.cos(numpy.arange(1.0 * width * width)).reshape(width, width) / width
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    split = spmd.distribute(x, mesh, P("i"))

    def layer(w, x):
        return np.mean(np.tanh(x @ w) ** 2)

    def by_hand():
        h = numpy.tanh(x @ w)
        value = numpy.mean(h**2)
        ct = h * (2 / h.size)
        ct *= 1 - h * h
        return value, x.T @ ct

    mapped = spmd.shard_map(lambda w, x: pmean(layer(w, x), "i"), mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    of_layer, of_mapped, compiled = md.value_and_grad(layer), md.value_and_grad(mapped), md.jit(md.grad(mapped))
    results = [by_hand(), of_layer(w, x), of_mapped(w, x), of_layer(w, split)]
    for value, gradient in results:
        numpy.testing.assert_allclose(value, results[0][0], rtol=1e-12)
        numpy.testing.assert_allclose(gradient, results[0][1], atol=1e-14)
    return {
        "value": Row(lambda: layer(w, x), "value", 1.0),
        "gradient by hand": Row(by_hand, "gradient by hand", 1.0),
        "gradient": Row(lambda: of_layer(w, x), "gradient by hand", 1.5),
        "shard_map, value": Row(lambda: mapped(w, x), "value", 4.0),
        "shard_map, gradient": Row(lambda: of_mapped(w, x), "shard_map, value", 2.5),
        "shard_map, gradient, compiled": Row(lambda: compiled(w, x), "shard_map, value", 1.0),
        "sharded array, value": Row(lambda: layer(w, split), "shard_map, value", 2.5),
        "sharded array, gradient": Row(lambda: of_layer(w, split), "shard_map, gradient", 2.5),
    }


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.eager", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the rows' names")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a program in a round")
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args(arguments)
    every = rows()
    names = [name for name in every if any(part in name for part in options.only)]
    needed = {*names, *[every[name].baseline for name in names]}
    needed |= {every[name].baseline for name in needed}
    runs = {name: row.run for name, row in every.items() if name in needed}
    for run in runs.values():
        for _ in range(REPEATS):
            run()
    actual = measure.times(runs, options.rounds, options.seconds)
    results = []
    print(f"{platform.processor() or platform.machine()}, {options.rounds} rounds; microseconds")
    print(f"{'':32}{'median':>9}{'ratio':>8}   {'quartiles':12}{'limit':>6}  beside")
    for name in names:
        _, baseline, limit = every[name]
        ratio, (low, high) = measure.ratio(actual, name, baseline), measure.spread(actual, name, baseline)
        time = 1e6 * statistics.median(actual[name])
        results.append({"row": name, "microseconds": time, "ratio": ratio, "quartiles": [low, high], "limit": limit})
        mark = "  exceeds its limit" if ratio > limit else ""
        print(f"{name:32}{time:9.1f}{ratio:8.2f}   {low:5.2f}-{high:<6.2f}{limit:6.1f}  {baseline}{mark}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"processor": platform.processor(), "rows": results}, file, indent=1)
    return results


if __name__ == "__main__":
    main()
