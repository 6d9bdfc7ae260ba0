"""What a backend is: the ranks of a mesh, as something that operations run on.

A value is held by a backend as `data`, together with the axes along which ranks may hold different
blocks of it. How the blocks are stored is the backend's affair.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy

from minidiff.core import Primitive

Axes = tuple[str, ...]  # axes along which a value is held, in the order of the mesh
Dims = Sequence[Axes]  # for each dimension of an array, the axes it is split along
GROUP = "the ranks of a group"  # the axis along which those of one group are counted


class LauncherError(RuntimeError):
    """This process was started as one of several by what does not belong to the MPI here: it cannot join the others."""


class Backend(ABC):
    """The ranks of a mesh whose axes have the sizes `sizes`. Collectives are methods `_psum`, `_all_gather`, …"""

    name: str
    rank = 0
    at_once = False  # whether a sum is over as soon as its terms are there: nobody has to hold them

    def __init__(self, sizes: dict[str, int]):
        self.sizes = dict(sizes)
        self.calls: Counter = Counter()  # how often each collective was run
        self.bytes: Counter = Counter()  # how many bytes each rank handed to it

    def same_ranks(self, other: Backend) -> bool:
        """Whether the ranks of another backend of these sizes are the same: whether a value of one is one of both."""
        return type(self) is type(other)

    def size(self, axes: Iterable[str]) -> int:
        """How many ranks there are along `axes`."""
        return math.prod(self.sizes[a] for a in axes)

    def ordered(self, axes: Iterable[str]) -> Axes:
        """The axes in the order of the mesh, each once."""
        return tuple(a for a in self.sizes if a in frozenset(axes))

    def barrier(self) -> None:  # noqa: B027  (simulated ranks are where they are)
        """Wait until all ranks have come here."""

    def count(self, name: str, nbytes: int) -> None:
        """Take note of a collective that communicates."""
        self.calls[name] += 1
        self.bytes[name] += nbytes

    @abstractmethod
    def apply(self, primitive: Primitive, operands: Sequence[tuple[Any, Axes]], params: dict) -> tuple[Any, Axes]:
        """An ordinary operation on every rank: its result (or list of results), and the axes it is held along.

        It is bound: what runs it on the data is the current interpreter.
        """

    @abstractmethod
    def collective(self, name: str, data: Any, held: Axes, communicates: bool, params: dict) -> tuple[Any, Axes]:
        """A collective: the result, and the axes along which it is held. In `params["groups"]`, if it is given."""

    def variadic(
        self, name: str, operands: Sequence[tuple[Any, Axes]], communicates: bool, params: dict
    ) -> list[tuple[Any, Axes]]:
        """An all-reduce of several values of one dtype in one call: the results, and the axes each is held along."""
        if not communicates:
            return [self.collective(name, x, held, False, params) for x, held in operands]
        return self.reduced(name, [self.ready(name, x, held, params) for x, held in operands], params)

    def reduced(self, name: str, operands: Sequence[tuple[Any, Axes]], params: dict) -> list[tuple[Any, Axes]]:
        """The results of `together` of what is `ready`, where ranks communicate."""
        return self.wait(self.begin(name, operands, params))

    def start(self, name: str, operands: Sequence[tuple[Any, Axes]], params: dict) -> Any:
        """As `together`, or a `ppermute` of one value, but only begun: what `wait` takes.

        All ranks start, and wait, in one order.
        """
        return self.begin(name, [self.ready(name, x, held, params) for x, held in operands], params)

    def ready(self, name: str, x: Any, held: Axes, params: dict) -> tuple[Any, Axes]:
        """A value as `begin` takes it: by itself, before others are there that are to be in the same call."""
        return x, held

    @abstractmethod
    def begin(self, name: str, operands: Sequence[tuple[Any, Axes]], params: dict) -> Any:
        """As `start`, of what is `ready`."""

    @abstractmethod
    def wait(self, started: Any) -> list[tuple[Any, Axes]]:
        """The results of what `start` began."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all that was started, whatever becomes of it: nothing may be on its way when an error unwinds."""

    @abstractmethod
    def axis_index(self, axes: Axes) -> tuple[Any, Axes]:
        """Each rank's index along `axes`, counted in the order given."""

    @abstractmethod
    def block_shape(self, data: Any, held: Axes) -> tuple[int, ...]:
        """The shape of one rank's block."""

    @abstractmethod
    def data_shape(self, shape: tuple[int, ...], held: Axes) -> tuple[int, ...]:
        """The shape of the data, where blocks have this shape."""

    @abstractmethod
    def reshape(self, data: Any, held: Axes, shape: tuple[int, ...]) -> Any:
        """Every block with another shape."""

    @abstractmethod
    def place(self, x: Any, dims: Dims, held: Axes = ()) -> tuple[Any, Axes]:
        """An array (or one on each rank along `held`) as blocks: each dimension split along its axes."""

    @abstractmethod
    def join(self, data: Any, held: Axes, dims: Dims) -> tuple[Any, Axes]:
        """The inverse of `place`: whole along the axes of `dims`, which communicates where ranks are real."""

    @abstractmethod
    def reshard_data(self, data: Any, held: Axes, wanted: Axes) -> Any:
        """A result held along `wanted` axes: repeated along those it lacks, one copy of those that are more."""

    @abstractmethod
    def gather(self, data: Any, held: Axes) -> numpy.ndarray:
        """All blocks, stacked in the order of the mesh (the block alone, if it is held along no axis)."""

    @abstractmethod
    def is_here(self, held: Axes) -> bool:
        """Whether `gather` needs no communication."""

    @abstractmethod
    def local(self, data: Any, held: Axes) -> Any:
        """What of it is on this process: its block, or a list of all ranks' blocks where they are simulated."""

    @abstractmethod
    def show(self, data: Any, held: Axes) -> str:
        """The value as `print` shows it: by rank, with mesh coordinates."""


# ---------------------------------------------------------------- blocks


def split_dimension(x: numpy.ndarray, size: int, axis: int, tiled: bool) -> numpy.ndarray:
    """The parts of x along `axis`, as a new first axis: one for each entry, or with `tiled` `size` equal slices."""
    if tiled:
        x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return numpy.moveaxis(x, axis, 0)


def unsplit_dimension(parts: numpy.ndarray, axis: int, tiled: bool) -> numpy.ndarray:
    """The inverse of `split_dimension`: parts stacked, or with `tiled` joined, along `axis`."""
    x = numpy.moveaxis(parts, 0, axis)
    if not tiled:
        return x
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def cut_rows(x: numpy.ndarray, lengths: Sequence[int], axis: int) -> list[numpy.ndarray]:
    """The parts of x along `axis` that have these lengths, one after the other: what is left is in none."""
    ends = [0, *itertools.accumulate(lengths)]
    return [x[(slice(None),) * axis + (slice(start, end),)] for start, end in itertools.pairwise(ends)]


def fill_rows(x: numpy.ndarray, length: int, axis: int) -> numpy.ndarray:
    """x with zeros behind it along `axis`, to a given length."""
    missing = (*x.shape[:axis], length - x.shape[axis], *x.shape[axis + 1 :])
    return numpy.concatenate([x, numpy.zeros(missing, x.dtype)], axis)


def show_block(sizes: dict[str, int], rank: int, block: numpy.ndarray) -> str:
    """One rank's block, under its mesh coordinates."""
    return f"On {place_of(sizes, rank)}:\n{block}\n"


def coordinates_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Where a rank is along each of these axes, the last running fastest.

    >>> coordinates_of(3, {'i': 2, 'j': 2})
    {'i': 1, 'j': 1}
    """
    return dict(zip(sizes, map(int, numpy.unravel_index(rank, tuple(sizes.values())))))


def index_along(axes: Iterable[str], coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """The index along `axes`, in the order given, of the rank with these coordinates: the last axis runs fastest.

    >>> index_along(('j', 'i'), {'i': 0, 'j': 1}, {'i': 2, 'j': 2})
    2
    """
    index = 0
    for a in axes:
        index = index * sizes[a] + coordinates[a]
    return index


def place_of(sizes: dict[str, int], rank: int) -> str:
    """A rank in words, with its mesh coordinates."""
    coordinates = tuple(coordinates_of(rank, sizes).values())
    names = "(" + ", ".join(sizes) + ("," if len(sizes) == 1 else "") + ")"
    return f"rank {rank} at mesh coordinates {names} = {coordinates}"
