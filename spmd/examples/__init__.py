"""Programs to start with `mpirun`, and to read: mpirun -n 4 python -m spmd.examples.data_parallel

=================  =======================================================
data_parallel      the batch is split
fully_sharded      and the parameters too
tensor_parallel    features are split
fsdp_tp            both, on a mesh of two axes (an even number of ranks)
pipeline           layers are split
=================  =======================================================

All train a network on handwritten digits; what they share, options and the training loop, is in `training.py`. A run
with `--checkpoint PATH` can be killed at any moment: started again, it goes on, and ends as it would have
(`checkpoints.py`).
"""
