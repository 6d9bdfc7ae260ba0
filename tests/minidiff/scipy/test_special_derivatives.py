"""Derivatives of special functions against mpmath's, at ends, zeros, removable singularities and in tails."""

import itertools
import pathlib

import numpy as np
import pytest

import minidiff as md
from minidiff.scipy import special
from tests.samples import check_each

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
