"""jit: the same results as without, from source that can be read, in memory that nobody else looks at."""

import itertools

import numpy as np
import pytest

import minidiff as md
from minidiff.optimize import copy_p, optimize
from tests.table import DISCRETE, TABLE
from tests.test_ops import agree, random_like

ROWS = pytest.mark.parametrize("row", TABLE, ids=lambda r: r.key)
DIFFERENTIABLE = pytest.mark.parametrize("row", [r for r in TABLE if r.function not in DISCRETE], ids=lambda r: r.key)


def same(actual, expected):
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        assert md.typeof(a) == md.typeof(e)
        agree(a, e)


@ROWS
def test_values(row):
    compiled = md.jit(row.f)
    for _ in range(2):
        same(compiled(*row.args), row.f(*row.args))


@DIFFERENTIABLE
def test_derivatives(row):
    f, args = row.closed()
    ct = random_like(f(*args))

    def derivatives(*xs):
        return md.jvp(f, xs, args), md.vjp(f, *xs)[1](ct)

    compiled, before = md.jit(derivatives), [np.copy(x) for x in args]
    for _ in range(2):
        same(compiled(*args), derivatives(*args))
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(args, before, strict=True))


@ROWS
def test_what_shares_memory_says_so(row):
    """The compiler writes into memory that is not shared: an operation that shares its operand's must be known to."""
    tape = md.make_tape(row.f)(*row.args)
    env = dict(zip(tape.inputs, map(np.asarray, row.args), strict=True))
    for eqn in tape.equations:
        if eqn.primitive.has_body:
            return
        operands = [env.get(a, a) if isinstance(a, type(tape.inputs[0])) else a for a in eqn.inputs]
        out = eqn.primitive.impl(*operands, **eqn.params)
        outs = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outputs, outs, strict=True))
        if not eqn.primitive.shares_memory:
            arrays = [x for x in operands if isinstance(x, np.ndarray)]
            assert not any(np.shares_memory(x, y) for x, y in itertools.product(arrays, outs)), eqn.primitive
            assert all(y.flags.writeable for y in outs if isinstance(y, np.ndarray)), eqn.primitive


@DIFFERENTIABLE
def test_optimized_tapes_have_the_same_types(row):
    f, args = row.closed()
    ct = random_like(f(*args))
    tape = md.make_tape(lambda *xs: md.vjp(f, *xs)[1](ct))(*args)
    smaller = optimize(tape)
    smaller.check()
    assert (smaller.in_types, smaller.out_types) == (tape.in_types, tape.out_types)
    assert sum(e.primitive is not copy_p for e in smaller.equations) <= len(tape.equations)


@pytest.mark.parametrize("same", [lambda x: md.checkpoint_name(x, "a"), md.stop_gradient])
def test_what_is_only_named_is_not_written_into(same):
    def f(x):
        y = np.sin(x)
        z = same(y)
        return z * np.exp(y + 1.0)

    x = np.linspace(0.0, 1.0, 2000)
    np.testing.assert_array_equal(md.jit(f)(x), f(x))
