"""The operations: one file a family, each operation with all its rules beside each other."""

from minidiff.ops import (
    covariance,
    creation,
    elementwise,
    fft,
    indexing,
    linalg,
    operators,
    polynomial,
    reduction,
    sets,
    shape,
)

__all__ = ["covariance", "creation", "elementwise", "fft", "indexing", "linalg", "operators", "polynomial", "reduction"]
__all__ += ["sets", "shape"]
