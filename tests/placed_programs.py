"""Tapes whose operations are placed on ranks, simulated and real: numbers of the tape, and a send for each cut."""

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.types import Var
from spmd import partition_tape
from tests.programs import assert_trees_close, run_and_count

A, B = np.random.default_rng(0).uniform(0.5, 2, size=(2, 3))

PROGRAMS = {
    # a program, its arguments
    "a formula": (lambda x, y: np.log(x) + x * y - np.sin(y), (2.0, 5.0)),
    "a chain": (lambda x: np.sqrt(np.exp(np.sin(x) + 1.0) * 2.0), (A,)),
    "values used twice": (lambda x, y: ((z := x * y) / (1.0 + z**2), np.tanh(z) @ z), (A, B)),
    "several results of one operation": (
        lambda x, y: np.divmod(x, y)[1] + np.linalg.eigh(np.outer(x, x))[0][2],
        (A, B),
    ),
    "outputs that are inputs, or constants": (lambda x, y: (x, 2.0, np.exp(y), y), (A, B)),
}


def placements(tape, ranks):
    """All on one rank, round-robin, and at random."""
    count, rng = len(tape.equations), np.random.default_rng(len(tape.equations))
    return [[ranks - 1] * count, [i % ranks for i in range(count)], rng.integers(ranks, size=count).tolist()]


def cuts(tape, placement):
    """The values that an operation on another rank uses, with that rank; and the outputs that are computed."""
    rank = {var: r for eqn, r in zip(tape.equations, placement) for var in eqn.outputs}
    needed = {(a, r) for eqn, r in zip(tape.equations, placement) for a in eqn.inputs if isinstance(a, Var)}
    return {(a, r) for a, r in needed if a in rank and rank[a] != r}, [a for a in tape.outputs if a in rank]


def check_placed(name, ranks, backend=None):
    f, args = PROGRAMS[name]
    mesh, tape = spmd.make_mesh((ranks,), ("ranks",), backend=backend), md.make_tape(f)(*args)
    for placement in placements(tape, ranks):
        placed = partition_tape(tape, placement, mesh)

        def gradient(g):
            return md.grad(lambda *args: sum(np.sum(np.cos(y)) for y in g(*args)), tuple(range(len(args))))

        expected = tape(*args), gradient(tape)(*args)
        assert_trees_close((run_and_count(placed, mesh, *args), gradient(placed)(*args)), expected)
        assert_trees_close(md.jit(gradient(placed))(*args), expected[1])
        assert_trees_close(md.jvp(placed, args, args), md.jvp(tape, args, args))
        sends, outputs = cuts(tape, placement)
        forward = {"ppermute": len(sends), "broadcast": len(outputs)} if ranks > 1 else {}
        assert spmd.communication(placed)(*args).counts == {k: v for k, v in forward.items() if v}
