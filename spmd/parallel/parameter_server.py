"""A parameter server: one rank keeps the parameters, the others compute gradients.

In each step, the server sends its parameters to all ranks, each rank computes the gradient for its block of the batch,
and the server subtracts the mean of the gradients. This is data parallelism with a root: a `reduce` to the server and a
`broadcast` from it replace the `psum`. With `leaves` arrays of parameters, of `params` elements in all, a step takes,
per rank:

===========  =========  =================  =======  ======  ========
step         direction  collective         axes     count   elements
===========  =========  =================  =======  ======  ========
server_step  forward    broadcast_varying  workers  leaves  params
server_step  forward    psum               workers  1       1
server_step  backward   reduce             workers  leaves  params
===========  =========  =================  =======  ======  ========

You do not write the `reduce`: it is the transpose of the broadcast. `asynchronous.py` simulates servers that do not
wait for all workers.

Source: Li et al., "Scaling distributed machine learning with the parameter server".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minidiff as md
from collectives import pmean
from collectives.rooted import broadcast_varying


def server_step(loss: Callable, server: Any, block: Any, rate: float, axis: str, root: int = 0) -> tuple[Any, Any]:
    """One step of gradient descent: the loss before it, and the server's new parameters.

    It is called in the body of a `shard_map`. `server` has the parameters on the rank `root` and zeros on the others,
    as from `at_root(params, axis, root)`; so has the result, and `broadcast` sends it to all ranks. `loss(params,
    block)` is the mean over the examples of this rank's block. Raises ValueError for a root out of range.

    >>> import numpy as np, spmd
    >>> from collectives import at_root, broadcast
    >>> mesh = spmd.make_mesh((2,), ('workers',), backend='simulated')
    >>> def train(w, targets):
    ...     server = at_root(w, 'workers')
    ...     for _ in range(2):
    ...         value, server = server_step(lambda w, t: np.mean((w - t) ** 2), server, targets, 0.25, 'workers')
    ...     return broadcast(server, 'workers')
    >>> specs = {'in_specs': (spmd.P(), spmd.P('workers')), 'out_specs': spmd.P()}
    >>> float(spmd.shard_map(train, mesh=mesh, **specs)(0.0, np.arange(4.0)))
    1.125
    """

    def mean_loss(server: Any) -> Any:
        return pmean(loss(broadcast_varying(server, axis, root), block), axis)

    value, gradients = md.value_and_grad(mean_loss)(server)
    return value, md.tree.map(lambda p, g: p - rate * g, server, gradients)
