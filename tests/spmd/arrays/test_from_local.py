"""Sharded arrays from the ranks' blocks; tests/messages/sharded_arrays.md has the texts of errors."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.samples import each
from tests.checks.tree_classes import CLASSES, parts

MESH = mesh(4, 2)
SPECS = [P("i"), P(None, "j"), P("i", "j"), P("j", "i"), P(("j", "i")), P(("i", "j")), P(None, ("i", "j"))]
ONES = [numpy.ones(2)] * 8


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
        assert type(parts(y)[0]) is numpy.ndarray and (parts(y)[1].spec, parts(y)[1].shape) == (P("j"), (6,))


def test_blocks_are_copied():
    block = numpy.zeros(2)
    x, whole = spmd.from_local([block] * 8, MESH, P("i")), spmd.from_local([block] * 8, MESH, P())
    block[:] = 1.0
    assert x.gather().sum() == whole.sum() == 0.0


def test_an_array_of_blocks_has_derivatives_and_may_be_a_constant():
    w = spmd.from_local([numpy.full(2, i // 2 + 1.0) for i in range(8)], MESH, P("i"))
    g = md.grad(lambda w: np.sum(w**3))(w)
    assert g.spec == P("i")
    numpy.testing.assert_allclose(g, 3 * w.gather() ** 2)
    constant = md.grad(lambda s: np.sum(s * spmd.from_local(w.local, MESH, P("i"))))
    assert constant(1.0) == md.jit(constant)(1.0) == 20.0


def test_a_function_of_the_rank():
    x = spmd.from_local(lambda rank: {"x": numpy.full((1, 2), rank), "n": 3}, MESH, {"x": P(("i", "j")), "n": P()})
    assert x["x"].gather()[:, 1].tolist() == [*range(8)] and x["n"] == 3
    row = spmd.from_local(lambda rank: numpy.unravel_index(rank, (4, 2))[0] + numpy.ones(2), MESH, P("i"))
    assert row.shape == (8,) and row.local[-1].tolist() == [4.0, 4.0]


#: Blocks, a spec, and the error.
WRONG = {
    "no list": (numpy.ones((8, 2)), P("i"), ValueError),
    "too few": (ONES[1:], P("i"), ValueError),
    "other shapes": ([*ONES[:2], numpy.ones(3), *ONES[:5]], P("i"), ValueError),
    "other shapes of a function": (lambda rank: numpy.ones(2 + (rank == 2)), P("i"), ValueError),
    "other values of a function": (lambda rank: rank, P(), ValueError),
    "other dtypes": ([*ONES[:7], numpy.ones(2, int)], P("i"), ValueError),
    "no array": ([*ONES[:7], "text"], P("i"), ValueError),
    "text": (["text"] * 8, P("i"), TypeError),
    "structures": ([[1.0]] * 7 + [[1.0, 2.0]], P(), ValueError),
    "other values along j": ([numpy.full(2, rank) for rank in range(8)], P("i"), ValueError),
    "other values of what is replicated": ([1.0] * 7 + [2.0], P(), ValueError),
    "another axis": (ONES, P("z"), ValueError),
    "a sum": (ONES, P(sum="i"), ValueError),
    "dimensions": (ONES, P(None, "i"), ValueError),
    "no spec": (ONES, "i", TypeError),
    "sharded": ([spmd.distribute(numpy.ones(4), MESH, P("i"))] * 8, P("i"), TypeError),
}


@each("blocks, spec, error", WRONG.values(), ids=WRONG)
def test_blocks_that_make_no_array(blocks, spec, error):
    with pytest.raises(error):
        spmd.from_local(blocks, MESH, spec)


@pytest.mark.parametrize("transform", [md.jit, md.grad, md.vmap])
def test_blocks_that_are_traced(transform):
    with pytest.raises(TypeError):
        transform(lambda x: np.sum(spmd.from_local([x] * 8, MESH, P())))(np.ones((2, 2)))
