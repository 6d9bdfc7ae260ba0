"""Lowered collectives: operations on a backend's data.

The tape of a `shard_map` body says what each rank does. To compile it, a recorder runs it on a backend, which yields a
tape of what this process does to its data: the blocks of all simulated ranks, or this rank's block under MPI. In that
tape a collective is an ordinary operation that happens to communicate. It may start early, and be waited for later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from collectives.backends.base import Axes, Backend
from collectives.collective import Collective
from minidiff.core.tape import Equation
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops.base import Specialized
from minidiff.values.dtypes import accumulator_dtype


class Lowered(Specialized):
    """A collective, of one value or several, on a backend's data.

    Parameters: the `collective`, its own `params`, the backend `ranks`, and the `varying` axes of each operand.
    """

    def __init__(self, collective: Collective, shares_memory: bool):
        super().__init__(collective.name)
        self.multiple_results = collective.multiple_results
        self.shares_memory = shares_memory

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        operands, in_place = list(zip(operands, params["varying"])), params.get("in_place", False)
        plan = params["ranks"].plan(params["collective"], operands, params["params"], in_place=in_place)
        return plan.execute

    def writes(self, eqn: Equation) -> bool:
        ranks, of_collective, x = eqn.params["ranks"], eqn.params["params"], typeof(eqn.inputs[0])
        if self.name != "psum" or self.multiple_results or not self.sends(eqn.params) or "groups" in of_collective:
            return False
        return ranks.sums_in_place(x, of_collective["size"]) and accumulator_dtype(x.dtype) == x.dtype

    def simulated(self, params: dict) -> Callable[..., Any]:
        """Return the function that simulated ranks apply to their data: operations, which can be recorded."""
        operands = [(None, varying) for varying in params["varying"]]
        return params["ranks"].plan(params["collective"], operands, params["params"], counted=False).execute

    def sends(self, params):
        return params["collective"].sends(params["params"])

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        ranks, collective = params["ranks"], params["collective"]
        operands = [*zip(types, params["varying"])][: collective.linear_operands]
        return [_result_type(x, varying, ranks, collective, params["params"]) for x, varying in operands]

    def show_params(self, params: dict) -> str:
        return params["collective"].show_params(params["params"])


def _result_type(x: ShapedArray, varying: Axes, ranks: Backend, collective: Collective, params: dict) -> ShapedArray:
    block = ShapedArray(ranks.block_shape(x, varying), x.dtype)
    shape, dtype = collective.shape_rule(block, **params)
    return ShapedArray(ranks.data_shape(shape, ranks.varying_after(collective, varying, params)), dtype)


class Start(Lowered):
    """Start a collective. Its result is a request, which `Wait` takes.

    If it sends the operands themselves, not copies, the result shares memory with them, so that nothing writes into
    these before the collective completes.
    """

    def __init__(self, collective: Collective, shares_memory: bool):
        super().__init__(collective, shares_memory)
        self.name, self.multiple_results = f"{collective.name}_start", False

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        operands = list(zip(operands, params["varying"]))
        return params["ranks"].plan_start(params["collective"], operands, params["params"])

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        return [ShapedArray((sum(x.size for x in types),), types[0].dtype)]


class Wait(Specialized):
    """Wait for a started collective. Parameters: the backend `ranks`, and the `types` of the results."""

    shares_memory = True  # the results are views of one buffer
    multiple_results = True

    def __init__(self, collective: Collective):
        super().__init__(f"{collective.name}_wait")

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        return params["ranks"].wait

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        return list(params["types"])

    def show_params(self, params: dict) -> str:
        return ""


class Progress(Specialized):
    """Let MPI make progress on requests in flight. Many MPI libraries do so only while the program calls them."""

    has_effect = True
    multiple_results = True

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        return params["ranks"].progress

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        return []

    def show_params(self, params: dict) -> str:
        return ""


class Index(Specialized):
    """Each rank's index along some axes; no constant: all ranks share the program."""

    shares_memory = True

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        index, _ = params["ranks"].axis_index(params["axes"])
        return index.copy

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        return [ShapedArray(params["ranks"].data_shape((), params["varying"]), int)]


lowered_p, start_p, wait_p = map(functools.cache, (Lowered, Start, Wait))
progress_p = Progress("progress")
index_p = Index("axis_index")


def run_lowered(
    collective: Collective, operands: Sequence[tuple[Any, Axes]], ranks: Backend, params: dict
) -> list[tuple[Any, Axes]]:
    """Bind a lowered collective, unless it moves nothing: the results, each with the axes it varies along."""
    axes_of_operands = tuple(varying for _, varying in operands)
    if all(ranks.moves_nothing(collective, typeof(x), varying, params) for x, varying in operands):
        outs = [x for x, _ in operands]
    else:
        may_be_operand = (
            collective.shares_memory or ranks.at_once or not collective.sends(params) or "groups" in params
        )  # of single ranks
        outs = lowered_p(collective, may_be_operand).bind(
            *[x for x, _ in operands], collective=collective, params=params, ranks=ranks, varying=axes_of_operands
        )
        outs = outs if collective.multiple_results else [outs]
    return [(out, ranks.varying_after(collective, varying, params)) for out, varying in zip(outs, axes_of_operands)]


def bind_index(axes: Axes, ranks: Backend) -> tuple[Any, Axes]:
    """Bind `Index`: each rank's index along `axes`, and the axes it varies along."""
    varying = ranks.sort_axes(axes)
    return index_p.bind(axes=axes, ranks=ranks, varying=varying), varying
