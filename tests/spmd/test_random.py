"""Random numbers on simulated ranks."""

import pytest

import minidiff as md
import spmd
from collectives import axis_index
from minidiff.errors import UnboundAxisError
from spmd import P
from tests.programs import random_numbers as random_programs
from tests.programs.random_numbers import KEY, mesh_for


def test_blocks_are_slices_of_the_whole_draw():
    mesh = spmd.make_mesh((2, 4), ("i", "j"), backend="simulated")
    random_programs.check_blocks(mesh, [P("i"), P("i", "j"), P("j", "i"), P(None, ("j", "i")), P(None, ("i", "j"))])


def test_initialize():
    mesh = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
    for axes in (("i", "j"), ("j", None), (("i", "j"), None)):
        random_programs.check_initialize(mesh, axes)
    random_programs.check_that_no_rank_draws_the_whole(mesh, "j")


def test_initialize_with_specs_that_do_not_fit():
    mesh = mesh_for(2, "simulated")[0]
    for spec, message in (
        (P("i"), "cannot be split evenly"),
        (P("j"), "names the axis 'j'"),
        (P(None, "i"), "entries"),
    ):
        with pytest.raises(ValueError, match=message):
            spmd.initialize(lambda k: md.random.normal(k, (3,)), mesh, spec)(KEY)


def test_dropout_that_agrees_along_one_axis_and_differs_along_another():
    """Examples are split along one axis, and each has numbers of its own; along the other all ranks drop the same."""
    mesh = spmd.make_mesh((2, 2), ("batch", "feats"), backend="simulated")

    def body(key):
        saved = md.random.bernoulli(md.random.fold_in(key, axis_index("batch")), shape=(1, 20))
        assert str(md.typeof(saved)) == "bool[1,20]{batch}"
        return saved

    one, two = spmd.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("batch"))(KEY).gather()
    assert (one != two).any()


def test_wrong_blocks():
    with pytest.raises(UnboundAxisError, match=r"local_block\(\(4,\), P\('i'\)\) needs mesh axes: call it in the body"):
        spmd.local_block((4,), P("i"))
    mesh = mesh_for(2, "simulated")[0]
    for shape, spec in (((3,), P("i")), ((4,), P(None, "i")), ((4,), P("j"))):
        f = spmd.shard_map(lambda k, a=(shape, spec): md.random.bits(k, spmd.local_block(*a)), mesh, P(), P("i"))
        with pytest.raises(ValueError, match=r"spec = P\("):
            f(KEY)
