"""Branches of which the elements of a `vmap` take different ones: as if each element were alone.

A branch meets operands of elements that take it, and no others: with theirs it may raise, or give an infinity, which
times a zero cotangent would be NaN.
"""

import functools
import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
from tests.checks.meanings import MIXED, check_meaning
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs.branch import BY_ELEMENT, ELEMENTS, WEIGHT, alone, batched
from tests.programs.control import Unrolled


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


KINDS = ("value", "jvp", "linearize", "grad", "grad of grad", *MIXED)


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_elements_that_take_different_branches(name):
    f, xs = BY_ELEMENT[name], ELEMENTS[name]
    one, meaning = functools.partial(f, md), functools.partial(f, Unrolled)
    args, batches = (np.array(WEIGHT), xs), np.stack([xs, xs[::-1], xs[:1].repeat(len(xs), 0)])
    check_meaning(batched(one), alone(meaning), args, KINDS)
    check_meaning(batched(one), alone(meaning), args, ["value", "grad"], ["jit", "of jit", "of checkpoint"])
    gradients = [over(md.grad(g, (0, 1))) for over, g in ((batched, one), (alone, meaning))]
    check_meaning(*gradients, args, ["value", "grad"])
    for x in xs:  # one branch alone
        check_meaning(*gradients, (np.array(WEIGHT), np.stack([x, x])), ["value"], ["run", "jit"])
    check_meaning(*[over(g) for over, g in zip((batched, alone), gradients)], (np.array(WEIGHT), batches), ["value"])


def test_no_elements():
    f = md.vmap(lambda x: md.cond(x > 0, np.sqrt, np.sin, x))
    for g in (f, md.jit(f)):
        assert g(np.zeros(0)).shape == (0,)


@each("run", [lambda f: f, md.jit])
@each("xs, expected", [([1.0, -1.0], "first second"), ([1.0, 2.0], "first"), ([-1.0, -2.0], "second")])
def test_a_branch_runs_once_or_not_at_all(run, xs, expected, capsys):
    def printed(label, y):
        md.debug.print(label)
        return y

    f = lambda x: md.cond(x > 0, lambda: printed("first", np.sqrt(x)), lambda: printed("second", 2 * x))  # noqa: E731
    run(md.vmap(f))(np.array(xs))
    assert {*capsys.readouterr().out.split()} & {"first", "second"} == {*expected.split()}


def test_what_is_lent():
    """Values that a branch computes with and that differ between elements; not those it only returns or all share."""
    f = lambda w, x, y: md.cond(x > 0, lambda: (w * x, y), lambda: (w, x))  # noqa: E731
    tape = md.make_tape(md.vmap(f, (None, 0, 0)))(2.0, np.ones(2), np.ones(2))
    assert [eqn.primitive.name for eqn in tape.equations].count("gather") == 1


@each("run", [lambda f: f, md.jit])
def test_results_that_all_elements_share(run):
    """Results for `out_axes=None`: no mapped argument affects them, whichever branch an element takes."""
    y, xs = np.array(3.0), np.array([0.0, 1.0, 2.0])
    f = lambda x: md.cond(x > 0, lambda: (x, y, 1.0), lambda: (2 * x, y, 1.0))  # noqa: E731
    assert_trees_close(run(md.vmap(f, 0, (0, None, None)))(xs), (xs, y, np.array(1.0)))
    each = run(md.vmap(lambda x: md.cond(x > 0, lambda: y, lambda: 2 * y), out_axes=None))
    for inputs in (xs, xs + 1, -xs):  # also where all elements take the same branch
        with pytest.raises(ValueError):
            each(inputs)


def test_known_predicates_leave_no_trace():
    tape = md.make_tape(lambda x: md.cond(True, np.sin, np.cos, md.switch(0, [np.exp, np.log], x)))(1.0)
    assert [eqn.primitive.name for eqn in tape.equations] == ["exp", "sin"]
