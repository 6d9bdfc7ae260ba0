"""Loops and programs on small arrays as one kernel, with NumPy's values, warnings and Ctrl-C; `together.md`: which."""

import itertools
import math
import signal
import threading

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import native, registers
from tests.checks.samples import each
from tests.minidiff.compiler.programs import SMALL, XS, Y, pendulum
from tests.minidiff.compiler.test_programs import check_compiled, wide

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite: pip install '.[compiled]'")


def count_loops(f, *args):
    """The number of loops of a program, and how many of them are kernels."""
    plan = md.jit(f).program(*args).source.plan
    return sum(str(e.primitive) in ("scan", "while_loop") for e in plan.tape.equations), len(plan.in_registers)


@pytest.mark.parametrize("name", SMALL)
def test_small_loops_are_kernels(name, monkeypatch):
    monkeypatch.setattr(registers, "CALL_INSTRUCTIONS", 200)
    assert count_loops(SMALL[name], XS) == (1, 1)
    check_compiled(SMALL[name], (XS,))


def test_a_step_is_one_kernel():
    steps = lambda y: pendulum(pendulum(y))  # noqa: E731
    program = md.jit(steps).program(Y)
    assert [str(e.primitive) for e in program.tape.equations] == ["fused"]
    assert "def fused(a):  # f64[2]" in program.source.text and "define void @kernel" in program.source.llvm
    check_compiled(steps, (Y,))


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, math.inf, -math.inf, math.nan, 1e-310, 1e300, 1e7, -2.5]
UNARY = [np.exp, np.log, np.log1p, np.expm1, np.tanh, np.sqrt, np.sin, np.square, np.sign, np.abs, np.reciprocal]
BINARY = [np.add, np.multiply, np.divide, np.power, np.maximum, np.fmin, np.copysign, np.logaddexp, np.less]


@each("functions", [UNARY, BINARY], ["of one number", "of two"])
def test_special_values_and_their_warnings(functions):
    pairs = [(x, x) for x in SPECIAL] * 6 if functions is UNARY else [*itertools.product(SPECIAL, SPECIAL)]
    of = (lambda x: [f(x[0]) for f in UNARY]) if functions is UNARY else lambda x: [f(x[0], x[1]) for f in BINARY]
    loop = lambda x: md.scan(lambda c, x: (c, [*of(x), np.sum(x), x @ np.array([0.0, 1.0])]), 0.0, x)[1]  # noqa: E731
    for x in (numpy.array(pairs), numpy.array(pairs[5:75])):
        assert count_loops(loop, x) == (1, 1)
        check_compiled(loop, (x,), ulps=4, layouts=(numpy.copy, wide))


def test_warnings_of_the_last_step():
    """A loop that divides by zero at its last step warns; where all warnings are ignored, nothing runs again."""
    f = lambda x: md.scan(lambda c, x: (c + 1 / x, c), 0.0, x)  # noqa: E731
    check_compiled(f, (numpy.array([*range(80, -1, -1)], float),))
    with numpy.errstate(all="ignore"):
        assert md.jit(f)(numpy.arange(80.0))[0] == math.inf
    with numpy.errstate(divide="raise"), pytest.raises(FloatingPointError):
        md.jit(f)(numpy.arange(80.0))


def test_strided_and_donated_arrays():
    rows = numpy.stack([XS, XS * 2], 1)[::-1]
    f = lambda y, rows: md.scan(lambda y, x: (pendulum(y) + x, y * x), y, rows)  # noqa: E731
    check_compiled(f, (numpy.array([1.0, 5.0, 0.5])[::2], rows))
    for _ in range(2):
        numpy.testing.assert_allclose(md.jit(f, donate_argnums=0)(Y.copy(), rows)[0], f(Y, rows)[0], 1e-13)


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
