"""Example programs to run with `mpirun`.

For example: mpirun -n 4 python -m spmd.examples.data_parallel

=================  =======================================================
data_parallel      the batch is split
fully_sharded      the batch and the parameters are split
tensor_parallel    features are split
fsdp_tp            both, on a mesh of two axes (an even number of ranks)
pipeline           layers are split
where_to_sum       where sums over ranks are taken, as types say it
=================  =======================================================

All but the last train a network on handwritten digits; their common options and training loop are in `training.py`. A
run with `--checkpoint PATH` can be killed at any moment: when started again, it resumes, and its result is the same as
without the interruption (`checkpoints.py`).
"""
