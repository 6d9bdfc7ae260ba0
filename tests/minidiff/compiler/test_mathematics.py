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
from tests.checks.samples import each

COUNT = 30_000  # arguments of each function, of each kind

#: Function -> spans of its typical arguments, and the largest error in units in the last place that is allowed.
FUNCTIONS_OF = {
    "exp": ([(-745, 710)], 1), "expm1": ([(-40, 40)], 2), "log": ([(0, 10)], 1), "log1p": ([(-1, 2)], 2),
    "sin": ([(-100, 100)], 1), "cos": ([(-100, 100)], 1), "tanh": ([(-4, 4)], 2), "sigmoid": ([(-40, 40)], 2),
    "erf": ([(-6, 6)], 3), "erfc": ([(-7, 28)], 3), "power": ([(0, 10), (-30, 30)], 2),
}  # fmt: skip


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
    """The value in long double; of functions that NumPy lacks, that of `math`, whose errors are below one unit."""
    wide = [x.astype(numpy.longdouble) for x in operands]
    if name == "sigmoid":
        small = numpy.exp(-abs(wide[0]))
        return numpy.where(wide[0] < 0, small, 1) / (1 + small)
    if name in ("erf", "erfc"):
        return numpy.array([getattr(math, name)(v) for v in operands[0].tolist()]).astype("g")
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
@each("dtype", ["f8", "f4"])
@pytest.mark.parametrize("name", FUNCTIONS_OF)
def test_errors(name, dtype):
    (spans, most), rng = FUNCTIONS_OF[name], numpy.random.default_rng(0)
    operands = [arguments(dtype, span, rng) for span in spans]
    if name == "power":  # of positive numbers, also near one
        near = (1 + rng.uniform(-1e-3, 1e-3, COUNT)), rng.uniform(-3e5, 3e5, COUNT)
        operands = [numpy.concatenate([x, y.astype(dtype)]) for x, y in zip((abs(operands[0]), operands[1]), near)]
    ufunc, raised = compiled(name, *[dtype] * len(operands))
    with numpy.errstate(all="ignore"):
        actual, expected = ufunc(*operands), exact(name, *operands)
    if name in ("sin", "cos"):
        assert raised.value & 2
        saved = abs(operands[0]) <= 6000
        actual, expected, operands = actual[saved], expected[saved], [operands[0][saved]]
    error = units_in_the_last_place(actual, expected, dtype)
    worst = int(numpy.argmax(error))
    assert error[worst] <= most, f"{name}{[x[worst] for x in operands]} is {actual[worst]!r}, not {expected[worst]!r}"
    if name not in ("power", "erf", "erfc"):
        assert (numpy.signbit(actual) == numpy.signbit(expected))[~numpy.isnan(expected)].all()


SPECIAL = (0.0, 1.0, 0.5, 2.0, 3.0, 1e-310, 5e-324, 1e-30, 1e30, 1e305, numpy.inf, numpy.nan, 710.0, 89.0)


@each("dtype", ["f8", "f4"])
@pytest.mark.parametrize("name", FUNCTIONS_OF)
def test_special_values_are_numpys(name, dtype):
    """Also with warnings: what NumPy warns of is reported, so that NumPy can warn of it."""
    points = numpy.array([s * x for x in SPECIAL for s in (1, -1)])
    with numpy.errstate(all="ignore"):
        points = points.astype(dtype)
    operands = [points] if name != "power" else [m.ravel() for m in numpy.meshgrid(points, points)]
    (ufunc, raised), plain = compiled(name, *[dtype] * len(operands)), primitive_of(name).impl
    for values in zip(*operands):
        arrays, flags, raised.value = [numpy.full(8, v, dtype) for v in values], [], 0
        with numpy.errstate(all="ignore"):
            actual = ufunc(*arrays)
        reported = raised.value
        note = lambda *flag, at=flags: at.append(flag)  # noqa: E731
        with numpy.errstate(over="call", divide="call", invalid="call", under="ignore", call=note):
            expected = plain(*arrays)
        assert reported or not flags, f"{name}{values}: NumPy warns: {flags}"
        if not reported & 2:
            tolerance = {"rtol": 1e-6 if dtype == "f4" else 1e-14, "atol": 1e-44, "err_msg": f"{name}{values}"}
            numpy.testing.assert_allclose(actual, expected, **tolerance)
            same = numpy.signbit(actual[0]) == numpy.signbit(expected[0])
            assert same or numpy.isnan(expected[0]), f"{name}{values}"


@each("name", FUNCTIONS_OF)
def test_ordinary_numbers_are_not_left_to_numpy(name):
    count = len(FUNCTIONS_OF[name][0])
    ufunc, raised = compiled(name, *["f8"] * count)
    raised.value = 0
    ufunc(*[numpy.linspace(0.1, 0.9, 64)] * count)
    assert raised.value == 0


def test_large_angles_are_numpys():
    x = numpy.geomspace(1, 1e300, 20_000)
    f = lambda x: np.sin(x) + np.cos(x) * np.sin(2 * x)  # noqa: E731
    assert "fused" in str(md.jit(f).program(x).tape)
    numpy.testing.assert_array_equal(md.jit(f)(x), f(x))


def test_every_function_is_tested():
    assert {*FUNCTIONS} == {*FUNCTIONS_OF}
