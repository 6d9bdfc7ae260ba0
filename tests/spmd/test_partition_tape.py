"""Operations of a tape that are placed on ranks: numbers of the tape, a send for each cut edge."""

import math

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import partition_tape
from tests import placed_programs as programs

F, ARGS = programs.PROGRAMS["a formula"]
TAPE = md.make_tape(F)(*ARGS)
PAIR = spmd.make_mesh((2,), ("ranks",), backend="simulated")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_placed_operations_are_those_of_the_tape(name, ranks):
    programs.check_placed(name, ranks, "simulated")


@pytest.mark.parametrize("placement, sends", [([0, 0, 0, 0, 0], 0), ([0, 0, 0, 1, 0], 1), ([0, 1, 0, 1, 1], 2)])
def test_a_formula_on_two_ranks(placement, sends):
    """ln x + x y - sin y: what goes one way forward goes the other way backward, over the same edges."""
    placed = partition_tape(TAPE, placement, PAIR)
    np.testing.assert_allclose(placed(*ARGS)[0], math.log(2) + 10 - math.sin(5))
    gradient = md.grad(lambda *args: placed(*args)[0], (0, 1))
    np.testing.assert_allclose(gradient(*ARGS), [5.5, 2 - math.cos(5)])
    rows = spmd.communication(gradient)(*ARGS).rows
    for direction in ("forward", "backward"):
        found = [row.count for row in rows if (row.collective, row.direction) == ("ppermute", direction)]
        assert sum(found) == sends


def test_a_value_is_sent_once_to_a_rank():
    tape = md.make_tape(lambda x: (y := np.exp(x)) * np.sin(y) + y)(1.0)
    placed = partition_tape(tape, [0, 1, 1, 1], PAIR)
    assert spmd.communication(placed)(1.0).counts == {"ppermute": 1, "broadcast": 1}


def test_what_does_not_fit():
    plane = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
    with pytest.raises(ValueError, match="placement has 2 ranks: give one for each of the 5 equations"):
        partition_tape(TAPE, [0, 1], PAIR)
    with pytest.raises(ValueError, match="placement: rank 2 is not an index along 'ranks', which has 2 ranks"):
        partition_tape(TAPE, [0, 1, 2, 0, 1], PAIR)
    with pytest.raises(ValueError, match=r"a mesh with one axis, such as .*; got Mesh"):
        partition_tape(TAPE, [0] * 5, plane)
    loop = md.make_tape(lambda x: md.fori_loop(0, 3, lambda i, x: np.sin(x), x))(1.0)
    with pytest.raises(ValueError, match="has a body, which was recorded for values that are the same on all ranks"):
        partition_tape(loop, [0] * len(loop.equations), PAIR)
    with pytest.raises(TypeError, match=r"takes a tape, got function: write make_tape\(f\)"):
        partition_tape(F, [0] * 5, PAIR)
