"""Example programs to run with `mpirun`.

For example: mpirun -n 4 python -m spmd.examples.block

=================  ==========  =======  ========================================================================
example            ranks       seconds  what it shows
=================  ==========  =======  ========================================================================
block              1 to 6, 8         3  hidden units are split: one all-reduce, where programs without types send two
data_parallel      1 to 6, 8         7  the batch is split
fully_sharded      1, 2, 4, 8       15  the batch and the parameters are split
tensor_parallel    1, 2, 4, 8       15  features are split
fsdp_tp            2, 4, 8          15  both, on a mesh of two axes
pipeline           1, 2, 4, 8       15  layers are split
gpt                1 to 8          100  a decoder of text, split along any of six axes
heat               1 to 6, 8         4  heat in a plate: halos of blocks, compared with NumPy to the last bit
wave               1, 2, 4, 8        8  a wave, and its initial field by gradient descent through time
shallow_water      1 to 6, 8         6  a rotating ocean between two walls, one halo a step
where_to_sum       1 to 8            1  types that say where sums over ranks are taken
same_bits          1 to 4, 6, 8      2  losses that are the same to the last bit on any number of ranks
restarts            1 to 6, 8         8  a job that starts again when a rank dies: `restarts PATH --kill 37`
scoreboard          1              300  predicted steps of language models, against published measurements
plan               1                 3600  faster ways to train published models, searched by prediction
bugs               2                 1  ten bugs of other libraries, which types catch: `bugs NAME`
=================  ==========  =======  ========================================================================

Studies show what the core can express, and are no part of the library. Their docstrings say what they print:

====================  =============  =======  ====================================================================
study                 ranks          seconds  what it shows
====================  =============  =======  ====================================================================
assigned_experts      1 to 8               2  experts whose tokens are known beforehand
beam_search           1, 2, 4, 8           2  the most probable texts of a decoder, by several beams
cannon                1, 4, 9              2  products of matrices by shifts, and by broadcasts
curriculum            1 to 8               2  texts whose length grows while a network is trained
dlrm                  1 to 8               2  embedding tables, split in three ways
flash_attention       1 to 8               2  attention by tiles of queries and keys: FlashAttention
fused_convolution     1 to 8               2  convolution, bias, norm and activation: one product, one loop
loss_spikes           1 to 8               2  spikes of the loss: a robust z-score, skipping, resuming from before
low_rank_adaptation   1, 2, 4, 8           3  fine-tuning with frozen weights, which have no optimizer states: LoRA
node_limited_experts  1 to 8               2  a token goes to few nodes, once to each: DeepSeek
offload               1 to 8               2  states and parameters in files: ZeRO-Infinity
packed                1 to 8               2  texts of different lengths in one row, without padding
parameter_server      1 to 8               2  parameters on one rank, and workers that do not wait
parameter_servers     1 to 8               2  parameters on several ranks, each array at its home
placement             1 to 8               2  a tape whose operations are placed on ranks
positions             1 to 8               3  nine kinds of positions of tokens
pyramid_experts       1, 2, 4, 6, 8        2  residual and pyramid experts: PR-MoE
recurrence            1 to 8               2  a recurrence along tokens that are split
rwkv                  1 to 8               5  RWKV: trained in parallel, sampled as a recurrence
saturation            1 to 8               2  overflow in float16: infinity, a skipped step, or the largest number
scheduled_network     1 to 8               2  a network in pipelines that follow schedules
send_receive          2 to 8               2  send and receive between two ranks, as one typed operation
shadowed_experts      1 to 8               2  experts with many tokens are copied: FasterMoE
sparse_attention      1, 2, 4, 8           3  attention to few keys: Reformer, BigBird
summed_attention      1 to 8               2  Efficient attention, Hydra; scores of low rank
tensor_2d             1, 4, 9              2  weights split along both axes of a grid
tensor_3d             1 to 8               2  weights split along three axes
tiled_layer           1, 2, 4, 8           2  a layer in tiles, one after the other: ZeRO-Infinity
two_rings             4, 8                 2  an all-reduce along the two rings of NVLinks of a DGX-1
weight_versions       1 to 8               2  pipelines without a flush: PipeDream, 2BW
winograd              1 to 8               2  3 x 3 convolutions with fewer multiplications: Winograd
====================  =============  =======  ====================================================================

`python -m spmd.examples.three_ways` lists modules that differentiate without ranks: the other ways to do it.

Seconds are approximate, for four ranks on two processors. `python -m spmd.examples` prints this page, and
`python -m spmd.examples.gpt --help` prints the options of an example.

The first six train a network on handwritten digits; their common options are in `digits.py`. `gpt` trains on
Paradise Lost (`text.py`). All seven share a training loop (`loop.py`): a run with `--checkpoint PATH` can be killed at
any moment, and when started again, it resumes, and its result is the same as without the interruption.
"""
