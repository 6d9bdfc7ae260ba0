"""Special functions against mpmath's, at ends, zeros, removable singularities and in tails; every ufunc of SciPy's."""

import itertools
import pathlib
import re

import numpy as np
import pytest
import scipy.special

import minidiff as md
from minidiff.scipy import special
from tests.checks.samples import check_each


def rows(kind):
    """Name, arguments, the order of the derivative in each, the derivative, and more (see README.md)."""
    lines = pathlib.Path(__file__).with_name(f"{kind}_derivatives.txt").read_text().splitlines()
    groups = itertools.groupby(sorted((line.split(";") for line in lines), key=lambda r: (r[0], r[2])), lambda r: r[0])
    return {
        name: [(order, [*rows]) for order, rows in itertools.groupby(group, lambda r: r[2])] for name, group in groups
    }


def differentiate(f, order):
    """The sum of derivatives, each at its own point, by reverse mode."""
    for i, n in enumerate(map(int, order)):
        for _ in range(n):
            f = md.grad(lambda *xs, f=f: f(*xs).sum(), argnums=i)
    return f


def check_rows(name, order, rows, error):
    """Compare the derivatives at the points of all rows; `error(actual, expected, args, rows)` is at most 1."""
    args = np.array([[float(a) for a in re.split("[ ,]", row[1])] for row in rows]).T
    expected = np.array([float(row[3]) for row in rows])
    actual = differentiate(getattr(special, name), order)(*args)
    wrong = np.isfinite(expected) & ~(error(actual, expected, args) <= 1)
    assert not wrong.any(), [f"at {rows[k][1]}: {actual[k]}, not {expected[k]}" for k in np.flatnonzero(wrong)]


SPECIAL, SHAPES = rows("special"), rows("shape")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", SPECIAL)
def test_derivatives_are_those_of_mpmath(name):
    """Within 1e-10, and the error that rounding of the arguments makes: 16 times epsilon times the condition."""

    def check(order, rows):
        condition = np.array([float(row[4]) for row in rows])
        error = lambda x, y, _: np.abs(x - y) / (1e-10 * np.abs(y) + 16 * 2.0**-52 * condition + 1e-290)  # noqa: E731
        check_rows(name, order, rows, error)

    check_each((f"order {order}", lambda o=order, r=of: check(o, r)) for order, of in SPECIAL[name])


@pytest.mark.parametrize("name", SHAPES)
def test_derivatives_in_shapes_have_all_digits(name):
    """First ones within 2e-13, times the root of large shapes, near which rounding of the arguments matters."""

    def check(order, rows):
        most = 2e-13 if sum(map(int, order)) == 1 else 1e-10
        size = lambda args: np.sqrt(1 + 1e-3 * np.max(args[:-1], axis=0))  # noqa: E731
        check_rows(name, order, rows, lambda x, y, args: np.abs(x / y - 1) / size(args) / most)

    check_each((f"order {order}", lambda o=order, r=of: check(o, r)) for order, of in SHAPES[name])


# ---------------------------------------------------------------- ufuncs

UFUNCS = {f for f in vars(scipy.special).values() if isinstance(f, np.ufunc) and f.nout == 1}
#: Not of integers, or of pairs of types.
REAL = [f for f in UFUNCS if any({*signature.partition("->")[0]} <= {"d"} for signature in f.types)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_ufunc_of_one_result_takes_traced_values():
    """Under `jit`, `vmap` and on tapes; it has a derivative, or the error names the argument that has none."""
    without = []
    for f in REAL:
        args = [np.array([0.25, 0.5])] * f.nin
        for transformed in (md.jit(f), md.vmap(f), lambda *args: md.make_tape(f)(*args)(*args)[0]):  # noqa: B023
            np.testing.assert_allclose(transformed(*args), f(*args), rtol=1e-12)
        try:
            md.grad(lambda x, f=f, args=args: f(*args[:-1], x).sum())(args[-1])
        except TypeError as error:
            assert f"scipy.special.{f.__name__} has no derivative in its argument" in str(error)
            without.append(f.__name__)
    assert len(UFUNCS) > 150 and len(UFUNCS) - len(without) > 70
    assert "voigt_profile" in without
