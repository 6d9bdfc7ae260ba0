"""jit on real ranks: one program for all of them, the results and no more collectives than without."""

from collections import Counter

import numpy as np
import pytest

import minidiff as md
from collectives import axis_index, pmean, ppermute, psum
from spmd import P, make_mesh, shard_map

RANKS = pytest.mark.parallel([2, 4])


def mapped(body, out_specs):
    from mpi4py import MPI

    mesh = make_mesh((MPI.COMM_WORLD.size,), ("i",))
    return mesh, shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=out_specs)


def loss(w, x):
    return psum((np.tanh(x @ w) ** 2).sum(), "i") + psum(x.sum(), "i")


def rotated(w, x):
    n = md.typeof(w).shape[0]
    turn = [(0, 1), (1, 0)]
    return ppermute(x, "i", perm=turn) @ w * (axis_index("i") + n)


def loop(w, x):
    return psum(md.scan(lambda c, _: (np.tanh(c @ w), None), x, None, length=20)[0].sum(), "i")


def check(f, mesh, *args):
    before = Counter(mesh.calls)
    expected = f(*args)
    eager, compiled = Counter(mesh.calls) - before, md.jit(f)
    for _ in range(2):
        before = Counter(mesh.calls)
        results = compiled(*args)
        assert all(n <= eager[name] for name, n in (Counter(mesh.calls) - before).items())
        for a, e in zip(md.tree.leaves(results), md.tree.leaves(expected), strict=True):
            a, e = (x.gather() if hasattr(x, "gather") else x for x in (a, e))
            np.testing.assert_allclose(a, e, rtol=1e-10)
    return compiled


@RANKS
@pytest.mark.parametrize("body, out", [(loss, P()), (rotated, P("i")), (loop, P())], ids=["loss", "rotated", "loop"])
def test_values(body, out):
    mesh, f = mapped(body, out)
    check(f, mesh, np.arange(9.0).reshape(3, 3) / 9, np.ones((8, 3)))


@RANKS
@pytest.mark.parametrize("body", [loss, loop])
def test_gradients(body):
    mesh, f = mapped(body, P())
    w, x = np.arange(9.0).reshape(3, 3) / 9, np.ones((8, 3))
    check(md.grad(f), mesh, w, x)
    check(md.value_and_grad(f, argnums=(0, 1)), mesh, w, x)


@RANKS
def test_all_ranks_run_one_program():
    from mpi4py import MPI

    for body in (loss, rotated, loop):
        f = mapped(body, P("i") if body is rotated else P())[1]
        sources = MPI.COMM_WORLD.allgather(md.jit(f).source(np.eye(3), np.ones((8, 3))))
        assert len(set(sources)) == 1


@RANKS
def test_the_loss_that_nobody_asked_for_is_not_summed():
    mesh, f = mapped(loss, P())
    gradient, x = md.jit(md.grad(f)), np.ones((8, 3))
    gradient(np.eye(3), x)
    before = Counter(mesh.calls)
    gradient(np.eye(3), x)
    assert Counter(mesh.calls) - before == {"psum": 1}


@RANKS
def test_one_function_in_vmaps_of_other_sizes():
    f = md.jit(lambda x: psum(pmean(x, "v"), "i"))
    for n in (2, 3):
        mesh, call = mapped(lambda w, x: md.vmap(f, axis_name="v")(x[0] * w), P())
        x = np.arange(float(mesh.size))
        np.testing.assert_array_equal(call(np.arange(float(n)), x), [x.sum() * np.arange(n).mean()] * n)


def product(x):
    return np.sin(x) * x


@RANKS
def test_pullbacks_leave_bodies_and_programs():
    mesh, make = mapped(lambda w, x: md.vjp(product, w * x)[1], P("i"))
    apply = shard_map(lambda pullback, ct: pullback(ct)[0], mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x, w = np.arange(1.0, mesh.size + 1), 0.5
    expected = (np.cos(w * x) * w * x + np.sin(w * x)) * x
    for wrapped in (lambda f: f, md.jit):
        np.testing.assert_allclose(wrapped(apply)(wrapped(make)(w, x), x).gather(), expected)


@RANKS
def test_a_rule_in_a_body_keeps_a_pullback():
    f = md.custom_vjp(product)
    f.defvjp(lambda x: md.vjp(product, x), lambda pullback, ct: pullback(ct))
    mesh, loss = mapped(lambda w, x: psum(f(w * x).sum(), "i"), P())
    x = np.arange(1.0, mesh.size + 1)
    expected = ((np.cos(x) * x + np.sin(x)) * x).sum()
    for gradient in (md.grad(loss), md.jit(md.grad(loss))):
        np.testing.assert_allclose(gradient(1.0, x), expected)
