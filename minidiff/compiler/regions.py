"""Run a kernel on whole arrays: region by region, where each operand is one view (`layout.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.compiler.layout import Layout, Region
from minidiff.compiler.loops import Loop
from minidiff.core.tracer import Value


def over_regions(ufunc: numpy.ufunc, loop: Loop, layout: Layout) -> Callable:
    """Return the function that calls a kernel's ufunc on each region of its operands, and returns the results."""
    operands = [pair for v, pieces in layout.operands.items() for pair in zip(pieces, layout.views[v])]
    # For each view: an operand, its part, and the shape that the part has to be given, if it does not have it.
    sources = [(p.operand, p.part, None if p.shape == view.shape else view.shape) for p, view in operands]

    def views(operands: Sequence[Value]) -> list[Value]:
        parts = [(operands[k][part] if part else operands[k], shape) for k, part, shape in sources]
        return [x if shape is None else x.reshape(shape) for x, shape in parts]

    if layout.count > 1:
        return _in_parts(ufunc, loop, layout, views)
    summed, shapes = _outer_sums(loop, layout), [v.type.shape for v in loop.body.outputs]
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


def _in_parts(ufunc: numpy.ufunc, loop: Loop, layout: Layout, views: Callable) -> Callable:
    """Return the function that calls a ufunc on each of several regions of the `views` of its operands."""
    summed, shapes = _outer_sums(loop, layout), [v.type.shape for v in loop.body.outputs]
    added = [p.is_sum or bool(axes) for p, axes in zip(loop.results, summed)]
    dtypes = [p.dtype for p in loop.results]
    plan = [
        (_reads(loop, layout, region), [view.select(region) for view in loop.result_views])
        for region in layout.regions()
    ]

    def in_parts(*operands: Value) -> Any:
        arrays = views(operands)
        # -0.0 + x is x, for 0.0 too.
        outs = [numpy.full(s, -0.0, t) if is_sum else numpy.empty(s, t) for s, t, is_sum in zip(shapes, dtypes, added)]
        seen = [y.reshape(view.shape) for y, view in zip(outs, loop.result_views)]
        for reads, places in plan:
            targets = [None if is_sum else y[i] for y, i, is_sum in zip(seen, places, added)]
            parts = ufunc(*[x if k is None else arrays[k][x] for k, x in reads], out=tuple(targets))
            for k, x in enumerate(parts if type(parts) is tuple else (parts,)):
                if added[k]:
                    seen[k][places[k]] += numpy.add.reduce(x, summed[k], keepdims=True) if summed[k] else x
        results = [y if y.shape else y[()] for y in outs]
        return tuple(results) if len(results) > 1 else results[0]

    return in_parts


def _outer_sums(loop: Loop, layout: Layout) -> list[tuple[int, ...]]:
    """For each result, return the dimensions before rows and columns along which the ufunc gives terms of a sum."""
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
