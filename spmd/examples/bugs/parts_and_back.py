"""Parts of a sum that leave a body, and enter another one."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import unreduced
from spmd import P

mesh, x, w, parts = spmd.make_mesh((2,), ("i",)), np.ones((1, 4)), np.arange(4.0), P(unreduced={"i"})
product = spmd.shard_map(lambda x, w: unreduced(x @ w, "i"), mesh, in_specs=(P(None, "i"), P("i")), out_specs=parts)
there_and_back = spmd.shard_map(lambda z: z, mesh, in_specs=parts, out_specs=parts)


def total(z):
    return np.sum(spmd.reshard(z, P()) ** 2)


print("straight", md.grad(lambda w: total(product(x, w)))(w).tolist())
print("there and back", md.grad(lambda w: total(there_and_back(product(x, w))))(w).tolist())
print(md.typeof(product(x, w)), "has a gradient of type", md.typeof(md.grad(total)(product(x, w))))
md.grad(lambda w: total(spmd.from_local(lambda rank: product(x, w), mesh, parts)))(w)
