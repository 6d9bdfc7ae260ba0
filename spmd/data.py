"""Batches of data: each rank reads its own rows, of common data (`batches`) or of data that it has alone (`join`).

>>> import numpy as np
>>> import spmd
>>> from spmd import P, data
>>> mesh = spmd.make_mesh((2,), ('data',), backend='simulated')
>>> images, labels = np.arange(20.0).reshape(10, 2), np.arange(10)
>>> batches = data.batches((images, labels), mesh, P('data'), batch=4, seed=0, epochs=2)
>>> for x, y in batches:
...     print(x.shape, y.local)
(4, 2) [array([4, 9]), array([8, 7])]
(4, 2) [array([5, 3]), array([0, 1])]
(4, 2) [array([3, 8]), array([9, 4])]
(4, 2) [array([6, 7]), array([2, 0])]

The order of an epoch follows only from the seed and the epoch's number, so the state to save is a few integers. A run
can resume from it, even on another number of ranks:

>>> batches = data.batches((images, labels), mesh, P('data'), batch=4)
>>> first, state = next(batches), batches.state()
>>> state
{'epoch': 0, 'position': 4, 'batch': 4, 'length': 10, 'seed': [0]}
>>> other = spmd.make_mesh((4,), ('data',), backend='simulated')
>>> resumed = data.batches((images, labels), other, P('data'), batch=4)
>>> resumed.restore(state)
>>> next(resumed)[1], next(batches)[1]
(ShardedArray([5, 3, 0, 1], P('data')), ShardedArray([5, 3, 0, 1], P('data')))
"""

from __future__ import annotations

import functools
import itertools
import operator
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives import psum
from collectives.guards.mismatch import DisagreementError, report
from minidiff import tree
from minidiff.core.tracer import Tracer
from minidiff.core.types import ShapedArray
from minidiff.errors.tracebacks import hide_frames_of, hide_own_frames
from minidiff.inputs.arguments import as_named_value, check_array
from spmd.arrays.blocks import from_blocks, local_starts
from spmd.arrays.from_local import assemble, blocks_here
from spmd.arrays.reshard import check_mesh, check_no_body, specs_for
from spmd.checks.agreement import check_agreement, gather_texts, make_and_compare
from spmd.mesh.checks import check_sharding
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import P, block_type
from spmd.shard_map.shard_map import shard_map
from spmd.sharding.sharded_array import Sharding

__all__ = ["Batches", "Joined", "batches", "join"]

LAST = ("drop", "keep", "wrap", "mask")
Index = tuple[slice, ...]  # of a block in a batch, one slice for each dimension
Leaf = tuple[ShapedArray, Sharding]  # of a batch
Read = Callable[[int, Index], np.ndarray]  # a block of leaf number k


def batches(
    data: Any,
    mesh: Mesh,
    spec: Any,
    *,
    batch: int,
    seed: int | Sequence[int] | None = 0,
    epochs: int | None = None,
    last: str = "drop",
    prefetch: int = 2,
) -> Batches:
    """Iterate over batches of `data`, split over `mesh` by `spec`.

    A batch is a tree like `data` of sharded arrays, of which each rank has read its own block; arrays that their spec
    does not split are plain. Under MPI every rank must call it; `next` does not communicate.

    Args:
        data: one of

            - a tree of arrays, whose first dimension counts the examples. They may be memory-mapped, as by
              `numpy.load(file, mmap_mode='r')`, or anything that has `shape` and `dtype` and can be indexed by an array
              of integers.
            - a function from an epoch's number to an iterable of examples, each a tree of arrays, in the order to use.
              All ranks iterate over all examples, and make arrays of their own. A resumed epoch skips the examples it
              has had.
            - an iterable of examples. An iterator, which can be iterated over once, has one epoch.
        mesh: the mesh over which batches are split.
        spec: a tree of partition specs that is a prefix of a batch.
        batch: the number of examples in all ranks' blocks.
        seed: an integer or several (a key). From it and the epoch's number, NumPy draws the order of an epoch of
            arrays; with None the order is that of the data.
        epochs: how often the data are iterated over, by default without end.
        last: what becomes of the last examples of an epoch, too few for a batch. They are left out ("drop"), make a
            smaller batch ("keep"), are filled up from the start of the next epoch ("wrap"), or with copies of the last
            example ("mask"). With "mask", each item is a pair: the batch, and a mask [batch], split as the examples of
            its first array, that is False for the copies.
        prefetch: the number of batches that a thread reads ahead, at most; with 0 none does. `next` raises its errors.

    Raises:
        DisagreementError: if ranks make different batches.
        TypeError: for masked arrays, matrices, and arrays of anything but numbers.
        ValueError: if the arrays have different lengths, if there are too few examples for a batch, or if the mesh
            cannot split a batch by the spec.

    >>> import numpy as np
    >>> import spmd
    >>> from spmd import P
    >>> mesh = spmd.make_mesh((2,), ('data',), backend='simulated')
    >>> stream = ({'tokens': np.array([k, k + 1])} for k in range(5))
    >>> for each in batches(stream, mesh, P('data'), batch=2):
    ...     print(each['tokens'].local)
    [array([[0, 1]]), array([[1, 2]])]
    [array([[2, 3]]), array([[3, 4]])]
    >>> for x, mask in batches(np.arange(6), mesh, P('data'), batch=4, seed=None, epochs=1, last='mask'):
    ...     print(x, mask)
    [0 1 2 3] [ True  True  True  True]
    [4 5 5 5] [ True  True False False]
    """
    check_mesh("batches", mesh)
    check_no_body("batches")
    _check_number("batch", batch, 1)
    _check_number("prefetch", prefetch, 0)
    if epochs is not None:
        _check_number("epochs", epochs, 0)
    if last not in LAST:
        raise ValueError(f"batches: last is {last!r}; write one of {', '.join(map(repr, LAST))}")
    source = _source_of(data, seed)
    _check_source(source, mesh, spec, batch, epochs, last)
    if isinstance(source, _Stream) and source.once and epochs is None:
        epochs = 1
    return Batches(source, mesh, operator.index(batch), prefetch, spec=spec, epochs=epochs, last=last)


class Batches(Iterator):
    """An iterator over batches, made by `batches`. Iterating gives trees of sharded arrays, like the data.

    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> steps = batches(np.arange(8.0).reshape(8, 1), mesh, spmd.P('i'), batch=4, epochs=1)
    >>> [x.shape for x in steps]
    [(4, 1), (4, 1)]
    """

    def __init__(self, source: _Source, mesh: Mesh, batch: int, prefetch: int, **settings: Any):
        self._source, self._mesh, self._batch, self._prefetch = source, mesh, batch, prefetch
        self._settings = settings  # the spec, and those of the order
        self._begin(Position(0, 0))

    @hide_own_frames
    def __next__(self) -> Any:
        (structure, leaves), self._position = next(self._steps)
        return tree.unflatten(structure, [from_blocks(*leaf) for leaf in leaves])

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch, and the settings of the order: integers, to save."""
        return {**self._position._asdict(), "batch": self._batch, **self._source.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a state. Under MPI every rank must call it.

        Raises ValueError for the state of other data, or of batches of another size or seed. An iterator cannot go
        back: restore it before the first batch.
        """
        now = self.state()
        was = {name: state.get(name) for name in now}
        if names := [name for name in now if name not in Position._fields and was[name] != now[name]]:
            one, other = (", ".join(f"{name} = {x[name]}" for name in names) for x in (was, now))
            raise ValueError(
                f"batches.restore: the state belongs to data with {one}, but these have {other}. Make the batches "
                "of the same data, with the same batch= and seed="
            )
        self.close()
        self._begin(Position(*(int(state[name]) for name in Position._fields)))

    def close(self) -> None:
        """End the iteration, and the thread that reads ahead, when it has finished its batch."""
        self._steps.close()

    def _begin(self, position: Position) -> None:
        self._position = position
        self._compare()
        spec, order = self._settings["spec"], {name: self._settings[name] for name in ("epochs", "last")}
        examples = _batches_of_examples(self._source, self._batch, position, **order)
        steps = _steps(self._source, self._mesh, spec, examples, self._batch if order["last"] == "mask" else 0)
        self._steps: _Ahead | Generator = _Ahead(steps, self._prefetch) if self._prefetch else steps

    def _compare(self) -> None:
        """Raise DisagreementError on all ranks if they would read different batches."""
        shown = {**self.state(), **self._settings, **self._source.describe()}
        lines = [f"{name} = {x}" for name, x in shown.items()]
        if self._mesh.backend == "mpi" and (lines_by_rank := self._mesh.ranks.compare_once("batches of data", lines)):
            advice = "All ranks make the same batches, of which each reads its own rows: give it the same seed and data"
            raise DisagreementError(report("ranks make different batches", lines_by_rank, advice))


def _check_number(name: str, x: Any, least: int) -> None:
    if not hasattr(x, "__index__"):
        raise TypeError(f"batches: {name} is {x!r} of type {type(x).__name__}; write an integer")
    if operator.index(x) < least:
        raise ValueError(f"batches: {name} is {x}; it must be at least {least}")


def _check_source(source: _Source, mesh: Mesh, spec: Any, batch: int, epochs: int | None, last: str) -> None:
    """Raise ValueError if a source cannot make batches, as far as that is known before it is read."""
    if isinstance(source, _Arrays):
        if batch > source.length and last != "mask":
            raise ValueError(
                f"batches: batch={batch} is more than the {source.length} examples of the data: make it smaller, or "
                "fill it up, with last='mask'"
            )
        _shardings("a batch of data", source.batch(range(batch))[0], mesh, spec)
        if last == "keep" and (left := source.length % batch):
            _shardings(
                "the last batch (last='mask' fills it up, last='drop' leaves it out) of data",
                source.batch(range(left))[0],
                mesh,
                spec,
            )
    elif source.once and (last == "wrap" or epochs not in (None, 0, 1)):
        raise ValueError(
            f"batches: {source.source!r:.60} can be iterated over only once, which epochs={epochs} and last={last!r} "
            "do not allow: pass a function that returns new data for each epoch, data=lambda epoch: ..."
        )


# ---------------------------------------------------------------- where examples come from


class _Arrays:
    """A tree of arrays. An example is its place in them."""

    def __init__(self, data: Any, seed: int | Sequence[int] | None):
        leaves, _ = tree.flatten_with_paths(data, "data")
        for path, x in leaves:
            _check_array(path, x)
        lengths = {path: x.shape[0] for path, x in leaves}
        if len({*lengths.values()}) != 1:
            shown = ", ".join(f"{path} has {n}" for path, n in lengths.items()) or "there are no arrays"
            raise ValueError(f"batches: arrays of data must have one length, the number of examples; {shown}")
        self.data, self.leaves, self.length = data, leaves, leaves[0][1].shape[0]
        self.seed = [] if seed is None else [operator.index(x) for x in np.ravel(seed)]

    def state(self) -> dict[str, Any]:
        return {"length": self.length, "seed": [*self.seed]}

    def describe(self) -> dict[str, Any]:
        """Return the types of the arrays, for ranks to compare."""
        leaves, _ = tree.flatten_with_paths(self.batch(range(self.length))[0], "data")
        return dict(leaves)

    def examples(self, epoch: int, position: int) -> Iterator[Any]:
        """Return the examples of an epoch, from a position on."""
        if not self.seed:
            return iter(range(position, self.length))
        seed = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
        return iter(np.random.default_rng(seed).permutation(self.length)[position:])

    def batch(self, examples: Sequence[Any]) -> tuple[Any, Read]:
        """Return the types of a batch, a tree, and the function that reads a block of it."""
        types = tree.map(lambda x: ShapedArray((len(examples), *x.shape[1:]), x.dtype), self.data)

        def read(k: int, index: Index) -> np.ndarray:
            places = np.array(examples[index[0]], int)
            block = (places, *index[1:])
            path, x = self.leaves[k]
            block_of_x = np.asanyarray(x[block])
            if type(block_of_x) is not np.ndarray:  # some files read masked arrays
                check_array(block_of_x, f"batches: what is read of {path}")
            return np.asarray(block_of_x)

        return types, read


class _Stream:
    """A function from an epoch's number to an iterable of examples."""

    def __init__(self, source: Callable[[int], Iterable] | Iterable):
        self.source = source
        self.once = isinstance(source, Iterator)
        self.begun = False

    def state(self) -> dict[str, Any]:
        return {}

    describe = state

    def examples(self, epoch: int, position: int) -> Iterator[Any]:
        if self.once and self.begun:
            raise ValueError(
                f"batches: {self.source!r:.60} can be iterated over only once, and cannot go back: restore before the "
                "first batch, or pass a function that returns new data for each epoch, data=lambda epoch: ..."
            )
        self.begun = True
        return itertools.islice(self.source(epoch) if callable(self.source) else self.source, position, None)

    def batch(self, examples: Sequence[Any]) -> tuple[Any, Read]:
        first = _types(examples[0])

        @functools.cache
        def leaves(k: int) -> list[np.ndarray]:
            types = _types(examples[k])
            if types != first:
                raise ValueError(f"batches: the examples of a batch must have one type; got {first} and {types}")
            return [np.asarray(x) for x in tree.leaves(examples[k])]

        def read(k: int, index: Index) -> np.ndarray:
            rows = range(len(examples))[index[0]]
            return np.stack([leaves(row)[k][index[1:]] for row in rows])

        return tree.map(lambda t: ShapedArray((len(examples), *t.shape), t.dtype), first), read


def _types(example: Any) -> Any:
    arrays = tree.map(np.asanyarray, example)
    if any(type(x) is not np.ndarray or x.dtype.kind not in "biufc" for x in tree.leaves(arrays)):
        for path, leaf in tree.flatten_with_paths(example, "an example")[0]:
            check_array(leaf, f"batches: {path}")
    return tree.map(lambda x: ShapedArray(x.shape, x.dtype), arrays)


_Source = _Arrays | _Stream


def _source_of(data: Any, seed: int | Sequence[int] | None) -> _Source:
    leaves = tree.leaves(data)
    is_leaf = len(leaves) == 1 and leaves[0] is data
    iterable = is_leaf and not hasattr(data, "shape") and isinstance(data, Iterable) and not isinstance(data, str)
    return _Stream(data) if iterable or callable(data) else _Arrays(data, seed)


def _check_array(path: str, x: Any) -> None:
    if isinstance(x, Tracer) or not (hasattr(x, "shape") and hasattr(x, "dtype") and len(x.shape)):
        raise TypeError(
            f"batches: {path} is {x!r:.60} of type {type(x).__name__}; data must be NumPy arrays whose first dimension "
            "counts the examples, or an iterable of examples"
        )
    check_array(x if isinstance(x, np.ndarray) else np.empty(0, x.dtype), f"batches: {path}")


# ---------------------------------------------------------------- which examples, and which blocks of them


class Position(NamedTuple):
    """A place in the data: an epoch, and the number of its examples that come before."""

    epoch: int
    position: int


def _steps(
    source: _Source, mesh: Mesh, spec: Any, batches: Iterator[tuple[list, Position]], masked: int
) -> Generator[tuple[tuple, Position], None, None]:
    """Read batches of these examples; yield each with the position after it.

    With `masked`, the size of a batch, short ones are filled up, and all have a mask.
    """
    batch_spec = spec
    for examples, after in batches:
        types, read = source.batch(examples + examples[-1:] * (masked - len(examples)))
        if masked:
            first = specs_for(types, batch_spec)[0]
            types, spec = (types, ShapedArray((masked,), np.dtype(bool))), (batch_spec, P(*first.entries[:1]))
            read = functools.partial(_read_with_mask, read, len(tree.leaves(types)) - 1, len(examples))
        structure, shardings = _shardings("a batch of data", types, mesh, spec)
        leaves = [(t, sharding, _blocks(k, t, sharding, read)) for k, (t, sharding) in enumerate(shardings)]
        yield (structure, leaves), after


def _read_with_mask(read: Read, mask: int, count: int, k: int, index: Index) -> np.ndarray:
    """Read a block of leaf k; leaf number `mask` is the mask of the first `count` examples."""
    return np.arange(index[0].start, index[0].stop) < count if k == mask else read(k, index)


def _batches_of_examples(
    source: _Source, batch: int, start: Position, epochs: int | None, last: str
) -> Iterator[tuple[list, Position]]:
    epoch, position = start
    while epochs is None or epoch < epochs:
        left = source.examples(epoch, position)
        while len(examples := list(itertools.islice(left, batch))) == batch:
            position += batch
            yield examples, Position(epoch, position)
        if position + len(examples) < batch and last != "mask":
            raise ValueError(
                f"batches: epoch {epoch} has {position + len(examples)} examples, fewer than batch={batch}"
            )
        epoch, position = epoch + 1, 0
        if examples and last == "wrap":
            first = list(itertools.islice(source.examples(epoch, 0), batch - len(examples)))
            examples, position = examples + first, len(first)
            if len(examples) < batch:
                raise ValueError(f"batches: epoch {epoch} has {position} examples, fewer than batch={batch}")
        if examples and last != "drop":
            yield examples, Position(epoch, position)


def _shardings(root: str, types: Any, mesh: Mesh, spec: Any) -> tuple[tree.Structure, list[Leaf]]:
    """Return the structure of a tree of types, and the sharding of each.

    Raises ValueError, which names `root`, for a spec that does not fit.
    """
    leaves, structure = tree.flatten_with_paths(types, root)
    specs = specs_for(types, spec)
    for (path, t), each in zip(leaves, specs):
        check_sharding(each, t.shape, mesh.shape, path)
        if each.unreduced:
            raise ValueError(
                f"{path}: spec = {each} says that blocks are partial sums, but data are not: write {each.summed_up()}"
            )
    return structure, [(t, Sharding(mesh, each)) for (_, t), each in zip(leaves, specs)]


def _blocks(k: int, t: ShapedArray, sharding: Sharding, read: Read) -> list[np.ndarray]:
    """Return this process's blocks of leaf number k of a batch."""
    shape = block_type(t, sharding.spec, sharding.mesh.shape).shape
    starts = local_starts(sharding, shape)
    return [read(k, tuple(slice(i, i + n) for i, n in zip(start, shape))) for start in starts]


# ---------------------------------------------------------------- reading ahead


class _Ahead:
    """An iterator that computes up to `count` items ahead, in a thread that ends when it is garbage-collected."""

    def __init__(self, items: Iterator, count: int):
        self._items = items
        self._done: queue.SimpleQueue = queue.SimpleQueue()  # of pairs of an item and None, or None and an exception
        self._room = threading.Semaphore(count)  # how many more items to compute
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __next__(self) -> Any:
        if self._closed.is_set():
            raise StopIteration
        if self._thread is None:
            arguments = self._items, self._done, self._room, self._closed
            self._thread = threading.Thread(target=_compute, args=arguments, name="prefetch", daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._room, self._closed)
        item, error = self._done.get()
        if error is not None:
            self.close()
            raise error
        self._room.release()
        return item

    def close(self) -> None:
        _end(self._room, self._closed)
        if self._thread is not None:
            self._thread.join()


def _compute(items: Iterator, done: queue.SimpleQueue, room: threading.Semaphore, closed: threading.Event) -> None:
    try:
        while room.acquire() and not closed.is_set():
            done.put((next(items), None))
    except BaseException as error:  # StopIteration too
        done.put((None, error))


def _end(room: threading.Semaphore, closed: threading.Event) -> None:
    closed.set()
    room.release()


# ---------------------------------------------------------------- data of which ranks have different amounts


def join(blocks: Any, mesh: Mesh, spec: Any, until: str = "last") -> Joined:
    """Iterate over data of which each rank has its own, more or less of it, so that ranks leave together.

    A rank's data are an iterable of blocks, trees of arrays whose first dimension counts examples. An item is a pair
    `(batch, mask)`: a tree of arrays made of the ranks' blocks, split as by `spmd.from_local`, and a mask of the
    examples, split as those of its first array. A block of fewer examples than the largest first block of a rank is
    filled up with copies of its last example. A rank whose data have ended takes part with copies of its last block.
    For all copies the mask is False.

    Under MPI every rank must call it, and `next` communicates: one psum of three integers for each item and for the
    end, and before the first item the types of blocks, which ranks compare. If reading raises on one rank, `next`
    raises on all.

    Args:
        blocks: a function from a rank's number, in mesh order, to its iterable, which is called for the ranks of this
            process. Also under MPI this rank's iterable, and the list of all ranks' iterables if they are simulated. A
            rank without data has one block of no examples: `[x[:0]]`.
        mesh: the mesh of the ranks.
        spec: a tree of partition specs that is a prefix of a block. Ranks that differ only along axes that it does not
            name have the same data.
        until: "last" ends with the data of the last rank, "first" with those of the first; then blocks of that step
            that other ranks have read are dropped.

    Raises:
        ValueError: on all ranks, from `next`: if reading raises on some rank, or a rank's blocks are of another type,
            have more examples than all first blocks, or are none.

    >>> import numpy as np
    >>> import spmd
    >>> from spmd import P
    >>> mesh = spmd.make_mesh((2,), ('data',), backend='simulated')
    >>> files = [np.array([1, 2]), np.array([3])], [np.array([4, 5])]
    >>> for x, mask in join(lambda rank: files[rank], mesh, P('data')):
    ...     print(x, mask, np.sum(x, where=mask))
    [1 2 4 5] [ True  True  True  True] 12
    [3 3 4 5] [ True False False False] 3
    >>> [x.local for x, mask in join(lambda rank: files[rank], mesh, P('data'), until='first')]
    [[array([1, 2]), array([4, 5])]]
    """
    check_mesh("join", mesh)
    check_no_body("join")
    if until not in ("first", "last"):
        raise ValueError(f"join: until is {until!r}; write 'first' or 'last'")
    return Joined([*map(iter, blocks_here(blocks, mesh))], mesh, spec, until)


class Joined(Iterator):
    """An iterator over pairs of a batch and its mask, made by `join`.

    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> steps = join(lambda rank: [np.ones(2)] * 9, mesh, spmd.P('i'))
    >>> for count, (batch, mask) in enumerate(steps, 1):
    ...     if count == 3:
    ...         steps.stop()
    >>> count
    3
    """

    def __init__(self, streams: Sequence[Iterator], mesh: Mesh, spec: Any, until: str):
        self._stopped = False
        self._items = self._join(streams, mesh, spec, mesh.size if until == "first" else 1)

    @hide_own_frames
    def __next__(self) -> tuple[Any, Any]:
        return next(self._items)

    def stop(self) -> None:
        """End the iteration on all ranks, before the next item. It is enough if one rank calls it."""
        self._stopped = True

    def _join(self, streams: Sequence[Iterator], mesh: Mesh, spec: Any, least: int) -> Iterator[tuple[Any, Any]]:
        """Yield pairs while at least so many ranks have a block."""
        axes = mesh.axis_names
        count = shard_map(lambda flags: psum(flags, axes), mesh=mesh, in_specs=P(axes), out_specs=P())
        blocks = make_and_compare("join: ranks' blocks differ", mesh, lambda: _first_blocks(streams, mesh))
        latest, types, error = blocks, _block_types(blocks[0]), None
        rows = max(map(int, gather_texts(mesh, str(max(map(_length, blocks))))))
        specs = spec, P(*specs_for(blocks[0], spec)[0].entries[:1])
        while True:
            flags = [np.array([block is not None, self._stopped, error is not None], int) for block in blocks]
            present, stopped, failed = count(assemble(flags, mesh, P(axes)))
            if failed:
                make_and_compare("join: reading failed", mesh, functools.partial(_raise, error))
            if stopped or present < least:
                return
            latest = [old if new is None else new for old, new in zip(latest, blocks)]
            masks = [np.arange(rows) < (0 if block is None else _length(block)) for block in blocks]
            yield assemble([*zip((_fill(block, rows) for block in latest), masks)], mesh, specs)
            try:
                blocks, error = [_next_block(stream, types, rows) for stream in streams], None
            except Exception as caught:
                blocks, error = [None] * len(streams), caught


def _first_blocks(streams: Sequence[Iterator], mesh: Mesh) -> tuple[list[Any], list[str]]:
    """Return the first block of each stream, and their types, for ranks to compare."""
    blocks = [next(stream, None) for stream in streams]
    if any(block is None for block in blocks):
        raise ValueError("join: a rank has no block, so its type is unknown: give it one of no examples, [x[:0]]")
    types = [*map(_block_types, blocks)]
    check_agreement("join: ranks' blocks differ", mesh, types)
    return blocks, types[0]


def _next_block(stream: Iterator, types: list[str], rows: int) -> Any:
    """Return the next block of a stream, or None. Raise ValueError if it is of another type, or has more rows."""
    block = next(stream, None)
    if block is not None and (_block_types(block) != types or _length(block) > rows):
        shown = f"{', '.join(_block_types(block))}, of {_length(block)} examples"
        first = f"{', '.join(types)}, of at most {rows}"
        raise ValueError(f"join: a rank's blocks are like the first, and none is larger; got {shown}, after {first}")
    return block


def _block_types(block: Any) -> list[str]:
    leaves = [(path, as_named_value(x, f"join: {path}")) for path, x in tree.flatten_with_paths(block, "block")[0]]
    if len({x.shape[:1] or None for _, x in leaves}) != 1 or not leaves[0][1].shape:
        shown = ", ".join(f"{path} of shape {x.shape}" for path, x in leaves) or "no array"
        raise ValueError(f"join: the first dimension of a block's arrays counts its examples; got {shown}")
    return [f"{path}: {x.dtype}[{', '.join(['examples', *map(str, x.shape[1:])])}]" for path, x in leaves]


def _length(block: Any) -> int:
    return len(tree.leaves(block)[0])


def _fill(block: Any, rows: int) -> Any:
    """Fill up a block with copies of its last example, or zeros if it has none."""
    mode: Any = "edge" if _length(block) else "constant"
    return tree.map(lambda x: np.pad(x, [(0, rows - len(x)), *[(0, 0)] * (np.ndim(x) - 1)], mode), block)


def _raise(error: Exception | None) -> tuple[None, list[str]]:
    if error is not None:
        raise error
    return None, ["no error"]


hide_frames_of(globals(), __all__)
