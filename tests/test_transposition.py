"""Transposition of tapes: its inverse is itself, tapes do not grow, and it is what the inner product says."""

import hypothesis.strategies as st
from hypothesis import given, settings

import minidiff as md
import minidiff.numpy as np
from tests import linear_programs

X = np.arange(6.0).reshape(2, 3)


def inner(xs, ys):
    return sum(np.sum(np.asarray(x) * np.asarray(y)) for x, y in zip(xs, ys, strict=True))


def equations(tape):
    """How many equations there are, those of bodies too."""
    return sum(1 + sum(map(equations, md.tape.bodies_of(eqn))) for eqn in tape.equations)


def check_inner_product(tape, transposed, count, rest, seed=0):
    """<f(x), y> == <x, f_t(y)> for a tape whose first `count` inputs are linear; the others are given."""
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=t.shape) for t in tape.in_types[:count]]
    ys = [rng.normal(size=t.shape) for t in tape.out_types]
    left, right = inner(tape(*xs, *rest), ys), inner(transposed(*ys, *rest), xs)
    np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 11), min_size=8, max_size=60))
def test_transposing_twice_gives_the_tape(numbers):
    args = linear_programs.example()
    tape = md.make_tape(linear_programs.program(numbers))(*args)
    tape.check()
    transposed = md.transpose(tape, (0, 1))
    back = md.transpose(transposed, range(len(tape.outputs)))
    transposed.check()
    back.check()
    check_inner_product(tape, transposed, 2, args[2:])
    assert back == tape
    again = md.transpose(back, (0, 1))
    assert again == transposed
    assert equations(again) == equations(transposed)
    assert equations(md.transpose(again, range(len(tape.outputs)))) == equations(back)
