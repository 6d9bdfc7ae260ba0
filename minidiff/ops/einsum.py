"""Einsum, as contractions of two operands."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops.arrays import as_array
from minidiff.ops.base import Multilinear, convert, unbroadcast
from minidiff.ops.dimensions import Dimensions, Types, products
from minidiff.ops.elementwise import copy
from minidiff.ops.rearranging import diagonal
from minidiff.ops.reduction import sum
from minidiff.ops.shape import squeeze, transpose
from minidiff.values.dtypes import accumulator_dtype, result_type

# ---------------------------------------------------------------- einsum of two operands

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # in the order of NumPy's integer labels


#: Large windows, which have elements several times, are copied to be a matrix: in tiles of so many bytes, which stay in
#: the processor's cache.
LARGE_BYTES, TILE_BYTES = 1 << 20, 1 << 19


@functools.lru_cache(4096)
def _kernel(subscripts: str) -> Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray]:
    """Return the fastest NumPy function for a contraction: multiply, matmul, or einsum."""
    terms, out = subscripts.split("->")
    x_axes, y_axes, batch_ndim, row_ndim, axes = matrix_axes(subscripts)
    summed = len(x_axes) - batch_ndim - row_ndim
    if not summed:
        return _product_of_numbers(*terms.split(","), out)
    if batch_ndim and not row_ndim and len(y_axes) == batch_ndim + summed:
        return functools.partial(numpy.einsum, subscripts)
    return _product_of_matrices(x_axes, y_axes, batch_ndim, row_ndim, axes)


def matrix_axes(subscripts: str) -> tuple[list[int], list[int], int, int, list[int]]:
    """Write a contraction as a matrix product: return the axes of both operands, in order, and those of the result.

    Between them are the numbers of axes of the batch, and of the rows.
    """
    terms, out = subscripts.split("->")
    a, b = terms.split(",")
    batch = [i for i in out if i in a and i in b]
    rows, columns, summed = (
        [i for i in out if i not in b],
        [i for i in out if i not in a],
        [i for i in a if i not in out],
    )
    labels = [*batch, *rows, *columns]
    x_axes, y_axes = [a.index(i) for i in (*batch, *rows, *summed)], [b.index(i) for i in (*batch, *summed, *columns)]
    return x_axes, y_axes, len(batch), len(rows), [labels.index(i) for i in out]


def _product_of_numbers(a: str, b: str, out: str) -> Callable:
    x_axes, y_axes = ([term.index(i) for i in out if i in term] for term in (a, b))
    x_index, y_index = (tuple(slice(None) if i in term else None for i in out) for term in (a, b))
    return lambda x, y: x.transpose(x_axes)[x_index] * y.transpose(y_axes)[y_index]


def _product_of_matrices(x_axes: list, y_axes: list, batch_ndim: int, row_ndim: int, axes: list) -> Callable:
    inner = len(x_axes) - row_ndim  # where y's remaining axes begin

    def product(x: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
        x, y = x.transpose(x_axes), y.transpose(y_axes)
        if not batch_ndim and row_ndim and y.ndim > inner and max(x.nbytes, y.nbytes) > LARGE_BYTES:
            out = _product_in_tiles(x, y, row_ndim)
            if out is not None:
                return out.transpose(axes)[()]
        batch, rows, columns = x.shape[:batch_ndim], x.shape[batch_ndim : batch_ndim + row_ndim], y.shape[inner:]
        n = math.prod(y.shape[batch_ndim:inner])
        x = x.reshape(*batch, math.prod(rows), n)
        y = y.reshape(*batch, n, math.prod(columns))
        return numpy.matmul(x, y).reshape(batch + rows + columns).transpose(axes)[()]

    return product


def _overlaps(x: numpy.ndarray) -> bool:
    """Return True if an array has elements of its memory several times."""
    low, high = numpy.lib.array_utils.byte_bounds(x)
    return x.nbytes > high - low


def _product_in_tiles(x: numpy.ndarray, y: numpy.ndarray, row_ndim: int) -> numpy.ndarray | None:
    """Return the product of a matrix of windows and another one, tile by tile; None without windows.

    Rows, columns and summed axes may be several dimensions. A tile is twice as large as what each tile needs whole: the
    other matrix, or the result, to which it adds.
    """
    rows, summed, columns = x.shape[:row_ndim], x.shape[row_ndim:], y.shape[x.ndim - row_ndim :]
    m, n, p = map(math.prod, (rows, summed, columns))
    dtype = numpy.result_type(x, y)
    if not (_overlaps(x) or _overlaps(y)):
        return None
    if not _overlaps(x) and p > m:  # the transpose of the other one's product
        return _rotate(_product_in_tiles(_rotate(y, len(summed)), _rotate(x, row_ndim), len(columns)), len(columns))
    if x.strides[0] < x.strides[row_ndim]:  # tiles of summed axes, in the order in which they are in memory
        out = numpy.zeros((m, p), dtype)
        for tile in _tiles(summed, (m + p) * x.itemsize, 2 * out.nbytes):
            a, b = _rotate(x, row_ndim)[tile], y[tile]
            k = math.prod(b.shape[: len(summed)])
            out += a.reshape(k, m).T @ b.reshape(k, p)
        return out.reshape(rows + columns)
    out, y = numpy.empty(rows + columns, dtype), y.reshape(n, p)
    for tile in _tiles(rows, n * x.itemsize, 2 * y.nbytes):
        numpy.matmul(x[tile].reshape(-1, n), y, out=out[tile].reshape(-1, p))
    return out


def _rotate(x: numpy.ndarray, n: int) -> numpy.ndarray:
    """Move the first `n` axes to the end."""
    return x.transpose(*range(n, x.ndim), *range(n))


def _tiles(shape: tuple[int, ...], each: int, least: int) -> Iterator[tuple[slice, ...]]:
    """Yield indices of adjacent elements, at `each` bytes an element, in tiles of `TILE_BYTES`, or `least` bytes."""
    size, inner = max(least, TILE_BYTES), each * math.prod(shape[1:])
    if len(shape) > 1 and inner > size:
        for i, tile in itertools.product(range(shape[0]), _tiles(shape[1:], each, least)):
            yield slice(i, i + 1), *tile
        return
    step = max(1, size // inner)
    for start in range(0, shape[0], step):
        yield slice(start, start + step), *[slice(None)] * (len(shape) - 1)


def _einsum(x: numpy.ndarray, y: numpy.ndarray, subscripts: str, precision: str | None = None) -> numpy.ndarray:
    return _kernel(subscripts)(x, y) if precision is None else _kernel(subscripts)(round_to_tf32(x), round_to_tf32(y))


def round_to_tf32(x: numpy.ndarray) -> numpy.ndarray:
    """Round float32 numbers to 10 bits after the first one, the nearest number, as matrix units do.

    >>> round_to_tf32(numpy.float32([1 + 2**-10, 1 + 2**-11, 1 + 2**-12])) - 1
    array([0.00097656, 0.00097656, 0.        ], dtype=float32)
    """
    bits = numpy.asarray(x).view(numpy.uint32) + numpy.uint32(1 << 12) & numpy.uint32(-1 << 13 & 0xFFFFFFFF)
    return numpy.where(numpy.isfinite(x), bits.view(numpy.float32), x)


def _einsum_shape(x: ShapedArray, y: ShapedArray, subscripts: str, precision: str | None = None):
    terms, out = subscripts.split("->")
    sizes = dict(zip(terms.replace(",", ""), x.shape + y.shape))
    return tuple(sizes[i] for i in out), numpy.result_type(x.dtype, y.dtype)


def _einsum_transpose(side: int, ct: Value, operands: Sequence, subscripts: str, **precision: str) -> Value:
    both, out = subscripts.split("->")
    terms = both.split(",")
    other, wanted = terms[1 - side], terms[side]
    pair, labels = ((ct, operands[1]), f"{out},{other}") if side == 0 else ((operands[0], ct), f"{other},{out}")
    return unbroadcast(einsum_p.bind(*pair, subscripts=f"{labels}->{wanted}", **precision), operands[side])


def _einsum_batch(primitive, args, batched, subscripts, **precision):
    new = next((i for i in _LETTERS if i not in subscripts), None)
    if new is None:
        raise ValueError(f"einsum: no letter is left for the axis of vmap in '{subscripts}'")
    terms, out = subscripts.split("->")
    terms = ",".join(new + term if b else term for term, b in zip(terms.split(","), batched))
    return primitive.bind(*args, subscripts=f"{terms}->{new}{out}", **precision)


def _einsum_fits(x: ShapedArray, y: ShapedArray, subscripts: str, precision: str | None = None) -> bool:
    terms, out = subscripts.split("->")
    pairs = list(zip(terms.replace(",", ""), x.shape + y.shape))
    return (
        [len(t) for t in terms.split(",")] == [x.ndim, y.ndim]
        and {*out} <= {*terms}
        and len({*pairs}) == len({i for i, _ in pairs})
    )


def _einsum_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    terms, out = params["subscripts"].split("->")
    return Dimensions(tuple(map(tuple, terms.split(","))), (tuple(out),), products(outs))


#: The contraction of two operands, `subscripts="ij,jk->ik"`. Each label occurs at most once per operand, and also in
#: the other operand or the result, so the transposes are contractions of the same form. With `precision="tf32"`,
#: float32 operands are rounded first, in transposes too.
einsum_p = Multilinear(
    "einsum",
    _einsum,
    _einsum_shape,
    tuple(functools.partial(_einsum_transpose, side) for side in (0, 1)),
    _einsum_batch,
    fits=_einsum_fits,
    sharding=_einsum_dimensions,
    accumulates=True,
)


def contract(x: Value, y: Value, x_axes: Sequence[int], y_axes: Sequence[int]) -> Value:
    """Sum products along pairs of axes; keep the other axes of x, then those of y."""
    letters = _LETTERS[26:] + _LETTERS[:26]
    a = list(letters[: len(x.shape)])
    b = list(letters[len(a) : len(a) + len(y.shape)])
    if len(b) < len(y.shape):
        raise ValueError(f"tensordot: at most {len(letters)} axes, got {typeof(x)} and {typeof(y)}")
    for i, j in zip(x_axes, y_axes):
        b[j] = a[i]
    out = [i for i in a + b if (i in a) != (i in b)]
    return einsum_p.bind(x, y, subscripts=f"{''.join(a)},{''.join(b)}->{''.join(out)}")


# ---------------------------------------------------------------- einsum


@implements(numpy.einsum)
def einsum(*operands: Any, optimize: Any = True, dtype: Any = None) -> Value:
    """`numpy.einsum` of any operands, with subscripts as a string or as lists.

    Operands are contracted in pairs, in the order that `numpy.einsum_path` finds for `optimize`, so that derivatives
    reuse the intermediate results of the value. Sizes of 1 broadcast.

    >>> from minidiff import make_tape
    >>> print(make_tape(lambda x, y: einsum("ij,jk", x, y))(numpy.ones((2, 3)), numpy.ones((3, 4))))
    lambda a:f64[2,3], b:f64[3,4]:
      c:f64[2,4] = einsum(a, b, subscripts='ij,jk->ik')
      return c
    """
    subscripts, values = _operands(operands)
    values = values if dtype is None else [convert(x, dtype) for x in values]
    terms, out, as_it_stands = _parse(subscripts, tuple([x.shape for x in values]))
    if as_it_stands:
        return einsum_p.bind(*values, subscripts=as_it_stands)
    common = result_type(*[x.dtype for x in values])
    wide = accumulator_dtype(common)
    values = [convert(x, wide) for x in values]  # before contracting, since partial results might overflow
    sizes = {i: n for term, x in zip(terms, values) for i, n in zip(term, x.shape) if n != 1}
    todo = [_with_labels_once(x, term, sizes) for x, term in zip(values, terms)]
    todo = [_with_labels_of(x, term, out + _labels(todo[:k] + todo[k + 1 :])) for k, (x, term) in enumerate(todo)]
    shapes = tuple(typeof(x).shape for x, _ in todo)
    optimize = tuple(optimize) if isinstance(optimize, list) else optimize  # hashable
    for step in _path(tuple(term for _, term in todo), out, shapes, optimize):
        group = [todo[i] for i in step]
        todo = [pair for i, pair in enumerate(todo) if i not in step]
        while len(group) > 1:
            (x, a), (y, b), *group = group
            needed = _labels(todo + group)
            c = "".join(i for i in dict.fromkeys(a + b) if i in out + needed) if todo or group else out
            group.insert(0, (einsum_p.bind(x, y, subscripts=f"{a},{b}->{c}"), c))
        todo += group
    ((x, term),) = todo
    x = convert(transpose(x, [term.index(i) for i in out]), common)
    return x if out else copy(x)  # NumPy returns a scalar


def _labels(pairs: Sequence[tuple[Value, str]]) -> str:
    return "".join(term for _, term in pairs)


def _operands(operands: Sequence) -> tuple[str, list[Value]]:
    """Return the subscripts as letters, and the arrays, for either calling form of `einsum`."""
    if operands and isinstance(operands[0], str):
        subscripts, values = operands[0].replace(" ", ""), operands[1:]
    else:
        values, lists = operands[: len(operands) // 2 * 2 : 2], operands[1::2]
        subscripts = ",".join(map(_term, lists))
        if len(operands) % 2:
            subscripts += "->" + _term(operands[-1])
    return subscripts, list(map(as_array, values))


def _term(labels: Sequence) -> str:
    try:
        return "".join("..." if i is Ellipsis else _LETTERS[operator.index(i)] for i in labels)
    except (TypeError, IndexError):
        raise ValueError(f"einsum: labels must be integers below {len(_LETTERS)}, or '...'; got {labels!r}") from None


@functools.lru_cache(4096)
def _parse(subscripts: str, shapes: tuple) -> tuple[tuple[str, ...], str, str | None]:
    """Return the labels of each operand and the result, without ellipsis or implicit result.

    The third result is the subscripts of `einsum_p` if it accepts the two operands unchanged; else None.
    """
    try:
        numpy.einsum_path(subscripts, *[numpy.broadcast_to(numpy.empty(()), shape) for shape in shapes], optimize=False)
        terms, out = _expand_ellipses(subscripts, shapes)
    except ValueError as error:
        shown = ", ".join(map(str, shapes))
        message = str(error).rstrip(".")
        raise ValueError(f"einsum: {message}, in '{subscripts}' for operands of shapes {shown}") from None
    sizes: dict[str, set] = {}
    for i, n in zip("".join(terms), itertools.chain(*shapes)):
        sizes.setdefault(i, set()).add(n)
    plain = (
        len(terms) == 2
        and all(len(lengths) == 1 for lengths in sizes.values())
        and all(term.count(i) == 1 for term in terms for i in term)
        and all(i in other + out for term, other in (terms, terms[::-1]) for i in term)
    )
    return tuple(terms), out, f"{terms[0]},{terms[1]}->{out}" if plain else None


def _expand_ellipses(subscripts: str, shapes: tuple) -> tuple[list[str], str]:
    """Return the labels of each operand, and of the result, with letters in place of ellipses."""
    left, arrow, out = subscripts.partition("->")
    terms = left.split(",")
    free = [i for i in reversed(_LETTERS) if i not in subscripts]
    ndims = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes)]
    ellipsis = "".join(reversed(free[: max(ndims)]))
    if not arrow:
        out = "..." + "".join(i for i in sorted(set(left) - set(".,")) if left.count(i) == 1)
    if ellipsis and "..." not in out:
        raise ValueError("The result has no ellipsis, but operands have dimensions there")
    terms = [term.replace("...", ellipsis[len(ellipsis) - ndim :]) for term, ndim in zip(terms, ndims)]
    return terms, out.replace("...", ellipsis)


def _with_labels_once(x: Value, term: str, sizes: dict) -> tuple[Value, str]:
    """Squeeze an operand's broadcast axes; take diagonals for repeated labels."""
    stretched = tuple(k for k, i in enumerate(term) if typeof(x).shape[k] == 1 and i in sizes)
    if stretched:
        x, term = squeeze(x, stretched), "".join(i for k, i in enumerate(term) if k not in stretched)
    for i in term:
        while term.count(i) > 1:
            j, k = term.index(i), term.rindex(i)
            x, term = copy(diagonal(x, 0, j, k)), term[:j] + term[j + 1 : k] + term[k + 1 :] + i
    return x, term


def _with_labels_of(x: Value, term: str, wanted: str) -> tuple[Value, str]:
    """Sum an operand along the axes whose label occurs nowhere else."""
    alone = tuple(k for k, i in enumerate(term) if i not in wanted)
    return (sum(x, alone), "".join(i for i in term if i in wanted)) if alone else (x, term)


@functools.lru_cache(4096)
def _path(terms: tuple[str, ...], out: str, shapes: tuple, optimize: Any) -> list[tuple[int, ...]]:
    """Return the operands to contract at each step; each result is appended to the list."""
    if len(terms) < 3:
        return [tuple(range(len(terms)))]
    if isinstance(optimize, tuple) and optimize[0] == "einsum_path":
        optimize = list(optimize)
    arrays = [numpy.broadcast_to(numpy.empty(()), shape) for shape in shapes]
    return numpy.einsum_path(f"{','.join(terms)}->{out}", *arrays, optimize=optimize)[0][1:]


@implements(numpy.einsum_path)
def einsum_path(*operands: Any, optimize: Any = "greedy") -> tuple[list, str]:
    """`numpy.einsum_path`: the contraction order, found from the operands' shapes."""
    subscripts, values = _operands(operands)
    arrays = [numpy.broadcast_to(numpy.empty(()), typeof(x).shape) for x in values]
    return numpy.einsum_path(subscripts, *arrays, optimize=optimize)
