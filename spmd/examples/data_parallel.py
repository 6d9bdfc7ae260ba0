"""Train a network on handwritten digits, data-parallel.

    mpirun -n 4 python -m spmd.examples.data_parallel

The batch is split over the ranks, every rank has all parameters. The gradient is taken outside the `shard_map`, of the
whole loss; the types of the values in the body decide where it communicates: one all-reduce for the loss in the forward
pass, one for the gradients of all parameters in the backward pass.
"""

from functools import partial

from spmd import P
from spmd.examples.digits import Example, main
from spmd.parallel import cross_entropy, data_parallel

EXAMPLE = Example(
    name="data_parallel",
    loss=partial(data_parallel, error=cross_entropy),
    layers=(64, 128, 64, 10),
    axes=("batch",),
    params=P(),
    batch=P("batch"),
)

if __name__ == "__main__":
    main(EXAMPLE, __doc__)
