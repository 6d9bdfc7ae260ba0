"""`while_loop` and `fori_loop` with `max_steps=`: reverse mode of loops whose length is not known."""

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import psum
from spmd import P
from tests.checks.samples import each

W = np.eye(3) * 0.5 + 0.1


def powers(x):
    """x to the power of the first one beyond 100, plus 1."""
    return md.while_loop(lambda y: y < 100.0, lambda y: x * y, x, max_steps=10)


def shrink(w):
    """Carries in a dict, one of them an integer."""
    return md.while_loop(
        lambda s: mnp.sum(s["x"] ** 2) > 1e-3,
        lambda s: {"x": mnp.tanh(w @ s["x"]), "n": s["n"] + 1},
        {"x": np.ones(3), "n": 0},
        max_steps=40,
    )["x"].sum()


def newton(a):
    """A square root: the condition depends on what is differentiated."""
    state = a, 0
    step = lambda s: (0.5 * (s[0] + a / s[0]), s[1] + 1)  # noqa: E731
    return md.while_loop(lambda s: abs(s[0] ** 2 - a) > 1e-12, step, state, max_steps=50)[0]


@each("jit", [False, True])
def test_known_derivatives(jit):
    compiled = md.jit if jit else lambda f: f
    assert compiled(md.grad(powers))(3.0) == pytest.approx(5 * 3.0**4)
    assert compiled(md.grad(md.grad(powers)))(3.0) == pytest.approx(20 * 3.0**3)
    assert compiled(md.hessian(powers))(3.0) == pytest.approx(20 * 3.0**3)
    assert compiled(lambda x: md.jvp(powers, (x,), (1.0,)))(3.0) == pytest.approx((243, 405))
    assert compiled(md.grad(newton))(2.0) == pytest.approx(0.5 / 2**0.5)
    np.testing.assert_allclose(compiled(md.vmap(md.grad(powers)))(np.array([3.0, 2.0, 11.0])), [405, 7 * 2**6, 22])


@each("f", [shrink, md.jit(shrink)])
def test_against_differences_to_second_order(f):
    md.testing.check_grads(f, (W,), order=2)


def test_third_order_in_reverse():
    third = md.grad(md.grad(md.grad(powers)))
    assert md.jit(third)(3.0) == pytest.approx(60 * 3.0**2)


def test_a_compiled_step_writes_into_the_records():
    """The time of a backward pass would grow with the square of the number of steps otherwise."""
    step = lambda s: (mnp.sin(s[0]), s[1] + 1)  # noqa: E731
    loss = lambda x: mnp.sum(md.while_loop(lambda s: s[1] < 50, step, (x, 0), max_steps=50)[0])  # noqa: E731
    assert "dynamic_update_in_place(" in md.jit(md.grad(loss)).source(np.ones((100, 100)))


def test_integers_that_the_body_closes_over():
    f = lambda x, i: md.while_loop(lambda y: y.sum() < 100.0, lambda y: y * x[i] + 1, x, max_steps=30).sum()  # noqa: E731
    x, expected = np.array([2.0, 3.0]), md.grad(f)(np.array([2.0, 3.0]), 1)
    np.testing.assert_allclose(md.jit(md.grad(f))(x, 1), expected)
    batch = md.jit(md.vmap(md.grad(f), in_axes=(None, 0)))(x, np.array([0, 1]))
    np.testing.assert_allclose(batch, [md.grad(f)(x, 0), expected])


def test_a_condition_that_closes_over_an_argument():
    f = lambda a: md.while_loop(lambda x: abs(x * x - a) > 1e-10, lambda x: (x + a / x) / 2, a, max_steps=20)  # noqa: E731
    df = lambda a: 0.5 / np.sqrt(a)  # noqa: E731
    for g in (md.jit(md.grad(f)), md.grad(md.jit(f)), md.grad(md.jit(md.jit(f)))):
        assert g(2.0) == pytest.approx(df(2.0))
    assert md.grad(md.grad(md.jit(f)))(2.0) == pytest.approx(-0.25 * 2.0**-1.5)
    rows = np.array([2.0, 3.0, 50.0])
    np.testing.assert_allclose(md.jit(md.vmap(md.grad(md.jit(f))))(rows), df(rows))
    assert md.jvp(md.jit(f), (2.0,), (1.0,))[1] == pytest.approx(df(2.0))


@each("f", [powers, md.jit(powers), md.grad(powers), md.jit(md.grad(powers))])
def test_more_steps_are_an_error(f):
    for run, x in ((f, 1.01), (md.vmap(f), np.array([3.0, 1.01]))):
        with pytest.raises(RuntimeError, match="still holds after max_steps=10 steps"):
            run(x)


def test_fori_loop():
    f = lambda n, x: md.fori_loop(0, n, lambda i, y: y * x, 1.0, max_steps=20)  # noqa: E731
    assert md.jit(md.grad(f, 1))(4, 2.0) == pytest.approx(4 * 2.0**3)
    with pytest.raises(RuntimeError, match="fori_loop: the condition still holds after max_steps=20"):
        md.jit(f)(21, 2.0)


def test_without_a_bound_the_error_names_it():
    f = lambda x: md.while_loop(lambda y: y < 100.0, lambda y: x * y, x)  # noqa: E731
    with pytest.raises(TypeError, match="Pass max_steps="):
        md.jit(md.grad(f))(3.0)


@each("ranks", [1, 2, 4])
def test_each_rank_takes_its_own_steps(ranks):
    mesh = spmd.make_mesh((ranks,), ("i",), backend="simulated")
    x = np.array([3.0, 1.0, 20.0, 50.0])

    def body(x, w):
        y = md.while_loop(lambda y: (y < 100).all(), lambda y: y * w, x, max_steps=20)
        return psum(mnp.sum(y), "i")

    loss = lambda w: spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=P())(x, w)  # noqa: E731
    width = 4 // ranks
    steps = [np.ceil(np.log2(100 / block.max())) for block in x.reshape(ranks, width)]
    expected = sum(n * 2.0 ** (n - 1) * block.sum() for n, block in zip(steps, x.reshape(ranks, width)))
    assert md.grad(loss)(2.0) == pytest.approx(expected)
    assert md.jit(md.grad(loss))(2.0) == pytest.approx(expected)
