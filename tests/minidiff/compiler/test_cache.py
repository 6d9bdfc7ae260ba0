"""Programs that all `jit(f)` of one function share: when it is traced again, and what is freed with it."""

import copy
import functools
import gc
import weakref

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.compiler.cache import has_closures
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


def test_a_loop_traces_once():
    f, g = counted(), counted(lambda x, n: x * n)
    for _ in range(5):
        numpy.testing.assert_array_equal(md.jit(f)(x), 2 * x)
        numpy.testing.assert_array_equal(md.jit(g, static_argnums=1)(x, 2), 2 * x)
    assert (f.count, g.count) == (1, 1)
    md.jit(f)(x.astype("float32"))
    md.jit(g, static_argnums=1)(x, 3)
    assert (f.count, g.count) == (2, 2)
    assert repr(md.jit(f)).endswith(": 0 programs compiled>")  # those that it has run


def test_a_loop_of_derivatives_traces_once():
    f = counted()
    for _ in range(5):
        numpy.testing.assert_array_equal(md.grad(lambda x: md.jit(f)(x).sum())(x), [2.0] * 3)
    assert f.count == 1


def test_options_are_part_of_the_key():
    f = counted()
    options = [{}, {"kernels": False}, {"without": ["copy in memory"]}, {"bucket_bytes": 8}, {"donate_argnums": 0}]
    options[2]["without"] = [next(iter(md.compiler.program.rewrites()))]
    for _ in range(2):
        for more in (*options, {"static_argnames": "n"}):
            if "static_argnames" not in more:
                md.jit(f, **more)(x.copy())
    assert f.count == len(options)
    g = counted(lambda x, n=2: x * n)
    with pytest.raises(TypeError, match="not hashable"):
        md.jit(g, static_argnums=1)(x, [2])
    md.jit(g)(x, 2.0)
    md.jit(g, static_argnums=1)(x, 2.0)
    assert g.count == 2


@each("make", [Model, Unhashable])
def test_methods_and_objects(make):
    """A bound method is known by its object, not by an equal one; objects that are called, by themselves."""
    first, second = make(2.0), make(3.0)
    for _ in range(3):
        numpy.testing.assert_array_equal(md.jit(first.loss)(x), 2 * x)
        numpy.testing.assert_array_equal(md.jit(second.loss)(x), 3 * x)
    assert (first.count, second.count) == (1, 1)
    for _ in range(3):
        numpy.testing.assert_array_equal(md.jit(first)(x), 2 * x)
    assert first.count == 2
    make.traces = 0
    for _ in range(3):
        md.jit(make.of_class)(x)
    assert make.traces == 1
    first.w = 4.0
    numpy.testing.assert_array_equal(md.jit(first)(x), 4 * x)


def test_partial_functions_and_objects_without_weak_references():
    f = counted(lambda x, n: x * n)
    double = functools.partial(f, n=2.0)
    for _ in range(3):
        md.jit(double)(x)
    assert f.count == 1
    numpy.testing.assert_array_equal(md.jit(functools.partial(f, n=3.0))(x), 3 * x)
    slots = Slots()
    for _ in range(2):
        md.jit(slots)(x)
        numpy.testing.assert_array_equal(md.jit(numpy.sin)(x), numpy.sin(x))
    assert slots.count == 2


def test_functions_of_equal_code_share_nothing():
    def multiply_by(factor):
        return lambda x: x * factor

    functions = [multiply_by(float(k)) for k in range(3)]
    for _ in range(2):
        for k, f in enumerate(functions):
            numpy.testing.assert_array_equal(md.jit(f)(x), k * x)


def test_copies_of_an_object_share_nothing():
    model = Model()
    md.jit(model.loss)(x)
    other = copy.copy(model)
    other.w = 5.0
    numpy.testing.assert_array_equal(md.jit(other.loss)(x), 5 * x)


def test_what_a_function_closes_over(monkeypatch):
    """`jit(f)` traces again after a name, a cell or an attribute has another value; what was compiled stays."""
    weights = numpy.ones(3)

    def f(x):
        return (lambda y: y * scale)(x * weights)

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
    model = Model(2.0)
    md.jit(model.loss)(x)
    model.w = 4.0
    numpy.testing.assert_array_equal(md.jit(model.loss)(x), 4 * x)


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
        functions = [calls_itself, lambda x: md.pure_callback(lambda y: calls_itself(y), x, x), model, model.calls_back]
        functions.append(functools.partial(calls_itself))
        for f in functions:
            numpy.testing.assert_array_equal(md.jit(f)(x), x * (2.0 if f in functions[2:4] else 1.0))
            numpy.testing.assert_array_equal(md.jvp(lambda x, f=f: md.jit(f)(x) * 1.0, (x,), (x,))[0].shape, (3,)) if (
                f is calls_itself
            ) else None
        return [weakref.ref(f) for f in (calls_itself, functions[1], model, functions[4], big)]

    references = make()
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


def test_a_jitted_function_keeps_its_programs():
    jitted = md.jit(lambda x: x * 2.0)
    numpy.testing.assert_array_equal(jitted(x), 2 * x)
    gc.collect()
    assert len(jitted.programs) == 1 and "a * 2.0" in jitted.source(x)


def test_measured_programs_are_not_shared():
    """A program with a clock is for one measurement."""
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    f = spmd.shard_map(lambda x: x * 2.0, mesh=mesh, in_specs=spmd.P("i"), out_specs=spmd.P("i"))
    step = lambda x: f(x)  # noqa: E731
    y = numpy.arange(4.0)
    md.jit(step)(y)
    spmd.timeline(step, measured=True)(y)
    traced = md.jit(step)
    traced(y)
    assert "mark(" not in traced.source(y)


def test_programs_with_closures_are_told_apart():
    def tape(f):
        return md.make_tape(f)(x)

    local = 2.0
    assert not has_closures(tape(lambda x: md.fori_loop(0, 3, lambda i, c: c * local, np.sin(x))))
    assert has_closures(tape(lambda x: md.pure_callback(lambda x: x * local, x, x)))


def test_jacobian():
    f = lambda x: np.sin(x) * x[0]  # noqa: E731
    numpy.testing.assert_array_equal(md.jacobian(f)(x), md.jacrev(f)(x))
    numpy.testing.assert_array_equal(md.jacobian(lambda x, y: x * y, argnums=1)(x, x), numpy.diag(x))
