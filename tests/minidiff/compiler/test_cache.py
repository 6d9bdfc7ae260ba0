"""Programs that are kept: what is freed with a function, which are dropped, and long ones. `traces.md` has the rest."""

import functools
import gc
import sys
import warnings
import weakref

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.compiler.cache import MAX_PROGRAMS
from spmd import P
from tests.checks.meshes import mapped, mesh

x = numpy.arange(3.0)


class Model:
    def __call__(self, x):
        return x * 2.0

    def calls_back(self, x):
        return md.pure_callback(self, x, x)


def test_memory_is_freed_with_the_function():
    def make():
        big = numpy.ones(3)

        def calls_itself(x):
            return x * big if x.ndim else calls_itself(x)

        functions = [calls_itself, lambda x: md.pure_callback(lambda y: calls_itself(y), x, x), model := Model()]
        functions.append(functools.partial(calls_itself))
        for f in (*functions, model.calls_back):
            md.jit(f)(x)
        md.jvp(lambda x: md.jit(calls_itself)(x) * 1.0, (x,), (x,))
        return [weakref.ref(f) for f in (*functions, big)]

    references, jitted = make(), md.jit(lambda x: x * 2.0)
    jitted(x)
    gc.collect()
    assert [reference() for reference in references] == [None] * 5
    assert len(jitted.programs) == 1 and "a * 2.0" in jitted.source(x)


def test_measured_programs_are_not_shared():
    """A program with a clock is for one measurement."""
    f, y = mapped(lambda x: x * 2.0, mesh(2), P("i"), P("i")), numpy.arange(4.0)
    step = lambda x: f(x)  # noqa: E731
    md.jit(step)(y)
    spmd.timeline(step, measured=True)(y)
    traced = md.jit(step)
    traced(y)
    assert "mark(" not in traced.source(y)


# ---------------------------------------------------------------- many programs, and long ones


def test_programs_that_were_not_used_for_long_are_dropped():
    traced = []
    f = md.jit(lambda x: traced.append(x.shape) or x * 2)
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
        assert f(1.0, n) == n == g(1.0, float(n))
    assert len(f.programs) <= MAX_PROGRAMS and len(f.inlined) <= MAX_PROGRAMS


#: A step of a long program, of the step's number, a vector of 8, and the first one.
STEPS = {
    "chain": lambda k, x, first: np.sin(x) * 1.01,
    "wide": lambda k, x, first: x + first,
    "views": lambda k, x, first: x.reshape(2, 4).reshape(8),
    "written": lambda k, x, first: np.at(x)[k % 8].set(x[(k + 1) % 8]),
}


def calls_of(f):
    """Return the number of Python and C functions that a call runs: a measure of time that no load changes."""
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event) if event in ("call", "c_call") else None)
    try:
        f()
    finally:
        sys.setprofile(None)
    return len(events)


def of_length(n, name):
    """A program of so many steps, or of so many arrays in a list and a dict; and its arguments."""
    if name in STEPS:
        return lambda x: functools.reduce(lambda y, k: STEPS[name](k, y, x), range(n), x), (numpy.ones(8),)
    arrays = [numpy.ones(2)] * n
    return lambda xs, d: sum(np.sum(x * y) for x, y in zip(xs, d.values())), (arrays, dict(enumerate(arrays)))


@pytest.mark.parametrize("kind", ["make_tape", "jit of a gradient"])
@pytest.mark.parametrize("name", [*STEPS, "leaves"])
def test_twice_as_long_takes_twice_as_much(name, kind):
    def run(n):
        f, args = of_length(n, name)
        g = md.make_tape(f) if kind == "make_tape" else md.jit(md.grad(lambda *args: np.sum(f(*args))))
        return g(*args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for n in (80, 160, 320):
            run(n)  # kernels are in the cache then
        one, two, four = (calls_of(lambda n=n: run(n)) for n in (80, 160, 320))
    assert four - two == pytest.approx(2 * (two - one), rel=0.05)


def test_the_garbage_collector_waits_while_a_program_is_recorded():
    seen = []
    f = lambda x: seen.append(gc.isenabled()) or md.jit(lambda x: seen.append(gc.isenabled()) or x)(x)  # noqa: E731
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
