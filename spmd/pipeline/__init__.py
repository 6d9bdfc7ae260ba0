"""Pipelines that follow a schedule: tables of steps, where they stash values, and the program that runs them.

==========  ==================================================================================
file        contents
==========  ==================================================================================
tables      a schedule as a table: the steps of each stage at each tick; the slots of its stashes
library     the schedules of the literature: GPipe, 1F1B, interleaved, zero bubble
run         loss and gradients on ranks, in the order of a schedule
split_tape  a backward pass in two parts, as zero bubble needs it
==========  ==================================================================================

`spmd.parallel` exports what users call.
"""
