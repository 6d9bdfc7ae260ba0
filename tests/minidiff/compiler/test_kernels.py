"""Fused kernels: equal to NumPy's to rounding, with its warnings; `fused.md` shows which operations are in one."""

import contextlib
import itertools
import math
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff import nn
from minidiff.compiler import kernels, native
from minidiff.core.types import ShapedArray
from spmd import P
from tests.checks.samples import each
from tests.minidiff.compiler.programs import ALONG_ROWS, ELEMENTWISE, SPLIT, around, gradient_of

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite: pip install '.[compiled]'")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """All kernels of these tests go into a directory of their own."""
    monkeypatch.setenv("MINIDIFF_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))


@pytest.fixture
def of_any_size(monkeypatch):
    """Kernels also for arrays that NumPy is faster on."""
    for name in ("MIN_ELEMENTS", "MIN_WORK", "MIN_COLUMNS"):
        monkeypatch.setattr(kernels, name, 1)


# ---------------------------------------------------------------- what is in a kernel

N = kernels.MIN_WORK // 2
x = numpy.linspace(0.1, 1.0, N)


def plan(f, *types, **options):
    """The names of the operations that a function of these types is compiled to."""
    return [str(e.primitive) for e in md.jit(f, **options).program(*types).tape.equations]


def of(*shape, dtype="f8"):
    return ShapedArray(shape, numpy.dtype(dtype))


@pytest.mark.parametrize("name", {**ELEMENTWISE, **ALONG_ROWS, **SPLIT})
def test_a_function_and_its_gradient_are_one_loop(name):
    """A single operation that NumPy computes in one loop may stay with NumPy; the gradient of what is split is parts.

    Beside a loop over rows there may be what puts a gradient into a column (`cross_entropy`).
    """
    f, t = {**ELEMENTWISE, **ALONG_ROWS, **SPLIT}[name], of(64, 1020, dtype="f4")
    out = md.eval_shape(f, t)
    for g, types in ((f, [t]), (gradient_of(f), [t, out]))[: 1 if name in SPLIT else 2]:
        equations = [e for e in md.jit(g).program(*types).tape.equations if not e.primitive.shares_memory]
        size = t.size if name in ALONG_ROWS else out.size
        large = [e for e in equations if any(md.typeof(a).size >= size for a in (*e.inputs, *e.outputs))]
        assert len(large) == 1 or name in ("glu", "cross_entropy")
        names = [str(e.primitive) for e in large]
        assert names.count("fused") == 1 or isinstance(large[0].primitive.impl, numpy.ufunc)


def test_kernels_can_be_left_out():
    code = "import numpy, minidiff as md; print(md.jit(lambda x: x * 2 + x * x).source(numpy.ones(20_000)))"
    off = subprocess.run([sys.executable, "-c", code], env={**os.environ, "MINIDIFF_KERNELS": "0"}, capture_output=True)
    assert b"fused" not in off.stdout and b"x" not in off.stderr


SOURCES = {
    "reads": (lambda u: (np.roll(u, 1, 0) + np.pad(u[:, 1:], ((0, 0), (1, 0)))) * u[::-1], [of(20, 30)]),
    "sums": (lambda x, y: ((x + y) * 2, ((x + y) * 3).sum()), [of(20, 30), of(30)]),
    "rows": (lambda x: np.exp(x) / np.sum(np.exp(x), -1, keepdims=True), [of(64, 80)]),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_show_the_loops(name, of_any_size, golden):
    f, types = SOURCES[name]
    golden(f"kernels-{name}", md.jit(f).source(*types))


def test_llvm_shows_the_kernel():
    text = md.jit(lambda x: x * 2 + 1).llvm(x)
    assert "define void @kernel(" in text and "fmul double" in text


# ---------------------------------------------------------------- equal to NumPy


def test_reads_on_ranks(of_any_size):
    grid, mesh = numpy.random.default_rng(0).normal(size=(8, 50)), spmd.make_mesh((4,), ("i",))
    ranks = spmd.shard_map(lambda u: psum(around(u), "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    for f in (ranks, md.grad(lambda u: np.sum(ranks(u) ** 2))):
        run = md.jit(f)
        assert ")[i0, i1]" in run.source(grid)
        numpy.testing.assert_allclose(run(grid), md.jit(f, kernels=False)(grid), rtol=1e-10, atol=1e-10)


FLOATS, INTEGERS = ("f4", "f8"), ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
EXACT = ["add", "subtract", "multiply", "divide", "negative", "absolute", "square", "sqrt", "reciprocal", "maximum"]
EXACT += ["minimum", "fmax", "fmin", "sign", "copysign", "floor", "ceil", "trunc", "rint", "equal", "not_equal", "less"]
EXACT += ["less_equal", "greater", "greater_equal", "isnan", "isinf", "isfinite", "signbit", "logical_and"]
EXACT += ["logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "invert"]
EXACT += ["left_shift", "right_shift"]


def special(dtype):
    if dtype in FLOATS:
        return [0.0, -0.0, 1.0, -1.5, 2.5, -3.5, math.inf, -math.inf, math.nan, 1e-310, 3e38, -7.0]
    if dtype == "?":
        return [0, 1]
    info = numpy.iinfo(dtype)
    return [0, 1, 2, 3, 7, 100, info.max, info.max - 1, info.min, info.min + 1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "?"])
def test_exact_operations_of_all_special_values(of_any_size, dtype):
    """To the bit, NaNs and signs of zero included; one program for all operations of a dtype."""
    with numpy.errstate(all="ignore"):
        inputs = numpy.array(special(dtype)).astype(dtype)
    check_exactly(EXACT, *(m.ravel() for m in numpy.meshgrid(inputs, inputs)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_exact_operations_that_raise_no_flag(of_any_size, dtype):
    """NumPy computes anew what raises a flag, and with it the whole program: here that would be an error."""
    inputs, names = numpy.array([0.0, -0.0, 1.0, -1.5, 2.5, -7.0, math.inf], dtype), []
    a, b = (m.ravel() for m in numpy.meshgrid(inputs, inputs))
    with numpy.errstate(all="raise"):
        for name in EXACT:
            with contextlib.suppress(TypeError, FloatingPointError):
                getattr(numpy, name)(*(a, b)[: getattr(numpy, name).nin])
                names.append(name)
        check_exactly(names, a, b)


def check_exactly(names, a, b):
    """Compare operations, as far as there are for these dtypes, in one program with NumPy's."""

    def all_of(a, b, np):
        result = {}
        for name in names:
            with contextlib.suppress(TypeError):
                result[name] = getattr(np, name)(*(a, b)[: getattr(numpy, name).nin])
        return result

    result, expected = md.jit(lambda a, b: all_of(a, b, np))(a, b), all_of(a, b, numpy)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        numpy.testing.assert_array_equal(result[name], value, err_msg=name)
        if value.dtype.kind == "f":
            same = numpy.isnan(value) | (numpy.signbit(result[name]) == numpy.signbit(value))
            if name in ("maximum", "minimum", "fmax", "fmin"):  # of two zeros NumPy gives either
                same |= value == 0
            assert same.all(), name


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.filterwarnings("ignore")
def test_powers_of_special_numbers_are_numpys(dtype):
    """NumPy takes roots where one exponent, 0.5, is that of all elements; elsewhere it is the C library's power."""
    shapes = {"each": (300, 8), "row": (8,), "column": (300, 1), "one": (1,), "number": ()}
    f = lambda x, y: np.power(x * 1.0, y) * 2.0  # noqa: E731
    bases = numpy.array([-np.inf, -0.0, 0.0, np.inf, np.nan, -1.0, 1e-310, -1e-310, -3.0, 0.7], dtype)
    base = numpy.resize(bases, (8, 300)).T
    for (form, shape), e in itertools.product(
        [*shapes.items(), ("Python's", None)], [0.5, -0.5, 2.0, 3.0, -1.0, -2.0, 0.0, 1.0, 1.5, np.inf, -np.inf, np.nan]
    ):
        exponent = e if shape is None else numpy.full(shape, e, dtype)[()]
        actual, expected = md.jit(f)(base, exponent), f(base, exponent)
        numpy.testing.assert_allclose(actual, expected, rtol=1e-5, err_msg=f"{e}, {form}")
        same = numpy.signbit(actual) == numpy.signbit(expected)
        assert same[~numpy.isnan(expected)].all(), f"{e}, {form}"


@each("axes", [0, 1, None])
@each("order", "CF")
def test_sums_are_as_accurate_as_numpys(axes, order):
    """Sums of terms that nearly cancel are compared with exact sums."""
    rng = numpy.random.default_rng(0)
    a = rng.normal(size=(90, 1300)) * 10.0 ** rng.integers(-8, 8, (90, 1300))
    a = numpy.asarray(numpy.concatenate([a, -a[:, ::-1]]), order=order)
    f = lambda a: ((a * 2).sum(axes), (a * 2 - a).mean(axes))  # noqa: E731
    assert "fused" in plan(f, a)
    for value, plain, scale in zip(md.jit(f)(a), f(a), (2, 1)):
        count = 1 if scale == 2 else a.size // numpy.asarray(value).size
        lines = {0: a.T, 1: a}.get(axes, a.reshape(1, -1)) if isinstance(axes, int) else a.reshape(1, -1)
        exact = numpy.array([math.fsum(line * scale) / count for line in lines]).reshape(numpy.shape(value))
        error, numpys = numpy.abs(value - exact).max(), numpy.abs(plain - exact).max()
        assert error <= max(numpys, 20 * numpy.abs(a).sum(axes).max() * scale / count * 2.0**-52)


@each("shape", [(4, 2, 1), (1, 4, 2), (1, 1, 3), (3, 1), (1, 3)])
def test_sums_along_axes_of_size_1(of_any_size, shape):
    """Beside operands that have some of the dimensions, so that these are rows and columns."""
    others = [numpy.ones(s) * 3 for s in itertools.product(*[{1, n} for n in shape])]
    a = numpy.arange(1.0, 1 + math.prod(shape)).reshape(shape)

    def sums(a, others):
        for b, axis in itertools.product(others, range(len(shape))):
            yield (z := a * b + axis), z.sum(axis), z.sum(axis, keepdims=True), z.sum()

    for result, expected in zip(md.jit(lambda *args: [*sums(*args)])(a, others), sums(a, others), strict=True):
        for x, wanted in zip(result, expected, strict=True):
            numpy.testing.assert_allclose(x, wanted)


@each("a", [numpy.arange(-5, 300).reshape(-1, 1), numpy.ones((0, 3)), numpy.array([[1.0, math.inf, 2.0]])])
def test_sums_of_integers_of_nothing_and_of_infinities(of_any_size, a):
    f = lambda a: ((a * 2 + 1).sum(), (a * 2 + 1).sum(0), a * 2 + 1)  # noqa: E731
    for result, expected in zip(md.jit(f)(a), f(a), strict=True):
        numpy.testing.assert_array_equal(result, expected, strict=True)


@each("name", ["softmax", "log_softmax", "logsumexp"])
def test_rows_with_special_values(of_any_size, name):
    a = numpy.repeat(numpy.random.default_rng(0).normal(0, 2, (1, 100)), 14, 0)
    values = numpy.array([[numpy.inf], [-numpy.inf], [numpy.nan], [0.0], [-0.0], [1e300], [-1e300]])
    a[:7, 50:51] = a[7:, :] = values
    a[0, 2] = numpy.inf  # twice: they share the total
    with numpy.errstate(all="ignore"):
        actual, expected = md.jit(ALONG_ROWS[name])(a), ALONG_ROWS[name](a)
    numpy.testing.assert_allclose(actual, expected, rtol=1e-14)
    assert (numpy.signbit(actual) == numpy.signbit(expected)).all()


#: Shapes, and the axes along which they are normalized: rows of lengths that vectors divide or not, and other axes.
NORMS = [((9, 64), -1), ((9, 257), -1), ((2000,), 0), ((3, 5, 120), 2), ((3, 12, 10), (1, 2)), ((120, 7), 0)]


@each("shape, axis", NORMS)
def test_norms(of_any_size, shape, axis):
    dtype, rtol = ("f4", 1e-4) if axis == -1 else ("f8", 1e-13)
    f = lambda x: np.sum((nn.softmax(x, axis) + nn.layer_norm(x, axis=axis)) ** 2 * np.cos(x), axis)  # noqa: E731
    both = lambda x: (f(x), np.max(x, axis), md.grad(lambda x: np.sum(f(x)))(x))  # noqa: E731
    a = numpy.random.default_rng(0).normal(0, 2, shape).astype(dtype)
    for actual, expected in zip(md.jit(both)(a), both(a)):
        numpy.testing.assert_allclose(actual, expected, rtol=rtol, atol=10 * rtol)


def test_threads_do_not_take_reports_from_each_other():
    """One thread's angles are left to NumPy in each call, and the other's never."""
    run = md.jit(lambda x, k: np.sin(x) * k + np.cos(x))
    large = numpy.geomspace(1e7, 1e9, x.size)
    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(lambda n: (n, run((large, x)[n % 2], float(n))), range(200)))
    for n, value in result:
        v = (large, x)[n % 2]
        numpy.testing.assert_allclose(value, numpy.sin(v) * n + numpy.cos(v), atol=1e-12)


# ---------------------------------------------------------------- warnings

ZEROS = numpy.zeros((200, 300))
WARNINGS = [
    (lambda x: x * 1e308 * 1e3 + 1, x, "overflow encountered in multiply"),
    (lambda x: 1 / (x - x) + 1, x, "divide by zero encountered in divide"),
    (lambda x: np.sqrt(-x) + 1, x, "invalid value encountered in sqrt"),
    (lambda u: (1 + np.roll(u, 1, 0)) / np.roll(u, 1, 1), ZEROS, "divide by zero encountered in divide"),
]


@each("f, a, message", WARNINGS)
def test_warnings_are_numpys(f, a, message):
    assert "fused" in plan(f, a)
    run = md.jit(f)
    with pytest.warns(RuntimeWarning, match=message):
        result = run(a)
    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        numpy.testing.assert_array_equal(run(a), result)
    with numpy.errstate(all="raise"), pytest.raises(FloatingPointError, match=message):
        run(a)
