"""Split arrays in another way, gather, and pad them: the same array, by the collectives that the rule gives."""

import itertools
import math

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from spmd.sharding.routes import route
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_derivatives
from tests.checks.samples import each
from tests.checks.tree_classes import CLASSES, parts
from tests.programs.on_blocks import assert_trees_close

MESH = mesh(4, 2)
X = numpy.arange(64.0).reshape(8, 8)


def all_specs(axes, ndim):
    """Every way to split `ndim` dimensions along some of the axes."""
    results = []
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), ndim - 1):
                ends = [0, *cuts, count]
                results.append(P(*[tuple(chosen[a:b]) or None for a, b in itertools.pairwise(ends)]))
    return results


@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("shape", [(2,), (2, 2), (4, 2), (2, 2, 2), (2, 1, 2)], ids=str)
def test_every_pair_of_specs(shape, ndim):
    """Each rank gets the block that gathering and splitting would give it, with no more bytes moved."""
    over, x = mesh(*shape), numpy.arange(8.0**ndim).reshape((8,) * ndim)
    placed = {spec: spmd.distribute(x, over, spec) for spec in all_specs(over.axis_names, ndim)}
    pairs = list(itertools.product(placed, repeat=2))
    for have, want in pairs:
        gathered = x.nbytes - x.nbytes // math.prod(over.shape[a] for a in have.axes)
        steps = route(have.dims(ndim), want.dims(ndim), x.nbytes, over.shape)
        assert sum(step.bytes for step in steps) <= gathered, (have, want)
    for have, want in pairs[:: max(1, len(pairs) // 500) | 1]:  # of very many pairs some are carried out, evenly
        y = spmd.reshard(placed[have], want) if have.axes else spmd.distribute(x, over, want)
        assert spmd.spec_of(y) == want
        if want.axes:
            for block, expected in zip(y.local, placed[want].local):
                numpy.testing.assert_array_equal(block, expected)
        numpy.testing.assert_array_equal(y, x)


def test_there_are_as_many_specs_as_there_should_be():
    assert len({*all_specs(("i", "j"), 2)}) == 1 + 2 * 2 + 2 * 3
    assert len({*all_specs(("i", "j", "k"), 3)}) == 1 + 3 * 3 + 6 * 6 + 6 * 10


ROUTES = [
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
]


@each("have, want, counts", ROUTES)
def test_collectives_and_derivatives(have, want, counts):
    """The transpose is the redistribution in reverse: cotangents are split as what they are cotangents of."""
    x, weights = spmd.distribute(X / 64, MESH, have), numpy.cos(X)
    move = lambda x: spmd.reshard(x, want)  # noqa: E731
    MESH.reset_calls()
    move(x)
    assert MESH.calls == spmd.communication(move)(x).counts == counts
    check_derivatives(lambda x: weights * np.sin(move(x)), (x,), lambda x: weights * np.sin(x), (X / 64,))
    back = md.linear_transpose(move, x)(spmd.distribute(weights, MESH, want))[0]
    numpy.testing.assert_array_equal(back, weights)
    assert back.spec == md.grad(lambda x: np.sum(move(x) ** 2))(x).spec == have


@each("want", [P("i", ("k", "j")), P(("i", "j"), "k"), P("i", "k")])
def test_axes_of_one_rank_cost_nothing(want):
    x, move = spmd.distribute(X, mesh(2, 1, 2), P(("j", "i"), "k")), lambda x: spmd.reshard(x, want)
    numpy.testing.assert_array_equal(move(x), X)
    assert (move(x).spec, spmd.communication(move)(x).counts) == (want, {})
    assert md.grad(lambda x: np.sum(move(x) ** 2))(x).spec == x.spec


@each("axis", [0, 1])
@each("want", [P(), P("i"), P("j"), P(("j", "i"))], ids=str)
@each("have", [P("i", "j"), P("i"), P(None, "i"), P(("i", "j"))], ids=str)
def test_elements_of_a_batch(have, want, axis):
    """Under vmap: elements are split as it says; they stay where they are, but along the axes that this takes."""
    a, over = numpy.arange(16.0).reshape(4, 4), mesh(2, 2)
    x, f = spmd.distribute(a, over, have), md.vmap(lambda row: spmd.reshard(row, want), in_axes=axis, out_axes=axis)
    batch = tuple(name for name in have.dims(2)[axis] if name not in want.axes)
    expected = P.of_dims((batch, *want.dims(1)) if axis == 0 else (*want.dims(1), batch))
    for run in (f, md.jit(f), md.make_tape(f)(x)):
        (results,) = md.tree.leaves(run(x))
        assert spmd.spec_of(results) == expected
        assert_trees_close(results, a)
    assert spmd.communication(f)(x).counts == spmd.communication(lambda x: spmd.reshard(x, expected))(x).counts
    gradient = md.grad(lambda x: (f(x) * a).sum())(x)
    assert gradient.spec == have
    within = md.vmap(md.grad(lambda row: (spmd.reshard(row, want) ** 2).sum()), in_axes=axis, out_axes=axis)
    for g in (within, md.jit(within)):
        assert_trees_close((gradient, g(x)), (a, 2 * a))


def test_distribute_communicates_nothing_and_its_cotangent_is_whole():
    split = lambda x: spmd.distribute(x, MESH, P("j", "i"))  # noqa: E731
    MESH.reset_calls()
    split(X)
    assert not spmd.communication(split)(X).rows and MESH.calls == {}
    f = md.grad(lambda x: np.sum(spmd.distribute(x, MESH, P("i")) ** 2))
    assert type(f(X)) is numpy.ndarray and (f(X) == 2 * X).all()
    assert spmd.communication(f)(X).counts == {"psum": 1, "all_gather_invariant": 1}
    replicated = spmd.distribute(X, MESH, P())
    assert type(replicated) is numpy.ndarray and not numpy.shares_memory(replicated, X)
    assert md.vmap(lambda r: spmd.distribute(r, MESH, P("j")))(X).spec == P(None, "j")


def test_a_shard_map_reshards_its_arguments():
    x, f = spmd.distribute(X, MESH, P("i")), mapped(lambda x: x, MESH, P(None, "i"), P(None, "i"))
    MESH.reset_calls()
    numpy.testing.assert_array_equal(f(x), X)
    assert MESH.calls == spmd.communication(f)(x).counts == {"all_to_all": 1}


def test_the_steps_as_text(golden):
    x = spmd.distribute(X, MESH, P("i"))
    golden("routes", "\n".join(str(spmd.explain_reshard(x, want)) for want in (P("j"), P(None, "i"), P("i"))))
    assert repr(spmd.explain_reshard(x, P("i"))) == str(spmd.explain_reshard(x, P("i")))


# ---------------------------------------------------------------- trees, plain in parts


@each("name", CLASSES)
def test_trees_that_are_sharded_in_parts(name):
    make, cls = CLASSES[name]
    x = make(spmd.distribute(X, MESH, P("i")), X)
    whole, again, same = spmd.gather(x), spmd.reshard(x, P(None, "j")), spmd.reshard(x, P())
    assert type(whole) is cls and {type(part) for part in (*parts(whole), parts(same)[1])} == {numpy.ndarray}
    assert [part.spec for part in parts(again)] == [P(None, "j")] * 2
    assert_trees_close([*parts(whole), *parts(again)], [X] * 4)
    if name != "derived field":  # it computes with its arguments
        assert parts(spmd.spec_of(x)) == (P("i"), P())
        f = mapped(lambda x: x, MESH, (spmd.spec_of(x),), spmd.spec_of(x))
        assert parts(f(x))[0].spec == P("i")


def test_what_is_whole_stays_as_it_is():
    x = {"w": X, "n": 3, "name": "text", "nothing": None}
    assert spmd.gather(x) == x and spmd.gather(x)["w"] is X
    assert spmd.reshard({"w": X, "n": 3.0}, P())["w"] is X and spmd.spec_of([X, 1.0]) == [P(), P()]
    with pytest.raises(TypeError):
        spmd.reshard([X, 1.0], [P("i"), P()])
    with pytest.raises(ValueError):
        spmd.reshard([spmd.distribute(X, MESH, P("i")), 1.0], [P(), P(sum="i")])


def test_gathered_arrays_are_copies_and_have_derivatives():
    x = spmd.distribute(X, MESH, P("i"))
    spmd.gather([x])[0][:] = 0.0
    check_derivatives(lambda x: spmd.gather({"x": x, "w": 2.0})["x"], (x,), lambda x: x, (X,))
    assert md.grad(lambda x: np.sum(np.sin(spmd.gather(x))))(x).spec == P("i")
    assert spmd.communication(lambda x: spmd.gather([x, X]))(x).counts == {"all_gather_invariant": 1}
    specs = []
    md.grad(lambda x: specs.append(spmd.spec_of((x, X))) or np.sum(x))(x)
    assert specs == [(P("i"), P())]


# ---------------------------------------------------------------- pad


@each("spec", [P("i"), P(None, "j"), P("i", "j"), P(("i", "j")), P(), P(None, ("j", "i"))])
def test_padded_arrays_and_masks(spec):
    x, over = numpy.arange(1.0, 36.0).reshape(5, 7), mesh(2, 3)
    padded, mask = spmd.pad(x, over, spec)
    whole, where = spmd.gather((padded, mask))
    numbers = [math.prod(over.shape[a] for a in axes) for axes in spec.dims(2)]
    assert spmd.spec_of(padded) == spec and whole.shape == tuple(-(-n // k) * k for n, k in zip(x.shape, numbers))
    assert numpy.broadcast_shapes(whole.shape, where.shape) == whole.shape
    numpy.testing.assert_array_equal(whole[numpy.broadcast_to(where, whole.shape)].reshape(5, 7), x)
    assert whole.sum() == x.sum() and float(np.mean(padded, where=mask)) == x.mean()


def test_what_is_divided_is_not_padded():
    for rows in (8, 0):
        x, mask = spmd.pad(numpy.ones((rows, 3)), MESH, P("i"))
        assert (x.shape, mask.shape) == ((rows, 3), (rows, 1)) and mask.gather().all()


def test_padded_trees_and_other_fillings():
    tree = {"x": numpy.arange(3.0), "y": (numpy.arange(6), 2.0)}
    padded, mask = spmd.pad(tree, MESH, {"x": P("i"), "y": (P("i"), P())}, mode="edge")
    assert spmd.gather(padded["x"]).tolist() == [0, 1, 2, 2] and padded["y"][1] == 2.0
    assert spmd.gather(mask["x"]).tolist() == [True, True, True, False] and mask["y"][0].shape == (8,)
    assert spmd.gather(spmd.pad(numpy.arange(3), MESH, P("i"), constant_values=-1)[0]).tolist() == [0, 1, 2, -1]
    assert spmd.pad((), MESH, P("i")) == ((), ())


def test_derivatives_through_padding_which_sends_nothing():
    def loss(x):
        padded, mask = spmd.pad(x, MESH, P("i"), mode="edge")
        return np.mean(np.log(padded) ** 2, where=mask)

    x = numpy.arange(1.0, 7.0)
    check_derivatives(loss, (x,), lambda x: np.mean(np.log(x) ** 2))
    assert spmd.communication(lambda x: spmd.pad(x, MESH, P("i")))(x).counts == {}
    assert spmd.communication(loss)(x).counts == {"psum": 2}
