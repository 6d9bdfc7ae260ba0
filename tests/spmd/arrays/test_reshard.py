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
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.checks.tree_classes import CLASSES, parts

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


@pytest.mark.parametrize("shape, ndim", [((2,), 2), ((4, 2), 2), ((2, 2), 3), ((2, 2, 2), 2), ((2, 1, 2), 3)], ids=str)
def test_every_pair_of_specs(shape, ndim):
    """Each rank gets the block that gathering and splitting would give it, with no more bytes moved."""
    over, x = mesh(*shape), numpy.arange(8.0**ndim).reshape((8,) * ndim)
    placed = {spec: spmd.distribute(x, over, spec) for spec in all_specs(over.axis_names, ndim)}
    pairs = list(itertools.product(placed, repeat=2))
    for have, want in pairs:
        gathered = x.nbytes - x.nbytes // math.prod(over.shape[a] for a in have.axes)
        steps = route(have.dims(ndim), want.dims(ndim), x.nbytes, over.shape)
        assert sum(step.bytes for step in steps) <= gathered, (have, want)
    for have, want in pairs[:: max(1, len(pairs) // 200) | 1]:  # of very many pairs some are carried out, evenly
        y = spmd.reshard(placed[have], want) if have.axes else spmd.distribute(x, over, want)
        assert spmd.spec_of(y) == want
        if want.axes:
            for block, expected in zip(y.local, placed[want].local):
                numpy.testing.assert_array_equal(block, expected)
        numpy.testing.assert_array_equal(y, x)


def resharded(want):
    return lambda x: spmd.reshard(x, want)


def logarithms(x, where=True):
    return np.mean(np.log(x + 1) ** 2, where=where)


def of_padded(x):
    padded, mask = spmd.pad(x, MESH, P("i"), mode="edge")
    return logarithms(padded, mask)


SAME = lambda x: x  # noqa: E731
GATHER = {"all_gather_invariant": 1}
#: How an array is split, or None; a function of it, and of the whole array; what is communicated.
ROUTES = [
    (P("i"), resharded(P("i", "j")), SAME, {}),
    (P("i"), resharded(P(("i", "j"))), SAME, {}),
    (P("i", "j"), resharded(P("i")), SAME, GATHER),
    (P("i", "j"), resharded(P()), SAME, {"all_gather_invariant": 2}),
    (P(("i", "j")), resharded(P()), SAME, GATHER),
    (P("i"), resharded(P(None, "i")), SAME, {"all_to_all": 1}),
    (P(("i", "j")), resharded(P(None, ("i", "j"))), SAME, {"all_to_all": 1}),
    (P(("i", "j")), resharded(P("i", "j")), SAME, {"all_to_all": 1}),
    (P(("i", "j")), resharded(P(("j", "i"))), SAME, GATHER),
    (P("i"), resharded(P("j")), SAME, GATHER),
    (P("i", "j"), resharded(P("j", "i")), SAME, {**GATHER, "all_to_all": 1}),
    (P("i"), mapped(SAME, MESH, P(None, "i"), P(None, "i")), SAME, {"all_to_all": 1}),
    (None, lambda x: spmd.distribute(x, MESH, P("j", "i")), SAME, {}),
    (None, lambda x: spmd.distribute(x, MESH, P()), SAME, {}),
    (None, lambda x: spmd.pad(x, MESH, P("i"))[0][:5], lambda x: x[:5], GATHER),
    (None, of_padded, logarithms, {"psum": 2}),
]


@each("have, f, whole, counts", ROUTES)
def test_collectives_and_derivatives(have, f, whole, counts):
    """The transpose is the redistribution in reverse: cotangents are split as what they are cotangents of."""
    x = X / 64 if have is None else spmd.distribute(X / 64, MESH, have)
    MESH.reset_calls()
    y = f(x)
    assert MESH.calls == spmd.communication(f)(x).counts == counts
    assert type(y) is not numpy.ndarray or not numpy.shares_memory(y, x)
    check_derivatives(f, (x,), whole, (X / 64,))
    assert spmd.spec_of(md.grad(lambda x: np.sum(f(x) ** 2))(x)) == spmd.spec_of(x)


@each("number, case", enumerate(itertools.product([P("i", "j"), P("i"), P(None, "i")], [P(), P("i"), P("j")])))
def test_elements_of_a_batch(number, case):
    """Under vmap: elements are split as it says; they stay where they are, but along the axes that this takes."""
    (have, want), axis = case, number % 2
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
    assert_trees_close((gradient, within(x), md.jit(within)(x)), (a, 2 * a, 2 * a))


def test_gathering_has_derivatives_and_is_counted_in_programs():
    x, f = spmd.distribute(X, MESH, P("i")), lambda x: spmd.gather({"x": x, "w": 2.0})["x"]
    check_derivatives(f, (x,), SAME, (X,))
    assert spmd.communication(f)(x).counts == GATHER


def test_the_steps_as_text(golden):
    x = spmd.distribute(X, MESH, P("i"))
    golden("routes", "\n".join(str(spmd.explain_reshard(x, want)) for want in (P("j"), P(None, "i"), P("i"))))


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
    with pytest.raises(ValueError):
        spmd.reshard([spmd.distribute(X, MESH, P("i")), 1.0], [P(), P(sum="i")])


# ---------------------------------------------------------------- pad


@each("spec", [P("i"), P("i", "j"), P(("i", "j")), P(), P(None, ("j", "i"))])
def test_padded_arrays_and_masks(spec):
    x, over = numpy.arange(1.0, 36.0).reshape(5, 7), mesh(2, 3)
    padded, mask = spmd.pad(x, over, spec)
    whole, where = spmd.gather((padded, mask))
    numbers = [math.prod(over.shape[a] for a in axes) for axes in spec.dims(2)]
    assert spmd.spec_of(padded) == spec and whole.shape == tuple(-(-n // k) * k for n, k in zip(x.shape, numbers))
    numpy.testing.assert_array_equal(whole[numpy.broadcast_to(where, whole.shape)].reshape(5, 7), x)
    assert whole.sum() == x.sum() and float(np.mean(padded, where=mask)) == x.mean()


def test_padded_trees_and_other_fillings():
    tree = {"x": numpy.arange(3.0), "y": (numpy.ones((0, 3)), 2.0)}
    padded, mask = spmd.pad(tree, MESH, {"x": P("i"), "y": (P("i"), P())}, mode="edge")
    assert spmd.gather(padded["x"]).tolist() == [0, 1, 2, 2] and padded["y"][1] == 2.0
    assert spmd.gather(mask["x"]).tolist() == [True, True, True, False] and mask["y"][0].shape == (0, 1)
    assert spmd.gather(spmd.pad(numpy.arange(3), MESH, P("i"), constant_values=-1)[0]).tolist() == [0, 1, 2, -1]
    assert spmd.pad((), MESH, P("i")) == ((), ())
