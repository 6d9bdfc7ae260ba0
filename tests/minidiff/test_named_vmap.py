"""Collectives over the axis that a `vmap` has named: its elements are the ranks; `named_vmap.md` shows results."""

import numpy as np

import minidiff as md
from collectives import all_gather_invariant, axis_index, axis_size, pmax, pmean, ppermute, psum
from minidiff.checks.testing import check_grads
from spmd import P
from tests.checks.collective_cases import cases, one_case_each
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

N = 3


def along(f, axis="v", **options):
    return md.vmap(f, axis_name=axis, **options)


def numbers(case, *sizes):
    return np.random.default_rng(0).standard_normal((*sizes, *case.shape))


SAMPLES = [(c, dtype) for dtype in (np.float32, complex, np.int8, bool) for c in one_case_each(N)]


@each("case, dtype", [*((c, float) for c in cases(N)), *SAMPLES], ids=str)
def test_values(case, dtype):
    if case.name in ("pmax", "pmin") and dtype is complex:
        return
    x = (10 * numbers(case, N)).astype(dtype)
    expected = np.stack(case.reference(list(x)))
    actual = along(lambda x: case(x, "v"))(x)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert actual.dtype == expected.dtype


@each("case", [c for c in one_case_each(N) if c.name not in ("axis_index", "pany", "pall")], ids=str)
def test_derivatives(case):
    """All elements together have one derivative, wherever it is taken: collectives are transposed to one another."""
    x, g = numbers(case, N), lambda x: np.sin(case(x, "v"))
    f, t = along(g), np.cos(x)
    check_grads(f, (x,), order=1)
    inside = along(lambda x, t: md.jvp(g, (x,), (t,))[1])
    np.testing.assert_allclose(inside(x, t), md.jvp(f, (x,), (t,))[1])
    ct = np.cos(f(x))
    inside = along(lambda x, ct: md.vjp(g, x)[1](ct)[0])
    np.testing.assert_allclose(md.jit(inside)(x, ct), md.vjp(f, x)[1](ct)[0], rtol=1e-6)


# ---------------------------------------------------------------- sizes and positions of axes

#: Collectives that take several axes of vmaps at once.
COMBINED = {"psum", "pmean", "pmax", "all_gather", "all_gather_invariant", "psum_scatter", "pscatter", "axis_index"}
COMBINED_CASES = [c for c in cases(12) if c.name in COMBINED and "axis_index_groups" not in c.options]


@each("axes", [("a", "b"), ("b", "a")], ids=str)
@each("case", COMBINED_CASES, ids=str)
def test_two_axes_are_one_of_all_elements(case, axes):
    x = numbers(case, 4, 3)
    f = along(along(lambda x: case(x, axes), "b"), "a")
    flat = x if axes == ("a", "b") else x.swapaxes(0, 1)
    expected = along(lambda x: case(x, "v"))(flat.reshape(12, *case.shape))
    expected = expected.reshape(*flat.shape[:2], *expected.shape[1:])
    np.testing.assert_allclose(f(x), expected if axes == ("a", "b") else expected.swapaxes(0, 1), atol=1e-12)


# ---------------------------------------------------------------- with a mesh

Y = np.sin(np.arange(12.0)).reshape(2, 3, 2)
MIXED = {
    "sum": (lambda x: psum(x, ("i", "v")), Y.sum((0, 1))),
    "mean": (lambda x: pmean(x, ("v", "i")), Y.mean((0, 1))),
    "largest": (lambda x: pmax(x, ("i", "v")), Y.max((0, 1))),
    "gathered": (lambda x: all_gather_invariant(x, ("i", "v")), Y.reshape(6, 2)),
    "the other way": (lambda x: all_gather_invariant(x, ("v", "i"), tiled=True), Y.swapaxes(0, 1).reshape(12)),
}


def sum_of_sines(f):
    return lambda y: np.sin(f(y)).sum()


@each("f, expected", MIXED.values(), MIXED)
def test_vmap_in_a_body_and_a_body_in_vmap(f, expected):
    """Y is split along 'i', and then along 'v'."""
    in_body = mapped(lambda x: along(f, out_axes=None)(x[0]), mesh(2), P("i"), P())
    on_mesh = mapped(lambda x: f(x[0]), mesh(2), P("i"), P())
    around = along(on_mesh, in_axes=1, out_axes=None)
    for g in (in_body, around):
        np.testing.assert_allclose(g(Y), expected)
        check_grads(g, (Y,), order=1)
    gradient = md.grad(sum_of_sines(in_body))
    np.testing.assert_allclose(md.make_tape(gradient)(Y)(Y)[0], gradient(Y))
    inside = along(md.grad(sum_of_sines(on_mesh)), in_axes=1)
    outside = md.grad(sum_of_sines(along(on_mesh, in_axes=1)))
    np.testing.assert_allclose(inside(Y), np.moveaxis(outside(Y), 1, 0))


# ---------------------------------------------------------------- compiled

#: Functions of an element that depend on the number of elements, and not by their types.
OF_THE_SIZE = {
    "pmean": lambda x: pmean(x, "v"),
    "axis_size": lambda x: x * axis_size("v"),
    "psum of a constant": lambda x: x * psum(1.0, "v"),
    "ppermute": lambda x: ppermute(x, "v", [(0, 1), (1, 0)]),
    "axis_index": lambda x: x * axis_index("v"),
}


WITHIN = {
    "jit": md.jit,
    "grad of jit": lambda f: md.grad(md.jit(f)),
    "scan": lambda f: md.jit(lambda x: md.scan(lambda c, _: (f(c), c), x, None, length=2)[0]),
    "checkpoint": lambda f: md.jit(md.checkpoint(f)),
    "cond": lambda f: md.jit(lambda x: md.cond(True, f, f, x)),
}


@each("f", OF_THE_SIZE.values(), OF_THE_SIZE)
@each("within", WITHIN.values(), WITHIN)
def test_jit_records_anew_for_another_number_of_elements(f, within):
    g = within(f)
    for n in (2, 3, 2):
        x = np.arange(1.0, n + 1)
        np.testing.assert_array_equal(along(g)(x), along(lambda x: within(f)(x))(x))


#: Functions with bodies that have the axis, and no operand that is batched.
BODIES_ALONG = {
    "while_loop": lambda x: md.while_loop(lambda c: c < axis_index("v"), lambda c: c + 1, 0),
    "nested loops": lambda x: md.while_loop(
        lambda c: c < 9, lambda c: c + md.while_loop(lambda d: d < axis_index("v"), lambda d: d + 1, 0) + 1, 0
    ),
    "scan": lambda x: md.scan(lambda c, _: (c + axis_index("v"), c), 0, None, length=2)[1].sum(),
    "cond in a scan": lambda x: md.scan(
        lambda c, _: (c, md.cond(c > 0, lambda: axis_index("v"), lambda: 2)), 1, None, length=2
    )[1].sum(),
    "checkpoint": lambda x: md.checkpoint(lambda: axis_index("v"))(),
}
#: The same, along the axis "v".
ALONG = {
    "jit": lambda f: along(md.jit(f)),
    "jit of vmap": lambda f: md.jit(along(f)),
    "in another vmap": lambda f: lambda x: md.vmap(along(md.jit(f)))(x[None])[0],
    "vjp": lambda f: along(lambda x: md.vjp(md.jit(f), x)[0]),
}


@each("f", BODIES_ALONG.values(), BODIES_ALONG)
@each("how", ALONG.values(), ALONG)
def test_bodies_in_which_nothing_but_the_axis_is_batched(f, how):
    np.testing.assert_array_equal(how(f)(np.ones(N)), along(f)(np.ones(N)))
