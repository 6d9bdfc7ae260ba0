"""The operations: one file a family, each operation with all its rules beside each other."""

from minidiff.ops import (
    choosing,
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
    statistics,
)

__all__ = ["choosing", "creation", "elementwise", "fft", "indexing", "linalg", "operators", "polynomial", "reduction"]
__all__ += ["sets", "shape", "statistics"]
