"""shard_map inside the body of another, on MPI ranks: the same numbers, and as much sent, as on simulated ones."""

import functools

import pytest

import minidiff as md
import spmd
from tests.nested_programs import NESTED, NESTED_ARGS, one_by_one, summed, two_levels
from tests.programs import STEPS, Program, assert_trees_close, example, run_and_count


@functools.cache
def mesh_on(backend="mpi", shape=(2, 2), names=("i", "j")):
    return spmd.make_mesh(shape, names, backend=backend)


@pytest.mark.parallel(4)
def test_one_axis_after_the_other():
    names = sorted(STEPS)
    for k, name in enumerate(names):
        program = Program([name, names[(5 * k + 1) % len(names)]])
        args, whole = example(program, rows=4, seed=k), program.whole(4)
        expected, expected_tangents = md.value_and_grad(whole, (0, 1))(*args), md.jvp(whole, args, args)
        axes = ("i", "j") if k % 3 else ("j", "i")
        for typed in (True, False):
            loss = program.sharded(mesh_on(), axes, k % 2 == 0, one_by_one(*[(a,) for a in axes]), check_rep=typed)
            assert_trees_close(run_and_count(md.value_and_grad(loss, (0, 1)), mesh_on(), *args), expected)
            tangents = run_and_count(lambda *xs, loss=loss: md.jvp(loss, xs, xs), mesh_on(), *args)
            assert_trees_close(tangents, expected_tangents)


@pytest.mark.parallel(8)
def test_three_levels():
    mesh = mesh_on(shape=(2, 2, 2), names=("i", "j", "k"))
    program = Program(["add the column sums", "gather, and sum back", "shift"])
    args = example(program, rows=8, seed=0)
    loss = program.sharded(mesh, ("k", "i", "j"), True, one_by_one(("k",), ("i",), ("j",)))
    expected = md.value_and_grad(program.whole(8), (0, 1))(*args)
    assert_trees_close(run_and_count(md.value_and_grad(loss, (0, 1)), mesh, *args), expected)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("name", NESTED)
def test_programs(name, typed):
    on_blocks, whole = NESTED[name]
    f, args = two_levels(on_blocks, mesh_on(), typed), NESTED_ARGS
    assert_trees_close(f(*args), md.tree.leaves(whole(*args)))
    gradient, expected = md.grad(summed(f), (0, 1)), md.grad(summed(whole), (0, 1))(*args)
    for run in (gradient, md.make_tape(gradient)(*args), md.jit(gradient)):
        assert_trees_close(run(*args), md.tree.leaves(expected))
    if name == "within":
        return
    second = lambda f: md.grad(lambda w, x: (md.grad(summed(f))(w, x) ** 2).sum(), (0, 1))  # noqa: E731
    assert_trees_close(second(f)(*args), second(whole)(*args), rtol=1e-7)
