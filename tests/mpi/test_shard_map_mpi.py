"""shard_map on MPI ranks: the same numbers, types and communication as on simulated ones."""

import functools

import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean, psum
from spmd import P
from tests.programs import STEPS, Program, assert_trees_close, example, run_and_count
from tests.spmd.test_shard_map import check_numbers

RANKS = MPI.COMM_WORLD.size
SHAPES = {1: [(1,)], 2: [(2,)], 3: [(3,)], 4: [(2, 2)], 8: [(2, 2, 2)]}
everywhere = pytest.mark.parallel([1, 2, 3, 4, 8])


@functools.cache
def mesh_of(shape, backend="mpi"):
    return spmd.make_mesh(shape, ("i", "j", "k")[: len(shape)], backend=backend)


def meshes():
    return [mesh_of(shape) for shape in SHAPES[RANKS]]


@everywhere
def test_programs_equal_the_unsharded_function():
    """Each step in turn, after another: values, gradients, tangents, typed and untyped, and the calls made."""
    names = sorted(STEPS)
    for k, name in enumerate(names):
        program = Program([name, names[(5 * k + 1) % len(names)]])
        args, whole = example(program, rows=RANKS, seed=k), program.whole(RANKS)
        expected, expected_tangents = md.value_and_grad(whole, (0, 1))(*args), md.jvp(whole, args, args)
        for mesh in meshes():
            axes = tuple(reversed(mesh.axis_names))
            for options in ({}, {"check_rep": False}) if RANKS < 8 else ({},):
                loss = program.sharded(mesh, axes, closed_over=k % 2 == 0, **options)
                assert_trees_close(run_and_count(md.value_and_grad(loss, (0, 1)), mesh, *args), expected)
            tangents = run_and_count(lambda *xs, loss=loss: md.jvp(loss, xs, xs), mesh, *args)
            assert_trees_close(tangents, expected_tangents)


@everywhere
def test_second_derivatives():
    for mesh in meshes():
        program = Program(["a parameter twice", "add the column sums", "gather, and sum back"])
        args = example(program, rows=mesh.size, seed=0)

        def along_gradient(loss, args=args):
            return lambda x, params: md.jvp(md.grad(loss, (0, 1)), (x, params), args)[1]

        sharded = along_gradient(program.sharded(mesh, mesh.axis_names, closed_over=True))
        assert_trees_close(run_and_count(sharded, mesh, *args), along_gradient(program.whole(mesh.size))(*args))


@everywhere
def test_ranks_agree_with_simulated_ranks():
    """Block by block, for results mapped in every way."""
    for mesh in meshes():
        simulated = mesh_of(tuple(mesh.shape.values()), "simulated")
        last = mesh.axis_names[-1]

        def body(x, last=last):
            return np.sin(x) + psum(x, last)

        x = np.arange(8.0 * 8).reshape(8, 8) if mesh.size != 3 else np.arange(36.0).reshape(6, 6)
        for spec in (P(mesh.axis_names), P(None, last), P(last), P(tuple(reversed(mesh.axis_names)), None)):
            results = [spmd.shard_map(body, mesh=m, in_specs=spec, out_specs=spec)(x) for m in (mesh, simulated)]
            np.testing.assert_allclose(results[0].local, results[1].local[mesh.rank])
            np.testing.assert_allclose(results[0].gather(), results[1].gather())


@everywhere
def test_one_psum_for_all_parameters():
    params, x = {"w": np.ones((3, 3)), "b": np.ones(3)}, np.ones((2 * RANKS, 3))
    for mesh in meshes():

        def loss(params, x, mesh=mesh):
            def body(x):
                return pmean(np.sum(np.tanh(x @ params["w"] + params["b"]) @ params["w"].T), mesh.axis_names)

            return spmd.shard_map(body, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P())(x)

        run_and_count(md.grad(loss), mesh, params, x)
        assert mesh.calls == ({"psum": 2} if RANKS > 1 else {})  # the loss, and the gradients of both parameters


@everywhere
def test_printing_shows_this_rank(capsys):
    mesh = mesh_of((RANKS,))
    spmd.shard_map(lambda x: print(x) or x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(np.arange(RANKS))
    shown = capsys.readouterr().out
    assert shown == f"On rank {mesh.rank} at mesh coordinates (i,) = ({mesh.rank},):\n[{mesh.rank}]\n\n"


@everywhere
def test_branching_on_what_all_ranks_know():
    mesh = mesh_of((RANKS,))

    def body(x):
        steps = 0
        while psum(x.sum(), "i") < 100:
            x, steps = 2 * x, steps + 1
        return x / 2**steps

    f = spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    np.testing.assert_array_equal(f(np.ones(RANKS)).gather(), np.ones(RANKS))
    with pytest.raises(md.VarianceError, match="varies along 'i'"):
        spmd.shard_map(lambda x: x if x[0] else -x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(np.ones(RANKS))


@everywhere
def test_a_sharded_array_is_a_block_here():
    mesh = mesh_of((RANKS,))
    x = np.arange(2.0 * RANKS)
    y = spmd.shard_map(lambda x: x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)
    np.testing.assert_array_equal((2 * y + y).local, 3 * x[2 * mesh.rank : 2 * mesh.rank + 2])
    np.testing.assert_array_equal(y.gather(), x)
    np.testing.assert_array_equal(y @ x, x @ x)  # a product of parts, summed
    if RANKS > 1:
        with pytest.raises(ValueError, match=r"is split over the ranks of .*Call .gather\(\) on every rank"):
            np.asarray(y)
    else:
        np.testing.assert_array_equal(np.asarray(y), x)


@everywhere
def test_a_mesh_of_some_of_the_ranks():
    """A mesh takes the ranks of the communicator it is given."""
    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    mesh = spmd.make_mesh((half.size,), ("i",), comm=half)
    total = spmd.shard_map(lambda x: psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    np.testing.assert_array_equal(total(np.ones(half.size)), [half.size])
    with pytest.raises(ValueError, match=f"needs {RANKS + 1} ranks, but MPI has {RANKS}"):
        spmd.make_mesh((RANKS + 1,), ("i",), backend="mpi")


@everywhere
def test_meshes_that_are_alike_share_communicators():
    """MPI has a few thousand of them: a script may make a mesh in every step."""
    one, two = (spmd.make_mesh((RANKS,), ("i",), backend="mpi") for _ in range(2))
    for mesh in (one, two):
        spmd.shard_map(lambda x: psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())(np.ones(RANKS))
    assert one.ranks.along(("i",)) is two.ranks.along(("i",))
    assert one.calls == two.calls == ({"psum": 1} if RANKS > 1 else {})  # what they count is their own


@pytest.mark.parallel([1, 2])
def test_results_without_dimensions_are_numbers():
    check_numbers(spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",), backend="mpi"))


@pytest.mark.parallel([2])
def test_python_numbers_promote_as_in_numpy():
    x = np.arange(4, dtype="f4")
    expected = (x[:2] + x[2:]) * np.float32(0.1)
    mesh = spmd.make_mesh((2,), ("i",), backend="mpi")
    for in_spec in (P(), P("i")):  # the whole of x, or blocks of it that are summed
        body = lambda s, x, whole=in_spec == P(): (x[:2] + x[2:] if whole else psum(x, "i")) * s  # noqa: E731
        f = spmd.shard_map(body, mesh=mesh, in_specs=(P(), in_spec), out_specs=P())
        for g in (f, md.jit(f), lambda s, x, f=f: md.value_and_grad(lambda x: f(s, x).sum(), has_aux=False)(x)[0]):
            found = g(0.1, x)
            assert found.dtype == "f4"
            np.testing.assert_array_equal(found, expected if found.shape else expected.sum())
