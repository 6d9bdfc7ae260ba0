"""Elementwise functions beyond the table of smooth points: edges, complex numbers, and adding a new one."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff.core.tracer import NUMPY_FUNCTIONS, OPERATIONS
from minidiff.errors.other_libraries import suggestions
from minidiff.ops import declare_all
from minidiff.ops.elementwise import elementwise
from tests.checks.samples import each
from tests.minidiff.ops.test_ops import check_rows, checks_of
from tests.minidiff.refusals import refusals
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


# ---------------------------------------------------------------- a function from outside, in one line


def plain_softsign(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.abs(x))


@pytest.fixture
def softsign() -> Iterator[Callable]:
    yield elementwise(plain_softsign, lambda out, x: (1 - abs(out)) ** 2)
    del NUMPY_FUNCTIONS[plain_softsign]


def test_a_function_is_added_in_one_line(softsign):
    check_rows([row(softsign, x) for x in (real(2, 3), 0.7, real(0, 2))], checks_of)


# ---------------------------------------------------------------- edges

#: Of (function, arguments): the derivative in each argument.
EDGES: list[tuple[Callable, tuple, tuple]] = [
    (np.abs, (0.0,), (0,)),
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


@pytest.mark.parametrize("f, expected", [(np.sqrt, INF), (np.cbrt, INF), (np.log, INF), (np.reciprocal, -INF)])
def test_infinite_derivatives_are_infinite(f, expected):
    with np.errstate(divide="ignore"):
        assert md.grad(f)(0.0) == expected


def test_pieces_see_no_numbers_but_their_own():
    def f(x):
        return np.piecewise(x, [x > 0], [np.log, np.square]).sum()

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


@pytest.mark.parametrize("x", [0.1, 0.9, 0.96, 3.0, 30.5, -2.0])
def test_derivatives_of_sinc_satisfy_its_equation(x):
    # x f'' + 2 f' + pi^2 x f = 0
    f, df, ddf = np.sinc, md.grad(np.sinc), md.grad(md.grad(np.sinc))
    assert x * ddf(x) + 2 * df(x) + np.pi**2 * x * f(x) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("x", [0.0, 1e-6, 0.5, 8.0, 50.0, -3.0, 600.0])
def test_derivatives_of_i0_satisfy_its_equation(x):
    # x f'' + f' - x f = 0
    f, df, ddf = np.i0, md.grad(np.i0), md.grad(md.grad(np.i0))
    assert x * ddf(x) + df(x) == pytest.approx(x * f(x), rel=1e-12)
    assert ddf(0.0) == pytest.approx(0.5, rel=1e-12)


def test_mixed_derivatives_of_powers():
    both = md.grad(md.grad(np.power, 0), 1)  # x^(y-1) (1 + y log x)
    for x, y in ((2.0, 0.0), (2.0, 3.0), (0.5, -1.0)):
        assert both(x, y) == pytest.approx(x ** (y - 1) * (1 + y * np.log(x)))


def test_second_derivatives_at_ties():
    assert md.grad(md.grad(np.logaddexp))(1.0, 1.0) == 0.25
    assert md.grad(md.grad(np.logaddexp, 0), 1)(INF, INF) == -0.25


# ---------------------------------------------------------------- complex numbers

#: Real functions of a complex number; their gradient is df/dx - i df/dy.
REAL_VALUED = [
    *(np.abs, np.angle, np.real, np.imag, lambda z: np.abs(z) ** 2, lambda z: np.real(z * np.conj(z))),
    *(lambda z: np.real(np.sign(z) * z), lambda z: np.imag(np.exp(z) * np.conj(np.log(z))), lambda z: z.real * z.imag),
]


@pytest.mark.parametrize("f", REAL_VALUED)
def test_gradients_of_real_functions_of_complex_numbers(f):
    z, e = complex(complex_()), 1e-6
    dx, dy = ((f(np.complex128(z + e * d)) - f(np.complex128(z - e * d))) / (2 * e) for d in (1, 1j))
    assert md.grad(f)(z) == pytest.approx(dx - 1j * dy, rel=1e-6)


def test_the_absolute_value_has_derivative_zero_at_a_complex_zero():
    assert md.grad(np.abs)(0j) == 0


@pytest.mark.parametrize("f", [np.arccosh, np.arcsin, np.arccos, np.arctanh, np.arcsinh, np.arctan, np.sqrt, np.log])
@given(*[st.floats(0.1, 3) | st.floats(-3, -0.1)] * 2)
@settings(max_examples=20, deadline=None)
def test_branches_of_complex_functions(f, x, y):
    z, e = complex(x, y), 1e-6
    expected = (f(z + e) - f(z - e)) / (2 * e)
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


# ---------------------------------------------------------------- values that are looked at, and errors


def test_where_of_a_condition_alone_gives_indices():
    def f(x):
        return x[np.where(x > 0)].sum() + (x[np.where(x)] ** 2).sum()

    assert md.grad(f)(np.array([-1.0, 2.0])).tolist() == [-2.0, 5.0]


def test_real_if_close_looks_at_values():
    def f(z):
        return np.real_if_close(z).dtype.kind

    seen = []
    md.vjp(lambda z: seen.append(f(z * np.array([1.0, 2.0]))) or z, 1 + 0j)
    md.vjp(lambda z: seen.append(f(z * np.array([1.0, 2.0]))) or z, 1 + 1j)
    assert seen == ["f", "c"]


def test_arrays_of_other_shapes_are_not_equal():
    assert np.array_equal(np.ones(2), np.ones(3)) is False
    seen = []
    md.make_tape(lambda x: seen.append((np.array_equal(x, [1.0]), np.array_equiv(x, [1.0, 2.0]))) or x)(np.ones(3))
    assert seen == [(False, False)]


def test_interpolation_is_differentiable_in_its_points():
    x, xp, fp = np.array([0.3, 1.7, -1.0, 5.0]), np.array([0.0, 1.0, 2.5]), np.array([1.0, -1.0, 4.0])
    md.testing.check_grads(np.interp, (x, xp, fp))
    md.testing.check_grads(lambda *args: np.interp(*args, left=0.5, right=0.7), (x, xp, fp))
    many = md.vmap(np.interp, in_axes=(None, 0, 0))(x, np.stack([xp, xp + 1]), np.stack([fp, fp]))
    np.testing.assert_allclose(many, [np.interp(x, xp, fp), np.interp(x, xp + 1, fp)])


ERRORS = [
    (lambda x: np.where(x > 0, x), ValueError, "both or neither"),
    (lambda x: np.select([x > 0], [x, x]), ValueError, "same length|1 conditions, but 2 choices"),
    (lambda x: np.piecewise(x, [x > 0], [1.0, 2.0, 3.0]), ValueError, "3 functions for 1 conditions"),
    (
        lambda x: np.exp(x, dtype=np.int64),
        TypeError,
        r"np.exp of float64 cannot be computed in dtype=int64 .*np.exp\(x\).astype\('int64'\)",
    ),
    (lambda x: np.interp(x, x, x[:1]), ValueError, r"vectors of equal length, got f64\[2\] and f64\[1\]"),
    (lambda x: x.astype(int, casting="safe"), TypeError, r"f64\[2\] cannot be cast to int64"),
    (lambda x: x & 1, TypeError, "bitwise_and"),
    (lambda x: md.nn.erf(x + 1j), TypeError, "real number"),
]
test_errors_say_what_is_wrong = refusals(ERRORS, lambda f: md.make_tape(f)(np.ones(2)))


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
    if low is high is None and np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("NumPy 2.0 clips to one bound at least")
    x = np.array([0, 5], dtype)
    try:
        expected = np.clip(x, low, high)
    except OverflowError:
        assert np.lib.NumpyVersion(np.__version__) < "2.1.0"
        pytest.skip("NumPy 2.0 takes bounds that the dtype holds")
    np.testing.assert_array_equal(md.make_tape(lambda x: np.clip(x, low, high))(x)(x)[0], expected, strict=True)


TENSOR_PRODUCT = functools.partial(np.tensordot, axes=0)


@each("number", [True, 2, 2.0, 2j])
@each("f", [np.outer, np.multiply.outer, np.kron, np.inner, np.dot, TENSOR_PRODUCT])
def test_products_with_python_numbers_can_be_recorded(f, number):
    x = np.ones(2, np.float16)
    for g in (lambda x: f(x, number), lambda x: f(number, x)):
        np.testing.assert_array_equal(md.make_tape(g)(x)(x)[0], g(x), strict=True)


@each("number", [3, 3.0])
@each("ufunc", [f for f in OPERATIONS if f in UFUNCS and f.nin == 2 and "ff->f" in f.types])
def test_derivatives_beside_python_numbers_keep_the_dtype(ufunc, number):
    x = np.array([0.3, 0.7], np.float32)
    for f in (lambda x: ufunc(x, number), lambda x: ufunc(number, x)):
        out, pull = md.vjp(f, x)
        assert pull(np.ones_like(out))[0].dtype == md.jvp(f, (x,), (x,))[1].dtype == np.float32


def test_complex_numbers_are_true_where_they_are_not_zero():
    z = np.array([1j, 0, -1, np.nan * 1j])
    for way in (md.jit, md.vmap, lambda f: lambda z: md.make_tape(f)(z)(z)[0], lambda f: lambda z: md.vjp(f, z)[0]):
        assert way(lambda z: z.astype(bool))(z).tolist() == z.astype(bool).tolist()


@pytest.mark.parametrize("f", [np.isclose, np.allclose])
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int8, np.uint64, np.float16])
def test_distances_do_not_wrap_around(f, dtype):
    x, y = np.array([0, 0, 1], dtype), np.array([0, 1, 0], dtype) * np.array(-1).astype(dtype)
    np.testing.assert_array_equal(md.make_tape(f)(x, y)(x, y)[0], f(x, y))


def test_angles_of_small_integers_have_numpys_dtype():
    x = np.array([-1, 0, 3], np.int8)
    np.testing.assert_array_equal(md.make_tape(np.angle)(x)(x)[0], np.angle(x), strict=True)


@pytest.mark.parametrize("way", [lambda f: f, md.jit, md.vmap, md.make_tape], ids=["run", "jit", "vmap", "make_tape"])
def test_parts_of_complex_numbers_are_rounded_apart(way):
    x, f = np.array([1.5e308 - 1j, 0.04 - 0.04j, -1.26 + np.inf * 1j]), lambda x: np.round(x, 1)
    with np.errstate(over="ignore"):
        y = way(f)(x)
        y = y(x)[0] if isinstance(y, md.Tape) else y
        np.testing.assert_array_equal(y, np.round(x, 1))
