"""The operations: one file a family, each operation with all its rules beside each other."""

from minidiff.ops import (
    composed,
    decomposition,
    differences,
    discrete,
    elementwise,
    indexing,
    linalg,
    operators,
    rearranging,
    reduction,
    shape,
    sorting,
    statistics,
    updates,
)

__all__ = [
    "composed",
    "decomposition",
    "differences",
    "discrete",
    "elementwise",
    "indexing",
    "linalg",
    "operators",
    "rearranging",
    "reduction",
    "shape",
    "sorting",
    "statistics",
    "updates",
]
