"""Fewer collectives on real ranks: MPI's own calls are counted, their order is looked at, and nothing hangs."""

import functools
import math

import numpy as np
import pytest

import minidiff as md
import spmd
from collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    pmax,
    pmean,
    ppermute,
    pscatter,
    psum,
    psum_scatter,
)
from collectives.passes import SETTINGS
from spmd import P
from tests.collectives.passes.test_rewrites import data, data_parallel, lowered, parameters
from tests.programs import assert_trees_close
from tests.rewrite_programs import INSTRUCTIONS

RANKS = pytest.mark.parallel([2, 4])
REDUCING = ("Allreduce", "Iallreduce", "Reduce_scatter_block")


class Counted:
    """A communicator that takes note of how it is asked to reduce: `calls` are names, and numbers of entries."""

    def __init__(self, comm, calls):
        self.comm = comm
        self.calls = calls

    def __getattr__(self, name):
        found = getattr(self.comm, name)
        if name not in REDUCING:
            return found

        def call(*args):
            self.calls.append((name, args[1].size))
            return found(*args)

        return call


@functools.cache
def mesh_of_all():
    from mpi4py import MPI

    return spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",))


@pytest.fixture
def counted(monkeypatch):
    mesh, calls = mesh_of_all(), []
    along = mesh.ranks.along
    monkeypatch.setattr(mesh.ranks, "along", lambda axes: Counted(along(axes), calls), raising=False)
    return mesh, calls


def the_same_on_all(x):
    from mpi4py import MPI

    everywhere = MPI.COMM_WORLD.allgather(x)
    assert all(y == everywhere[0] for y in everywhere)


@RANKS
def test_one_all_reduce_for_the_loss_and_all_parameters(counted):
    mesh, calls = counted
    params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))
    step = md.value_and_grad(data_parallel(mesh))
    expected = step(params, x)
    compiled, entries = md.jit(step), 1 + sum(w.size + b.size for w, b in params)
    assert calls == [("Allreduce", 1), ("Allreduce", entries - 1)]  # without jit, the loss has gone before
    for _ in range(3):
        calls.clear()
        assert_trees_close(compiled(params, x), expected)
        assert [n for _, n in calls] == [entries]
    assert_trees_close(compiled(params, x), data_parallel_reference(params, x))


def data_parallel_reference(params, x):
    def loss(params, x):
        for w, b in params:
            x = np.tanh(x @ w + b)
        return (x**2).sum()

    return md.value_and_grad(loss)(params, x)


@RANKS
@pytest.mark.parametrize("size", [200, 400, 600])
def test_buckets_are_on_their_way_at_once(counted, size):
    """Several, none larger than it may be; begun before any is waited for, in one order on all ranks."""
    mesh, calls = counted
    params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))
    compiled = md.jit(md.value_and_grad(data_parallel(mesh)), bucket_bytes=size)
    (text,) = lowered(compiled, params, x)
    calls.clear()
    out = compiled(params, x)
    assert_trees_close(out, data_parallel_reference(params, x))
    assert len(calls) >= 2 and {name for name, _ in calls} <= {"Iallreduce", "Allreduce"}
    assert "Iallreduce" in dict(calls)
    largest = max(w.size for w, _ in params)
    assert all(n * 8 <= size or n <= largest for _, n in calls)
    the_same_on_all(calls)
    the_same_on_all(text)
    assert not mesh.ranks._started


@RANKS
@pytest.mark.parametrize("size, buckets", [(1, 6), (400, 3), (None, 1)])
def test_buckets_of_a_gradient_that_is_not_compiled(counted, monkeypatch, size, buckets):
    """Summed at the end, one call for each."""
    mesh, calls = counted
    if size is not None:
        monkeypatch.setitem(SETTINGS, "bucket_bytes", size)
    params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))
    out = md.value_and_grad(data_parallel(mesh))(params, x)
    assert [name for name, _ in calls] == ["Allreduce"] * (1 + buckets)
    assert sum(n for _, n in calls) == 1 + sum(w.size + b.size for w, b in params)
    assert_trees_close(out, data_parallel_reference(params, x))
    the_same_on_all(calls)
    assert not mesh.ranks._started


@RANKS
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex128", "int32", "int8"])
def test_values_of_all_dtypes(counted, dtype):
    mesh, calls = counted
    n = mesh.size

    def body(x):
        return psum(x, "i"), psum(x[0], "i"), psum(x[:, :0], "i"), psum(x.sum().astype(x.dtype), "i"), x + x

    f = spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=(P(), P(), P(), P(), P("i")))
    x = np.arange(6 * n).reshape(2 * n, 3).astype(dtype)
    compiled = md.jit(f)
    compiled(x)
    calls.clear()
    outs = compiled(x)
    assert len(calls) == 1
    total = x.reshape(n, 2, 3).sum(0).astype(dtype)
    np.testing.assert_array_equal(outs[0], total)
    np.testing.assert_array_equal(outs[1], total[0])
    assert outs[2].shape == (2, 0)
    np.testing.assert_array_equal(outs[3], x.sum().astype(dtype))
    assert {y.dtype for y in outs[:4]} == {np.dtype(dtype)}


@RANKS
def test_what_is_on_its_way_is_not_written_into(counted):
    """A large array, whose memory later results could take, is MPI's until the sum is waited for."""
    mesh, _ = counted

    def body(x):
        y = np.sin(x)
        total = psum(y, "i")
        z = np.cos(np.exp(np.tanh(x) * 2) + 1)
        return total, z

    f = spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=(P(), P("i")))
    x = data("float64", (400 * mesh.size, 100))
    compiled = md.jit(f)
    assert "psum_start" in lowered(compiled, x)[0]
    for _ in range(3):
        total, z = compiled(x)
        np.testing.assert_allclose(total, np.sin(x).reshape(mesh.size, 400, 100).sum(0))
        np.testing.assert_allclose(z.gather(), np.cos(np.exp(np.tanh(x) * 2) + 1))


@RANKS
def test_an_error_while_sums_are_on_their_way(counted):
    mesh, _ = counted

    def body(x):
        total = psum(x, "i")
        return np.linalg.inv(x) @ x, total

    f = md.jit(spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=(P("i"), P())))
    x = np.concatenate([np.eye(3)] * mesh.size).reshape(-1, 3)
    assert "psum_start" in lowered(f, x)[0]
    bad = x.copy()
    bad[:] = 0
    for _ in range(3):
        with pytest.raises(np.linalg.LinAlgError):
            f(bad)
        assert not mesh.ranks._started
        np.testing.assert_array_equal(f(x)[1], mesh.size * np.eye(3))


@RANKS
def test_an_error_on_one_rank_alone(counted):
    """The others have begun the same sums: they end, and the rank that failed can go on."""
    mesh, _ = counted

    def body(x):
        total = psum(x, "i")
        return np.linalg.inv(x), total

    f = md.jit(spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=(P("i"), P())))
    x = np.concatenate([np.eye(3)] * mesh.size).reshape(-1, 3)
    f(x)
    bad = x.copy()
    bad[:3] = 0
    if mesh.rank == 0:
        with pytest.raises(np.linalg.LinAlgError):
            f(bad)
    else:
        f(bad)
    assert not mesh.ranks._started
    np.testing.assert_array_equal(f(x)[1], mesh.size * np.eye(3))


@RANKS
def test_each_instruction():
    """What is done that need not be, on ranks: the same values compiled as not, and no more calls."""
    mesh = mesh_of_all()
    n = mesh.size
    x, w = data("float64", (12 * n, 2)), data("float64", (12, 2), 1)
    for name, instruction in INSTRUCTIONS.items():

        def body(x, w, instruction=instruction):
            return instruction(instruction(x, w, ("i",), n) + np.cos(x), np.sin(w), ("i",), n)

        f = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
        loss = lambda x, w, f=f: (f(x, w) ** 2).sum()  # noqa: E731
        for g in (f, md.grad(loss, (0, 1))):
            mesh.reset_calls()
            expected = g(x, w)
            eager, compiled = dict(mesh.calls), md.jit(g)
            compiled(x, w)
            mesh.reset_calls()
            out = compiled(x, w)
            assert sum(mesh.calls.values()) <= sum(eager.values()), name
            assert_trees_close(out, md.tree.map(lambda y: y.gather() if hasattr(y, "gather") else y, expected))
    assert math.prod(mesh.shape.values()) == n


@pytest.mark.parallel(2)
def test_along_an_axis_of_one_rank_mpi_is_not_called(monkeypatch):
    mesh, calls = spmd.make_mesh((1, 2), ("i", "j")), []
    along = mesh.ranks.along
    monkeypatch.setattr(mesh.ranks, "along", lambda axes: calls.append(axes) or along(axes), raising=False)
    each = {"axis_name": "i", "tiled": True}
    bodies = [
        lambda x: psum(x, "i") * psum(x + 1, "i"),
        lambda x: pmax(x, "i") + psum_scatter(x, **each),
        lambda x: all_gather(x, **each) + all_gather_invariant(x, **each),
        lambda x: all_to_all(x, "i", 0, 0, tiled=True) + ppermute(x, "i", [(0, 0)]) - ppermute(x, "i", []),
    ]
    for body in bodies:
        loss = lambda x, body=body: psum(psum((body(x) ** 2).sum(), "i"), "j")  # noqa: E731
        f = spmd.shard_map(loss, mesh=mesh, in_specs=P(("i", "j")), out_specs=P())
        for run in (md.grad(f), md.jit(md.grad(f))):
            run(np.arange(4.0))
    assert calls and all(mesh.ranks.size(axes) > 1 for axes in calls)


@RANKS
@pytest.mark.parametrize("of_weights", [lambda w: w, np.cos], ids=["as they are", "computed in each step"])
def test_a_loop_over_layers_sums_its_weights_once(counted, of_weights):
    """Weights are broadcast before the loop: so MPI is called once for all layers, not for each.

    A loop that is not compiled does so with weights as they are, and sums what its steps compute from them in each.
    """
    mesh, calls = counted
    x, w, ws = data("float64", (8, 3)), np.ones(3) / 3, data("float64", (5, 3), 1)

    def network(x, w, ws):
        return md.scan(lambda x, v: (np.tanh(x * v) + of_weights(w), None), x, ws)[0]

    body = lambda x, w, ws: pmean(np.mean(network(x, w, ws) ** 2), "i")  # noqa: E731
    loss = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=P())
    expected = md.grad(lambda *args: np.mean(network(*args) ** 2), (0, 1, 2))(x, w, ws)
    gradient = md.grad(loss, (0, 1, 2))
    calls.clear()
    assert_trees_close(gradient(x, w, ws), expected)
    assert [n for _, n in calls] == [1, *([w.size] * 5 + [ws.size] if of_weights is np.cos else [w.size + ws.size])]
    staged = md.make_tape(gradient)(x, w, ws)
    calls.clear()
    assert_trees_close(staged(x, w, ws), list(expected))
    assert [n for _, n in calls] == [1, *([w.size, ws.size] if of_weights is np.cos else [w.size + ws.size])]
    calls.clear()
    assert_trees_close(md.jit(gradient)(x, w, ws), expected)
    assert [n for _, n in calls] == [w.size + ws.size]


@RANKS
def test_this_ranks_slice_of_a_sum_is_reduced_and_scattered(counted):
    mesh, calls = counted
    n = mesh.size
    f = spmd.shard_map(lambda x: pscatter(psum(x, "i"), "i", tiled=True), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x = data("float64", (2 * n * n, 3))
    compiled = md.jit(f)
    compiled(x)
    calls.clear()
    out = compiled(x)
    assert calls == [("Reduce_scatter_block", 6)]
    np.testing.assert_allclose(out.gather(), x.reshape(n, 2 * n, 3).sum(0))


@RANKS
def test_sums_in_the_steps_of_a_loop_and_in_branches(counted):
    """Begun in a step, and over at its end; also where a step fails, and where nobody takes a sum."""
    mesh, calls = counted

    def body(x):
        def step(c, t):
            total = psum(np.sum(c), "i")
            psum(c, "i")  # for nobody
            return np.linalg.inv(np.cos(np.sin(c))) * t + total, None

        c = md.scan(step, x, np.array([1.0, 0.5]))[0]
        some = psum(np.sum(x), "i") > 0  # which is known from the first step
        return md.cond(some, lambda c: psum(np.sum(c), "i") + np.sin(np.cos(c)), lambda c: c, c)

    f = spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x = np.concatenate([np.eye(3) + 0.1 * np.arange(9).reshape(3, 3)] * mesh.size)
    compiled, expected = md.jit(f), f(x).gather()
    assert sum(text.count("psum_start") for text in lowered(compiled, x)) == 3
    calls.clear()
    np.testing.assert_allclose(compiled(x).gather(), expected)
    assert [name for name, _ in calls] == ["Iallreduce"] * 3
    assert not mesh.ranks._started
    for _ in range(2):
        with pytest.raises(np.linalg.LinAlgError):
            compiled(0 * x)
        assert not mesh.ranks._started
        np.testing.assert_allclose(compiled(x).gather(), expected)
