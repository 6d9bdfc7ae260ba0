"""Tapes and placements, and what they compute and send on any backend."""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.core.types import Var
from spmd.examples.placement import partition_tape, written_placement
from tests.checks.of_whole import gradient
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close

POINT = 2.0, 5.0
FORMULA = md.make_tape(lambda x, y: np.log(x) + x * y - np.sin(y))(*POINT)

ARGS = np.linspace(0.1, 1.0, 6).reshape(2, 3), np.linspace(1.0, 2.0, 6).reshape(3, 2)


def mixed(x, y):
    z = np.tanh(x @ y)
    return np.sum(z * z + np.exp(-z)), md.scan(lambda c, row: (c * row, np.sum(c)), np.ones(3), x)[1], y


TAPE = md.make_tape(mixed)(*ARGS)


def random_placement(seed, ranks):
    return numpy.random.default_rng(seed).integers(ranks, size=len(TAPE.equations)).tolist()


def cut(placement):
    """The number of values and other ranks that need them."""
    owner = {v: rank for eqn, rank in zip(TAPE.equations, placement) for v in eqn.outputs}
    uses = {(a, rank) for eqn, rank in zip(TAPE.equations, placement) for a in eqn.inputs if isinstance(a, Var)}
    return sum(a in owner and owner[a] != rank for a, rank in uses)


@shows("reference", "derivatives", "counts")
def check_placement(mesh, seed):
    placement = random_placement(seed, mesh.size)
    f = partition_tape(TAPE, placement, mesh)
    assert_trees_close(f(*ARGS), list(mixed(*ARGS)), rtol=1e-12)
    assert_trees_close(gradient(f)(*ARGS), gradient(mixed)(*ARGS), rtol=1e-10)
    md.make_tape(gradient(f))(*ARGS).check()
    assert spmd.communication(f)(*ARGS).counts.get("ppermute", 0) == (cut(placement) if mesh.size > 1 else 0)


@shows("reference", "derivatives", "counts")
def check_written_placement(mesh):
    """The program says where it runs: as by the list of these ranks, forward and backward, with the same sends."""
    last = mesh.size - 1

    def layers(x, y):
        with md.place(last):
            hidden = np.tanh(x @ y)
            with md.place(0):
                hidden = hidden * 2.0
        return np.sum(md.scan(lambda c, row: (c * row, np.sin(c)), np.ones(2), hidden)[1])

    tape = md.make_tape(md.value_and_grad(layers, argnums=(0, 1)))(*ARGS)
    placement = written_placement(tape)
    named = [(eqn.primitive.name, rank) for eqn, rank in zip(tape.equations, placement)]
    assert named[:3] == [("matmul", last), ("tanh", last), ("multiply", 0)] and named[-1][0] == "matmul"
    assert {rank for name, rank in named if name == "scan"} == {0} and {rank for _, rank in named[-2:]} == {last}
    value, (dx, dy) = md.value_and_grad(layers, argnums=(0, 1))(*ARGS)
    for ranks in (None, placement):
        f = partition_tape(tape, ranks, mesh)
        assert_trees_close(f(*ARGS), [value, dx, dy], rtol=1e-12)
        calls = spmd.communication(f)(*ARGS).counts
        assert calls.get("ppermute", 0) == (0 if mesh.size == 1 else 2), calls  # the hidden layer, and its cotangent
