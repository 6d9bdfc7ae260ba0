"""Values that are sharded along axes that a shard_map does not map over, on MPI ranks."""

import functools

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, psum
from collectives.guards.mismatch import DisagreementError
from spmd import P
from tests.auto_axes_programs import ARGS, MOVED, PROGRAMS, mapped, summed
from tests.programs import assert_trees_close, run_and_count
from tests.samples import check_each


@functools.cache
def mesh_of(*shape):
    return spmd.make_mesh(shape, ("i", "j"), backend="mpi")


def check_program(name, mesh):
    f, args, specs = mapped(name, mesh)
    whole = {**PROGRAMS, **MOVED}[name][2]
    outs = f(*args) if name == "a while_loop" else run_and_count(f, mesh, *args)  # the report counts one step
    assert_trees_close(md.tree.leaves(outs), md.tree.leaves(whole(*ARGS)))
    if specs is not None and mesh.shape["j"] == 2:
        assert list(map(spmd.spec_of, md.tree.leaves(outs))) == specs
    if name == "a while_loop":
        return
    gradient, expected = md.grad(summed(f), (0, 1)), md.grad(summed(whole), (0, 1))(*ARGS)
    for run in (gradient, md.jit(gradient), md.make_tape(gradient)(*args)):
        assert_trees_close(run(*args), expected)


def check_programs(mesh):
    check_each([(name, functools.partial(check_program, name, mesh)) for name in (*PROGRAMS, *MOVED)])


@pytest.mark.parallel(2)
def test_programs_on_an_axis_of_one_rank():
    check_programs(mesh_of(2, 1))


@pytest.mark.parallel(4)
def test_programs():
    check_programs(mesh_of(2, 2))


@pytest.mark.parallel(8)
def test_programs_on_an_axis_of_four_ranks():
    names = ("a contraction", "softmax", "scan", "a nested shard_map", "joining columns")
    check_each([(name, functools.partial(check_program, name, mesh_of(2, 4))) for name in names])


@pytest.mark.parallel(4)
def test_split_batches():
    mesh, (x, w) = mesh_of(2, 2), ARGS
    f = spmd.shard_map(lambda x, w: psum(np.sin(x) @ w, "i"), mesh, (P("i"), P()), P(), axis_names={"i"})
    batch = np.stack([x, x + 0.5])
    whole = lambda batch, w: (np.sin(batch) @ w)[:, :2] + (np.sin(batch) @ w)[:, 2:]  # noqa: E731
    batched = md.vmap(f, (0, None), spmd_axis_name="j")
    args = spmd.distribute(batch, mesh, P("j", "i")), w
    assert_trees_close(run_and_count(batched, mesh, *args), whole(batch, w))
    expected = md.grad(summed(whole), (0, 1))(batch, w)
    assert_trees_close(run_and_count(md.grad(summed(batched), (0, 1)), mesh, *args), expected)


@pytest.mark.parallel(2)
def test_gradients_of_a_choice_in_a_batch_of_one():
    f = spmd.shard_map(lambda x: md.cond(np.sum(x) > 0, np.sin, lambda x: x, x), mesh_of(2, 1), P(), P())
    batched, x = md.vmap(f, spmd_axis_name="j"), np.array([[0.5, 1.0]])
    assert_trees_close(md.grad(summed(batched))(x), md.grad(summed(np.sin))(x))


@pytest.mark.parallel(4)
def test_a_view_that_is_gathered_and_then_varies():
    mesh = mesh_of(1, 4)
    w = spmd.distribute(np.ones((2, 4)), mesh, P(None, "j"))
    body = lambda w: psum(np.sum(w.reshape(-1) + axis_index("i")), "i")  # noqa: E731
    assert spmd.shard_map(body, mesh, P(), P(), axis_names={"i"})(w) == 8.0


@pytest.mark.parallel(2)
def test_static_arguments_are_compared():
    mesh = mesh_of(2, 1)
    f = spmd.shard_map(lambda x, n, g: g(x) * n, mesh, (P("i"), None, None), P("i"))
    for n in (2, 3, 2):
        assert_trees_close(f(ARGS[0], n, lambda x: -x), -n * ARGS[0])
    with pytest.raises(DisagreementError, match=r"static arguments: 1[\s\S]*All ranks pass the same static arguments"):
        f(ARGS[0], spmd.process_index(), abs)
