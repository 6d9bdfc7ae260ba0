"""Train a network on handwritten digits in a pipeline.

    mpirun -n 4 python -m spmd.examples.pipeline

Layers are split over the ranks: each is a stage, which has some of the eight inner layers. A batch goes through as
eight microbatches, one after the other; after each tick, a `ppermute` sends a stage's result to the next stage. The
first and last layers are on all ranks, and each rank applies them to its shard of the batch.
"""

from functools import partial

from minidiff.optim import sgd
from spmd import P
from spmd.examples.digits import BATCH, Example, main
from spmd.parallel import cross_entropy, pipeline_parallel, stacked_layers, unstacked_layers

INNER = 8  # layers, divisible by 1, 2, 4 and 8 stages

EXAMPLE = Example(
    name="pipeline",
    loss=partial(pipeline_parallel, error=cross_entropy, microbatch=BATCH // 8),
    layers=(64, *[48] * (INNER + 1), 10),
    axes=("stages",),
    params=(P(), P("stages"), P()),
    batch=P("stages"),
    arranged=stacked_layers,
    restored=unstacked_layers,
    optimizer=sgd(0.05, momentum=0.9),
    jit=True,
)

if __name__ == "__main__":
    main(EXAMPLE, __doc__)
