"""The operations: one file a family, each operation with all its rules beside each other."""

from minidiff.ops import decomposition, elementwise, indexing, linalg, operators, reduction, shape

__all__ = ["decomposition", "elementwise", "indexing", "linalg", "operators", "reduction", "shape"]
