"""Norms over a batch that is split, and recurrences along sequences that are split: on any backend."""

import math

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean
from minidiff.nn import batch_norm, conv, max_pool
from spmd import P
from spmd.examples.recurrence import prefix_scan
from tests.checks.of_whole import check_agree, gradient
from tests.checks.properties import shows


@shows("reference", "derivatives", "modes", "counts")
def check_batch_norm(mesh):
    """In a body by one psum of two moments, and of a sharded array: values, gradients, statistics, messages."""
    rng = numpy.random.default_rng(0)
    x, scale, bias = rng.normal(2, 3, size=(4 * mesh.size, 3, 5)), rng.normal(size=5), rng.normal(size=5)

    def body(x, scale, bias):
        return batch_norm(x, scale, bias, average=lambda moments: pmean(moments, "i"))

    mapped = spmd.shard_map(body, mesh, in_specs=(P("i"), P(), P()), out_specs=(P("i"), P()))
    for f, inputs in (mapped, x), (batch_norm, spmd.distribute(x, mesh, P("i"))):
        check_agree(f, batch_norm, (x, scale, bias), (inputs, scale, bias))
    report = spmd.communication(mapped)(x, scale, bias)
    assert [(row.collective, row.bytes) for row in report.rows if row.bytes] == [("psum", 2 * 5 * 8)] * (mesh.size > 1)


@shows("reference", "derivatives", "counts")
def check_sharded_conv(mesh):
    """A convolution of a sharded array, outside of bodies: split along the batch it sends nothing but gradients."""
    rng = numpy.random.default_rng(0)
    x, kernel = rng.normal(size=(2 * mesh.size, 6, 5, 3)), rng.normal(size=(3, 2, 3, 4))
    blocks = spmd.distribute(x, mesh, P("i"))

    def layer(x, kernel):
        return max_pool(conv(x, kernel, stride=(1, 2), dilation=2), (2, 2), 1)

    assert layer(blocks, kernel).spec == P("i")
    check_agree(layer, layer, (x, kernel), (blocks, kernel))
    assert not spmd.communication(layer)(blocks, kernel).counts
    assert set(spmd.communication(gradient(layer))(blocks, kernel).counts) <= {"psum"}


def matrices(a, b):
    """Products of matrices: associative, and not commutative."""
    return b @ a


def affine(a, b):
    """The composition of functions x -> decay * x + bias, `a` first: a recurrence with a decay for each step."""
    return {"decay": a["decay"] * b["decay"], "bias": b["decay"] * a["bias"] + b["bias"]}


RNG = numpy.random.default_rng(1)
#: name: (an associative function, elements along the first axis of length 24)
RECURRENCES = {
    "sums": (np.add, RNG.normal(size=(24, 3))),
    "largest": (np.maximum, RNG.normal(size=24)),
    "matrices": (matrices, np.eye(2) + 0.3 * RNG.normal(size=(24, 2, 2))),
    "affine": (affine, {"decay": RNG.uniform(0.5, 1, size=(24, 2)), "bias": RNG.normal(size=(24, 2))}),
}


def by_loop(fn, elems):
    at = lambda n: md.tree.map(lambda x: x[n : n + 1], elems)  # noqa: E731
    states = [at(0)]
    for n in range(1, len(md.tree.leaves(elems)[0])):
        states.append(fn(states[-1], at(n)))
    return md.tree.map(lambda *xs: np.concatenate(xs), *states)


@shows("reference", "derivatives", "modes", "counts")
def check_recurrence(mesh, name, sequential):
    """Prefixes and their gradients are those of the loop; the messages are those of the module's table."""
    fn, elems = RECURRENCES[name]
    split = spmd.shard_map(lambda x: prefix_scan(fn, x, "i", sequential), mesh, in_specs=P("i"), out_specs=P("i"))
    for f in (split, lambda x: prefix_scan(fn, x, sequential=sequential)):
        check_agree(f, lambda x: by_loop(fn, x), (elems,))
    leaves = md.tree.leaves(elems)
    rounds = math.ceil(math.log2(mesh.size)) + 1 if mesh.size > 1 else 0
    rows = [row for row in spmd.communication(gradient(split))(elems).rows if row.collective == "ppermute"]
    for direction in ("forward", "backward"):
        those = [row for row in rows if row.direction == direction]
        assert sum(row.count for row in those) == rounds * len(leaves)
        assert sum(row.bytes for row in those) == rounds * sum(x[:1].nbytes for x in leaves)
