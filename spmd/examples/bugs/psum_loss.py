"""The gradient of a summed loss, taken on every rank."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P

mesh, w, data = spmd.make_mesh((2,), ("i",)), 1.0, np.arange(2.0)


def gradient(w, block):
    return md.grad(lambda w: psum(np.sum((w**2 + 1) * block), "i"))(w)


with_types = spmd.shard_map(gradient, mesh, in_specs=(P(), P("i")), out_specs=P())
without = spmd.shard_map(
    lambda w, block: gradient(w, block)[None], mesh, in_specs=(P(), P("i")), out_specs=P("i"), check_rep=False
)
print("with types", with_types(w, data), "without", without(w, data).tolist())
print(md.make_tape(with_types)(w, data))
