"""Train a network on handwritten digits, fully sharded.

    mpirun -n 4 python -m spmd.examples.fully_sharded

The batch and all parameters are split over the ranks. A layer's parameters are gathered just before their use, and not
kept: the backward pass gathers them again. Their gradients are summed and split in one step. The update is split too:
each rank updates its own shard of the parameters. (The network has 16 outputs, 6 of them unused, so that 2, 4, 8 or 16
ranks divide their number.)
"""

from functools import partial

from spmd import P
from spmd.examples.digits import Example, main
from spmd.parallel import cross_entropy, fully_sharded

EXAMPLE = Example(
    name="fully_sharded",
    loss=partial(fully_sharded, error=cross_entropy),
    layers=(64, 128, 64, 16),
    axes=("batch",),
    params=P("batch"),
    batch=P("batch"),
)

if __name__ == "__main__":
    main(EXAMPLE, __doc__)
