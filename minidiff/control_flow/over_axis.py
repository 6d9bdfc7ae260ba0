"""`map` and `associative_scan`: apply a function along an axis of arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from minidiff import tree
from minidiff.api.vmap import vmap
from minidiff.control_flow.carries import Carry, check_functions
from minidiff.control_flow.loops import elements_of, scan_blocks, scan_steps
from minidiff.control_flow.partial_eval import lift_value
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops.shape import concatenate, moveaxis, reshape, stack


def map(f: Callable, xs: Any, *, batch_size: int | None = None) -> Any:
    """Apply `f` to each element of `xs` along its first axis; stack the results.

    `vmap` does the same for all elements at once, and needs the memory for that.

    Args:
        f: a function of one element.
        xs: a tree of arrays of one length.
        batch_size: the number of elements of a step, which `vmap` maps over; the last step takes the remaining ones.

    Returns:
        The tree of results, stacked.

    Raises:
        ValueError: if arrays of `xs` differ in length, or if `batch_size` is not positive.

    >>> import numpy as np
    >>> map(lambda x: x @ x, np.array([[1.0, 2.0], [3.0, 4.0]]))
    array([ 5., 25.])
    >>> map(lambda x: 2 * x, np.arange(5.0), batch_size=2)
    array([0., 2., 4., 6., 8.])
    """
    check_functions("map", {"f": f})
    elements, length = elements_of("map", xs)
    carry = Carry("map", f, "xs", None)
    if batch_size is None or not length:
        return scan_steps(lambda _, x: (None, f(x)), carry, elements, length, False)[1]
    size, batched = operator.index(batch_size), vmap(f)
    if size < 1:
        raise ValueError(f"map: batch_size must be a number of elements, at least 1, got {size}")
    if size > length:
        return batched(elements)
    return scan_blocks(lambda _, xs, count: (None, batched(xs)), carry, elements, length, False, size)[1]


def associative_scan(fn: Callable, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """Compute all prefixes `e[0], fn(e[0], e[1]), fn(fn(e[0], e[1]), e[2]), …`.

    `fn` is called about 2 log2(length) times, where `scan` takes one step per element.

    Args:
        fn: an associative function of two trees of several elements along the axis, which it combines elementwise.
        elems: a tree of arrays of one length along `axis`.
        reverse: run from the last element to the first: `…, fn(e[n-1], e[n-2]), e[n-1]`.
        axis: the axis of the elements.

    Returns:
        A tree with the structure and shapes of `elems`.

    Raises:
        ValueError: if lengths differ.
        TypeError: if `fn` returns another tree.

    >>> import numpy as np
    >>> associative_scan(np.multiply, np.array([1.0, 2.0, 3.0, 4.0]))
    array([ 1.,  2.,  6., 24.])
    """
    check_functions("associative_scan", {"fn": fn})
    leaves, structure = tree.flatten_with_paths(elems, "elems")
    arrays = [lift_value(x) for _, x in leaves]
    axes = [normalize_axis(axis, typeof(x).ndim, "associative_scan") for x in arrays]
    lengths = {typeof(x).shape[at] for x, at in zip(arrays, axes)}
    if len(lengths) != 1:
        shown = ", ".join(f"{path}: {typeof(x)}" for (path, _), x in zip(leaves, arrays))
        raise ValueError(f"associative_scan: elems must have one length along axis {axis}, got {shown or 'no array'}")

    def combine(a: list[Value], b: list[Value]) -> list[Value]:
        """Apply `fn` to elements along the first axis."""
        first, second = (
            tree.unflatten(structure, [moveaxis(x, 0, to) for x, to in zip(side, axes)]) for side in (a, b)
        )
        outs, out_structure = tree.flatten(fn(first, second))
        if out_structure != structure:
            raise TypeError(f"associative_scan: elems has the structure {structure}, the result of fn {out_structure}")
        outs = [lift_value(x) for x in outs]
        for (path, _), x, elem in zip(leaves, outs, tree.leaves(first)):
            if typeof(x).shape != typeof(elem).shape:
                raise TypeError(
                    f"associative_scan: for {path} of type {typeof(elem)}, fn returned {typeof(x)}: it gets several "
                    "elements along the axis, and must return as many"
                )
        return [moveaxis(x, at, 0) for x, at in zip(outs, axes)]

    step = slice(None, None, -1 if reverse else None)
    front = [moveaxis(x, at, 0)[step] for x, at in zip(arrays, axes)]
    results = _compute_prefixes(combine, front, *lengths)
    return tree.unflatten(structure, [moveaxis(x[step], 0, to) for x, to in zip(results, axes)])


def _compute_prefixes(combine: Callable, xs: list[Value], length: int) -> list[Value]:
    """Compute prefixes along the first axis; combined pairs give those at odd positions."""
    if length < 2:
        return xs
    pairs = length // 2
    odd = _compute_prefixes(combine, combine([x[: 2 * pairs : 2] for x in xs], [x[1::2] for x in xs]), pairs)
    even = [x[:1] for x in xs]
    if length > 2:
        later = combine([x[: (length - 1) // 2] for x in odd], [x[2::2] for x in xs])
        even = [concatenate([x, y]) for x, y in zip(even, later)]
    both = [reshape(stack([x[:pairs], y], axis=1), (2 * pairs, *typeof(y).shape[1:])) for x, y in zip(even, odd)]
    return [concatenate([x, rest[pairs:]]) for x, rest in zip(both, even)] if length % 2 else both
