"""A compiled sum over ranks, where one rank's samples change their shape."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P

mesh = spmd.make_mesh((2,), ("i",))
total = md.jit(spmd.shard_map(lambda x: psum(np.sum(x**2), "i"), mesh, in_specs=P("i"), out_specs=P()))

for step in range(4):
    more = 2 if step == 2 and spmd.process_index() == 1 else 0
    print(total(np.ones(4 + more)))
total(spmd.from_local(lambda rank: np.ones(2 + rank), mesh, P("i")))
