"""The operations: one file a family, each operation with all its rules beside each other."""

from minidiff.ops import (
    composed,
    discrete,
    elementwise,
    indexing,
    linalg,
    operators,
    rearranging,
    reduction,
    shape,
    sorting,
    updates,
)

__all__ = [
    "composed",
    "discrete",
    "elementwise",
    "indexing",
    "linalg",
    "operators",
    "rearranging",
    "reduction",
    "shape",
    "sorting",
    "updates",
]
