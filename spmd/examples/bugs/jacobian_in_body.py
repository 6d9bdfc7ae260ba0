"""Jacobians in the body of a shard_map, by reverse and by forward mode."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast
from spmd import P

mesh, w, x = spmd.make_mesh((2,), ("i",)), np.ones(3), np.arange(12.0).reshape(4, 3)


def on_ranks(body):
    return spmd.shard_map(body, mesh, in_specs=(P(), P("i")), out_specs=P("i"))(w, x)


for jacobian in (md.jacrev, md.jacfwd):
    line = jacobian(lambda t: np.zeros(4) + t * np.arange(4))
    varying = on_ranks(lambda w, x, of=jacobian: of(lambda w: x @ w)(pbroadcast(w, "i")))
    other = on_ranks(lambda w, x, of=jacobian: of(lambda w: x @ w)(w))
    print(spmd.shard_map(line, mesh, in_specs=P(), out_specs=P())(1.0), varying.tolist() == x.tolist(), other.tolist())
