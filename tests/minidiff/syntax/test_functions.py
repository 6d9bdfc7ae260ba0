"""A rewritten function is a function like the original: signature, closure, methods, and transformations of it."""

import inspect

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from tests.checks.samples import each
from tests.programs.syntax import check_body


def clipped(x, low=-1.0, *, high=1.0):
    """Clip a number."""
    if x < low:
        return low
    return high if x > high else x


def test_names_and_arguments():
    g = md.autograph(clipped)
    assert inspect.signature(g) == inspect.signature(clipped)
    assert (g.__name__, g.__doc__, g.__module__, g.__wrapped__) == ("clipped", "Clip a number.", __name__, clipped)
    assert [md.jit(g)(-2.0), md.jit(g)(3.0), g(3.0, high=5.0), md.jit(g)(-3.0, -4.0)] == [-1, 1, 3, -3]
    assert [md.grad(g)(x) for x in (-2.0, 0.5)] == [0, 1]


def test_a_second_time():
    g = md.autograph(md.autograph(clipped), max_steps=3)
    assert g.__wrapped__ is clipped
    assert md.jit(g)(3.0) == 1


def test_the_source_can_be_read():
    assert str(md.autograph(only_branch).source) == (
        "def only_branch(x):\n\n"
        f"    def then_{FIRST + 1}(ag_values):\n        nonlocal x\n        x, = ag_values\n        x = -x\n"
        "        return (x,)\n\n"
        f"    def orelse_{FIRST + 1}(ag_values):\n        nonlocal x\n        x, = ag_values\n        return (x,)\n"
        f"    x, = ag.if_(x < 0, then_{FIRST + 1}, orelse_{FIRST + 1}, (x,), ('x',))\n    return x"
    )


def only_branch(x):
    if x < 0:
        x = -x
    return x


FIRST = only_branch.__code__.co_firstlineno


def test_closures_are_live():
    scale = 2.0

    @md.autograph
    def f(x):
        if x > 0:
            return scale * x
        return x

    assert f(3.0) == 6
    scale = 5.0
    assert f(3.0) == 15


class Base:
    scale = 3.0

    @md.autograph
    def step(self, x, *, k=1):
        if x > 0:
            x = x * self.scale
        self.calls = k
        return x

    @classmethod
    @md.autograph
    def of(cls, x):
        return cls.scale if x > 0 else x


class Derived(Base):
    __hidden = 2.0

    @md.autograph
    def step(self, x):
        y = super().step(x, k=4)
        while y > self.__hidden:
            y = super().step(-y) / 2
        return y


def plain(self, x):
    return x if x > 0 else self.scale


def test_methods():
    base, derived = Base(), Derived()
    assert (base.step(2.0), md.jit(base.step)(2.0), base.calls) == (6, 6, 1)
    assert (derived.step(2.0), md.jit(derived.step)(2.0), derived.calls) == (-3, -3, 1)
    assert (Base.of(1.0), md.jit(Base.of)(-1.0)) == (3, -1)
    Base.plain = plain
    assert md.jit(md.autograph(base.plain))(-1.0) == 3


@md.jit
@md.autograph(max_steps=30)
def newton(a):
    x = a
    while abs(x * x - a) > 1e-12:
        x = (x + a / x) / 2
    return x


def test_transformations():
    assert newton(2.0) == pytest.approx(2**0.5)
    assert md.grad(newton)(2.0) == pytest.approx(0.5 * 2**-0.5)
    assert md.hessian(newton)(2.0) == pytest.approx(-0.25 * 2**-1.5)
    assert md.jvp(newton, (2.0,), (1.0,))[1] == pytest.approx(0.5 * 2**-0.5)
    assert md.grad(md.checkpoint(newton))(2.0) == pytest.approx(0.5 * 2**-0.5)
    rows = numpy.array([2.0, 3.0, 10.0])
    numpy.testing.assert_allclose(md.vmap(md.grad(newton))(rows), 0.5 / np.sqrt(rows))


def test_a_tape_has_one_operation_for_each_statement():
    tape = md.make_tape(md.autograph(rows_and_branches))(numpy.ones(5), 3)
    assert [e.primitive.name for e in tape.equations if e.bodies] == ["scan", "while_loop"]
    (scan, _) = (e for e in tape.equations if e.bodies)
    assert [e.primitive.name for e in scan.params["body"].equations if e.bodies] == ["cond"]


def rows_and_branches(xs, n):
    total = 0.0
    for x in xs:
        if x > 0:
            total = total + x
    for i in range(n):
        total = total * i
    return total


def test_known_conditions_leave_no_trace():
    tape = md.make_tape(lambda x: md.autograph(by_flag)(x, True))(2.0)
    assert [e.primitive.name for e in tape.equations] == ["multiply"] * 3


def by_flag(x, flag):
    if flag and x is not None:
        for _ in range(3):
            x = x * x
    else:
        x = -x
    return x


@each("ranks", [1, 2, 3, 4])
def test_bodies_on_ranks(ranks):
    check_body(spmd.make_mesh((ranks,), ("i",), backend="simulated"))
