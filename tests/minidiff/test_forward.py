"""Forward mode: `jvp`, nested in itself and over trees."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import minidiff as md
from minidiff.values.dtypes import float0

X = np.array([0.5, 2.0, 3.0])


class Pair(NamedTuple):
    a: Any
    b: Any


def derivative(f: Callable) -> Callable:
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


@pytest.mark.parametrize("d", [derivative, md.grad], ids=["jvp", "grad"])
@pytest.mark.parametrize("e", [derivative, md.grad], ids=["jvp", "grad"])
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
    _, tangents = md.jvp(lambda x: (x, np.float32(3.0), X > 1), (1.0,), (2.0,))
    assert tangents[0] == 2.0
    assert md.typeof(tangents[1]) == md.typeof(np.float32(0)) and tangents[1] == 0
    assert (tangents[2].dtype, tangents[2].shape) == (float0, X.shape)


def test_integers_have_tangents_without_values():
    none = np.zeros((), float0)
    assert md.jvp(lambda x, n: x * n, (2.0, 3), (1.0, none))[1] == 3.0
    assert md.linearize(lambda x, n: x * n, 2.0, 3)[1](1.0, none) == 3.0


def written_into_an_array(x):
    a = np.zeros(2)
    a[0] = x
    return a.sum()


LOSING = [written_into_an_array, lambda x: np.fromiter([x], float), math.sin, float, complex, np.float64]


@pytest.mark.parametrize("lose", LOSING)
def test_a_derivative_is_not_lost_in_silence(lose):
    with pytest.raises((md.TracerError, ValueError)) as error:
        md.grad(lambda x: lose(x) * x)(3.0)
    # NumPy says "setting an array element with a sequence", and gives the reason as its cause.
    message = f"{error.value} {error.value.__cause__}"
    assert "minidiff.numpy.array or np.stack" in message or "y = np.at(y)[i].set(x)" in message


def test_values_can_be_printed_and_branched_on(capsys):
    def f(x):
        print(x, f"{x[0]:.2f}", [x[1]])
        while (x > 1).any():
            x = x / 2
        return x if x[0] < 1 and int(x[0]) == 0 and md.stop_gradient(x[1]).item() <= 1 else -x

    value, tangent = md.jvp(f, (X[:2],), (np.ones(2),))
    assert (value.tolist(), tangent.tolist()) == ([0.25, 1.0], [0.5, 0.5])
    assert capsys.readouterr().out == "[0.5 2. ] 0.50 [np.float64(2.0)]\n"


def test_complex_numbers():
    value, tangent = md.jvp(lambda z: np.exp(z) * z, (1j,), (1 + 0j,))
    np.testing.assert_allclose([value, tangent], [np.exp(1j) * 1j, np.exp(1j) * (1 + 1j)])
    for t in (1.0 + 0j, 1j, 1 - 2j):  # |z| is not holomorphic: its derivative is a real part
        np.testing.assert_allclose(md.jvp(np.abs, (3 + 4j,), (t,))[1], (np.conj(3 + 4j) * t).real / 5)
    assert md.jvp(np.abs, (0j,), (1j,))[1] == 0.0


ERRORS = [
    (({"a": X},), ([X],), r"differ in structure: \(\{'a': \*\},\) and \(\[\*\],\)"),
    (({"a": 1.0},), ({"a": X},), r"primals\[0\]\['a'\] has type f64\[\], but its tangent has f64\[3\]: shapes"),
    ((1.0, 3), (1.0, 1), r"primals\[1\] has type i64\[\], which carries no derivative; .*astype\(float\)"),
    (("text",), (1.0,), r"expected an array or a number, got str: 'text'"),
]


@pytest.mark.parametrize("primals, tangents, message", ERRORS, ids=[m[:40] for *_, m in ERRORS])
def test_primals_and_tangents_must_match(primals, tangents, message):
    with pytest.raises(TypeError, match=message):
        md.jvp(lambda *xs: xs[0], primals, tangents)


def test_a_result_must_be_a_tree_of_arrays():
    with pytest.raises(TypeError, match="expected an array or a number, got set"):
        md.jvp(lambda x: {1, 2}, (1.0,), (1.0,))
