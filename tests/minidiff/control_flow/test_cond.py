"""Branches of which the elements of a `vmap` take different ones: as if each element were alone.

A branch meets operands of elements that take it, and no others: with theirs it may raise, or give an infinity, which
times a zero cotangent would be NaN.
"""

import functools
import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
from tests.checks.samples import check_each, each
from tests.programs.branch import BY_ELEMENT, ELEMENTS, WEIGHT, alone, batched, total
from tests.programs.control import Unrolled
from tests.programs.on_blocks import assert_trees_close


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


#: What is computed of a function of a weight and an element, given how to apply one to all elements.
WAYS = {
    "value": lambda f, over: over(f),
    "gradient of each": lambda f, over: over(md.grad(f, (0, 1))),
    "gradient of all": lambda f, over: md.grad(total(over(f)), (0, 1)),
    "jvp": lambda f, over: lambda w, xs: md.jvp(over(f), (w, xs), (1.0, np.cos(xs)))[1],
    "linearize": lambda f, over: lambda w, xs: md.linearize(over(f), w, xs)[1](1.0, np.cos(xs)),
    "in a checkpoint": lambda f, over: md.grad(total(md.checkpoint(over(f))), (0, 1)),
    "batch of batches": lambda f, over: (
        lambda w, xs: over(md.grad(total(over(f)), (0, 1)))(w, np.stack([xs, xs[::-1], xs[:1].repeat(len(xs), 0)]))
    ),
}
SLOW_TO_COMPILE = {
    "gradient of each, of one branch": lambda f, over: (
        lambda w, xs: [md.grad(total(over(f)), (0, 1))(w, np.stack([x, x])) for x in xs]
    ),
    "jacrev": lambda f, over: md.jacrev(over(f), (0, 1)),
    "jacfwd": lambda f, over: md.jacfwd(over(f), (0, 1)),
    "hessian": lambda f, over: md.hessian(total(over(f)), (0, 1)),
    "hessian of each": lambda f, over: over(md.hessian(f, (0, 1))),
    "grad of grad": lambda f, over: md.grad(lambda w, xs: np.sum(over(md.grad(f, 1))(w, xs) ** 2), (0, 1)),
}
RUNS = {
    "run": lambda f, way: way(f, batched),
    "jit": lambda f, way: md.jit(way(f, batched)),
    "of jit": lambda f, way: way(md.jit(f), batched),
}


def check(f, xs, way, through):
    expected = way(functools.partial(f, Unrolled), alone)(WEIGHT, xs)
    assert_trees_close(through(lambda w, x: f(md, w, x), way)(WEIGHT, xs), expected)


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_elements_that_take_different_branches(name):
    cases = [(way, run) for way in WAYS for run in RUNS] + [(way, "run") for way in SLOW_TO_COMPILE]
    of = functools.partial(functools.partial, check, BY_ELEMENT[name], ELEMENTS[name])
    check_each((f"{way}, {run}", of((WAYS | SLOW_TO_COMPILE)[way], RUNS[run])) for way, run in cases)


def test_no_elements():
    f = md.vmap(lambda x: md.cond(x > 0, np.sqrt, np.sin, x))
    for g in (f, md.jit(f)):
        assert g(np.zeros(0)).shape == (0,)


def test_a_predicate_from_around_a_compiled_function():
    f = lambda x: md.jit(lambda y, p: md.cond(p, np.sqrt, np.sin, y))(x, x > 0)  # noqa: E731
    closing = lambda x: (lambda p: md.jit(lambda y: md.cond(p, np.sqrt, np.sin, y))(x))(x > 0)  # noqa: E731
    for g in (f, closing):
        assert_trees_close(md.vmap(md.grad(g))(np.array([-1.0, 4.0])), np.array([np.cos(1.0), 0.25]))


def test_python_sees_what_all_elements_share():
    """Operands and values that a branch closes over, also if they are being differentiated."""

    def f(w, n, x):
        return md.cond(x > 0, lambda n: sum(w * x for _ in range(n)) if w > 1 else x, lambda n: w, n)

    assert md.grad(lambda w: md.vmap(lambda x: f(w, 3, x))(np.array([-1.0, 4.0])).sum())(2.0) == 13


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
