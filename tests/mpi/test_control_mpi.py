"""Control flow in bodies on MPI ranks: the same numbers as Python's own on simulated ones."""

import functools

import pytest

import minidiff as md
import spmd
from tests.control_programs import ARGS, RANKS, Unrolled, on_ranks
from tests.programs import assert_trees_close


@functools.cache
def mesh_on(backend):
    return spmd.make_mesh((2, 2), ("i", "j"), backend=backend)


def loss(f):
    return lambda *args: sum((x * x).sum() for x in f(*args))


@pytest.mark.parallel(4)
@pytest.mark.parametrize("check_rep", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("name", RANKS)
def test_as_simulated(name, check_rep):
    f = on_ranks(RANKS[name], md, mesh_on("mpi"), check_rep=check_rep)
    meaning = on_ranks(RANKS[name], Unrolled, mesh_on("simulated"), check_rep=check_rep)
    assert_trees_close(md.jit(f)(*ARGS), md.tree.leaves(meaning(*ARGS)))
    for run in (f, md.make_tape(f)(*ARGS)):
        assert_trees_close(md.jvp(run, ARGS, ARGS), md.tree.leaves(md.jvp(meaning, ARGS, ARGS)))
        if name != "while_loop":
            gradient, expected = md.value_and_grad(loss(run), (0, 1)), md.value_and_grad(loss(meaning), (0, 1))(*ARGS)
            assert_trees_close(gradient(*ARGS), expected)
            assert_trees_close(md.jit(gradient)(*ARGS), expected)
            assert_trees_close(md.make_tape(gradient)(*ARGS)(*ARGS), md.tree.leaves(expected))
