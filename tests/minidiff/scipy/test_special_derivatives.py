"""Derivatives of special functions against mpmath's, at ends, zeros, removable singularities and in tails."""

import itertools
import pathlib

import numpy as np
import pytest

import minidiff as md
from minidiff.scipy import special
from tests.checks.samples import check_each

#: Name, arguments, the order of the derivative in each, the derivative, and its condition (see the script).
ROWS = [line.split(";") for line in pathlib.Path(__file__).with_name("special_derivatives.txt").read_text().split("\n")]
BY_NAME = {name: list(rows) for name, rows in itertools.groupby(ROWS[:-1], lambda row: row[0])}


def differentiate(f, order):
    """The sum of derivatives, each at its own point, by reverse mode."""
    for i, n in enumerate(order):
        for _ in range(n):
            f = md.grad(lambda *xs, f=f: f(*xs).sum(), argnums=i)
    return f


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", BY_NAME)
def test_derivatives_are_those_of_mpmath(name):
    """Within 1e-10, and the error that rounding of the arguments makes: 16 times epsilon times the condition."""

    def check(order, rows):
        args = np.array([[float(a) for a in row[1].split()] for row in rows]).T
        expected, condition = (np.array([float(row[k]) for row in rows]) for k in (3, 4))
        shown = differentiate(getattr(special, name), order)(*args)
        error = np.abs(shown - expected) / (1e-10 * np.abs(expected) + 16 * 2.0**-52 * condition + 1e-290)
        wrong = np.isfinite(expected) & ~(error <= 1)
        lines = [f"at {rows[k][1]}: {shown[k]}, not {expected[k]}" for k in np.flatnonzero(wrong)]
        assert not lines, "; ".join(lines)

    groups = {}
    for row in BY_NAME[name]:
        groups.setdefault(row[2], []).append(row)
    check_each((f"order {o}", lambda o=o, r=r: check(list(map(int, o)), r)) for o, r in groups.items())


# ---------------------------------------------------------------- derivatives in shapes

SHAPE_ROWS = [row.split(";") for row in pathlib.Path(__file__).with_name("shape_derivatives.txt").read_text().split()]


@pytest.mark.parametrize("name", ["gammainc", "betainc", "stdtr"])
def test_derivatives_in_shapes_have_all_digits(name):
    """First ones within 2e-13, times the root of large shapes, near which rounding of the arguments matters."""
    by_order = itertools.groupby([row for row in SHAPE_ROWS if row[0] == name], lambda row: row[2])

    def check(order, rows):
        args = np.array([[float(a) for a in row[1].split(",")] for row in rows]).T
        shown, expected = (
            differentiate(getattr(special, name), list(map(int, order)))(*args),
            [float(r[3]) for r in rows],
        )
        size = np.sqrt(1 + 1e-3 * np.max(args[:-1], axis=0))
        error = (
            np.abs(shown / expected - 1)
            / size
            / (2e-13 if order.count("0") == len(order) - 1 and "1" in order else 1e-10)
        )
        assert not (wrong := np.flatnonzero(~(error <= 1))).size, [(rows[k], shown[k], error[k]) for k in wrong]

    check_each((f"order {order}", lambda o=order, r=list(rows): check(o, r)) for order, rows in by_order)


def test_in_shapes_under_transformations():
    a, x = np.array([0.5, 2.0, 40.0]), np.array([0.1, 3.0, 30.0])
    slope = md.grad(special.gammaincc)
    expected = md.jvp(lambda a: special.gammaincc(a, x), (a,), (np.ones(3),))[1]
    for f in (md.vmap(slope), md.jit(md.vmap(slope))):
        np.testing.assert_allclose(f(a, x), expected, rtol=1e-14)
    single = md.grad(lambda a, x: special.gammaincc(a, x).sum())(np.float32(a), np.float32(x))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, expected, rtol=1e-6)
    md.testing.check_grads(special.gammainc, (2.0, 1.5), order=3)
    md.testing.check_grads(special.betainc, (2.0, 1.5, 0.3), order=3)
    third = md.grad(md.grad(md.grad(special.stdtr)))
    with pytest.raises(TypeError, match="stdtr has no third derivative in its argument 0"):
        third(3.0, 1.0)


def test_shapes_at_the_ends_of_the_numbers():
    for f, args in ((special.gammainc, (2.0, 0.0)), (special.gammaincc, (0.5, 0.0)), (special.stdtr, (3.0, 0.0))):
        assert md.grad(f)(*args) == 0
    assert md.grad(special.betainc, (0, 1))(2.0, 0.5, 0.0) == md.grad(special.betainc, (0, 1))(2.0, 0.5, 1.0) == (0, 0)
    assert np.isnan(md.grad(special.gammainc)(2.0, np.nan))
