"""NumPy's own functions, ufuncs, operators and conversions on traced values."""

import operator

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from minidiff.checks.testing import check_grads
from minidiff.core.tracer import NUMPY_FUNCTIONS, Tracer
from minidiff.numpy.dispatch import reduce
from tests.checks.samples import each

X = np.array([[1.0, 2.0], [3.0, 4.0]])


def on_tracer(f):
    """Run `f` on a traced value, and hand back what it is if it is no traced value itself."""
    seen = []
    md.make_tape(lambda x: seen.append(f(x)) or x)(X)
    return seen[0]


def test_some_functions_answer_from_the_values_behind():
    def facts(x):
        histogram = np.histogram2d(x[0], x[1], bins=2)
        return np.array2string(x), np.array_repr(x), np.unravel_index(np.argmax(x), x.shape), *histogram

    seen = []
    md.grad(lambda x: seen.extend(facts(x)) or x.sum())(X)
    np.testing.assert_equal(seen, list(facts(X)))


# ---------------------------------------------------------------- methods and keywords of ufuncs


DTYPES = [np.bool_, np.int8, np.uint32, np.float16, np.float32, np.complex64]
BINARY = [f for f in NUMPY_FUNCTIONS if isinstance(f, np.ufunc) and (f.nin, f.nout, f.signature) == (2, 1, None)]
BINARY = [f for f in BINARY if f in vars(np).values()]  # those of SciPy have no methods


def check_as_numpys(f, x):
    """On a tape it is NumPy's, but for rounding."""
    actual, expected = np.asarray(md.make_tape(f)(x)(x)[0]), np.asarray(f(x))
    eps = np.finfo(expected.dtype).eps if expected.dtype.kind in "fc" else 0
    np.testing.assert_allclose(actual, expected, rtol=8 * eps, strict=True)


@each("ufunc", sorted(BINARY, key=lambda f: f.__name__))
@each("method", ["reduce", "accumulate"])
@each("asked", [None, np.int8, np.float32])
def test_methods_of_ufuncs_have_numpys_dtypes(ufunc, method, asked):
    f = lambda x: getattr(ufunc, method)(x, 0, asked)  # noqa: E731
    for x in [np.ones((n, 2), dtype) for n in (1, 2) for dtype in DTYPES]:
        try:
            f(x)
        except TypeError:  # NumPy's own
            continue
        if ufunc is not np.ldexp:  # which takes what it returns for no exponent
            check_as_numpys(f, x)


@each("asked", [np.bool_, np.int8, np.uint32, np.float32])
@each("x", [np.array([[1.75, 2.5], [3.5, 7.0]]), np.array([[0, 1], [0, 4]], np.uint8)])
@each("axis", [None, 0, (0, 1)], str)
def test_means_have_the_dtype_asked_for(asked, x, axis):
    check_as_numpys(lambda x: np.mean(x, axis, asked), x)


@each("ufunc", [np.hypot, np.gcd, np.bitwise_and, np.copysign, np.logaddexp])
@each("shape", [(), (1,), (1, 2), (3,)], str)
def test_reductions_begin_with_the_identity(ufunc, shape):
    check_as_numpys(lambda x: ufunc.reduce(x), np.full(shape, -7))


@each("shape", [(3,), (1, 3), (3, 3)], str)
def test_points_of_an_integral_may_have_more_axes(shape):
    points = np.arange(9.0)[: np.prod(shape)].reshape(shape) ** 2
    check_as_numpys(lambda y: np.trapezoid(y, points), np.array([1.0, 2.0, 4.0]))


@each(
    "f, x",
    [
        *(
            (lambda x, d=d: np.multiply(x, 3.5, dtype=d, casting="same_kind"), x)
            for d, x in ((np.float32, X), (float, np.float32(X)), (complex, X))
        ),
        *((lambda x, m=m: getattr(np.subtract, m)(x, dtype=np.float32), X) for m in ("reduce", "accumulate")),
        (lambda x: np.subtract.reduceat(x, [0, 1], dtype=np.float32), X),
        (lambda x: np.add(x, 1.0, subok=False, order="C"), X),
        (lambda x: np.add.reduce(x, 0, None, None, True), X),
        (lambda x: np.moveaxis(x, source=0, destination=1), X),
        (lambda x: np.sum(x, dtype=None, out=None, initial=np._NoValue), X),
        (lambda x: x * np.arange(2), np.float32(X)),
    ],
)
def test_keywords_and_promotion_are_numpys(f, x):
    value, tangent = md.jvp(f, (x,), (x,))
    np.testing.assert_array_equal(value, f(x), strict=True)
    assert tangent.dtype == f(x).dtype
    assert md.vjp(f, x)[1](value)[0].dtype == x.dtype


@each("axis, keepdims", [(0, False), (-1, True), (None, False), ((0, 1), True)], str)
def test_logaddexp_reduces_without_overflow(axis, keepdims):
    f = lambda x: reduce(np.logaddexp, x, axis, keepdims=keepdims)  # noqa: E731
    for scale in (1, 1000):
        np.testing.assert_allclose(f(scale * X), np.logaddexp.reduce(scale * X, axis, keepdims=keepdims))
    check_grads(f, (X,))


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
