"""Matrix products of split operands, with one collective or step by step.

All six are called inside a `shard_map` body. There are two ways to contract the split dimension k:

- *gather* an operand (`all_gather_matmul.py`). `lhs` is split along its rows, `rhs` along k, and each rank needs all
  of `rhs`: ``[m/n, k] @ all_gather([k/n, p]) -> [m/n, p]``.
- *scatter* the product (`matmul_reduce_scatter.py`). Both are split along k, so each rank's product is one summand of
  the whole result: ``psum_scatter([m, k/n] @ [k/n, p]) -> [m/n, p]``.

Each takes one collective, but nothing is computed while it runs. Both collectives are n - 1 steps around a ring of n
ranks, in which each rank passes a block on to its neighbor. *Overlapped* forms take these steps one by one, and
multiply one block while they send another. *Bidirectional* forms halve the blocks and send the halves in opposite
directions, over links that are otherwise idle.

===================================  ================  =================  ============================
on n ranks, a block has s bytes      calls             bytes a rank sends what a rank holds in addition
===================================  ================  =================  ============================
`matmul_all_gather`                  1 all_gather      (n - 1) s          all of `rhs`: n blocks
`matmul_all_gather_overlapped`       n - 1 ppermute    (n - 1) s          two blocks: one here, one coming
`matmul_all_gather_bidirectional`    2(n - 1) ppermute (n - 1) s          two blocks
`matmul_psum_scatter`                1 psum_scatter    (n - 1) s          the whole product: n blocks
`matmul_psum_scatter_overlapped`     n - 1 ppermute    (n - 1) s          two blocks: a sum, and a summand
`matmul_psum_scatter_bidirectional`  2(n - 1) ppermute (n - 1) s          two blocks
===================================  ================  =================  ============================

A block is a block [k/n, p] of `rhs` if that is gathered, or a block [m/n, p] of the product if that is scattered. All
forms have the same values, up to rounding, and the same derivatives. `all_gather` and `psum_scatter` are each other's
transposes. So a product that gathers has a backward pass that scatters, and vice versa, and the steps of a ring
transpose to steps in the other direction. The backward pass of the overlapped forms keeps the blocks that were
received; with `md.checkpoint` they are sent around again instead. In a compiled program (`md.jit`) on MPI ranks, blocks
are in fact sent while others are multiplied.

Source: shard_map tutorial, "Matrix multiplication", Examples 1 and 2; Wang et al., "Overlap communication with
dependent computation via decomposition in large deep learning models" (ASPLOS 2023).
"""

from spmd.parallel.all_gather_matmul import (
    matmul_all_gather,
    matmul_all_gather_bidirectional,
    matmul_all_gather_overlapped,
)
from spmd.parallel.matmul_reduce_scatter import (
    matmul_psum_scatter,
    matmul_psum_scatter_bidirectional,
    matmul_psum_scatter_overlapped,
)

__all__ = [
    "matmul_all_gather",
    "matmul_all_gather_bidirectional",
    "matmul_all_gather_overlapped",
    "matmul_psum_scatter",
    "matmul_psum_scatter_bidirectional",
    "matmul_psum_scatter_overlapped",
]
