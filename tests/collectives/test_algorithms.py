"""The algorithms give what the collectives give, values and derivatives, over any number of ranks."""

import doctest
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
from tests.checks.samples import each

COUNTS = range(1, 9)


@functools.cache
def mesh_of(n):
    return spmd.make_mesh((n,), ("i",), backend="simulated")


every = each("name", algorithms.__all__)


def test_the_checks_know_all_algorithms():
    assert list(ALGORITHMS) == algorithms.__all__


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([name for name in algorithms.__all__ if name.endswith("all_reduce")]),
    st.integers(1, 8),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_arrays_of_any_shape_are_summed(name, n, shape):
    check_value(mesh_of(n), Case(getattr(algorithms, name), psum, tuple(shape)))


@settings(max_examples=40, deadline=None)
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
    check_value(mesh_of(n), Case(ours, theirs, tuple(shape)))


@every
def test_types(name):
    for case in cases(name, 4):
        check_types(mesh_of(4), case)


@every
@each("dtype", ["bool", "int32", "float32", "complex128"])
def test_dtypes(name, dtype):
    check_value(mesh_of(4), cases(name, 4)[0], dtype=dtype)


@every
def test_several_axes_of_a_mesh(name):
    mesh = spmd.make_mesh((2, 3, 2), ("x", "y", "z"), backend="simulated")
    for axes in ("x", ("z", "x"), ("x", "y", "z"), ("z", "y")):
        n = numpy.prod([mesh.shape[a] for a in axes])
        if runs_on(name, int(n)):
            check_value(mesh, cases(name, int(n))[0], axes)


@every
def test_over_the_axis_of_a_vmap(name):
    case = cases(name, 4)[0]
    x = numpy.random.default_rng(0).standard_normal((4, *case.shape))
    ours, theirs = (md.vmap(functools.partial(f, axis_name="i"), axis_name="i") for f in case[:2])
    numpy.testing.assert_allclose(ours(x), theirs(x), rtol=1e-12)


@every
def test_without_types(name):
    check_value(mesh_of(4), cases(name, 4)[0], check_rep=False)


@every
def test_compiled(name):
    case = cases(name, 4)[0]
    x = numpy.random.default_rng(0).standard_normal((4, *case.shape))
    f = spmd.shard_map(lambda b: case.ours(b[0], "i")[None], mesh=mesh_of(4), in_specs=P("i"), out_specs=P("i"))
    numpy.testing.assert_array_equal(md.jit(f)(x), f(x))


@every
def test_trees(name):
    case = cases(name, 2)[0]
    x = numpy.random.default_rng(0).standard_normal((2, *case.shape))

    def body(tree):
        one, other = (case.ours(leaf[0], "i") for leaf in (tree["a"], tree["b"]))
        both = case.ours({"a": tree["a"][0], "b": tree["b"][0]}, "i")
        return (both["a"] - one)[None], (both["b"] - other)[None]

    differences = spmd.shard_map(body, mesh=mesh_of(2), in_specs=P("i"), out_specs=P("i"))({"a": x, "b": 2 * x})
    for difference in differences:
        assert not numpy.asarray(difference).any()


@every
def test_explicit_programs(name):
    case = cases(name, 4)[0]
    x = numpy.random.default_rng(0).standard_normal((4, *case.shape))
    explicit, ordinary = (mapped(mesh_of(4), case.ours, "i", auto_pbroadcast=flag)(x) for flag in (False, True))
    numpy.testing.assert_array_equal(explicit, ordinary)


@every
def test_explicit_programs_pbroadcast_operands_themselves(name):
    case = cases(name, 2)[0]
    f = spmd.shard_map(
        lambda x: case.ours(x, "i"), mesh=mesh_of(2), in_specs=P(), out_specs=P("i"), auto_pbroadcast=False
    )
    with pytest.raises(md.VarianceError, match="pbroadcast"):
        f(numpy.ones(case.shape))


# ---------------------------------------------------------------- what they say


@pytest.mark.parametrize("name", ["recursive_doubling_all_gather", "recursive_halving_reduce_scatter"])
def test_powers_of_two_only(name):
    f = functools.partial(getattr(algorithms, name), axis_name="i", tiled=True)
    message = f"{name}: the number of ranks must be a power of two, but it is 6: write .*(all_gather|reduce_scatter)"
    with pytest.raises(ValueError, match=message):
        spmd.shard_map(f, mesh=mesh_of(6), in_specs=P("i"), out_specs=P("i"))(numpy.ones(36))


@pytest.mark.parametrize("name", [n for n in algorithms.__all__ if "reduce_scatter" in n])
def test_dimensions_that_cannot_be_split(name):
    f = functools.partial(getattr(algorithms, name), axis_name="i", tiled=True)
    message = f"{name}: axis 0 of f64\\[3\\]{{i}} is split over 2 ranks, which do not divide 3"
    with pytest.raises(ValueError, match=message):
        spmd.shard_map(f, mesh=mesh_of(2), in_specs=P("i"), out_specs=P("i"))(numpy.ones(6))


ROOTED = [n for n in algorithms.__all__ if "tree" in n or "server" in n]


@each("name", ROOTED)
@each("root", [-1, 2])
def test_roots_that_are_none(name, root):
    f = functools.partial(getattr(algorithms, name), axis_name="i", root=root)
    with pytest.raises(ValueError, match=f"{name}: the root {root} is not an index along 'i', which has 2 ranks"):
        spmd.shard_map(f, mesh=mesh_of(2), in_specs=P("i"), out_specs=P("i"))(numpy.ones(6))


@every
def test_axes_that_nobody_binds(name):
    case = cases(name, 2)[0]
    with pytest.raises(md.UnboundAxisError, match=f"{name}: there is no axis 'nowhere' here"):
        spmd.shard_map(lambda x: case.ours(x, "nowhere"), mesh=mesh_of(2), in_specs=P(), out_specs=P("i"))(
            numpy.ones(case.shape)
        )


def test_a_sum_that_is_typed_as_the_same_on_all_ranks():
    """Check the module's text: out_specs=P() is refused, and its advice works."""
    x = numpy.arange(16.0)
    replicated = functools.partial(spmd.shard_map, mesh=mesh_of(4), in_specs=P("i"), out_specs=P())
    with pytest.raises(md.VarianceError, match="it may differ from rank to rank along 'i'"):
        replicated(lambda b: algorithms.ring_all_reduce(b, "i"))(x)

    def total(b):
        local = algorithms.ring_reduce_scatter(b, "i", tiled=True)
        return all_gather_invariant(local, "i", tiled=True)

    numpy.testing.assert_array_equal(replicated(total)(x), x.reshape(4, 4).sum(0))


def test_examples():
    names = {"np": numpy, "spmd": spmd, "P": P, "mesh": mesh_of(2), "algorithms": algorithms}
    results = doctest.testmod(algorithms, extraglobs=names)
    assert results.failed == 0
    assert results.attempted >= 2 * len(algorithms.__all__)
