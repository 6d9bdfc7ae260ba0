"""Results of programs, compared, made by one rank, and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd


def assert_trees_close(actual: Any, expected: Any, **tolerances: float) -> None:
    """Leaf by leaf, with paths in the message."""
    for (path, a), e in zip(md.tree.flatten_with_paths(actual)[0], md.tree.leaves(expected), strict=True):
        a = a.gather() if isinstance(a, spmd.ShardedArray) else a
        np.testing.assert_allclose(a, e, err_msg=f"at {path}", **{"rtol": 1e-9, "atol": 1e-12, **tolerances})


def equations(tape: md.Tape) -> Iterator:
    """All equations, also of bodies."""
    for eqn in tape.equations:
        yield eqn
        for body in eqn.bodies:
            yield from equations(body)


def by_rank_0(make: Callable[[], Any]) -> Any:
    """Return or raise on all MPI ranks the outcome of `make()` on rank 0; the others sleep meanwhile."""
    result = error = None
    if MPI.COMM_WORLD.rank == 0:
        try:
            result = make()
        except Exception as raised:
            error = raised
    is_made = MPI.COMM_WORLD.Ibarrier()
    while not is_made.Test():
        time.sleep(1e-3)
    result, error = MPI.COMM_WORLD.bcast((result, error))
    if error is not None:
        raise error
    return result


def run_and_count(f: Callable, mesh: spmd.Mesh, *args: Any) -> Any:
    """The result of `f`, having checked that it communicated as its report says.

    With branches it may be less. Of a loop, the report is about its tape, in which all steps are alike: one that is run
    step by step may need no cotangent for what it starts with, and sums in each step what its constants make.
    """
    mesh.reset_calls()
    out, tape = f(*args), md.make_tape(f)(*args)
    if "scan(" in str(tape):
        mesh.reset_calls()
        tape(*md.tree.leaves(args))
    report, sent = spmd.communication(tape), sum(mesh.bytes.values())
    if report.notes:
        assert sent <= report.bytes
    else:
        assert (mesh.calls, sent) == (report.counts, report.bytes)
    return out
