"""Compiler passes for collectives: fewer of them, and when they are needed."""

from collectives.ops import psum_p
from collectives.passes.delay_psums import delay_psums
from collectives.passes.fuse_psums import SETTINGS, fuse_psums, split_variadic_psums, sum_of_copies
from collectives.passes.just_in_time import gather_just_in_time
from collectives.passes.overlap import overlap_communication
from minidiff.compiler.simplify import Passes

#: All passes, in the order in which they run: `jit` uses them once `spmd` has installed them.
PASSES = Passes(
    first=(split_variadic_psums,),
    rules={psum_p: (sum_of_copies,)},
    last=(delay_psums, fuse_psums, gather_just_in_time, overlap_communication),
    settings=SETTINGS,
)
