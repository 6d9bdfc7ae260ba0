"""How collectives are made of messages: the classical algorithms, step by step, each step a `ppermute`.

=================================== ============== ==================== =========================
algorithm                           instead of     steps                bytes (of the whole, K)
=================================== ============== ==================== =========================
ring_all_gather                     all_gather     N-1                  (N-1)K/N
bidirectional_ring_all_gather       all_gather     N-1                  (N-1)K/2N each way
recursive_doubling_all_gather       all_gather     log2 N               (N-1)K/N
bruck_all_gather                    all_gather     log2 N, rounded up   (N-1)K/N
ring_reduce_scatter                 psum_scatter   N-1                  (N-1)K/N
bidirectional_ring_reduce_scatter   psum_scatter   N-1                  (N-1)K/2N each way
recursive_halving_reduce_scatter    psum_scatter   log2 N               (N-1)K/N
ring_all_reduce                     psum           2(N-1)               2(N-1)K/N
bidirectional_ring_all_reduce       psum           2(N-1)               (N-1)K/N each way
recursive_doubling_all_reduce       psum           log2 N               K log2 N
halving_doubling_all_reduce         psum           2 log2 N             2(N-1)K/N
tree_all_reduce                     psum           2 log2 N, rounded up 2K log2 N, rounded up
parameter_server_all_reduce         psum           2(N-1)               2(N-1)K
binomial_tree_broadcast             broadcast      log2 N, rounded up   K log2 N, rounded up
binomial_tree_reduce                reduce         log2 N, rounded up   K log2 N, rounded up
binomial_tree_scatter               scatter        log2 N, rounded up   (N-1)K/N
binomial_tree_gather                gather         log2 N, rounded up   (N-1)K/N
pairwise_all_to_all                 all_to_all     N-1                  (N-1)K/N
=================================== ============== ==================== =========================

N is the number of ranks. Steps come one after another. K is the size of the whole: of what an all-gather returns, of
what a reduce-scatter takes, of an array that is summed. Bytes are those that take time: of each step the longest
message. Where N is no power of two, `collectives.cost` has the exact formulas, and counts.

They are called inside the body of a `shard_map` or a named `vmap`, in place of the collective, with its arguments; they
run on simulated ranks and on MPI ranks, and are differentiated as any program is. But two things that a collective
knows, a program of messages does not:

- *Its result varies*, for the type system: what comes by `ppermute` may differ from rank to rank. That an all-reduce
  leaves the same sum on all of them is true, but no type says so, and `out_specs=P()` is refused. A sum that is typed
  as the same on all ranks is made by a collective whose result is: by `psum` itself, or by the last one of
  `all_gather_invariant(ring_reduce_scatter(x, 'i', tiled=True), 'i', tiled=True)`.
- *Its transpose is as dear as itself*: each message is sent back. The transpose of an all-reduce of messages is another
  one, where that of `psum` is a `pbroadcast`, and free (JEP 17111).

The trick that keeps them short: ranks look at their parts, or at the blocks that have arrived, in an order that begins
with their own (by distance along the ring, or by exclusive or), so that in each step all ranks send and receive what
has the same index. Only on the way in, or out, does an index depend on the rank.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; the tutorial of
JAX's shard_map, for the ring as a program.

The examples take for granted what those of `collectives.ops` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import minidiff.numpy as np
from collectives.axes import AxisName, check_rank, check_split, single_axes
from collectives.backends.base import split_dimension, unsplit_dimension
from collectives.ops import (
    array_of,
    axis_index,
    axis_size,
    check_written,
    counted,
    each_leaf,
    pbroadcast,
    ppermute,
    shifted,
    varying_over,
)
from minidiff.core import Value, typeof
from minidiff.ops.shape import normalize_axis

__all__ = [
    "bidirectional_ring_all_gather",
    "bidirectional_ring_all_reduce",
    "bidirectional_ring_reduce_scatter",
    "binomial_tree_broadcast",
    "binomial_tree_gather",
    "binomial_tree_reduce",
    "binomial_tree_scatter",
    "bruck_all_gather",
    "halving_doubling_all_reduce",
    "pairwise_all_to_all",
    "parameter_server_all_reduce",
    "recursive_doubling_all_gather",
    "recursive_doubling_all_reduce",
    "recursive_halving_reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_all_reduce",
]

Pairs = Sequence[tuple[int, int]]  # (source, destination)

# ---------------------------------------------------------------- steps, in an order that begins with the rank itself


def _swap(x: Value, axis_name: AxisName, bit: int, ranks: int) -> Value:
    """Values exchanged between the ranks, among the first so many, whose numbers differ in this bit."""
    return ppermute(x, axis_name, [(rank, rank ^ bit) for rank in range(ranks)])


def _ranks(axis_name: AxisName) -> Value:
    """The indices of all ranks, typed as varying like all that they are used with."""
    return pbroadcast(np.arange(axis_size(axis_name)), axis_name)


def _by_distance(axis_name: AxisName) -> Value:
    """The ranks in the order in which the ring comes to them from this one."""
    ranks = _ranks(axis_name)
    return (axis_index(axis_name) + ranks) % ranks.size


def _by_distance_back(axis_name: AxisName) -> Value:
    """For each rank, how far along the ring it is from this one: the inverse of `_by_distance`."""
    ranks = _ranks(axis_name)
    return (ranks - axis_index(axis_name)) % ranks.size


def _by_xor(axis_name: AxisName, n: int) -> Value:
    """The first n ranks (n is a power of two) in an order that begins with this one; it is its own inverse."""
    return np.bitwise_xor(axis_index(axis_name) % n, _ranks(axis_name)[:n])


def _ring_gather(block: Value, axis_name: AxisName, by: int = 1) -> Value:
    """Everyone's block, by distance: each goes all around the ring, a step at a time."""
    n = axis_size(axis_name)
    found = {0: block}
    for step in range(1, n):
        block = shifted(block, axis_name, by)
        found[-by * step % n] = block
    return np.stack([found[k] for k in range(n)])


def _ring_scatter(parts: Value, axis_name: AxisName, by: int = 1) -> Value:
    """The sum of all parts for this rank, from parts by distance: sums go around the ring, and grow at each rank."""
    n = axis_size(axis_name)
    total = parts[-by % n]
    for step in range(2, n + 1):
        total = shifted(total, axis_name, by) + parts[-by * step % n]
    return total


def _doubling_gather(block: Value, axis_name: AxisName, n: int) -> Value:
    """The blocks of the first n ranks, by exclusive or: at each step a rank sends all that it has."""
    blocks, bit = block[None], 1
    while bit < n:
        blocks = np.concatenate([blocks, _swap(blocks, axis_name, bit, n)])
        bit *= 2
    return blocks


def _halving_scatter(parts: Value, axis_name: AxisName, n: int) -> Value:
    """The sum of the parts for this rank, from parts by exclusive or: at each step a rank sends half of what it has."""
    bit = n // 2
    while bit:
        parts = parts[:bit] + _swap(parts[bit:], axis_name, bit, n)
        bit //= 2
    return parts[0]


# ---------------------------------------------------------------- arguments and results


def _operand(name: str, x: Any, axis_name: AxisName) -> Value:
    """A leaf as an array that varies along the axes, which are checked."""
    x, run = array_of(x), single_axes(name, axis_name)
    check_written(name, x, run)
    return varying_over(x, run)


def _summand(name: str, x: Any, axis_name: AxisName) -> Value:
    """The same, where booleans are counted."""
    return counted(_operand(name, x, axis_name))


def _gathered(name: str, gather: Callable, x: Any, axis_name: AxisName, axis: int, tiled: bool) -> Any:
    """What `gather` makes of a block, the blocks of all ranks in order, laid along an axis."""

    def each(leaf):
        leaf = _operand(name, leaf, axis_name)
        at = normalize_axis(axis, typeof(leaf).ndim + (not tiled), name)
        return unsplit_dimension(gather(leaf), at, tiled)

    return each_leaf(each, x)


def _scattered(
    name: str, scatter: Callable, x: Any, axis_name: AxisName, axis: int, tiled: bool, operand: Callable = _summand
) -> Any:
    """What `scatter` makes of the parts of an array along an axis."""

    def each(leaf):
        leaf = operand(name, leaf, axis_name)
        at = normalize_axis(axis, typeof(leaf).ndim, name)
        n = axis_size(axis_name)
        check_split(name, leaf, at, n, tiled)
        return scatter(split_dimension(leaf, n, at, tiled))

    return each_leaf(each, x)


def _all_reduced(name: str, reduce: Callable, x: Any, axis_name: AxisName) -> Any:
    return each_leaf(lambda leaf: reduce(_summand(name, leaf, axis_name)), x)


def _in_parts(x: Value, n: int, reduce: Callable) -> Value:
    """An all-reduce of an array of any shape by one of n equal parts: zeros fill it up."""
    shape = x.shape
    flat = x.reshape(-1)
    size = flat.shape[0]
    parts = np.pad(flat, (0, -size % n)).reshape(n, -(-size // n))
    return reduce(parts).reshape(-1)[:size].reshape(shape)


def _in_halves(x: Value, do: Callable) -> Value:
    """The last dimension in two halves, one for each way round the ring: `do(half, by)`."""
    half = (x.shape[-1] + 1) // 2
    return np.concatenate([do(x[..., :half], 1), do(x[..., half:], -1)], axis=-1)


def _is_among(ranks: Sequence[int], axis_name: AxisName) -> Value:
    """Whether this rank is one of these."""
    here = np.isin(np.arange(axis_size(axis_name)), ranks)
    return np.take(pbroadcast(here, axis_name), axis_index(axis_name))


def _deliver(x: Value, axis_name: AxisName, pairs: Pairs) -> Value:
    """Values that take the place of what the receivers had; nothing changes on the other ranks."""
    received = ppermute(x, axis_name, pairs)
    return np.where(_is_among([destination for _, destination in pairs], axis_name), received, x)


def _at_root(x: Value, axis_name: AxisName, root: int) -> Value:
    """What the root has; zeros on the other ranks."""
    return np.where(_is_among([root], axis_name), x, pbroadcast(np.zeros((), x.dtype), axis_name))


def _power_of_two(name: str, n: int, instead: str) -> None:
    if n & (n - 1):
        raise ValueError(f"{name}: takes as many ranks as a power of two, but there are {n}: write {instead}")


def _check_root(name: str, root: int, axis_name: AxisName) -> int:
    return check_rank(name, "the root", root, axis_name, single_axes(name, axis_name).size)


# ---------------------------------------------------------------- all-gathers


def ring_all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """`all_gather` along a ring: N-1 steps, in each of which every rank passes on the block that it received last.

    Shapes over N ranks: [a, b] -> [N, a, b], tiled [N*a, b]. Varying -> varying; transposes to a ring reduce-scatter,
    the same ring backwards. A rank sends (N-1)K/N bytes, of a result of K. Any number of ranks.

    >>> f = lambda x: algorithms.ring_all_gather(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([3, 9, 3, 9], P('i'))

    Source: shard_map tutorial, "ppermute"; Thakur et al., section 4.1.
    """

    def gather(block):
        return _ring_gather(block, axis_name)[_by_distance_back(axis_name)]

    return _gathered("ring_all_gather", gather, x, axis_name, axis, tiled)


def bidirectional_ring_all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """`ring_all_gather` with half of each block going round one way, half the other way.

    Where links work both ways at once, and a rank uses both of its links at once, N-1 steps take half as long:
    (N-1)K/2N bytes each way. (As run here, messages come one after the other, and nothing is won.)

    >>> f = lambda x: algorithms.bidirectional_ring_all_gather(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([3, 9, 3, 9], P('i'))

    Source: shard_map tutorial, the second matrix product that overlaps with its all-gather.
    """

    def gather(block):
        blocks = _in_halves(block.reshape(-1), lambda half, by: _ring_gather(half, axis_name, by))
        return blocks.reshape(blocks.shape[0], *block.shape)[_by_distance_back(axis_name)]

    return _gathered("bidirectional_ring_all_gather", gather, x, axis_name, axis, tiled)


def recursive_doubling_all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """`all_gather` in log2 N steps: ranks at distances 1, 2, 4, … exchange all that they have.

    Shapes as of `all_gather`. A rank sends (N-1)K/N bytes, of a result of K: as many as along a ring, in fewer
    messages. Raises ValueError where N is no power of two: `bruck_all_gather` takes any.

    >>> f = lambda x: algorithms.recursive_doubling_all_gather(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9])).shape
    (4, 1)

    Source: Thakur et al., section 4.1.
    """

    def gather(block):
        n = axis_size(axis_name)
        _power_of_two("recursive_doubling_all_gather", n, "bruck_all_gather or ring_all_gather")
        return _doubling_gather(block, axis_name, n)[_by_xor(axis_name, n)]

    return _gathered("recursive_doubling_all_gather", gather, x, axis_name, axis, tiled)


def bruck_all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """`all_gather` in log2 N steps, rounded up, over any number of ranks: each sends all it has 1, 2, 4, … ranks back.

    Shapes as of `all_gather`. A rank sends (N-1)K/N bytes, of a result of K.

    >>> f = lambda x: algorithms.bruck_all_gather(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([3, 9, 3, 9], P('i'))

    Source: J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
    1997; Thakur et al., section 4.1.
    """

    def gather(block):
        n, have = axis_size(axis_name), 1
        blocks = block[None]
        while have < n:
            blocks = np.concatenate([blocks, shifted(blocks[: n - have], axis_name, -have)])
            have *= 2
        return blocks[_by_distance_back(axis_name)]

    return _gathered("bruck_all_gather", gather, x, axis_name, axis, tiled)


# ---------------------------------------------------------------- reduce-scatters


def ring_reduce_scatter(x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """`psum_scatter` along a ring: N-1 steps, in each of which a rank adds its own part to the sum that it passes on.

    Shapes over N ranks: [N, b] -> [b], tiled [N*a, b] -> [a, b]. Varying -> varying; transposes to a ring all-gather.
    A rank sends (N-1)K/N bytes, of an operand of K. Any number of ranks; raises ValueError where the dimension cannot
    be split over them.

    >>> f = lambda x: algorithms.ring_reduce_scatter(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2], P('i'))

    Source: shard_map tutorial, "ppermute"; the first half of the ring all-reduce (Patarasuk and Yuan).
    """

    def scatter(parts):
        return _ring_scatter(parts[_by_distance(axis_name)], axis_name)

    return _scattered("ring_reduce_scatter", scatter, x, axis_name, scatter_dimension, tiled)


def bidirectional_ring_reduce_scatter(
    x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False
) -> Any:
    """`ring_reduce_scatter` with half of each part going round one way, half the other way: (N-1)K/2N bytes each way.

    >>> f = lambda x: algorithms.bidirectional_ring_reduce_scatter(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2], P('i'))

    Source: shard_map tutorial, the matrix product that overlaps with its reduce-scatter, both ways.
    """

    def scatter(parts):
        flat = parts.reshape(parts.shape[0], math.prod(parts.shape[1:]))[_by_distance(axis_name)]
        return _in_halves(flat, lambda half, by: _ring_scatter(half, axis_name, by)).reshape(parts.shape[1:])

    return _scattered("bidirectional_ring_reduce_scatter", scatter, x, axis_name, scatter_dimension, tiled)


def recursive_halving_reduce_scatter(
    x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False
) -> Any:
    """`psum_scatter` in log2 N steps: ranks at distances N/2, N/4, …, 1 exchange the half that the other one needs.

    Shapes as of `psum_scatter`. A rank sends (N-1)K/N bytes, of an operand of K. Raises ValueError where N is no power
    of two: `ring_reduce_scatter` takes any number of ranks.

    >>> f = lambda x: algorithms.recursive_halving_reduce_scatter(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2], P('i'))

    Source: Thakur et al., section 4.4.
    """

    def scatter(parts):
        n = axis_size(axis_name)
        _power_of_two("recursive_halving_reduce_scatter", n, "ring_reduce_scatter")
        return _halving_scatter(parts[_by_xor(axis_name, n)], axis_name, n)

    return _scattered("recursive_halving_reduce_scatter", scatter, x, axis_name, scatter_dimension, tiled)


# ---------------------------------------------------------------- all-reduces


def ring_all_reduce(x: Any, axis_name: AxisName) -> Any:
    """`psum` along a ring, in two rounds: a reduce-scatter, then an all-gather of the sums. 2(N-1) steps.

    `x` is a tree of arrays; each result has its array's shape. A rank sends 2(N-1)K/N bytes, of an array of K: less
    than 2K, however many ranks there are. (Arrays are filled up to a multiple of N entries.) Varying -> varying, though
    all ranks get the same: see the module. Any number of ranks.

    >>> f = lambda x: algorithms.ring_all_reduce(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2, 7, 2], P('i'))

    Source: Patarasuk and Yuan, 2009.
    """

    def reduce(parts):
        own = _ring_scatter(parts[_by_distance(axis_name)], axis_name)
        return _ring_gather(own, axis_name)[_by_distance_back(axis_name)]

    return _all_reduced("ring_all_reduce", lambda leaf: _in_parts(leaf, axis_size(axis_name), reduce), x, axis_name)


def bidirectional_ring_all_reduce(x: Any, axis_name: AxisName) -> Any:
    """`ring_all_reduce` with half of each part going round one way, half the other way: (N-1)K/N bytes each way.

    >>> f = lambda x: algorithms.bidirectional_ring_all_reduce(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2, 7, 2], P('i'))

    Source: as of `bidirectional_ring_all_gather`.
    """

    def around(half, by):
        return _ring_gather(_ring_scatter(half, axis_name, by), axis_name, by)

    def reduce(parts):
        return _in_halves(parts[_by_distance(axis_name)], around)[_by_distance_back(axis_name)]

    return _all_reduced(
        "bidirectional_ring_all_reduce", lambda leaf: _in_parts(leaf, axis_size(axis_name), reduce), x, axis_name
    )


def recursive_doubling_all_reduce(x: Any, axis_name: AxisName) -> Any:
    """`psum` in log2 N steps: ranks at distances 1, 2, 4, … exchange their sums. For short arrays, where steps count.

    A rank sends K log2 N bytes, of an array of K. Where N is no power of two, the ranks beyond the largest one hand
    their values to others first, and get the sum from them: two steps more. Varying -> varying: see the module.

    >>> f = lambda x: algorithms.recursive_doubling_all_reduce(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2, 7, 2], P('i'))

    Source: Thakur et al., section 4.5.
    """

    def reduce(leaf, n):
        bit = 1
        while bit < n:
            leaf = leaf + _swap(leaf, axis_name, bit, n)
            bit *= 2
        return leaf

    return _all_reduced("recursive_doubling_all_reduce", lambda leaf: _folded(leaf, axis_name, reduce), x, axis_name)


def halving_doubling_all_reduce(x: Any, axis_name: AxisName) -> Any:
    """`psum` by recursive halving, then doubling (Rabenseifner's algorithm): 2 log2 N steps, 2(N-1)K/N bytes.

    A reduce-scatter, then an all-gather, in as many bytes as along a ring, and fewer steps. (Arrays are filled up to a
    multiple of N entries.) Where N is no power of two, the ranks beyond the largest one hand their values to others
    first, and get the sum from them: two steps and 2K bytes more. Varying -> varying: see the module.

    >>> f = lambda x: algorithms.halving_doubling_all_reduce(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2, 7, 2], P('i'))

    Source: R. Rabenseifner, "Optimization of collective reduction operations", 2004; Thakur et al., section 4.5.
    """

    def reduce(leaf, n):
        order = _by_xor(axis_name, n)

        def in_parts(parts):
            own = _halving_scatter(parts[order], axis_name, n)
            return _doubling_gather(own, axis_name, n)[order]

        return _in_parts(leaf, n, in_parts)

    return _all_reduced("halving_doubling_all_reduce", lambda leaf: _folded(leaf, axis_name, reduce), x, axis_name)


def _folded(x: Value, axis_name: AxisName, reduce: Callable) -> Value:
    """An all-reduce by `reduce(x, n)` among the first n ranks, as many as the largest power of two."""
    ranks = axis_size(axis_name)
    n = 1 << (ranks.bit_length() - 1)
    extra = range(n, ranks)
    if not extra:
        return reduce(x, n)
    x = reduce(x + ppermute(x, axis_name, [(rank, rank - n) for rank in extra]), n)
    return _deliver(x, axis_name, [(rank - n, rank) for rank in extra])


def tree_all_reduce(x: Any, axis_name: AxisName, *, root: int = 0) -> Any:
    """`psum` as a reduction to one rank, then a broadcast from there, along binomial trees.

    2 log2 N steps (each logarithm rounded up), of K bytes each. Varying -> varying: see the module.

    >>> f = lambda x: algorithms.tree_all_reduce(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2, 7, 2], P('i'))

    Source: Thakur et al., section 4.5 (what MPICH did before).
    """
    root = _check_root("tree_all_reduce", root, axis_name)

    def reduce(leaf):
        return _down_tree(_up_tree(leaf, axis_name, root), axis_name, root)

    return _all_reduced("tree_all_reduce", reduce, x, axis_name)


def parameter_server_all_reduce(x: Any, axis_name: AxisName, *, root: int = 0) -> Any:
    """`psum` by one rank, the server: it receives the others' arrays one after the other, and sends the sum to each.

    The server receives (N-1)K bytes and sends as many, the others K each: time grows as the number of ranks, where
    along a ring it hardly does. 2(N-1) steps. Varying -> varying: see the module.

    >>> f = lambda x: algorithms.parameter_server_all_reduce(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2, 7, 2], P('i'))

    Source: M. Li et al., "Scaling distributed machine learning with the parameter server", 2014 (with one server).
    """
    root = _check_root("parameter_server_all_reduce", root, axis_name)

    def reduce(leaf):
        workers = [rank for rank in range(axis_size(axis_name)) if rank != root]
        total = leaf
        for rank in workers:
            total = total + ppermute(leaf, axis_name, [(rank, root)])
        for rank in workers:
            total = _deliver(total, axis_name, [(root, rank)])
        return total

    return _all_reduced("parameter_server_all_reduce", reduce, x, axis_name)


# ---------------------------------------------------------------- trees


def binomial_tree_broadcast(x: Any, axis_name: AxisName, *, root: int = 0) -> Any:
    """`broadcast_varying` along a tree: at each step twice as many ranks have the root's value.

    Shapes stay. log2 N steps, rounded up. Each step is a message of K bytes; the root sends in all of them. Varying ->
    varying, though all get the same: see the module. Transposes to the sum on the root, along the same tree. Raises
    ValueError where `root` is no index along the axis.

    >>> f = lambda x: algorithms.binomial_tree_broadcast(x, 'i', root=1)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1, 4, 1], P('i'))

    Source: Thakur et al., section 4.3.
    """
    root = _check_root("binomial_tree_broadcast", root, axis_name)
    return each_leaf(lambda leaf: _down_tree(_operand("binomial_tree_broadcast", leaf, axis_name), axis_name, root), x)


def binomial_tree_reduce(x: Any, axis_name: AxisName, *, root: int = 0) -> Any:
    """`reduce` along a tree: the sum on the rank `root`, zeros on the others.

    Shapes stay; booleans are counted. log2 N steps, rounded up. Each step is a message of K bytes; the root receives in
    all of them. Varying -> varying; transposes to a broadcast of the root's. Raises ValueError where `root` is no index
    along the axis.

    >>> f = lambda x: algorithms.binomial_tree_reduce(x, 'i', root=1)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([0, 0, 7, 2], P('i'))

    Source: Thakur et al., section 4.5.
    """
    root = _check_root("binomial_tree_reduce", root, axis_name)

    def reduce(leaf):
        total = _up_tree(_summand("binomial_tree_reduce", leaf, axis_name), axis_name, root)
        return _at_root(total, axis_name, root)

    return each_leaf(reduce, x)


def binomial_tree_gather(x: Any, axis_name: AxisName, *, root: int = 0, axis: int = 0, tiled: bool = False) -> Any:
    """`gather` along a tree: all blocks on the rank `root`, zeros on the others. Who sends, sends all it has, once.

    Shapes over N ranks: [a, b] -> [N, a, b], tiled [N*a, b]. log2 N steps, rounded up; (N-1)K/N bytes, of a result of K
    (where N is no power of two, as many as if it were the next). Varying -> varying; transposes to a scatter, along the
    same tree. Raises ValueError where `root` is no index along the axis.

    >>> f = lambda x: algorithms.binomial_tree_gather(x, 'i', root=1, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([0, 0, 3, 9], P('i'))

    Source: Thakur et al., section 4.3: the scatter there, backwards.
    """
    root = _check_root("binomial_tree_gather", root, axis_name)

    def gather(block):
        blocks = block[None]
        for pairs in reversed(_edges(axis_name, root)):
            received = ppermute(blocks, axis_name, [(below, above) for above, below in pairs])
            blocks = np.concatenate([blocks, received])
        blocks = np.roll(blocks[: axis_size(axis_name)], root, axis=0)
        return _at_root(blocks, axis_name, root)

    return _gathered("binomial_tree_gather", gather, x, axis_name, axis, tiled)


def binomial_tree_scatter(x: Any, axis_name: AxisName, *, root: int = 0, axis: int = 0, tiled: bool = False) -> Any:
    """`scatter` along a tree: each rank gets its part of the root's array. At each step all who have some send half.

    Shapes over N ranks: [N, b] -> [b], tiled [N*a, b] -> [a, b]. log2 N steps, rounded up; (N-1)K/N bytes, of an
    operand of K (where N is no power of two, as many as if it were the next). Varying -> varying; transposes to a
    gather, along the same tree. Raises ValueError where `root` is no index along the axis, or the dimension cannot be
    split.

    >>> f = lambda x: algorithms.binomial_tree_scatter(x, 'i', root=1, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1], P('i'))

    Source: Thakur et al., section 4.3.
    """
    root = _check_root("binomial_tree_scatter", root, axis_name)

    def scatter(parts):
        n, levels = axis_size(axis_name), _edges(axis_name, root)
        missing = 2 ** len(levels) - n
        parts = np.pad(np.roll(parts, -root, axis=0), [(0, missing), *[(0, 0)] * (parts.ndim - 1)])
        for pairs in levels:
            half = parts.shape[0] // 2
            received = ppermute(parts[half:], axis_name, pairs)
            parts = np.where(_is_among([below for _, below in pairs], axis_name), received, parts[:half])
        return parts[0]

    return _scattered("binomial_tree_scatter", scatter, x, axis_name, axis, tiled, _operand)


def _edges(axis_name: AxisName, root: int) -> list[Pairs]:
    """The binomial tree: for each level, from the root's, the ranks that are above and those that are below them."""
    n = axis_size(axis_name)
    reach, levels = 1, []
    while reach < n:
        levels.append([((k + root) % n, (k + reach + root) % n) for k in range(0, n - reach, 2 * reach)])
        reach *= 2
    return levels[::-1]


def _down_tree(x: Value, axis_name: AxisName, root: int) -> Value:
    for pairs in _edges(axis_name, root):
        x = _deliver(x, axis_name, pairs)
    return x


def _up_tree(x: Value, axis_name: AxisName, root: int) -> Value:
    """The sum on the root; sums of some on the others."""
    for pairs in reversed(_edges(axis_name, root)):
        x = x + ppermute(x, axis_name, [(below, above) for above, below in pairs])
    return x


# ---------------------------------------------------------------- all-to-all


def pairwise_all_to_all(x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Any:
    """`all_to_all` in N-1 steps: at step k, a rank sends a part to the one k further on, and gets one from k before.

    Shapes as of `all_to_all`: over N ranks, split_axis=0, concat_axis=1, [N, b] -> [b, N], tiled [N*a, b] -> [a, N*b].
    Varying -> varying. A rank sends (N-1)K/N bytes, of an operand of K. Any number of ranks.

    >>> f = lambda x: algorithms.pairwise_all_to_all(x, 'i', 0, 0, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([3, 4, 1, 1], P('i'))

    Source: Thakur et al., section 4.2.
    """

    def each(leaf):
        leaf = _operand("pairwise_all_to_all", leaf, axis_name)
        n, ndim = axis_size(axis_name), typeof(leaf).ndim
        split, concat = (normalize_axis(a, ndim, "pairwise_all_to_all") for a in (split_axis, concat_axis))
        check_split("pairwise_all_to_all", leaf, split, n, tiled)
        parts = split_dimension(leaf, n, split, tiled)[_by_distance(axis_name)]
        arrived = [parts[0], *[shifted(parts[k], axis_name, k) for k in range(1, n)]]
        arrived = np.stack([arrived[-k % n] for k in range(n)])[_by_distance_back(axis_name)]
        return unsplit_dimension(arrived, concat, tiled)

    return each_leaf(each, x)
