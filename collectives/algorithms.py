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
recursive_doubling_scan             pscan          log2 N, rounded up   K log2 N, rounded up
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

A `MessageSchedule` says who sends which blocks to whom in each step; one loop runs all all-gathers. Backwards, with
sums in place of copies, the same schedule is a reduce-scatter, as the transpose of `all_gather` is `psum_scatter`. Each
rank orders its parts, or the blocks it has received, starting with its own (by distance along the ring, or by exclusive
or).
Then in each step all ranks send and receive at the same index; only the reordering at the beginning or the end depends
on the rank.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; the tutorial of
JAX's shard_map, for the ring as a program.

The examples assume the same names as those of `collectives.ops`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import minidiff.numpy as np
from collectives.argument_checks import check_rank, check_split
from collectives.axes import AxisName, single_axes
from collectives.backends.base import split_dimension, unsplit_dimension
from collectives.operands import array_of, convert_booleans, each_leaf, make_varying
from collectives.ops import axis_index, axis_size, check_explicit, ppermute, shift
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops.base import run_in_float32
from minidiff.ops.shape import unstack

__all__ = [
    "bidirectional_ring_all_gather", "bidirectional_ring_all_reduce", "bidirectional_ring_reduce_scatter",
    "binomial_tree_broadcast", "binomial_tree_gather", "binomial_tree_reduce", "binomial_tree_scatter",
    "bruck_all_gather", "halving_doubling_all_reduce", "pairwise_all_to_all", "parameter_server_all_reduce",
    "recursive_doubling_all_gather", "recursive_doubling_all_reduce", "recursive_doubling_scan",
    "recursive_halving_reduce_scatter", "ring_all_gather", "ring_all_reduce", "ring_reduce_scatter",
    "tree_all_reduce",
]  # fmt: skip

Pairs = Sequence[tuple[int, int]]  # (source, destination)

# ---------------------------------------------------------------- schedules


class MessageSchedule(NamedTuple):
    """An all-gather as steps: who sends which blocks to whom.

    A rank keeps blocks in slots, its own in slot 0. In each step, blocks are sent from slots `first` to `last` along
    `pairs` of ranks, and those that arrive go to the next slots. At the end, slot k of the rank `here` has the block of
    the rank `owner(here, k)`, and that of `rank` is in slot `slot(here, rank)`.

    Run backwards, the steps are a reduce-scatter: each block returns to the slot it came from, and is added there.
    """

    name: str
    axis_name: AxisName
    steps: Sequence[tuple[Pairs, int, int]]  # pairs, first, last
    owner: Callable
    slot: Callable

    @property
    def pairs(self) -> list[Pairs]:
        """Who sends to whom in each step."""
        return [pairs for pairs, _, _ in self.steps]

    @property
    def size(self) -> int:
        """The number of ranks that have a block: all of them, or the first ones."""
        return 1 + sum(last - first for _, first, last in self.steps)

    def gather(self, block: Value) -> Value:
        """Return all ranks' blocks, stacked in rank order."""
        slots = [block]
        for pairs, first, last in self.steps:
            slots += self._sent(slots[first:last], pairs)
        return self.in_rank_order(slots)

    def scatter(self, parts: Value, combined: Callable) -> Value:
        """Return this rank's part: the sum of all ranks', or what `combined` makes of two."""
        slots = self.in_slots(parts)
        for pairs, first, last in reversed(self.steps):
            back = reverse_pairs(pairs)
            arrived = self._sent(slots[first - last :], back)
            del slots[first - last :]
            slots[first:last] = [combined(x, y, self.axis_name, back) for x, y in zip(slots[first:last], arrived)]
        return slots[0]

    def _sent(self, blocks: Sequence[Value], pairs: Pairs) -> Sequence[Value]:
        """Send blocks along `pairs` in one message."""
        if len(blocks) == 1:
            return [ppermute(blocks[0], self.axis_name, pairs)]
        return unstack(ppermute(np.stack(blocks), self.axis_name, pairs))

    def all_reduce(self, x: Value) -> Value:
        """Return the sum: a reduce-scatter of equal parts, padded with zeros, then a gather."""
        flat, n = x.reshape(-1), self.size
        parts = np.pad(flat, (0, -flat.size % n)).reshape(n, -(-flat.size // n))
        return self.gather(self.scatter(parts, _sum)).reshape(-1)[: flat.size].reshape(x.shape)

    def in_slots(self, parts: Value) -> list[Value]:
        """Parts for all ranks, ordered by slot: this rank's own is the first."""
        return [*unstack(parts[self._index(self.owner)])]

    def in_rank_order(self, slots: Sequence[Value]) -> Value:
        """Return the blocks in all slots, stacked in rank order."""
        return np.stack(slots)[self._index(self.slot)]

    def _index(self, order: Callable) -> Value:
        return order(axis_index(self.axis_name), np.arange(self.size))


class BothWays(MessageSchedule):
    """A ring whose blocks are cut in halves, which travel in opposite directions."""

    def gather(self, block: Value) -> Value:
        blocks = self._in_halves(block.reshape(-1), MessageSchedule.gather)
        return blocks.reshape(self.size, *block.shape)

    def scatter(self, parts: Value, *options: Callable) -> Value:
        flat = parts.reshape(self.size, math.prod(parts.shape[1:]))
        return self._in_halves(flat, MessageSchedule.scatter, *options).reshape(parts.shape[1:])

    def _in_halves(self, x: Value, run: Callable, *options: Callable) -> Value:
        half = (x.shape[-1] + 1) // 2
        back = _pass_around_ring(self.name, self.axis_name, -1)
        return np.concatenate([run(self, x[..., :half], *options), run(back, x[..., half:], *options)], axis=-1)


def _size(name: str, axis_name: AxisName) -> int:
    return single_axes(name, axis_name).size


def _by_distance(n: int, by: int = 1) -> tuple[Callable, Callable]:
    """Return the `owner` and `slot` of slots in ring order, starting at this rank."""
    return (lambda this, k: (this + by * k) % n), (lambda this, rank: by * (rank - this) % n)


def _doublings(n: int) -> list[int]:
    """Return the powers of two below n: in so many steps, each rank's block can reach all."""
    return [1 << k for k in range((n - 1).bit_length())]


def _pass_around_ring(name: str, axis_name: AxisName, by: int = 1) -> MessageSchedule:
    """Plan that each rank sends the block that arrived last to the next rank."""
    n = _size(name, axis_name)
    pairs = [(rank, (rank + by) % n) for rank in range(n)]
    return MessageSchedule(name, axis_name, [(pairs, k - 1, k) for k in range(1, n)], *_by_distance(n, -by))


def _bruck(name: str, axis_name: AxisName) -> MessageSchedule:
    """Plan that each rank sends its blocks that the other lacks 1, 2, 4, … ranks back."""
    n = _size(name, axis_name)
    steps = [([(rank, (rank - have) % n) for rank in range(n)], 0, min(have, n - have)) for have in _doublings(n)]
    return MessageSchedule(name, axis_name, steps, *_by_distance(n))


def _swap_by_doubling(name: str, axis_name: AxisName) -> MessageSchedule:
    """Ranks that differ in one bit swap all they have: the first n ranks, n the largest power of two up to N."""
    n = 1 << (_size(name, axis_name).bit_length() - 1)
    steps = [([(rank, rank ^ bit) for rank in range(n)], 0, bit) for bit in _doublings(n)]
    return MessageSchedule(name, axis_name, steps, *[lambda this, ranks: np.bitwise_xor(this % n, ranks)] * 2)


def _tree(name: str, axis_name: AxisName, root: int) -> MessageSchedule:
    """Plan a binomial tree: each rank but the root sends all it has, once; only the root gets all blocks."""
    n = _size(name, axis_name)
    root = check_rank(name, "the root", root, axis_name, n)
    owner, slot = _by_distance(n)
    steps = []
    for have in _doublings(n):
        pairs = [((k + have + root) % n, (k + root) % n) for k in range(0, n - have, 2 * have)]
        steps.append((pairs, 0, min(have, n - have)))
    return MessageSchedule(name, axis_name, steps, lambda _, k: owner(root, k), lambda _, rank: slot(root, rank))


def _check_power_of_two(name: str, axis_name: AxisName, instead: str) -> None:
    n = _size(name, axis_name)
    if n & (n - 1):
        raise ValueError(f"{name}: the number of ranks must be a power of two, but it is {n}: write {instead}")


# ---------------------------------------------------------------- steps of a whole array


def reverse_pairs(pairs: Pairs) -> Pairs:
    return [(destination, source) for source, destination in pairs]


def _sum(x: Value, arrived: Value, axis_name: AxisName, pairs: Pairs) -> Value:
    return x + arrived


def _replace_by_arrived(x: Value, arrived: Value, axis_name: AxisName, pairs: Pairs) -> Value:
    """Return what arrived along `pairs` at their destinations, and `x` on the other ranks."""
    reached = np.isin(np.arange(axis_size(axis_name)), [destination for _, destination in pairs])
    return np.where(np.take(reached, axis_index(axis_name)), arrived, x)


def _at_root(x: Value, axis_name: AxisName, root: int) -> Value:
    """`x` on the root, zeros on the other ranks."""
    return np.where(axis_index(axis_name) == root, x, np.zeros((), x.dtype))


def _add_along(x: Value, axis_name: AxisName, steps: Sequence[Pairs]) -> Value:
    """Send all of `x` along the pairs of each step, and add what arrives."""
    for pairs in steps:
        total = x + ppermute(x, axis_name, pairs)
        all_receive = len(pairs) == axis_size(axis_name)
        x = total if all_receive else _replace_by_arrived(x, total, axis_name, pairs)  # the others would add 0.0
    return x


def _deliver_back(x: Value, axis_name: AxisName, steps: Sequence[Pairs]) -> Value:
    """Send all of `x` back along the steps: it replaces what `_add_along` had sent."""
    for pairs in map(reverse_pairs, reversed(steps)):
        x = _replace_by_arrived(x, ppermute(x, axis_name, pairs), axis_name, pairs)
    return x


# ---------------------------------------------------------------- arguments and results


def _operand(name: str, x: Any, axis_name: AxisName) -> Value:
    """Check the axes, and return a leaf as an array that varies along them."""
    x, run = array_of(x), single_axes(name, axis_name)
    check_explicit(name, x, run)
    return make_varying(x, run)


def _summand(name: str, x: Any, axis_name: AxisName) -> Value:
    """`_operand` for sums: booleans are converted to integers."""
    return convert_booleans(_operand(name, x, axis_name))


def _gather_leaves(schedule: MessageSchedule, x: Any, axis: int, tiled: bool) -> Any:
    """Gather the blocks of each leaf, and put them along `axis`."""

    def gather(leaf):
        leaf = _operand(schedule.name, leaf, schedule.axis_name)
        at = normalize_axis(axis, typeof(leaf).ndim + (not tiled), schedule.name)
        return unsplit_dimension(schedule.gather(leaf), at, tiled)

    return each_leaf(gather, x)


def _scatter_leaves(
    schedule: MessageSchedule, x: Any, axis: int, tiled: bool, operand: Callable = _summand, combined: Callable = _sum
) -> Any:
    """Split each leaf into parts along `axis`, and scatter them."""

    def scatter(leaf):
        leaf = operand(schedule.name, leaf, schedule.axis_name)
        at = normalize_axis(axis, typeof(leaf).ndim, schedule.name)
        check_split(schedule.name, leaf, at, schedule.size, tiled)
        parts = split_dimension(leaf, schedule.size, at, tiled)
        if combined is not _sum:
            return schedule.scatter(parts, combined)
        return run_in_float32(lambda parts: schedule.scatter(parts, _sum), parts)

    return each_leaf(scatter, x)


def _all_reduce_leaves(
    name: str, x: Any, axis_name: AxisName, reduce: Callable = lambda total: total, before: Sequence[Pairs] = ()
) -> Any:
    """Sum each leaf by `reduce`, after the steps `before`, and send sums back along them."""

    def each(leaf):
        def reduced(x):
            return reduce(_add_along(x, axis_name, before))

        return _deliver_back(run_in_float32(reduced, _summand(name, leaf, axis_name)), axis_name, before)

    return each_leaf(each, x)


def _send_extra_to_first(n: int, axis_name: AxisName) -> list[Pairs]:
    """Return a step in which the ranks beyond the first n, if any, send their values to the first ones."""
    pairs = [(rank, rank - n) for rank in range(n, axis_size(axis_name))]
    return [pairs] if pairs else []


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
    return _gather_leaves(_pass_around_ring("ring_all_gather", axis_name), x, axis, tiled)


def bidirectional_ring_all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """`ring_all_gather` with half of each block sent in each direction of the ring.

    If a rank can use both of its links at once, and each in both directions, the N-1 steps take half as long:
    (N-1)K/2N bytes each way. (The backends here send one message after another, so it is no faster.)

    >>> f = lambda x: algorithms.bidirectional_ring_all_gather(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([3, 9, 3, 9], P('i'))

    Source: shard_map tutorial, the second example of a matrix product overlapped with its all-gather.
    """
    return _gather_leaves(BothWays(*_pass_around_ring("bidirectional_ring_all_gather", axis_name)), x, axis, tiled)


def recursive_doubling_all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """`all_gather` in log2 N steps: ranks at distances 1, 2, 4, … swap all they have.

    Shapes as in `all_gather`. A rank sends (N-1)K/N bytes for a result of K bytes: as many as along a ring, in fewer
    messages. Raises ValueError if N is not a power of two: use `bruck_all_gather`, which takes any N.

    >>> f = lambda x: algorithms.recursive_doubling_all_gather(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9])).shape
    (4, 1)

    Source: Thakur et al., section 4.1.
    """
    _check_power_of_two("recursive_doubling_all_gather", axis_name, "bruck_all_gather or ring_all_gather")
    return _gather_leaves(_swap_by_doubling("recursive_doubling_all_gather", axis_name), x, axis, tiled)


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
    return _gather_leaves(_bruck("bruck_all_gather", axis_name), x, axis, tiled)


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
    return _scatter_leaves(_pass_around_ring("ring_reduce_scatter", axis_name), x, scatter_dimension, tiled)


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
    schedule = BothWays(*_pass_around_ring("bidirectional_ring_reduce_scatter", axis_name))
    return _scatter_leaves(schedule, x, scatter_dimension, tiled)


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
    _check_power_of_two("recursive_halving_reduce_scatter", axis_name, "ring_reduce_scatter")
    return _scatter_leaves(
        _swap_by_doubling("recursive_halving_reduce_scatter", axis_name), x, scatter_dimension, tiled
    )


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
    return _all_reduce_leaves(
        "ring_all_reduce", x, axis_name, _pass_around_ring("ring_all_reduce", axis_name).all_reduce
    )


def bidirectional_ring_all_reduce(x: Any, axis_name: AxisName) -> Any:
    """`ring_all_reduce` with half of each part in each direction of the ring.

    A rank sends (N-1)K/N bytes each way.

    >>> f = lambda x: algorithms.bidirectional_ring_all_reduce(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2, 7, 2], P('i'))

    Source: that of `bidirectional_ring_all_gather`.
    """
    schedule = BothWays(*_pass_around_ring("bidirectional_ring_all_reduce", axis_name))
    return _all_reduce_leaves("bidirectional_ring_all_reduce", x, axis_name, schedule.all_reduce)


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
    schedule = _swap_by_doubling("recursive_doubling_all_reduce", axis_name)
    before = _send_extra_to_first(schedule.size, axis_name)

    def reduce(leaf):
        return _add_along(leaf, axis_name, schedule.pairs)

    return _all_reduce_leaves("recursive_doubling_all_reduce", x, axis_name, reduce, before)


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
    schedule = _swap_by_doubling("halving_doubling_all_reduce", axis_name)
    before = _send_extra_to_first(schedule.size, axis_name)
    return _all_reduce_leaves("halving_doubling_all_reduce", x, axis_name, schedule.all_reduce, before)


def tree_all_reduce(x: Any, axis_name: AxisName, *, root: int = 0) -> Any:
    """`psum` as a reduction to one rank, then a broadcast, along binomial trees.

    2 log2 N steps (each logarithm rounded up) of K bytes each. Varying -> varying: see the module's docstring.

    >>> f = lambda x: algorithms.tree_all_reduce(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2, 7, 2], P('i'))

    Source: Thakur et al., section 4.5 (the old algorithm of MPICH).
    """
    steps = _tree("tree_all_reduce", axis_name, root).pairs
    return _all_reduce_leaves("tree_all_reduce", x, axis_name, before=steps)


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
    n = _size("parameter_server_all_reduce", axis_name)
    root = check_rank("parameter_server_all_reduce", "the root", root, axis_name, n)
    steps = [[(rank, root)] for rank in range(n) if rank != root]
    return _all_reduce_leaves("parameter_server_all_reduce", x, axis_name, before=steps)


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
    steps = _tree("binomial_tree_broadcast", axis_name, root).pairs
    return each_leaf(
        lambda leaf: _deliver_back(_operand("binomial_tree_broadcast", leaf, axis_name), axis_name, steps), x
    )


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
    steps = _tree("binomial_tree_reduce", axis_name, root).pairs

    def reduce(leaf):
        summand = _summand("binomial_tree_reduce", leaf, axis_name)
        return _at_root(run_in_float32(lambda x: _add_along(x, axis_name, steps), summand), axis_name, root)

    return each_leaf(reduce, x)


def binomial_tree_gather(x: Any, axis_name: AxisName, *, root: int = 0, axis: int = 0, tiled: bool = False) -> Any:
    """`gather` along a tree: all blocks on the rank `root`, zeros on the others.

    Each rank but the root sends once, all the blocks it has. Shapes over N ranks: [a, b] -> [N, a, b], tiled [N*a, b].
    log2 N steps, rounded up; (N-1)K/N bytes for a result of K bytes. Varying -> varying; transposes to a scatter along
    the same tree. Raises ValueError if `root` is out of range.

    >>> f = lambda x: algorithms.binomial_tree_gather(x, 'i', root=1, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([0, 0, 3, 9], P('i'))

    Source: Thakur et al., section 4.3 (its scatter, reversed).
    """
    gathered = _gather_leaves(_tree("binomial_tree_gather", axis_name, root), x, axis, tiled)
    return each_leaf(lambda leaf: _at_root(leaf, axis_name, root), gathered)


def binomial_tree_scatter(x: Any, axis_name: AxisName, *, root: int = 0, axis: int = 0, tiled: bool = False) -> Any:
    """`scatter` along a tree: each rank gets its part of the root's array.

    At each step all ranks that have parts send half of them. Shapes over N ranks: [N, b] -> [b], tiled [N*a, b] ->
    [a, b]. log2 N steps, rounded up; (N-1)K/N bytes for an operand of K bytes. Varying -> varying; transposes to a
    gather along the same tree. Raises ValueError if `root` is out of range or the dimension cannot be split.

    >>> f = lambda x: algorithms.binomial_tree_scatter(x, 'i', root=1, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1], P('i'))

    Source: Thakur et al., section 4.3.
    """
    schedule = _tree("binomial_tree_scatter", axis_name, root)
    return _scatter_leaves(schedule, x, axis, tiled, _operand, _replace_by_arrived)


# ---------------------------------------------------------------- all-to-all


def pairwise_all_to_all(x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Any:
    """`all_to_all` in N-1 steps: at step k, rank r sends to r+k, receives from r-k.

    Shapes as in `all_to_all`: over N ranks, split_axis=0, concat_axis=1, [N, b] -> [b, N], tiled [N*a, b] -> [a, N*b].
    Varying -> varying. A rank sends (N-1)K/N bytes for an operand of K bytes. Any number of ranks. Raises ValueError if
    the ranks do not divide what is split.

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
        there, back = (
            _pass_around_ring("pairwise_all_to_all", axis_name, -1),
            _pass_around_ring("pairwise_all_to_all", axis_name),
        )
        parts = there.in_slots(split_dimension(leaf, n, split, tiled))
        arrived = back.in_rank_order([parts[0], *[shift(parts[k], axis_name, k) for k in range(1, n)]])
        return unsplit_dimension(arrived, concat, tiled)

    return each_leaf(each, x)


# ---------------------------------------------------------------- prefix sums


def recursive_doubling_scan(x: Any, axis_name: AxisName, *, reverse: bool = False, exclusive: bool = False) -> Any:
    """`pscan` in log2 N steps, rounded up: each rank sends its sum so far 1, 2, 4, … ranks further.

    A rank sends K log2 N bytes for an array of K bytes. An exclusive scan first sends the blocks one rank further: one
    more step. Varying -> varying; transposes to the scan in the other direction.

    >>> f = lambda x: algorithms.recursive_doubling_scan(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([3, 1, 7, 2], P('i'))

    Source: W. D. Hillis, G. L. Steele, "Data parallel algorithms", 1986.
    """
    n = _size("recursive_doubling_scan", axis_name)

    def further(by: int) -> Pairs:
        pairs = [(rank, rank + by) for rank in range(n - by)]
        return reverse_pairs(pairs) if reverse else pairs

    def scan(leaf: Any) -> Value:
        leaf = _summand("recursive_doubling_scan", leaf, axis_name)
        leaf = ppermute(leaf, axis_name, further(1)) if exclusive else leaf
        return _add_along(leaf, axis_name, list(map(further, _doublings(n))))

    return each_leaf(scan, x)
