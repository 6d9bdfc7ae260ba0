"""The namespace `minidiff.numpy`, and NumPy's own functions and arrays meeting traced values."""

import math
import operator

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from minidiff.core import NUMPY_FUNCTIONS, Tracer

X = np.array([[1.0, 2.0], [3.0, 4.0]])


def on_tracer(f):
    """Run `f` on a traced value, and hand back what it is if it is no traced value itself."""
    seen = []
    md.make_tape(lambda x: seen.append(f(x)) or x)(X)
    return seen[0]


# ---------------------------------------------------------------- the namespace


def test_the_namespace_is_numpys():
    own = {"array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "require"}
    own |= {"full", "full_like", "take"}
    assert set(mnp.__all__) == {*np.__all__, "at"}
    assert {name for name in np.__all__ if getattr(mnp, name) is not getattr(np, name)} == own


ARRAYS = [
    (lambda np_, x: np_.array([x, 2 * x]), 1.5),
    (lambda np_, x: np_.array([[x, 1.0], (0, x * x)]), 1.5),
    (lambda np_, x: np_.asarray([x[0], X[1]]), X),
    (lambda np_, x: np_.asarray(x), X),
    (lambda np_, x: np_.array([1, 2]) * x, 1.5),
    (lambda np_, x: np_.asarray(X) * x, 1.5),
    (lambda np_, x: np_.take(x, [1, 0], axis=1), X),
]


@pytest.mark.parametrize("f, x", ARRAYS)
def test_arrays_of_traced_values(f, x):
    value, tangent = md.jvp(lambda x: f(mnp, x), (x,), (x,))
    np.testing.assert_array_equal(value, f(np, x))
    step = 1e-6
    np.testing.assert_allclose(tangent, (f(np, x + step * x) - f(np, x - step * x)) / (2 * step), rtol=1e-6, atol=1e-9)


def test_arrays_of_traced_values_take_a_dtype():
    value, tangent = md.jvp(lambda x: mnp.array([x, 1.0], dtype="float32"), (2.0,), (3.0,))
    assert (value.dtype, tangent.dtype, tangent.tolist()) == (np.float32, np.float32, [3.0, 0.0])
    assert mnp.asarray([1, 2], float).dtype == float
    assert on_tracer(lambda x: mnp.asarray(x) is x)


def test_plain_arrays_at_traced_indices():
    assert md.vmap(lambda i: mnp.take(X, i, axis=1).sum())(np.array([1, 0, -1])).tolist() == [6.0, 4.0, 6.0]


# ---------------------------------------------------------------- the protocol

OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod, operator.floordiv]
OPERATORS += [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.mark.parametrize("other", [2, 2.5, np.float64(2.5), np.float32(2), np.array(3.0), X], ids=repr)
@pytest.mark.parametrize("op", OPERATORS, ids=lambda f: f.__name__)
def test_operators_with_whatever_is_on_the_other_side(op, other):
    def both(x):
        return op(x, other), op(other, x)

    tape = md.make_tape(both)(X)
    for actual, expected in zip(tape(X), both(X), strict=True):
        assert md.typeof(actual) == md.typeof(expected)
        np.testing.assert_array_equal(actual, expected)


ALIASES = {"abs": X, "mod": X, "true_divide": X, "concat": X, "permute_dims": X, "pow": X}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_are_the_functions_they_name(name):
    assert getattr(np, name) in NUMPY_FUNCTIONS


def test_code_written_for_numpy_is_differentiated_as_it_stands():
    def softmax_loss(logits, label):
        shifted = logits - np.max(logits, axis=-1, keepdims=True)
        return -(shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True)))[np.arange(2), label].mean()

    p = np.exp(X) / np.exp(X).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(md.grad(softmax_loss)(X, np.array([1, 0])), (p - np.array([[0, 1], [1, 0]])) / 2)


def test_constants_of_integers_promote_as_in_numpy():
    x = np.ones(3, np.float32)
    _, pullback = md.vjp(lambda x: x * np.arange(3), x)
    assert md.jvp(lambda x: x * np.arange(3), (x,), (x,))[1].dtype == np.float64
    assert pullback(np.ones(3))[0].dtype == np.float32


ERRORS = {
    "asarray": (np.asarray, md.TracerError, r"value \(f64\[2,2\]\) cannot become a plain NumPy array: .*np\.stack"),
    "array of a list": (lambda x: np.array([x[0, 0], 1.0]), TypeError, r"cannot become a plain NumPy array|float\(\)"),
    "writing into an array": (lambda x: np.copyto(np.zeros((2, 2)), x), TypeError, r"np\.copyto is not supported"),
    "writing a row": (lambda x: np.zeros((2, 2)).__setitem__(0, x[0]), TypeError, r"cannot become a plain NumPy array"),
    "unsupported function": (
        np.linalg.svd,
        TypeError,
        r"np\.svd is not supported on traced values \(f64\[2,2\]\); supported: absolute, add, .*, where",
    ),
    "unsupported ufunc": (
        np.frompyfunc(math.gamma, 1, 1),
        TypeError,
        r"np\.gamma .*is not supported on traced values \(f64\[2,2\]\)",
    ),
    "method of a ufunc": (np.add.reduce, TypeError, r"np\.add\.reduce is not supported on traced values"),
    "keyword": (
        lambda x: np.sum(x, out=np.ones(())),
        TypeError,
        r"np\.sum on traced values: sum\(\) got an unexpected keyword argument 'out'",
    ),
    "keyword of a ufunc": (lambda x: np.add(x, 1, where=X > 1), TypeError, r"np\.add on traced values: .*'where'"),
    "positional out": (lambda x: np.sum(x, 0, None, X[0]), TypeError, r"takes from 1 to 3 positional arguments but 4"),
    "out": (lambda x: np.sin(x, out=np.zeros((2, 2))), TypeError, r"np\.sin cannot write a traced value into an"),
    "in place": (lambda x: operator.imul(np.ones((2, 2)), x), TypeError, r"np\.multiply cannot write .* a = a \+ x"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_is_not_possible(case):
    f, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        on_tracer(f)


def test_arrays_leave_operators_to_traced_values():
    results = on_tracer(lambda x: [np.ones(2) * x, np.float64(2) * x, np.ones((2, 2)) @ x, np.less(X, x)])
    assert all(isinstance(y, Tracer) for y in results)
