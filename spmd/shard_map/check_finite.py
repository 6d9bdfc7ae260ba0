"""Checks of numbers in the bodies of `shard_map`, while `debug_nans` is on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from collectives.backends.base import Axes, describe_rank
from collectives.collective import grouped_collective
from collectives.reductions import pmax_p
from minidiff.core.interpreter import current_interpreter
from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Value
from minidiff.debug import error_for, finiteness, is_inexact, worst_finiteness
from spmd.shard_map.branches import local_blocks
from spmd.shard_map.sharded_bodies import ShardedBodies


class CheckFiniteOnRanks(ShardedBodies):
    """Runs operations as `SPMD` does, while `debug_nans` is on.

    Each rank's results are checked against its operands. Before each sum, an all-reduce of a small integer tells every
    rank the worst state of the other ranks' operands.
    """

    keeps_sources = True

    def __init__(self, *args: Any, **options: Any):
        self.checker: Any = current_interpreter()  # which evaluates the `shard_map`
        super().__init__(*args, **options)

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        sums = primitive.on_ranks and getattr(primitive, "sums", False)  # others only move or select numbers
        if primitive.is_higher_order or (primitive.on_ranks and not sums):
            return super().process(primitive, args, params)
        operands = [self._worst(x) for x in args]
        if sums:
            among = {k: params[k] for k in ("axes", "size", "groups") if k in params}
            maximum_p = grouped_collective(pmax_p) if "groups" in params else pmax_p
            operands = [self.mesh.ranks.collective(maximum_p, x, axes, among, counted=False) for x, axes in operands]
        with numpy.errstate(all="ignore"):
            out = super().process(primitive, args, params)
        outs = out if primitive.multiple_results else [out]
        self.checker.observe(str(primitive), [self.operand(x)[0] for x in outs])
        results = [self._worst(x) for x in outs]
        ranks, setting = self.mesh.ranks, worst_finiteness(params)
        before = [max(setting, *map(int, states)) for states in zip(*[local_blocks(ranks, *x) for x in operands])]
        after = [max(map(int, states)) for states in zip(*[local_blocks(ranks, *x) for x in results])]
        worse = {r: after[r] for r in range(len(after)) if self.checker.is_wrong(before[r], after[r])}
        if worse:
            where = [describe_rank(self.mesh.shape, ranks.rank + r) for r in worse]
            raise error_for(str(primitive), args, max(worse.values()), ", ".join(where))
        return out

    def _worst(self, x: Value) -> tuple[numpy.ndarray, Axes]:
        """Return the worst state (finite, infinite, NaN) in each rank's block, as data and its varying axes."""
        data, varying = self.operand(x)
        if not is_inexact(data):
            return numpy.zeros((), numpy.uint8), ()
        states = numpy.asarray(finiteness(data))
        block = len(self.mesh.ranks.block_shape(states, varying))
        return states.max(axis=tuple(range(states.ndim - block, states.ndim)), initial=0), varying
