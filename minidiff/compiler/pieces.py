"""Loops in pieces: a kernel is called on each region of its operands, and large regions are cut, for threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.compiler import native
from minidiff.compiler.layout import Layout, Region, Shape, cut, iteration_shape
from minidiff.compiler.loops import Loop
from minidiff.compiler.threads import for_each
from minidiff.core.tracer import Value
from minidiff.ops.base import sum_p


def over_elements(ufunc: numpy.ufunc, loop: Loop, size: int, threads: int) -> Callable:
    """Return the function that calls an ordinary ufunc on pieces, of about `size` elements, of adjacent operands."""
    body = loop.body
    shape, shapes = iteration_shape(body), [v.type.shape for v in body.inputs]
    is_flat = all(math.prod(s) in (1, math.prod(shape)) for s in shapes)
    sizes = (math.prod(shape),) if is_flat else shape
    seen = [(math.prod(s),) if is_flat and s else s for s in shapes]
    regions = [*cut(tuple([(0, n) for n in sizes]), size)]
    if threads == 1 or len(regions) == 1:
        return ufunc

    def select(shape: Shape, region: Region) -> tuple[slice, ...]:
        ends = region[len(region) - len(shape) :]
        return tuple([slice(*pair) if n > 1 else slice(None) for n, pair in zip(shape, ends)])

    plan = [([(k, select(s, r)) for k, s in enumerate(seen)], [select(sizes, r)] * len(body.outputs)) for r in regions]
    targets = [Target(v.type.shape, v.type.dtype, sizes) for v in body.outputs]
    views = lambda operands: [x.reshape(s) if s else x for x, s in zip(operands, seen)]  # noqa: E731
    in_pieces = _in_pieces(ufunc, loop if is_flat else None, views if is_flat else list, targets, plan, threads)

    def over_elements(*operands: Value) -> Any:
        # NumPy finds the order in which other operands are adjacent.
        is_adjacent = all(x.flags.c_contiguous for x, s in zip(operands, shapes) if s == shape)
        return (in_pieces if is_adjacent else ufunc)(*operands)

    return over_elements


def over_regions(ufunc: numpy.ufunc, loop: Loop, layout: Layout, size: int, threads: int) -> Callable:
    """Return the function that calls a kernel's ufunc on each region of its operands, and returns the results."""
    operands = [pair for v, pieces in layout.operands.items() for pair in zip(pieces, layout.views[v])]
    # For each view: an operand, its part, and the shape that the part has to be given, if it does not have it.
    sources = [(p.operand, p.part, None if p.shape == view.shape else view.shape) for p, view in operands]

    def views(operands: Sequence[Value]) -> list[Value]:
        parts = [(operands[k][part] if part else operands[k], shape) for k, part, shape in sources]
        return [x if shape is None else x.reshape(shape) for x, shape in parts]

    summed, shapes = _outer_sums(loop, layout), [v.type.shape for v in loop.body.outputs]
    regions = [*layout.regions(size)]
    if len(regions) > 1:
        threads = threads if len(regions) > layout.count else 1
        plan = [(_reads(loop, layout, r), [view.select(r) for view in loop.result_views]) for r in regions]
        first, last = [[view.select(r) for view in loop.result_views] for r in (regions[0], regions[-1])]
        # Pieces of one region are terms of the same elements, or of none in common.
        adds = [p.reduction is sum_p and (layout.count > 1 or x == y) for p, x, y in zip(loop.results, first, last)]
        seen = zip(loop.results, shapes, loop.result_views, summed, adds)
        results = [Target(s, p.dtype, v.shape, is_sum or bool(axes), axes) for p, s, v, axes, is_sum in seen]
        takes_loop = threads > 1 and layout.ndim <= 2
        return _in_pieces(ufunc, loop if takes_loop else None, views, results, plan, threads)
    unchanged = not any(summed) and shapes == [view.shape for view in loop.result_views]

    def at_once(*operands: Value) -> Any:
        out = ufunc(*views(operands))
        if unchanged:
            return out
        outs = out if type(out) is tuple else (out,)
        outs = tuple([numpy.add.reduce(x, axes) if axes else x for x, axes in zip(outs, summed)])
        outs = tuple([x.reshape(s) if s else x for x, s in zip(outs, shapes)])
        return outs if len(outs) > 1 else outs[0]

    is_direct = unchanged and sources == [(k, (), None) for k in range(len(sources))]
    return ufunc if is_direct else at_once


class Target(NamedTuple):
    """A result that is computed in pieces: in which shape they are written, and whether they are terms of sums.

    What a ufunc gives for a term is first summed along `axes`.
    """

    shape: Shape
    dtype: numpy.dtype
    view: Shape
    is_sum: bool = False
    axes: tuple[int, ...] = ()


#: For each piece, the parts of operands and results: numbers of views (None for zeros, the array itself) and indices.
Plan = list[tuple[list, list]]
#: A function of views of operands and results that computes all pieces, and returns the terms of sums of each.
Run = Callable[[Sequence[Value], Sequence[numpy.ndarray]], list]


def _in_pieces(
    ufunc: numpy.ufunc, loop: Loop | None, views: Callable, targets: list[Target], plan: Plan, threads: int
) -> Callable:
    """Return the function that computes results in pieces of the `views` of its operands, by the ufunc or its loop."""
    run = _by_loop(ufunc, loop, targets, plan, threads) if loop else _by_ufunc(ufunc, targets, plan, threads)

    def in_pieces(*operands: Value) -> Any:
        # -0.0 + x is x, for 0.0 too.
        outs = [numpy.full(t.shape, -0.0, t.dtype) if t.is_sum else numpy.empty(t.shape, t.dtype) for t in targets]
        seen = [y.reshape(t.view) for y, t in zip(outs, targets)]
        terms = run(views(operands), seen)
        for k, t in enumerate(targets):
            if t.is_sum:
                for parts, (_, places) in zip(terms, plan):
                    seen[k][places[k]] += parts[k]
        results = [y if y.shape else y[()] for y in outs]
        return tuple(results) if len(results) > 1 else results[0]

    return in_pieces


def _by_ufunc(ufunc: numpy.ufunc, targets: list[Target], plan: Plan, threads: int) -> Run:
    """Return the function that calls a ufunc on each piece."""

    def run(arrays: Sequence[Value], seen: Sequence[numpy.ndarray]) -> list:
        terms: list[Any] = [None] * len(plan)

        def call(n: int) -> None:
            reads, places = plan[n]
            out = tuple([None if t.is_sum else y[i] for y, i, t in zip(seen, places, targets)])
            parts = ufunc(*[x if k is None else arrays[k][x] for k, x in reads], out=out)
            parts = parts if type(parts) is tuple else (parts,)
            terms[n] = [numpy.add.reduce(x, t.axes, keepdims=True) if t.axes else x for x, t in zip(parts, targets)]

        for_each(call, range(len(plan)), threads)
        return terms

    return run


MAX_CACHED, _NONE = 16, numpy.empty(0)  # strides of arrays, by kernel; the array of zeros


def _by_loop(ufunc: numpy.ufunc, loop: Loop, targets: list[Target], plan: Plan, threads: int) -> Run:
    """Return the function that calls the loop inside of a ufunc on each piece, without Python's lock.

    The arrays of a call have numbers: none, results or terms of sums, and then the views of operands.
    """
    function, report = native.loop_of(ufunc)
    parts = [
        [
            *[(0, x) if k is None else (1 + len(targets) + k, x) for k, x in reads],
            *[(k, (n, *x) if t.is_sum else x) for k, (x, t) in enumerate(zip(places, targets), 1)],
        ]
        for n, (reads, places) in enumerate(plan)
    ]
    numbers = numpy.array([[k for k, _ in piece] for piece in parts])
    dtypes = {k: p.dtype for piece in parts for p, (k, _) in zip(loop.parameters, piece)}
    is_sum, cache = any(t.is_sum for t in targets), dict[tuple, list[numpy.ndarray]]()

    def run(views: Sequence[Value], seen: Sequence[numpy.ndarray]) -> list:
        terms = [numpy.empty((len(plan), *t.view), t.dtype) if t.is_sum else y for y, t in zip(seen, targets)]
        arrays = [_NONE, *terms, *[_aligned(x, dtypes.get(k)) for k, x in enumerate(views, 1 + len(terms))]]
        key = tuple([x.strides for x in arrays])
        arguments = cache.get(key)  # another thread may clear the cache
        if arguments is None:
            if len(cache) >= MAX_CACHED:
                cache.clear()
            arguments = cache[key] = _arguments(loop, parts, arrays)
        offsets, *others = arguments
        pointers = numpy.array([*map(_address, arrays)])[numbers] + offsets
        tables = [(_address(table), table.strides[0]) for table in (pointers, *others)]
        for_each(lambda n: function(*[x + n * step for x, step in tables], report), range(len(plan)), threads)
        pieces = [zip(terms, places, targets) for _, places in plan] if is_sum else []
        return [[x[n][k] if t.is_sum else None for x, k, t in piece] for n, piece in enumerate(pieces)]

    return run


def _arguments(loop: Loop, parts: list[list], arrays: list) -> list[numpy.ndarray]:
    """Return where each piece begins in each array, in bytes, and the sizes and steps that its loop takes."""
    rows = []
    for piece in parts:
        views = [arrays[k][(*x, ...)] if k else x for k, x in piece]
        offsets = [_address(x) - _address(arrays[k]) for x, (k, _) in zip(views, piece)]
        sizes = {c: n for x, p in zip(views, loop.parameters) for c, n in zip(p.dimensions, x.shape)}
        steps = [[n for _, n in zip(p.dimensions, x.strides)] for x, p in zip(views, loop.parameters)]
        if loop.signature is None:
            rows.append((offsets, [*sizes.values()], [sum(n) for n in steps]))
        else:
            rows.append((offsets, [1, *sizes.values()], [*[0] * len(steps), *itertools.chain(*steps)]))
    return [*map(numpy.array, zip(*rows))]


def _address(x: numpy.ndarray) -> int:
    return x.__array_interface__["data"][0]


def _aligned(x: Value, dtype: numpy.dtype | None) -> numpy.ndarray:
    """Return an array of a dtype that machine code can read; None is any."""
    is_ready = type(x) is numpy.ndarray and dtype in (None, x.dtype) and x.flags.aligned
    return x if is_ready else numpy.require(x, dtype, ["A", "E"])


def _outer_sums(loop: Loop, layout: Layout) -> list[tuple[int, ...]]:
    """For each result, return the dimensions before rows and columns along which the ufunc returns partial sums."""
    outer = range(layout.ndim - 2)
    return [tuple([d for d in outer if view.sizes[d] != layout.sizes[d]]) for view in loop.result_views]


def _reads(loop: Loop, layout: Layout, region: Region) -> list[tuple[int | None, Any]]:
    """Return each operand of a kernel in a region: the number of a piece and an index, or None and zeros."""
    reads: list[tuple[int | None, Any]] = []
    first = 0
    for p, views in zip(loop.operands, layout.views.values()):
        inside = next((k for k, view in enumerate(views) if view.contains(region)), None)
        if inside is None:
            shape = [region[d][1] - region[d][0] for d in views[0].dims]
            reads.append((None, numpy.broadcast_to(numpy.zeros((), p.dtype), shape)))
        else:
            reads.append((first + inside, views[inside].select(region)))
        first += len(views)
    return reads
