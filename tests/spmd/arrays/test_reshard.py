"""Redistribution: the same array, split in another way, by the collectives that the rule gives."""

import functools
import itertools
import math

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from spmd.sharding.routes import route
from tests.checks.samples import check_raises, each

SHAPES = {(2,): ("i",), (2, 2): ("i", "j"), (4, 2): ("i", "j"), (2, 2, 2): ("i", "j", "k"), (2, 1, 2): ("i", "j", "k")}


@functools.cache
def mesh_of(shape):
    return spmd.make_mesh(shape, SHAPES[shape], backend="simulated")


def all_specs(axes, ndim):
    """Every way to split `ndim` dimensions along some of the axes."""
    results = []
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), ndim - 1):
                ends = [0, *cuts, count]
                results.append(P(*[tuple(chosen[a:b]) or None for a, b in itertools.pairwise(ends)]))
    return results


def array(ndim):
    return numpy.arange(8.0**ndim).reshape((8,) * ndim)


@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_specs(shape, ndim):
    """Each rank gets the block that gathering and splitting would give it, with no more bytes moved."""
    mesh, x = mesh_of(shape), array(ndim)
    specs = all_specs(SHAPES[shape], ndim)
    placed = {spec: spmd.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)(x) for spec in specs}
    pairs = list(itertools.product(specs, repeat=2))
    for have, want in pairs:
        gathered = x.nbytes - x.nbytes // math.prod(n for a, n in mesh.shape.items() if a in have.axes)
        steps = route(have.dims(ndim), want.dims(ndim), x.nbytes, mesh.shape)
        assert sum(step.bytes for step in steps) <= gathered, (have, want)
    for have, want in pairs[:: max(1, len(pairs) // 500) | 1]:  # of very many pairs some are carried out, evenly
        y = spmd.reshard(placed[have], want) if have.axes else spmd.distribute(x, mesh, want)
        if not want.axes:
            assert type(y) is numpy.ndarray
            numpy.testing.assert_array_equal(y, x)
            continue
        assert y.spec == want
        for block, expected in zip(y.local, placed[want].local):
            numpy.testing.assert_array_equal(block, expected)


def test_there_are_as_many_specs_as_there_should_be():
    assert len(all_specs(("i", "j"), 2)) == len(set(all_specs(("i", "j"), 2))) == 1 + 2 * 2 + 2 * 3
    assert len(set(all_specs(("i", "j", "k"), 3))) == 1 + 3 * 3 + 6 * 6 + 6 * 10


def test_in_a_vmap_each_element_is_split_and_so_the_batch_stays():
    x = spmd.distribute(X / 64, mesh_of((2, 2)), P("i", "j"))
    for axis in (0, 1):
        f = md.vmap(lambda r: np.sin(spmd.reshard(r, P())), in_axes=axis, out_axes=axis)
        assert f(x).spec == (P("i") if axis == 0 else P(None, "j"))
        numpy.testing.assert_allclose(f(x), numpy.sin(X / 64))
        assert spmd.communication(f)(x).counts == {"all_gather_invariant": 1}
    y = md.vmap(lambda r: spmd.reshard(r, P("i")))(x)  # the axis is wanted elsewhere: the batch is whole
    assert y.spec == P(None, "i")
    numpy.testing.assert_array_equal(y, X / 64)
    z = md.vmap(lambda r: spmd.distribute(r, mesh_of((2, 2)), P("j")))(X)
    assert z.spec == P(None, "j")
    slopes = md.vmap(md.grad(lambda r: np.sum(np.sin(spmd.reshard(r, P())) ** 2)))
    numpy.testing.assert_allclose(slopes(x), numpy.sin(X / 32))
    numpy.testing.assert_allclose(md.jit(slopes)(x), numpy.sin(X / 32))


def test_axes_of_one_rank_cost_nothing():
    mesh = mesh_of((2, 1, 2))
    x = spmd.distribute(X, mesh, P(("j", "i"), "k"))
    for want in [P("i", ("k", "j")), P(("i", "j"), "k"), P("i", "k")]:
        y = spmd.reshard(x, want)
        numpy.testing.assert_array_equal(y, X)
        assert y.spec == want and spmd.communication(lambda x, s=want: spmd.reshard(x, s))(x).counts == {}
        assert md.grad(lambda x, s=want: np.sum(spmd.reshard(x, s) ** 2))(x).spec == x.spec


MESH = mesh_of((4, 2))
X = numpy.arange(64.0).reshape(8, 8)


@pytest.mark.parametrize(
    "have, want, counts",
    [
        (P("i"), P("i"), {}),
        (P("i"), P("i", "j"), {}),
        (P("i"), P(("i", "j")), {}),
        (P("i", "j"), P("i"), {"all_gather_invariant": 1}),
        (P("i", "j"), P(), {"all_gather_invariant": 2}),
        (P(("i", "j")), P(), {"all_gather_invariant": 1}),
        (P("i"), P(None, "i"), {"all_to_all": 1}),
        (P(("i", "j")), P(None, ("i", "j")), {"all_to_all": 1}),
        (P(("i", "j")), P("i", "j"), {"all_to_all": 1}),
        (P(("i", "j")), P(("j", "i")), {"all_gather_invariant": 1}),
        (P("i"), P("j"), {"all_gather_invariant": 1}),
        (P("i", "j"), P("j", "i"), {"all_gather_invariant": 1, "all_to_all": 1}),
    ],
)
def test_the_collectives_chosen(have, want, counts):
    x = spmd.distribute(X, MESH, have)
    assert spmd.communication(lambda x: spmd.reshard(x, want))(x).counts == counts
    MESH.reset_calls()
    numpy.testing.assert_array_equal(spmd.reshard(x, want), X)
    assert MESH.calls == counts


def test_the_steps_as_text():
    x = spmd.distribute(X, MESH, P("i"))
    assert spmd.explain_reshard(x, P("j")) == (
        "P('i') -> P('j') of f64[8,8]: 384 bytes for each rank\n"
        "  all_gather_invariant over 'i', axis=0: P(), 384 bytes\n"
        "  pscatter over 'j', axis=0: P('j'), 0 bytes"
    )
    assert spmd.explain_reshard(x, P("i")) == "P('i') -> P('i') of f64[8,8]: as it is"
    assert repr(spmd.explain_reshard(x, P("i"))) == "P('i') -> P('i') of f64[8,8]: as it is"


@pytest.mark.parametrize(
    "have, want", [(P("i", "j"), P("j", "i")), (P("i"), P(None, "j")), (P("j"), P()), (P("i"), P(("i", "j")))]
)
def test_derivatives(have, want):
    """Its transpose is the redistribution in reverse: cotangents are split as what they are cotangents of."""
    x, weights = spmd.distribute(X / 64, MESH, have), numpy.cos(X)

    def f(x):
        return np.sum(weights * np.sin(spmd.reshard(x, want)))

    g = md.grad(f)(x)
    assert g.spec == have
    numpy.testing.assert_allclose(g, weights * numpy.cos(X / 64))
    tangent = md.jvp(f, (x,), (x,))[1]
    numpy.testing.assert_allclose(tangent, np.sum(weights * np.cos(X / 64) * X / 64))
    back = md.linear_transpose(lambda x: spmd.reshard(x, want), x)(spmd.distribute(weights, MESH, want))[0]
    assert back.spec == have
    numpy.testing.assert_array_equal(back, weights)
    hessian = md.grad(lambda x: np.sum(md.grad(f)(x) * x))(x)
    assert hessian.spec == have
    numpy.testing.assert_allclose(hessian, weights * (np.cos(X / 64) - X / 64 * np.sin(X / 64)))
    md.make_tape(md.grad(f))(x).check()


@each("axis", [0, 1])
@each("want", [P(), P("i"), P("j"), P(("j", "i"))], ids=str)
@each("have", [P("i", "j"), P("i"), P(None, "i"), P(("i", "j"))], ids=str)
def test_elements_of_a_batch(have, want, axis):
    """Under vmap: elements are split as it says; they stay where they are, but along the axes that this takes."""
    a, mesh = numpy.arange(16.0).reshape(4, 4), mesh_of((2, 2))
    x = spmd.distribute(a, mesh, have)
    f = md.vmap(lambda row: spmd.reshard(row, want), in_axes=axis, out_axes=axis)
    batch = tuple(name for name in have.dims(2)[axis] if name not in want.axes)
    expected = P.of_dims((batch, *want.dims(1)) if axis == 0 else (*want.dims(1), batch))
    for run in (f, md.jit(f), md.make_tape(f)(x)):
        (results,) = md.tree.leaves(run(x))
        assert getattr(results, "spec", P()) == expected
        numpy.testing.assert_array_equal(np.asarray(results), a)
    assert spmd.communication(f)(x).counts == spmd.communication(lambda x: spmd.reshard(x, expected))(x).counts
    gradient = md.grad(lambda x: (f(x) * a).sum())(x)
    assert gradient.spec == have
    numpy.testing.assert_array_equal(np.asarray(gradient), a)
    within = md.vmap(md.grad(lambda row: (spmd.reshard(row, want) ** 2).sum()), in_axes=axis, out_axes=axis)
    numpy.testing.assert_array_equal(np.asarray(within(x)), 2 * a)


def test_what_was_whole_gets_a_cotangent_that_is_whole():
    g = md.grad(lambda x: np.sum(spmd.distribute(x, MESH, P("i")) ** 2))(X)
    assert type(g) is numpy.ndarray
    numpy.testing.assert_array_equal(g, 2 * X)
    report = spmd.communication(md.grad(lambda x: np.sum(spmd.distribute(x, MESH, P("i")) ** 2)))(X)
    assert report.counts == {"psum": 1, "all_gather_invariant": 1}


def test_distribute_communicates_nothing():
    assert not spmd.communication(lambda x: spmd.distribute(x, MESH, P("j", "i")))(X).rows
    MESH.reset_calls()
    spmd.distribute(X, MESH, P("j", "i"))
    assert MESH.calls == {}


def test_trees():
    params = spmd.distribute({"w": X, "b": X[0]}, MESH, {"w": P(None, "i"), "b": P("i")})
    assert (params["w"].spec, params["b"].spec) == (P(None, "i"), P("i"))
    whole = spmd.reshard(params, P())
    numpy.testing.assert_array_equal(whole["w"], X)
    replicated = spmd.distribute(X, MESH, P())
    assert type(replicated) is numpy.ndarray and not numpy.shares_memory(replicated, X)


def test_a_shard_map_reshards_its_arguments():
    x = spmd.distribute(X, MESH, P("i"))
    f = spmd.shard_map(lambda x: x, mesh=MESH, in_specs=P(None, "i"), out_specs=P(None, "i"))
    assert spmd.communication(f)(x).counts == {"all_to_all": 1}
    MESH.reset_calls()
    numpy.testing.assert_array_equal(f(x), X)
    assert MESH.calls == {"all_to_all": 1}


ERRORS = {
    "spmd.reshard(X, P('i'))": r"TypeError: is on no mesh.*write distribute\(x, mesh, spec\)",
    "spmd.explain_reshard(X, P('i'))": "TypeError: is on no mesh",
    "spmd.reshard(x, P('z'))": r"ValueError: spec = P\('z'\) names the axis 'z', but the axes of the mesh",
    "spmd.reshard(x, P(None, None, 'i'))": "ValueError: has 3 entries, but reshard: x has 2 dimensions",
    "spmd.reshard(x, 'i')": r"TypeError: spec is 'i', which is not a partition spec; write P\('i'\)$",
    "spmd.explain_reshard(x, 'i')": "TypeError: spec is 'i', which is not a partition spec",
    "spmd.distribute(X, P('i'), MESH)": r"TypeError: mesh is P\('i'\), which is not a mesh: write distribute",
    "spmd.distribute(X, MESH, MESH)": r"TypeError: spec is Mesh\(.*not a partition spec; write P\(\.\.\.\), or",
    "spmd.distribute(X, MESH, P('i', sum='j'))": (
        r"ValueError: spec = P\('i', sum='j'\): sum= adds up partial results .* only for its out_specs; .*: write "
        r"P\('i'\)$"
    ),
    "spmd.reshard(x, P(sum='i'))": r"ValueError: spec = P\(sum='i'\): sum= adds up.* write P\(\)$",
    "spmd.distribute(X[:, :6], MESH, P(None, 'i'))": (
        r"ValueError: dimension 1, of size 6, cannot be split evenly along 'i' \(4\).*make it a multiple of 4"
    ),
}


@each("program", ERRORS)
def test_errors(program):
    check_raises(lambda: eval(program, globals(), {"x": spmd.distribute(X, MESH, P("i"))}), ERRORS[program])


@pytest.mark.parametrize("move", [lambda b: spmd.reshard(b, P("j")), lambda b: spmd.distribute(b, MESH, P("j"))])
def test_blocks_in_a_body_are_moved_by_collectives(move):
    with pytest.raises(
        TypeError,
        match=r"shards whole arrays, outside of any body; in the body of <lambda>, over "
        r"\('i', 'j'\), collectives move blocks: pscatter splits",
    ):
        spmd.shard_map(lambda b: move(b), mesh=MESH, in_specs=P("i"), out_specs=P("i"))(X)
