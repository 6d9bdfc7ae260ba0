"""Ranks that choose their own branch, on MPI ranks: each runs its branch alone, and none waits for another."""

import functools

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, psum
from spmd import P
from tests.branch_programs import (
    BY_ELEMENT,
    OTHER_AXES,
    PROGRAMS,
    RANKS,
    WEIGHT,
    W,
    X,
    elements_for_ranks,
    elements_on_ranks,
    elements_whole,
    loss,
    on_ranks,
    pipeline,
    pipeline_batch,
    pipeline_params,
    pipeline_whole,
    total,
    whole,
)
from tests.programs import assert_trees_close


@functools.cache
def line(size=RANKS, name="i"):
    return spmd.make_mesh((size,), (name,), backend="mpi")


def check(f, expected, *args):
    expected = md.tree.leaves(expected(*args))
    tape = md.make_tape(f)(*args)
    tape.check()
    for found in (f(*args), tape(*md.tree.leaves(args)), md.jit(f)(*args)):
        assert_trees_close(md.tree.leaves(found), expected)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_rank_takes_its_branch(name):
    f, expected = on_ranks(PROGRAMS[name], line()), whole(PROGRAMS[name])
    check(f, expected, W, X)
    check(md.grad(loss(f), (0, 1)), md.grad(loss(expected), (0, 1)), W, X)
    second = lambda f: md.grad(lambda w, x: sum((g**2).sum() for g in md.grad(loss(f), (0, 1))(w, x)))  # noqa: E731
    check(second(f), second(expected), W, X)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("name", BY_ELEMENT)
def test_elements_of_a_batch_on_each_rank(name):
    """Each element as if it were alone, also on ranks of which no element takes a branch."""
    args = WEIGHT, elements_for_ranks(name)
    expected = md.grad(total(elements_whole(name)), (0, 1))
    for split in (True, False):
        check(md.grad(total(elements_on_ranks(name, line(2), split)), (0, 1)), expected, *args)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("name", OTHER_AXES)
def test_an_axis_along_which_ranks_choose_alike(name):
    """The mesh is new: all ranks make its communicators, whichever branch they take."""
    on, expected = OTHER_AXES[name]
    fresh = lambda w, x: on(spmd.make_mesh((2, 2), ("i", "j"), backend="mpi"))(w, x)  # noqa: E731
    check(fresh, expected, W, X)
    check(md.grad(loss(fresh), (0, 1)), md.grad(loss(expected), (0, 1)), W, X)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("groups", [[[0], [1]], [[1, 0]]], ids=str)
def test_in_groups_along_the_other_axis(groups):
    mesh = spmd.make_mesh((2, 2), ("i", "j"), backend="mpi")
    among = lambda x: psum(x, "j", axis_index_groups=groups)  # noqa: E731
    body = lambda x: md.cond(axis_index("i") > 0, among, lambda x: -x, x)  # noqa: E731
    f = spmd.shard_map(body, mesh=mesh, in_specs=P(("i", "j")), out_specs=P(("i", "j")))
    second = X[4:] if len(groups) == 2 else np.tile(X[4:6] + X[6:], 2)
    check(f, lambda x: np.concatenate([-X[:4], second]), X)


def a_pipeline(stages):
    params, batch = pipeline_params(stages), pipeline_batch(3)
    f = lambda params: pipeline(line(stages, "stage"))(params, *batch)  # noqa: E731
    expected = lambda params: pipeline_whole(params, *batch)  # noqa: E731
    check(f, expected, params)
    check(md.value_and_grad(f), md.value_and_grad(expected), params)


@pytest.mark.parallel(2)
def test_a_pipeline_of_two():
    a_pipeline(2)


@pytest.mark.parallel(4)
def test_a_pipeline_of_four():
    a_pipeline(4)


@pytest.mark.parallel(2)
def test_a_branch_that_communicates_raises_on_all_ranks():
    body = lambda x: md.cond(axis_index("i") > 0, lambda: psum(x, "i"), lambda: x)  # noqa: E731
    f = spmd.shard_map(body, mesh=line(2), in_specs=P("i"), out_specs=P("i"))
    for run in (f, md.jit(f)):
        with pytest.raises(md.VarianceError, match="true_fun has a psum over 'i'"):
            run(X)


@pytest.mark.parallel(2)
def test_arrays_are_compared_by_all_ranks():
    """Also those that only one branch closes over."""
    constant = np.array([2.0, 3.0, 4.0, 5.0])
    body = lambda x: md.cond(axis_index("i") > 0, lambda: x * np.sin(constant), lambda: x)  # noqa: E731
    mapped = spmd.shard_map(body, mesh=line(2), in_specs=P("i"), out_specs=P("i"))
    with spmd.checking():
        assert_trees_close(mapped(X), [np.concatenate([X[:4], X[4:] * np.sin(constant)])])


@pytest.mark.parallel(2)
def test_only_the_ranks_of_a_branch_print(capsys):
    def loud(x):
        md.debug.print("here")
        return x

    body = lambda x: md.cond(axis_index("i") > 0, loud, lambda x: x, x)  # noqa: E731
    f = spmd.shard_map(body, mesh=line(2), in_specs=P("i"), out_specs=P("i"))
    for run in (f, md.jit(f)):
        run(X)
        assert capsys.readouterr().out.count("here") == line(2).rank
