"""Tapes made cheaper: each rewrite keeps types and values. `rewrites.md` shows what is left of programs."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from collectives import psum
from minidiff.compiler import program as optimizer
from minidiff.compiler import simplify
from minidiff.compiler.program import optimize
from tests.checks.samples import each
from tests.minidiff.compiler.test_random_programs import NUMBERS, arrays, check_bits
from tests.programs import linear as linear_programs

x = np.array([0.5, 2.0])

BINARY = [np.add, np.subtract, np.multiply, np.divide]

#: By rule: programs of two arrays and a constant that it is for. `op` is an operation of two operands.
PROGRAMS = {
    "drop broadcasts": [
        lambda op, x, y, c: op(x, np.broadcast_to(c, np.shape(x))),
        lambda op, x, y, c: op(np.full(np.shape(y), c, y.dtype), y),
        lambda op, x, y, c: op(x + y, np.broadcast_to(y, np.broadcast_shapes(np.shape(x), np.shape(y)))),
    ],
    "drop neutral": [
        lambda op, x, y, c: op(x, c),
        lambda op, x, y, c: op(op(x, 1), -0.0 if op is np.add else 0),
        lambda op, x, y, c: op(op(x, x.dtype.type(0)), np.ones(np.shape(y), y.dtype)),
    ],
    "fold negations": [
        lambda op, x, y, c: op(x, -y),
        lambda op, x, y, c: op(-x, y),
    ],
    "drop copies": [lambda op, x, y, c: op(np.copy(x), +y)],
    "fold minus one": [
        lambda op, x, y, c: op(x * -1, y),
        lambda op, x, y, c: op(x.dtype.type(1) * -np.ones(np.shape(x)) * x, y),
    ],
    "drop double negations": [lambda op, x, y, c: op(-np.negative(x), c)],
    "drop identity reshapes": [lambda op, x, y, c: op(np.ravel(x).reshape(np.shape(x)), y)],
    "merge reshapes": [lambda op, x, y, c: op(np.ravel(x).reshape(1, -1).reshape(-1, 1), c)],
    "fold reshape into sum": [
        lambda op, x, y, c: op(np.sum(x, axis=0).reshape(1, *np.shape(x)[1:]), c),
        lambda op, x, y, c: op(np.sum(x, axis=0, keepdims=True).reshape(np.shape(x)[1:]), y),
    ],
    "recognize means": [
        lambda op, x, y, c: op(np.sum(x) / np.size(x), y),
        lambda op, x, y, c: op(np.sum(x, axis=0, keepdims=True) / len(x), np.float32(2)),
        lambda op, x, y, c: op(np.sum(x, axis=0) / x.dtype.type(len(x)), y),
    ],
    "merge transposes": [lambda op, x, y, c: op(np.swapaxes(x[None, None], 0, 1).T.T, c)],
    "merge rolls": [lambda op, x, y, c: op(np.roll(np.roll(x, (1, -5), (0, -1)), 3, 0), y)],
}


def test_every_rule_has_a_program_on_which_it_is_used():
    """A rule that no program here uses would be compared with nothing."""
    rules = {name for name, rule in optimizer.rewrites().items() if rule.__module__ == simplify.__name__}
    assert rules == {*PROGRAMS}
    a, b = np.array([[0.5, 2.0, 3.0]] * 2), np.array([[1.5, 2.0, 0.25]])
    for name, programs in PROGRAMS.items():
        for f in programs:
            used = False
            for op in BINARY:
                tape = md.make_tape(lambda x, y: f(op, x, y, 1.0))(a, b)  # noqa: B023
                used |= str(optimize(tape)) != str(optimize(tape, without=[name]))
            assert used, name


def test_earlier_names_of_rewrites_warn():
    tape = md.make_tape(lambda x: np.sin(x) * 1.0)(x)
    with pytest.warns(DeprecationWarning, match="'neutral operand' is called 'drop neutral'"):
        assert len(optimize(tape, without=["neutral operand"]).equations) == 2
    with pytest.warns(DeprecationWarning) as caught:
        md.jit(np.sin, without=["neutral operand"])
    assert caught[0].filename == __file__  # elsewhere, Python does not show it
    assert {*optimizer.RENAMED.values()} <= {*optimizer.rewrites()}


def check_as_eager(f, *args):
    """A jitted function gives what NumPy does, or refuses what it refuses."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        try:
            expected = f(*args)
        except (TypeError, ValueError, OverflowError):
            with pytest.raises((TypeError, ValueError, OverflowError)):
                md.jit(f)(*args)
            return
        for y, e in zip(md.tree.leaves(md.jit(f)(*args)), md.tree.leaves(expected), strict=True):
            check_bits(y, e)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([f for programs in PROGRAMS.values() for f in programs]),
    st.sampled_from(BINARY),
    arrays(),
    st.sampled_from(NUMBERS) | arrays().map(lambda xs: xs[0]),
)
def test_rules_preserve_types_and_values(f, op, xs, c):
    check_as_eager(lambda x, y: f(op, x, y, c), *xs[:2])


f32, f64 = np.float32, np.float64
EXACT = {
    "a reciprocal of another shape": (lambda s, n: np.sum(s * (np.ones(4) / n)), f64(3), f64(4)),
    "a reciprocal of another dtype": (lambda x, y: x * (f64(1) / y), np.ones(2, f32), np.full(2, 3, f32)),
    "plus the negative of unsigned": (lambda a, b: a + (-b), np.full(2, 260, "u2"), np.full(2, 5, "u1")),
    "minus the negative of narrower": (lambda a, b: a - (-b), np.full(2, 4), np.full(2, -128, "i1")),
    "constants whose product overflows": (lambda x: x * 300 * 300, np.full(2, 1e-4, np.float16)),
    "a sign of zero": (lambda x: x + 0.0, np.array([-0.0, 1.0])),
    "signs of zeros in one array": (lambda x: x + np.array([0.0, -0.0]), np.array([-0.0, -0.0])),
    "complex infinity times one": (lambda x: x * 1.0, np.array([complex(np.inf, 1.0)])),
    "a constant that is compared": (lambda x: x == f64(0.1), np.full(2, 0.1, f32)),
    "a constant too large for the array": (lambda x: x / np.int64(300), np.full(2, 100, "i1")),
    "signs of zeros in a constant": (lambda x: x * complex(-0.0, 1.0), np.ones(2, complex)),
    **{
        f"numbers in a row, {dtype}, {k}": (f, np.ones(2, dtype))
        for dtype in ("float32", "complex64", "int8", "float64")
        for k, f in enumerate(
            (lambda x: 2 * (3 * x), lambda x: 100 * (x * 100), lambda x: md.typeof(x).dtype.type(2) * (3 * x))
        )
    },
    "a reciprocal beside more dimensions": (md.vmap(lambda s, n: np.sum(s * (np.ones(4) / n))), f64([3]), f64([4])),
    "a derivative of a reciprocal": (md.jacrev(lambda x: 1 / np.log(1 + 1 / x)), f64(0.3)),
    "a reciprocal in a checkpoint": (md.checkpoint(lambda s, n: np.sum(s * (np.ones(4) / n))), f64(3), f64(4)),
}


@each("name", EXACT)
def test_types_and_values_are_preserved(name):
    check_as_eager(*EXACT[name])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_simplifying_again_changes_nothing(seed):
    """Each rule looks at operands alone, which are simplified already: once through a tape is enough."""
    f, args = linear_programs.program(seed)
    tape = md.make_tape(md.grad(lambda *xs: np.sum(f(*xs) ** 2), tuple(range(len(args)))))(*args)
    once = simplify.apply_rules(tape)
    once.check()
    assert str(simplify.apply_rules(once)) == str(once)
    for y, expected in zip(once(*args), tape(*args), strict=True):
        np.testing.assert_array_equal(y, expected)


def test_what_operations_are_told_apart_by():
    apart = [1, True, 1.0, 0.0, -0.0, f32(1), f64(1), f64(0.0), f64(-0.0), complex(0.0, -0.0), 0j, (1,), (True,), [1]]
    assert len({simplify.key_part(x) for x in apart}) == len(apart)
    assert simplify.key_part(np.nan) == simplify.key_part(float("nan"))


def test_what_has_another_type_takes_no_ones_place(monkeypatch):
    """Whatever a rule gives: the type is compared in one place."""
    wrong = {md.ops.elementwise.sin.primitive: [lambda program, eqn: eqn.inputs[0].__class__(md.ShapedArray((), "f4"))]}
    monkeypatch.setattr(optimizer, "RULES", wrong)
    assert optimize(md.make_tape(np.sin)(x)).out_types == [md.typeof(x)]


def test_named_vmap():
    f = md.vmap(lambda x: x / psum(np.exp(x), "b") + psum(x, "b") + psum(x * x, "b"), axis_name="b")
    for g in (f, md.grad(lambda x: (f(x) ** 2).sum())):
        np.testing.assert_allclose(md.jit(g)(x), g(x))
