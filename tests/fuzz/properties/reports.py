"""Reports of communication, held against what the backend counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import minidiff as md
import spmd

Counts = dict[str, tuple[int, int]]  # by collective: calls and bytes


def counts_of(report: Any) -> Counts:
    """The calls and bytes of each collective in a report of communication."""
    return {name: sums for (name,), sums in report.sums(lambda row: (row.collective,)).items()}


def asked_for(mesh: Any, run: Callable[[], Any]) -> Counts:
    """The calls and bytes of each collective that a run asks the backend for."""
    mesh.reset_calls()
    run()
    return {name: (calls, mesh.bytes[name]) for name, calls in mesh.calls.items()}


def check_reports(mesh: Any, f: Callable, args: Sequence[Any], options: dict, eager: bool) -> None:
    """Raise AssertionError where a report of `f(*args)` differs from what the backend is asked for.

    That is where it runs as a tape, compiled with these options, and op by op if `eager`. Where the numbers depend on
    values, the report has to say so.
    """

    def agree(label: str, report: Any, run: Callable[[], Any]) -> None:
        reported, asked = counts_of(report), asked_for(mesh, run)
        assert reported == asked or report.notes, f"{label}: reported {reported}, asked for {asked}"

    tape = md.make_tape(f)(*args)
    agree("a tape", spmd.communication(tape), lambda: tape(*md.tree.leaves(args)))
    g, call = md.jit(f, **options), lambda *args: g(*args)
    g(*args)  # compiles
    compiled = spmd.communication(g)(*args)
    for label, report in (
        ("compiled", compiled),
        ("compiled, optimized=True", spmd.communication(g, optimized=True)(*args)),
        ("called by a function", spmd.communication(call)(*args)),
    ):
        agree(label, report, lambda: g(*args))
    if eager:
        agree("op by op", spmd.communication(f)(*args), lambda: f(*args))
    reported = counts_of(compiled)
    assert counts_of(spmd.compare(call, *args).typed) == reported, "compare of a call"
    assert counts_of(spmd.compare(g, *args).typed) == reported, "compare differs from communication"
    prediction, predicted = spmd.predict(g, spmd.machines.A100)(*args), {}
    for key, entry in prediction.cost.entries.items():
        if key.axes:
            calls, nbytes = predicted.get(key.operation, (0, 0))
            predicted[key.operation] = calls + round(entry.count), nbytes + round(entry.bytes)
    reported = counts_of(spmd.communication(spmd.rewritten(g)(*args)))  # before short loops are unrolled
    assert predicted == reported or prediction.notes, f"predicted {predicted}, reported {reported}"


def check_steps(mesh: Any, f: Callable, x: Any) -> None:
    """Raise AssertionError unless the while_loop in `f(x, steps)` is counted for one step, and the report says so.

    Its condition sends nothing.
    """
    tape, g = md.make_tape(f)(x, 1), md.jit(f)
    g(x, 1)  # compiles
    for report, run in ((spmd.communication(f)(x, 1), tape), (spmd.communication(g)(x, 1), g)):
        none, one, two = (asked_for(mesh, functools.partial(run, x, n)) for n in range(3))
        expected = {}
        for name in two:
            before, a, b = (counts.get(name, (0, 0)) for counts in (none, one, two))
            expected[name] = tuple(x + z - y for x, y, z in zip(before, a, b))
        expected = {name: pair for name, pair in expected.items() if pair != (0, 0)}
        assert counts_of(report) == expected, f"reported {counts_of(report)}, asked for {expected} in one step"
        assert one == none or any("how many steps a while_loop takes" in note for note in report.notes), report.notes
