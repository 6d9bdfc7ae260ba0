"""The operations: one file a family, each operation with all its rules beside each other."""

from minidiff.ops import composed, elementwise, indexing, linalg, operators, rearranging, reduction, shape, updates

__all__ = ["composed", "elementwise", "indexing", "linalg", "operators", "rearranging", "reduction", "shape", "updates"]
