"""Forward mode: `jvp`, nested in itself and over trees."""

from typing import Any, NamedTuple

import numpy as np

import minidiff as md
from minidiff.values.dtypes import float0
from tests.checks.samples import each

X = np.array([0.5, 2.0, 3.0])


class Pair(NamedTuple):
    a: Any
    b: Any


def derivative(f):
    return lambda x: md.jvp(f, (x,), (1.0,))[1]


def test_value_and_tangent():
    value, tangent = md.jvp(lambda x, y: x * y, (X, 2.0), (np.ones(3), 10.0))
    assert value.tolist() == [1.0, 4.0, 6.0]
    assert tangent.tolist() == [7.0, 22.0, 32.0]


def test_higher_derivatives():
    f = lambda x: x**4  # noqa: E731
    for expected in (32.0, 48.0, 48.0, 24.0, 0.0):
        f = derivative(f)
        assert f(2.0) == expected


@each("d", [derivative, md.grad])
@each("e", [derivative, md.grad])
def test_perturbations_are_not_confused(d, e):
    assert d(lambda x: x * e(lambda y: x + y)(1.0))(2.0) == 1.0
    assert d(lambda x: x * e(lambda y: x * y)(1.0))(2.0) == 4.0
    assert d(lambda x: e(lambda y: x * x)(1.0))(2.0) == 0.0  # nothing depends on y
    assert d(lambda x: e(lambda y: e(lambda z: x * y * y * z)(1.0))(x))(3.0) == 12.0
    assert e(lambda x: d(lambda y: x * y)(x) + d(lambda x: x * x)(x))(5.0) == 3.0  # a name that is shadowed


def test_trees():
    p = {"w": X, "b": (None, [1.0], Pair(2.0, X))}
    value, tangent = md.jvp(lambda p: {"out": Pair(p["w"] * p["b"][2].a, p["b"][1]), "none": None}, (p,), (p,))
    assert md.tree.structure(value) == md.tree.structure(tangent)
    assert value["out"].a.tolist() == [1.0, 4.0, 6.0]
    assert tangent["out"].a.tolist() == [2.0, 8.0, 12.0] and tangent["out"].b == [1.0]


def test_results_that_do_not_depend_have_a_zero_tangent_of_their_type():
    _, (one, zero, none) = md.jvp(lambda x: (x, np.float32(3.0), X > 1), (1.0,), (2.0,))
    assert one == 2.0
    assert md.typeof(zero) == md.typeof(np.float32(0)) and zero == 0
    assert (none.dtype, none.shape) == (float0, X.shape)


def test_integers_have_tangents_without_values():
    none = np.zeros((), float0)
    assert md.jvp(lambda x, n: x * n, (2.0, 3), (1.0, none))[1] == 3.0
    assert md.linearize(lambda x, n: x * n, 2.0, 3)[1](1.0, none) == 3.0


def test_complex_numbers():
    value, tangent = md.jvp(lambda z: np.exp(z) * z, (1j,), (1 + 0j,))
    np.testing.assert_allclose([value, tangent], [np.exp(1j) * 1j, np.exp(1j) * (1 + 1j)])
    for t in (1.0 + 0j, 1j, 1 - 2j):  # |z| is not holomorphic: its derivative is a real part
        np.testing.assert_allclose(md.jvp(np.abs, (3 + 4j,), (t,))[1], (np.conj(3 + 4j) * t).real / 5)
    assert md.jvp(np.abs, (0j,), (1j,))[1] == 0.0
