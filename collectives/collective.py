"""The rules shared by all collectives, which `ops.py` and `rooted.py` declare.

A collective's declaration is a row of a table: the states that its operand may have along its axes, and for each the
transpose, which is another collective; the state of its result; its shape rule; and the algorithm that prices it. From
these follow its typing, its batching, and how it runs along a `vmap` axis, or in groups of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from collectives.backends.simulated import Simulated
from collectives.checks import checks
from minidiff.core.primitive import Primitive
from minidiff.core.states import INVARIANT, REDUCED, VARYING
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray
from minidiff.core.vmap import Batch, BatchTracer
from minidiff.errors import UnboundAxisError, show_axes
from minidiff.ops.base import Linear

ARRAY_AXES = ("axis", "split_axis", "concat_axis")  # the parameters that are axes of the array
Shape = tuple[tuple[int, ...], Any]  # a result's shape and dtype


class Collective(Linear):
    """An operation across ranks, which changes the state of its operand along their axes.

    Its parameters include `axes`, in the order in which ranks are counted, and `size`, the number of ranks along
    them. The backend of the mesh runs it by the method of its name.

    `takes` lists the states that the operand may have along `axes`, and for each, as a function without arguments, the
    collective that it transposes to: over the same axes and groups, with the parameters that
    `transpose_params(**params)` changes. `gives` is the state of the result there. `shape(x, **params)` returns the
    result's shape and dtype: by default, the operand's. `cost` names the algorithm that prices it, in
    `collectives.cost`; without one it does not communicate. Batching moves the array axes among the parameters by one.

    Backends and reports ask for further traits: `one_result`, whether ranks along the axes have one result, as where it
    is invariant; `copies`, whether they have copies of one result, typed as varying; `sums`, whether it adds or
    multiplies ranks' values; `growth`, the power of the number of ranks by which a result is larger than its operand
    (1, 0 or -1); `synchronizes`, whether each rank waits for all others; `ungrouped`, what a collective in groups runs
    in each.
    """

    operands_agree = False
    cost: str | None = None
    one_result = copies = sums = False
    ungrouped: Collective | None = None

    def __init__(
        self,
        name: str,
        takes: dict[str, Callable[[], Collective] | None],
        gives: str = VARYING,
        *,
        shape: Callable | None = None,
        transpose_params: Callable[..., dict] = lambda **params: {},
        **traits: Any,
    ):
        traits = {"one_result": gives in (INVARIANT, REDUCED), **traits}
        impl = functools.partial(_unbound, name)
        super().__init__(name, impl, shape or same_shape, self._transposed, self._batched, **traits)
        self.takes = takes
        self.gives = gives
        self.transpose_params = transpose_params
        self.growth = {gathered_shape: 1, scattered_shape: -1}.get(self.shape_rule, 0)
        self.synchronizes = self.cost != "point_to_point"

    def _transposed(self, ct: Value, operands: Sequence[Any], **params: Any) -> list[Value]:
        default, *others = list[Any](self.takes.items())  # the default is for untyped operands too
        to = dict(others).get(operands[0].states.along(params["axes"][0]), default[1])()
        return [
            (grouped_collective(to) if "groups" in params else to).bind(
                ct, **{**params, **self.transpose_params(**params)}
            )
        ]

    def _batched(self, _: Primitive, args: Sequence[Value], batched: Sequence[bool], **params: Any) -> Value:
        return self.bind(*args, **{k: v + 1 if k in ARRAY_AXES else v for k, v in params.items()})

    def typecheck(self, types, params):
        shape, dtype = self.shape_rule(types[0], **params)
        return [ShapedArray(shape, dtype, self.result_states(types, params))]

    def check_fits(self, types, params, scope):
        checks.parameters(self, types, params, scope)

    def sends(self, params):
        return self.cost is not None and params["size"] > 1  # a single rank has all the data

    def result_states(self, types, params):
        states = super().result_states(types, params)
        return states.with_state([a for a in params["axes"] if states.along(a) in self.takes], self.gives)

    def is_checked_in(self, scope, params):
        return scope.axes.keys() >= set(params["axes"])  # types do not track the axes of a vmap

    def check_variance(self, types, params):
        for x in types:
            check_operand(self.name, self.takes, x, params)

    def batch_along(self, batch: Batch, args: Sequence[Value], params: dict) -> Value:
        """Run over the axis of a named batch, whose elements are the ranks."""
        operands = [(batch.in_front(x), (batch.axis_name,) if batch.owns(x) else ()) for x in args]
        return _as_batch(batch, *_ranks(batch).variadic(self, operands, params, counted=False)[0])

    def show_params(self, params):
        others = [f"{k}={v!r}" for k, v in params.items() if k not in ("axes", "size")]
        return ", ".join([show_axes(params["axes"]), *others])


def _ranks(batch: Batch) -> Simulated:
    """Return the elements of a named batch as simulated ranks."""
    ranks = Simulated({batch.axis_name: batch.size_of_batch})
    ranks.one_copy = True  # values are untyped: one copy of an invariant result serves all elements
    return ranks


def _as_batch(batch: Batch, data: Value, varying: tuple) -> Value:
    return BatchTracer(batch, data, 0) if varying else data


def _unbound(name: str, *args: Value, axes: tuple[str, ...], **params: Any) -> Value:
    raise UnboundAxisError(f"{name} over {axes}: there are no such axes here; the tape was recorded in a vmap")


def check_operand(name: str, takes: Collection[str], x: ShapedArray, params: dict) -> None:
    """Raise VarianceError if `x` is in a state, along an axis of a collective, that it does not take."""
    states = {x.states.along(a) for a in params["axes"]}
    if len(states) > 1 or not states.issubset(takes):
        raise checks.state_error(name, takes, x, params)


# ---------------------------------------------------------------- rules


def same_shape(x: ShapedArray, **params: Any) -> Shape:
    """Return the shape and dtype of the operand."""
    return x.shape, x.dtype


def gathered_shape(x: ShapedArray, axes: Any, size: int, axis: int, tiled: bool, **params: Any) -> Shape:
    """Return the shape of gathered blocks: on a new axis, or with `tiled` an existing one."""
    if tiled:
        return (*x.shape[:axis], x.shape[axis] * size, *x.shape[axis + 1 :]), x.dtype
    return (*x.shape[:axis], size, *x.shape[axis:]), x.dtype


def scattered_shape(x: ShapedArray, axes: Any, size: int, axis: int, tiled: bool, **params: Any) -> Shape:
    """Return the shape of a rank's part: an entry along `axis`, or with `tiled` a slice."""
    if tiled:
        return (*x.shape[:axis], x.shape[axis] // size, *x.shape[axis + 1 :]), x.dtype
    return (*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype


# ---------------------------------------------------------------- groups, axis_index


@functools.cache
def grouped_collective(of: Collective) -> Collective:
    """Return a collective within each of `groups`, a parameter. Its results vary, since groups may differ."""
    rules = {"shape": of.shape_rule, "transpose_params": of.transpose_params, "cost": of.cost, "sums": of.sums}
    return type(of)(of.name, {VARYING: of.takes.get(VARYING)}, ungrouped=of, **rules)


class AxisIndex(Primitive):
    """The rank's index along some axes: an integer, varying if the body is typed."""

    def __init__(self):
        super().__init__("axis_index", functools.partial(_unbound, "axis_index"))

    def typecheck(self, types, params):
        return [ShapedArray((), int, params["axes"] if params["typed"] else ())]

    def check_fits(self, types, params, scope):
        checks.axes_in(self.name, scope, params["axes"])

    def batch_along(self, batch: Batch, args: Sequence[Value], params: dict) -> Value:
        return _as_batch(batch, *_ranks(batch).axis_index(params["axes"]))

    def show_params(self, params):
        return show_axes(params["axes"])
