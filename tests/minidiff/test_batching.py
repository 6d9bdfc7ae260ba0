"""`vmap`: one element's function, applied along an axis."""

import numpy as np
import pytest

import minidiff as md
from tests.checks.samples import each
from tests.minidiff.refusals import refusals

X = np.arange(24.0).reshape(2, 3, 4)


@each("axis", [0, 1, 2, -1, -3])
@each("out", [0, 1, -1])
def test_axes_in_and_out(axis, out):
    expected = np.stack([np.take(X, i, axis) * 2 for i in range(X.shape[axis])], out)
    np.testing.assert_array_equal(md.vmap(lambda x: x * 2, in_axes=axis, out_axes=out)(X), expected)


def test_an_axis_for_each_argument():
    f = md.vmap(lambda x, y, z: x @ y + z, in_axes=(1, None, 0))
    np.testing.assert_array_equal(f(X[0], np.ones(3), np.arange(4.0)), X[0].sum(axis=0) + np.arange(4.0))


def test_axes_may_be_trees():
    def f(p, x):
        return {"y": p["w"] * x, "z": (p["b"], 1.0)}

    p = {"w": np.arange(3.0), "b": X}
    out = md.vmap(f, in_axes=({"w": 0, "b": 1}, None), out_axes={"y": 0, "z": (2, None)})(p, 2.0)
    assert out["y"].tolist() == [0.0, 2.0, 4.0] and out["z"][1] == 1.0
    np.testing.assert_array_equal(out["z"][0], np.moveaxis(X, 1, 2))


def test_arguments_by_keyword_are_mapped_along_their_first_axis():
    f = lambda x, *, k: x * k["a"].sum()  # noqa: E731
    k = {"a": np.arange(9.0).reshape(3, 3)}
    expected = np.stack([f(X[:, i], k={"a": k["a"][i]}) for i in range(3)])
    np.testing.assert_allclose(md.vmap(f, in_axes=1)(X, k=k), expected)
    np.testing.assert_allclose(md.vmap(lambda *, k: f(2.0, k=k))(k=k), 2 * k["a"].sum(1))


def test_results_that_do_not_depend_are_repeated():
    out = md.vmap(lambda x: (7.0, np.arange(2.0), x), out_axes=(0, 1, 0))(np.ones(3))
    assert out[0].tolist() == [7.0] * 3 and out[1].tolist() == [[0.0] * 3, [1.0] * 3]


def test_vmap_of_vmap():
    f = md.vmap(md.vmap(lambda x, y: x * y, in_axes=(0, None)), in_axes=(None, 0))
    np.testing.assert_array_equal(f(np.arange(3.0), np.arange(2.0)), np.outer(np.arange(2.0), np.arange(3.0)))


def test_closures_over_the_outer_batch():
    out = md.vmap(lambda x: md.vmap(lambda y: x * y + x)(x))(X[0])
    np.testing.assert_array_equal(out, [[x * y + x for y in row for x in [row]] for row in X[0]])


def test_indices_may_be_batched_where_the_array_is_not():
    out = md.vmap(lambda i, j: md.numpy.take(X, i, axis=1)[0, j])(np.array([0, 2, 1]), np.array([3, 0, -1]))
    assert out.tolist() == [X[0, 0, 3], X[0, 2, 0], X[0, 1, -1]]


# ---------------------------------------------------------------- with derivatives


def loss(w, x):
    return np.tanh(w @ x).sum() * x[0]


def test_gradients_per_example():
    w, xs = X[0] / 10, X[1]
    expected = [md.grad(loss)(w, x) for x in xs]
    np.testing.assert_allclose(md.vmap(md.grad(loss), in_axes=(None, 0))(w, xs), expected)
    total = md.grad(lambda w: md.vmap(loss, in_axes=(None, 0))(w, xs).sum())(w)
    np.testing.assert_allclose(total, np.sum(expected, axis=0))


def test_derivatives_of_a_batch_nest():
    xs = np.array([0.1, 0.7, 2.0])
    second = md.grad(md.grad(lambda x: np.sin(x) * x))
    expected = [second(x) for x in xs]
    np.testing.assert_allclose(md.vmap(second)(xs), expected)
    tangent = md.jvp(md.vmap(md.grad(lambda x: np.sin(x) * x)), (xs,), (np.ones(3),))[1]
    np.testing.assert_allclose(tangent, expected)
    tape = md.make_tape(md.vmap(second))(xs)
    tape.check()
    np.testing.assert_allclose(tape(xs)[0], expected)


def test_grad_and_vmap_do_not_confuse_their_values():
    def f(x):
        return md.grad(lambda y: md.vmap(lambda z: x * y * z)(np.arange(3.0)).sum())(x)  # x (0 + 1 + 2)

    assert md.grad(f)(5.0) == 3.0
    assert md.vmap(f)(np.array([1.0, 2.0])).tolist() == [3.0, 6.0]


# ---------------------------------------------------------------- errors


def test_a_python_condition_is_an_error_that_names_the_way_out():
    with pytest.raises(md.TracerError, match=r"Python condition needs one concrete value, but under vmap .*np\.where"):
        md.vmap(lambda x: x if x > 0 else -x)(np.ones(3))


def test_batched_values_show_what_they_are():
    shown = []
    md.vmap(lambda x: shown.append(repr(x)) or x, in_axes=1)(np.zeros((1, 2)))
    assert shown == ["Batched<f64[1]>(along axis 1 of array([[0., 0.]]))"]


ERRORS = [
    (
        lambda: md.vmap(lambda x, p: x, in_axes=(0, {"w": 1}))(np.ones(2), {"w": np.ones((2, 3))}),
        r"one size, got sizes \[2, 3\] \(args\[0\]: f64\[2\] along 0, args\[1\]\['w'\]: f64\[2,3\] along 1\)",
    ),
    (
        lambda: md.vmap(lambda x, *, k: x * k["a"])(X, k={"a": 1.0}),
        r"vmap: axis 0 is out of bounds for an array of 0 dimensions \(kwargs\['k'\]\['a'\]: f64\[\]\)",
    ),
    (lambda: md.vmap(abs, in_axes=(0, 0))(X), r"in_axes has 2 entries for 1 value"),
    (lambda: md.vmap(abs, in_axes="i")(X), r"in_axes is 'i', which is neither an entry for arrays"),
]


def test_something_not_a_function():
    with pytest.raises(TypeError, match=r"vmap takes a function, got ndarray: write vmap\(f\)\(x\)"):
        md.vmap(np.sin(X))


test_errors_say_what_is_wrong = refusals(ERRORS, error=ValueError)
