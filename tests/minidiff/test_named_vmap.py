"""Collectives over the axis that a `vmap` has named: its elements are the ranks."""

import numpy as np
import pytest

import minidiff as md
from collectives import (
    all_gather,
    all_gather_invariant,
    axis_index,
    axis_size,
    pmax,
    pmean,
    ppermute,
    pscatter,
    psum,
    psum_scatter,
)
from minidiff.checks.testing import check_grads
from spmd import P
from tests.checks.collective_cases import cases, one_case_each
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

N = 3
X = np.arange(24.0).reshape(4, 3, 2)


def numbers(case, dtype=float):
    return np.random.default_rng(0).standard_normal((N, *case.shape)).astype(dtype)


@each("dtype", [float, np.float32, complex, np.int8, bool])
@each("case", list(cases(N)), ids=str)
def test_values(case, dtype):
    x = (10 * numbers(case)).astype(dtype)
    if case.name in ("pmax", "pmin") and dtype is complex:
        return
    actual = md.vmap(lambda x: case(x, "v"), axis_name="v")(x)
    expected = np.stack(case.reference(list(x)))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert actual.dtype == expected.dtype


@each("case", [c for c in cases(N) if c.name not in ("axis_index", "pany", "pall")], ids=str)
def test_derivatives(case):
    check_grads(md.vmap(lambda x: case(x, "v"), axis_name="v"), (numbers(case),))


@each("case", [c for c in one_case_each(N) if c.name != "axis_index"], ids=str)
def test_derivatives_inside(case):
    """All elements together have one derivative, wherever it is taken: collectives are transposed to one another."""
    x = numbers(case)
    f = md.vmap(lambda x: np.sin(case(x, "v")), axis_name="v")
    t = np.cos(x)
    inside = md.vmap(lambda x, t: md.jvp(lambda x: np.sin(case(x, "v")), (x,), (t,))[1], axis_name="v")
    np.testing.assert_allclose(inside(x, t), md.jvp(f, (x,), (t,))[1])
    ct = np.cos(f(x))
    inside = md.vmap(lambda x, ct: md.vjp(lambda x: np.sin(case(x, "v")), x)[1](ct)[0], axis_name="v")
    np.testing.assert_allclose(inside(x, ct), md.vjp(f, x)[1](ct)[0])


@each("case", one_case_each(N), ids=str)
def test_staged(case):
    x = numbers(case)
    f = md.vmap(lambda x: case(x, "v") * 1.0, axis_name="v")
    tape = md.make_tape(f)(x)
    tape.check()
    np.testing.assert_allclose(tape(x)[0], f(x))
    inside = md.vmap(lambda x: md.make_tape(lambda x: case(x, "v") * 1.0)(x)(x)[0], axis_name="v")
    np.testing.assert_allclose(inside(x), f(x))


def test_a_sum_differentiated_inside_counts_every_element():
    # Each element's result depends on all elements, and all results are differentiated together.
    x = np.ones(4)
    assert md.vmap(md.grad(lambda x: psum(x, "v")), axis_name="v")(x).tolist() == [4.0] * 4
    assert md.vmap(md.grad(lambda x: pmean(x, "v")), axis_name="v")(x).tolist() == [1.0] * 4
    assert md.grad(lambda x: md.vmap(lambda x: psum(x, "v"), axis_name="v")(x).sum())(x).tolist() == [4.0] * 4
    assert md.grad(lambda x: md.vmap(lambda x: psum(x, "v"), out_axes=None, axis_name="v")(x))(x).tolist() == [1.0] * 4


def test_what_is_the_same_for_all_may_leave_unstacked():
    f = md.vmap(lambda x: (psum(x, "v"), all_gather(x, "v"), pmax(x, "v")), out_axes=None, axis_name="v")
    total, gathered, largest = f(X)
    np.testing.assert_array_equal(total, X.sum(0))
    np.testing.assert_array_equal(gathered, X)
    np.testing.assert_array_equal(largest, X.max(0))


def test_values_that_are_not_mapped_are_on_every_element():
    f = md.vmap(lambda x, y: (psum(y, "v"), psum(1, "v"), all_gather(y, "v")), in_axes=(0, None), axis_name="v")
    total, count, gathered = f(np.ones(4), 2.0)
    assert total.tolist() == [8.0] * 4 and count.tolist() == [4] * 4
    assert gathered.tolist() == [[2.0] * 4] * 4
    assert md.vmap(lambda: axis_index("v"), axis_name="v", axis_size=3)().tolist() == [0, 1, 2]


def test_other_axes_than_the_first():
    f = md.vmap(lambda x: x / psum(x, "v"), in_axes=1, out_axes=-1, axis_name="v")
    np.testing.assert_allclose(f(1 + X), np.moveaxis((1 + X) / (1 + X).sum(1, keepdims=True), 1, -1))


# ---------------------------------------------------------------- several axes


#: Collectives that take several axes of vmaps at once.
COMBINED = {"psum", "pmean", "pmax", "all_gather", "all_gather_invariant", "psum_scatter", "pscatter", "axis_index"}
COMBINED_CASES = [c for c in cases(12) if c.name in COMBINED and "axis_index_groups" not in c.options]


@each("axes", [("a", "b"), ("b", "a")], ids=str)
@each("case", COMBINED_CASES, ids=str)
def test_two_axes_are_one_of_all_elements(case, axes):
    x = np.random.default_rng(0).standard_normal((4, 3, *case.shape))
    f = md.vmap(md.vmap(lambda x: case(x, axes), axis_name="b"), axis_name="a")
    flat = x if axes == ("a", "b") else x.swapaxes(0, 1)
    expected = md.vmap(lambda x: case(x, "v"), axis_name="v")(flat.reshape(12, *case.shape))
    expected = expected.reshape(*flat.shape[:2], *expected.shape[1:])
    np.testing.assert_allclose(f(x), expected if axes == ("a", "b") else expected.swapaxes(0, 1), atol=1e-12)


#: Functions over one of two axes, or several times over both.
NESTED = {
    "inner": (lambda x: psum(x, "b"), lambda x: x.sum(1, keepdims=True) + 0 * x),
    "outer": (lambda x: psum(x, "a"), lambda x: x.sum(0) + 0 * x),
    "size": (lambda x: x * axis_size(("a", "b")) + axis_size("a"), lambda x: x * 12 + 4),
    "scattered again": (lambda x: psum_scatter(all_gather(x, ("a", "b")), ("a", "b")) / 12, lambda x: x),
    "its own slice": (lambda x: pscatter(all_gather(x, ("b", "a"), tiled=True), ("b", "a"), tiled=True), lambda x: x),
}


@each("f, expected", NESTED.values(), NESTED)
def test_nested(f, expected):
    nested = md.vmap(md.vmap(f, axis_name="b"), axis_name="a")
    np.testing.assert_allclose(nested(X), expected(X))
    check_grads(nested, (np.sin(X),), order=1)


def test_the_innermost_of_two_of_one_name_is_meant():
    f = md.vmap(md.vmap(lambda x: psum(x, "v"), axis_name="v"), axis_name="v")
    np.testing.assert_array_equal(f(X), np.broadcast_to(X.sum(1, keepdims=True), X.shape))


# ---------------------------------------------------------------- with a mesh

MIXED = {
    "sum": (lambda x: psum(x, ("i", "v")), lambda x: x.sum((0, 1))),
    "mean": (lambda x: pmean(x, ("v", "i")), lambda x: x.mean((0, 1))),
    "largest": (lambda x: pmax(x, ("i", "v")), lambda x: x.max((0, 1))),
    "gathered": (lambda x: all_gather_invariant(x, ("i", "v")), lambda x: x.reshape(6, 2)),
    "the other way": (
        lambda x: all_gather_invariant(x, ("v", "i"), tiled=True),
        lambda x: x.swapaxes(0, 1).reshape(12),
    ),
}
Y = np.sin(np.arange(12.0)).reshape(2, 3, 2)  # along 'i', along 'v', and two more


def test_axes_of_a_mesh_after_a_mapped_one():
    y = np.sin(np.arange(24.0)).reshape(2, 2, 3, 2)
    body = md.vmap(lambda x: psum(x, ("v", "i", "j")), in_axes=2, axis_name="v", out_axes=None)
    on_mesh = mapped(body, mesh(2, 2), P("i", "j"), P())
    np.testing.assert_allclose(on_mesh(y), y.sum((0, 1, 2))[None, None])


def sum_of_sines(f):
    return lambda y: np.sin(f(y)).sum()


@each("f, expected", MIXED.values(), MIXED)
def test_vmap_in_a_body(f, expected):
    on_mesh = mapped(lambda x: md.vmap(f, axis_name="v", out_axes=None)(x[0]), mesh(2), P("i"), P())
    np.testing.assert_allclose(on_mesh(Y), expected(Y))
    check_grads(on_mesh, (Y,))
    gradient = md.grad(sum_of_sines(on_mesh))
    tape = md.make_tape(gradient)(Y)
    tape.check()
    np.testing.assert_allclose(tape(Y)[0], gradient(Y))


@each("f, expected", MIXED.values(), MIXED)
def test_a_body_in_vmap(f, expected):
    on_mesh = mapped(lambda x: f(x[0]), mesh(2), P("i"), P())
    g = md.vmap(on_mesh, in_axes=1, out_axes=None, axis_name="v")
    np.testing.assert_allclose(g(Y), expected(Y))
    check_grads(g, (Y,))
    inside = md.vmap(md.grad(sum_of_sines(on_mesh)), in_axes=1, axis_name="v")
    outside = md.grad(sum_of_sines(md.vmap(on_mesh, in_axes=1, axis_name="v")))
    np.testing.assert_allclose(inside(Y), np.moveaxis(outside(Y), 1, 0))


def test_types_in_a_body_tell_of_the_mesh_alone():
    seen = []
    look = lambda x: seen.extend(str(md.typeof(y)) for y in (x, psum(x, "v"), psum(x, ("v", "i")))) or x  # noqa: E731
    mapped(md.vmap(look, axis_name="v"), mesh(2), P("i"), P("i"))(np.ones((4, 3)))
    assert seen == ["f64[3]{i}", "f64[3]{i}", "f64[3]"]


# ---------------------------------------------------------------- compiled

#: Functions of an element that depend on the number of elements, and not by their types.
OF_THE_SIZE = {
    "pmean": lambda x: pmean(x, "v"),
    "axis_size": lambda x: x * axis_size("v"),
    "psum of a constant": lambda x: x * psum(1.0, "v"),
    "ppermute": lambda x: ppermute(x, "v", [(0, 1), (1, 0)]),
    "axis_index": lambda x: x * axis_index("v"),
}


def with_a_rule(f):
    g = md.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), f(*tangents)))
    return g


WITHIN = {
    "jit": md.jit,
    "grad": lambda f: md.jit(md.grad(f)),
    "grad of jit": lambda f: md.grad(md.jit(f)),
    "scan": lambda f: md.jit(lambda x: md.scan(lambda c, _: (f(c), c), x, None, length=2)[0]),
    "checkpoint": lambda f: md.jit(md.checkpoint(f)),
    "custom_jvp": lambda f: md.jit(with_a_rule(f)),
    "cond": lambda f: md.jit(lambda x: md.cond(True, f, f, x)),
}


@each("f", OF_THE_SIZE.values(), OF_THE_SIZE)
@each("within", WITHIN.values(), WITHIN)
def test_jit_records_anew_for_another_number_of_elements(f, within):
    g = within(f)
    for n in (2, 3, 2):
        x = np.arange(1.0, n + 1)
        once = md.vmap(lambda x: within(f)(x), axis_name="v")(x)
        np.testing.assert_array_equal(md.vmap(g, axis_name="v")(x), once)


def test_jit_does_not_keep_axes_that_are_no_longer_bound():
    f = md.jit(lambda x: x * axis_size("v"))
    assert md.vmap(f, axis_name="v")(np.ones(2)).tolist() == [2, 2]
    assert md.vmap(md.vmap(f, axis_name="v"), axis_name="w")(np.ones((2, 3))).tolist() == [[3] * 3] * 2
    for call in (f, md.vmap(f, axis_name="w"), md.grad(f)):
        with pytest.raises(md.UnboundAxisError):
            call(np.ones(2) if call is not f else 1.0)


def test_jit_records_anew_where_a_body_maps_over_other_axes():
    f = md.jit(lambda x: psum(x, "j"))
    along = lambda axes: mapped(f, mesh(2, 2), P(), P(), axis_names=axes)(1.0)  # noqa: E731
    assert along({"i", "j"}) == along({"j"}) == 2
    with pytest.raises(md.UnboundAxisError):
        along({"i"})


#: Functions with bodies that have the axis, and no operand that is batched.
BODIES_ALONG = {
    "while_loop": lambda x: md.while_loop(lambda c: c < axis_index("v"), lambda c: c + 1, 0),
    "a step": lambda x: md.while_loop(lambda c: c < 3, lambda c: c + axis_index("v") + 1, 0),
    "nested loops": lambda x: md.while_loop(
        lambda c: c < 9, lambda c: c + md.while_loop(lambda d: d < axis_index("v"), lambda d: d + 1, 0) + 1, 0
    ),
    "fori_loop": lambda x: md.fori_loop(0, 2, lambda k, c: c + axis_index("v"), 0),
    "scan": lambda x: md.scan(lambda c, _: (c + axis_index("v"), c), 0, None, length=2)[1].sum(),
    "cond": lambda x: md.cond(True, lambda: axis_index("v"), lambda: 2),
    "cond in a scan": lambda x: md.scan(
        lambda c, _: (c, md.cond(c > 0, lambda: axis_index("v"), lambda: 2)), 1, None, length=2
    )[1].sum(),
    "checkpoint": lambda x: md.checkpoint(lambda: axis_index("v"))(),
}

#: The same, along the axis "v".
ALONG = {
    "jit": lambda f: md.vmap(md.jit(f), axis_name="v"),
    "jit of vmap": lambda f: md.jit(md.vmap(f, axis_name="v")),
    "make_tape": lambda f: lambda x: md.make_tape(md.vmap(f, axis_name="v"))(x)(x)[0],
    "in another vmap": lambda f: lambda x: md.vmap(md.vmap(md.jit(f), axis_name="v"))(x[None])[0],
    "jvp": lambda f: md.vmap(lambda x: md.jvp(md.jit(f), (x,), (x,))[0], axis_name="v"),
    "vjp": lambda f: md.vmap(lambda x: md.vjp(md.jit(f), x)[0], axis_name="v"),
}


@each("f", BODIES_ALONG.values(), BODIES_ALONG)
@each("how", ALONG.values(), ALONG)
def test_bodies_in_which_nothing_but_the_axis_is_batched(f, how):
    x = np.ones(N)
    np.testing.assert_array_equal(how(f)(x), md.vmap(f, axis_name="v")(x))
