"""Fused kernels: equal to NumPy's operations to rounding, with its warnings, from a cache that can be trusted."""

import functools
import itertools
import math
import os
import platform
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.compiler import kernels, native
from spmd import P

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite: pip install '.[compiled]'")


def fused(f, *args, **options):
    """The number of kernels in the program of a function."""
    tape = md.jit(f, **options).program(*args).tape
    return sum(str(eqn.primitive) == "fused" for eqn in tape.equations)


def operations(f, *args):
    """The operations of the program of a function."""
    return [str(eqn.primitive) for eqn in md.jit(f).program(*args).tape.equations]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """All kernels of these tests go into a directory of their own."""
    monkeypatch.setenv("MINIDIFF_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))


LIMITS = ("MIN_ELEMENTS", "MIN_WORK", "MIN_COLUMNS")


@pytest.fixture
def of_any_size(monkeypatch):
    """Kernels also for arrays that NumPy is faster on."""
    for name in LIMITS:
        monkeypatch.setattr(kernels, name, 1)


# ---------------------------------------------------------------- what is in a group

x = numpy.linspace(0.1, 1.0, kernels.MIN_WORK // 2)


def test_a_gradient_of_elementwise_operations_is_one_kernel():
    def loss(x):
        for _ in range(3):
            x = x * (1.5 - 0.5 * x * x)
        return x.sum()

    assert operations(md.value_and_grad(loss), x) == ["fused"]
    value, gradient = md.jit(md.value_and_grad(loss))(x)
    numpy.testing.assert_allclose(value, loss(x))
    numpy.testing.assert_allclose(gradient, md.grad(loss)(x), rtol=1e-13)


def test_small_arrays_stay_with_numpy():
    f = lambda x: (x * 2 + x) * x  # noqa: E731
    assert fused(f, x) == 1
    assert fused(f, x[: len(x) // 3]) == 0
    assert fused(lambda x: np.tanh(x * 2 + x), x[: len(x) // 3]) == 1  # a function counts as many operations

    def often(x, times):
        results = []
        for _ in range(times):  # NumPy's cumulative sums are between the groups
            x = np.cumsum((x * 2 + x) * x)
            results.append(x)
        return results

    assert fused(lambda x: often(x, 2), x[: len(x) // 3]) == fused(lambda x: often(x, 1), x[: len(x) // 3]) == 0
    assert fused(lambda x: often(x, 4), x[: len(x) // 3]) == 4  # they share a loop
    assert fused(lambda x: often(x, 40), x[: len(x) // 9]) == 0

    def steps(x, length):
        return md.scan(lambda c, _: ((c * 2 + c) * c, None), x, length=length)[0]

    for length in (0, 2, 4):
        source = md.jit(steps, static_argnames="length").source(x[: len(x) // 3], length=length)
        assert ("def fused(" in source) == (length == 4)

    def long(x):
        for _ in range(1000):
            x = x * 0.9 + 0.1
        return x

    assert fused(long, x[: kernels.MIN_ELEMENTS]) > 0
    assert fused(long, x[: kernels.MIN_ELEMENTS - 1]) == 0


def test_kernels_can_be_left_out():
    f = lambda x: x * 2 + x * x  # noqa: E731
    assert fused(f, x, kernels=False) == 0
    code = "import numpy, minidiff as md; print(md.jit(lambda x: x * 2 + x * x).source(numpy.ones(20_000)))"
    off = subprocess.run([sys.executable, "-c", code], env={**os.environ, "MINIDIFF_KERNELS": "0"}, capture_output=True)
    assert b"fused" not in off.stdout and b"x" not in off.stderr


def test_an_operation_alone_stays_with_numpy():
    assert operations(lambda x: x * 2, x) == ["multiply"]
    assert operations(lambda x: x[1:].sum(), x) == ["slice", "sum"]  # of adjacent elements
    assert operations(lambda x: x[1:] * x[:-1], np.stack([x, x])) == ["slice", "slice", "multiply"]


def test_what_a_matmul_needs_runs_before_it_and_what_it_gives_after():
    a = numpy.ones((200, 200))
    names = operations(lambda a: np.maximum((a * 2 + 1) @ (a - 1) * 3 - 1, 0), a)
    assert names == ["fused", "matmul", "fused"]


def test_sums_of_many_parts_do_not_keep_all_of_them():
    """Delayed operations hold at most four arrays that would otherwise be free."""
    a = numpy.ones((200, 200))
    few = operations(lambda a: a @ a + a.T @ a + a @ a.T, a)
    assert few.count("fused") == 1 and few[-1] == "fused"
    many = operations(lambda a: sum((a[:, k : k + 5] @ a[k : k + 5] for k in range(12)), a @ a), a)
    sums = [k for k, name in enumerate(many) if name in ("fused", "add")]
    assert 2 <= len(sums) <= 4
    assert many[: sums[0]].count("matmul") <= kernels.MAX_LIVE + 2


def test_a_group_of_too_many_operands_is_several():
    xs = [x + k for k in range(100)]
    f = lambda *xs: sum(xs[1:], xs[0])  # noqa: E731
    assert 1 < fused(f, *xs) < 8
    numpy.testing.assert_allclose(md.jit(f)(*xs), sum(xs))


def test_a_long_program_is_several_kernels():
    def f(x):
        for k in range(1000):
            x = x * 0.999 + k
        return x

    assert 1 < fused(f, x) < 10
    numpy.testing.assert_allclose(md.jit(f)(x), f(x))


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(lambda z: z * 2 + z, id="complex"),
        pytest.param(lambda z: z.real * 2 + z.imag, id="parts of complex numbers"),
    ],
)
def test_complex_numbers_stay_with_numpy_in_the_same_program(f):
    z = x + 1j
    numpy.testing.assert_allclose(md.jit(f)(z), f(z))
    if numpy.iscomplexobj(f(z)):
        assert fused(f, z) == 0


def test_long_doubles_stay_with_numpy():
    assert fused(lambda y: y * 2 + y, x.astype(numpy.longdouble)) == 0


# ---------------------------------------------------------------- what is read where it is

grid = numpy.random.default_rng(0).normal(size=(400, 500))


def around(u):
    return np.roll(u, 1, 0) + np.roll(u, -1, 0) + np.roll(u, 1, 1) + np.roll(u, -1, 1) - 4 * u


def inside(u):
    return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]


def corners(u):
    return np.roll(np.roll(u, 1, 0), 1, 1) - np.roll(np.roll(u, -1, 1), -1, 0)


def in_zeros(u):
    return np.pad(u, 1) * np.pad(u, ((2, 0), (0, 2))) + 1


def joined(u):
    return np.concatenate([u[:, -1:], u[:, :-1]], 1) * u - np.concatenate([u, 2 * u])[:-200]


@pytest.mark.parametrize("f", [around, inside, corners, in_zeros])
def test_loops_read_arrays_where_they_are(f):
    assert operations(f, grid) == ["fused"]
    loss = md.value_and_grad(lambda u: np.sum(np.tanh(f(u) * u.sum())))
    moved = {"roll", "unslice", "concatenate"}
    assert moved.isdisjoint(operations(loss, grid))
    for one, other in zip(md.jit(loss)(grid), loss(grid)):
        numpy.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("f", [around, inside, corners, in_zeros, joined])
@pytest.mark.parametrize("shape", [(200, 300), (3, 200, 300)])
@pytest.mark.parametrize("layout", [numpy.ascontiguousarray, numpy.asfortranarray, lambda a: a[..., ::-1]])
def test_values_of_what_is_read(f, shape, layout):
    u = layout(numpy.random.default_rng(0).normal(size=shape))
    f = f if len(shape) == 2 else (lambda u, f=f: [md.vmap(f)(u), f(u[0]) * f(u[1])])
    for one, other in zip(md.tree.leaves(md.jit(f)(u)), md.tree.leaves(md.jit(f, kernels=False)(u))):
        numpy.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_what_something_else_needs_is_stored():
    f = lambda u: (v := np.roll(u, 1, 0), v * u + 1)  # noqa: E731
    assert operations(f, grid) == ["roll", "fused"]
    (loop,) = md.jit(f).program(grid).tape.equations[-1].bodies
    assert [str(eqn.primitive) for eqn in loop.equations] == ["multiply", "add"]
    assert operations(lambda u: (np.roll(u, 1, 0) * u + 1) @ np.roll(u, 1, 1).T, grid).count("roll") == 1


def test_a_slice_that_is_most_of_its_array_is_read_and_others_are_added_in_place():
    gradient = lambda part: md.grad(lambda u: np.sum(np.sin(u) * u) + np.sum(part(u) ** 3))  # noqa: E731
    assert "unslice" not in operations(gradient(lambda u: u[1:]), grid)
    assert "add_at" in operations(gradient(lambda u: u[:9]), grid)
    assert "add_at" in operations(gradient(lambda u: u[::2]), grid)


def test_short_rows_stay_with_numpy():
    f = lambda u: np.roll(u, 1, 1) * u + 1  # noqa: E731
    tall = numpy.ones((5000, 10))
    assert operations(f, tall) == ["roll", "fused"]
    assert operations(f, tall.reshape(500, 100)) == ["fused"]
    assert operations(lambda u: np.roll(u, 1, 0) * u + 1, tall) == ["fused"]  # whose rows are one after another


def test_many_regions_stay_with_numpy():
    """Each is a call, which has to be worth it."""
    f = lambda u: sum((np.roll(np.roll(u, k, 0), -k, 1) for k in range(1, 10)), u)  # noqa: E731
    assert operations(f, grid[:100]).count("roll") == 9
    assert operations(lambda u: f(u) - u, numpy.ones((2000, 2000))) == ["fused"]


def test_warnings_name_the_operation_beside_reads():
    zeros = numpy.zeros((200, 300))
    with pytest.warns(RuntimeWarning, match="divide by zero encountered in divide"):
        result = md.jit(lambda u: (1 + np.roll(u, 1, 0)) / np.roll(u, 1, 1))(zeros)
    assert numpy.isinf(result).all()


def test_reads_in_loops_and_on_ranks(of_any_size):
    steps = lambda u: md.scan(lambda u, _: (u + 0.1 * around(u), np.sum(u)), u, None, 5)  # noqa: E731
    until = lambda u: md.while_loop(lambda u: np.max(u) > 1, lambda u: u + 0.1 * around(u), u)  # noqa: E731
    mesh = spmd.make_mesh((4,), ("i",))
    ranks = spmd.shard_map(lambda u: psum(around(u), "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    for f in (steps, until, ranks, md.grad(lambda u: steps(u)[1].sum()), md.grad(lambda u: np.sum(ranks(u) ** 2))):
        run = md.jit(f)
        assert ")[i0, i1]" in run.source(grid)
        for one, other in zip(md.tree.leaves(run(grid)), md.tree.leaves(md.jit(f, kernels=False)(grid))):
            numpy.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def test_source_shows_what_is_read(of_any_size):
    def f(u):
        return (np.roll(u, 1, 0) + np.pad(u[:, 1:], ((0, 0), (1, 0)))) * u[::-1]

    source = md.jit(f).source(numpy.ones((20, 30)))
    assert (
        source
        == """\
def fused(d, e):  # one loop, compiled; f64[20,30], f64[20,29]
    for i0 in range(20):
        for i1 in range(30):
            f = roll(d, shifts=(1,), axes=(0,))[i0, i1]
            g = unslice(e, index=(slice(0, 20, None), slice(1, 30, None)), shape=(20, 30))[i0, i1]
            h = d[::-1, :][i0, i1]
            i = f + g
            j[i0, i1] = i * h
    return j


def f(a):  # f64[20,30]
    b = a[:, 1:]  # f64[20,29]
    c = fused(a, b)  # f64[20,30]
    del b
    return c"""
    )


# ---------------------------------------------------------------- equal to NumPy

FLOATS = ("f4", "f8")
INTEGERS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
UNARY = ("negative", "absolute", "square", "sign", "sqrt", "floor", "ceil", "trunc", "rint", "isnan", "isfinite",
         "isinf", "signbit", "logical_not", "tanh", "exp", "sin", "log1p", "reciprocal", "fabs", "deg2rad",
         "invert")  # fmt: skip
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "fmax", "fmin", "equal", "not_equal", "less",
          "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor", "copysign",
          "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", "power", "arctan2",
          "hypot")  # fmt: skip

ALONG_ROWS = ("max", "min")

#: Functions with steps: the nearest step to an argument, where a difference in its last place may become one of 1.
STEPS = {
    **dict.fromkeys(("floor", "ceil", "trunc"), numpy.rint),
    "rint": lambda x: numpy.floor(x) + 0.5,
    "sign": numpy.zeros_like,
}


@st.composite
def programs(draw):
    """A program as a list of (name, operands): an operand is the number of an earlier value, or a Python number."""
    count = draw(st.integers(1, 3))
    steps = []
    for k in range(draw(st.integers(2, 8))):
        name = draw(st.sampled_from((*UNARY, *BINARY, *ALONG_ROWS, "where", "astype")))
        arity = 1 if name in (*UNARY, *ALONG_ROWS, "astype") else 3 if name == "where" else 2
        earlier = st.integers(0, count + k - 1)
        operands = [draw(earlier) for _ in range(arity)]
        number = draw(st.sampled_from((None, None, 2, -1.5, 0, True)))
        steps.append((name, operands, number if arity == 2 else None, draw(st.sampled_from((*FLOATS, *INTEGERS, "?")))))
    axes = draw(st.sampled_from((None, (), (0,), (1,), (0, 1))))
    return count, steps, axes


def run_program(program, arrays, np, uses=None):
    """Run a program; `uses` gets, by the number of each value, those of the values that it is computed from."""
    count, steps, axes = program
    values, uses = list(arrays), {} if uses is None else uses
    for name, operands, number, dtype in steps:
        chosen = [values[k] for k in operands]
        if number is not None:
            chosen[-1] = number
        uses[len(values)] = operands if number is None else operands[:-1]
        try:
            options = {"axis": -1, "keepdims": True} if name in ALONG_ROWS else {}
            values.append(chosen[0].astype(dtype) if name == "astype" else getattr(np, name)(*chosen, **options))
        except (TypeError, ValueError, OverflowError):  # there is no such operation on these dtypes
            uses[len(values)] = operands[:1]
            values.append(chosen[0])
    outs = values[count:]
    if axes is not None:
        outs = [*outs, *[np.sum(v, axis=axes or None) for v in outs if len(v.shape) == 2]]
    return outs


def across_steps(program, uses, one, two):
    """Return which elements depend on a step between the arguments of two runs, within 4 units in the last place."""
    count, steps, axes = program
    across = [numpy.zeros((), bool)] * count  # the arrays are the same in both
    for k, (name, *_) in enumerate(steps, count):
        mask = functools.reduce(numpy.logical_or, [across[j] for j in uses[k]])
        if name in ALONG_ROWS and mask.ndim:
            mask = numpy.any(mask, axis=-1, keepdims=True)
        j = uses[k][0] - count
        if name in STEPS and j >= 0 and one[j].dtype.kind == "f":
            with numpy.errstate(all="ignore"):
                near = [abs(x - STEPS[name](x)) <= 4 * numpy.spacing(abs(x)) for x in (one[j], two[j])]
            mask = mask | ((one[j] != two[j]) & numpy.logical_or(*near))
        across.append(numpy.broadcast_to(mask, one[k - count].shape))
    across = across[count:]
    if axes is not None:
        across += [numpy.any(m, axis=axes or None) for m in across if m.ndim == 2]
    return across


@st.composite
def operands(draw, count):
    """Arrays of a few dtypes that broadcast, some of them not contiguous, read-only, or the same memory."""
    rows, columns = draw(st.sampled_from(((1, 7), (5, 1), (3, 4), (2, 300), (300, 2), (1, 1))))
    rng = numpy.random.default_rng(draw(st.integers(0, 99)))
    result = []
    for _ in range(count):
        dtype = draw(st.sampled_from((*FLOATS, "f8", *INTEGERS, "?")))
        shape = draw(st.sampled_from(((rows, columns), (rows, columns), (columns,), (rows, 1), (1, 1), ())))
        kind = draw(st.sampled_from("cfrst"))
        wide = tuple([2 * n for n in shape]) if kind == "s" else shape
        a = rng.normal(size=wide) * 3 if dtype in FLOATS else rng.integers(0, 100, wide)
        if dtype in FLOATS and draw(st.booleans()):
            special = rng.choice([0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, 5e-324], wide)
            a = numpy.where(rng.random(wide) < 0.3, special, a)
        with numpy.errstate(all="ignore"):
            a = numpy.asarray(a).astype(dtype)
        a = numpy.asfortranarray(a) if kind == "f" else a[(slice(None, None, {"r": -1, "s": 2}.get(kind)),) * a.ndim]
        if result and draw(st.integers(0, 5)) == 0:
            a = result[-1]
        result.append(a)
    return result


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(data=st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_random_programs(data):
    program = data.draw(programs())
    arrays = data.draw(operands(program[0]))
    with mock.patch.multiple(kernels, **dict.fromkeys(LIMITS, 1)):
        result = md.jit(lambda *arrays: run_program(program, arrays, np))(*arrays)
    uses = {}
    plain = md.jit(lambda *arrays: run_program(program, arrays, np, uses), kernels=False)(*arrays)
    for a, b, left_out in zip(result, plain, across_steps(program, uses, result, plain)):
        assert (a.dtype, a.shape, type(a)) == (b.dtype, b.shape, type(b))
        if a.dtype.kind == "f":
            # Functions of values that differ in the last place may amplify that; those that do so much are not here.
            a, b = a[~left_out], b[~left_out]
            numpy.testing.assert_allclose(a, b, rtol=1e-3 if a.dtype == "f4" else 1e-9, atol=1e-30)
        else:
            different = a != b
            assert different.mean() <= 0.05 if different.size > 20 else True
            if not any(v.dtype.kind == "f" for v in plain):
                numpy.testing.assert_array_equal(a, b)


COMPUTED = ("add", "multiply", "maximum", "subtract", "square")


@st.composite
def readings(draw):
    """Arrays and a program of reads and elementwise operations, as (name, operands, parameters)."""
    shape = draw(st.sampled_from(((), (7,), (4, 5), (1, 6), (6, 1), (3, 1, 4), (2, 3, 4), (2, 2, 1, 3), (0, 3))))
    rng = numpy.random.default_rng(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from(("f8", "f8", "f4", "i4")))
    wide = lambda a: numpy.repeat(a, 2, -1)[..., ::2] if a.ndim else a  # noqa: E731
    layouts = st.sampled_from((numpy.asarray, numpy.asfortranarray, wide))
    arrays = [draw(layouts)((rng.normal(size=shape) * 5).astype(dtype)) for _ in range(draw(st.integers(1, 3)))]
    values, steps = [*arrays], []
    for _ in range(draw(st.integers(2, 9))):
        k = draw(st.integers(0, len(values) - 1))
        a = values[k]
        alike = [j for j, b in enumerate(values) if b.shape == a.shape]
        axis = draw(st.integers(0, max(a.ndim - 1, 0)))
        name = draw(st.sampled_from((*COMPUTED, "roll", "slice", "pad", "concatenate")))
        name = name if (a.ndim and a.size < 200) or name in COMPUTED else "square"
        operands, settings = [k], ()
        if name != "square" and (name in COMPUTED or name == "concatenate"):
            operands += draw(st.lists(st.sampled_from(alike), min_size=1, max_size=1 if name in COMPUTED else 2))
        if name == "roll":
            axes = draw(st.lists(st.integers(0, a.ndim - 1), min_size=1, max_size=3))
            settings = tuple([draw(st.integers(-9, 9)) for _ in axes]), tuple(axes)
        elif name == "slice":
            ends = st.none() | st.integers(-5, 5)
            steps_ = st.sampled_from((None, None, 2, -1))
            settings = tuple([slice(draw(ends), draw(ends), draw(steps_)) for _ in range(axis + 1)])
        elif name == "pad":
            settings = tuple([(draw(st.integers(0, 2)), draw(st.integers(0, 1))) for _ in a.shape])
        elif name == "concatenate":
            settings = axis
        steps.append((name, operands, settings))
        values.append(run_reading(steps[-1:], values, numpy)[-1])
    return steps, arrays, draw(st.sampled_from((None, (), (0,), (-1,))))


def run_reading(steps, arrays, np):
    """The arrays, and the results of all steps."""
    values = [*arrays]
    for name, operands, settings in steps:
        chosen = [values[k] for k in operands]
        if name == "roll":
            values.append(np.roll(*chosen, *settings))
        elif name == "slice":
            values.append(chosen[0][settings])
        elif name == "pad":
            values.append(np.pad(*chosen, settings))
        elif name == "concatenate":
            values.append(np.concatenate(chosen, settings))
        else:
            values.append(getattr(np, name)(*chosen))
    return values


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(readings())
def test_random_reads(program):
    """Check slices, rolls, pads and concatenations: the results, sums of them, and gradients."""
    steps, arrays, axes = program

    def results(*arrays):
        result = run_reading(steps, arrays, np)[len(arrays) :]
        result = [
            v for v, (name, *_) in zip(result, steps) if name in COMPUTED
        ] or result  # what loops read is not stored
        return [*result, *[v.sum(axes) for v in result if axes is None or v.ndim]]

    # Of arctan, since values may be large: the derivative of sin would then be that of their last digits.
    total = lambda *arrays: sum(np.sum(np.arctan(v * 1.0)) for v in results(*arrays))  # noqa: E731
    inputs = [a.astype("f8") for a in arrays]
    for f, xs in (results, arrays), (md.grad(total, argnums=tuple(range(len(arrays)))), inputs):
        with mock.patch.multiple(kernels, **dict.fromkeys(LIMITS, 1)):
            result = md.jit(f)(*xs)
        for a, b in zip(result, md.jit(f, kernels=False)(*xs)):
            assert (a.dtype, a.shape, type(a)) == (b.dtype, b.shape, type(b))
            scale = max(1.0, abs(numpy.max(numpy.abs(b), initial=0.0)))
            numpy.testing.assert_allclose(a, b, rtol=1e-4 if a.dtype == "f4" else 1e-9, atol=1e-12 * scale)


EXACT = ("add", "subtract", "multiply", "divide", "negative", "absolute", "square", "sqrt", "reciprocal", "maximum",
         "minimum", "fmax", "fmin", "sign", "copysign", "floor", "ceil", "trunc", "rint", "equal", "not_equal", "less",
         "less_equal", "greater", "greater_equal", "isnan", "isinf", "isfinite", "signbit", "logical_and", "logical_or",
         "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift",
         "right_shift")  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "?"])
def test_exact_operations_of_all_special_values(of_any_size, dtype):
    """To the bit, NaNs and signs of zero included; one program for all operations of a dtype."""
    if dtype in FLOATS:
        special = [0.0, -0.0, 1.0, -1.5, 2.5, -3.5, math.inf, -math.inf, math.nan, 1e-310, 3e38, -7.0]
    else:
        info = numpy.iinfo(dtype) if dtype != "?" else None
        special = [0, 1] if info is None else [0, 1, 2, 3, 7, 100, info.max, info.max - 1, info.min, info.min + 1]
    with numpy.errstate(all="ignore"):
        inputs = numpy.array(special).astype(dtype)
    a, b = (m.ravel() for m in numpy.meshgrid(inputs, inputs))

    def all_of(a, b, np):
        result = {}
        for name in EXACT:
            f = getattr(np, name)
            try:
                result[name] = f(a) if getattr(numpy, name).nin == 1 else f(a, b)
            except TypeError:
                continue
        return result

    result, expected = md.jit(lambda a, b: all_of(a, b, np))(a, b), all_of(a, b, numpy)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        numpy.testing.assert_array_equal(result[name], value, err_msg=name)
        if value.dtype.kind == "f":
            numbers = ~numpy.isnan(value)
            same = numpy.signbit(result[name]) == numpy.signbit(value)
            if name in ("maximum", "minimum", "fmax", "fmin"):  # of two zeros NumPy gives either
                same |= value == 0
            assert same[numbers].all(), name


@pytest.mark.parametrize("axes", [0, 1, None, (0, 1)])
@pytest.mark.parametrize("order", "CF")
def test_sums_are_as_accurate_as_numpys(axes, order):
    """Sums of terms that nearly cancel are compared with exact sums."""
    rng = numpy.random.default_rng(0)
    a = rng.normal(size=(700, 1300)) * 10.0 ** rng.integers(-8, 8, (700, 1300))
    a = numpy.asarray(numpy.concatenate([a, -a[:, ::-1]]), order=order)
    f = lambda a: ((a * 2).sum(axes), (a * 2 - a).mean(axes))  # noqa: E731
    assert "fused" in operations(f, a)
    for value, plain, scale in zip(md.jit(f)(a), f(a), (2, 1)):
        count = 1 if scale == 2 else a.size // numpy.asarray(value).size
        lines = {0: a.T, 1: a}.get(axes, a.reshape(1, -1)) if isinstance(axes, int) else a.reshape(1, -1)
        exact = numpy.array([math.fsum(line * scale) / count for line in lines]).reshape(numpy.shape(value))
        error, numpys = numpy.abs(value - exact).max(), numpy.abs(plain - exact).max()
        bound = numpy.abs(a).sum(axes).max() * scale / count * 2.0**-52
        assert error <= max(numpys, 20 * bound)


def test_sums_over_leading_and_trailing_dimensions_with_broadcasts(of_any_size):
    a, b, c = numpy.random.default_rng(0).normal(size=(4, 6, 5)), numpy.arange(5.0), numpy.arange(4.0)[:, None, None]

    def f(a, b, c):
        z = a * b + 1
        w = z * c
        return w, w.sum(0), w.sum((0, 1)), w.sum(2), w.sum((1, 2), keepdims=True), w.sum(1), w.mean(0), z.sum()

    for result, expected in zip(md.jit(f)(a, b, c), f(a, b, c)):
        assert result.shape == expected.shape
        numpy.testing.assert_allclose(result, expected, rtol=1e-12)


def test_many_results_with_sums(of_any_size):
    """A generalized ufunc has at most 64 dimensions."""

    def f(a, b):
        values = [a * b + k for k in range(34)]
        return [*values, values[-1].sum()]

    a, b = numpy.arange(4.0), numpy.arange(3.0)[:, None]
    for result, expected in zip(md.jit(f)(a, b), f(a, b)):
        numpy.testing.assert_allclose(result, expected)


@pytest.mark.parametrize("shape", [(4, 2, 1), (4, 1, 2), (1, 4, 2), (1, 1, 3), (3, 1), (1, 3)])
def test_sums_along_axes_of_size_1(of_any_size, shape):
    """Beside operands that have some of the dimensions, so that these are rows and columns."""
    a = numpy.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    for others in itertools.product(*[{1, n} for n in shape]):
        b = numpy.arange(1.0, 1 + math.prod(others)).reshape(others)
        for axis in range(len(shape)):
            f = lambda a, b, axis=axis: ((z := a * b + 1).sum(axis), z.sum(axis, keepdims=True), z, z.sum())  # noqa: E731
            for result, expected in zip(md.jit(f)(a, b), f(a, b)):
                numpy.testing.assert_allclose(result, expected)


def test_sums_of_integers_and_of_nothing(of_any_size):
    n = numpy.arange(-5, 300)
    assert md.jit(lambda n: (n * 3 + 1).sum())(n) == (n * 3 + 1).sum()
    empty = md.jit(lambda a: ((a * 2 + 1).sum(0), a * 2 + 1))(numpy.ones((0, 3)))
    numpy.testing.assert_array_equal(empty[0], numpy.zeros(3))
    assert empty[1].shape == (0, 3)


def test_infinite_sums(of_any_size):
    a = numpy.array([1.0, math.inf, 2.0])
    assert md.jit(lambda a: (a * 2 + 1).sum())(a) == math.inf


def test_derivatives_of_any_order():
    f = lambda x: np.tanh(x * x) * np.exp(-x)  # noqa: E731
    for _ in range(3):
        numpy.testing.assert_allclose(md.jit(f)(x), f(x), rtol=1e-10)
        f = md.grad(lambda x, f=f: f(x).sum())
    hvp = lambda x: md.jvp(md.grad(lambda x: np.sin(x * x).sum()), (x,), (x,))[1]  # noqa: E731
    numpy.testing.assert_allclose(md.jit(hvp)(x), hvp(x), rtol=1e-10)


def test_results_are_memory_of_their_own():
    run = md.jit(lambda x: (x * 2 + 1, x * 2 + 1, x + 0))
    inputs = x.copy()
    first = run(inputs)
    again = run(inputs)
    for a, b in itertools.combinations([*first, *again, inputs], 2):
        assert not numpy.shares_memory(a, b)


def test_threads():
    run = md.jit(lambda x, k: (x * k + 1) * x)
    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(lambda k: run(x, float(k)), range(200)))
    for k, value in enumerate(result):
        numpy.testing.assert_allclose(value, (x * k + 1) * x)


def test_threads_do_not_take_reports_from_each_other():
    """One thread's angles are left to NumPy in each call, and the other's never."""
    run = md.jit(lambda x: np.sin(x) + np.cos(x))
    large, small = numpy.geomspace(1e7, 1e9, x.size), x
    expected = {id(v): numpy.sin(v) + numpy.cos(v) for v in (large, small)}
    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(lambda v: (v, run(v)), [large, small] * 200))
    for v, value in result:
        numpy.testing.assert_allclose(value, expected[id(v)], atol=1e-14)


# ---------------------------------------------------------------- warnings, errors, what is printed


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: x * 1e308 * 1e3 + 1, "overflow encountered in multiply"),
        (lambda x: 1 / (x - x) + 1, "divide by zero encountered in divide"),
        (lambda x: np.sqrt(-x) + 1, "invalid value encountered in sqrt"),
    ],
)
def test_warnings_are_numpys(f, message):
    assert fused(f, x) == 1
    run = md.jit(f)
    with pytest.warns(RuntimeWarning, match=message):
        result = run(x)
    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        numpy.testing.assert_array_equal(run(x), result)
    with numpy.errstate(all="raise"), pytest.raises(FloatingPointError, match=message):
        run(x)


def test_no_warnings_of_ordinary_numbers():
    f = lambda x: np.where(x > 0.5, np.tanh(x) * np.exp(-x), np.sqrt(x) / (1 + x)).sum()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        md.jit(md.value_and_grad(f))(x)


def test_source_shows_the_loop(of_any_size):
    source = md.jit(lambda x, y: ((x + y) * 2, ((x + y) * 3).sum())).source(numpy.ones((20, 30)), numpy.ones(30))
    assert (
        source
        == """\
def fused(e, f):  # one loop, compiled; f64[20,30], f64[30]
    j = 0
    for i0 in range(20):
        for i1 in range(30):
            g = e[i0, i1] + f[i1]
            h[i0, i1] = g * 2
            i = g * 3
            j += i
    return h, j


def f(a, b):  # f64[20,30], f64[30]
    c, d = fused(a, b)  # f64[20,30], f64[]
    return c, d"""
    )


def test_llvm_shows_the_kernel():
    text = md.jit(lambda x: x * 2 + 1).llvm(x)
    assert "define void @kernel(" in text and "fmul double" in text


# ---------------------------------------------------------------- the cache

PROGRAM = "import numpy, minidiff as md; x = numpy.ones(20_000); print(md.jit(lambda x: x * 2.5 + 1)(x)[0])"


def run_with(directory, code=PROGRAM, **env):
    env = {**os.environ, "MINIDIFF_CACHE": str(directory), **env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)


def objects(directory):
    return sorted(p for p in Path(directory).iterdir() if p.suffix == ".o")


def test_a_kernel_is_compiled_once_and_then_read(tmp_path):
    run_with(tmp_path)
    (result,) = objects(tmp_path)
    created = result.stat().st_mtime_ns
    assert run_with(tmp_path).stdout == "3.5\n"
    assert result.stat().st_mtime_ns == created and objects(tmp_path) == [result]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-10], lambda b: b"", lambda b: b[:100] + b"x" + b[101:], lambda b: b * 2]
)
def test_a_damaged_file_is_compiled_anew(tmp_path, damage):
    run_with(tmp_path)
    (result,) = objects(tmp_path)
    whole = result.read_bytes()
    result.write_bytes(damage(whole))
    assert run_with(tmp_path).stdout == "3.5\n"
    assert result.read_bytes() == whole


ELF = sys.platform == "linux" and platform.machine() == "x86_64"


@pytest.mark.parametrize("load", ["native._load_elf", "lambda *_: None"])
def test_cached_kernels_run_without_llvm(tmp_path, load):
    code = f"import sys; from minidiff.compiler import native; native._load_elf = {load}\n{PROGRAM}"
    code += "\nprint('llvmlite.binding' in sys.modules)"
    runs = [run_with(tmp_path, code).stdout for _ in range(2)]
    assert runs == ["3.5\nTrue\n", f"3.5\n{not (ELF and 'native' in load)}\n"]


@pytest.mark.skipif(not ELF, reason="these files are for Linux on x86-64")
def test_object_files_with_other_addresses_are_left_to_llvm(tmp_path):
    run_with(tmp_path)
    (result,) = objects(tmp_path)
    data = result.read_bytes()[32:]
    sections, count = int.from_bytes(data[40:48], "little"), int.from_bytes(data[60:62], "little")
    headers = [data[at : at + 64] for at in range(sections, sections + 64 * count, 64)]
    place = next(int.from_bytes(h[24:32], "little") for h in headers if h[4] == 4)  # of addresses
    other = data[: place + 8] + b"\2" + data[place + 9 :]
    assert native._load_elf(data, "kernel") and native._load_elf(other, "kernel") is None
    assert native._load_elf(b"MZ" + data[2:], "kernel") is None


def test_processes_that_start_together_compile_once(tmp_path):
    counting = (
        "from minidiff.compiler import native; compile_ = native.compile_module\n"
        "def counted(ir): print('compiled'); return compile_(ir)\n"
        "native.compile_module = counted\n"
    )
    env = {**os.environ, "MINIDIFF_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", counting + PROGRAM], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    texts = [p.communicate(timeout=120)[0] for p in started]
    assert all("3.5" in text for text in texts)
    assert sum("compiled" in text for text in texts) == 1
    assert not list(tmp_path.glob("*.lock"))


def test_a_lock_that_was_left_does_not_stop_anyone(tmp_path):
    run_with(tmp_path)
    (result,) = objects(tmp_path)
    result.unlink()
    lock = result.with_suffix(".lock")
    lock.touch()
    assert run_with(tmp_path).stdout == "3.5\n"
    assert result.exists() and not lock.exists()


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such locks")
def test_a_process_that_was_forked_while_another_thread_compiled_does_not_hold_the_lock(tmp_path):
    code = (
        "import os, pathlib, sys, time; from minidiff.compiler import native\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "with native._locked(path):\n"
        "    if not os.fork():\n"
        "        with native._locked(path): os._exit(0)\n"
        "    time.sleep(0.5)  # the child waits meanwhile\n"
        "os.wait()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "kernel.o")], check=True, timeout=60)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such locks")
def test_the_lock_of_a_process_that_died_is_free(tmp_path):
    code = (
        "import os, pathlib, sys; from minidiff.compiler import native\n"
        "with native._locked(pathlib.Path(sys.argv[1])): os._exit(0)"
    )
    path = tmp_path / "kernel.o"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=120)
    assert path.with_suffix(".lock").exists()
    with native._locked(path):
        assert path.with_suffix(".lock").exists()
    assert not path.with_suffix(".lock").exists()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.filterwarnings("ignore")
def test_powers_of_special_numbers_are_numpys(dtype):
    """NumPy takes roots where one exponent, 0.5, is that of all elements; elsewhere it is the C library's power."""
    exponents = [0.5, -0.5, 2.0, 3.0, -1.0, -2.0, 0.0, 1.0, 1.5, np.inf, -np.inf, np.nan]
    forms = {
        "each": lambda e: np.full((300, 8), e, dtype),
        "row": lambda e: np.full(8, e, dtype),
        "column": lambda e: np.full((300, 1), e, dtype),
        "one": lambda e: np.full(1, e, dtype),
        "number": np.dtype(dtype).type,
        "Python's": float,
    }
    f = lambda x, y: np.power(x * 1.0, y) * 2.0  # noqa: E731
    for form, of_exponent in forms.items():
        g = md.jit(f)
        for special in (-np.inf, -0.0, 0.0, np.inf, np.nan, -1.0, 1e-310, -1e-310, -3.0):
            x = np.full((300, 8), special, dtype)
            x[:, 4:] = 0.7
            for e in exponents:
                actual, expected = g(x, of_exponent(e))[0, ::7], f(x, of_exponent(e))[0, ::7]
                np.testing.assert_allclose(actual, expected, rtol=1e-5, err_msg=f"{special} ** {e}, {form}")
                numbers = ~np.isnan(expected)
                assert (np.signbit(actual) == np.signbit(expected))[numbers].all(), f"{special} ** {e}, {form}"
    constant = lambda x: np.power(x * 1.0, 0.5) * 2.0  # noqa: E731
    x = np.tile(np.array([-np.inf, -0.0, 0.7, 2.0], dtype), 500)
    np.testing.assert_allclose(md.jit(constant)(x), constant(x), rtol=1e-5)
    assert np.signbit(md.jit(constant)(x)[1])


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_directory_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    result = run_with(tmp_path)
    assert result.stdout == "3.5\n" and objects(tmp_path) == []
    assert result.stderr.count("RuntimeWarning") == 1 and "chmod 700" in result.stderr


def test_a_directory_that_cannot_be_made_is_only_a_warning(tmp_path):
    (tmp_path / "file").touch()
    result = run_with(tmp_path / "file" / "cache")
    assert result.stdout == "3.5\n" and result.stderr.count("RuntimeWarning") == 1


def test_a_full_disk_is_only_a_warning(tmp_path):
    code = (
        "import os; real = os.replace\ndef full(*a): raise OSError(28, 'No space left on device')\nos.replace = full\n"
    )
    result = run_with(tmp_path, code + PROGRAM)
    assert result.stdout == "3.5\n" and "No space left" in result.stderr
    assert list(tmp_path.iterdir()) == []
