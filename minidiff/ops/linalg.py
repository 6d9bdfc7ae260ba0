"""Products of vectors, matrices and tensors, and convolutions.

All are composed of three primitives: `matmul`, `convolve`, and the contraction of two operands in
`minidiff/ops/einsum.py`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops.arrays import as_array, lists_as_arrays
from minidiff.ops.base import Multilinear, align, bind_aligned, convert, defers_to, in_float32, reshape_p, unbroadcast
from minidiff.ops.dimensions import Dimensions, Types, broadcast_labels, products
from minidiff.ops.einsum import contract, einsum
from minidiff.ops.elementwise import conjugate, multiply, subtract
from minidiff.ops.indexing import getitem
from minidiff.ops.rearranging import diagonal
from minidiff.ops.reduction import sum
from minidiff.ops.shape import expand_dims, moveaxis, normalize_axes, ravel, reshape, squeeze, stack
from minidiff.ops.sparse import is_sparse, sparse_matmul


def conj(x: Value) -> Value:
    """Return the complex conjugate; a real array is returned unchanged."""
    return conjugate(x) if typeof(x).dtype.kind == "c" else x


def adjoint(x: Value) -> Value:
    """Return the conjugate transpose of a matrix, or of a stack of them."""
    return conj(x.mT)


# ---------------------------------------------------------------- matmul


def _matmul_shape(x: ShapedArray, y: ShapedArray):
    if not x.shape or not y.shape:
        raise ValueError(f"matmul: operands need at least one dimension, got {x} and {y}") from None
    if x.shape[-1] != y.shape[max(-2, -y.ndim)]:
        raise ValueError(f"matmul: inner dimensions differ in {x} @ {y}") from None
    try:
        batch = numpy.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except ValueError:
        raise ValueError(f"matmul: leading dimensions differ in {x} @ {y}") from None
    columns = y.shape[-1:] if y.ndim > 1 else ()
    return (*batch, *x.shape[-2:-1], *columns), numpy.result_type(x.dtype, y.dtype)


def _rows(x: Value) -> Value:
    """Reshape a stack of matrices to one matrix of all their rows."""
    return x if len(x.shape) == 2 else reshape_p.bind(x, shape=(math.prod(x.shape[:-1]), x.shape[-1]))


def _matmul_left(ct: Value, operands: Sequence) -> Value:
    x, y = operands
    m, n = len(x.shape), len(y.shape)
    if n == 1:
        return unbroadcast(multiply(expand_dims(ct, -1), y), x)
    if m == 1:
        axes = (*range(n - 2), -1)
        return unbroadcast(matmul_p.bind(y, ct) if n == 2 else contract(y, ct, axes, axes), x)
    if m == 2 and n > 2:
        axes = (*range(n - 2), -1)
        return unbroadcast(contract(ct, y, axes, axes), x)
    return unbroadcast(ct @ y.mT, x)


def _matmul_right(ct: Value, operands: Sequence) -> Value:
    x, y = operands
    m, n = len(x.shape), len(y.shape)
    if m == 1:
        return unbroadcast(multiply(x if n == 1 else expand_dims(x, -1), ct if n == 1 else expand_dims(ct, -2)), y)
    if n == 1:
        return unbroadcast(matmul_p.bind(ravel(ct), _rows(x)), y)
    if n == 2:
        x, ct = _rows(x), _rows(ct)
    return unbroadcast(x.mT @ ct, y)


def _matmul_batch(primitive, args, batched):
    x, y = args
    m, n = (len(a.shape) - b for a, b in zip(args, batched))
    if not batched[1] and (n == 1 or (m == 1 and n == 2)):  # a batch of vectors is a matrix
        return primitive.bind(x, y)
    if not batched[0] and m == 1:
        return primitive.bind(x, y) if n > 1 else primitive.bind(y, x)
    if not batched[0] and m == 2 and n == 1:
        return primitive.bind(y, x.mT)
    x, y = expand_dims(x, -2) if m == 1 else x, expand_dims(y, -1) if n == 1 else y
    z = primitive.bind(*align((x, y), batched))
    dropped = ((-2,) if m == 1 else ()) + ((-1,) if n == 1 else ())
    return squeeze(z, dropped) if dropped else z


def _matmul_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    x, y = types
    batch = outs[0].shape[: max(x.ndim, y.ndim, 2) - 2]
    left = (*broadcast_labels(x.shape[:-2], batch), "row", "sum")[-x.ndim :]
    right = (*broadcast_labels(y.shape[:-2], batch), "sum", "column") if y.ndim > 1 else ("sum",)
    out = (*range(len(batch)), *["row"] * (x.ndim > 1), *["column"] * (y.ndim > 1))
    return Dimensions((left, right), (out,), products(outs))


#: The product of matrices, stacks of matrices (whose leading dimensions broadcast), and vectors on either side.
matmul_p = Multilinear(
    "matmul",
    numpy.matmul,
    _matmul_shape,
    (_matmul_left, _matmul_right),
    _matmul_batch,
    sharding=_matmul_dimensions,
    accumulates=True,
)


@implements(numpy.matmul, numpy.linalg.matmul)
def matmul(x: Value, y: Value, /) -> Value:
    """`numpy.matmul`: `x @ y`, with vectors on either side; one of the operands may be a sparse matrix."""
    try:
        return matmul_p.bind(x, y)
    except ValueError:
        _matmul_shape(typeof(x), typeof(y))  # its message names the types
        raise
    except (AttributeError, TypeError):
        if is_sparse(x) or is_sparse(y):
            return sparse_matmul(x, y)
        if defers_to(x) or defers_to(y):
            return NotImplemented
        arrays = lists_as_arrays((x, y))
        if arrays is None:
            raise
    return matmul(*arrays)


# ---------------------------------------------------------------- other products


@implements(numpy.dot)
def dot(a: Value, b: Value) -> Value:
    """`numpy.dot`: contract the last axis of a with the second to last or only of b."""
    if is_sparse(a) or is_sparse(b):
        return sparse_matmul(a, b)
    ta, tb = typeof(a), typeof(b)
    if not ta.ndim or not tb.ndim:
        return multiply(as_array(a), as_array(b))  # NumPy converts Python numbers to arrays, which are not weak
    if ta.ndim <= 2 and tb.ndim <= 2:
        return matmul(a, b)
    axis = max(-2, -tb.ndim)
    if ta.shape[-1] != tb.shape[axis]:
        raise ValueError(f"dot: inner dimensions differ in dot({ta}, {tb})")
    return contract(a, b, (-1,), (axis,))


@implements(numpy.inner)
def inner(a: Value, b: Value, /) -> Value:
    """`numpy.inner`: contract the last axes of a and b."""
    ta, tb = typeof(a), typeof(b)
    if not ta.ndim or not tb.ndim:
        return multiply(as_array(a), as_array(b))  # as in `dot`
    if ta.shape[-1] != tb.shape[-1]:
        raise ValueError(f"inner: last dimensions differ in inner({ta}, {tb})")
    return matmul_p.bind(a, b) if ta.ndim == tb.ndim == 1 else contract(a, b, (-1,), (-1,))


@implements(numpy.outer)
def outer(a: Value, b: Value) -> Value:
    """`numpy.outer`: the products of all pairs of elements, a and b flattened."""
    a, b = as_array(a), as_array(b)
    return multiply(reshape(a, (a.size, 1)), reshape(b, (1, b.size)))


@implements(numpy.linalg.outer)
def _outer_of_vectors(x1: Value, x2: Value, /) -> Value:
    if typeof(x1).ndim != 1 or typeof(x2).ndim != 1:
        raise ValueError(f"linalg.outer: expected vectors, got {typeof(x1)} and {typeof(x2)}; np.outer flattens")
    return outer(x1, x2)


@implements(numpy.vdot)
def vdot(a: Value, b: Value, /) -> Value:
    """`numpy.vdot`: the inner product of all elements, with a conjugated."""
    return matmul(ravel(conj(a)), ravel(b))


def _check_core(name: str, x: Value, y: Value, ndims: tuple[int, int], axes: tuple[int, int]) -> None:
    """Raise ValueError if operands lack axes or the summed axes differ in size."""
    t, u = typeof(x), typeof(y)
    if t.ndim < ndims[0] or u.ndim < ndims[1] or t.shape[axes[0]] != u.shape[axes[1]]:
        raise ValueError(f"{name}: {t} and {u} do not match: the summed axes must exist and have equal sizes")


@implements(numpy.vecdot, numpy.linalg.vecdot)
def vecdot(x1: Value, x2: Value, /, *, axis: int = -1) -> Value:
    """`numpy.vecdot`: inner products along an axis, x1 conjugated; others broadcast."""
    if axis != -1:
        x1, x2 = moveaxis(x1, axis, -1), moveaxis(x2, axis, -1)
    _check_core("vecdot", x1, x2, (1, 1), (-1, -1))
    return einsum("...n,...n->...", conj(x1), x2)


def matvec(x1: Value, x2: Value, /) -> Value:
    """`numpy.matvec`: matrices times vectors; leading dimensions broadcast."""
    _check_core("matvec", x1, x2, (2, 1), (-1, -1))
    return einsum("...mn,...n->...m", x1, x2)


def vecmat(x1: Value, x2: Value, /) -> Value:
    """`numpy.vecmat`: conjugated vectors times matrices; leading axes broadcast."""
    _check_core("vecmat", x1, x2, (1, 2), (-1, -2))
    return einsum("...n,...nm->...m", conj(x1), x2)


if hasattr(numpy, "matvec"):  # since NumPy 2.2
    implements(numpy.matvec)(matvec)
    implements(numpy.vecmat)(vecmat)


@implements(numpy.tensordot, numpy.linalg.tensordot)
def tensordot(a: Value, b: Value, axes: Any = 2) -> Value:
    """`numpy.tensordot`: contract pairs of axes (int n: last n of a, first n of b)."""
    a, b = as_array(a), as_array(b)
    ta, tb = typeof(a), typeof(b)
    try:
        count = operator.index(axes)
        if not 0 <= count <= min(ta.ndim, tb.ndim):
            raise ValueError(f"tensordot: {count} axes, but the operands are {ta} and {tb}")
        a_axes, b_axes = tuple(range(ta.ndim - count, ta.ndim)), tuple(range(count))
    except TypeError:
        a_axes, b_axes = axes
        a_axes, b_axes = normalize_axes(a_axes, ta.ndim, "tensordot"), normalize_axes(b_axes, tb.ndim, "tensordot")
    if [ta.shape[i] for i in a_axes] != [tb.shape[i] for i in b_axes]:
        raise ValueError(f"tensordot: axes {a_axes} of {ta} and {b_axes} of {tb} differ in size")
    return contract(a, b, a_axes, b_axes)


@implements(numpy.linalg.multi_dot)
def multi_dot(arrays: Sequence[Value]) -> Value:
    """`numpy.linalg.multi_dot`: a product of matrices in the cheapest order.

    The first and the last may be vectors; of two arrays it is `dot`. Raises ValueError for fewer than two arrays,
    LinAlgError for other dimensions of more.
    """
    arrays = list(map(as_array, arrays))
    if len(arrays) < 2:
        raise ValueError(f"multi_dot: expected at least two arrays, got {len(arrays)}")
    if len(arrays) == 2:
        return dot(*arrays)  # of any number of dimensions
    shapes = [typeof(x).shape for x in arrays]
    if {len(s) for s in shapes[1:-1]} - {2} or not {len(shapes[0]), len(shapes[-1])} <= {1, 2}:
        raise numpy.linalg.LinAlgError(f"multi_dot: operands must be matrices (the ends may be vectors), got {shapes}")
    first = shapes[0] if len(shapes[0]) == 2 else (1, *shapes[0])
    sizes = (*first, *(s[1] if len(s) == 2 else 1 for s in shapes[1:]))
    return in_float32(lambda *arrays: _multiply_in_order(arrays, sizes))(*arrays)


@functools.lru_cache(1 << 16)
def _cheapest_order(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the cost of a product, and how many matrices to multiply first; matrix i: sizes[i] x sizes[i + 1]."""
    if len(sizes) == 2:
        return 0, 0
    costs = [_cheapest_order(sizes[: k + 1])[0] + _cheapest_order(sizes[k:])[0] for k in range(1, len(sizes) - 1)]
    return min((cost + sizes[0] * sizes[k] * sizes[-1], k) for k, cost in enumerate(costs, 1))


def _multiply_in_order(arrays: Sequence, sizes: tuple[int, ...]) -> Value:
    if len(arrays) == 1:
        return arrays[0]
    _, k = _cheapest_order(sizes)
    return matmul(_multiply_in_order(arrays[:k], sizes[: k + 1]), _multiply_in_order(arrays[k:], sizes[k:]))


# ---------------------------------------------------------------- diagonals


implements(numpy.linalg.diagonal)(lambda x, /, *, offset=0: diagonal(x, offset, -2, -1))


@implements(numpy.trace)
def trace(a: Value, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Value:
    """`numpy.trace`: the sum along a diagonal."""
    a = a if dtype is None else convert(a, dtype)
    total = sum(diagonal(a, offset, axis1, axis2), -1)
    return total if dtype is None else convert(total, dtype)


implements(numpy.linalg.trace)(lambda x, /, *, offset=0, dtype=None: trace(x, offset, -2, -1, dtype))


# ---------------------------------------------------------------- cross


@implements(numpy.cross)
def cross(a: Value, b: Value, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Value:
    """`numpy.cross` of vectors of 2 or 3 elements; of 2 and 2, the last component."""
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = moveaxis(a, axisa, -1), moveaxis(b, axisb, -1)
    if {a.shape[-1], b.shape[-1]} - {2, 3}:
        raise ValueError(f"cross: vectors must have 2 or 3 elements, got {a.shape[-1]} and {b.shape[-1]}")
    (a0, a1, *a2), (b0, b1, *b2) = ([getitem(x, (..., i)) for i in range(x.shape[-1])] for x in (a, b))
    last = subtract(multiply(a0, b1), multiply(a1, b0))
    if not a2 and not b2:
        return last
    first = _difference([multiply(a1, z) for z in b2], [multiply(z, b1) for z in a2])
    second = _difference([multiply(z, b0) for z in a2], [multiply(a0, z) for z in b2])
    return moveaxis(stack([first, second, last], -1), -1, axisc)


def _difference(plus: list, minus: list) -> Value:
    """Return the difference of two products, either of which may be missing."""
    return subtract(plus[0] if plus else 0, minus[0]) if minus else plus[0]


@implements(numpy.linalg.cross)
def _cross_of_three(x1: Value, x2: Value, /, *, axis: int = -1) -> Value:
    if typeof(x1).shape[axis] != 3 or typeof(x2).shape[axis] != 3:
        raise ValueError(f"linalg.cross: vectors need 3 elements, got {typeof(x1)} and {typeof(x2)} along axis {axis}")
    return cross(x1, x2, axis=axis)


# ---------------------------------------------------------------- convolve, correlate


def _convolve_impl(x: numpy.ndarray, y: numpy.ndarray, mode: str) -> numpy.ndarray:
    if x.ndim == y.ndim == 1:
        return numpy.convolve(x, y if mode == "full" else y[::-1], mode)
    if mode == "full":
        return _full_convolution(x, y)
    windows = numpy.lib.stride_tricks.sliding_window_view(x, y.shape[-1], axis=-1)
    return numpy.matmul(windows, y[..., None])[..., 0]


def _full_convolution(x: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
    """Add shifted multiples of the longer: zeros around it would turn infinities of the shorter into NaN."""
    if x.shape[-1] < y.shape[-1]:
        x, y = y, x
    n, m = x.shape[-1], y.shape[-1]
    dtype = numpy.result_type(x, y)
    batch = numpy.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    total = numpy.zeros((*batch, n + m - 1), dtype)
    for k in range(m):
        total[..., k : k + n] += x * y[..., k : k + 1]
    return total


def reverse(x: Value, ndim: int = 1) -> Value:
    """Reverse an array along its last axes."""
    return getitem(x, (..., *[slice(None, None, -1)] * ndim))


def convolution(impl: Callable) -> Multilinear:
    """Declare a convolution along the last `ndim` axes; leading axes broadcast.

    Its `mode` is "full"; or "valid", where y is the smaller and not reversed, a correlation. So each is the transpose
    of the other, and nothing is reversed, however often one transposes.
    """

    def shape(x: ShapedArray, y: ShapedArray, mode: str, ndim: int = 1, **params: Any):
        batch, sign = numpy.broadcast_shapes(x.shape[:-ndim], y.shape[:-ndim]), 1 if mode == "full" else -1
        core = [n + sign * (m - 1) for n, m in zip(x.shape[-ndim:], y.shape[-ndim:])]
        return (*batch, *core), numpy.result_type(x.dtype, y.dtype)

    def left(ct: Value, operands: Sequence, mode: str, **params: Any) -> Value:
        mode = "valid" if mode == "full" else "full"
        return unbroadcast(primitive.bind(ct, operands[1], mode=mode, **params), operands[0])

    def right(ct: Value, operands: Sequence, mode: str, **params: Any) -> Value:
        x = operands[0]
        return unbroadcast(
            primitive.bind(*((ct, x) if mode == "full" else (x, ct)), mode="valid", **params), operands[1]
        )

    def batch_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
        ndim = params.get("ndim", 1)
        batch, core = outs[0].shape[:-ndim], (None,) * ndim
        operands = tuple((*broadcast_labels(t.shape[:-ndim], batch), *core) for t in types)
        return Dimensions(operands, ((*range(len(batch)), *core),))

    primitive = Multilinear(
        "convolve", impl, shape, (left, right), bind_aligned, sharding=batch_dimensions, accumulates=True
    )
    return primitive


convolve_p = convolution(_convolve_impl)


@implements(numpy.convolve)
def convolve(a: Value, v: Value, mode: str = "full") -> Value:
    """`numpy.convolve` of two vectors; `mode` is "full", "same" or "valid"."""
    n, m = _lengths("convolve", a, v, mode)
    return _convolve(a, v, mode, (min(n, m) - 1) // 2)


@implements(numpy.correlate)
def correlate(a: Value, v: Value, mode: str = "valid") -> Value:
    """`numpy.correlate`, the second conjugated; `mode` "full", "same" or "valid"."""
    n, m = _lengths("correlate", a, v, mode)
    v = conj(v)
    if mode == "valid":
        return convolve_p.bind(a, v, mode=mode) if n >= m else reverse(convolve_p.bind(v, a, mode=mode))
    return _convolve(a, reverse(v), mode, (m - 1) // 2 if n >= m else n // 2)


def _lengths(name: str, a: Value, v: Value, mode: str) -> tuple[int, int]:
    ta, tv = typeof(a), typeof(v)
    if ta.ndim != 1 or tv.ndim != 1 or not ta.size or not tv.size:
        raise ValueError(f"{name}: operands must be non-empty vectors, got {ta} and {tv}")
    if mode not in ("full", "same", "valid"):
        raise ValueError(f"{name}: mode must be 'full', 'same' or 'valid', got {mode!r}")
    return ta.size, tv.size


def _convolve(x: Value, y: Value, mode: str, start: int) -> Value:
    """Convolve, x being the longer; "same" is a slice of "full" from `start`."""
    if typeof(x).size < typeof(y).size:
        x, y = y, x
    if mode == "valid":
        return convolve_p.bind(x, reverse(y), mode=mode)
    if mode == "full":
        return convolve_p.bind(x, y, mode=mode)
    return getitem(convolve_p.bind(x, y, mode="full"), slice(start, start + typeof(x).size))
