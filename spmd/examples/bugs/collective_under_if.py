"""A collective that only some ranks would call."""

import minidiff.numpy as np
import spmd
from collectives import pbroadcast, pmax, psum
from spmd import P

mesh, x = spmd.make_mesh((2,), ("i",)), np.arange(4.0)


def total_if(condition):
    def body(x):
        return pbroadcast(psum(x, "i"), "i") if condition(x) else x

    return spmd.shard_map(body, mesh, in_specs=P("i"), out_specs=P("i"))(x)


print(total_if(lambda x: pmax(x.sum(), "i") > 4).tolist())
total_if(lambda x: x.sum() > 4)
