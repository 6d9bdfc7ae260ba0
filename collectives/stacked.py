"""The simulated backend: all ranks in this process, their blocks stacked in one array.

A value that varies along axes of sizes n and m is stored as an array of shape (n*m, *block), ranks in
the order of the mesh's axes; one that varies along none is stored as the block alone, once. Ordinary
operations are applied to all ranks at once, by their batching rules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy

from minidiff.core import EVALUATE, Primitive, running

Axes = tuple[str, ...]  # axes along which a value is held, in the order of the mesh
Dims = Sequence[Axes]  # for each dimension of an array, the axes it is split along


class Stacked:
    """All ranks of a mesh whose axes have the sizes `sizes`, simulated."""

    name = "simulated"

    def __init__(self, sizes: dict[str, int]):
        self.sizes = dict(sizes)
        self.calls: Counter = Counter()
        self.bytes: Counter = Counter()

    def size(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def ordered(self, axes: Any) -> Axes:
        return tuple(a for a in self.sizes if a in axes)

    # ------------------------------------------------ operations

    def apply(
        self, primitive: Primitive, operands: Sequence[tuple[numpy.ndarray, Axes]], params: dict
    ) -> tuple[numpy.ndarray, Axes]:
        """An ordinary operation on every rank."""
        held = self.ordered({a for _, axes in operands for a in axes})
        if not held:
            return primitive.impl(*[x for x, _ in operands], **params), ()
        batched = [bool(axes) for _, axes in operands]
        values = [self.expand(x, axes, held) if axes else x for x, axes in operands]
        with running(EVALUATE):
            return primitive.batch(values, batched, params), held

    def collective(self, name: str, x: numpy.ndarray, held: Axes, communicates: bool, params: dict):
        """A collective on every rank: the result, and the axes along which it is held."""
        if communicates:
            self.calls[name] += 1
            self.bytes[name] += x.nbytes // self.size(held)
        return getattr(self, "_" + name)(x, held, **params)

    def axis_index(self, axes: Axes) -> tuple[numpy.ndarray, Axes]:
        return self._join(numpy.arange(self.size(axes))[:, None], axes, ())

    # ------------------------------------------------ layout

    def expand(self, x: numpy.ndarray, held: Axes, wanted: Axes) -> numpy.ndarray:
        """A value repeated along the axes of `wanted` that it is not held along (a view where NumPy can make one)."""
        if held == wanted:
            return x
        block = x.shape[1:] if held else numpy.shape(x)
        x = numpy.reshape(x, (*[self.sizes[a] if a in held else 1 for a in wanted], *block))
        return numpy.broadcast_to(x, (*[self.sizes[a] for a in wanted], *block)).reshape(self.size(wanted), *block)

    def _split(self, x: numpy.ndarray, held: Axes, axes: Axes) -> tuple[numpy.ndarray, Axes]:
        """As an array (ranks along `axes`, ranks along the rest, *block), and the rest."""
        wanted = self.ordered({*held, *axes})
        rest = tuple(a for a in wanted if a not in axes)
        x = self.expand(numpy.asarray(x), held, wanted)
        block = x.shape[1:] if wanted else x.shape
        x = x.reshape(*[self.sizes[a] for a in wanted], *block)
        order = [wanted.index(a) for a in (*axes, *rest)]
        x = x.transpose(*order, *range(len(wanted), x.ndim))
        return x.reshape(self.size(axes), self.size(rest), *block), rest

    def _join(self, x: numpy.ndarray, axes: Axes, rest: Axes) -> tuple[numpy.ndarray, Axes]:
        """The inverse of `_split`."""
        held, given, block = self.ordered({*axes, *rest}), (*axes, *rest), x.shape[2:]
        x = x.reshape(*[self.sizes[a] for a in given], *block)
        x = x.transpose(*[given.index(a) for a in held], *range(len(given), x.ndim))
        return x.reshape(self.size(held), *block), held

    @staticmethod
    def _same(x: numpy.ndarray, rest: Axes) -> tuple[numpy.ndarray, Axes]:
        """A value (ranks along the rest, *block) that is the same along the other axes."""
        return (x, rest) if rest else (x[0], ())

    # ------------------------------------------------ collectives

    def _psum(self, x, held, axes, size):
        x, rest = self._split(x, held, axes)
        return self._same(x.sum(0, dtype=x.dtype), rest)

    def _pmax(self, x, held, axes, size):
        x, rest = self._split(x, held, axes)
        return self._same(x.max(0), rest)

    def _pmin(self, x, held, axes, size):
        x, rest = self._split(x, held, axes)
        return self._same(x.min(0), rest)

    def _pbroadcast(self, x, held, axes, size):
        wanted = self.ordered({*held, *axes})
        return self.expand(x, held, wanted), wanted

    def _all_gather_invariant(self, x, held, axes, size, axis, tiled):
        x, rest = self._split(x, held, axes)
        return self._same(_unsplit_dimension(x, axis, tiled), rest)

    def _all_gather(self, x, held, axes, size, axis, tiled):
        x, rest = self._split(x, held, axes)
        x = _unsplit_dimension(x, axis, tiled)
        return self._join(numpy.broadcast_to(x, (size, *x.shape)), axes, rest)

    def _psum_scatter(self, x, held, axes, size, axis, tiled):
        x, rest = self._split(x, held, axes)
        return self._join(_split_dimension(x.sum(0, dtype=x.dtype), size, axis, tiled), axes, rest)

    def _pscatter(self, x, held, axes, size, axis, tiled):
        x, rest = self._split(x, held, ())
        return self._join(_split_dimension(x[0], size, axis, tiled), axes, rest)

    def _all_to_all(self, x, held, axes, size, split_axis, concat_axis, tiled):
        x, rest = self._split(x, held, axes)
        x = _split_dimension(x.swapaxes(0, 1), size, split_axis + 1, tiled)  # (to, rest, from, *block)
        x = numpy.stack([_unsplit_dimension(part.swapaxes(0, 1), concat_axis, tiled) for part in x])
        return self._join(x, axes, rest)

    def _ppermute(self, x, held, axes, size, perm):
        x, rest = self._split(x, held, axes)
        out = numpy.zeros_like(x)
        for source, destination in perm:
            out[destination] = x[source]
        return self._join(out, axes, rest)

    # ------------------------------------------------ in and out

    def place(self, x: numpy.ndarray, dims: Dims) -> tuple[numpy.ndarray, Axes]:
        """An array as blocks: each dimension split along its axes."""
        return split_blocks(numpy.asarray(x), dims, self.sizes)

    def settle(self, x: numpy.ndarray, held: Axes, wanted: Axes) -> numpy.ndarray:
        """A result held along `wanted` axes: repeated along those it lacks, one copy of those that are more."""
        extra = tuple(a for a in held if a not in wanted)
        if extra:
            x, rest = self._split(x, held, extra)
            x, held = self._same(x[0], rest)
        return self.expand(x, held, wanted)

    def gather(self, x: numpy.ndarray, held: Axes) -> numpy.ndarray:
        """All blocks, stacked: they are here."""
        return x

    def is_here(self, held: Axes) -> bool:
        """Whether `gather` needs no communication."""
        return True

    def local(self, x: numpy.ndarray, held: Axes) -> list[numpy.ndarray]:
        """Each rank's block."""
        every = self.expand(x, held, tuple(self.sizes))
        return list(every) if self.sizes else [every]

    def show(self, x: numpy.ndarray, held: Axes) -> str:
        """The value as `print` shows it: per rank, with its mesh coordinates."""
        return "\n".join(show_block(self.sizes, rank, block) for rank, block in enumerate(self.local(x, held)))


# ---------------------------------------------------------------- dimensions of stacked blocks


def _unsplit_dimension(x: numpy.ndarray, axis: int, tiled: bool) -> numpy.ndarray:
    """(parts, batch, *block) to (batch, *whole): parts stacked, or joined, along `axis` of the block."""
    x = numpy.moveaxis(x, 0, axis + 1)
    if not tiled:
        return x
    return x.reshape(*x.shape[: axis + 1], x.shape[axis + 1] * x.shape[axis + 2], *x.shape[axis + 3 :])


def _split_dimension(x: numpy.ndarray, size: int, axis: int, tiled: bool) -> numpy.ndarray:
    """(batch, *whole) to (parts, batch, *block): the inverse of `_unsplit_dimension`."""
    at = axis + 1
    if tiled:
        x = x.reshape(*x.shape[:at], size, x.shape[at] // size, *x.shape[at + 1 :])
    return numpy.moveaxis(x, at, 0)


def split_blocks(x: numpy.ndarray, dims: Dims, sizes: dict[str, int]) -> tuple[numpy.ndarray, Axes]:
    """An array as blocks stacked in the order of the mesh, and the axes they are stacked along."""
    named = [a for axes in dims for a in axes]
    held = tuple(a for a in sizes if a in named)
    if not held:
        return x, ()
    shape, places, block = [], {}, []
    for axes, n in zip(dims, x.shape):
        for a in axes:
            places[a] = len(shape)
            shape.append(sizes[a])
        block.append(len(shape))
        shape.append(n // math.prod(sizes[a] for a in axes))
    blocks = x.reshape(shape).transpose(*[places[a] for a in held], *block)
    return blocks.reshape(math.prod(sizes[a] for a in held), *[shape[b] for b in block]), held


def join_blocks(x: numpy.ndarray, dims: Dims, sizes: dict[str, int]) -> numpy.ndarray:
    """The array whose blocks, stacked in the order of the mesh, are `x`: the inverse of `split_blocks`."""
    named = [a for axes in dims for a in axes]
    held = tuple(a for a in sizes if a in named)
    if not held:
        return x
    block = x.shape[1:]
    x = x.reshape(*[sizes[a] for a in held], *block)
    order = [i for d, axes in enumerate(dims) for i in (*[held.index(a) for a in axes], len(held) + d)]
    shape = [n * math.prod(sizes[a] for a in axes) for axes, n in zip(dims, block)]
    return x.transpose(order).reshape(shape)


def show_block(sizes: dict[str, int], rank: int, block: numpy.ndarray) -> str:
    """One rank's block, under its mesh coordinates."""
    coordinates = tuple(int(c) for c in numpy.unravel_index(rank, tuple(sizes.values())))
    names = "(" + ", ".join(sizes) + ("," if len(sizes) == 1 else "") + ")"
    return f"On rank {rank} at mesh coordinates {names} = {coordinates}:\n{block}\n"
