"""`map` and `associative_scan` against loops in Python, and `eval_shape` against the call itself."""

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped, mesh
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


def test_an_associative_scan_combines_many_elements_at_once():
    calls = []
    md.associative_scan(lambda a, b: calls.append(len(a)) or a + b, np.arange(1024.0))
    assert len(calls) == 19
    assert md.associative_scan(np.add, np.zeros((0, 2))).shape == (0, 2)


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
    loops = [eqn for eqn in md.make_tape(by_map)(xs).equations if eqn.primitive.name == "scan"]
    size = batch_size or 1
    assert [eqn.params["length"] for eqn in loops] == [5 // size] * (size <= 5)


# ---------------------------------------------------------------- eval_shape

FUNCTIONS = {
    "a tree": lambda x, w, n: {"y": x @ w, "n": (n, 2 * n, None)},
    "a gradient": lambda x, w, n: md.grad(lambda w: (np.tanh(x @ w) * n).sum())(w),
    "a loop": lambda x, w, n: md.scan(lambda c, row: (c + row @ w, row), np.zeros(2, "f4"), x),
    "a compiled function": lambda x, w, n: md.jit(np.matmul)(x, w),
    "a batch": lambda x, w, n: md.vmap(lambda row: row @ w)(x) > n,
}


@each("f", FUNCTIONS.values(), FUNCTIONS)
def test_the_types_of_results_are_those_of_the_call(f):
    x, w, n = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32), 2.0
    expected = md.tree.map(md.typeof, f(x, w, n))
    assert md.eval_shape(f, x, w, n) == expected
    assert md.eval_shape(f, md.typeof(x), w, n=n) == expected


def test_the_types_of_results_are_computed_without_values():
    forever = lambda x: md.while_loop(lambda c: True, lambda c: c + 1, x)  # noqa: E731
    huge = md.ShapedArray((1 << 20, 1 << 20), np.float64)
    assert md.eval_shape(forever, huge) == huge


def test_the_types_of_results_in_a_body_say_where_they_vary():
    types = []
    body = lambda x: types.append(md.eval_shape(lambda x: (x, psum(x, "i")), x)) or x  # noqa: E731
    mapped(body, mesh(2), P("i"), P("i"))(np.zeros(4))
    assert str(types) == "[(f64[2]{i}, f64[2])]"
