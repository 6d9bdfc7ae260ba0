"""Train a network on handwritten digits, tensor-parallel.

    mpirun -n 4 python -m spmd.examples.tensor_parallel

Features are split over the ranks: a rank has some pixels of all images, some features of each layer, and the rows of
the weights that these are multiplied by. A layer's products are summed and scattered by one `psum_scatter`; in the
backward pass, one `all_gather` serves both cotangents. Since a rank has the logits of some classes only, the cross
entropy takes the maximum and sums over all ranks. (The network has 16 outputs, 6 of them unused, so that 2, 4, 8 or 16
ranks divide their number.)
"""

from functools import partial

from spmd import P
from spmd.examples.digits import Example, main
from spmd.parallel import cross_entropy, tensor_parallel

EXAMPLE = Example(
    name="tensor_parallel",
    loss=partial(tensor_parallel, error=cross_entropy),
    layers=(64, 128, 64, 16),
    axes=("feats",),
    params=P("feats"),
    batch=P(None, "feats"),
)

if __name__ == "__main__":
    main(EXAMPLE, __doc__)
