"""Random numbers on simulated ranks; `tests/checks/ranks.py` has those that run on MPI ranks, too."""

import pytest

import minidiff as md
import spmd
from collectives import axis_index
from minidiff.errors import UnboundAxisError
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.programs import random_numbers as programs
from tests.programs.random_numbers import KEY


def test_blocks_are_slices_of_the_whole_draw():
    programs.check_blocks(mesh(2, 4), [P("i"), P("i", "j"), P("j", "i"), P(None, ("j", "i")), P(None, ("i", "j"))])


@each("axes", [("i", "j"), ("j", None), (("i", "j"), None)])
def test_initialize(axes):
    programs.check_initialize(mesh(2, 2), axes)


def test_no_rank_draws_the_whole():
    programs.check_that_no_rank_draws_the_whole(mesh(2, 2), "j")


def test_dropout_that_agrees_along_one_axis_and_differs_along_another():
    """Examples are split along one axis, and each has numbers of its own; along the other all ranks drop the same."""

    def body(key):
        drawn = md.random.bernoulli(md.random.fold_in(key, axis_index("i")), shape=(1, 20))
        assert str(md.typeof(drawn)) == "bool[1,20]{i}"
        return drawn

    one, two = mapped(body, mesh(2, 2), P(), P("i"))(KEY).gather()
    assert (one != two).any()


@each("shape, spec", [((3,), P("i")), ((4,), P(None, "i")), ((4,), P("j"))])
def test_specs_that_do_not_fit(shape, spec):
    draw = mapped(lambda k: md.random.bits(k, spmd.local_block(shape, spec)), mesh(2), P(), P("i"))
    for f in (draw, spmd.initialize(lambda k: md.random.normal(k, shape), mesh(2), spec)):
        with pytest.raises(ValueError):
            f(KEY)
    with pytest.raises(UnboundAxisError):
        spmd.local_block(shape, spec)
