"""Two layers whose features are split, and a bias that all ranks have."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum, unreduced
from spmd import P

mesh, x, b = spmd.make_mesh((2,), ("i",)), np.ones((1, 3)), np.array([1.0, 2.0])
w1, w2 = np.arange(12.0).reshape(3, 4) / 10, np.arange(8.0).reshape(4, 2) / 10


def gradients(body):
    layers = spmd.shard_map(body, mesh, in_specs=(P(), P(), P(None, "i"), P("i")), out_specs=P())
    dx, db = md.grad(lambda x, b: np.sum(layers(x, b, w1, w2) ** 2), argnums=(0, 1))(x, b)
    print("dx", dx.round(2).tolist(), "db", db.round(2).tolist())


dx, db = md.grad(lambda x, b: np.sum((x @ w1 @ w2 + b) ** 2), argnums=(0, 1))(x, b)
print("dx", dx.round(2).tolist(), "db", db.round(2).tolist(), "on one rank")
gradients(lambda x, b, w1, w2: psum(x @ w1 @ w2, "i") + b)
gradients(lambda x, b, w1, w2: psum(x @ w1 @ w2 + b, "i"))
gradients(lambda x, b, w1, w2: psum(unreduced(x @ w1 @ w2, "i") + b, "i"))
