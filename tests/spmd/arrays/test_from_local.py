"""Sharded arrays from the ranks' blocks; tests/messages/sharded_arrays.md has what makes none, and the errors."""

import numpy
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


@settings(max_examples=20, deadline=None)
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


def test_blocks_are_copied_and_have_derivatives():
    blocks = [numpy.full(2, i // 2 + 1.0) for i in range(8)]
    w, expected = spmd.from_local(blocks, MESH, P("i")), numpy.repeat([1.0, 2, 3, 4], 2)
    blocks[0][:] = 7.0
    g = md.grad(lambda w: np.sum(w**3))(w)
    assert g.spec == P("i")
    numpy.testing.assert_allclose(g, 3 * expected**2)
    constant = md.grad(lambda s: np.sum(s * spmd.from_local(w.local, MESH, P("i"))))
    assert constant(1.0) == md.jit(constant)(1.0) == 20.0


def test_a_function_of_the_rank():
    x = spmd.from_local(lambda rank: {"x": numpy.full((1, 2), rank), "n": 3}, MESH, {"x": P(("i", "j")), "n": P()})
    assert x["x"].gather()[:, 1].tolist() == [*range(8)] and x["n"] == 3
