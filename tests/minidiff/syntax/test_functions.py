"""A rewritten function is a function like the original: signature, closure, methods, and transformations of it."""

import functools
import inspect

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from tests.checks.meshes import mesh
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
    assert md.autograph(g, max_steps=3).__wrapped__ is clipped


@each("f", [lambda x: x, functools.wraps(clipped)(lambda x: clipped(x))])
def test_functions_without_statements_are_refused(f):
    with pytest.raises(TypeError):
        md.autograph(f)


def only_branch(x):
    if x < 0:
        x = -x
    return x


def test_the_source_can_be_read(golden):
    text = str(md.autograph(only_branch).source)
    golden("autograph_source", text.replace(str(only_branch.__code__.co_firstlineno + 1), "LINE"))


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


def test_methods():
    base, derived = Base(), Derived()
    assert (base.step(2.0), md.jit(base.step)(2.0), base.calls) == (6, 6, 1)
    assert (derived.step(2.0), md.jit(derived.step)(2.0), derived.calls) == (-3, -3, 1)
    assert (Base.of(1.0), md.jit(Base.of)(-1.0)) == (3, -1)


@md.jit
@md.autograph(max_steps=30)
def newton(a):
    x = a
    while abs(x * x - a) > 1e-12:
        x = (x + a / x) / 2
    return x


OF = [md.grad, md.hessian, lambda f: lambda a: md.jvp(f, (a,), (1.0,)), lambda f: md.grad(md.checkpoint(f))]
OF += [lambda f: lambda a: md.vmap(md.grad(f))(a * numpy.arange(1.0, 4.0))]


@each("of", OF)
def test_transformations(of):
    numpy.testing.assert_allclose(of(newton)(2.0), of(lambda a: np.sqrt(a))(2.0), rtol=1e-6)


def rows_and_branches(xs, n):
    total = 0.0
    for x in xs:
        if x > 0:
            total = total + x
    for i in range(n):
        total = total * i
    return total


def test_a_tape_has_one_operation_for_each_statement():
    tape = md.make_tape(md.autograph(rows_and_branches))(numpy.ones(5), 3)
    scan, loop = (e for e in tape.equations if e.bodies)
    assert (scan.primitive.name, loop.primitive.name) == ("scan", "while_loop")
    assert [e.primitive.name for e in scan.params["body"].equations if e.bodies] == ["cond"]


def test_bodies_on_ranks():
    check_body(mesh(3))
