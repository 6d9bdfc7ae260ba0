"""Backends whose data is the block of one rank: that of MPI, and those that compile or price a program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from collectives.backends.base import Axes, Backend, Dims, index_along, show_block
from minidiff.core.interpreter import current_interpreter
from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Tracer

EXCHANGED = 2**14  # bytes, from which on two ranks send each other their operands of an all-reduce


class LauncherError(RuntimeError):
    """The launcher of this process belongs to another MPI: ranks cannot connect."""


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on, since this process is ending. It has no effect in threads other than the main one."""
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def exchanges_operands(x: Any, size: int) -> bool:
    """Whether an all-reduce over `size` ranks is that of two, which send each other arrays of x's type."""
    return size == 2 and x.nbytes >= EXCHANGED


class OneRank(Backend):
    """A backend whose data is the block of one rank, at these `coordinates`."""

    coordinates: Mapping[str, int]

    def sums_in_place(self, x: Any, size: int) -> bool:
        return not exchanges_operands(x, size)

    def index(self, axes: Axes) -> int:
        """Return this rank's index along `axes`, in the given order."""
        return index_along(axes, self.coordinates, self.sizes)

    def axis_index(self, axes: Axes) -> tuple[numpy.ndarray, Axes]:
        return numpy.asarray(self.index(axes)), self.sort_axes(axes)

    def apply(self, primitive: Primitive, operands: Sequence[tuple[Any, Axes]], params: dict) -> tuple[Any, Axes]:
        data, along = zip(*operands) if operands else ((), ())
        distinct = {*along} - {()}
        varying = next(iter(distinct), ()) if len(distinct) < 2 else self.sort_axes({a for axes in along for a in axes})
        return current_interpreter().process(primitive, data, params), varying

    def block_shape(self, x: Any, varying: Axes) -> tuple[int, ...]:
        return x.shape

    def data_shape(self, shape: tuple[int, ...], varying: Axes) -> tuple[int, ...]:
        return shape

    def place(self, x: Any, dims: Dims) -> tuple[Any, Axes]:
        x = x if isinstance(x, Tracer) else numpy.asarray(x)
        index, varying = self.cached_plan(_index_of_block, tuple(dims), x.shape)
        return x[index], varying

    def reshard_data(self, x: Any, varying: Axes, wanted: Axes) -> Any:
        return x

    def is_local(self, varying: Axes) -> bool:
        return self.size(varying) == 1

    def local(self, x: Any, varying: Axes) -> Any:
        return x

    def show(self, x: numpy.ndarray, varying: Axes) -> str:
        return show_block(self.sizes, self.rank, x)


def _index_of_block(ranks: OneRank, dims: tuple[Axes, ...], shape: tuple[int, ...]) -> tuple[tuple[slice, ...], Axes]:
    """Return the index of a rank's block in an array of this shape, and the axes that the block varies along."""
    index = []
    for axes, n in zip(dims, shape):
        length = n // ranks.size(axes)
        start = ranks.index(axes) * length
        index.append(slice(start, start + length))
    return tuple(index), ranks.sort_axes({a for axes in dims for a in axes})
