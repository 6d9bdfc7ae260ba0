"""`map` and `associative_scan` against loops in Python."""

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

# ---------------------------------------------------------------- associative_scan


def affine(f, g):
    """The composition of x -> a x + b, first f, then g: trees, and it does not commute."""
    return {"a": g["a"] * f["a"], "b": g["a"] * f["b"] + g["b"]}


#: Associative operations, and how a tree of elements is drawn: (generator, length) -> a tree with elements in front.
OPERATIONS = {
    "add": (np.add, lambda rng, n: rng.normal(size=(n, 2))),
    "maximum": (np.maximum, lambda rng, n: rng.normal(size=(n, 2, 1))),
    "matmul": (np.matmul, lambda rng, n: rng.normal(size=(n, 2, 2))),
    "affine": (affine, lambda rng, n: {"a": rng.normal(size=(n, 3)), "b": rng.normal(size=(n, 3))}),
    "first": (lambda a, b: a, lambda rng, n: (rng.normal(size=n), rng.normal(size=(n, 2)))),
}


def by_loop(f, elems, reverse):
    """The running results along the first axis, one element after the other."""
    rows = [md.tree.map(lambda x, i=i: x[i : i + 1], elems) for i in range(md.tree.leaves(elems)[0].shape[0])]
    results = []
    for row in rows[::-1] if reverse else rows:
        results.append(f(results[-1], row) if results else row)
    return md.tree.map(lambda *xs: np.concatenate(xs), *(results[::-1] if reverse else results))


def moved(tree, source, target):
    return md.tree.map(lambda x: np.moveaxis(x, source, target), tree)


@given(st.sampled_from(sorted(OPERATIONS)), st.integers(1, 9), st.booleans(), st.sampled_from([0, 1, -1]))
@settings(max_examples=25, deadline=None)
def test_an_associative_scan_is_a_loop(name, length, reverse, axis):
    f, draw = OPERATIONS[name]
    elems, weights = (draw(numpy.random.default_rng(seed), length) for seed in (0, 1))
    axis = {"matmul": 0, "first": min(axis, 0)}.get(name, axis)  # matmul keeps its last two axes; some have but one

    def scanned(elems):
        return moved(md.associative_scan(f, moved(elems, 0, axis), reverse, axis), axis, 0)

    def loss(scan):
        return lambda elems: sum(md.tree.leaves(md.tree.map(lambda y, w: (y * w).sum(), scan(elems), weights)))

    expected, slopes = (
        of(lambda elems: by_loop(f, elems, reverse))(elems) for of in (lambda f: f, lambda f: md.grad(loss(f)))
    )
    for run in (lambda f: f, md.jit):
        assert_trees_close(run(scanned)(elems), expected)
        assert_trees_close(run(md.grad(loss(scanned)))(elems), slopes)


# ---------------------------------------------------------------- map


@each("batch_size", [None, 1, 2, 3, 5, 8])
def test_a_map_is_a_loop_over_elements(batch_size):
    """Lengths that the size divides, and does not; trees; values, derivatives, and what is recorded."""
    xs = {"a": numpy.linspace(-1.0, 2.0, 15).reshape(5, 3), "b": numpy.arange(5)}
    f = lambda x: (np.sin(x["a"]) * x["b"], (x["b"], np.ones(2)))  # noqa: E731
    by_map = lambda xs: md.map(f, xs, batch_size=batch_size)  # noqa: E731
    rows = lambda xs: md.tree.map(lambda *ys: np.stack(ys), *[f(md.tree.map(lambda x: x[i], xs)) for i in range(5)])  # noqa: E731, B023
    loss = lambda mapped: lambda a: np.sum(mapped({**xs, "a": a})[0] ** 2)  # noqa: E731
    for run in (lambda f: f, md.jit, lambda f: md.vmap(f, axis_size=2, in_axes=None)):
        assert_trees_close(run(by_map)(xs), run(rows)(xs))
    for run in (md.grad, lambda f: md.jit(md.grad(f)), md.hessian):
        assert_trees_close(run(loss(by_map))(xs["a"]), run(loss(rows))(xs["a"]))
