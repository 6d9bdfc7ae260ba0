"""Products with sparse matrices: those of SciPy, and `Triplets`, whose values may be traced.

A product reads an element of the dense operand for each stored value, multiplies, and adds up by rows. These are
operations (`gather`, `multiply`, `scatter_add`), so the product has their derivatives in both operands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy

from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.ops.arrays import as_array
from minidiff.ops.elementwise import multiply
from minidiff.ops.indexing import gather_p, scatter_add_p
from minidiff.ops.shape import expand_dims


class Triplets(NamedTuple):
    """A sparse matrix as the rows, the columns and the values of its elements; those at the same place are added.

    It stands for an array of `scipy.sparse` where SciPy is not installed, or values are traced. `A @ x` and `x @ A` are
    its products with vectors and matrices.
    """

    rows: numpy.ndarray
    columns: numpy.ndarray
    values: Value
    shape: tuple[int, int]

    @property
    def T(self) -> Triplets:
        """The transposed matrix."""
        return Triplets(self.columns, self.rows, self.values, self.shape[::-1])

    def toarray(self) -> Value:
        """Return the dense matrix."""
        return scatter_add_p.bind(as_array(self.values), self.rows, self.columns, shape=self.shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> numpy.ndarray:
        raise TypeError("Triplets are no array: A @ x and x @ A are the products of a matrix A, A.toarray() is dense")

    def __matmul__(self, x: Any) -> Value:
        return sparse_matmul(self, x)

    def __rmatmul__(self, x: Any) -> Value:
        return sparse_matmul(x, self)


Triplets.__array_priority__ = 2000  # type: ignore[attr-defined]  # arrays leave `x @ A` to this class


def is_sparse(x: Any) -> bool:
    """Return whether this is a sparse matrix."""
    return isinstance(x, Triplets) or hasattr(type(x), "tocoo")


def as_triplets(a: Any) -> Triplets:
    """Convert a sparse matrix of SciPy."""
    if isinstance(a, Triplets):
        return a
    if a.ndim != 2:
        raise ValueError(f"a sparse matrix must have two dimensions, got the shape {a.shape}: write A.reshape(1, -1)")
    a = a.tocoo()
    return Triplets(a.row, a.col, a.data, a.shape)


def coo_array(arg1: Any, shape: tuple[int, int] | None = None) -> Triplets:
    """`scipy.sparse.coo_array`, whose values may be traced.

    Its products with vectors and matrices, `A @ x` and `x @ A`, have derivatives in the values and in x. So do those
    with a matrix of SciPy, in x alone.

    Args:
        arg1: a sparse matrix of SciPy, or `(values, (rows, columns))`, vectors of the same length.
        shape: the number of rows and of columns; by default the least that the indices need.

    Returns:
        A named tuple `(rows, columns, values, shape)`. `A._replace(values=v)` has other values at the same places,
        `A.T` is transposed, and `A.toarray()` is dense. Values at the same place are added.

    Raises:
        ValueError: if the vectors differ in length, or an index is not in the shape.

    >>> import minidiff as md
    >>> import numpy as np
    >>> A = coo_array((np.array([1.0, 2.0, 3.0]), ([0, 0, 1], [0, 2, 1])), shape=(2, 3))
    >>> A @ np.ones(3), np.ones(2) @ A
    (array([3., 3.]), array([1., 3., 2.]))
    >>> md.grad(lambda v: np.sum(A._replace(values=v) @ np.arange(3.0)))(A.values)
    array([0., 2., 1.])
    """
    if is_sparse(arg1):
        return as_triplets(arg1)
    values, (rows, columns) = arg1
    rows, columns, values = numpy.asarray(rows, int), numpy.asarray(columns, int), as_array(values)
    if values.ndim != 1 or not values.shape == rows.shape == columns.shape:
        shapes = ", ".join(str(typeof(x)) for x in (values, rows, columns))
        raise ValueError(f"coo_array: values, rows and columns must be vectors of the same length, got {shapes}")
    shape = shape or (int(rows.max(initial=-1)) + 1, int(columns.max(initial=-1)) + 1)
    for i, n, name in ((rows, shape[0], "row"), (columns, shape[1], "column")):
        if i.size and not 0 <= i.min() <= i.max() < n:
            raise ValueError(
                f"coo_array: the {name}s are from {i.min()} to {i.max()}, but the shape {shape} has {n} of them"
            )
    return Triplets(rows, columns, values, shape)


def sparse_matmul(x: Any, y: Any) -> Value:
    """Return the product of a sparse matrix with a vector or matrix, on either side.

    Raises:
        ValueError: if sizes differ, or the dense operand has more than two dimensions.
        TypeError: if both are sparse.
    """
    if is_sparse(x) and is_sparse(y):
        raise TypeError(
            "both operands of the product are sparse: multiply matrices of SciPy before, or A @ B.toarray()"
        )
    on_right = is_sparse(y)
    matrix, dense = (as_triplets(y), as_array(x)) if on_right else (as_triplets(x), as_array(y))
    a, b = (matrix.T, dense.T) if on_right else (matrix, dense)
    if b.ndim not in (1, 2) or b.shape[0] != a.shape[1]:
        side, dimension = ("left", "columns") if on_right else ("right", "rows")
        raise ValueError(
            f"matmul: a sparse matrix of shape {matrix.shape} is multiplied from the {side} by {typeof(dense)}: this "
            f"must be a vector of {a.shape[1]} elements, or a matrix with as many {dimension}"
        )
    values = as_array(a.values)
    terms = multiply(values if b.ndim == 1 else expand_dims(values, -1), gather_p.bind(b, a.columns))
    out = scatter_add_p.bind(terms, a.rows, shape=(a.shape[0], *b.shape[1:]))
    return out.T if on_right else out
