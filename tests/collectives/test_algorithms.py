"""The algorithms give what the collectives give, values and derivatives, over any number of ranks."""

import functools

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import spmd
from collectives import algorithms, all_gather, all_gather_invariant, psum
from spmd import P
from tests.checks.algorithms import ALGORITHMS, Case, cases, check_types, check_value, mapped, runs_on
from tests.checks.meshes import mesh
from tests.checks.samples import each
from tests.checks.whole import whole


def mapped_over(f, n, in_specs=P("i"), **options):
    return spmd.shard_map(f, mesh=mesh(n), in_specs=in_specs, out_specs=P("i"), **options)


every = each("name", algorithms.__all__)


def test_the_checks_know_all_algorithms():
    assert list(ALGORITHMS) == algorithms.__all__


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([name for name in algorithms.__all__ if name.endswith("all_reduce")]),
    st.integers(1, 8),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_arrays_of_any_shape_are_summed(name, n, shape):
    check_value(mesh(n), Case(getattr(algorithms, name), psum, tuple(shape)))


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([name for name in algorithms.__all__ if name.endswith("all_gather")]),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
def test_arrays_of_any_shape_are_gathered(name, n, shape, tiled, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    ours, theirs = (functools.partial(f, axis=axis, tiled=tiled) for f in (getattr(algorithms, name), all_gather))
    check_value(mesh(n), Case(ours, theirs, tuple(shape)))


@every
def test_types(name):
    for case in cases(name, 4):
        check_types(mesh(4), case)


@every
@each("dtype", ["bool", "int32", "float32", "complex128"])
def test_dtypes(name, dtype):
    check_value(mesh(4), cases(name, 4)[0], dtype=dtype)


@every
def test_several_axes_of_a_mesh(name):
    on = mesh(2, 3, 2, names="xyz")
    for axes in ("x", ("z", "x"), ("x", "y", "z"), ("z", "y")):
        n = numpy.prod([on.shape[a] for a in axes])
        if runs_on(name, int(n)):
            check_value(on, cases(name, int(n))[0], axes)


#: Ways to run a function of a block and an axis on a stack of four ranks' blocks.
WAYS = {
    "the axis of a vmap": lambda f: md.vmap(functools.partial(f, axis_name="i"), axis_name="i"),
    "compiled": lambda f: md.jit(mapped(mesh(4), f, "i")),
    "untyped": lambda f: mapped(mesh(4), f, "i", check_rep=False),
    "explicit": lambda f: mapped(mesh(4), f, "i", auto_pbroadcast=False),
    "a tree": lambda f: lambda x: mapped(mesh(4), lambda x, axis: f({"a": 2 * x, "b": x}, axis)["b"], "i")(x),
}


@every
@each("way", WAYS)
def test_ways_to_run(name, way):
    case = cases(name, 4)[0]
    x = numpy.random.default_rng(0).standard_normal((4, *case.shape))
    actual, expected = WAYS[way](case.ours)(x), mapped(mesh(4), case.theirs, "i")(x)
    numpy.testing.assert_allclose(whole(actual), whole(expected), rtol=1e-12)


@every
def test_axes_that_nobody_binds_and_operands_that_are_not_pbroadcast(name):
    case = cases(name, 2)[0]
    for axis, error in ("nowhere", md.UnboundAxisError), ("i", md.VarianceError):
        with pytest.raises(error):
            mapped_over(lambda x, a=axis: case.ours(x, a), 2, P(), auto_pbroadcast=False)(numpy.ones(case.shape))


POWERS = [n for n in algorithms.__all__ if not runs_on(n, 6)]
ROOTED = [n for n in algorithms.__all__ if "tree" in n or "server" in n]
SPLIT = [n for n in algorithms.__all__ if "reduce_scatter" in n]


@each("name, ranks, options", [
    *[(name, 6, {"tiled": True}) for name in POWERS],
    *[(name, 4, {"tiled": True}) for name in SPLIT],
    *[(name, 2, {"root": root}) for name in ROOTED for root in (-1, 2)],
])  # fmt: skip
def test_ranks_dimensions_and_roots_that_do_not_fit(name, ranks, options):
    f = functools.partial(getattr(algorithms, name), axis_name="i", **options)
    with pytest.raises(ValueError, match=name):
        mapped_over(f, ranks)(numpy.ones(6 * ranks + ranks // 4 * 12))


def test_a_sum_that_is_typed_as_the_same_on_all_ranks():
    """Check the module's text: out_specs=P() is refused, and its advice works."""
    x = numpy.arange(16.0)
    replicated = functools.partial(spmd.shard_map, mesh=mesh(4), in_specs=P("i"), out_specs=P())
    with pytest.raises(md.VarianceError):
        replicated(lambda b: algorithms.ring_all_reduce(b, "i"))(x)

    def total(b):
        local = algorithms.ring_reduce_scatter(b, "i", tiled=True)
        return all_gather_invariant(local, "i", tiled=True)

    numpy.testing.assert_array_equal(replicated(total)(x), x.reshape(4, 4).sum(0))
