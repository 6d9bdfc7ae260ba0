"""Tapes whose operations are placed on ranks: sends, and placements that are computed. See tests/checks/ranks.py."""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd.examples.placement import list_schedule, partition_tape
from tests.checks.meshes import mesh
from tests.programs.placement import FORMULA, POINT

TWO = mesh(2)


def test_the_formula_on_two_ranks():
    """log, multiply and add on the first rank, sin and subtract on the second: the sum is sent, its cotangent back."""
    f = partition_tape(FORMULA, [0, 0, 0, 1, 1], TWO)
    gradient = md.grad(lambda x, y: f(x, y)[0], argnums=(0, 1))
    numpy.testing.assert_allclose(gradient(*POINT), (5.5, 2.0 - np.cos(5.0)), rtol=1e-12)
    sends = [row for row in spmd.communication(gradient)(*POINT).rows if row.collective == "ppermute"]
    assert [(row.direction, row.count, row.bytes) for row in sends] == [("forward", 1, 8), ("backward", 1, 8)]


def test_list_schedule():
    """Independent chains go to different ranks if it pays; a slow network keeps all on one."""
    x, chain = np.ones((32, 32)), lambda a: np.sum(np.tanh(a @ a) @ a)
    tape = md.make_tape(lambda a, b: chain(a) + chain(b))(x, x)
    fast, slow = (list_schedule(tape, 2, spmd.CostModel(alpha, 1e-10)) for alpha in (1e-7, 1.0))
    alone = list_schedule(tape, 1)
    assert len({*fast.placement}) == 2 and fast.seconds < 0.6 * alone.seconds
    assert slow.seconds <= alone.seconds * (1 + 1e-12)
    first, second, total = str(fast).splitlines()
    assert first.startswith("rank 0 |[matmul") and second.startswith("rank 1 |[matmul") and "in all" in total
    for a, eqn in zip(fast.operations, tape.equations):
        assert a.name == eqn.primitive.name and a.end > a.start
        assert not any(b.lane == a.lane and b.start < a.end and a.start < b.end for b in fast.operations if b is not a)
    assert fast.lines.seconds[None]["compute"] == max(map(fast.busy, (0, 1)))  # this tape keeps no lines
    assert {(e["pid"], e["tid"]) for e in fast.trace_events()} == {(0, 0), (1, 0)}
    f = partition_tape(tape, fast.placement, TWO)
    numpy.testing.assert_allclose(f(0.1 * x, 0.2 * x)[0], tape(0.1 * x, 0.2 * x)[0])
