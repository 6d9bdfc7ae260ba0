"""Compiled programs are as eager ones: values, types, warnings, gradients, memory, and bits on several threads."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import at_once, buffers, kernels, threads
from tests.checks.aliasing import check_apart
from tests.checks.samples import each
from tests.minidiff.compiler.programs import ALONG_ROWS, AT_ONCE, BROADCASTS, ELEMENTWISE, PROGRAMS, READS, B, X

#: Constants below which arrays are left to NumPy, results are not written into memory, and threads have nothing to do.
LIMITS = [(kernels, "MIN_ELEMENTS", 1), (kernels, "MIN_WORK", 1), (kernels, "MIN_COLUMNS", 1)]
LIMITS += [(buffers, "REUSED_BYTES", 0), (threads, "PIECE_WORK", 1 << 8), (at_once, "LEAST_WORK", 1)]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Compile for small arrays as for large ones; BLAS has one thread, so that operations may run at once."""
    for module, name, value in LIMITS:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def wide(x):
    """The same array, where every other element of a wider one."""
    other = numpy.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    other[..., ::2] = x
    return other[..., ::2]


def frozen(x):
    y = x.copy()
    y.flags.writeable = False
    return y


LAYOUTS = (numpy.copy, numpy.asfortranarray, wide, lambda x: x[::-1].copy()[::-1], frozen)


def outcome(f: Callable, args: Any) -> tuple[list, set]:
    """The results of a call, and the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return md.tree.leaves(f(*args)), {str(w.message).replace("scalar ", "") for w in caught}


def check_near(actual: Any, expected: Any, ulps: float) -> None:
    """Check types, signs of zeros, and that values differ by a number of units of the largest one."""
    assert md.typeof(actual) == md.typeof(expected)
    expected = numpy.asarray(expected)
    if expected.dtype.kind not in "fc":
        numpy.testing.assert_array_equal(actual, expected)
        return
    scale = numpy.max(numpy.abs(expected), initial=1.0, where=numpy.isfinite(expected))
    atol = ulps * numpy.finfo(expected.dtype).eps * scale
    numpy.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def check_same(actual: list, expected: list, ulps: float) -> None:
    for x, wanted in zip(actual, expected, strict=True):
        check_near(x, wanted, ulps)


def check_compiled(f: Callable, args: tuple, ulps: float = 32, layouts: tuple = LAYOUTS, shows: str = "") -> None:
    """Compare a compiled function with the eager one, for arrays of each layout, which stay as they are."""
    expected, warned = outcome(f, args)
    for options in ({"threads": 2}, {"kernels": False}):
        run = md.jit(lambda *args: f(*args), **options)
        for layout in layouts:
            inputs = [layout(x) for x in args]
            (first, caught), (second, _) = outcome(run, inputs), outcome(run, inputs)
            check_same(first, expected, ulps)
            assert caught == warned
            check_apart([*first, *second], inputs)
            assert all(numpy.array_equal(x, y, equal_nan=True) for x, y in zip(inputs, args))
        assert shows in run.source(*args) or "kernels" in options


def total(f: Callable) -> Callable:
    """The sum of the squares of all numbers among the results."""
    return lambda *xs: sum(np.sum(np.square(y)) for y in md.tree.leaves(f(*xs)) if md.typeof(y).dtype.kind == "f")


def gradient(f: Callable, args: tuple) -> Callable:
    return md.grad(total(f), argnums=tuple(range(len(args))))


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name):
    f, args, shows, _ = PROGRAMS[name]
    check_compiled(f, args, shows=shows)


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.differentiable])
def test_gradients(name):
    f, args, *_ = PROGRAMS[name]
    check_same(md.jit(gradient(f, args))(*args), gradient(f, args)(*args), 256)


def every(table: dict) -> Callable:
    return lambda x: [f(x) for f in table.values()]


#: Programs in single precision: those of the elements and of the rows of a matrix are one.
SINGLE = {"elements": (every(ELEMENTWISE), True), "rows": (every(ALONG_ROWS), True)}
SINGLE |= {name: (f, PROGRAMS[name].differentiable) for name, f in BROADCASTS.items()}


@pytest.mark.parametrize("name", SINGLE)
def test_single_precision(name):
    f, differentiable = SINGLE[name]
    args = tuple([x.astype("f4") for x in (X, B)[: 2 - (name in ("elements", "rows"))]])
    both = (lambda *args: (f(*args), gradient(f, args)(*args))) if differentiable else f
    check_same(md.tree.leaves(md.jit(both)(*args)), md.tree.leaves(both(*args)), 256)


@pytest.mark.parametrize("name", {**READS, **BROADCASTS, **AT_ONCE})
def test_bits_with_any_number_of_threads(name):
    f, args, *_ = PROGRAMS[name]
    one, *others = [md.tree.leaves(md.jit(lambda *args: f(*args), threads=n)(*args)) for n in (1, 2, 3, 16)]
    for other in others:
        check_same(other, one, 0)


@each("name", PROGRAMS)
def test_donated_arguments(name):
    """All that a program may write into: its results are the same, and stand alone."""
    f, args, *_ = PROGRAMS[name]
    run = md.jit(lambda *args: f(*args), donate_argnums=tuple(range(len(args))))
    (results, _), (expected, _) = outcome(run, [*map(numpy.copy, args)]), outcome(f, args)
    check_same(results, expected, 32)
    check_apart(results)
