"""Long programs take proportionally longer, and programs for many types do not stay for ever."""

import gc
import sys
import warnings

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler.cache import MAX_PROGRAMS


def chain(x, n):
    for _ in range(n // 2):
        x = np.sin(x) * 1.01
    return x


def wide(x, n):
    total = x
    for _ in range(n):
        total = total + x
    return total


def views(x, n):
    for _ in range(n // 2):
        x = x.reshape(2, 4).reshape(8)
    return x


def written(x, n):
    for k in range(n):
        x = np.at(x)[k % 8].set(x[(k + 1) % 8])
    return x


def calls_of(f):
    """Return the number of Python and C functions that a call runs: a measure of time that no load changes."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        f()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", ["make_tape", "make_tape of a gradient", "jit", "jit of a gradient"])
@pytest.mark.parametrize("program", [chain, wide, views, written])
def test_twice_as_long_takes_twice_as_much(program, kind):
    x = numpy.ones(8)

    def run(n):
        f = lambda x: program(x, n)  # noqa: E731
        if "gradient" in kind:
            f = md.grad(lambda x: program(x, n).sum())
        return md.make_tape(f)(x) if "make_tape" in kind else md.jit(f)(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run(20)
        one, two, four = (calls_of(lambda n=n: run(n)) for n in (100, 200, 400))
    assert four - two == pytest.approx(2 * (two - one), rel=0.05)


def test_programs_that_were_not_used_for_long_are_dropped():
    traced = []

    @md.jit
    def f(x):
        traced.append(x.shape)
        return x * 2

    for n in range(1, 3 * MAX_PROGRAMS):
        assert f(numpy.ones(n)).shape == (n,)
        assert f(numpy.ones(1))[0] == 2.0  # used all the time, by the fast path
    assert len(f.programs) <= MAX_PROGRAMS and len(f.arrays) <= MAX_PROGRAMS
    assert traced.count((1,)) <= 2  # the first time that programs are dropped, its use had not been seen
    assert traced.count((2,)) == 1  # before it is needed again
    f(numpy.ones(2))
    assert traced.count((2,)) == 2


def test_static_arguments_and_inlined_programs_are_dropped_too():
    f = md.jit(lambda x, n: x * n, static_argnums=1)
    g = md.grad(lambda x, n: f(x, n))
    for n in range(MAX_PROGRAMS + 50):
        assert f(1.0, n) == n
        assert g(1.0, float(n)) == n
    assert len(f.programs) <= MAX_PROGRAMS and len(f.inlined) <= MAX_PROGRAMS


def test_the_garbage_collector_waits_while_a_program_is_recorded():
    seen = []

    def f(x):
        seen.append(gc.isenabled())
        return md.jit(lambda x: seen.append(gc.isenabled()) or x)(x)

    md.make_tape(f)(1.0)
    assert seen == [False, False] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        md.make_tape(lambda x: x / (1 // 0))(1.0)
    assert gc.isenabled()
    gc.disable()
    try:
        md.make_tape(f)(1.0)
        assert not gc.isenabled()
    finally:
        gc.enable()
