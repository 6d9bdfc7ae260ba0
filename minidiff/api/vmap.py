"""`vmap`: apply a function of one element along an axis of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy

from minidiff import tree
from minidiff.core.interpreter import Interpreter, current_interpreter, transforming
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.core.vmap import Batch, BatchTracer
from minidiff.errors import name_of
from minidiff.inputs.arguments import are_weak, as_values, check_function, normalize_axis, restore_weak, result_values
from minidiff.inputs.keywords import make_decorator
from minidiff.values.aliasing import copy_shared
from minidiff.values.settings import restores_settings

AxisName = Hashable


@make_decorator
def vmap(
    f: Callable,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: AxisName | None = None,
    axis_size: int | None = None,
    spmd_axis_name: str | tuple[str, ...] | None = None,
) -> Callable:
    """Vectorize `f`: apply it along an axis of its arguments, and stack the results.

    Args:
        f: a function of trees of arrays, of one element.
        in_axes: the axis to map over, an int or None (not mapped), for all arguments; or a tuple with an entry for each
            argument: an int, None, or a tree of these that is a prefix of the argument. Keyword arguments are mapped
            along their first axis.
        out_axes: the position of the new axis in the results, in the same form.
        axis_name: a name by which collectives in `f` address the axis, whose ranks are the elements.
        axis_size: the number of elements, needed if no argument is mapped.
        spmd_axis_name: the mesh axis, or axes, along which a `shard_map` in `f` splits the batch.

    Returns:
        A function of the arguments of `f` with the mapped axes.

    Raises:
        ValueError: by that function, if mapped sizes differ.

    >>> import numpy as np
    >>> vmap(lambda x, y: x * y, in_axes=(0, None))(np.arange(3.0), 2.0)
    array([0., 2., 4.])
    """
    check_function("vmap", f)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree.flatten_with_paths(args := tree.with_settings(args), "args")
        axes = tree.broadcast_prefix(in_axes, args, _is_axis, "in_axes")
        named, names = tree.flatten_with_paths(kwargs and tree.with_settings(kwargs), "kwargs")
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
            size = "" if axis_size is None else f", axis_size={axis_size}"
            raise ValueError(
                f"vmap: the mapped axes must have one size, got sizes {sorted(sizes)} ({shown}{size}); to pass "
                "all of an argument to each call, write None for it in in_axes"
            )
        batch = Batch(current_interpreter(), sizes.pop(), axis_name=axis_name, spmd=spmd_axis_name)
        batch.origin = "vmap", name_of(f)
        tracers = [x if a is None else BatchTracer(batch, x, a) for x, a in zip(values, axes)]
        inputs = restore_weak(are_weak(x for _, x in leaves), tracers)
        count = len(inputs) - len(named)

        def call() -> Any:
            return f(*tree.unflatten(structure, inputs[:count]), **tree.unflatten(names, inputs[count:]))

        out, outs, out_structure = _apply(call, batch)
        places = tree.broadcast_prefix(out_axes, out, _is_axis, "out_axes")
        results = [stack_along(batch, x, a) for x, a in zip(outs, places)]
        return tree.unflatten(out_structure, copy_shared(results, values))

    return mapped


@restores_settings
def _apply(call: Callable[[], Any], batch: Batch) -> tuple[Any, list[Value], tree.Structure]:
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
        whole = "" if t.shape else "; to pass all of it to each call, write None for it in in_axes"
        raise numpy.exceptions.AxisError(f"{error} ({path}: {t}){whole}") from None


def _is_axis(x: Any) -> bool:
    return x is None or isinstance(x, (int, numpy.integer))


def stack_along(batch: Batch, x: Value, axis: int | None) -> Value:
    """Move a result's batch axis to `axis`; broadcast a result that has none."""
    if axis is not None:
        axis = normalize_axis(axis, typeof(x).ndim + 1, "vmap: out_axes")
    if not batch.owns(x):
        if axis is None:
            return x
        return numpy.moveaxis(numpy.broadcast_to(x, (batch.size_of_batch, *typeof(x).shape)), 0, axis)
    if axis is None:
        raise ValueError(f"vmap: out_axes is None for a result {x.type} that depends on mapped arguments; give an axis")
    return numpy.moveaxis(x.value, x.axis, axis)


def named_axes(interpreter: Interpreter | None) -> dict[AxisName, int]:
    """Return the axis names of the enclosing vmaps, and their sizes."""
    axes: dict[AxisName, int] = {}
    while interpreter is not None:
        if isinstance(interpreter, Batch) and interpreter.axis_name is not None:
            axes.setdefault(interpreter.axis_name, interpreter.size_of_batch)
        interpreter = interpreter.outer if interpreter.below is None else interpreter.below
    return axes
