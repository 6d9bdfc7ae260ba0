"""A tape split in two: together the parts compute what it does, and the second one repeats no more than it must."""

import pytest

import minidiff as md
import minidiff.numpy as np
from spmd.pipeline.split_tape import split_tape
from tests.checks.samples import each

X = np.linspace(0.1, 0.9, 3)

#: Programs of (x, n) with two results, of which the first tape computes the first; and the operations of both tapes.
PROGRAMS = {
    "a value of both": (lambda x, n: (np.cos(y := np.sin(x)), np.exp(y)), ["sin", "cos"], ["exp"]),
    "a result of the first": (lambda x, n: (np.cos(y := np.sin(x)), y), ["sin", "cos"], []),
    "a number of both": (lambda x, n: (x * np.sin(n), x + np.sin(n)), ["sin", "multiply"], ["sin", "add"]),
    "a loop": (lambda x, n: md.scan(lambda c, e: (np.sin(c) * e, np.exp(np.sin(c))), x, X), ["scan"], ["scan"]),
    "a loop that does not come apart": (
        lambda x, n: md.scan(lambda c, e: ((c[1] * e, c[0] + e), None), (x, x * n), X)[0],
        ["multiply", "scan"],
        [],
    ),
    "branches": (
        lambda x, n: md.cond(n > 0, lambda: (np.sin(x), np.cos(x)), lambda: (x, x)),
        ["greater", "cond"],
        ["greater", "cond"],
    ),
}


@each("name", PROGRAMS)
def test_both_parts_compute_the_results_of_the_whole(name):
    program, first_names, second_names = PROGRAMS[name]
    tape = md.make_tape(program)(X, 1.5)
    first, second = split_tape(tape, [True, False])
    result, *crossing = first(X, 1.5)
    for actual, expected in zip((result, *second(X, 1.5, *crossing)), tape(X, 1.5), strict=True):
        np.testing.assert_allclose(actual, expected)
    for part, names in ((first, first_names), (second, second_names)):
        part.check()
        assert [eqn.primitive.name for eqn in part.equations] == names


@pytest.mark.parametrize("marked", [[True, True], [False, False]])
def test_one_part_may_be_the_whole(marked):
    tape = md.make_tape(lambda x: (np.sin(x), np.exp(x)))(X)
    parts = split_tape(tape, marked)
    assert [len(part.equations) for part in parts] == ([2, 0] if marked[0] else [0, 2])
