"""vmap: apply a function of one element along an axis of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.core.interpreter import Interpreter, current_interpreter, name_of, running, transforming
from minidiff.core.operation import Primitive
from minidiff.core.tracer import SIZE, Tracer, Value
from minidiff.core.types import ShapedArray, plain_operand, typeof
from minidiff.diagnostics.errors import MisfitError, TracerError
from minidiff.diagnostics.interrupts import restores_interpreter
from minidiff.inputs.aliasing import apart
from minidiff.inputs.arguments import as_values, check_function, result_values
from minidiff.inputs.dtypes import PLAIN
from minidiff.inputs.keywords import transformation
from minidiff.inputs.promotion import are_weak, weak_where
from minidiff.ops.shape import broadcast_to, expand_dims, moveaxis, normalize_axis

AxisName = Hashable


class BatchTracer(Tracer):
    """One element of a batch. `value` is the whole batch, along its axis `axis`."""

    __slots__ = ("value", "axis")
    interpreter: Batch

    def __init__(self, interpreter: Batch, value: Value, axis: int):
        self.interpreter = interpreter
        self.value = value
        self.axis = axis

    @property
    def type(self) -> ShapedArray:
        whole = typeof(self.value)
        sharding = whole.sharding and whole.sharding.of_element(self.axis, whole.ndim)
        return whole.update(shape=whole.shape[: self.axis] + whole.shape[self.axis + 1 :], sharding=sharding)

    def concrete(self, use: str) -> Any:
        self.check_alive()
        instead = (
            "pass what all have in common with in_axes=None; for range() write md.fori_loop, for a choice md.cond"
            if use == SIZE
            else "choose element by element with np.where or md.cond, loop with md.fori_loop, call np.sin for math.sin"
        )
        raise TracerError(
            f"{use} needs one concrete value, but under vmap this value ({self.type}) is many at once: {instead}"
        )

    def __repr__(self) -> str:
        return f"Batched<{self.type}>(along axis {self.axis} of {self.value!r})"


class Batch(Interpreter):
    """Apply each operation once, along the batch axis of the batched operands."""

    name = "vmap"

    def __init__(
        self, below: Interpreter | None, size: int, outer: Batch | None = None, axis_name: Any = None, spmd: Any = None
    ):
        super().__init__(below, outer)
        self.size_of_batch = size
        self.axis_name: Any = axis_name if outer is None else outer.axis_name
        self.spmd_axis_name: Any = spmd if outer is None else outer.spmd_axis_name  # mesh axes that split the batch

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        with running(self.below):
            if primitive.is_higher_order:
                return primitive.batch_body(self, args, params)
            if self.axis_name is not None and self.runs_along(primitive, params):
                return primitive.batch_along(self, args, params)
            batched = [self.owns(x) for x in args]
            for x, yes in zip(args, batched):
                if not yes and type(x) not in PLAIN:  # rules read shapes
                    plain_operand(x)
            if not any(batched):
                return self.below.process(primitive, args, params)
            values = [moveaxis(x.value, x.axis, 0) if b else x for x, b in zip(args, batched)]
            try:
                out = primitive.batch(values, batched, params)
            except MisfitError:  # its message has the types of batches, not of elements
                raise MisfitError(primitive, args) from None
            return [BatchTracer(self, x, 0) for x in out] if primitive.multiple_results else BatchTracer(self, out, 0)

    def runs_along(self, primitive: Primitive, params: dict) -> bool:
        """Whether it is a collective over this batch's axis, with a `batch_along` rule."""
        return primitive.batch_along is not None and params["axes"] == (self.axis_name,)

    def owns(self, x: Value) -> bool:
        return type(x) is BatchTracer and x.interpreter is self

    def in_front(self, x: Value) -> Value:
        """Move the batch axis of `x` to the front; return a constant unchanged."""
        return moveaxis(x.value, x.axis, 0) if self.owns(x) else x

    def adopt_own(self, x: Any) -> Value:
        return BatchTracer(self, self.below.adopt(x.value), x.axis)


def named_axes(interpreter: Interpreter | None) -> dict[AxisName, int]:
    """The axis names of the enclosing vmaps, and their sizes."""
    axes: dict[AxisName, int] = {}
    while interpreter is not None:
        if isinstance(interpreter, Batch) and interpreter.axis_name is not None:
            axes.setdefault(interpreter.axis_name, interpreter.size_of_batch)
        interpreter = interpreter.outer if interpreter.below is None else interpreter.below
    return axes


@transformation
def vmap(
    f: Callable,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: AxisName | None = None,
    axis_size: int | None = None,
    spmd_axis_name: str | tuple[str, ...] | None = None,
) -> Callable:
    """Vectorize `f`: apply it along an axis of its arguments, and stack the results.

    `in_axes` is an int or None (not mapped) for all arguments, or a tuple with an entry for each: an int, None, or a
    tree of these that is a prefix of the argument. Keyword arguments are mapped along their first axis. `out_axes` is
    the position of the new axis in the results, in the same form. `f` may use collectives over the axis `axis_name`,
    whose ranks are the elements; a `shard_map` in `f` splits the batch along the axis `spmd_axis_name` of its mesh.
    `axis_size` is the number of elements, needed if no argument is mapped. Raise ValueError if mapped sizes differ.

    >>> import numpy as np
    >>> vmap(lambda x, y: x * y, in_axes=(0, None))(np.arange(3.0), 2.0)
    array([0., 2., 4.])
    """
    check_function("vmap", f)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree.flatten_with_paths(args, "args")
        axes = tree.broadcast_prefix(in_axes, args, _is_axis, "in_axes")
        named, names = tree.flatten_with_paths(kwargs, "kwargs")
        leaves, axes = [*leaves, *named], [*axes, *[0] * len(named)]
        values = as_values("vmap", [x for _, x in leaves], lambda: [path for path, _ in leaves])
        axes = [a if a is None else _axis_of(x, a, path) for x, a, (path, _) in zip(values, axes, leaves)]
        sizes = {typeof(x).shape[a] for a, x in zip(axes, values) if a is not None}
        if axis_size is not None:
            sizes.add(axis_size)
        if len(sizes) != 1:
            shown = ", ".join(f"{path}: {typeof(x)} along {a}" for (path, _), x, a in zip(leaves, values, axes))
            if not sizes:
                raise ValueError(f"vmap: no argument is mapped ({shown}); name an axis in in_axes, or give axis_size")
            given = "" if axis_size is None else f", axis_size={axis_size}"
            raise ValueError(f"vmap: the mapped axes must have one size, got sizes {sorted(sizes)} ({shown}{given})")
        batch = Batch(current_interpreter(), sizes.pop(), axis_name=axis_name, spmd=spmd_axis_name)
        batch.origin = "vmap", name_of(f)
        tracers = [x if a is None else BatchTracer(batch, x, a) for x, a in zip(values, axes)]
        inputs = weak_where(are_weak(x for _, x in leaves), tracers)
        count = len(inputs) - len(named)

        def call() -> Any:
            return f(*tree.unflatten(structure, inputs[:count]), **tree.unflatten(names, inputs[count:]))

        out, outs, out_structure = _applied(call, batch)
        places = tree.broadcast_prefix(out_axes, out, _is_axis, "out_axes")
        results = [stacked(batch, x, a) for x, a in zip(outs, places)]
        return tree.unflatten(out_structure, apart(results, values))

    return mapped


@restores_interpreter
def _applied(call: Callable[[], Any], batch: Batch) -> tuple[Any, list[Value], tree.Structure]:
    """Call under `batch`: return the result, its leaves as values, its structure."""
    with transforming(batch):
        out = call()
        outs, structure = tree.flatten(out)
        return out, result_values(batch.origin or (batch.name,), outs, structure), structure


def _axis_of(x: Value, axis: int, path: str) -> int:
    t = typeof(x)
    try:
        return normalize_axis(axis, t.ndim, "vmap")
    except numpy.exceptions.AxisError as error:
        raise numpy.exceptions.AxisError(f"{error} ({path}: {t})") from None


def _is_axis(x: Any) -> bool:
    return x is None or isinstance(x, (int, numpy.integer))


def stacked(batch: Batch, x: Value, axis: int | None) -> Value:
    """Move a result's batch axis to `axis`; broadcast a result that has none."""
    if axis is not None:
        axis = normalize_axis(axis, typeof(x).ndim + 1, "vmap: out_axes")
    if not batch.owns(x):
        if axis is None:
            return x
        return moveaxis(broadcast_to(expand_dims(x, 0), (batch.size_of_batch, *typeof(x).shape)), 0, axis)
    if axis is None:
        raise ValueError(f"vmap: out_axes is None for a result of type {x.type} that depends on the mapped arguments")
    return moveaxis(x.value, x.axis, axis)
