"""Compiler passes for collectives: fewer of them, and earlier."""

from collectives.ops import all_gather_invariant_p, all_gather_p, pscatter_p, psum_p, psum_scatter_p
from collectives.passes.delay_psums import delay_psums
from collectives.passes.overlap import overlap_communication
from collectives.passes.simplify_collectives import (
    SETTINGS,
    fuse_psums,
    gathered_local_slices,
    local_slice_of_gathered,
    split_variadic_psums,
    sum_of_copies,
)
from minidiff.compiler.simplify import Passes

#: All passes, in the order in which they run: `jit` uses them once `spmd` has installed them.
PASSES = Passes(
    first=(split_variadic_psums,),
    rules={
        psum_p: (sum_of_copies,),
        psum_scatter_p: (sum_of_copies,),
        pscatter_p: (local_slice_of_gathered,),
        all_gather_p: (gathered_local_slices,),
        all_gather_invariant_p: (gathered_local_slices,),
    },
    last=(delay_psums, fuse_psums, overlap_communication),
    settings=SETTINGS,
)
