"""What NumPy's implementations of operations allocate beside their results, while they run.

Most allocate nothing, or a buffer of some kilobytes. For the others, the table has the bytes for n elements of s bytes
each: those of the largest operand. The report of memory adds them (`spmd.memory`). A loop that `jit` compiles allocates
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minidiff.core.primitive import Primitive
from minidiff.core.types import ShapedArray
from minidiff.values.half import runs_wide

#: Name of an operation -> the bytes it allocates besides its result, for n elements of s bytes; the result has m.
WORKSPACE: dict[str, Callable[[int, int, int], float]] = {
    **dict.fromkeys(("erf", "erfc"), lambda n, s, m: 32 * n),  # Python's numbers
    "gelu_erf": lambda n, s, m: (32 + 2 * s) * n,
    **dict.fromkeys(("gelu_tanh", "silu"), lambda n, s, m: 3 * s * n),
    **dict.fromkeys(("mish", "sigmoid", "sinc"), lambda n, s, m: 2 * s * n),
    **dict.fromkeys(("softmax", "log_softmax", "difference"), lambda n, s, m: (s + 1) * n),  # with a mask
    "logsumexp": lambda n, s, m: (2 * s + 1) * n,
    "var": lambda n, s, m: s * (n + m),  # the mean, and the distances from it
    "recurrence": lambda n, s, m: 2 * s * n,  # a product of the factors, and a term
    **dict.fromkeys(("exponent", "fraction"), lambda n, s, m: max(4, s) * n),  # the other result of frexp
    "scatter_add": lambda n, s, m: 8 * (n + m) * (n >= 500),  # the places of all elements, and those of the added ones
    "matrix_function": lambda n, s, m: 4.33 * s * n,  # of the value: eigenvectors, their products, eigenvalues
    **dict.fromkeys(("fft", "ifft"), lambda n, s, m: 16 * n),  # the operand as complex numbers
}


def workspace(primitive: Primitive, operands: Sequence[ShapedArray], results: Sequence[ShapedArray]) -> int:
    """The bytes that an operation allocates beside its results, for operands and results of these types.

    In 16 bits, NumPy computes on copies of the operands in float32.

    >>> import numpy
    >>> from minidiff.nn import gelu_tanh_p
    >>> x = ShapedArray((1000,), numpy.dtype(float))
    >>> workspace(gelu_tanh_p, [x], [x])
    24000
    """
    if not operands:
        return 0
    wide = 2 * sum(t.nbytes for t in (*operands, *results)) if runs_wide(primitive, operands) else 0
    largest = max(operands, key=lambda t: t.size)
    rows = primitive.name != "scatter_add" or len(operands) <= results[0].ndim  # places of single elements are given
    count = WORKSPACE.get(primitive.name) if rows else None
    size = largest.dtype.itemsize * (2 if wide else 1)
    return wide + (int(count(largest.size, size, sum(t.size for t in results))) if count else 0)
