"""Eager programs that repeat: plans of operations, and linear parts that are compiled, change no bit of a result."""

import itertools

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, pmean, psum
from spmd import P
from spmd.shard_map import planned
from tests.checks.results import assert_trees_close

W, X = numpy.cos(numpy.arange(12.0)).reshape(3, 4), numpy.sin(numpy.arange(24.0)).reshape(8, 3)
CALLS = 4  # with `often`, programs are compiled at the third


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(planned, "COMPILED_AFTER", 2)


@pytest.fixture
def mesh():
    return spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")


def mapped(body, mesh, out=P()):
    return spmd.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=out)


def layer(w, x):
    return np.mean(np.tanh(x @ w + 0.5 * w[0]) ** 2)


def bits(tree):
    return [numpy.asarray(x).tobytes() for x in md.tree.leaves(tree)]


BODIES = {
    "layer": lambda w, x: pmean(layer(w, x), "i"),
    "gathered": lambda w, x: psum(np.sum(all_gather(x, "i", tiled=True) @ w) * np.sum(x), ("i", "j")),
    "unrolled": lambda w, x: pmean(np.sum(np.where(x[:, :1] > 0, np.exp(x @ w), w[1] * 2)) / 3, "i"),
    "scan": lambda w, x: pmean(md.scan(lambda c, _: (np.tanh(c @ w[:, :3]), None), x, length=2)[0].sum(), "i"),
}
#: The same of sharded rows, outside of a body.
OUTSIDE = {"outside": lambda w, x: layer(w, x) + np.max(x) * np.sum(x[:, 1] * 2.5)}


@pytest.mark.parametrize("name", [*BODIES, *OUTSIDE])
def test_every_call_has_the_bits_and_the_collectives_of_the_first(often, mesh, name):
    f = mapped(BODIES[name], mesh) if name in BODIES else OUTSIDE[name]
    x = X if name in BODIES else spmd.distribute(X, mesh, P("i"))
    for run in (lambda: md.value_and_grad(f, (0, 1))(W, x), lambda: md.vjp(f, W, x)[1](2.0), lambda: f(W, x)):
        calls = []
        for _ in range(CALLS):
            mesh.reset_calls()
            calls.append((bits(run()), mesh.calls, mesh.bytes))
        assert calls == calls[:1] * CALLS
        assert calls[0][1]["psum"]
    if name in OUTSIDE:
        assert_trees_close(md.grad(f, (0, 1))(W, x), md.grad(f, (0, 1))(W, X))
        assert md.grad(f, 1)(W, x).spec == P("i")


def test_operands_that_disagree_have_a_plan_by_their_types(mesh, often):
    """Those of other types have another one."""
    f = mapped(lambda w, x: np.tanh(x @ w) * w[0, 0] + x[:, :1], mesh, P("i"))
    assert len({str(bits(f(W, X))) for _ in range(CALLS)}) == 1
    g = md.grad(mapped(lambda w, x: pmean(np.sum(x * w * 2), "i"), mesh))
    kinds = [(W[:1, :3], X), (W[:1, :3].astype("f4"), X.astype("f4")), (W[:1, :1], X), (numpy.float64(3.0), X)]
    for (w, x), _ in itertools.product(kinds, range(CALLS)):
        expected = numpy.broadcast_to(x.sum(0, keepdims=True), (1, 3))
        expected = expected if numpy.shape(w) == (1, 3) else expected.sum().reshape(numpy.shape(w))
        assert g(w, x).dtype == w.dtype
        numpy.testing.assert_allclose(g(w, x), expected, rtol=1e-5)


def test_the_body_and_the_rules_of_the_user_run_in_every_call(often, mesh):
    """The body may branch on values."""
    scale, runs = [1.0], []
    square = md.custom_vjp(lambda x: x * x)
    square.defvjp(lambda x: (x * x, x), lambda x, ct: (scale[0] * ct * x,))

    def body(w, x):
        total = psum(np.sum(square(x @ w)), "i")
        runs.append(bool(total > 1))
        return total * 2 if total > 1 else np.sin(total)

    gradient, rows = md.grad(mapped(body, mesh)), X @ W
    for k, size in enumerate((1, 1, 1, 0.1, 1, 0.1, 0.1, 0.1, 1)):
        scale[0] = float(k)
        total = (size * rows) ** 2
        slope = 2 if total.sum() > 1 else numpy.cos(total.sum())
        numpy.testing.assert_allclose(gradient(size * W, X), k * slope * X.T @ (size * rows), rtol=1e-11, atol=1e-12)
        assert len(runs) == k + 1
    assert {*runs} == {True, False}


def test_numbers_are_operands_of_a_plan(mesh):
    f = lambda rate: mapped(lambda w, x: psum(np.sum(x) * rate, "i"), mesh)(W, X)  # noqa: E731
    for rate in (0.5, 2.0, -0.0, 1e300, 3, -1, True):
        assert f(rate) == f(rate) == X[:4].sum() * rate + X[4:].sum() * rate


def test_an_error_in_an_operation_with_a_plan_names_types_of_blocks(mesh):
    f = mapped(lambda w, x: psum(np.sum(x * w), "i"), mesh)
    for _ in range(CALLS):
        f(W[:1, :3], X)
    with pytest.raises(ValueError, match=r"multiply of f64\[4,3\]\{i\} and f64\[3,4\]"):
        f(W, X)


def test_a_plain_result_of_a_sharded_constant_has_a_gradient(often, mesh):
    """The first operation has a plain operand, which is differentiated, and a plain result."""
    eight = [1, 2, 3, 4, 5, 6, 7, 8]
    for f in (
        *(np.vdot, lambda w, x: w @ x, lambda w, x: np.linalg.norm(w - x)),
        *(lambda w, x: np.sum((w * x) * eight), lambda w, x: np.sum(np.add(eight, x) * w * 2.5)),
    ):
        x, expected = spmd.distribute(X[:, 0], mesh, P("i")), md.grad(f)(X[:, 1], X[:, 0])
        for _ in range(CALLS):
            assert_trees_close(md.grad(f)(X[:, 1], x), expected)
