"""shard_map: functions of blocks are those of whole arrays, and the backward pass sums what it must, once."""

import itertools

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast, pmean, psum
from minidiff.compiler import factorizations
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_derivatives, check_values
from tests.checks.samples import each

LINE, PLANE = mesh(4), mesh(2, 2)
X, K = np.linspace(-0.5, 1.0, 8), np.arange(8)
W, ROWS = np.cos(np.arange(9.0)).reshape(3, 3), np.arange(24.0).reshape(8, 3) / 24
PARAMS = {"w": W, "b": W[0], "v": W[1]}


def network(p, x):
    return np.sum(np.tanh(x @ p["w"] + p["b"]) @ p["v"])


def error(w, x):
    return np.sum((np.tanh(x @ w) - np.cos(x[:, 0])) ** 2)


def after_a_step(w, rate, x):
    return error(w - rate * md.grad(error)(w, x), x)


#: A function of `on`, which maps over ranks; the same of whole arrays; arguments.
PROGRAMS = {
    "a tree": (
        lambda on: on(
            lambda pair, s: {"sum": psum(pair[0] * s, "i"), "same": [pair[1]]},
            (P("i"), P()),
            {"sum": P(), "same": P("i")},
        ),
        lambda pair, s: {"sum": pair[0].reshape(4, 2).sum(0) * s, "same": [pair[1]]},
        ((X, np.cos(X)), 2.0),
    ),
    "integers": (
        lambda on: on(lambda x, k: psum((x * k).sum(), "i"), (P("i"), P("i")), P()),
        lambda x, k: (x * k).sum(),
        (X, K),
    ),
    "a result of no argument": (
        lambda on: on(lambda x: (psum(x, "i"), np.ones(2)), P("i"), (P(), P())),
        lambda x: (x.reshape(4, 2).sum(0), np.ones(2)),
        (X,),
    ),
    "an argument without use": (
        lambda on: on(lambda x, y: psum(x.sum(), "i"), (P("i"), P("i")), P()),
        lambda x, y: x.sum(),
        (X, X),
    ),
    "closed over": (
        lambda on: lambda w: on(lambda x: psum((x * np.sin(w)).sum(), "i"), P("i"), P())(X),
        lambda w: (X * np.sin(w)).sum(),
        (0.3,),
    ),
    "a step of each rank, of a weight that is closed over": (
        lambda on: lambda w, r: on(lambda x: psum(after_a_step(pbroadcast(w, "i"), r, x), "i"), P("i"), P())(ROWS),
        lambda w, r: sum(after_a_step(w, r, x) for x in np.split(ROWS, 4)),
        (W[0], 0.1),
    ),
}


@each("name, typed", [*zip(PROGRAMS, itertools.cycle([True, False])), ("closed over", True), ("a tree", False)])
def test_values_and_derivatives_are_those_of_whole_arrays(name, typed):
    on, whole, args = PROGRAMS[name]
    check_derivatives(on(lambda f, *specs: mapped(f, LINE, *specs, check_rep=typed)), args, whole)


@each("typed", [True, False], ids=["typed", "untyped"])
@each("spec", [P("i"), P(), P(("i", "j")), P(None, "j")], ids=str)
def test_the_identity_is_its_derivative_and_transpose(spec, typed):
    x = np.arange(16.0).reshape(4, 4)
    f = mapped(lambda x: x, PLANE, spec, spec, check_rep=typed)
    transposed = lambda y: md.linear_transpose(f, x)(y)[0]  # noqa: E731
    twice = md.linear_transpose(transposed, x)(x)[0]
    for same in (md.vjp(f, x)[1](x)[0], md.jvp(f, (x,), (x,))[1], md.linearize(f, x)[1](x), transposed(x), twice):
        np.testing.assert_array_equal(same, x)


def test_float32_stays():
    value, gradient = md.value_and_grad(mapped(lambda x: pmean((x**2).sum(), "i"), LINE, P("i"), P()))(X.astype("f4"))
    assert value.dtype == gradient.dtype == np.float32


# ---------------------------------------------------------------- where the backward pass communicates


def loss_of(use, closed_over, **options):
    if closed_over:
        return lambda p, x: mapped(lambda x: pmean(use(p, x), "i"), LINE, P("i"), P(), **options)(x)
    return mapped(lambda p, x: pmean(use(p, x), "i"), LINE, (P(), P("i")), P(), **options)


#: Functions of parameters and rows.
USES = {
    "several parameters": (network, PARAMS),
    "twice in products": (lambda w, x: np.sum(np.tanh(x @ w) @ w), W),
    "with its transpose": (lambda w, x: np.sum(np.tanh(x @ w) @ w.T), W),
    "in another shape": (lambda w, x: np.sum(x @ w) + np.sum(x[0, 0] * w.reshape(9)), W),
    "broadcast": (lambda w, x: np.sum(x @ w + x @ np.broadcast_to(w, (2, 3, 3))), W),
}


@each("name, closed_over", zip(USES, itertools.cycle([True, False])))
def test_one_psum_for_all_uses_of_all_parameters_and_none_for_the_cotangent(name, closed_over):
    use, params = USES[name]
    loss = loss_of(use, closed_over)
    assert spmd.communication(md.grad(loss))(params, ROWS).counts == {"psum": 1 + 1}
    check_derivatives(loss, (params, ROWS), lambda p, x: sum(use(p, x) for x in np.split(x, 4)) / 4)


@pytest.mark.parametrize("closed_over", [True, False])
def test_without_types_each_parameter_and_the_cotangent_are_summed(closed_over):
    untyped = loss_of(network, closed_over, check_rep=False)
    assert spmd.communication(md.grad(untyped))(PARAMS, ROWS).counts == {"psum": 2 + len(PARAMS)}


# ---------------------------------------------------------------- compiled


def test_long_loops_in_long_loops():
    steps = lambda f, x: md.fori_loop(0, 20, lambda k, x: f(x), x)  # noqa: E731
    with_mean = lambda mean: lambda x: steps(lambda x: np.sin(x) + mean(x) / 2, x)  # noqa: E731
    f = mapped(lambda x: steps(md.checkpoint(with_mean(lambda x: pmean(x, "i"))), x), LINE, P("i"), P("i"))
    whole = lambda x: steps(with_mean(lambda x: np.tile(x.reshape(4, 2).mean(0), 4)), x)  # noqa: E731
    total = lambda f: md.grad(lambda x: np.sum(f(x)))  # noqa: E731
    check_values(total(f), (spmd.distribute(X, LINE, P("i")),), total(whole), (X,))


def test_bodies_share_factorizations(monkeypatch):
    """Those of a matrix that is the same on all ranks; matrices that differ are a stack, which NumPy factorizes."""
    monkeypatch.setattr(factorizations, "MIN_ROWS", 1)
    k, y = np.sin(np.arange(36.0)).reshape(6, 6) + 6 * np.eye(6), np.cos(np.arange(48.0)).reshape(6, 8)
    same = lambda k, y: np.sum(y * np.linalg.solve(k, y)) + np.linalg.slogdet(k)[1]  # noqa: E731
    for body in (same, lambda k, y: same(k + 0.1 * np.sum(y), y)):
        loss = mapped(lambda k, y, body=body: psum(body(k, y), "i"), LINE, (P(), P(None, "i")), P())
        whole = lambda k, y, body=body: sum(body(k, y[:, i : i + 2]) for i in (0, 2, 4, 6))  # noqa: E731
        check_values(md.grad(loss), (k, y), md.grad(whole))
