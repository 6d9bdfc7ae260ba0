"""Train a network on handwritten digits, its hidden units split over the ranks: the block of a tensor-parallel network.

    mpirun -n 4 python -m spmd.examples.block

Every rank has all images, and a share of the hidden units: columns of the first matrix, rows of the second. One
all-reduce adds up the partial products in the forward pass; its result is invariant, the same on all ranks. So is the
cotangent of that result, and the backward pass needs no all-reduce. Without types, the transpose of the first one is
another one, of the same size, and the gradient of the last bias is summed too.
"""

from collections.abc import Callable
from typing import Any

import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.nn import relu
from spmd import P
from spmd.examples.digits import Example, main
from spmd.parallel import cross_entropy

#: The specs of the parameters: columns of the first layer, rows of the second, and a bias that every rank has.
SPECS = [(P(None, "ranks"), P("ranks")), (P("ranks", None), P())]


def block(mesh: spmd.Mesh, check_rep: bool = True) -> Callable:
    """The mean cross entropy of (params, (images, targets)), whose hidden units are split over the ranks."""

    def loss(params: Any, batch: Any) -> Any:
        (W1, b1), (W2, b2) = params
        images, targets = batch
        hidden = relu(images @ W1 + b1)
        logits = psum(hidden @ W2, "ranks") + b2
        return np.mean(cross_entropy(logits, targets))

    return spmd.shard_map(loss, mesh=mesh, in_specs=(SPECS, P()), out_specs=P(), check_rep=check_rep)


EXAMPLE = Example(name="block", loss=block, layers=(64, 360, 10), axes=("ranks",), params=SPECS, batch=P())

if __name__ == "__main__":
    main(EXAMPLE, __doc__)
