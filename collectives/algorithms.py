"""The classical collective algorithms as programs of messages (`ppermute`s).

=================================== ============== ==================== =========================
algorithm                           instead of     steps                bytes (K in total)
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

N is the number of ranks, and steps run one after another. K is the size in bytes of the whole array: the result of an
all-gather, the operand of a reduce-scatter, or the array that is summed. Bytes are those on the critical path: the
longest message of each step, summed over steps. `collectives.cost` has the exact formulas, also where N is not a power
of two, and counts steps and bytes on tapes.

Call them inside the body of a `shard_map` or a named `vmap`, in place of the collective and with its arguments. They
run on simulated ranks and on MPI ranks, and are differentiated like any program. They differ from collectives in two
ways:

- *The result is typed as varying*, because a value received by `ppermute` may differ between ranks. An all-reduce does
  leave the same sum on all of them, but the type system cannot see that, and refuses `out_specs=P()`. For an invariant
  sum, end with a collective whose result is typed as invariant: `psum` itself, or `all_gather_invariant` as in
  `all_gather_invariant(ring_reduce_scatter(x, 'i', tiled=True), 'i', tiled=True)`.
- *The transpose costs as much as the algorithm itself*, because each message is sent back. The transpose of an
  all-reduce made of messages is another all-reduce; the transpose of `psum` is a `pbroadcast`, which is free
  (JEP 17111).

One trick keeps the programs short: each rank orders its parts, or the blocks it has received, starting with its own (by
distance along the ring, or by exclusive or). Then in each step all ranks send and receive at the same index; only the
reordering at the beginning or the end depends on the rank.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; the tutorial of
JAX's shard_map, for the ring as a program.

The examples assume the same names as those of `collectives.ops`.
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
from minidiff.core import Value
from minidiff.ops.shape import normalize_axis
from minidiff.types import typeof

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

# ---------------------------------------------------------------- steps, in an order that starts at this rank


def _swap(x: Value, axis_name: AxisName, bit: int, ranks: int) -> Value:
    """Swap values between those of the first `ranks` ranks that differ in `bit`."""
    return ppermute(x, axis_name, [(rank, rank ^ bit) for rank in range(ranks)])


def _ranks(axis_name: AxisName) -> Value:
    """The indices of all ranks, typed as varying like the values they are used with."""
    return pbroadcast(np.arange(axis_size(axis_name)), axis_name)


def _by_distance(axis_name: AxisName) -> Value:
    """The ranks in ring order, starting at this one."""
    ranks = _ranks(axis_name)
    return (axis_index(axis_name) + ranks) % ranks.size


def _by_distance_back(axis_name: AxisName) -> Value:
    """Each rank's distance along the ring: the inverse of `_by_distance`."""
    ranks = _ranks(axis_name)
    return (ranks - axis_index(axis_name)) % ranks.size


def _by_xor(axis_name: AxisName, n: int) -> Value:
    """The first n ranks, each xor-ed with this one: its own inverse.

    n is a power of two.
    """
    return np.bitwise_xor(axis_index(axis_name) % n, _ranks(axis_name)[:n])


def _ring_gather(block: Value, axis_name: AxisName, by: int = 1) -> Value:
    """All ranks' blocks by distance: each travels around the whole ring."""
    n = axis_size(axis_name)
    found = {0: block}
    for step in range(1, n):
        block = shifted(block, axis_name, by)
        found[-by * step % n] = block
    return np.stack([found[k] for k in range(n)])


def _ring_scatter(parts: Value, axis_name: AxisName, by: int = 1) -> Value:
    """The sum of all parts for this rank; `parts` are in order of distance.

    Partial sums travel around the ring, and each rank adds its part to them.
    """
    n = axis_size(axis_name)
    total = parts[-by % n]
    for step in range(2, n + 1):
        total = shifted(total, axis_name, by) + parts[-by * step % n]
    return total


def _doubling_gather(block: Value, axis_name: AxisName, n: int) -> Value:
    """The first n ranks' blocks in xor order: each step sends all a rank has."""
    blocks, bit = block[None], 1
    while bit < n:
        blocks = np.concatenate([blocks, _swap(blocks, axis_name, bit, n)])
        bit *= 2
    return blocks


def _halving_scatter(parts: Value, axis_name: AxisName, n: int) -> Value:
    """The sum of all parts for this rank; `parts` are in xor order.

    At each step a rank sends half of its partial sums.
    """
    bit = n // 2
    while bit:
        parts = parts[:bit] + _swap(parts[bit:], axis_name, bit, n)
        bit //= 2
    return parts[0]


# ---------------------------------------------------------------- arguments and results


def _operand(name: str, x: Any, axis_name: AxisName) -> Value:
    """Check the axes, and return a leaf as an array that varies along them."""
    x, run = array_of(x), single_axes(name, axis_name)
    check_written(name, x, run)
    return varying_over(x, run)


def _summand(name: str, x: Any, axis_name: AxisName) -> Value:
    """`_operand` for sums: booleans are converted to integers."""
    return counted(_operand(name, x, axis_name))


def _gathered(name: str, gather: Callable, x: Any, axis_name: AxisName, axis: int, tiled: bool) -> Any:
    """Apply `gather` to each leaf, and put its result along `axis`.

    `gather` stacks all ranks' blocks in rank order.
    """

    def each(leaf):
        leaf = _operand(name, leaf, axis_name)
        at = normalize_axis(axis, typeof(leaf).ndim + (not tiled), name)
        return unsplit_dimension(gather(leaf), at, tiled)

    return each_leaf(each, x)


def _scattered(
    name: str, scatter: Callable, x: Any, axis_name: AxisName, axis: int, tiled: bool, operand: Callable = _summand
) -> Any:
    """Split each leaf into parts along `axis`, and apply `scatter` to them."""

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
    """All-reduce any array by `reduce`, which takes n equal parts; pad with zeros."""
    shape = x.shape
    flat = x.reshape(-1)
    size = flat.shape[0]
    parts = np.pad(flat, (0, -size % n)).reshape(n, -(-size // n))
    return reduce(parts).reshape(-1)[:size].reshape(shape)


def _in_halves(x: Value, do: Callable) -> Value:
    """Apply `do(half, by)` to halves of the last dimension, one per direction."""
    half = (x.shape[-1] + 1) // 2
    return np.concatenate([do(x[..., :half], 1), do(x[..., half:], -1)], axis=-1)


def _is_among(ranks: Sequence[int], axis_name: AxisName) -> Value:
    """Whether this rank is one of `ranks`."""
    here = np.isin(np.arange(axis_size(axis_name)), ranks)
    return np.take(pbroadcast(here, axis_name), axis_index(axis_name))


def _deliver(x: Value, axis_name: AxisName, pairs: Pairs) -> Value:
    """Send `x` along `pairs`: destinations replace their value, others keep it."""
    received = ppermute(x, axis_name, pairs)
    return np.where(_is_among([destination for _, destination in pairs], axis_name), received, x)


def _at_root(x: Value, axis_name: AxisName, root: int) -> Value:
    """`x` on the root, zeros on the other ranks."""
    return np.where(_is_among([root], axis_name), x, pbroadcast(np.zeros((), x.dtype), axis_name))


def _power_of_two(name: str, n: int, instead: str) -> None:
    if n & (n - 1):
        raise ValueError(f"{name}: the number of ranks must be a power of two, but it is {n}: write {instead}")


def _check_root(name: str, root: int, axis_name: AxisName) -> int:
    return check_rank(name, "the root", root, axis_name, single_axes(name, axis_name).size)


# ---------------------------------------------------------------- all-gathers


def ring_all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """`all_gather` around a ring in N-1 steps: each rank forwards its latest block.

    Shapes over N ranks: [a, b] -> [N, a, b], tiled [N*a, b]. Varying -> varying; transposes to a ring reduce-scatter in
    the opposite direction. A rank sends (N-1)K/N bytes for a result of K bytes. Any number of ranks.

    >>> f = lambda x: algorithms.ring_all_gather(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([3, 9, 3, 9], P('i'))

    Source: shard_map tutorial, "ppermute"; Thakur et al., section 4.1.
    """

    def gather(block):
        return _ring_gather(block, axis_name)[_by_distance_back(axis_name)]

    return _gathered("ring_all_gather", gather, x, axis_name, axis, tiled)


def bidirectional_ring_all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """`ring_all_gather` with half of each block sent in each direction of the ring.

    If a rank can use both of its links at once, and each in both directions, the N-1 steps take half as long:
    (N-1)K/2N bytes each way. (The backends here send one message after another, so it is no faster.)

    >>> f = lambda x: algorithms.bidirectional_ring_all_gather(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([3, 9, 3, 9], P('i'))

    Source: shard_map tutorial, the second example of a matrix product overlapped with its all-gather.
    """

    def gather(block):
        blocks = _in_halves(block.reshape(-1), lambda half, by: _ring_gather(half, axis_name, by))
        return blocks.reshape(blocks.shape[0], *block.shape)[_by_distance_back(axis_name)]

    return _gathered("bidirectional_ring_all_gather", gather, x, axis_name, axis, tiled)


def recursive_doubling_all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """`all_gather` in log2 N steps: ranks at distances 1, 2, 4, … swap all they have.

    Shapes as in `all_gather`. A rank sends (N-1)K/N bytes for a result of K bytes: as many as along a ring, in fewer
    messages. Raises ValueError if N is not a power of two: use `bruck_all_gather`, which takes any N.

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
    """`all_gather` in log2 N steps, rounded up, for any N.

    Each rank sends all it has to the rank 1, 2, 4, … back. Shapes as in `all_gather`. A rank sends (N-1)K/N bytes for a
    result of K bytes.

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
    """`psum_scatter` around a ring in N-1 steps: each rank adds its part to a sum.

    Each rank forwards the sum to the next. Shapes over N ranks: [N, b] -> [b], tiled [N*a, b] -> [a, b]. Varying ->
    varying; transposes to a ring all-gather. A rank sends (N-1)K/N bytes for an operand of K bytes. Any number of
    ranks; raises ValueError if the dimension cannot be split over them.

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
    """`ring_reduce_scatter` with half of each part in each direction of the ring.

    A rank sends (N-1)K/2N bytes each way.

    >>> f = lambda x: algorithms.bidirectional_ring_reduce_scatter(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2], P('i'))

    Source: shard_map tutorial, the example of a matrix product overlapped with a reduce-scatter in both directions.
    """

    def scatter(parts):
        flat = parts.reshape(parts.shape[0], math.prod(parts.shape[1:]))[_by_distance(axis_name)]
        return _in_halves(flat, lambda half, by: _ring_scatter(half, axis_name, by)).reshape(parts.shape[1:])

    return _scattered("bidirectional_ring_reduce_scatter", scatter, x, axis_name, scatter_dimension, tiled)


def recursive_halving_reduce_scatter(
    x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False
) -> Any:
    """`psum_scatter` in log2 N steps that halve the data.

    Ranks at distances N/2, N/4, …, 1 send each other the half that the other needs. Shapes as in `psum_scatter`. A rank
    sends (N-1)K/N bytes for an operand of K bytes. Raises ValueError if N is not a power of two: use
    `ring_reduce_scatter`, which takes any N.

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
    """`psum` along a ring: a reduce-scatter, then an all-gather. 2(N-1) steps.

    `x` is a tree of arrays; each result has its array's shape. A rank sends 2(N-1)K/N bytes for an array of K bytes:
    less than 2K, for any number of ranks. (Arrays are padded to a multiple of N entries.) Varying -> varying, although
    all ranks get the same sum: see the module's docstring. Any number of ranks.

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
    """`ring_all_reduce` with half of each part in each direction of the ring.

    A rank sends (N-1)K/N bytes each way.

    >>> f = lambda x: algorithms.bidirectional_ring_all_reduce(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2, 7, 2], P('i'))

    Source: that of `bidirectional_ring_all_gather`.
    """

    def around(half, by):
        return _ring_gather(_ring_scatter(half, axis_name, by), axis_name, by)

    def reduce(parts):
        return _in_halves(parts[_by_distance(axis_name)], around)[_by_distance_back(axis_name)]

    return _all_reduced(
        "bidirectional_ring_all_reduce", lambda leaf: _in_parts(leaf, axis_size(axis_name), reduce), x, axis_name
    )


def recursive_doubling_all_reduce(x: Any, axis_name: AxisName) -> Any:
    """`psum` in log2 N steps: ranks at distances 1, 2, 4, … exchange their sums.

    This suits short arrays, where latency dominates. A rank sends K log2 N bytes for an array of K bytes. If N is not
    a power of two, the ranks beyond the largest power of two first send their values to other ranks, and at the end get
    the sum from them: two more steps. Varying -> varying: see the module's docstring.

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
    """`psum` by recursive halving, then doubling, in 2 log2 N steps.

    This is Rabenseifner's algorithm. A reduce-scatter, then an all-gather: 2(N-1)K/N bytes, as many as along a ring, in
    fewer steps. (Arrays are padded to a multiple of N entries.) If N is not a power of two, the ranks beyond the
    largest power of two first send their values to other ranks, and at the end get the sum from them: two more steps
    and 2K more bytes. Varying -> varying: see the module's docstring.

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
    """All-reduce by `reduce(x, n)`, where n is the largest power of two up to N.

    It runs on the first n ranks; the others send them their values, and receive the results.
    """
    ranks = axis_size(axis_name)
    n = 1 << (ranks.bit_length() - 1)
    extra = range(n, ranks)
    if not extra:
        return reduce(x, n)
    x = reduce(x + ppermute(x, axis_name, [(rank, rank - n) for rank in extra]), n)
    return _deliver(x, axis_name, [(rank - n, rank) for rank in extra])


def tree_all_reduce(x: Any, axis_name: AxisName, *, root: int = 0) -> Any:
    """`psum` as a reduction to one rank, then a broadcast, along binomial trees.

    2 log2 N steps (each logarithm rounded up) of K bytes each. Varying -> varying: see the module's docstring.

    >>> f = lambda x: algorithms.tree_all_reduce(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2, 7, 2], P('i'))

    Source: Thakur et al., section 4.5 (the old algorithm of MPICH).
    """
    root = _check_root("tree_all_reduce", root, axis_name)

    def reduce(leaf):
        return _down_tree(_up_tree(leaf, axis_name, root), axis_name, root)

    return _all_reduced("tree_all_reduce", reduce, x, axis_name)


def parameter_server_all_reduce(x: Any, axis_name: AxisName, *, root: int = 0) -> Any:
    """`psum` by one rank, the server, which receives all arrays in turn.

    It then sends the sum to each rank. 2(N-1) steps. The server receives (N-1)K bytes and sends as many; each other
    rank sends and receives K. So the time grows in proportion to the number of ranks; that of a ring hardly grows.
    Varying -> varying: see the module's docstring.

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
    """`broadcast_varying` along a tree: each step doubles the ranks with the value.

    Shapes do not change. log2 N steps, rounded up, each a message of K bytes; the root sends in all of them. Varying ->
    varying, although all ranks get the same value: see the module's docstring. Transposes to the sum on the root, along
    the same tree. Raises ValueError if `root` is out of range.

    >>> f = lambda x: algorithms.binomial_tree_broadcast(x, 'i', root=1)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1, 4, 1], P('i'))

    Source: Thakur et al., section 4.3.
    """
    root = _check_root("binomial_tree_broadcast", root, axis_name)
    return each_leaf(lambda leaf: _down_tree(_operand("binomial_tree_broadcast", leaf, axis_name), axis_name, root), x)


def binomial_tree_reduce(x: Any, axis_name: AxisName, *, root: int = 0) -> Any:
    """`reduce` along a tree: the sum on the rank `root`, zeros on the others.

    Shapes do not change; booleans are counted. log2 N steps, rounded up, each a message of K bytes; the root receives
    in all of them. Varying -> varying; transposes to a broadcast from the root. Raises ValueError if `root` is out of
    range.

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
    """`gather` along a tree: all blocks on the rank `root`, zeros on the others.

    Each rank but the root sends once, all the blocks it has. Shapes over N ranks: [a, b] -> [N, a, b], tiled [N*a, b].
    log2 N steps, rounded up; (N-1)K/N bytes for a result of K bytes (if N is not a power of two, as many as for the
    next one). Varying -> varying; transposes to a scatter along the same tree. Raises ValueError if `root` is out of
    range.

    >>> f = lambda x: algorithms.binomial_tree_gather(x, 'i', root=1, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([0, 0, 3, 9], P('i'))

    Source: Thakur et al., section 4.3 (its scatter, reversed).
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
    """`scatter` along a tree: each rank gets its part of the root's array.

    At each step all ranks that have parts send half of them. Shapes over N ranks: [N, b] -> [b], tiled [N*a, b] ->
    [a, b]. log2 N steps, rounded up; (N-1)K/N bytes for an operand of K bytes (if N is not a power of two, as many as
    for the next one). Varying -> varying; transposes to a gather along the same tree. Raises ValueError if `root` is
    out of range or the dimension cannot be split.

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
    """The binomial tree: for each level, from the root, pairs (parent, child)."""
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
    """The sum on the root; partial sums on the other ranks."""
    for pairs in reversed(_edges(axis_name, root)):
        x = x + ppermute(x, axis_name, [(below, above) for above, below in pairs])
    return x


# ---------------------------------------------------------------- all-to-all


def pairwise_all_to_all(x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Any:
    """`all_to_all` in N-1 steps: at step k, rank r sends to r+k, receives from r-k.

    Shapes as in `all_to_all`: over N ranks, split_axis=0, concat_axis=1, [N, b] -> [b, N], tiled [N*a, b] -> [a, N*b].
    Varying -> varying. A rank sends (N-1)K/N bytes for an operand of K bytes. Any number of ranks.

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
