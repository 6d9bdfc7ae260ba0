"""Exact sums over ranks, which agree on a window, add integers, and round once (see `collectives/fixed_point.py`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from collectives.backends.base import Axes, Backend, CollectivePlan
from collectives.backends.simulated import Simulated
from collectives.exact import Copies, Exact
from collectives.fixed_point import Grid, from_words, in_parts, to_words, window_of
from collectives.ops import pbroadcast_p
from collectives.passes.variadic import variadic
from collectives.reductions import pmax_p
from minidiff.core.tracer import Tracer
from minidiff.values.dtypes import finfo, is_differentiable

Operands = Sequence[tuple[Any, Axes]]


class ExactSums(Backend):
    """Ranks that run the exact forms of collectives by ordinary ones, on integers.

    With `exact_sums`, collectives in bodies on these ranks take their exact forms.
    """

    def __init__(self, *args: Any, exact_sums: bool = False):
        super().__init__(*args)
        self.exact_sums = exact_sums

    def plan(
        self, primitive: Any, operands: Operands, params: dict, counted: bool = True, in_place: bool = False
    ) -> CollectivePlan:
        one = primitive.per_operand or primitive
        if isinstance(one, Exact):
            execute = ExactPlan(self, primitive, operands, params, counted).execute
        elif isinstance(one, Copies):
            execute = self._plan_copies(operands, **params)
        else:
            return super().plan(primitive, operands, params, counted, in_place)  # type: ignore[safe-super]
        return CollectivePlan(execute, [self.varying_after(one, varying, params) for _, varying in operands])

    def _plan_copies(self, operands: Operands, copies: int, **params: Any) -> Callable[[Any], Any]:
        broadcast = super().plan(pbroadcast_p, operands, params)  # type: ignore[safe-super]

        def execute(x):
            x = broadcast.execute(x)
            first = x.ndim - len(self.block_shape(x, broadcast.axes[0]))
            return numpy.broadcast_to(numpy.expand_dims(x, first), (*x.shape[:first], copies, *x.shape[first:]))

        return execute


class SimulatedRanks(ExactSums, Simulated):
    """Simulated ranks that can add exactly."""


@functools.cache
def exact_ranks(kind: type[Backend]) -> Any:
    """Return the class of such ranks that can add exactly."""
    return type(kind.__name__, (ExactSums, kind), {})


class ExactPlan:
    """A plan of the exact sums of operands that have one dtype."""

    def __init__(self, ranks: ExactSums, primitive: Any, operands: Operands, params: Mapping[str, Any], counted: bool):
        one = primitive.per_operand or primitive
        self.ranks, self.counted = ranks, counted
        self.varying = [varying for _, varying in operands]
        self.axis = one.adds_along(params)
        self.params = one.params_of_sum(params)
        self.base = variadic(one.of) if primitive.multiple_results else one.of

    def execute(self, *xs: Any) -> Any:
        dtype = xs[0].dtype
        if is_differentiable(dtype) and not isinstance(xs[0], Tracer):  # reports record tapes of types alone
            sums = self.add_exactly(xs, finfo(dtype).dtype, dtype.kind == "c")
        else:
            sums = self.add([x.sum(self.axes_of(x, k), dtype=dtype) for k, x in enumerate(xs)])
        return sums if self.base.multiple_results else sums[0]

    def add_exactly(self, xs: Sequence[Any], dtype: numpy.dtype, is_complex: bool) -> list[numpy.ndarray]:
        """Return exact sums of numbers, whose parts have this dtype; complex ones have two, along a last axis."""
        precision, axes = finfo(dtype).nmant + 1, [self.axes_of(x, k) for k, x in enumerate(xs)]
        addends = [self.params["size"] * math.prod(x.shape[d] for d in along) for x, along in zip(xs, axes)]
        numbers = [numpy.asarray(numpy.stack([x.real, x.imag], -1) if is_complex else x, float) for x in xs]
        windows = self.agree([window_of(x, precision) for x in numbers])
        grids = [Grid.of(top, -bottom, n) for (top, bottom, _), n in zip(windows, addends)]
        words = self.add([in_parts(to_words, x, 0, grid).sum(along) for x, grid, along in zip(numbers, grids, axes)])
        with numpy.errstate(over="ignore", invalid="ignore"):
            sums = [
                in_parts(from_words, x, 1, *each, precision).astype(dtype) for x, *each in zip(words, grids, addends)
            ]
            if any(is_special for *_, is_special in windows):  # sums of infinities and NaN, and of zeros for all others
                others = [numpy.where(numpy.isfinite(x), 0.0, x).sum(k) for x, k in zip(numbers, axes)]
                sums = [numpy.where(y != 0, y, x).astype(dtype) for x, y in zip(sums, self.add(others))]
        return [x.view(numpy.result_type(dtype, numpy.complex64))[..., 0] for x in sums] if is_complex else sums

    def axes_of(self, x: Any, k: int) -> tuple[int, ...]:
        """Return the axes of an operand's data that are added."""
        return () if self.axis is None else (x.ndim - len(self.ranks.block_shape(x, self.varying[k])) + self.axis,)

    def agree(self, windows: list[list[int]]) -> list[list[int]]:
        """Return the windows of all ranks' numbers, from those of this process's."""
        params = {"axes": self.params["axes"], "size": self.ranks.size(self.params["axes"])}
        return self.ranks.collective(pmax_p, numpy.array(windows), (), params, self.counted)[0].tolist()

    def add(self, xs: Sequence[Any]) -> list[Any]:
        """Add integers over ranks."""
        operands = [*zip(xs, self.varying)]
        if self.base.multiple_results:
            return [total for total, _ in self.ranks.variadic(self.base, operands, self.params, self.counted)]
        return [self.ranks.collective(self.base, *operands[0], self.params, self.counted)[0]]
