"""Rewritten functions: their source, transformations of them, and on ranks; `functions.md` shows names and methods."""

import numpy

import minidiff as md
import minidiff.numpy as np
from tests.checks.meshes import mesh
from tests.checks.samples import each
from tests.programs.syntax import check_body


def only_branch(x):
    if x < 0:
        x = -x
    return x


def test_the_source_can_be_read(golden):
    text = str(md.autograph(only_branch).source)
    golden("autograph_source", text.replace(str(only_branch.__code__.co_firstlineno + 1), "LINE"))


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


def test_bodies_on_ranks():
    check_body(mesh(3))
