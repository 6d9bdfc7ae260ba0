"""Example programs to run with `mpirun`.

For example: mpirun -n 4 python -m spmd.examples.data_parallel

=================  =======================================================
data_parallel      the batch is split
fully_sharded      the batch and the parameters are split
tensor_parallel    features are split
fsdp_tp            both, on a mesh of two axes (an even number of ranks)
pipeline           layers are split
gpt                a decoder of text, split along any of six axes
where_to_sum       where sums over ranks are taken, as types say it
=================  =======================================================

The first five train a network on handwritten digits; their common options are in `digits.py`. `gpt` trains on
Paradise Lost (`text.py`). All six share a training loop (`loop.py`): a run with `--checkpoint PATH` can be killed at
any moment, and when started again, it resumes, and its result is the same as without the interruption.
"""
