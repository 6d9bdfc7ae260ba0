"""Eager programs that repeat: plans of operations, and linear parts that are compiled, change no bit of a result."""

import collections
import itertools

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, pmean, psum
from spmd import P
from spmd.shard_map import planned

W, X = numpy.cos(numpy.arange(12.0)).reshape(3, 4), numpy.sin(numpy.arange(24.0)).reshape(8, 3)
CALLS = 6  # with `often`, programs are compiled at the third


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


BODIES = {
    "layer": lambda w, x: pmean(layer(w, x), "i"),
    "gathered": lambda w, x: psum(np.sum(all_gather(x, "i", tiled=True) @ w) * np.sum(x), ("i", "j")),
    "unrolled": lambda w, x: pmean(np.sum(np.where(x[:, :1] > 0, np.exp(x @ w), w[1] * 2)) / 3, "i"),
    "scan": lambda w, x: pmean(md.scan(lambda c, _: (np.tanh(c @ w[:, :3]), None), x, length=2)[0].sum(), "i"),
}


@pytest.mark.parametrize("name", BODIES)
def test_repeated_gradients_have_the_same_bits(often, mesh, name):
    f = mapped(BODIES[name], mesh)
    for run in (lambda: md.value_and_grad(f, (0, 1))(W, X), lambda: md.vjp(f, W, X)[1](2.0), lambda: (f(W, X),)):
        first, *others = [[numpy.asarray(x) for x in md.tree.leaves(run())] for _ in range(CALLS)]
        for other in others:
            assert [x.tobytes() for x in first] == [x.tobytes() for x in other]


def test_operations_on_sharded_arrays_that_repeat_have_the_same_bits(often, mesh):
    x = spmd.distribute(X, mesh, P("i"))
    loss = lambda w, x: layer(w, x) + np.max(x) * np.sum(x[:, 1] * 2.5)  # noqa: E731
    gradient, (first, *others) = md.grad(loss, (0, 1)), [md.grad(loss, (0, 1))(W, x) for _ in range(CALLS)]
    for other in others:
        assert [numpy.asarray(g).tobytes() for g in first] == [numpy.asarray(g).tobytes() for g in other]
        assert other[1].spec == P("i")
    for ours, theirs in zip(first, gradient(W, X)):
        numpy.testing.assert_allclose(ours, theirs, atol=1e-14)
    values = [float(loss(W, x)) for _ in range(CALLS)]
    assert len({*values}) == 1


def test_operands_that_disagree_have_a_plan(monkeypatch, mesh):
    f = mapped(lambda w, x: np.tanh(x @ w) * w[0, 0] + x[:, :1], mesh, P("i"))
    first, *others = [numpy.asarray(f(W, X)).tobytes() for _ in range(CALLS)]
    monkeypatch.setattr(planned, "bind_in_body", None)
    assert {numpy.asarray(f(W, X)).tobytes(), *others} == {first}
    with pytest.raises(TypeError, match="not callable"):
        f(W.astype(numpy.float32), X)


def test_collectives_are_counted_in_every_call(often, mesh):
    f, x = mapped(BODIES["layer"], mesh), spmd.distribute(X, mesh, P("i"))
    for run in (lambda: md.grad(f)(W, X), lambda: md.grad(layer)(W, x), lambda: layer(W, x), lambda: f(W, X)):
        counts = []
        for _ in range(CALLS):
            mesh.reset_calls()
            run()
            counts.append((mesh.calls, mesh.bytes))
        assert counts == counts[:1] * CALLS
        assert counts[0][0]["psum"]


def test_the_body_runs_each_time_and_may_branch_on_values(often, mesh):
    runs = collections.Counter()

    def body(w, x):
        runs["body"] += 1
        total = psum(np.sum(x @ w), "i")
        return total * 2 if total > 0 else np.sin(total)

    gradient = md.grad(mapped(body, mesh))
    for k, sign in enumerate((1, 1, 1, -1, 1, -1, -1, -1, 1)):
        total = X.sum(0) @ W.sum(1)
        slope = 2 if sign * total > 0 else numpy.cos(sign * total)
        numpy.testing.assert_allclose(gradient(sign * W, X), slope * X.sum(0)[:, None] * numpy.ones(4), rtol=1e-12)
        assert runs["body"] == k + 1


def test_operands_of_other_types_have_other_plans(often, mesh):
    f = mapped(lambda w, x: pmean(np.sum(x * w * 2), "i"), mesh)
    kinds = [(W[:1, :3], X), (W[:1, :3].astype("f4"), X.astype("f4")), (W[:1, :1], X), (numpy.float64(3.0), X)]
    for (w, x), _ in itertools.product(kinds, range(CALLS)):
        g = md.grad(f)(w, x)
        whole = numpy.broadcast_to(2 * x.sum(0, keepdims=True) / 2, (1, 3))
        expected = whole if numpy.shape(w) == (1, 3) else whole.sum().reshape(numpy.shape(w))
        assert g.dtype == w.dtype
        numpy.testing.assert_allclose(g, expected, rtol=1e-5)


def test_numbers_are_operands_of_a_plan(mesh):
    f = lambda rate: mapped(lambda w, x: psum(np.sum(x) * rate, "i"), mesh)(W, X)  # noqa: E731
    for rate in (0.5, 2.0, -0.0, 1e300, 3, -1, True):
        assert f(rate) == f(rate) == X[:4].sum() * rate + X[4:].sum() * rate


def test_rules_of_the_user_run_in_every_call(often, mesh):
    scale = [1.0]

    @md.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, ct: (scale[0] * ct * x,))
    gradient = md.grad(mapped(lambda w, x: pmean(np.sum(square(x @ w)), "i"), mesh))
    first = gradient(W, X)
    for factor in range(2, 2 + CALLS):
        scale[0] = float(factor)
        numpy.testing.assert_allclose(gradient(W, X), factor * first, rtol=1e-12)


def test_gradients_of_gradients_and_batches_of_gradients(often, mesh):
    f, x = mapped(BODIES["layer"], mesh), spmd.distribute(X, mesh, P("i"))
    for g, data in ((md.grad(f), X), (md.grad(layer), x)):
        second = md.grad(lambda w, g=g, data=data: np.sum(g(w, data) ** 2))
        batch = md.vmap(lambda w, g=g, data=data: g(w, data))
        expected = md.grad(lambda w: np.sum(md.grad(layer)(w, X) ** 2))(W), md.grad(layer)(W, X)
        for _ in range(CALLS):
            numpy.testing.assert_allclose(second(W), expected[0], atol=1e-13)
            numpy.testing.assert_allclose(batch(numpy.stack([W, W]))[1], expected[1], atol=1e-13)


def test_nans_are_found_in_programs_that_have_been_compiled(often, mesh):
    gradient = md.grad(mapped(lambda w, x: psum(np.sum(np.sqrt(x[0] * w[:, 0])), "i"), mesh))
    for _ in range(CALLS):
        gradient(1 + abs(W), 1 + abs(X))
    with md.debug_nans(), pytest.raises(FloatingPointError, match="sqrt"):
        gradient(-1 - abs(W), 1 + abs(X))


def test_an_error_in_an_operation_with_a_plan_names_types_of_blocks(mesh):
    f = mapped(lambda w, x: psum(np.sum(x * w), "i"), mesh)
    for _ in range(CALLS):
        f(W[:1, :3], X)
    with pytest.raises(ValueError, match=r"multiply of f64\[4,3\]\{i\} and f64\[3,4\]"):
        f(W, X)


def test_a_plain_result_of_a_sharded_constant_has_a_gradient(often, mesh):
    """The first operation has a plain operand, which is differentiated, and a plain result."""
    x = spmd.distribute(X[:, 0], mesh, P("i"))
    eight = [1, 2, 3, 4, 5, 6, 7, 8]
    for f in (
        *(lambda w: np.vdot(w, x), lambda w: w @ x, lambda w: np.linalg.norm(w - x)),
        *(lambda w: np.sum((w * x) * eight), lambda w: np.sum(np.add(eight, x) * w * 2.5)),
    ):
        expected = md.grad(lambda w, f=f: f(w))(X[:, 1])
        for _ in range(CALLS):
            numpy.testing.assert_array_equal(md.grad(f)(X[:, 1]), expected)
    numpy.testing.assert_allclose(md.grad(lambda w: w @ x)(X[:, 1]), X[:, 0])
