"""Elementwise functions beyond the table of smooth points: edges, complex numbers, and adding a new one."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import minidiff as md
from minidiff.core.tracer import NUMPY_FUNCTIONS, OPERATIONS
from minidiff.errors.other_libraries import suggestions
from minidiff.ops import declare_all
from minidiff.ops.elementwise import elementwise
from tests.checks.samples import each
from tests.minidiff.ops.test_ops import check_rows, checks_of
from tests.table.rows import complex_, real, row

INF, NAN = np.inf, np.nan
OTHERS = ("matvec", "vecdot", "vecmat", "matmul")  # products of matrices


def test_every_ufunc_is_there():
    ufuncs = {
        f
        for f in vars(np).values()
        if isinstance(f, np.ufunc) and f.__name__ not in {*OTHERS, *suggestions("numpy")["numpy"]}
    }
    assert {f.__name__ for f in ufuncs - set(NUMPY_FUNCTIONS)} == set()


def plain_softsign(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.abs(x))


@pytest.fixture
def softsign() -> Iterator[Callable]:
    yield elementwise(plain_softsign, lambda out, x: (1 - abs(out)) ** 2)
    del NUMPY_FUNCTIONS[plain_softsign]


def test_a_function_is_added_in_one_line(softsign):
    check_rows([row(softsign, x) for x in (real(2, 3), 0.7, real(0, 2))], checks_of)


#: Of (function, arguments): the derivative in each argument.
EDGES: list[tuple[Callable, tuple, tuple]] = [
    (np.abs, (0.0,), (0,)),
    (lambda x: np.abs(x * (1 + 1j)), (0.0,), (0,)),
    (np.sign, (0.0,), (0,)),
    (np.sinc, (0.0,), (0,)),
    (np.hypot, (0.0, 0.0), (0, 0)),
    (np.hypot, (3e-200, 4e-200), (0.6, 0.8)),
    (np.hypot, (3e200, 4e200), (0.6, 0.8)),
    (np.arctan2, (0.0, 0.0), (0, 0)),
    (np.arctan2, (0.0, 2e-200), (5e199, 0)),
    (np.arctan2, (1.0, 0.0), (0, -1)),
    (np.power, (0.0, 2.0), (0, 0)),
    (np.power, (0.0, 1.0), (1, 0)),
    (lambda x: x**3.0, (0.0,), (0,)),
    (md.grad(lambda x: x**1), (0.0,), (0,)),
    (md.grad(lambda x: x**2), (0.0,), (2,)),
    (md.grad(lambda x: x**3.0), (0.0,), (0,)),
    (md.grad(lambda x: np.logaddexp(x, 1.0)), (1.0,), (0.25,)),
    (md.grad(np.logaddexp), (INF, INF), (0.25, -0.25)),
    (md.grad(np.power), (2.0, 3.0), (12, 4 + 12 * np.log(2))),
    (md.grad(np.power), (2.0, 0.0), (0, 0.5)),
    (md.grad(np.power), (0.5, -1.0), (16, 4 * (np.log(2) + 1))),
    (lambda x: np.floor(x) + np.sign(x) + x // 2, (1.5,), (0,)),
    (np.power, (0.0, 0.0), (0, 0)),
    (np.power, (INF, 0.0), (0, INF)),
    (np.power, (-2.0, 3), (12,)),
    (lambda x: x**0, (0.0,), (0,)),
    (lambda x: x**1, (0.0,), (1,)),
    (np.float_power, (0.0, 2.0), (0, 0)),
    (np.logaddexp, (0.0, 0.0), (0.5, 0.5)),
    (np.logaddexp, (INF, INF), (0.5, 0.5)),
    (np.logaddexp, (-INF, -INF), (0.5, 0.5)),
    (np.logaddexp, (-INF, 0.0), (0, 1)),
    (np.logaddexp, (INF, 0.0), (1, 0)),
    (np.logaddexp, (1e3, -1e3), (1, 0)),
    (np.logaddexp2, (-INF, -INF), (0.5, 0.5)),
    (np.logaddexp2, (1e4, -1e4), (1, 0)),
    (np.maximum, (1.0, 1.0), (0.5, 0.5)),
    (np.maximum, (INF, INF), (0.5, 0.5)),
    (np.maximum, (-INF, INF), (0, 1)),
    (np.minimum, (-INF, INF), (1, 0)),
    (np.fmax, (NAN, 1.0), (0, 1)),
    (np.fmin, (1.0, NAN), (1, 0)),
    (np.fmin, (1.0, 1.0), (0.5, 0.5)),
    (np.fmod, (-7.0, 2.0), (1, 3)),
    (np.fmod, (7.0, INF), (1, 0)),
    (np.remainder, (-7.0, 2.0), (1, 4)),
    (np.copysign, (2.0, -0.0), (-1, 0)),
    (np.copysign, (-2.0, -1.0), (1, 0)),
    (np.copysign, (0.0, -1.0), (0, 0)),
    (np.heaviside, (0.0, 0.5), (0, 1)),
    (np.tanh, (1e3,), (0,)),
    (np.expm1, (-1e3,), (0,)),
    (np.nan_to_num, (NAN,), (0,)),
    (np.nan_to_num, (INF,), (0,)),
    (lambda x: np.clip(x, 0, 1), (1.0,), (0.5,)),
    (lambda x: np.clip(x, None, 1), (INF,), (0,)),
    (lambda x: np.interp(x, [0.0, 1.0, 3.0], [0.0, 1.0, 7.0]), (1.0,), (3,)),
    (lambda x: np.interp(x, [0.0, 1.0], [0.0, 1.0]), (2.0,), (0,)),
    (lambda x: np.modf(x)[0], (-2.5,), (1,)),
    (lambda x: np.frexp(x)[0], (6.0,), (1 / 8,)),
]


@each("f, args, expected", EDGES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_derivatives_at_edges(f, args, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, e in enumerate(expected):

            def of_one(x, i=i):
                return f(*args[:i], x, *args[i + 1 :])

            np.testing.assert_allclose(md.grad(of_one)(args[i]), e, rtol=1e-14)
            np.testing.assert_allclose(md.jvp(of_one, args[i : i + 1], (1.0,))[1], e, rtol=1e-14)


@each("f, expected", [(np.sqrt, INF), (np.cbrt, INF), (np.log, INF), (np.reciprocal, -INF)])
def test_infinite_derivatives_are_infinite(f, expected):
    with np.errstate(divide="ignore"):
        assert md.grad(f)(0.0) == expected


def test_pieces_see_no_numbers_but_their_own():
    f = lambda x: np.piecewise(x, [x > 0], [np.log, np.square]).sum()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert md.grad(f)(np.array([0.0, 2.0, -3.0])).tolist() == [0.0, 0.5, -6.0]


def test_derivatives_of_sinc_to_any_order():
    # sinc(x) = sum of (-1)^k (pi x)^2k / (2k + 1)!
    f, expected = np.sinc, [1, 0, -(np.pi**2) / 3, 0, np.pi**4 / 5, 0, -(np.pi**6) / 7]
    for e in expected:
        assert f(0.0) == pytest.approx(e, rel=1e-12)
        assert f(1e-9) == pytest.approx(e, rel=1e-12, abs=1e-6)
        f = md.grad(f)


#: What a function and its first two derivatives satisfy at x.
EQUATIONS = [
    (np.sinc, lambda x, f, df, ddf: x * ddf + 2 * df + np.pi**2 * x * f, [0.1, 0.9, 0.96, 3.0, 30.5, -2.0]),
    (np.i0, lambda x, f, df, ddf: (x * ddf + df) / f - x, [0.0, 1e-6, 0.5, 8.0, 50.0, -3.0, 600.0]),
    (lambda x: md.grad(md.grad(np.i0))(0.0) + 0 * x, lambda x, f, df, ddf: f - 0.5, [0.0]),
]


@each("f, equation, points", EQUATIONS)
def test_derivatives_satisfy_an_equation(f, equation, points):
    for x in points:
        assert equation(x, f(x), md.grad(f)(x), md.grad(md.grad(f))(x)) == pytest.approx(0, abs=1e-12 * max(1, abs(x)))


# ---------------------------------------------------------------- complex numbers

#: Real functions of a complex number; their gradient is df/dx - i df/dy.
REAL_VALUED = [
    *(np.abs, np.angle, np.real, np.imag, lambda z: np.abs(z) ** 2, lambda z: np.real(z * np.conj(z))),
    *(lambda z: np.real(np.sign(z) * z), lambda z: np.imag(np.exp(z) * np.conj(np.log(z))), lambda z: z.real * z.imag),
]


@each("f", REAL_VALUED)
def test_gradients_of_real_functions_of_complex_numbers(f):
    z, e = complex(complex_()), 1e-6
    dx, dy = ((f(np.complex128(z + e * d)) - f(np.complex128(z - e * d))) / (2 * e) for d in (1, 1j))
    assert md.grad(f)(z) == pytest.approx(dx - 1j * dy, rel=1e-6)


@each("f", [np.arccosh, np.arcsin, np.arccos, np.arctanh, np.arcsinh, np.arctan, np.sqrt, np.log])
@each("z", [complex(x, y) for x in (-2.7, -0.6, -0.1, 0.1, 0.9, 3.0) for y in (-2.1, -0.3, 0.2, 1.4)])
def test_branches_of_complex_functions(f, z):
    expected = (f(z + 1e-6) - f(z - 1e-6)) / 2e-6
    assert md.jvp(f, (z,), (1.0 + 0j,))[1] == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------- values at special numbers

SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, NAN, INF, -INF, 1e-300, 1e300])
declare_all()
UFUNCS = [f for f in NUMPY_FUNCTIONS if isinstance(f, np.ufunc) and getattr(np, f.__name__, None) is f]  # not SciPy's
ONE: list[Callable] = [
    *(f for f in UFUNCS if (f.nin, f.nout) == (1, 1)),
    *(np.sinc, np.round, np.fix, np.nan_to_num, np.angle, np.real, np.imag, np.isposinf, np.isneginf, np.iscomplex),
    *(lambda x: np.modf(x)[0], lambda x: np.modf(x)[1], lambda x: np.frexp(x)[0], lambda x: np.frexp(x)[1]),
    *(
        lambda x: np.clip(x, -1, 1),
        lambda x: np.clip(x, 1, -1),
        lambda x: np.round(x, 1),
        lambda x: x**-1,
        lambda x: x**2,
    ),
    *(lambda x: x**-1, lambda x: np.interp(x, [-1.0, 0.0, 1.0], [3.0, 2.0, 5.0])),
]
TWO: list[Callable] = [
    *(f for f in UFUNCS if (f.nin, f.nout) == (2, 1) and f is not np.matmul),
    *(lambda x, y: np.divmod(x, y)[0], lambda x, y: np.divmod(x, y)[1], np.isclose),
    lambda x, y: np.isclose(x, y, equal_nan=True),
]


#: In NumPy a loop of its own, whose last digit differs for some processors from that of `power`, which it is here.
IN_OTHER_DIGITS = {np.float_power: 4e-16}


def compare_with_numpy(f: Callable, *args: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = f(*args)
        except (TypeError, ValueError) as error:  # not of such numbers: an error on traced values, too
            with pytest.raises(TypeError if isinstance(error, TypeError) else ValueError):
                md.make_tape(f)(*args)(*args)
            return
        actual = md.make_tape(f)(*args)(*args)[0]
    assert md.typeof(actual) == md.typeof(expected)
    np.testing.assert_allclose(actual, expected, rtol=IN_OTHER_DIGITS.get(f, 0), atol=0)
    if np.asarray(expected).dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


@each("f", ONE, ids=lambda f: f.__name__)
@each("dtype", [float, np.float32, int], ids=lambda d: d.__name__)
def test_functions_of_special_numbers(f, dtype):
    with np.errstate(all="ignore"):
        compare_with_numpy(f, (np.arange(4) if dtype is int else SPECIAL).astype(dtype))


@each("f", TWO, ids=lambda f: f.__name__)
@each("dtype", [float, int], ids=lambda d: d.__name__)
def test_functions_of_pairs_of_special_numbers(f, dtype):
    x = SPECIAL if dtype is float else np.arange(4)
    compare_with_numpy(f, x[:, None], x)


# ---------------------------------------------------------------- values that are looked at

#: Functions that look at values, and arguments.
LOOKING = [
    (lambda x: x[np.where(x > 0)].sum() + (x[np.where(x)] ** 2).sum(), np.array([-1.0, 2.0])),
    *((lambda z: np.real_if_close(z * np.array([1.0, 2.0])), z) for z in (1 + 0j, 1 + 1j)),
]


@each("f, x", LOOKING)
def test_functions_of_values_see_them_under_derivatives(f, x):
    value, pullback = md.vjp(f, x)
    np.testing.assert_array_equal(value, f(x), strict=True)
    assert np.shape(pullback(np.ones_like(value))[0]) == np.shape(x)


def test_arrays_of_other_shapes_are_not_equal():
    assert np.array_equal(np.ones(2), np.ones(3)) is False
    both = lambda x: (np.array_equal(x, [1.0]), np.array_equiv(x, [1.0, 2.0]))  # noqa: E731
    assert md.make_tape(lambda x: x if both(x) == (False, False) else -x)(np.ones(3)).equations == []


def test_interpolation_is_differentiable_in_its_points():
    x, xp, fp = np.array([0.3, 1.7, -1.0, 5.0]), np.array([0.0, 1.0, 2.5]), np.array([1.0, -1.0, 4.0])
    md.testing.check_grads(np.interp, (x, xp, fp))
    md.testing.check_grads(lambda *args: np.interp(*args, left=0.5, right=0.7), (x, xp, fp))
    many = md.vmap(np.interp, in_axes=(None, 0, 0))(x, np.stack([xp, xp + 1]), np.stack([fp, fp]))
    np.testing.assert_allclose(many, [np.interp(x, xp, fp), np.interp(x, xp + 1, fp)])


# ---------------------------------------------------------------- beside integers

INTEGERS = [np.bool_, np.int8, np.uint8, np.int64, np.uint64]
REAL_BINARY = sorted(
    (f for f in UFUNCS if (f.nin, f.nout, f.signature) == (2, 1, None)),
    key=lambda f: f.__name__,
)


@each("dtype", INTEGERS)
@each("ufunc", REAL_BINARY)
def test_beside_integers_derivatives_are_those_beside_floats(ufunc, dtype):
    n, x = np.array([0, 1, 0, 1, 2, 7]).astype(dtype), np.array([0.3, 0.7, 25.0, 1.3, 2.2, 0.4])
    for of_x in (lambda n: lambda x: ufunc(x, n), lambda n: lambda x: ufunc(n, x)):
        try:
            if of_x(n)(x).dtype != float:
                continue
        except TypeError:  # NumPy's own
            continue
        floats = n if ufunc is np.ldexp else n.astype(float)
        actual, expected = (md.jvp(of_x(m), (x,), (np.ones(6),))[1] for m in (n, floats))
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


@each("dtype", [np.uint8, np.int16, np.float16, np.float64, np.complex64])
@each("low", [None, -300, 1.0, np.float32(1), np.arange(2, dtype=np.int8)])
@each("high", [None, 300, np.uint8(2), np.complex64(2)])
def test_clip_has_the_dtype_of_all_its_arguments(dtype, low, high):
    x = np.array([0, 5], dtype)
    try:
        expected = np.clip(x, low, high)
    except (OverflowError, ValueError):
        assert np.lib.NumpyVersion(np.__version__) < "2.1.0"
        pytest.skip("NumPy 2.0 takes bounds that the dtype holds, and one at least")
    np.testing.assert_array_equal(md.make_tape(lambda x: np.clip(x, low, high))(x)(x)[0], expected, strict=True)


TENSOR_PRODUCT = functools.partial(np.tensordot, axes=0)
SMALL, Z = np.ones(2, np.float16), np.array([1j, 0, -1, NAN * 1j])
#: Functions and arguments for which a value has another dtype than one expects, or is rounded apart, or wraps around.
LIKE_NUMPY = [
    *(
        ((lambda x, f=f, n=n: f(x, n)) if left else (lambda x, f=f, n=n: f(n, x)), (SMALL,))
        for f in (np.outer, np.multiply.outer, np.kron, np.inner, np.dot, TENSOR_PRODUCT)
        for n in (True, 2, 2.0, 2j)
        for left in (True, False)
    ),
    *(
        (f, (np.array([0, 0, 1], d), np.array([0, 1, 0], d) * np.array(-1).astype(d)))
        for f in (np.isclose, np.allclose)
        for d in (bool, np.uint8, np.int8, np.uint64, np.float16)
    ),
    (np.angle, (np.array([-1, 0, 3], np.int8),)),
    (lambda z: z.astype(bool), (Z,)),  # true where they are not zero
    (lambda z: np.round(z, 1), (np.array([1.5e308 - 1j, 0.04 - 0.04j, -1.26 + INF * 1j]),)),
]
ROUTES = {
    "eager": lambda f, xs: f(*xs),
    "tape": lambda f, xs: md.make_tape(f)(*xs)(*xs)[0],
    "jit": lambda f, xs: md.jit(f)(*xs),
    "vmap": lambda f, xs: md.vmap(f)(*[x[None] for x in xs])[0],
    "vjp": lambda f, xs: md.vjp(f, *xs)[0] if xs[0].dtype.kind in "fc" else f(*xs),
}


@each("f, xs", LIKE_NUMPY)
@each("route", ROUTES)
def test_values_and_dtypes_are_numpys(f, xs, route):
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(ROUTES[route](f, xs), f(*xs))
        assert md.typeof(ROUTES[route](f, xs)) == md.typeof(f(*xs))


@each("number", [3, 3.0])
@each("ufunc", [f for f in OPERATIONS if f in UFUNCS and f.nin == 2 and "ff->f" in f.types])
def test_derivatives_beside_python_numbers_keep_the_dtype(ufunc, number):
    x = np.array([0.3, 0.7], np.float32)
    for f in (lambda x: ufunc(x, number), lambda x: ufunc(number, x)):
        out, pull = md.vjp(f, x)
        assert pull(np.ones_like(out))[0].dtype == md.jvp(f, (x,), (x,))[1].dtype == np.float32
