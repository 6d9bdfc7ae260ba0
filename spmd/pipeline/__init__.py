"""Pipelines that follow a schedule: tables of steps, where they stash values, and the program that runs them.

==========  ==================================================================================
file        contents
==========  ==================================================================================
tables      a schedule as a table: the steps of each stage at each tick; the slots of its stashes
library     the schedules of the literature: GPipe, 1F1B, interleaved, zero bubble
run         loss and gradients on ranks, in the order of a schedule
split_tape  a backward pass in two parts, as zero bubble needs it
==========  ==================================================================================

`spmd.show_schedule` prints and draws a schedule. `spmd.parallel.pipeline` is a pipeline without one.

>>> one_f_one_b(stages=4, microbatches=8).bubble == gpipe(stages=4, microbatches=8).bubble
True
"""

from spmd.pipeline.library import gpipe, interleaved, one_f_one_b, scheduled_orders, zero_bubble
from spmd.pipeline.run import scheduled
from spmd.pipeline.tables import Schedule, Step

__all__ = ["Schedule", "Step", "gpipe", "interleaved", "one_f_one_b", "scheduled", "scheduled_orders", "zero_bubble"]
