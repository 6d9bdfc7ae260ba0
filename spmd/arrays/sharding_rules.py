"""Operations on sharded arrays: each runs as a `shard_map` of itself.

A sharding rule gives each dimension of each operand and result a label, as the subscripts of an einsum do. A dimension
without a label must be whole: the axes that split it may split another one instead. All dimensions of a label may be
split along the same mesh axes, and each rank computes its block. A label that the results lack is summed over (or
reduced by the rule's `reduce`), first on each rank, then between ranks.

The split of the labels is chosen by cost: if no operand needs to be resharded, none is; otherwise the choice is the one
that moves the fewest bytes, to reshard operands and to reduce the result. An operation without a rule takes its
operands whole. One that reads or writes at an index need not, even if the indexed dimension is split: the rank that
has the place sends it, or each rank finds, or writes, the places in its own block.

All of this is one operation, `shard_map`, whose body reshards blocks, computes and reduces: so it is typed, counted
and differentiated like any other. Its transpose gives each operand a cotangent with the operand's sharding.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy

import collectives
from minidiff import core
from minidiff.core import (
    Evaluate,
    Interpreter,
    LeakedTracerError,
    Primitive,
    ShapedArray,
    Tracer,
    Value,
    current_scope,
    is_scalar_constant,
    leak_message,
    pbroadcast_to,
    running,
    typeof,
)
from minidiff.forward import JVP
from minidiff.ops import elementwise, reduction
from minidiff.ops.base import Elementwise
from minidiff.ops.elementwise import (
    absolute,
    add,
    divide,
    equal,
    exp,
    greater_equal,
    less,
    log,
    multiply,
    subtract,
    where,
)
from minidiff.ops.indexing import gather_p, slice_p, take
from minidiff.ops.shape import concatenate, expand_dims, reshape, squeeze
from minidiff.ops.updates import scatter_set_p
from spmd.arrays.ranges import in_step, in_step_backwards, of_block, pieces
from spmd.arrays.reshard import Dims, Route, Sizes, redistribute, route, sizes_of
from spmd.arrays.sharded_array import ShardedArray, reshard_p
from spmd.mesh import Mesh
from spmd.partition import P, PartitionSpec, part_count
from spmd.primitive import everywhere, shard_map_p

Label = Hashable  # None: the dimension must be whole
Labels = tuple[Label, ...]  # one for each dimension of an array


@dataclass(frozen=True)
class Rule:
    """The labels of an operation's operands and results, and how it runs on blocks."""

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    reduce: Callable | None = None  # takes a result, and the axes that its missing labels are split along
    moves: int = 2  # how often a reduced result is moved, at most: an all-reduce scatters it, and gathers it
    stays: bool = True  # whether to prefer not to reshard operands, even if the reduction then costs more
    params: dict = field(default_factory=dict)  # parameters whose values differ on blocks
    run: Callable | None = None  # takes a split of the labels, and blocks: if a rank must know which block it has
    of_whole: bool = False  # whether to differentiate the operation on whole arrays, not the body's steps


Rules = Callable[[Sequence[ShapedArray], Sequence[ShapedArray], dict], Rule | None]


# ---------------------------------------------------------------- the rules


def _numbered(types: Sequence[ShapedArray]) -> tuple[Labels, ...]:
    return tuple(tuple(range(t.ndim)) for t in types)


def _broadcast(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """Elementwise operations with broadcasting.

    Dimensions are aligned from the last; those that are stretched stay whole.
    """
    out = outs[0]
    return Rule(tuple(_aligned(t.shape, out.shape) for t in types), _numbered(outs))


def _aligned(shape: tuple[int, ...], wide: tuple[int, ...]) -> Labels:
    extra = len(wide) - len(shape)
    return tuple(d + extra if n == wide[d + extra] else None for d, n in enumerate(shape))


def _reduction(reduce: Callable | None, moves: int = 2, of_whole: bool = False) -> Rules:
    """Reductions along `axes`; without a `reduce` between ranks these are whole."""

    def rule(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
        (x,), axes, keepdims = types, params["axes"], params.get("keepdims", False)
        labels = tuple(None if reduce is None and d in axes else d for d in range(x.ndim))
        out = [None if d in axes else d for d in range(x.ndim) if keepdims or d not in axes]
        return Rule((labels,), (tuple(out),), reduce, moves, of_whole=of_whole)

    return rule


def _extremum(reduce: Callable) -> Rules:
    """Maximum or minimum along `axes`.

    These must be whole for complex numbers, which collectives cannot order.
    """

    def rule(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
        known = reduce if types[0].dtype.kind != "c" else None
        return _reduction(known, of_whole=True)(types, outs, params)

    return rule


def _transpose(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    return Rule(_numbered(types), (tuple(params["axes"]),))


def _reshape(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """Reshape: a group of dimensions may stay split along its first one."""
    (x,), (out,) = types, outs
    before, after = [None] * x.ndim, [None] * out.ndim
    for d, e in _leading_pairs(x.shape, out.shape):
        before[d] = after[e] = d
    return Rule((tuple(before),), (tuple(after),))


def _leading_pairs(one: tuple[int, ...], two: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Match groups of dimensions with equal products in two shapes.

    Yields the first dimension larger than 1 of each group.
    """
    if 0 in one:
        return
    dims, ends = [d for d, n in enumerate(one) if n > 1], [d for d, n in enumerate(two) if n > 1]
    i = j = 0
    while i < len(dims) and j < len(ends):
        yield dims[i], ends[j]
        m, n = one[dims[i]], two[ends[j]]
        i, j = i + 1, j + 1
        while m != n:
            if m < n:
                m, i = m * one[dims[i]], i + 1
            else:
                n, j = n * two[ends[j]], j + 1


def _matmul(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    x, y = types
    stack = outs[0].shape[: max(x.ndim, y.ndim, 2) - 2]
    left = (*_aligned(x.shape[:-2], stack), "row", "sum")[-x.ndim :]
    right = (*_aligned(y.shape[:-2], stack), "sum", "column") if y.ndim > 1 else ("sum",)
    out = (*range(len(stack)), *["row"] * (x.ndim > 1), *["column"] * (y.ndim > 1))
    return Rule((left, right), (out,), _sum(outs))


def _einsum(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    terms, out = params["subscripts"].split("->")
    return Rule(tuple(map(tuple, terms.split(","))), (tuple(out),), _sum(outs))


def _sum(outs: Sequence[ShapedArray]) -> Callable:
    """The collective that sums products between ranks: `pmax` for booleans."""
    return collectives.pmax if outs[0].dtype == bool else collectives.psum


def _along(name: str) -> Rules:
    """Operations along the axis, or axes, that a parameter names: these must be whole."""

    def rule(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
        given = params[name]
        whole = given if isinstance(given, tuple) else (given,)
        labels = tuple(None if d in whole else d for d in range(types[0].ndim))
        fewer = tuple(d for d in labels if d is not None)
        return Rule((labels,) * len(types), tuple(labels if t.ndim == len(labels) else fewer for t in outs))

    return rule


def _stacks(ndim: int) -> Rules:
    """Operations on the last `ndim` dimensions: batch dimensions may be split."""

    def rule(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
        stack = tuple(range(types[0].ndim - ndim))
        return Rule(*[tuple((*stack, *[None] * (t.ndim - len(stack))) for t in some) for some in (types, outs)])

    return rule


def _solve(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """Solve: batch dimensions, and the columns of the right-hand side, may be split."""
    a, b = types
    stack = outs[0].shape[:-2]
    right = (*_aligned(b.shape[:-2], stack), None, "column")
    return Rule(((*_aligned(a.shape[:-2], stack), None, None), right), ((*range(len(stack)), None, "column"),))


def _search(table: int) -> Rules:
    """Elementwise look-ups in a table, the operand `table`, which must be whole."""

    def rule(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
        labels = _numbered(types)
        return Rule(tuple((None,) * len(x) if i == table else x for i, x in enumerate(labels)), _numbered(outs))

    return rule


def _stack(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    labels = [*range(outs[0].ndim - 1)]
    labels.insert(params["axis"], None)
    return Rule(_numbered(types), (tuple(labels),))


def _unstack(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    (labels,) = _numbered(types)
    return Rule(((None, *labels[1:]),), (labels[1:],) * len(outs))


def _slice(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """Slicing: a slice that differs between blocks is sent by the ranks that have it."""
    (t,) = types
    labels, cut, index = map(list, _sliced(params["index"], t.shape))
    entries = [k for k, i in enumerate(index) if i is not None]  # for each dimension, its entry of the index
    taken = [d for d, _ in enumerate(entries) if labels[d] is None]
    for d in taken:
        i, labels[d] = index[entries[d]], ("at", d)
        if isinstance(i, slice) and in_step_backwards(i, t.shape[d]):
            cut[_kept_before(index, entries[d])] = labels[d]

    def run(way: Way, x: Value) -> Value:
        split = [(d, entries[d], way[labels[d]]) for d in taken if labels[d] in way]
        # Dimensions to gather come first, so that each is gathered once, not for each piece of another dimension.
        split.sort(key=lambda at: _is_sent(index[at[1]], t.shape[at[0]], x.shape[at[0]]))
        return _taken(x, tuple(index), split, t.shape)

    return Rule((tuple(labels),), (tuple(cut),), moves=1, run=run)


Split = Sequence[tuple[int, int, tuple[str, ...]]]  # (split dimension, its entry of the index, its axes)
MOST_SENT = 2  # at most this many pieces are sent one by one; for more, the dimension is gathered


def _taken(x: Value, index: tuple, split: Split, shape: tuple[int, ...]) -> Value:
    """Slice an array of this shape at `index`, given its block `x`."""
    if not split:
        return slice_p.bind(x, index=index)
    (d, k, axes), *rest = split
    i, n, length = index[k], shape[d], x.shape[d]
    if isinstance(i, slice) and in_step_backwards(i, n):
        y = _taken(x, _replaced(index, k, of_block(i, n)), rest, shape)
        last = n // length - 1
        return collectives.ppermute(y, axes, [(rank, last - rank) for rank in range(last + 1)])
    if not _is_sent(i, n, length):
        return _taken(collectives.all_gather_invariant(x, axes, axis=d, tiled=True), index, rest, shape)
    found = [
        collectives.broadcast(_taken(x, _replaced(index, k, there), rest, shape), axes, rank)
        for rank, there in pieces(i, n, length)
    ]
    return found[0] if len(found) == 1 else concatenate(found, _kept_before(index, k))


def _is_sent(i: int | slice, n: int, length: int) -> bool:
    """Whether the ranks that have the places at `i`, of n, broadcast them.

    Otherwise the dimension is gathered.
    """
    count = len(pieces(i, n, length))
    return count == 1 or (count <= MOST_SENT and len(range(n)[i]) < n - length)


def _replaced(index: tuple, k: int, entry: int | slice) -> tuple:
    return (*index[:k], entry, *index[k + 1 :])


def _kept_before(index: Sequence, k: int) -> int:
    """The number of result dimensions from the entries of an index before entry k."""
    return sum(not isinstance(i, int) for i in index[:k])


def _unslice(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    labels, cut, index = _sliced(params["index"], outs[0].shape)
    return Rule((cut,), (labels,), params={"index": index})


def _update(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    x, v = types
    labels, cut, index = _sliced(params["index"], x.shape, _is_all)
    values = tuple(None if n == 1 else label for n, label in zip(v.shape, cut[len(cut) - v.ndim :]))
    return Rule((labels, values), (labels,), params={"index": index})


def _sliced(
    index: tuple, shape: tuple[int, ...], in_blocks: Callable[[slice, int], bool] = in_step
) -> tuple[Labels, Labels, tuple]:
    """The labels of an array and of its slice, and the index on blocks.

    The array has this shape, and is sliced at `index`. A dimension may stay split if its slice satisfies `in_blocks`:
    it then takes the same places of each block.
    """
    labels: list[Label] = []
    cut: list[Label] = []
    entries = []
    for i in index:
        d = len(labels)
        if i is None:
            cut.append(None)
        else:
            kept = isinstance(i, slice) and in_blocks(i, shape[d])
            i = of_block(i, shape[d]) if kept else i
            labels.append(d if kept else None)
            cut += [labels[-1]] if isinstance(i, slice) else []
        entries.append(i)
    rest = range(len(labels), len(shape))
    return (*labels, *rest), (*cut, *rest), tuple(entries)


def _is_all(i: slice, n: int) -> bool:
    return i.indices(n) == (0, n, 1)


def _gather(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """x[indices]: the indices are split as the result is.

    If x is split along the indexed dimensions, each rank looks up the places that it has, and the ranks add up their
    results, if that is cheaper than to gather x.
    """
    x, *indices = types
    (variadic, each), rest = _indexed(x.shape, indices)
    at = tuple(("at", d) for d in range(len(indices)))

    def run(way: Way, x: Value, *indices: Value) -> Value:
        split = [d for d, label in enumerate(at) if label in way]
        return _found_here(x, indices, {d: (way[at[d]], types[0].shape[d]) for d in split})

    return Rule(((*at, *rest), *each), ((*variadic, *rest),), _sum(outs), stays=False, run=run)


def _found_here(x: Value, indices: Sequence[Value], split: dict[int, tuple[tuple[str, ...], int]]) -> Value:
    """x[indices] where this rank's block has the place, else 0.

    `split` maps each split dimension to its axes and its length in the whole array.
    """
    places, known = list(indices), []
    for d, (axes, length) in split.items():
        given = elementwise.convert(indices[d], numpy.intp)
        i = where(less(given, 0), add(given, length), given)
        place = subtract(i, multiply(collectives.axis_index(axes), x.shape[d]))
        nearest = elementwise.minimum(elementwise.maximum(place, 0), x.shape[d] - 1)
        known.append(equal(place, nearest))
        there = elementwise.logical_and(greater_equal(i, 0), less(i, length))
        places[d] = where(there, nearest, given)  # an index out of bounds stays so, and raises
    found = gather_p.bind(x, *places)
    if not known:
        return found
    mine = functools.reduce(elementwise.logical_and, known)
    mine = reshape(mine, (*mine.shape, *[1] * (x.ndim - len(places))))
    return where(mine, found, numpy.zeros((), found.dtype)[()])


def _scatter(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """Write values at indices of the first dimensions, which must be whole.

    The indices must be whole, too.
    """
    x, v, *indices = types
    rest = tuple(range(len(indices), x.ndim))
    values = (*[None] * (v.ndim - len(rest)), *rest)
    x_labels = (*[None] * len(indices), *rest)
    return Rule((x_labels, values, *[(None,) * i.ndim for i in indices]), (x_labels,))


def _scatter_add(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """Each rank adds up its own values, then the ranks add up their sums."""
    _, *indices = types
    places, rest = _indexed(outs[0].shape, indices)
    return Rule(((*places[0], *rest), *places[1]), ((None,) * len(indices) + rest,), collectives.psum)


def _indexed(shape: tuple[int, ...], indices: Sequence[ShapedArray]) -> tuple[tuple[Labels, list[Labels]], Labels]:
    """The labels of the indices, broadcast and each, and of the other dimensions."""
    wide = numpy.broadcast_shapes(*[t.shape for t in indices])
    variadic = tuple(("index", d) for d in range(len(wide)))
    each = [tuple(None if d is None else ("index", d) for d in _aligned(t.shape, wide)) for t in indices]
    return (variadic, each), tuple(range(len(indices), len(shape)))


def _product(x: Value, axes: tuple[str, ...]) -> Value:
    """The product between ranks: no collective multiplies, so gather the factors."""
    return reduction.prod_p.bind(collectives.all_gather_invariant(x, axes), axes=(0,))


def _whole(types: Sequence[ShapedArray], outs: Sequence[ShapedArray], params: dict) -> Rule:
    """The rule of an operation without one of its own: operands and results are whole."""
    return Rule(tuple((None,) * t.ndim for t in types), tuple((None,) * t.ndim for t in outs))


#: The rules, by operation name. Elementwise operations have one rule, which `rule_of` supplies.
RULES: dict[str, Rules] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast_to": _broadcast,
    "concatenate": _along("axis"),
    "split": _along("axis"),
    "unstack": _unstack,
    "stack": _stack,
    "slice": _slice,
    "unslice": _unslice,
    "update": _update,
    "gather": _gather,
    "scatter_add": _scatter_add,
    **dict.fromkeys(("scatter_set", "scatter_max", "scatter_min"), _scatter),
    "matmul": _matmul,
    "einsum": _einsum,
    "sum": _reduction(collectives.psum),
    "mean": _reduction(collectives.pmean),
    "max": _extremum(collectives.pmax),
    "min": _extremum(collectives.pmin),
    "any": _reduction(collectives.pmax),
    "all": _reduction(collectives.pmin),
    "prod": _reduction(_product, moves=1),
    **dict.fromkeys(("var", "logsumexp"), _reduction(None)),
    **dict.fromkeys(("cumsum", "cumprod", "permute", "argsort", "argpartition"), _along("axis")),
    **dict.fromkeys(("argmax", "argmin", "nanargmax", "nanargmin"), _along("axis")),
    **dict.fromkeys(("lexsort", "unwrap", "recurrence", "rfft", "irfft", "hfft", "ihfft"), _along("axis")),
    **dict.fromkeys(("fft", "ifft", "softmax", "log_softmax", "roll"), _along("axes")),
    **dict.fromkeys(("order", "embed_diagonal"), _stacks(1)),
    **dict.fromkeys(("diagonal", "inv", "pinv", "det", "slogdet", "cofactor", "cholesky", "qr"), _stacks(2)),
    **dict.fromkeys(("eig", "eigh", "eigvals", "eigvalsh", "svd", "svdvals"), _stacks(2)),
    "solve": _solve,
    **dict.fromkeys(("searchsorted", "bracket"), _search(0)),
    **dict.fromkeys(("digitize", "isin"), _search(1)),
    **dict.fromkeys(
        ("negative", "conjugate", "real", "imag", "convert", "copy", "round", "name", "recompute"), _broadcast
    ),
    **dict.fromkeys(("deg2rad", "rad2deg", "radians", "degrees", "ldexp"), _broadcast),
    **dict.fromkeys(("add", "subtract", "multiply", "divide", "difference", "where"), _broadcast),
}


def _var(x: Value, axes: tuple[int, ...], ddof: int, keepdims: bool = False) -> Value:
    off = absolute(subtract(x, reduction.mean(x, axes, keepdims=True)))
    count = math.prod(x.shape[d] for d in axes)
    return divide(reduction.sum(multiply(off, off), axes, keepdims=keepdims), count - ddof)


def _minus_max(x: Value, axes: tuple[int, ...]) -> tuple[Value, Value]:
    """The maximum along axes, and x minus it."""
    largest = elementwise.stop_gradient(reduction.max(x, axes, keepdims=True))
    return largest, elementwise.difference(x, largest)


def _softmax(x: Value, axes: tuple[int, ...]) -> Value:
    parts = exp(_minus_max(x, axes)[1])
    return divide(parts, reduction.sum(parts, axes, keepdims=True))


def _log_softmax(x: Value, axes: tuple[int, ...]) -> Value:
    below = _minus_max(x, axes)[1]
    return subtract(below, log(reduction.sum(exp(below), axes, keepdims=True)))


def _logsumexp(x: Value, axes: tuple[int, ...]) -> Value:
    largest, below = _minus_max(x, axes)
    return add(squeeze(largest, axes), log(reduction.sum(exp(below), axes)))


def _update_by_select(x: Value, v: Value, index: tuple) -> Value:
    """`update` as an elementwise select: the written value, or the old one."""
    mask, axis = numpy.ones((), bool), 0  # which places are written to; the axis of `v` that comes next
    for i in index:
        if i is None:
            v = squeeze(v, axis) if numpy.ndim(v) else v
            continue
        n = x.shape[axis]
        sources = numpy.full(n, -1)
        sources[i] = numpy.arange(sources[i].size).reshape(sources[i].shape)
        mask = mask & (sources >= 0).reshape(n, *[1] * (x.ndim - axis - 1))
        if numpy.ndim(v) and isinstance(i, int):
            v = expand_dims(v, axis)
        elif numpy.ndim(v) and v.shape[axis] != 1:
            v = take(v, numpy.maximum(sources, 0), axis) if (sources >= 0).any() else numpy.zeros((), x.dtype)
        axis += 1
    return where(mask, v, x)


def _scatter_set_by_select(x: Value, v: Value, *indices: Value) -> Value:
    """`scatter_set` as an elementwise select: the last value for a place wins."""
    wide = numpy.broadcast_shapes(*[numpy.shape(i) for i in indices])
    count, rest = math.prod(wide), x.shape[len(indices) :]
    if not count:
        return x
    nowhere, numbers = numpy.full(x.shape[: len(indices)], -1), numpy.arange(count).reshape(wide)
    sources = scatter_set_p.bind(nowhere, numbers, *indices)
    written = reshape(greater_equal(sources, 0), (*nowhere.shape, *[1] * len(rest)))
    values = gather_p.bind(reshape(v, (count, *rest)), elementwise.maximum(sources, 0))
    return where(written, values, x)


def _axes(types: Sequence[ShapedArray], params: dict) -> Iterable[int]:
    return params["axes"]


def _written(types: Sequence[ShapedArray], params: dict) -> Iterable[int]:
    return [d for d, label in enumerate(_sliced(params["index"], types[0].shape, _is_all)[0]) if label is None]


def _indices(types: Sequence[ShapedArray], params: dict) -> Iterable[int]:
    return range(len(types) - 2)


#: Operations that are decomposed if the first operand is split along certain dimensions: (these dimensions, how).
DECOMPOSED: dict[str, tuple[Callable, Callable]] = {
    "var": (_axes, _var),
    "softmax": (_axes, _softmax),
    "log_softmax": (_axes, _log_softmax),
    "logsumexp": (_axes, _logsumexp),
    "update": (_written, _update_by_select),
    "scatter_set": (_indices, _scatter_set_by_select),
}


def rule_of(primitive: Primitive) -> Rules | None:
    """The rule of an operation, or None."""
    return _broadcast if isinstance(primitive, Elementwise) else RULES.get(primitive.name)


# ---------------------------------------------------------------- how labels are split


Way = dict[Label, tuple[str, ...]]  # the axes that labels are split along; labels without an entry are whole
Array = tuple[Labels, tuple[int, ...], int]  # labels, shape, and itemsize in bytes


@functools.lru_cache(maxsize=4096)
def choose(
    operands: tuple[tuple[Array, Dims], ...], results: tuple[Array, ...], moves: int, stays: bool, sizes: Sizes
) -> Way:
    """The cheapest way to split an operation's labels.

    It is chosen for the shardings that the operands have. With `stays`, a way that moves no operand is preferred;
    otherwise the way that moves the fewest bytes, including those for reducing results. Ties are broken by the most
    ranks that share the work, then by the most axes (for axes of size 1).
    """
    kept = {label for labels, _, _ in results for label in labels}
    candidates = []
    for way in _ways(operands, results, dict(sizes)):
        moved = sum(
            route(have, _sharding(way, labels), shape, itemsize, sizes).bytes
            for (labels, shape, itemsize), have in operands
        )
        n = _parts([some for label, some in way.items() if label not in kept], dict(sizes))
        blocks = sum(
            itemsize * math.prod(shape) // _parts(_sharding(way, labels), dict(sizes))
            for labels, shape, itemsize in results
        )
        total = moved + moves * blocks * (n - 1) // n
        shared = _parts(way.values(), dict(sizes)), sum(map(len, way.values()))
        candidates.append(((stays and moved > 0, total, -shared[0], -shared[1]), way))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _ways(operands: Sequence[tuple[Array, Dims]], results: Sequence[Array], sizes: dict[str, int]) -> Iterator[Way]:
    """The ways to split labels as some operand is split, or along fewer axes.

    Each axis is used once. A label may also gain the axes that split a dimension of the same operand that must become
    whole.
    """
    lengths: dict[Label, list[int]] = {}
    splits: dict[Label, set[tuple[str, ...]]] = {}
    for labels, shape, _ in (*[array for array, _ in operands], *results):
        for label, n in zip(labels, shape):
            lengths.setdefault(label, []).append(n)
    for (labels, _, _), have in operands:
        freed = tuple(a for label, axes in zip(labels, have) if label is None for a in axes)
        for label, axes in zip(labels, have):
            if label is not None:
                more = (*axes, *freed)
                splits.setdefault(label, {()}).update(more[: k + 1] for k in range(len(more)))
    for chosen in itertools.product(*map(sorted, splits.values())):
        named = [a for axes in chosen for a in axes]
        way = {label: axes for label, axes in zip(splits, chosen) if axes}
        even = all(n % _parts([axes], sizes) == 0 for label, axes in way.items() for n in lengths[label])
        if even and len(set(named)) == len(named):
            yield way


def _sharding(way: Way, labels: Labels) -> Dims:
    """The sharding of an array with these labels."""
    return tuple(way.get(label, ()) for label in labels)


def _parts(dims: Iterable[tuple[str, ...]], sizes: dict[str, int]) -> int:
    """The number of blocks along these axes."""
    return part_count(itertools.chain(*dims), sizes)


# ---------------------------------------------------------------- the operation


def dispatch_to_shards(interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
    """Run an operation on sharded operands as a `shard_map` of it.

    Returns None if no operand is sharded. If the operands are on several meshes, those on another mesh than the first
    one's are gathered. Raises LeakedTracerError for tracers of a transformation that has ended.
    """
    if interpreter.scope is not None:
        return None
    shardings = [typeof(x).sharding if isinstance(x, Tracer) else None for x in args]
    if any(sharding is not None and sharding.is_element for sharding in shardings):
        return None  # `vmap`, beneath, runs it on all elements at once
    if primitive is reshard_p:  # its operand was found not to be batched
        with running(interpreter):
            return redistribute(*args, **params)
    if primitive.has_effect and not isinstance(interpreter, Evaluate):
        return None
    meshes = [sharding.mesh for sharding in shardings if sharding is not None]
    if isinstance(interpreter, Evaluate):
        _check_alive(args)
        if primitive.has_effect:  # it sees sharded arrays as the user does
            return primitive.impl(*args, **params)
    if not meshes:
        return None
    mesh = meshes[0]
    if not all(other.is_like(mesh) for other in meshes):
        here = [t is None or t.mesh.is_like(mesh) for t in shardings]
        with running(interpreter):
            args = [x if yes else t.gathered(x) for x, t, yes in zip(args, shardings, here)]
        shardings = [t if yes else None for t, yes in zip(shardings, here)]
    types = [typeof(x) for x in args]
    specs = [WHOLE if sharding is None else sharding.spec for sharding in shardings]
    dims_of = [spec.dims(t.ndim) for spec, t in zip(specs, types)]
    dims, decomposed = DECOMPOSED.get(primitive.name, (None, None))
    if decomposed is not None and shardings[0] is not None and any(dims_of[0][d] for d in dims(types, params)):
        with running(interpreter):
            return decomposed(*args, **params)
    operands = tuple((type(x) if type(x) in _WEAK else t, dims) for x, t, dims in zip(args, types, dims_of))
    what = primitive, operands, tuple(params.items()), sizes_of(mesh)
    plan = (_known_plan if _can_be_hashed(what) else _plan)(*what)
    if plan.of_whole and isinstance(interpreter, JVP):
        return None
    with running(interpreter):
        return _mapped(primitive, args, params, mesh, specs, plan)


def _can_be_hashed(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:  # slices cannot
        return False
    return True


def _check_alive(args: Sequence[Value]) -> None:
    for x in args:
        if isinstance(x, Tracer) and not isinstance(x, ShardedArray):
            raise LeakedTracerError(leak_message(x))


WHOLE = P()
_WEAK = (bool, int, float, complex)  # Python's numbers promote weakly: a plan depends on their type alone


class Plan(NamedTuple):
    """How an operation runs on blocks of given types and shardings."""

    routes: list[Route]  # one for each operand
    run: Callable | None  # takes the way, and the resharded blocks; None: the operation itself
    params: dict  # the operation's parameters whose values differ on blocks
    way: Way
    varying: frozenset  # the axes that labels are split along
    over: tuple[str, ...]  # the axes of labels that the results lack
    reduce: Callable | None
    out_specs: tuple[PartitionSpec, ...]
    of_whole: bool


def _plan(primitive: Primitive, operands: tuple[tuple[Any, Dims], ...], params: tuple, sizes: Sizes) -> Plan:
    """The plan for operands of these types and shardings.

    The types of Python's numbers are Python's.
    """
    given, known = dict(params), dict(sizes)
    weak = [t if isinstance(t, ShapedArray) else t(0) for t, _ in operands]
    types = [typeof(t) for t in weak]
    outs = primitive.typecheck(weak, given)
    rule = (rule_of(primitive) or _whole)(types, outs, given)
    arrays = [(labels, t.shape, t.dtype.itemsize) for labels, t in zip(rule.operands, types)]
    have = [dims for _, dims in operands]
    results = tuple((labels, t.shape, t.dtype.itemsize) for labels, t in zip(rule.results, outs))
    way = choose(tuple(zip(arrays, have)), results, rule.moves, rule.stays, sizes)
    out_shardings = [_sharding(way, labels) for labels in rule.results]
    kept = {label for labels in rule.results for label in labels}
    changed = dict(rule.params)
    if "shape" in given:
        changed["shape"] = tuple(n // part_count(axes, known) for n, axes in zip(outs[0].shape, out_shardings[0]))
    return Plan(
        routes=[
            route(dims, _sharding(way, labels), shape, itemsize, sizes)
            for (labels, shape, itemsize), dims in zip(arrays, have)
        ],
        run=rule.run,
        params=changed,
        way=way,
        varying=frozenset(a for axes in way.values() for a in axes),
        over=tuple(a for label, axes in way.items() if label not in kept for a in axes),
        reduce=rule.reduce,
        out_specs=tuple(map(PartitionSpec.of_dims, out_shardings)),
        of_whole=rule.of_whole,
    )


_known_plan = functools.lru_cache(maxsize=4096)(_plan)


def _mapped(
    primitive: Primitive,
    args: Sequence[Value],
    params: dict,
    mesh: Mesh,
    specs: Sequence[PartitionSpec],
    plan: Plan,
) -> Any:
    """Run the operation as a `shard_map` with its arguments' specs as `in_specs`."""
    arrays = [i for i, x in enumerate(args) if not is_scalar_constant(x)]
    on_blocks = {**params, **plan.params}

    def body(*blocks: Value) -> tuple:
        current_scope().function = primitive.name
        values = list(args)
        for i, block in zip(arrays, blocks):
            values[i] = plan.routes[i](block, plan.varying)
        found = plan.run(plan.way, *values) if plan.run is not None else primitive.bind(*values, **on_blocks)
        found = found if primitive.multiple_results else [found]
        if plan.over and plan.reduce is not None:
            found = [plan.reduce(x, plan.over) for x in found]
        return [pbroadcast_to(x, spec.axes) for x, spec in zip(found, plan.out_specs)], plan.out_specs

    in_specs = tuple(specs[i] for i in arrays)
    found = shard_map_p.bind(*[args[i] for i in arrays], body=body, in_specs=in_specs, **everywhere(mesh))
    return found if primitive.multiple_results else found[0]


core.dispatch_to_shards = dispatch_to_shards
