"""The operations: one file a family, each operation with all its rules beside each other."""

from minidiff.ops import (
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

__all__ = ["creation", "elementwise", "fft", "indexing", "linalg", "operators", "polynomial", "reduction", "sets"]
__all__ += ["shape", "statistics"]
