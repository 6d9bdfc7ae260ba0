"""Sparse Jacobians and Hessians: the pattern from the tape, colors for its columns, one product for each color."""

from minidiff.ops.sparse import Triplets
from minidiff.sparse.jacobians import sparse_hessian, sparse_jacobian, sparsity

__all__ = ["Triplets", "sparse_hessian", "sparse_jacobian", "sparsity"]
