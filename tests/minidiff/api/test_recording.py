"""`make_tape` of transformed functions, and long ones; `recordings.md` shows sizes, and where long loops are told."""

import warnings

import numpy as np

import minidiff as md
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.checks.transformations import NESTED, TRANSFORMATIONS


@each("run", [*TRANSFORMATIONS.values(), *NESTED.values()], [*TRANSFORMATIONS, *NESTED])
def test_transformed_functions_have_tapes(run):
    f = lambda x: run(lambda x: np.sin(x) * x[0] ** 2, x)  # noqa: E731
    x = np.array([1.0, 2.0, -3.0])
    tape = md.make_tape(f)(x)
    tape.check()
    assert_trees_close(tape(x), md.tree.leaves(f(x)))


def long_loop(x):
    for _ in range(20_000):
        x = x + 0.1
    return x


def test_a_long_python_loop_is_warned_of_once_in_its_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        md.eval_shape(long_loop, 1.0)
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, long_loop.__code__.co_firstlineno + 2)]
