"""Train a network on handwritten digits, fully sharded and tensor-parallel.

    mpirun -n 8 python -m spmd.examples.fsdp_tp

The mesh has two axes: along one, examples and parameters are split (fully sharded); along the other, features are
(tensor-parallel), over two ranks. Collectives go over one axis at a time: parameters are gathered along the first,
products are summed and split along the second.
"""

from functools import partial

from spmd import P
from spmd.examples.digits import Example, main
from spmd.parallel import cross_entropy, fully_sharded_tensor_parallel


def shape(ranks: int) -> tuple[int, int]:
    if ranks % 2:
        raise ValueError(f"features are split over two ranks, so this runs on an even number of them, not {ranks}")
    return ranks // 2, 2


EXAMPLE = Example(
    name="fsdp_tp",
    loss=partial(fully_sharded_tensor_parallel, error=cross_entropy),
    layers=(64, 128, 64, 16),
    axes=("batch", "feats"),
    params=P(("feats", "batch")),
    batch=P("batch", "feats"),
    shape=shape,
)

if __name__ == "__main__":
    main(EXAMPLE, __doc__)
