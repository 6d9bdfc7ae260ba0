"""`make_tape`: functions run on types alone."""

import warnings

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
import spmd
from minidiff.errors import location
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.checks.transformations import NESTED, TRANSFORMATIONS

X = np.ones((2, 3))


@each("run", [*TRANSFORMATIONS.values(), *NESTED.values()], [*TRANSFORMATIONS, *NESTED])
def test_transformed_functions_have_tapes(run):
    f = lambda x: run(lambda x: np.sin(x) * x[0] ** 2, x)  # noqa: E731
    x = np.array([1.0, 2.0, -3.0])
    tape = md.make_tape(f)(x)
    tape.check()
    assert_trees_close(tape(x), md.tree.leaves(f(x)))


SIZES = {
    "zeros": lambda n: mnp.zeros(n),
    "ones of two": lambda n: np.ones((n, 2)),
    "arange": lambda n: mnp.arange(n),
    "linspace": lambda n: np.linspace(0.0, n, n),
    "reshape": lambda n: X.reshape(n, -1),
    "split": lambda n: np.split(n * X, n),
    "sum along": lambda n: np.sum(n * X, axis=n),
    "range": lambda n: range(n),
}


@each("f", SIZES.values(), SIZES)
def test_sizes_are_static_arguments(f):
    with pytest.raises(md.TracerError, match=r"a size, .* static_argnums or static_argnames"):
        md.jit(lambda n: f(n))(2)
    with pytest.raises(md.TracerError, match=r"a size, .* in_axes=None"):
        md.vmap(lambda n: f(n))(np.array([2, 2]))


# ---------------------------------------------------------------- long programs


def long_loop(x, steps=20_000):
    for _ in range(steps):
        x = x + 0.1
    return x


def warnings_of(call):
    with warnings.catch_warnings(record=True) as result:
        warnings.simplefilter("always")
        call()
    return [(w.filename, w.lineno) for w in result]


HERE = (__file__, long_loop.__code__.co_firstlineno + 2)


def test_a_long_python_loop_is_warned_of_once_in_its_line():
    assert warnings_of(lambda: md.eval_shape(long_loop, 1.0)) == [HERE]


@pytest.fixture
def few_steps_are_long(monkeypatch):
    monkeypatch.setattr(location, "LONG", 256)
    monkeypatch.setattr(location, "OFTEN", 100)


#: What records a Python loop, each with few steps.
LOOPS = {
    "jit": lambda f: md.jit(f)(1.0),
    "jit of grad": lambda f: md.jit(md.grad(f))(1.0),
    "in a scan": lambda f: md.jit(lambda x: md.scan(lambda c, e: (f(c), None), x, np.ones(2))[0])(1.0),
    "on ranks": lambda f: md.jit(spmd.shard_map(f, mesh(2), spmd.P("i"), spmd.P("i")))(np.ones(2)),
    "on ranks, of grad": lambda f: md.make_tape(md.grad(spmd.shard_map(f, mesh(2), spmd.P(), spmd.P())))(1.0),
}


@each("record", LOOPS.values(), LOOPS)
def test_wherever_a_long_loop_is_recorded(record, few_steps_are_long):
    assert {*warnings_of(lambda: record(lambda x: long_loop(x, 600)))} == {HERE}


def test_long_programs_without_loops_and_loops_that_are_operations_are_not_warned_of(few_steps_are_long):
    scope = {}
    exec(compile("def f(x):\n" + "    x = x + 0.1\n" * 600 + "    return x", "long.py", "exec"), scope)
    for call in (
        lambda: md.jit(scope["f"])(1.0),
        lambda: md.jit(lambda x: md.fori_loop(0, 600, lambda i, x: x + 0.1, x))(1.0),
        lambda: md.grad(lambda x: long_loop(x, 600))(1.0),  # which is not compiled
    ):
        assert warnings_of(call) == []
