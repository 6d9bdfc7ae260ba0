"""The mathematical functions of kernels, against NumPy's in higher precision, and NumPy's at special values."""

import math

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import native

if not native.is_available():
    pytest.skip("needs llvmlite: pip install '.[compiled]'", allow_module_level=True)

from minidiff.compiler.kernels import Kernel
from minidiff.compiler.mathematics import FUNCTIONS
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import ShapedArray, Var
from minidiff.ops import elementwise, special

COUNT = 100_000  # arguments of each function, of each kind

#: Function -> its typical arguments, and the largest error in units in the last place that is allowed.
UNARY = {
    "exp": ((-745, 710), 1), "expm1": ((-40, 40), 2), "log": ((0, 10), 1), "log1p": ((-1, 2), 2),
    "sin": ((-100, 100), 1), "cos": ((-100, 100), 1), "tanh": ((-4, 4), 2), "sigmoid": ((-40, 40), 2),
}  # fmt: skip
BINARY = {"power": 2}


def primitive_of(name):
    actual = getattr(elementwise, name, None)
    return actual.primitive if actual is not None else getattr(special, f"{name}_p")


def compiled(name, *dtypes):
    """The loop of one operation: a ufunc, and the cell that says what it left to NumPy."""
    inputs = [Var(ShapedArray((8,), numpy.dtype(d))) for d in dtypes]
    out = Var(ShapedArray((8,), numpy.dtype(dtypes[0])))
    kernel = Kernel(Tape(inputs, [Equation(primitive_of(name), inputs, {}, [out])], [out]), None)
    return kernel.compiled()


def exact(name, *operands):
    """The value in long double."""
    wide = [x.astype(numpy.longdouble) for x in operands]
    if name == "sigmoid":
        small = numpy.exp(-abs(wide[0]))
        return numpy.where(wide[0] < 0, small, 1) / (1 + small)
    return getattr(numpy, name)(*wide)


def units_in_the_last_place(actual, expected, dtype):
    """Errors, in units in the last place of the expected value; infinite where one is finite and the other is not."""
    dtype = numpy.dtype(dtype)
    with numpy.errstate(all="ignore"):
        rounded = expected.astype(dtype)
        alike = (actual == rounded) | (numpy.isnan(actual) & numpy.isnan(rounded))
        finite = numpy.isfinite(actual) & numpy.isfinite(rounded)
        unit = numpy.spacing(abs(rounded)).astype(numpy.longdouble)
        error = abs(actual.astype(numpy.longdouble) - expected) / unit
    overflows = numpy.isfinite(expected) & (abs(expected) > 0.999999 * numpy.finfo(dtype).max)
    error = numpy.where(finite, error, numpy.where(alike | overflows, 0, numpy.inf))
    return error.astype(float)


def arguments(dtype, span, rng, count=COUNT):
    """Numbers of a span, numbers of all magnitudes in it, and any numbers."""
    kind = f"u{numpy.dtype(dtype).itemsize}"
    low, high = span
    plain = rng.uniform(low, high, count)
    small = plain * 10.0 ** rng.uniform(-12, 0, count)
    anything = rng.integers(0, numpy.iinfo(kind).max, count, kind, endpoint=True).view(dtype)
    return numpy.concatenate([plain.astype(dtype), small.astype(dtype), anything])


wide = pytest.mark.skipif(numpy.finfo("g").nmant <= 52, reason="long double has no more digits than float64 here")


@wide
@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("name", UNARY)
def test_errors_of_functions_of_one_number(name, dtype):
    span, most = UNARY[name]
    x = arguments(dtype, span, numpy.random.default_rng(0))
    ufunc, raised = compiled(name, dtype)
    with numpy.errstate(all="ignore"):
        actual, expected = ufunc(x), exact(name, x)
    if name in ("sin", "cos"):
        saved = abs(x) <= 6000
        assert raised.value & 2
        actual, expected, x = actual[saved], expected[saved], x[saved]
    error = units_in_the_last_place(actual, expected, dtype)
    worst = int(numpy.argmax(error))
    assert error[worst] <= most, f"{name}({x[worst]!r}) is {actual[worst]!r}, not {expected[worst]!r}"
    assert (numpy.signbit(actual) == numpy.signbit(expected))[~numpy.isnan(expected)].all()


@wide
@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("name", BINARY)
def test_errors_of_functions_of_two_numbers(name, dtype):
    rng = numpy.random.default_rng(0)
    x, y = abs(arguments(dtype, (0, 10), rng)), arguments(dtype, (-30, 30), rng)
    near = (1 + rng.uniform(-1e-3, 1e-3, COUNT)).astype(dtype)
    x, y = numpy.concatenate([x, near]), numpy.concatenate([y, rng.uniform(-3e5, 3e5, COUNT).astype(dtype)])
    ufunc, _ = compiled(name, dtype, dtype)
    with numpy.errstate(all="ignore"):
        actual, expected = ufunc(x, y), exact(name, x, y)
    error = units_in_the_last_place(actual, expected, dtype)
    worst = int(numpy.argmax(error))
    assert error[worst] <= BINARY[name], (
        f"{name}({x[worst]!r}, {y[worst]!r}) is {actual[worst]!r}, not {expected[worst]!r}"
    )


#: Functions that NumPy lacks, against those of `math`, whose own errors are below one unit.
OF_NUMBERS = {"erf": math.erf, "erfc": math.erfc}


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_errors_of_the_error_function(name, dtype):
    x = arguments(dtype, (-6, 6), numpy.random.default_rng(0), COUNT // 5)
    x = numpy.concatenate([x, numpy.linspace(-7, 28, COUNT // 5, dtype=dtype)])
    ufunc, _ = compiled(name, dtype)
    with numpy.errstate(all="ignore"):
        actual = ufunc(x)
        expected = numpy.array([OF_NUMBERS[name](v) for v in x.tolist()]).astype("g")
    error = units_in_the_last_place(actual, expected, dtype)
    worst = int(numpy.argmax(error))
    assert error[worst] <= 3, f"{name}({x[worst]!r}) is {actual[worst]!r}, not {expected[worst]!r}"


SPECIAL = (0.0, 1.0, 0.5, 2.0, 3.0, 1e-310, 5e-324, 1e-30, 1e30, 1e305, numpy.inf, numpy.nan, 710.0, 89.0)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("name", [*UNARY, *OF_NUMBERS, *BINARY])
def test_special_values_are_numpys(name, dtype):
    """Also with warnings: what NumPy warns of is reported, so that NumPy can warn of it."""
    points = numpy.array([s * x for x in SPECIAL for s in (1, -1)])
    with numpy.errstate(all="ignore"):
        points = points.astype(dtype)
    operands = [points] if name not in BINARY else [m.ravel() for m in numpy.meshgrid(points, points)]
    ufunc, raised = compiled(name, *[dtype] * len(operands))
    plain = primitive_of(name).impl
    for values in zip(*operands):
        arrays = [numpy.full(8, v, dtype) for v in values]
        raised.value = 0
        with numpy.errstate(all="ignore"):
            actual, expected = ufunc(*arrays), plain(*arrays)
        reported = raised.value
        flags: list = []
        with numpy.errstate(
            over="call", divide="call", invalid="call", call=lambda *actual, at=flags: at.append(actual)
        ):
            plain(*arrays)
        assert reported or not flags, f"{name}{values}: NumPy warns: {flags}"
        if reported & 2:
            continue
        message = f"{name}{values} is {actual[0]!r}, and NumPy's {expected[0]!r}"
        numpy.testing.assert_allclose(
            actual, expected, rtol=1e-6 if dtype == "f4" else 1e-14, atol=1e-44, err_msg=message
        )
        if not numpy.isnan(expected[0]):
            assert numpy.signbit(actual[0]) == numpy.signbit(expected[0]), message


@pytest.mark.parametrize("name", [*UNARY, *OF_NUMBERS, *BINARY])
def test_ordinary_numbers_are_not_left_to_numpy(name):
    x = numpy.linspace(0.1, 0.9, 64)
    ufunc, raised = compiled(name, *["f8"] * (2 if name in BINARY else 1))
    raised.value = 0
    ufunc(*[x] * (2 if name in BINARY else 1))
    assert raised.value == 0


def test_large_angles_are_numpys():
    x = numpy.geomspace(1, 1e300, 20_000)
    f = lambda x: np.sin(x) + np.cos(x) * np.sin(2 * x)  # noqa: E731
    assert "fused" in str(md.jit(f).program(x).tape)
    numpy.testing.assert_array_equal(md.jit(f)(x), f(x))


def test_every_function_is_tested():
    assert {*FUNCTIONS} == {*UNARY, *OF_NUMBERS, *BINARY}
