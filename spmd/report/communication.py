"""Reports of what a program communicates, with types and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from minidiff import tree
from minidiff.core.tape import Tape
from minidiff.errors.tracebacks import hide_own_frames_of_lambda
from minidiff.inputs.arguments import as_value, check_function
from minidiff.values.dtypes import finfo, is_differentiable
from spmd.prices.compiled_tape import apply_to_tape, is_jitted, meshes_of, tape_of, without_static
from spmd.prices.messages import Communication, price_tape
from spmd.report.timeline import MeasuredStep, check_runs, measure
from spmd.shard_map.shard_map import without_types
from spmd.show import Table


def communication(f: Callable | Tape, *args: Any, optimized: bool = False, measured: bool = False) -> Any:
    """Report the collectives of a tape, or of `f`: `communication(f)(*args)`.

    Nothing runs: the report is read from the tape of `f` for arguments of these types. A jitted function, also one that
    `f` calls, is reported as its program, with its options. The table names the line of the program that asked for each
    collective; in the backward direction, the line whose derivative needs it.

    The body of a `scan` counts once for each step, that of a `while_loop` once: `notes` say so. Two things differ from
    a Python loop. Sharded arrays in the carry are resharded before the first step, to the sharding that a step returns.
    In the body of a `shard_map`, the gradient of values that steps compute from invariant ones is summed once, after
    the loop; in a Python loop for each step, unless the program is `optimized`.

    Args:
        f: a function, or a tape; for a tape, the report itself is returned.
        optimized: report on the program that `jit(f)` compiles, with short loops in bodies unrolled.
        measured: run that program, too, twice, on all ranks: the table then has the seconds of each row in the second
            run (`timeline` shows when).

    Raises:
        TypeError: if `f` is neither a function nor a tape.

    >>> import numpy as np
    >>> from collectives import psum
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> total = shard_map(lambda x: psum(x, 'i'), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> report = communication(total)(np.arange(8.0))
    >>> report.counts, report.bytes
    ({'psum': 1}, 16)
    >>> [(row.axes, row.direction) for row in report.rows]
    [(('i',), 'forward')]
    """
    check_function("communication", f, args)
    optimized = optimized or measured or is_jitted(f)
    report = apply_to_tape(lambda tape: price_tape(tape, optimized), f, optimized)
    if not measured:
        return report
    check_runs("communication", f)
    return hide_own_frames_of_lambda(lambda *args: _with_seconds(report(*args), measure(f, args)))


def _with_seconds(report: Communication, ranks: Sequence[Sequence[MeasuredStep]]) -> Communication:
    """Add the seconds of each row on the slowest rank to a report."""
    for row in report.rows:
        key = row.collective, row.axes, row.source
        row.seconds = max(sum(s.seconds for s in steps if s.key == key) for steps in ranks)
    return report


# ---------------------------------------------------------------- comparison with the old recipe


@dataclass(repr=False)
class Comparison(Table):
    """The result of `compare`. Printing it gives a table.

    `typed` and `untyped` are reports of communication. `same` says whether both gave the same numbers; it is None if
    they were not run. `note` says why not, or what was wrong. `untyped` is None if the program does not run without
    types.
    """

    typed: Communication
    untyped: Communication | None
    same: bool | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The old recipe's bytes divided by the typed program's; None if undefined."""
        if self.untyped is None or not self.typed.bytes:
            return None
        return self.untyped.bytes / self.typed.bytes

    def _table(self) -> tuple[list, list, list] | str:
        if self.untyped is not None and not (self.typed.rows or self.untyped.rows):
            return "no communication, with types or without"
        header = ["collective", "axes", "count", "without types", "bytes per rank", "without types", "ratio"]
        reports = self.typed, self.untyped or Communication()
        typed, untyped = (report.sums(lambda row: (row.collective, row.axes)) for report in reports)

        def cells(name: str, axes: str, one: tuple[int, int], two: tuple[int, int]) -> list:
            if self.untyped is None:
                return [name, axes, one[0], "?", f"{one[1]:,}", "?", "?"]
            ratio = f"{two[1] / one[1]:.2f}" if one[1] else "-"
            return [name, axes, one[0], two[0], f"{one[1]:,}", f"{two[1]:,}", ratio]

        none = (0, 0)
        keys = dict.fromkeys([*typed, *untyped])
        lines = [cells(k[0], ", ".join(k[1]), typed.get(k, none), untyped.get(k, none)) for k in keys]
        totals = [report.sums(lambda row: ()).get((), none) for report in reports]
        return header, lines, cells("total", "", *totals)

    def _remarks(self) -> list[str]:
        reports = [r for r in (self.typed, self.untyped) if r is not None]
        same = "both give the same numbers" if self.same else self.note
        return [same, *dict.fromkeys(remark for report in reports for remark in report._remarks())]


def compare(f: Callable, *args: Any) -> Comparison:
    """Compare what `f(*args)` communicates with types and by the old recipe.

    The old recipe is `check_rep=False` throughout. If all meshes are simulated, the program is run both ways, and the
    results are compared. On MPI ranks nothing runs, and the comparison says so.

    Args:
        f: a function made of `shard_map`s, such as `md.grad(loss)`.
        args: its arguments; with types in place of arrays, nothing runs.

    Raises:
        TypeError: for a tape, which has its types already.

    >>> import numpy as np
    >>> from minidiff import grad
    >>> from collectives import psum
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> loss = shard_map(lambda w, x: psum((w * x).sum(), 'i'), mesh=mesh, in_specs=(P(), P('i')), out_specs=P())
    >>> print(compare(grad(loss), np.ones(2), np.ones((4, 2))))
    collective  axes  count  without types  bytes per rank  without types  ratio
    ----------  ----  -----  -------------  --------------  -------------  -----
    psum        i         2              3              24             32   1.33
    ----------  ----  -----  -------------  --------------  -------------  -----
    total                 2              3              24             32   1.33
    both give the same numbers

    Source: JEP 17111, "Problem: efficient transpose of psum or all_gather depends on whether cotangents are
    invariant across devices".
    """
    if isinstance(f, Tape) or not callable(f):
        raise TypeError(
            f"compare takes a function, to type it both ways; got {type(f).__name__}: write compare(f, *args)"
        )
    typed = tape_of(f)(*args)
    untyped: Any = None
    leaves = tree.leaves(without_static(f, args))
    why = _not_runnable(typed, leaves)
    values = [] if why else list(map(as_value, leaves))
    try:
        with without_types():
            untyped = tape_of(f)(*args)
        other = [] if why else untyped(*values)
    except Exception as error:  # any: the program may not be written to run without types
        why = f"without types it does not run: {type(error).__name__}: {error}"
    with_types, without = price_tape(typed, is_jitted(f)), untyped and price_tape(untyped, is_jitted(f))
    if why:
        return Comparison(with_types, without, None, why)
    same = all(map(_close, typed(*values), other))
    return Comparison(with_types, without, same, "" if same else "the two do not give the same numbers")


def _not_runnable(tape: Tape, leaves: Sequence[Any]) -> str:
    """Return the reason why `compare` cannot run a program; empty if it can."""
    if any(not (hasattr(x, "__array__") or isinstance(x, (int, float, complex))) for x in leaves):
        return "not run: the arguments are types, not values"
    if any(mesh.backend != "simulated" for mesh in meshes_of(tape)):
        return "not run: that is done on simulated ranks only"
    return ""


def _close(x: Any, y: Any) -> bool:
    """Return whether two arrays are equal up to rounding: the order of summation may differ."""
    x, y = numpy.asarray(x), numpy.asarray(y)
    if not is_differentiable(x.dtype):
        return numpy.array_equal(x, y)
    tolerance = numpy.sqrt(finfo(x.dtype).eps)
    scale = numpy.abs(x).max(initial=0.0, where=numpy.isfinite(x))
    return numpy.allclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
