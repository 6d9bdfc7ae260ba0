"""Loops and programs on small arrays as one kernel: equal to NumPy's operations to rounding, with its warnings."""

import itertools
import math
import signal
import threading
import warnings

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import native, registers

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite: pip install '.[compiled]'")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MINIDIFF_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))


def count_loops(f, *args):
    """The number of loops of a program, and how many of them are kernels."""
    plan = md.jit(f).program(*args).source.plan
    return sum(str(e.primitive) in ("scan", "while_loop") for e in plan.tape.equations), len(plan.in_registers)


def equal_to_numpy(f, *args, kernels=1, loops=None, rtol=1e-13):
    """Check that the loops of a function are kernels, and that results, types and warnings are those without any."""
    assert count_loops(f, *args) == (kernels if loops is None else loops, kernels)
    results = []
    for options in ({}, {"kernels": False}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append((md.tree.leaves(md.jit(f, **options)(*args)), {str(w.message) for w in caught}))
    (actual, warned), (expected, warned_by_numpy) = results
    assert warned == warned_by_numpy
    for x, y in zip(actual, expected, strict=True):
        assert (type(x), x.dtype, x.shape) == (type(y), y.dtype, y.shape)
        numpy.testing.assert_allclose(x, y, rtol if x.dtype != "f4" else 1e-6, 1e-300)
        if x.dtype.kind == "f":
            numpy.testing.assert_array_equal(numpy.signbit(x)[x == 0], numpy.signbit(y)[y == 0])


def pendulum(y, h=0.05):
    """A step of the classical Runge-Kutta method for a pendulum."""
    f = lambda y: np.stack([y[1], -np.sin(y[0])])  # noqa: E731
    k1 = f(y)
    k2 = f(y + h / 2 * k1)
    k3 = f(y + h / 2 * k2)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(y + h * k3))


def trajectory(y):
    return md.scan(lambda y, _: (pendulum(y), y), y, length=40)


Y = numpy.array([1.0, 0.5])
XS = numpy.linspace(-1.0, 1.0, 40)


def test_a_trajectory_and_its_gradient():
    equal_to_numpy(trajectory, Y)
    equal_to_numpy(md.value_and_grad(lambda y: np.sum(trajectory(y)[1] ** 2)), Y, kernels=2)


def test_a_batch_of_trajectories_and_a_hessian():
    equal_to_numpy(md.vmap(trajectory), numpy.stack([Y, -Y]))
    equal_to_numpy(md.hessian(lambda y: np.sum(trajectory(y)[1] ** 2)), Y, kernels=4)


def test_a_step_is_one_kernel():
    steps = lambda y: pendulum(pendulum(y))  # noqa: E731
    program = md.jit(steps).program(Y)
    assert [str(e.primitive) for e in program.tape.equations] == ["fused"]
    numpy.testing.assert_allclose(md.jit(steps)(Y[::-1]), steps(Y[::-1]), 1e-14)
    assert "def fused(a):  # f64[2]" in program.source.text and "define void @kernel" in program.source.llvm


LOOPS = {
    "reverse": lambda x: md.scan(lambda c, x: (np.sin(c + x), (c, c > 0.5)), 0.5, x, reverse=True),
    "integers": lambda x: md.scan(lambda c, x: ((c * 3) & 7, c), np.int64(1), x),
    "float32": lambda x: md.scan(lambda c, x: (np.tanh(c + x), c), np.float32(0.5), x.astype("f4")),
    "booleans": lambda x: md.scan(lambda c, x: (c ^ (x > 0), c), np.array([True, False]), x),
    "matrices": lambda x: md.scan(lambda c, x: (np.diag(c @ c.T) * x + c.mT, c[::-1].sum(0)), np.eye(3) / 2, x),
    "constants": lambda x: md.scan(lambda c, x: (XS[:3] * x - c, np.concatenate([c, XS[:1]])), XS[1:4], x),
    "fori_loop": lambda x: md.fori_loop(3, 40, lambda i, c: c + np.sqrt(i * 1.0) + x[3], 0.0),
    "while_loop": lambda x: md.while_loop(
        lambda c: c[0] < 9, lambda c: (c[0] + abs(x[0]) / 7, np.cos(c[1] + c[0]) * 2), (x[2], x[5])
    ),
    "no step": lambda x: md.while_loop(lambda c: np.sum(c) < -9, lambda c: np.sin(np.cos(c) * c + c), x[:3]),
}


@pytest.mark.parametrize("instructions", [registers.CALL_INSTRUCTIONS, 200])
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name, instructions, monkeypatch):
    monkeypatch.setattr(registers, "CALL_INSTRUCTIONS", instructions)  # few steps in a call, or all
    equal_to_numpy(LOOPS[name], XS)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, math.inf, -math.inf, math.nan, 1e-310, 1e300, 1e7, -2.5]
UNARY = [np.exp, np.log, np.log1p, np.expm1, np.tanh, np.sqrt, np.sin, np.square, np.sign, np.abs, np.reciprocal]
BINARY = [np.add, np.multiply, np.divide, np.power, np.maximum, np.fmin, np.copysign, np.logaddexp, np.less]


@pytest.mark.parametrize("f", [*UNARY, *BINARY], ids=lambda f: f.__name__)
def test_special_values(f):
    if f in UNARY:
        rows = numpy.array(SPECIAL * 6)
        step = lambda c, x: (c, f(x))  # noqa: E731
    else:
        rows = numpy.array([*itertools.product(SPECIAL, SPECIAL)])
        step = lambda c, x: (c, (f(x[0], x[1]), np.sum(x), x @ np.array([0.0, 1.0])))  # noqa: E731
    for x in (rows, rows[5:75]):
        equal_to_numpy(lambda x: md.scan(step, 0.0, x)[1], x)


def test_warnings_are_numpys():
    """A loop that divides by zero at its last step warns; where all warnings are ignored, nothing runs again."""
    f = lambda x: md.scan(lambda c, x: (c + 1 / x, c), 0.0, x)  # noqa: E731
    equal_to_numpy(f, numpy.array([*range(80, -1, -1)], float))
    with numpy.errstate(all="ignore"):
        assert md.jit(f)(numpy.arange(80.0))[0] == math.inf
    with numpy.errstate(divide="raise"), pytest.raises(FloatingPointError):
        md.jit(f)(numpy.arange(80.0))


def test_strided_and_donated_arrays():
    rows = numpy.stack([XS, XS * 2], 1)[::-1]
    f = lambda y, rows: md.scan(lambda y, x: (pendulum(y) + x, y * x), y, rows)  # noqa: E731
    equal_to_numpy(f, numpy.array([1.0, 5.0, 0.5])[::2], rows)
    expected, y = f(Y, rows), Y.copy()
    for _ in range(2):
        numpy.testing.assert_allclose(md.jit(f, donate_argnums=0)(y.copy(), rows)[0], expected[0], 1e-13)


def test_the_inner_one_of_two_loops():
    nested = lambda x: md.scan(lambda c, x: md.scan(lambda a, b: (a + b, a * b), c, x), 0.5, x)  # noqa: E731
    equal_to_numpy(nested, np.tile(XS.reshape(2, 20), 2), kernels=0, loops=1)


def test_large_arrays_and_other_operations_stay_with_numpy():
    assert count_loops(lambda x: md.scan(lambda c, x: (np.sin(c) * 2 + x, None), np.ones(300), x), XS) == (1, 0)
    assert count_loops(lambda x: md.scan(lambda c, x: (np.sort(c) * 2 + x, None), np.ones(3), x), XS) == (1, 0)
    assert count_loops(lambda x: md.scan(lambda c, x: (c * 2 + x, None), 0.0, x[:9]), XS) == (1, 0)  # too few steps
    assert count_loops(lambda x: md.scan(lambda c, x: (c * 1j + x, None), 0j, x), XS) == (1, 0)
    assert count_loops(lambda x: md.scan(lambda c, x: (c @ c, c @ c), np.eye(2) * 1j, x), XS) == (1, 0)
    assert count_loops(lambda x: md.scan(lambda c, x: (c, c[:300] @ c[300:]), np.ones(600), x), XS) == (1, 0)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals of threads")
def test_control_c_ends_an_endless_loop():
    f = md.jit(lambda x: md.while_loop(lambda c: c[0] < 2, lambda c: (np.cos(np.sin(c[0])), c[1] * 0.5 + c[0]), (x, x)))
    f(3.0)  # compiled
    main = threading.get_ident()
    timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        f(1.0)
    timer.join()
