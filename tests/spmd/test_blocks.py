"""Sharded arrays from blocks and back; whole arrays, specs and redistribution of trees that are sharded in parts."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.samples import each
from tests.checks.tree_classes import CLASSES, parts

MESH = spmd.make_mesh((4, 2), ("i", "j"), backend="simulated")
X = numpy.arange(64.0).reshape(8, 8)
SPECS = [P("i"), P(None, "j"), P("i", "j"), P("j", "i"), P(("j", "i")), P(("i", "j")), P(None, ("i", "j"))]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SPECS), st.sampled_from([float, numpy.int8, bool, numpy.complex64]), st.integers(0, 2**32 - 1))
def test_from_local_and_local_are_inverse(spec, dtype, seed):
    whole = numpy.random.default_rng(seed).normal(size=(8, 8)).astype(dtype)
    x = spmd.distribute(whole, MESH, spec)
    MESH.reset_calls()
    y = spmd.from_local(x.local, MESH, spec)
    assert (y.spec, y.type, y.mesh) == (x.spec, x.type, x.mesh) and MESH.calls == {}
    numpy.testing.assert_array_equal(y, whole)
    numpy.testing.assert_array_equal(y.local, x.local)


@each("name", CLASSES)
def test_trees_of_blocks(name):
    make, cls = CLASSES[name]
    blocks = [make(numpy.full(2, rank), numpy.ones(3)) for rank in range(8)]
    x = spmd.from_local(blocks, MESH, P(("i", "j")))
    assert type(x) is cls and [a.shape for a in parts(x)] == [(16,), (24,)]
    assert parts(x)[0].gather().tolist() == [rank // 2 for rank in range(16)]
    if name != "derived field":  # it computes with its arguments
        y = spmd.from_local(blocks[:1] * 8, MESH, make(P(None), P("j")))
        assert type(parts(y)[0]) is numpy.ndarray and parts(y)[1].spec == P("j") and parts(y)[1].shape == (6,)


def test_blocks_are_copied():
    block = numpy.zeros(2)
    x, whole = spmd.from_local([block] * 8, MESH, P("i")), spmd.from_local([block] * 8, MESH, P())
    block[:] = 1.0
    assert x.gather().sum() == whole.sum() == 0.0


def test_an_array_of_blocks_is_used_as_any_other():
    w = spmd.from_local([numpy.full(2, i // 2 + 1.0) for i in range(8)], MESH, P("i"))
    assert (md.grad(lambda w: np.sum(w**3))(w)).spec == P("i")
    numpy.testing.assert_allclose(md.grad(lambda w: np.sum(w**3))(w), 3 * w.gather() ** 2)
    constant = md.grad(lambda s: np.sum(s * spmd.from_local(w.local, MESH, P("i"))))
    assert constant(1.0) == md.jit(constant)(1.0) == 20.0


def test_a_function_of_the_rank():
    """Each rank's block is a tree, the same as on MPI ranks."""
    x = spmd.from_local(lambda rank: {"x": numpy.full((1, 2), rank), "n": 3}, MESH, {"x": P(("i", "j")), "n": P()})
    assert x["x"].gather()[:, 1].tolist() == [*range(8)] and x["n"] == 3
    row = spmd.from_local(lambda rank: numpy.unravel_index(rank, (4, 2))[0] + numpy.ones(2), MESH, P("i"))
    assert row.shape == (2 * MESH.shape["i"],) and row.local[-1].tolist() == [MESH.shape["i"]] * 2


ONES = [numpy.ones(2)] * 8
ERRORS = {
    "no list": (
        numpy.ones((8, 2)),
        P("i"),
        ValueError,
        r"all 8 of them need a block, and got a ndarray; pass a function.*in rank order, like \.local",
    ),
    "too few": (ONES[1:], P("i"), ValueError, "got 7 of them"),
    "shapes": (
        [*ONES[:2], numpy.ones(3), *ONES[:5]],
        P("i"),
        ValueError,
        r"blocks of different types: ranks 0, 1, 3.*: block: f64\[2\]; rank 2: block: f64\[3\]$",
    ),
    "of a function": (lambda rank: numpy.ones(2 + (rank == 2)), P("i"), ValueError, r"rank 2: block: f64\[3\]$"),
    "copies of a function": (lambda rank: rank, P(), ValueError, r"different values of block: i64\[\]: rank 0"),
    "dtypes": ([*ONES[:7], numpy.ones(2, int)], P("i"), ValueError, r"rank 7: block: i64\[2\]"),
    "no array": ([*ONES[:7], "text"], P("i"), ValueError, "rank 7: block: a str"),
    "text": (["text"] * 8, P("i"), TypeError, "from_local: block: expected an array or a number, got str"),
    "structures": ([[1.0]] * 7 + [[1.0, 2.0]], P(), ValueError, r"6: nothing more; rank 7: block\[1\]: f64\[\]$"),
    "not the same": (
        [numpy.full(2, rank) for rank in range(8)],
        P("i"),
        ValueError,
        r"different values of block: i64\[2\]: rank 0: \w+; rank 1: \w+",
    ),
    "replicated": ([1.0] * 7 + [2.0], P(), ValueError, r"values of block: f64\[\]: ranks 0, .*6: \w+; rank 7"),
    "axis": (ONES, P("z"), ValueError, r"spec = P\('z'\) names the axis 'z'"),
    "sum": (ONES, P(sum="i"), ValueError, "sum= adds up partial results"),
    "dimensions": (ONES, P(None, "i"), ValueError, "has 2 entries, but block has 1 dimension"),
    "no spec": (ONES, "i", TypeError, r"write P\('i'\)"),
    "sharded": ([spmd.distribute(X, MESH, P("i"))] * 8, P("i"), TypeError, "but must be a rank's plain array"),
}


@each("blocks, spec, error, message", ERRORS.values(), ids=ERRORS)
def test_blocks_that_make_no_array(blocks, spec, error, message):
    with pytest.raises(error, match=message):
        spmd.from_local(blocks, MESH, spec)


@pytest.mark.parametrize("transform", [md.jit, md.grad, md.vmap])
def test_blocks_that_are_traced(transform):
    f = transform(lambda x: np.sum(spmd.from_local([x] * 8, MESH, P())))
    with pytest.raises(TypeError, match=r"block has type f64.*traced.*whole arrays, call distribute\(x, mesh, spec\)"):
        f(np.ones((2, 2)))


def in_a_body(call):
    f = spmd.shard_map(lambda x: call(x), mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(TypeError, match="outside of any body"):
        f(numpy.ones(4))


def test_in_a_body():
    in_a_body(spmd.gather)
    in_a_body(lambda x: spmd.from_local(x, MESH, P("i")))


def test_no_mesh():
    with pytest.raises(TypeError, match=r"from_local: mesh is P\('i'\), which is not a mesh: write from_local\("):
        spmd.from_local(ONES, P("i"), MESH)


# ---------------------------------------------------------------- what is plain or replicated


@each("name", CLASSES)
def test_trees_that_are_sharded_in_parts(name):
    make, cls = CLASSES[name]
    x = make(spmd.distribute(X, MESH, P("i")), X)
    whole = spmd.gather(x)
    assert type(whole) is cls
    for part in parts(whole):
        assert type(part) is numpy.ndarray
        numpy.testing.assert_array_equal(part, X)
    again = spmd.reshard(x, P(None, "j"))
    assert [part.spec for part in parts(again)] == [P(None, "j")] * 2
    numpy.testing.assert_array_equal(parts(again)[1], X)
    same = spmd.reshard(x, P())
    assert type(parts(same)[1]) is numpy.ndarray
    if name != "derived field":  # it computes with its arguments
        assert parts(spmd.spec_of(x)) == (P("i"), P())
        f = spmd.shard_map(lambda x: x, mesh=MESH, in_specs=(spmd.spec_of(x),), out_specs=spmd.spec_of(x))
        assert parts(f(x))[0].spec == P("i")


def test_what_is_whole_stays_as_it_is():
    x = {"w": X, "n": 3, "name": "text", "nothing": None}
    actual = spmd.gather(x)
    assert actual == x and actual["w"] is X
    assert spmd.reshard({"w": X, "n": 3.0}, P())["w"] is X and spmd.spec_of([X, 1.0]) == [P(), P()]
    with pytest.raises(TypeError, match=r"reshard: x\[0\] has type .* is on no mesh.*distribute"):
        spmd.reshard([X, 1.0], [P("i"), P()])
    with pytest.raises(ValueError, match="sum= adds up"):
        spmd.reshard([spmd.distribute(X, MESH, P("i")), 1.0], [P(), P(sum="i")])


def test_what_is_gathered_is_free_to_be_written_into():
    x = spmd.distribute(X, MESH, P("i"))
    spmd.gather([x])[0][:] = 0.0
    assert x.gather().sum() == X.sum()


@pytest.mark.parametrize("spec", [P("i"), P("i", "j"), P()], ids=str)
def test_gather_of_results(spec):
    f = spmd.shard_map(lambda x: x, mesh=MESH, in_specs=P(), out_specs=spec, check_rep=False)
    assert type(spmd.gather(f(X))) is numpy.ndarray


def test_gather_under_transformations():
    x = spmd.distribute(X, MESH, P("i"))
    loss = lambda x: np.sum(np.sin(spmd.gather({"x": x, "w": 2.0})["x"]))  # noqa: E731
    for f in (md.grad(loss), md.jit(md.grad(loss)), md.grad(md.jit(loss))):
        assert f(x).spec == P("i")
        numpy.testing.assert_allclose(f(x), numpy.cos(X))
    assert spmd.communication(lambda x: spmd.gather([x, X]))(x).counts == {"all_gather_invariant": 1}
    specs = []
    md.grad(lambda x: specs.append(spmd.spec_of((x, X))) or np.sum(x))(x)
    assert specs == [(P("i"), P())]
