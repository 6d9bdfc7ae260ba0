"""Writes into other arrays do not change a sharded array, on any backend."""

from __future__ import annotations

import pickle

import numpy

import minidiff as md
import spmd
from collectives import pbroadcast, psum
from spmd import P
from tests.checks.meshes import mapped
from tests.checks.properties import shows
from tests.checks.whole import whole

SPECS = {"P()": P(), "i": P("i"), "j": P("j"), "ij": P(("i", "j")), "reduced": P(reduced={"i"})}


def numbers(mesh: spmd.Mesh) -> numpy.ndarray:
    return numpy.arange(4.0 * mesh.size).reshape(-1, 2)


def local_blocks(x: spmd.ShardedArray) -> list[numpy.ndarray]:
    return x.local if isinstance(x.local, list) else [x.local]


#: Ways to make an array of a mesh, a spec and a plain array that is written into afterwards.
MADE = {
    "distribute": lambda mesh, spec, a: spmd.distribute(a, mesh, spec),
    "from_local": lambda mesh, spec, a: spmd.from_local(lambda rank: a, mesh, spec),
    "reshard": lambda mesh, spec, a: spmd.reshard(spmd.distribute(a, mesh, P()), P()),
    "an argument": lambda mesh, spec, a: mapped(lambda x: x, mesh, spec, spec)(a),
    "pbroadcast": lambda mesh, spec, a: mapped(lambda x: pbroadcast(x, "i"), mesh, P(), P("i"))(a),
    "closed over": lambda mesh, spec, a: mapped(lambda: a, mesh, (), spec)(),
    "closed over, a view": lambda mesh, spec, a: mapped(lambda: a.T[::-1].T, mesh, (), spec)(),
    "jit": lambda mesh, spec, a: md.jit(mapped(lambda x: x, mesh, spec, spec))(a),
    "vjp": lambda mesh, spec, a: md.vjp(mapped(lambda x: x, mesh, spec, spec), a)[0],
    "initialize": lambda mesh, spec, a: spmd.random.initialize(lambda x: x, mesh, spec)(a),
    "update": lambda mesh, spec, a: spmd.distribute(0 * a, mesh, P(tuple(mesh.axis_names))).at[:].set(a),
}

#: What comes out of a sharded array.
OUT = {
    "local": local_blocks,
    "gather": lambda x: x.gather(),
    "asarray": lambda x: numpy.asarray(x),
    "reshard": lambda x: spmd.reshard(x, P()),
    "an index": lambda x: x[:2],
    "iteration": list,
    "a sum": lambda x: mapped(lambda b: psum(b, x.mesh.axis_names), x.mesh, x.spec, P())(x),
    "untyped": lambda x: mapped(lambda b: b, x.mesh, x.spec, P(), check_rep=False)(x),
    "a plain and a sharded result": lambda x: mapped(lambda b: (b, b), x.mesh, x.spec, (P(), x.spec), check_rep=False)(
        2 * x
    ),
    "jit": lambda x: md.jit(lambda x: spmd.reshard(x, P()))(x),
    "vjp": lambda x: md.vjp(lambda x: x, x)[0],
    "local after pickle": lambda x: local_blocks(pickle.loads(pickle.dumps(x))),
}

#: Here only values and types that allow it raise nothing else.
NOT_EVERYWHERE = {"asarray", "a sum", "reshard", "jit", "local after pickle"}


@shows("memory")
def check_made(mesh: spmd.Mesh, name: str) -> None:
    """Check that a later write into the plain array changes nothing, and that blocks are read-only."""
    for spec in SPECS.values():
        if not spec.axes.union(spec.reduced) <= {*mesh.axis_names}:
            continue
        a = numbers(mesh)
        y = MADE[name](mesh, spec, a)
        before = whole(y).copy()
        a[...] = -1
        assert numpy.array_equal(whole(y), before), (name, spec)
        if isinstance(y, spmd.ShardedArray):
            assert not any(block.flags.writeable for block in local_blocks(y)), (name, spec)
        else:
            y[...] = -2  # it is the user's own
            assert not (a == -2).any()


@shows("memory")
def check_out(mesh: spmd.Mesh, name: str) -> None:
    """Check that writing into what comes out of a sharded array fails, or does not change it."""
    for spec in SPECS.values():
        x = spmd.distribute(numbers(mesh), mesh, spec)
        if not isinstance(x, spmd.ShardedArray):
            continue
        before = whole(x)
        try:
            actual = OUT[name](x)
        except (TypeError, ValueError):
            assert name in NOT_EVERYWHERE
            continue
        for y in md.tree.leaves(actual):
            if isinstance(y, numpy.ndarray) and y.flags.writeable:
                y[...] = -1
        assert numpy.array_equal(whole(x), before), (name, spec)
        if name == "a plain and a sharded result":
            assert numpy.array_equal(whole(actual[1]), 2 * before), spec
