"""Reverse mode: `grad`, `vjp`, `linearize`, `linear_transpose`."""

from typing import Any, NamedTuple

import numpy as np
import pytest

import minidiff as md
from minidiff.values.dtypes import float0

X = np.array([0.5, 2.0, 3.0])


class Layer(NamedTuple):
    w: Any
    b: Any


# ---------------------------------------------------------------- nesting


def test_grad_of_grad_of_grad():
    assert md.grad(md.grad(md.grad(lambda x: x**5)))(2.0) == 240.0


def test_hessians_agree_whichever_way_they_are_made():
    def f(x):
        return np.tanh(x[0] * x[1]) + x[2] ** 3 * x[0]

    rows = [md.jvp(md.grad(f), (X,), (e,))[1] for e in np.eye(3)]
    columns = [md.grad(lambda x, e=e: md.jvp(f, (x,), (e,))[1])(X) for e in np.eye(3)]
    batched = md.vmap(lambda e: md.vjp(md.grad(f), X)[1](e)[0])(np.eye(3))
    np.testing.assert_allclose(rows, columns)
    np.testing.assert_allclose(rows, batched)
    np.testing.assert_allclose(rows, np.transpose(rows))


def test_closures_over_outer_tracers():
    def f(x):
        ys = [x * i for i in range(3)]
        return md.grad(lambda y: sum(y * z for z in ys) * y)(x)  # 2 y (0 + 1 + 2) x, at y = x

    assert (f(2.0), md.grad(f)(2.0), md.grad(md.grad(f))(2.0)) == (24.0, 24.0, 12.0)


def test_grad_through_linearize_and_its_linear_function():
    def f(x):
        value, f_linear = md.linearize(lambda y: y * y * x, x)
        return value + f_linear(x)  # x^3 + 2 x^3

    assert md.grad(f)(2.0) == 36.0


def test_grad_through_a_pullback_that_is_called_twice():
    def f(x):
        _, pullback = md.vjp(lambda y: y**3, x)
        return pullback(x)[0] + pullback(1.0)[0]  # 3 x^3 + 3 x^2

    assert md.grad(f)(2.0) == 48.0


# ---------------------------------------------------------------- dependence


def test_an_argument_used_twice():
    assert md.grad(lambda x: x * x + x)(3.0) == 7.0
    assert md.grad(lambda x, y: x * y, argnums=(0, 1))(3.0, 3.0) == (3.0, 3.0)


@pytest.mark.parametrize("f", [lambda x, y: y * 2.0, lambda x, y: 5.0, lambda x, y: np.floor(x).sum() * y])
def test_an_argument_that_does_not_matter_has_gradient_zero(f):
    x = np.ones((2, 3), np.float32)
    g = md.grad(f)(x, 1.0)
    assert md.typeof(g) == md.typeof(x) and not g.any()


def test_zero_cotangents():
    gx, gy = md.vjp(lambda x, y: (x * y, y), X, 2.0)[1]((np.zeros(3), 1.0))
    assert (gx.tolist(), gy) == ([0.0] * 3, 1.0)


def test_define_by_run(capsys):
    def f(x):
        print("x =", x)
        y, steps = x, 0
        while y < 10:
            y, steps = y * x, steps + 1
        for value in np.stack([y, y]):
            y = y + value if value > 20 else y
        return y if steps == 3 else -y

    assert md.value_and_grad(f)(2.0) == (16.0, 32.0)  # x^4
    assert md.grad(f)(5.0) == -3 * 2 * 5.0  # 3 x^2, negated
    assert capsys.readouterr().out == "x = 2.0\nx = 5.0\n"


# ---------------------------------------------------------------- arguments and results


def test_trees_of_arguments():
    params = {"layers": [Layer(X, 1.0), Layer(2 * X, None)], "scale": np.float32(2)}

    def f(params, x):
        return sum((p.w * x).sum() for p in params["layers"]) * params["scale"] + params["layers"][0].b

    g = md.grad(f)(params, X)
    assert md.tree.structure(g) == md.tree.structure(params)
    assert [md.typeof(x) for x in md.tree.leaves(g)] == [md.typeof(x) for x in md.tree.leaves(params)]
    assert g["layers"][0].w.tolist() == (2 * X).tolist() and g["layers"][0].b == 1.0
    np.testing.assert_allclose(g["scale"], 3 * (X * X).sum())


def test_argnums():
    f = lambda x, y, z: x * y**2 * z**3  # noqa: E731
    assert md.grad(f)(2.0, 3.0, 1.0) == 9.0
    assert md.grad(f, argnums=1)(2.0, 3.0, 1.0) == 12.0
    assert md.grad(f, argnums=-1)(2.0, 3.0, 1.0) == 54.0
    assert md.grad(f, argnums=(2, 0))(2.0, 3.0, 1.0) == (54.0, 9.0)
    assert md.grad(f, argnums=(1,))(2.0, 3.0, 1.0) == (12.0,)
    for argnums in ((1, 1), (1, -2)):
        with pytest.raises(TypeError, match="argnums names an argument of <lambda> twice"):
            md.grad(f, argnums=argnums)(2.0, 3.0, 1.0)


def test_aux_is_passed_through():
    def f(x):
        return (x**2).sum(), {"n": len(x), "text": "any", "y": 2 * x.max()}

    (value, aux), g = md.value_and_grad(f, has_aux=True)(X)
    assert (value, aux["n"], aux["text"], g.tolist()) == (13.25, 3, "any", (2 * X).tolist())
    assert md.grad(f, has_aux=True)(X)[1]["n"] == 3


def test_keywords_are_passed_and_not_differentiated():
    assert md.grad(lambda x, *, power, n=1: n * x**power)(3.0, power=2) == 6.0


def test_integer_arguments_of_vjp_have_cotangents_without_values():
    value, pullback = md.vjp(lambda x, i: (x[i], i.sum()), X, np.array([0, 2, 2]))
    gx, gi = pullback((np.ones(3), np.zeros((), float0)))
    assert value[1] == 4 and gx.tolist() == [1.0, 0.0, 2.0]
    assert (gi.dtype, gi.shape) == (float0, (3,))


def test_cotangents_of_integer_results_may_be_any_numbers():
    for ct in (0, np.int8(0), 0.5):
        assert md.vjp(lambda x: (x, np.argmax(x)), X)[1]((X, ct))[0].tolist() == X.tolist()


def test_gradients_in_complex_arguments():
    np.testing.assert_allclose(md.grad(lambda z: np.abs(z) ** 2)(3 + 4j), 6 - 8j)


# ---------------------------------------------------------------- linearize, linear_transpose


def test_linearize_evaluates_once():
    calls = []
    value, f_linear = md.linearize(lambda x, p: calls.append(1) or {"y": x * p["w"]}, X, {"w": 2.0})
    assert value["y"].tolist() == (2 * X).tolist()
    assert f_linear(np.ones(3), {"w": 0.0})["y"].tolist() == [2.0] * 3
    assert f_linear(np.zeros(3), {"w": 1.0})["y"].tolist() == X.tolist()
    assert calls == [1]


def test_linear_transpose():
    f_t = md.linear_transpose(lambda p, y: {"u": 3.0 * p["a"] + y.sum(), "v": y[::-1]}, {"a": 1.0}, X)
    p, y = f_t({"u": 2.0, "v": X})
    assert p == {"a": 6.0} and y.tolist() == (X[::-1] + 2).tolist()
    (unused,) = md.linear_transpose(lambda x: 0.0, md.ShapedArray((2,), "float32"))(1.0)
    assert md.typeof(unused) == md.ShapedArray((2,), "float32") and not unused.any()


# ---------------------------------------------------------------- errors


# ---------------------------------------------------------------- what comes with the value


def test_aux_holds_values():
    """It passes through the transformation as the value does: what was traced is an array again."""
    grads, aux = md.grad(lambda x: (x**2, {"twice": 2 * x, "text": "as it was", "none": None}), has_aux=True)(3.0)
    assert (grads, aux) == (6.0, {"twice": 6.0, "text": "as it was", "none": None})
    assert type(aux["twice"]) is np.float64


def test_aux_is_differentiated_by_what_is_around():
    def f(x):
        _, aux = md.grad(lambda y: (y * y, y * x), has_aux=True)(x)
        return aux  # x * x

    assert md.grad(f)(3.0) == 6.0


def test_returning_a_leaked_value_is_an_error():
    """Not a result whose derivative is silently zero."""
    leaked = []
    md.grad(lambda y: leaked.append(y * y) or y)(2.0)
    with pytest.raises(md.LeakedTracerError, match="outside the transformation it belongs to"):
        md.grad(lambda x: leaked[0])(2.0)


#: Transformations that return the value of a function: the value and what came with it, of a function of one argument.
WITH_AUX = {
    "vjp": lambda f, x: md.vjp(f, x, has_aux=True)[::2],
    "linearize": lambda f, x: md.linearize(f, x, has_aux=True)[::2],
    "jvp": lambda f, x: md.jvp(f, (x,), (x,), has_aux=True)[::2],
    "value_and_grad": lambda f, x: md.value_and_grad(f, has_aux=True)(x)[0],
}


@pytest.mark.parametrize("transform", WITH_AUX.values(), ids=WITH_AUX)
def test_what_comes_with_the_value_is_of_any_kind_and_keeps_its_derivative(transform):
    def f(x):
        return x**2, {"twice": 2 * x, "text": "as it was", "none": None, "count": 3}

    value, aux = transform(f, 3.0)
    assert (value, aux) == (9, {"twice": 6, "text": "as it was", "none": None, "count": 3})
    assert md.grad(lambda x: x * transform(f, x)[1]["twice"])(3.0) == 12
    assert md.jit(lambda x: transform(f, x)[1]["twice"])(3.0) == 6
    np.testing.assert_array_equal(md.vmap(lambda x: transform(f, x)[1]["twice"])(np.arange(3.0)), [0, 2, 4])
    with pytest.raises(TypeError, match=r"with has_aux=True the function returns a pair"):
        transform(lambda x: x, 3.0)


def test_derivatives_leave_out_what_comes_with_the_value():
    def f(x):
        return np.sin(x), (np.exp(x), "text")

    assert md.vjp(f, 0.0, has_aux=True)[1](2.0) == (2.0,)
    assert md.linearize(f, 0.0, has_aux=True)[1](2.0) == 2.0
    assert md.jvp(f, (0.0,), (2.0,), has_aux=True)[:2] == (0.0, 2.0)
