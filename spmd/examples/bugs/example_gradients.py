"""The gradient of each example, by vmap in the body of a shard_map."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast
from spmd import P

mesh, w = spmd.make_mesh((2,), ("i",)), np.array([1.0, 2.0])
examples = np.array([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
gradients = md.vmap(md.grad(lambda w, x: x @ w), in_axes=(None, 0))


def on_ranks(body):
    return spmd.shard_map(body, mesh, in_specs=(P(), P("i")), out_specs=P("i"))(w, examples)


print("vmap", gradients(w, examples).tolist())
print("each rank's own", on_ranks(lambda w, x: gradients(pbroadcast(w, "i"), x)).tolist())
print("summed over ranks", on_ranks(gradients).tolist())
