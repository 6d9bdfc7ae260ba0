"""Sparse Jacobians and Hessians: the pattern from the tape, colors for its columns, one product for each color."""

from minidiff.sparse.jacobians import Triplets, sparse_hessian, sparse_jacobian, sparsity

__all__ = ["Triplets", "sparse_hessian", "sparse_jacobian", "sparsity"]
