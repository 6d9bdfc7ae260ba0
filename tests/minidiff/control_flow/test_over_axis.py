"""`map` and `associative_scan` against loops in Python, and `eval_shape` against the call itself."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.minidiff.refusals import refusals
from tests.programs.on_blocks import assert_trees_close

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
    leaves = md.tree.leaves(elems)
    rows = [md.tree.map(lambda x, i=i: x[i : i + 1], elems) for i in range(leaves[0].shape[0])]
    rows = rows[::-1] if reverse else rows
    results = rows[:1]
    for row in rows[1:]:
        results.append(f(results[-1], row))
    results = results[::-1] if reverse else results
    return md.tree.map(lambda *xs: np.concatenate(xs), *results)


operations = st.sampled_from(sorted(OPERATIONS))


@given(operations, st.integers(1, 9), st.booleans(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_an_associative_scan_is_a_loop(name, length, reverse, seed):
    f, draw = OPERATIONS[name]
    elems = draw(numpy.random.default_rng(seed), length)
    weights = draw(numpy.random.default_rng(seed + 1), length)

    def scanned(elems):
        return md.associative_scan(f, elems, reverse=reverse)

    def loss(scan):
        return lambda elems: sum(md.tree.leaves(md.tree.map(lambda y, w: (y * w).sum(), scan(elems), weights)))

    expected = by_loop(f, elems, reverse)
    assert_trees_close(scanned(elems), expected)
    assert_trees_close(md.jit(scanned)(elems), expected)
    wanted = md.grad(loss(lambda elems: by_loop(f, elems, reverse)))(elems)
    assert_trees_close(md.grad(loss(scanned))(elems), wanted)
    assert_trees_close(md.jit(md.grad(loss(scanned)))(elems), wanted)


@given(operations, st.integers(1, 5), st.booleans(), st.sampled_from([1, -1]))
@settings(max_examples=20, deadline=None)
def test_the_axis_of_an_associative_scan(name, length, reverse, axis):
    f, draw = OPERATIONS[name]
    elems = draw(numpy.random.default_rng(0), length)
    if name == "matmul":  # whose operands keep their last two axes
        f, axis = (lambda a, b: np.moveaxis(np.moveaxis(a, 1, 0) @ np.moveaxis(b, 1, 0), 0, 1)), 1
    if name == "first":
        axis = -1
    moved = md.tree.map(lambda x: np.moveaxis(x, 0, axis), elems)
    findings = md.associative_scan(f, moved, reverse, axis)
    expected = by_loop(OPERATIONS[name][0], elems, reverse)
    assert_trees_close(findings, md.tree.map(lambda x: np.moveaxis(x, 0, axis), expected))


def test_an_associative_scan_combines_many_elements_at_once():
    calls = []
    md.associative_scan(lambda a, b: calls.append(len(a)) or a + b, np.arange(1024.0))
    assert len(calls) == 19
    assert md.associative_scan(np.add, np.zeros((0, 2))).shape == (0, 2)


def test_an_associative_scan_on_ranks():
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    x = np.arange(1.0, 11.0).reshape(5, 2)

    def body(x):
        return md.associative_scan(lambda a, b: a * b + psum(0.0 * a, "i"), x)

    findings = spmd.shard_map(body, mesh, P(None, "i"), P(None, "i"))(x)
    np.testing.assert_array_equal(np.asarray(findings), np.cumprod(x, 0))


WRONG_SCANS = {
    "lengths": (lambda f: md.associative_scan(f, (np.zeros(2), np.zeros(3))), ValueError, r"got elems\[0\]: f64\[2\],"),
    "nothing": (lambda f: md.associative_scan(f, ()), ValueError, "got no array"),
    "a number": (lambda f: md.associative_scan(f, 1.0), numpy.exceptions.AxisError, "associative_scan"),
    "another tree": (
        lambda f: md.associative_scan(lambda a, b: (a, b), np.zeros(4)),
        TypeError,
        r"the result of fn \(\*, \*\)",
    ),
    "a sum": (
        lambda f: md.associative_scan(lambda a, b: (a + b).sum(), np.zeros(4)),
        TypeError,
        r"for elems of type f64\[2\], fn returned f64\[\]",
    ),
    "no function": (lambda f: md.associative_scan(np.zeros(2), f), TypeError, "fn must be a function"),
}


test_misused_associative_scan = refusals(WRONG_SCANS, lambda call: call(np.add))


# ---------------------------------------------------------------- map


def rows_of(x):
    """A function of an element that is a tree, to a tree."""
    return {"norm": np.sqrt((x["a"] ** 2).sum() + x["b"] ** 2), "b": (2 * x["b"], 1)}


def test_a_map_is_a_loop_over_elements():
    xs = {"a": numpy.random.default_rng(0).normal(size=(3, 2)), "b": np.arange(3.0)}
    rows = [rows_of({"a": xs["a"][i], "b": xs["b"][i]}) for i in range(3)]
    expected = md.tree.map(lambda *ys: np.stack(ys), *rows)
    for mapped in (md.map, md.jit(md.map, static_argnums=0)):
        assert_trees_close(mapped(rows_of, xs), expected)

    def total(mapped):
        return lambda xs: sum(y.sum() for y in md.tree.leaves(mapped(rows_of, xs)))

    assert_trees_close(md.grad(total(md.map))(xs), md.grad(total(lambda f, xs: md.vmap(f)(xs)))(xs))
    assert "scan" in str(md.make_tape(lambda xs: md.map(rows_of, xs))(xs))


test_what_cannot_be_mapped = refusals(
    [
        (
            (np.sin, (np.zeros(2), np.zeros(3))),
            ValueError,
            r"map: lengths differ: xs\[0\]: f64\[2\], xs\[1\]: f64\[3\]",
        ),
        ((np.sin, 1.0), ValueError, r"map: xs has type f64\[\], which has no axis"),
        ((np.sin, ()), ValueError, "map: xs holds no array"),
        ((np.zeros(2), np.sin), TypeError, "map: f must be a function"),
    ],
    lambda args: md.map(*args),
)


# ---------------------------------------------------------------- eval_shape

FUNCTIONS = {
    "a tree": lambda x, w, n: {"y": x @ w, "n": (n, 2 * n, None)},
    "a gradient": lambda x, w, n: md.grad(lambda w: (np.tanh(x @ w) * n).sum())(w),
    "a loop": lambda x, w, n: md.scan(lambda c, row: (c + row @ w, row), np.zeros(2, "f4"), x),
    "a compiled function": lambda x, w, n: md.jit(np.matmul)(x, w),
    "a batch": lambda x, w, n: md.vmap(lambda row: row @ w)(x) > n,
}


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_types_of_results_are_those_of_the_call(f):
    x, w, n = np.ones((4, 3), np.float32), np.ones((3, 2), np.float32), 2.0
    expected = md.tree.map(md.typeof, f(x, w, n))
    assert md.eval_shape(f, x, w, n) == expected
    assert md.eval_shape(f, md.typeof(x), w, n=n) == expected


def test_the_types_of_results_are_found_without_computing():
    def f(x):
        return md.while_loop(lambda c: True, lambda c: c + 1, x)  # forever

    huge = md.ShapedArray((1 << 20, 1 << 20), np.float64)
    assert md.eval_shape(f, huge) == huge
    with pytest.raises(md.TracerError, match="eval_shape of"):
        md.eval_shape(lambda x: x if x > 0 else -x, 1.0)
    with pytest.raises(TypeError, match="eval_shape takes a function, got float64"):
        md.eval_shape(np.sin(1.0))


def test_the_types_of_results_in_a_body_say_where_they_vary():
    findings = []
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")

    def body(x):
        return findings.append(md.eval_shape(lambda x: (x, psum(x, "i")), x)) or x

    spmd.shard_map(body, mesh, P("i"), P("i"))(np.zeros(4))
    assert str(findings) == "[(f64[2]{i}, f64[2])]"


# ---------------------------------------------------------------- map in batches


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
def test_a_map_in_batches_is_a_map(batch_size):
    """Lengths that the size divides, and does not; trees; values, derivatives, and what is recorded."""
    xs = {"a": numpy.linspace(-1.0, 2.0, 15).reshape(5, 3), "b": numpy.arange(5)}

    def f(x):
        return np.sin(x["a"]) * x["b"], (x["b"], np.ones(2))

    def mapped(**options):
        return lambda xs: md.map(f, xs, **options)

    def loss(**options):
        return lambda a: np.sum(md.map(f, {**xs, "a": a}, **options)[0] ** 2)

    size = {"batch_size": batch_size}
    for run in (lambda f: f, md.jit, lambda f: md.vmap(f, axis_size=2, in_axes=None)):
        assert_trees_close(md.tree.leaves(run(mapped(**size))(xs)), md.tree.leaves(run(mapped())(xs)))
    for run in (md.grad, lambda f: md.jit(md.grad(f)), md.hessian):
        assert_trees_close(run(loss(**size))(xs["a"]), run(loss())(xs["a"]))
    rows = [eqn for eqn in md.make_tape(mapped(**size))(xs).equations if eqn.primitive.name == "scan"]
    assert [eqn.params["length"] for eqn in rows] == [5 // batch_size] * (batch_size <= 5)


def test_batches_of_nothing():
    assert md.map(np.sin, numpy.zeros((0, 3)), batch_size=2).shape == (0, 3)
    with pytest.raises(ValueError, match="batch_size must be a number of elements, at least 1, got 0"):
        md.map(np.sin, numpy.ones(3), batch_size=0)
