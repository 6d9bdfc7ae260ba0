"""shard_maps one after the other are joined, where nothing is between them."""

import numpy as np

import minidiff as md
import spmd
from collectives import psum
from spmd import P
from tests.checks.results import assert_trees_close
from tests.checks.rewrites import IJ, mapped


def shard_maps(tape):
    return [eqn.primitive.name for eqn in tape.equations].count("shard_map")


def test_joined():
    one, two = mapped(lambda x: np.sin(x)), mapped(lambda x: psum(x, "i"), out_specs=P("j"))
    moved = mapped(lambda x: x * 2, P(("j", "i")), P(("j", "i")))
    total, scaled = mapped(lambda x: psum(x.sum(), IJ), out_specs=P()), mapped(lambda x, c: x * c, (P(IJ), P()))
    x = np.arange(16.0)
    for f, expected in [
        (lambda x: two(one(x)), 1),
        (lambda x: two(one(x) * 2.0), None),
        (lambda x: two(moved(one(x))), 1),  # blocks go from rank to rank in between, by a ppermute
        (lambda x: (one(x), moved(x), two(x)), 1),
        (lambda x: (two(x), two(one(x)), two(x[::-1])), 1),
        (lambda x: one(one(x)), 1),
        (lambda x: scaled(x, np.sin(total(x))), 2),
    ]:
        tape = spmd.rewritten(f)(x)
        tape.check()
        assert expected is None or shard_maps(tape) == expected
        assert all(eqn.params.get("call") is None for eqn in tape.equations)  # ranks in one process compare nothing
        assert_trees_close(tape(x), md.tree.leaves(f(x)))
        assert_trees_close(md.jit(f)(x), f(x))
    assert shard_maps(spmd.rewritten(lambda x: two(one(x)), without=("fuse shard maps",))(x)) == 2
