"""Branches and loops of which the elements of a `vmap` take different ones: as if each element were alone.

A branch meets operands of elements that take it, and no others: with theirs it may raise, or give an infinity, which
times a zero cotangent would be NaN.
"""

import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
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
    "jacrev": lambda f, over: md.jacrev(over(f), (0, 1)),
    "jacfwd": lambda f, over: md.jacfwd(over(f), (0, 1)),
    "hessian": lambda f, over: md.hessian(total(over(f)), (0, 1)),
    "hessian of each": lambda f, over: over(md.hessian(f, (0, 1))),
    "grad of grad": lambda f, over: md.grad(lambda w, xs: np.sum(over(md.grad(f, 1))(w, xs) ** 2), (0, 1)),
    "in a checkpoint": lambda f, over: md.grad(total(md.checkpoint(over(f))), (0, 1)),
    "batch of batches": lambda f, over: (
        lambda w, xs: over(md.grad(total(over(f)), (0, 1)))(w, np.stack([xs, xs[::-1], xs[:1].repeat(len(xs), 0)]))
    ),
}
SECOND_ORDER = {"jacrev", "jacfwd", "hessian", "hessian of each", "grad of grad"}  # slow to compile
RUNS = {
    "run": lambda f, way: way(f, batched),
    "jit": lambda f, way: md.jit(way(f, batched)),
    "of jit": lambda f, way: way(md.jit(f), batched),
}


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_elements_that_take_different_branches(name):
    f, xs = BY_ELEMENT[name], ELEMENTS[name]
    for kind, way in WAYS.items():
        expected = way(lambda w, x: f(Unrolled, w, x), alone)(WEIGHT, xs)
        for run, through in RUNS.items():
            if run != "run" and kind in SECOND_ORDER:
                continue
            try:
                assert_trees_close(through(lambda w, x: f(md, w, x), way)(WEIGHT, xs), expected)
            except Exception as error:
                raise AssertionError(f"{kind}, {run}") from error


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_branches_that_no_element_takes(name):
    f = BY_ELEMENT[name]
    for x in ELEMENTS[name]:
        xs = np.stack([x, x])
        expected = md.grad(total(alone(lambda w, x: f(Unrolled, w, x))), (0, 1))(WEIGHT, xs)
        gradient = md.grad(total(batched(lambda w, x: f(md, w, x))), (0, 1))
        for g in (gradient, md.jit(gradient)):
            assert_trees_close(g(WEIGHT, xs), expected)


def test_the_example_of_roots():
    f = lambda x: md.cond(x > 0, np.sqrt, lambda x: 2 * x, x)  # noqa: E731
    assert_trees_close(md.vmap(md.grad(f))(np.array([-1.0, 4.0, 0.0])), np.array([2.0, 0.25, 2.0]))


def test_no_elements():
    f = md.vmap(lambda x: md.cond(x > 0, np.sqrt, np.sin, x))
    for g in (f, md.jit(f)):
        assert g(np.zeros(0)).shape == (0,)


def test_a_predicate_from_around_a_compiled_function():
    def f(x):
        positive = x > 0
        return md.jit(lambda y: md.cond(positive, np.sqrt, np.sin, y))(x)

    xs = np.array([-1.0, 4.0])
    assert_trees_close(md.vmap(md.grad(f))(xs), np.array([np.cos(1.0), 0.25]))


def test_python_sees_what_all_elements_share():
    """Operands and values that a branch closes over, also if they are being differentiated."""

    def f(w, n, x):
        return md.cond(x > 0, lambda n: sum(w * x for _ in range(n)) if w > 1 else x, lambda n: w, n)

    xs = np.array([-1.0, 4.0])
    assert_trees_close(md.grad(lambda w: md.vmap(lambda x: f(w, 3, x))(xs).sum())(2.0), 13.0)
    with pytest.raises(md.TracerError, match="a Python condition needs a concrete value"):
        md.vmap(lambda x: md.cond(x > 0, lambda x: x if x > 1 else 0.0, lambda x: x, x))(xs)


def test_a_branch_runs_once_or_not_at_all(capsys):
    def f(x):
        def printed(label, y):
            md.debug.print(label)
            return y

        return md.cond(x > 0, lambda: printed("first", np.sqrt(x)), lambda: printed("second", 2 * x))

    for run in (md.vmap(f), md.jit(md.vmap(f))):
        for xs, expected in (([1.0, -1.0], {"first", "second"}), ([1.0, 2.0], {"first"}), ([-1.0, -2.0], {"second"})):
            run(np.array(xs))
            lines = capsys.readouterr().out.split()
            assert {word for word in lines if word in ("first", "second")} == expected


def test_what_is_lent():
    """Values that a branch computes with and that differ between elements; not those it only returns or all share."""
    f = lambda w, x, y: md.cond(x > 0, lambda: (w * x, y), lambda: (w, x))  # noqa: E731
    tape = md.make_tape(md.vmap(f, (None, 0, 0)))(2.0, np.ones(2), np.ones(2))
    assert [eqn.primitive.name for eqn in tape.equations].count("gather") == 1


def test_loops_of_different_lengths():
    """An element that has finished is not given to further steps."""
    xs = np.array([5 * np.eye(2), 3 * np.eye(2), -np.eye(2)])

    def rooted(lax, w, x):
        half = np.eye(2) / 2
        return lax.while_loop(lambda c: c[0, 0] > 0.5, lambda c: np.linalg.cholesky(c - half) * w, x)

    def often(lax, w, x):  # as often as x says; of a matrix that is closed over
        count = np.maximum(np.ceil(x[0, 0]), 0).astype(int) // 2
        return lax.fori_loop(0, count, lambda i, c: c @ np.linalg.cholesky(x) * w, np.eye(2))

    for f in (rooted, often):
        meaning = alone(lambda w, x, f=f: f(Unrolled, w, x))
        for through in RUNS.values():
            actual = through(lambda w, x, f=f: f(md, w, x), WAYS["value"])
            assert_trees_close(actual(0.9, xs), meaning(0.9, xs))
            tangent = md.jvp(lambda xs: actual(0.9, xs), (xs,), (np.ones_like(xs),))[1]  # noqa: B023
            assert_trees_close(tangent, md.jvp(lambda xs: meaning(0.9, xs), (xs,), (np.ones_like(xs),))[1])  # noqa: B023


@pytest.mark.parametrize("run", [lambda f: f, md.jit], ids=["run", "jit"])
def test_results_that_all_elements_share(run):
    """Results for `out_axes=None`: no mapped argument affects them, whichever branch an element takes."""
    y = np.array(3.0)
    xs = np.array([0.0, 1.0, 2.0])
    shared = run(
        lambda xs: md.vmap(lambda x: md.cond(x > 0, lambda: (x, y, 1.0), lambda: (2 * x, y, 1.0)), 0, (0, None, None))(
            xs
        )
    )
    assert_trees_close(shared(xs), (xs, y, np.array(1.0)))
    each = run(lambda xs: md.vmap(lambda x: md.cond(x > 0, lambda: y, lambda: 2 * y), out_axes=None)(xs))
    for inputs in (xs, xs + 1, -xs):  # also where all elements take the same branch
        with pytest.raises(ValueError, match="out_axes is None"):
            each(inputs)
