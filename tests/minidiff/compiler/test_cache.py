"""Programs that all `jit(f)` of one function share: when it is traced again, and what is freed with it."""

import copy
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
from tests.checks.samples import each

x = numpy.arange(3.0)
scale = 2.0


def counted(f=lambda x: x * 2.0):
    """A function that counts how often it is traced."""

    def traced(*args, **named):
        traced.count += 1
        return f(*args, **named)

    traced.count = 0
    return traced


class Model:
    """An object that counts how often its methods are traced."""

    traces = 0

    def __init__(self, w=2.0):
        self.w, self.count = w, 0

    def loss(self, x):
        self.count += 1
        return x * self.w

    __call__ = loss

    @classmethod
    def of_class(cls, x):
        cls.traces += 1
        return x * 2.0

    def calls_back(self, x):
        self.count += 1
        return md.pure_callback(lambda x: x * self.w, x, x)


class Unhashable(Model):
    __hash__ = None

    def __eq__(self, other):
        return True


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def __call__(self, x):
        self.count += 1
        return x * 2.0


#: Calls of a function, each of which must trace it once, however often it is repeated.
CALLS = [
    lambda f: md.jit(f)(x),
    lambda f: md.jit(f)(x.astype("float32")),
    lambda f: md.grad(lambda x: md.jit(f)(x).sum())(x),
    lambda f: md.jit(f, kernels=False)(x),
    lambda f: md.jit(f, without=[next(iter(md.compiler.program.rewrites()))])(x),
    lambda f: md.jit(f, bucket_bytes=8)(x),
    lambda f: md.jit(f, donate_argnums=0)(x.copy()),
]


def test_programs_are_shared_by_calls_of_one_function_and_options():
    f = counted(lambda x, n=2: x * n)
    for call in CALLS:
        before = f.count
        for _ in range(3):
            numpy.testing.assert_allclose(call(f), [2.0] * 3 if call is CALLS[2] else 2 * x)
        assert f.count == before + 1
    assert repr(md.jit(f)).endswith(": 0 programs compiled>")  # those that it has run


@each("make", [Model, Unhashable])
def test_methods_and_objects(make):
    """A bound method is known by its object, not by an equal one; objects that are called, by themselves."""
    first, second = make(2.0), make(3.0)
    make.traces = 0
    for _ in range(3):
        numpy.testing.assert_array_equal(md.jit(first.loss)(x), 2 * x)
        numpy.testing.assert_array_equal(md.jit(second.loss)(x), 3 * x)
        numpy.testing.assert_array_equal(md.jit(first)(x), 2 * x)
        md.jit(make.of_class)(x)
    assert (first.count, second.count, make.traces) == (2, 1, 1)
    first.w = 4.0
    numpy.testing.assert_array_equal(md.jit(first)(x), 4 * x)


def test_partial_functions_and_objects_without_weak_references():
    f = counted(lambda x, n: x * n)
    double, slots = functools.partial(f, n=2.0), Slots()
    for _ in range(3):
        md.jit(double)(x)
    assert f.count == 1
    numpy.testing.assert_array_equal(md.jit(functools.partial(f, n=3.0))(x), 3 * x)
    for _ in range(2):
        md.jit(slots)(x)
        numpy.testing.assert_array_equal(md.jit(numpy.sin)(x), numpy.sin(x))
    assert slots.count == 2


def test_functions_of_equal_code_and_copies_of_an_object_share_nothing():
    model = Model(0.0)
    functions = [lambda x, k=k: x * float(k) for k in range(3)]
    for k, f in enumerate(functions * 2):
        numpy.testing.assert_array_equal(md.jit(f)(x), k % 3 * x)
        numpy.testing.assert_array_equal(md.jit(model.loss)(x), k * x)
        model = copy.copy(model)
        model.w = k + 1.0


def test_what_a_function_closes_over(monkeypatch):
    """`jit(f)` traces again after a name, a cell or an attribute has another value; what was compiled stays."""
    weights, model = numpy.ones(3), Model(2.0)

    def f(x):
        return (lambda y: y * scale)(x * weights) + model.loss(0 * x)

    before = md.jit(f)
    numpy.testing.assert_array_equal(before(x), 2 * x)
    monkeypatch.setitem(globals(), "scale", 3.0)
    numpy.testing.assert_array_equal(md.jit(f)(x), 3 * x)
    weights = numpy.full(3, 2.0)
    numpy.testing.assert_array_equal(md.jit(f)(x), 6 * x)
    numpy.testing.assert_array_equal(before(x), 2 * x)
    before(x[:1])  # a program for other values than the first one
    for _ in range(2):
        numpy.testing.assert_array_equal(md.jit(f)(x), 6 * x)


def test_traces_may_count_in_what_they_close_over():
    count, model = 0, Model()

    def f(x):
        nonlocal count
        count += 1
        return x * 2.0

    for steps in range(4):
        md.jit(f)(x)
        md.jit(f, kernels=False)(x)
        md.jit(model.loss)(x)
        model.steps = steps
    assert (count, model.count) == (2, 1)


def test_memory_is_freed_with_the_function():
    def make():
        big = numpy.ones(3)

        def calls_itself(x):
            return x * big if x.ndim else calls_itself(x)

        model = Model()
        functions = [calls_itself, lambda x: md.pure_callback(lambda y: calls_itself(y), x, x), model]
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
