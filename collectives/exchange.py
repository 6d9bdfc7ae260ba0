"""Collectives as operations on the data that a backend holds: what compiled programs are made of.

A tape of a `shard_map` body says what each rank does. Run on a backend by a recorder, it becomes a tape of what this
process does to its data: with simulated ranks to all their blocks at once, under MPI to its own. There a collective is
an operation like any other, that happens to communicate.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy

from collectives.backend import Axes, Backend
from collectives.ops import INVARIANT, Collective, untyped_psum_p
from minidiff.core import Primitive, ShapedArray


class Exchange(Primitive):
    """A collective of a backend. Parameters: the collective, its own `params`, the backend `ranks`, what is `held`."""

    shares_memory = True  # along an axis of one rank there may be nothing to do

    def __init__(self, collective: Collective):
        super().__init__(collective.name, _run)
        self.communicates = collective.communicates

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        (x,), ranks, collective = types, params["ranks"], params["collective"]
        block = ShapedArray(ranks.block_shape(x, params["held"]), x.dtype)
        shape, dtype = collective.shape_rule(block, **params["params"])
        return [ShapedArray(ranks.data_shape(shape, held_after(collective, **_only(params))), dtype)]

    def show_params(self, params: dict) -> str:
        return params["collective"].show_params(params["params"])


def _only(params: dict) -> dict:
    return {k: params[k] for k in ("params", "ranks", "held")}


def _run(x: numpy.ndarray, collective: Collective, params: dict, ranks: Backend, held: Axes) -> numpy.ndarray:
    return ranks.collective(collective.name, x, held, collective.communicates, params)[0]


def held_after(collective: Collective, params: dict, ranks: Backend, held: Axes) -> Axes:
    """The axes along which a collective's result is held: those it makes the same on all ranks are left out."""
    if collective.gives == INVARIANT or collective is untyped_psum_p:
        return tuple(a for a in held if a not in params["axes"])
    return ranks.ordered({*held, *params["axes"]})


class Index(Primitive):
    """Each rank's index along some axes of a backend. No constant: ranks must all run one program."""

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        return [ShapedArray(params["ranks"].data_shape((), params["held"]), int)]


exchange_p = functools.cache(Exchange)
index_p = Index("axis_index", lambda axes, ranks, held: ranks.axis_index(axes)[0])
index_p.shares_memory = True


def exchange(collective: Collective, x: Any, held: Axes, ranks: Backend, params: dict) -> tuple[Any, Axes]:
    """A collective on recorded data: the result, and the axes along which it is held."""
    out = exchange_p(collective).bind(x, collective=collective, params=params, ranks=ranks, held=held)
    return out, held_after(collective, params, ranks, held)


def index(axes: Axes, ranks: Backend) -> tuple[Any, Axes]:
    """Each rank's index, recorded, and the axes along which it is held."""
    held = ranks.ordered(axes)
    return index_p.bind(axes=axes, ranks=ranks, held=held), held
