"""Optional fast paths: they are used, compute the same, and without them the core's tests pass too."""

import operator
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidiff as md
from minidiff.core import reverse
from minidiff.ops.base import Elementwise
from minidiff.ops.elementwise import function_of
from tests import PATIENCE
from tests.checks.samples import each

pytest.importorskip("minidiff.fast.steps")

ROOT = Path(__file__).parents[3]
CORE = ("api/test_derivatives", "api/test_jacobians", "core/test_tracer", "core/test_tape", "values/test_aliasing")


def test_the_core_with_the_folder_deleted(tmp_path):
    for name in ("minidiff", "collectives", "spmd", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "fast"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    files = [f"tests/minidiff/{name}.py" for name in CORE]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:]


# ---------------------------------------------------------------- they are used


def functions_called(f, x):
    """Names of the functions that a second call of f runs: the tables know its operations then."""
    f(x)
    names = set()
    sys.setprofile(lambda frame, *_: names.add(frame.f_code.co_qualname))
    try:
        f(x)
    finally:
        sys.setprofile(None)
    return names


def formula(x):
    return x * x - 2.0 / x + np.sin(x) * x + (x if x > 0.5 else -x) + x * np.sin(x) + np.exp(x + 1.0)


A = np.linspace(-1, 1, 9).reshape(3, 3)
#: Functions, an argument, and what is run for them only where there is no fast path.
FAST = {
    "equations": (md.grad(lambda x: np.sum(np.sin(x) * x)), np.ones(3), "transpose_equation"),
    "sums": (md.grad(lambda x: np.sum(x + np.ones(3))), 2.0, "FastJVP.record"),
    "numbers": (md.grad(formula), 1.5, "FastJVP.process"),
    "scalars": (md.grad(formula), np.float64(1.5), "FastJVP.process"),
    "arrays": (md.grad(formula), np.array(1.5), "FastJVP.process"),
    "products": (md.grad(lambda w: np.mean((A @ w @ A) ** 2) + np.sum(w @ w)), A, "FastJVP.process"),
}
SLOW = {
    "equations": (md.vmap(md.grad(lambda x: np.sum(np.sin(x) * x))), np.ones((2, 3)), "transpose_equation"),
    "products": (md.grad(lambda w: np.mean(w, axis=0)[0]), A, "FastJVP.process"),
}


@each("table, name", [(table, name) for table in (FAST, SLOW) for name in table], ids=str)
def test_the_fast_path_is_taken_where_there_is_one(table, name):
    f, x, slow = table[name]
    assert (slow in functions_called(f, x)) == (table is SLOW)


# ---------------------------------------------------------------- they compute the same


def test_an_operation_without_a_derivative_gives_a_plain_value():
    seen = []
    f = md.grad(lambda x: seen.append((np.floor(x), x > 1.0, np.sign(x) < x)) or x)
    for _ in range(2):
        assert f(np.float64(1.5)) == 1.0
        assert [type(value) for value in seen.pop()] == [np.float64, np.bool_, np.bool_]


OPERATORS = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "gt", "le", "pow", "mod")},
    **{name: getattr(np, name) for name in ("multiply", "arctan2", "maximum", "less", "floor_divide")},
}
CONSTANTS = (2, 2.0, True, 1.5 + 0.5j, np.float32(1.5), np.float64(1.5), np.full(3, 1.5, np.float32), np.arange(1, 4))
ARGUMENTS = (0.75, np.float64(0.75), np.float32(0.75), np.full(3, 0.75), np.full((2, 1), 0.75, np.float32))


def outcome(f, *args):
    """The values and gradients of f, with ones as cotangents; or its error."""
    try:
        values, pullback = md.vjp(f, *args)
        return values, pullback(tuple([np.ones(v.shape, v.dtype) for v in values]))
    except TypeError as error:
        return type(error), str(error)


@given(
    st.sampled_from(sorted(OPERATORS)),
    st.sampled_from(ARGUMENTS),
    st.sampled_from(ARGUMENTS + CONSTANTS),
    st.booleans(),
    st.booleans(),
)
def test_operators_are_as_those_of_the_plain_engine(name, x, y, both, swap):
    y_is_traced = both and any(y is z for z in ARGUMENTS)

    def f(x, z):
        pair = (x, z if y_is_traced else y)
        out = OPERATORS[name](*(pair[::-1] if swap else pair))
        again = OPERATORS[name](out, out) if np.shape(out) == () else out  # a weak result stays weak
        return out, again * np.float32(2.0)

    args = x, y if y_is_traced else 0.5
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        outcome(f, *args)  # the tables know the operation from here on
        actual = outcome(f, *args)
        patch.setattr(reverse.engine, "linearize_flat", reverse.linearize_flat)
        expected = outcome(f, *args)
    assert md.tree.structure(actual) == md.tree.structure(expected)
    for a, b in zip(md.tree.leaves(actual), md.tree.leaves(expected)):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b) if isinstance(a, str | type) else np.testing.assert_allclose(a, b, 1e-6)


@each("dtype", [np.float32, np.float64])
def test_a_rule_that_computes_in_double_precision_is_converted_back(dtype):
    double = Elementwise("double_cos", lambda x: np.cos(np.asarray(x) * np.float64(1)), (lambda out, x: -np.sin(x),))
    single = function_of(Elementwise("single_sin", np.sin, (lambda out, x: function_of(double)(x),)))
    x = np.array([1.0, 2.0], dtype)
    actual = md.grad(lambda x: np.sum(single(x)))(x)
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, np.cos(x), 1e-6)
