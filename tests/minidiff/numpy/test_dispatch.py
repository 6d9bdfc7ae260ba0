"""NumPy's own functions, ufuncs, operators and conversions on traced values."""

import operator

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from minidiff.core.tracer import Tracer
from tests.checks.samples import each

X = np.array([[1.0, 2.0], [3.0, 4.0]])


def on_tracer(f):
    """Run `f` on a traced value, and hand back what it is if it is no traced value itself."""
    seen = []
    md.make_tape(lambda x: seen.append(f(x)) or x)(X)
    return seen[0]


# ---------------------------------------------------------------- operators

ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod, operator.floordiv]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@each("other", [2, 2.5, np.float64(2.5), np.float32(2), np.array(3.0), X], ids=repr)
@each("op", ARITHMETIC + COMPARISONS, ids=lambda f: f.__name__)
def test_operators_with_whatever_is_on_the_other_side(op, other):
    both = lambda x: (op(x, other), op(other, x))  # noqa: E731
    tape = md.make_tape(both)(X)
    for actual, expected in zip(tape(X), both(X), strict=True):
        assert md.typeof(actual) == md.typeof(expected)
        np.testing.assert_array_equal(actual, expected)


def test_arrays_leave_operators_to_traced_values():
    results = on_tracer(lambda x: [np.ones(2) * x, np.float64(2) * x, np.ones((2, 2)) @ x, np.less(X, x)])
    assert all(isinstance(y, Tracer) for y in results)


class Labeled:
    """An array with labels, as xarray's: it has a `__array_ufunc__`, and operators that call it."""

    def __init__(self, data):
        self.data = data

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return Labeled(getattr(ufunc, method)(*[x.data if isinstance(x, Labeled) else x for x in inputs], **kwargs))


class Opaque(Labeled):
    """A class that takes no part in ufuncs."""

    __array_ufunc__ = None


class Prior:
    """A class that goes before arrays, and before traced values."""

    __array_priority__ = 2000

    def __init__(self, data):
        self.data = data


def _reflected(op):
    """The class's result of `op(x, it)`."""
    return lambda self, x: type(self)(op(x, self.data))


DEFERRED = [*ARITHMETIC, operator.matmul, divmod, operator.lt, operator.eq]
for _cls in (Labeled, Prior):
    for _op in [*ARITHMETIC, operator.matmul, divmod]:
        setattr(_cls, f"__r{_op.__name__}__", _reflected(_op))
    _cls.__gt__, _cls.__eq__ = _reflected(operator.lt), _reflected(operator.eq)


@each("op", DEFERRED)
@each("x", [X, 2.0], ids=["array", "number"])
@each("around", [lambda f: md.grad(f), lambda f: md.jit(f), lambda f: md.grad(md.checkpoint(f))])
@each("cls", [Labeled, Opaque, Prior])
def test_operators_are_left_to_classes_that_numpy_leaves_them_to(op, cls, around, x):
    seen = []
    if op not in (operator.matmul, divmod) or x is X:
        around(lambda x: seen.append(op(x, cls(X))) or np.sum(x))(x)
        assert type(seen[0]) is cls


def test_ufuncs_are_left_to_classes_that_have_their_own():
    def f(x):
        for namespace in (np, mnp):
            for y in (
                namespace.multiply(x, Labeled(X)),
                namespace.hypot(Labeled(X), x),
                namespace.add(x, Labeled(X), dtype=float),
                namespace.multiply.outer(x, Labeled(X)),
            ):
                assert type(y) is Labeled
                assert isinstance(y.data, Tracer)
        return namespace.multiply(x, Labeled(X)).data.sum()

    np.testing.assert_array_equal(md.grad(f)(X), X)
    with pytest.raises(TypeError, match="does not support ufuncs"):
        md.grad(lambda x: mnp.multiply(x, Opaque(X)).sum())(X)


# ---------------------------------------------------------------- conversions to plain numbers and arrays


@each("kind", [np.int64, np.uint8, np.bool_])
def test_whole_numbers_are_converted_where_there_is_a_value(kind):
    seen = []
    md.grad(lambda x: seen.append((kind(x), kind(x[0, 0]), np.asarray(x, kind))) or x.sum())(X)
    for actual, expected in zip(seen[0], (kind(X), kind(X[0, 0]), np.asarray(X, kind)), strict=True):
        np.testing.assert_array_equal(actual, expected, strict=True)


@each("around", [md.jit, md.vmap, md.make_tape])
@each("kind", [np.int64, np.bool_, np.float32, np.complex128])
def test_names_are_not_converted(kind, around):
    with pytest.raises(md.TracerError):
        around(lambda x: kind(x))(X)


@each("kind", [np.float16, np.float32, np.float64, np.complex64, object, float, complex])
@each("around", [md.grad, lambda f: lambda x: md.jvp(f, (x,), (x,)), lambda f: md.jit(md.grad(f))])
@each("convert", [lambda x, kind: np.asarray(x, kind), lambda x, kind: x if kind is object else kind(x[0, 0])])
def test_nothing_is_converted_that_would_lose_a_derivative(kind, around, convert):
    if kind is not object or np.ndim(convert(X, kind)) == 2:
        with pytest.raises((md.TracerError, TypeError)):
            around(lambda x: np.sum(np.asarray(convert(x, kind))))(X)
