"""Values, dtypes, signs of zeros and refusals are NumPy's by every route, beyond a table of smooth points."""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from minidiff.core.tracer import NUMPY_FUNCTIONS
from minidiff.ops import declare_all
from tests.checks.samples import check_each, each

INF, NAN = np.inf, np.nan


class Like(NamedTuple):
    """A function, its arguments, and by how many units in the last place a result may differ."""

    f: Callable
    args: tuple
    ulps: int = 0


def like(f: Callable, *args: Any, ulps: int = 0) -> Like:
    return Like(f, args, ulps)


def with_options(functions: list, x: Any, options: list[dict], ulps: int = 0) -> list[Like]:
    """Every function with all options."""
    return [Like(functools.partial(_with, f, o), (x,), ulps) for f in functions for o in options]


def _with(f: Callable, options: dict, x: Any) -> Any:
    return f(x, **options)


def check_alike(actual: Any, expected: Any, ulps: int) -> None:
    assert type(actual) is type(expected) or not isinstance(expected, tuple) or type(actual) is list  # as of a tape
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        assert md.typeof(a) == md.typeof(e)
        eps = np.finfo(md.typeof(e).dtype).eps if md.typeof(e).dtype.kind in "fc" else 0.0
        np.testing.assert_allclose(a, e, rtol=ulps * eps, atol=ulps * eps / 4)
        if np.asarray(e).dtype.kind == "f" and not ulps:
            np.testing.assert_array_equal(np.signbit(a), np.signbit(e))


ROUTES = {
    "tape": lambda f, xs: md.make_tape(f)(*xs)(*xs),
    "jit": lambda f, xs: md.jit(f)(*xs),
    "vmap": lambda f, xs: md.tree.map(lambda y: y[0], md.vmap(f)(*[np.asarray(x)[None] for x in xs])),
    "jvp": lambda f, xs: md.jvp(f, xs, xs)[0],
}
REFUSALS = (TypeError, ValueError)


def check_route(route: str, sample: Like) -> None:
    f, xs, ulps = sample
    if route == "jvp" and any(np.asarray(x).dtype.kind not in "fc" for x in xs):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = f(*xs)
        except OverflowError:  # NumPy 2.0 takes bounds that the dtype holds
            return
        except REFUSALS:
            with pytest.raises(REFUSALS):
                ROUTES[route](f, xs)
        else:
            check_alike(ROUTES[route](f, xs), expected, ulps)


# ---------------------------------------------------------------- special numbers

SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, NAN, INF, -INF, 1e-300, 1e300])
CORNERS = [complex(x, y) for x in (0.0, -1.5, INF, -INF, NAN) for y in (0.0, 2.0, -INF)]
declare_all()
UFUNCS = [f for f in NUMPY_FUNCTIONS if isinstance(f, np.ufunc) and getattr(np, f.__name__, None) is f]  # not SciPy's
BINARY = sorted((f for f in UFUNCS if (f.nin, f.nout, f.signature) == (2, 1, None)), key=lambda f: f.__name__)
ONE: list[Callable] = [
    *(f for f in UFUNCS if (f.nin, f.nout) == (1, 1)),
    *(np.sinc, np.round, np.fix, np.nan_to_num, np.angle, np.real, np.imag, np.isposinf, np.isneginf, np.iscomplex),
    *(np.modf, np.frexp, lambda x: np.clip(x, -1, 1), lambda x: np.clip(x, 1, -1), lambda x: np.round(x, 1)),
    *(lambda x: x**-1, lambda x: x**2, lambda x: np.interp(x, [-1.0, 0.0, 1.0], [3.0, 2.0, 5.0])),
]
TWO = [*BINARY, np.divmod, np.isclose, functools.partial(np.isclose, equal_nan=True)]


#: In NumPy a loop of its own, whose last digit differs for some processors from that of `power`, which it is here.
IN_OTHER_DIGITS = {np.float_power: 2}
with np.errstate(over="ignore"):
    SINGLE = SPECIAL.astype(np.float32)


@each("f", ONE)
@each("x", [SPECIAL, SINGLE, np.arange(4)], ["f64", "f32", "i64"])
def test_functions_of_special_numbers(f, x):
    check_route("tape", like(f, x))


@each("f", TWO)
@each("x", [SPECIAL, np.arange(4)], ["f64", "i64"])
def test_functions_of_pairs_of_special_numbers(f, x):
    check_route("tape", like(f, x[:, None], x, ulps=IN_OTHER_DIGITS.get(f, 0)))


# ---------------------------------------------------------------- samples

N2, M, X = np.array([[NAN, NAN], [1.0, 3.0]]), np.array([[1.0, 2.0], [3.0, 4.0]]), np.arange(6.0).reshape(2, 3)
BYTES, VECTOR = np.array([[1.75, 2.5], [3.5, 7.0]]), np.array([1.0, NAN, 2.0])
HALF, TENSOR_PRODUCT = np.ones(2, np.float16), functools.partial(np.tensordot, axes=0)
DTYPES = [np.float16, np.float32, np.float64, np.complex64, bool, np.int8, np.uint16, np.int64]

LOW, HIGH = (None, -300, 1.0, np.float32(1), np.arange(2, dtype=np.int8)), (None, 300, np.uint8(2), np.complex64(2))

ELEMENTWISE = [
    *(like(lambda x, f=f, n=n: f(x, n), HALF) for f in (np.outer, np.kron, np.dot) for n in (True, 2, 2.0, 2j)),
    *(like(lambda x, f=f, n=n: f(n, x), HALF) for f in (np.multiply.outer, np.inner, TENSOR_PRODUCT) for n in (2, 2j)),
    *(
        like(f, np.array([0, 0, 1], d), np.array([0, 1, 0], d) * np.array(-1).astype(d))
        for f in (np.isclose, np.allclose)
        for d in (bool, np.uint8, np.int8, np.uint64, np.float16)
    ),
    like(np.angle, np.array([-1, 0, 3], np.int8)),
    like(lambda z: z.astype(bool), np.array([1j, 0, -1, NAN * 1j])),  # true where they are not zero
    like(lambda z: np.round(z, 1), np.array([1.5e308 - 1j, 0.04 - 0.04j, -1.26 + INF * 1j])),
    like(np.sign, np.array(CORNERS), ulps=1),
    *(
        like(functools.partial(np.clip, a_min=low, a_max=high), np.array([0, 5], d))
        for d in (np.uint8, np.float16, np.float64, np.complex64)
        for low, high in [*itertools.product(LOW, HIGH)][1:]  # NumPy 2.0 wants one bound at least
    ),
]
REDUCTIONS = [
    *(
        like(f, np.arange(1, 6).astype(d), ulps=32)
        for f in (np.sum, np.mean, np.prod, np.var, np.std, np.cumsum, np.cumprod, np.max, np.median, np.ptp, np.nansum)
        for d in DTYPES
        if (f, d) != (np.ptp, bool)  # NumPy subtracts no booleans
    ),
    *(
        sample
        for x in (np.array([100, 27, 3], np.int8), np.ones(3, np.float32))
        for sample in with_options(
            [np.sum, np.prod, np.cumsum, np.cumprod], x, [{"dtype": d} for d in (bool, np.int8, np.uint16, float)]
        )
    ),
    *(
        sample
        for x in (BYTES, np.array([[0, 1], [0, 4]], np.uint8))
        for sample in with_options(
            [np.mean], x, [{"axis": a, "dtype": d} for a in (None, (0, 1)) for d in (bool, np.int8, np.float32)], 8
        )
    ),
    *with_options([np.nanmean, np.nanvar, np.nanstd, np.nanmax, np.nanmin, np.nanmedian], N2, [{"axis": 1}], 8),
    *(like(functools.partial(f, initial=np.float64(0.5)), HALF.astype("f4")) for f in (np.max, np.sum, np.prod)),
    *(like(f, VECTOR) for f in (np.max, np.median, np.ptp, np.cumsum, np.prod, lambda x: np.quantile(x, 0.2))),
    *(
        like(ufunc.reduce, np.full(shape, -7), ulps=8)
        for ufunc in (np.hypot, np.gcd, np.bitwise_and, np.copysign, np.logaddexp)
        for shape in ((1,), (1, 2), (3,))
    ),
    *(
        like(lambda y, p=points: np.trapezoid(y, p), np.array([1.0, 2.0, 4.0]), ulps=8)
        for points in (np.arange(3.0) ** 2, np.arange(3.0)[None] ** 2, np.arange(9.0).reshape(3, 3) ** 2)
    ),
    like(lambda x: np.average(x, 1, np.array([1.0, 2.0, 3.0]), returned=True), X**2, ulps=8),
    like(np.gradient, X**2, ulps=8),
    *(
        like(functools.partial(np.histogram, **o), x, ulps=8)
        for x in (np.array([1.0, -2.0, 1.0, 3.0]), np.zeros(2))
        for o in ({"bins": 3}, {"bins": [-1, 0, 2]}, {"bins": 4, "range": (-2, 1)})
    ),
]
KEYWORDS = [
    *(like(functools.partial(np.logaddexp.reduce, axis=a), 1000 * M, ulps=4) for a in (0, None)),
    *(
        like(lambda x, d=d: np.multiply(x, 3.5, dtype=d, casting="same_kind"), x)
        for d, x in ((np.float32, M), (float, np.float32(M)), (complex, M))
    ),
    *(like(functools.partial(getattr(np.subtract, m), dtype=np.float32), M) for m in ("reduce", "accumulate")),
    like(lambda x: np.subtract.reduceat(x, [0, 1], dtype=np.float32), M),
    like(lambda x: np.add(x, 1.0, subok=False, order="C"), M),
    like(lambda x: np.add.reduce(x, 0, None, None, True), M),
    like(lambda x: np.moveaxis(x, source=0, destination=1), M),
    like(lambda x: np.sum(x, dtype=None, out=None, initial=np._NoValue), M),
    like(lambda x: x * np.arange(2), np.float32(M)),
]
#: Shapes, axes and sizes are integers, as NumPy takes them.
INTEGERS = [
    like(lambda x: mnp.full(np.array([2, 2]), x[0, 0]), X),
    like(lambda x: x.reshape(np.array([3, 2])), X),
    like(lambda x: x.reshape(np.array(3), np.int64(2)), X),
    like(lambda x: x.transpose(np.array([1, 0])), X),
    like(lambda x: x.swapaxes(np.int64(0), np.array(1)), X),
    like(lambda x: x.sum(axis=np.array(1)), X),
    like(lambda x: np.reshape(x, range(6, 7)), X),
    like(lambda x: np.tensordot(x, x, axes=np.array([[0, 1], [0, 1]])), X, ulps=8),
    like(lambda x: np.fft.fft2(x, s=np.array([4, 4])), X, ulps=32),
    like(lambda x: np.roll(x, np.array([1, 2]), np.array([0, 1])), X),
    *(like(functools.partial(f, axis=1.0), X) for f in (np.sum, np.flip, np.cumsum, np.squeeze)),  # which are refused
    like(lambda x: np.reshape(x, np.array([3.0, 2.0])), X),
]
#: Numbers have an axis for some functions, and none for others.
ALONG_NO_AXIS = [np.sum, np.prod, np.max, np.min, np.all, np.any, np.ptp, np.mean, np.var, np.std, np.median, np.nansum]
ALONG_NO_AXIS += [np.nanprod, np.nanmax, np.nanmin, np.nanmean, np.nanvar, np.nanstd, np.count_nonzero, np.argmax]
ALONG_NO_AXIS += [np.argmin, np.cumsum, np.cumprod, np.nancumsum, np.nancumprod, np.sort, np.argsort, np.flip]
ALONG_NO_AXIS += [
    np.squeeze,
    np.add.reduce,
    functools.partial(np.take, indices=0),
    functools.partial(np.repeat, repeats=2),
]
ALONG_NO_AXIS += [functools.partial(np.partition, kth=0), lambda x, axis: np.bitwise_or.reduce(x > 0, axis=axis)]

EINSUM = [
    *(
        like(functools.partial(np.einsum, s, dtype=d), *[np.array([[1, 0], [1, 100]], of)] * (s.count(",") + 1), ulps=8)
        for s in ("ij->", "ij,ij->i", "ij,kl->jl", "ii", "i...->...")
        for of in (bool, np.int8, np.float32)
        for d in (None, float)
    ),
    # Sums and products of integers alone would overflow where another operand has floats.
    like(lambda x, n: np.einsum("...c,...c", x, n), np.full((3, 1), 1.5), np.full(3, 2**62), ulps=8),
    like(lambda n, x: np.einsum("a,a,a", n, n, x), np.full(3, 127, np.int8), np.full(3, 1.5), ulps=8),
    like(lambda n, x: np.einsum("ab,c->c", n, x), np.full((2, 3), 255, np.uint8), np.full(4, 1.5, "f4"), ulps=8),
]
OTHERS = [
    *(
        like(functools.partial(np.pad, pad_width=2, mode=m), np.array([1, 4, 6]))
        for m in ("edge", "linear_ramp", "mean")
    ),
    *(like(f, x) for f in (np.linalg.norm, np.linalg.vector_norm) for x in (np.array([3, 4]), np.array([[3, 4]]))),
    *(
        like(lambda x, y=y: np.convolve(x, y), np.array([1.0, INF, 2.0], d))
        for d in (np.float64, np.float16, np.complex128)
        for y in (np.array([2.0, -INF], d), np.array([2.0, -INF, 1.0, 0.0], d))
    ),
    like(lambda x: mnp.array([*x, x.sum()]), np.zeros(0)),
    *(
        like(lambda a, y=y: [np.linalg.lstsq(a, y)[i] for i in (0, 1, 3)], a, ulps=64)
        for a in (X.T, M, X)
        for y in (a[:, 0], a)
    ),
    *(like(f, M) for f in (np.linalg.eigh, np.linalg.svd, np.linalg.qr, np.linalg.slogdet)),
]

GROUPS = {
    "elementwise": (ELEMENTWISE, ROUTES),
    "reductions": (REDUCTIONS, ["tape", "jvp", "vmap"]),
    "keywords": (KEYWORDS, ["tape", "jvp"]),
    "integers": (INTEGERS, ["jvp", "jit"]),
    "along no axis": (
        with_options(ALONG_NO_AXIS, np.float64(2.5), [{"axis": a} for a in (0, -1, 1, None, ())]),
        ["tape", "vmap", "jvp"],
    ),
    "einsum": (EINSUM, ["tape", "jvp", "jit"]),
    "others": (OTHERS, ["tape", "vmap", "jvp"]),
}


@pytest.mark.parametrize("group", GROUPS)
def test_samples(group):
    samples, routes = GROUPS[group]
    check_each(
        (f"{route} of sample {k}", functools.partial(check_route, route, sample))
        for route, (k, sample) in itertools.product(routes, enumerate(samples))
    )


# ---------------------------------------------------------------- dtypes of derivatives and of methods


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each("dtype", [np.bool_, np.int8, np.uint8, np.int64, np.uint64])
@each("ufunc", BINARY)
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


@each("number", [3, 3.0])
@each("ufunc", [f for f in BINARY if "ff->f" in f.types])
def test_derivatives_beside_python_numbers_keep_the_dtype(ufunc, number):
    x = np.array([0.3, 0.7], np.float32)
    for f in (lambda x: ufunc(x, number), lambda x: ufunc(number, x)):
        out, pull = md.vjp(f, x)
        assert pull(np.ones_like(out))[0].dtype == md.jvp(f, (x,), (x,))[1].dtype == np.float32


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
@each("ufunc", BINARY)
@each("method", ["reduce", "accumulate"])
@each("asked", [None, np.int8, np.float32])
def test_methods_of_ufuncs_have_numpys_dtypes(ufunc, method, asked):
    f = lambda x: getattr(ufunc, method)(x, 0, asked)  # noqa: E731
    for dtype in [np.bool_, np.int8, np.float16, np.complex64]:
        try:
            f(np.ones((2, 2), dtype))
        except TypeError:  # NumPy's own
            continue
        if ufunc is not np.ldexp:  # which takes what it returns for no exponent
            check_route("tape", like(f, np.ones((2, 2), dtype), ulps=8))
