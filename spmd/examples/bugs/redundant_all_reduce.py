"""Two experts whose features are split, and the all-reduces of the gradient of what both read."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P

mesh, x, w = spmd.make_mesh((2,), ("i",)), np.ones((5, 3)), np.ones((3, 4))


def gradient(entry):
    specs = {"in_specs": (entry, P(None, "i")), "out_specs": P()}
    expert = spmd.shard_map(lambda x, w: psum(np.sum(np.tanh(x @ w)), "i"), mesh, **specs)

    def sum_of_gradients(x):
        x = spmd.distribute(x, mesh, entry)
        return spmd.reshard(md.grad(expert)(x, w) + md.grad(expert)(x, 2 * w), P())

    return sum_of_gradients


for entry in (P(), P(reduced={"i"})):
    compiled = spmd.communication(gradient(entry), optimized=True)(x)
    print(entry, spmd.communication(gradient(entry))(x).counts, gradient(entry)(x).sum().round(6))
    print("compiled", compiled.counts, compiled.bytes, "bytes")
