"""The simulated backend: all ranks in this process, their blocks stacked.

A value that varies along axes of sizes n and m is stored as one array of shape (n*m, *block), with ranks in mesh order;
a value that varies along no axis is stored once, as the block itself. Ordinary operations run on all ranks at once, by
their batching rules.

A named batch (`vmap(f, axis_name='i')`) is stored in the same way and uses the same collectives. Its arrays may be
tracers, so the collectives use only functions that NumPy dispatches to them, and never write in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from collectives.backends.base import (
    GROUP,
    Axes,
    Backend,
    CollectivePlan,
    Dims,
    show_block,
    split_dimension,
    unsplit_dimension,
)
from collectives.checks import checks
from minidiff.core.primitive import Primitive
from minidiff.core.states import INVARIANT
from minidiff.core.tracer import Tracer
from minidiff.ops.base import broadcast_array
from minidiff.values.aliasing import read_only_view
from minidiff.values.dtypes import accumulator_dtype, check_dtype


class Simulated(Backend):
    """All ranks of a mesh, simulated in this process."""

    name = "simulated"
    at_once = True
    one_copy = False  # whether ranks share the result of a gather or a broadcast, even if it varies

    # ------------------------------------------------ operations

    def apply(
        self, primitive: Primitive, operands: Sequence[tuple[numpy.ndarray, Axes]], params: dict
    ) -> tuple[numpy.ndarray, Axes]:
        along = {axes for _, axes in operands}
        along.discard(())
        if not along:
            return primitive.bind(*[x for x, _ in operands], **params), ()
        batched = [axes != () for _, axes in operands]
        if len(along) == 1:
            (varying,), values = along, [x for x, _ in operands]
        else:
            varying = self.sort_axes({a for axes in along for a in axes})
            values = [self.expand(x, axes, varying) if axes else x for x, axes in operands]
        return (primitive.batch_ranks or primitive.batch)(values, batched, params), varying

    def _run(self, primitive, x, varying, axes, size, **params):
        if INVARIANT in primitive.takes:
            x, rest = self._split(x, varying, ())
            x = x[0]
        else:
            x, rest = self._split(x, varying, axes)
        out = getattr(self, "_" + primitive.name)(x, size, **params)
        if primitive.one_result or (primitive.copies and self.one_copy):
            return (out, rest) if rest else (out[0], ())
        return self._join(numpy.broadcast_to(out, (size, *out.shape)) if primitive.copies else out, axes, rest)

    def _in_groups(self, primitive, x, varying, axes, groups, **params):
        """Run a collective within each group, as over an axis that has only the group's ranks."""
        x, rest = self._split(x, varying, axes)
        results: dict[int, numpy.ndarray] = {}
        for group in groups:
            ranks = Simulated({GROUP: len(group), **{a: self.sizes[a] for a in rest}})
            every = tuple(ranks.sizes)
            blocks = numpy.stack([x[rank] for rank in group]).reshape(ranks.size(every), *x.shape[2:])
            within = {**params, "axes": (GROUP,), "size": len(group)}
            out, after = ranks._run(primitive.ungrouped, blocks, every, **within)
            out = ranks.expand(out, after, every)
            results.update(zip(group, out.reshape(len(group), self.size(rest), *out.shape[1:])))
        return self._join(numpy.stack([results[rank] for rank in sorted(results)]), axes, rest)

    def moves_nothing(self, primitive, x, varying, params):
        # a stack of one rank's blocks is one of the same ranks
        return primitive.name == "pbroadcast" and params["size"] == 1 and varying != ()

    def varying_after(self, primitive, varying, params):
        if self.one_copy and primitive.copies and "groups" not in params:
            return tuple(a for a in varying if a not in params["axes"])
        return super().varying_after(primitive, varying, params)

    def plan(self, primitive, operands, params, counted=True, in_place=False):
        for x, _ in operands:
            if x is not None:
                check_dtype(x.dtype)  # Python objects cannot be sent to other ranks
        each = primitive.per_operand or primitive
        functions = [self._plan_one(each, varying, params) for _, varying in operands]
        several = lambda *xs: [f(x) for f, x in zip(functions, xs)]  # noqa: E731
        execute = several if primitive.multiple_results else functions[0]
        if primitive.linear_operands:
            execute = self._plan_ragged(primitive, *[varying for _, varying in operands], params)
        if counted and primitive.sends(params):
            nbytes = [x.nbytes // self.size(axes) for x, axes in operands[: primitive.linear_operands]]
            execute = self._counted(execute, primitive.name, sum(nbytes))
        return CollectivePlan(execute, [self.varying_after(primitive, varying, params) for _, varying in operands])

    def _plan_one(self, primitive, varying, params):
        """Return the function of one operand's data that a collective is."""
        if "groups" in params:
            return lambda x: self._in_groups(primitive, x, varying, **params)[0]
        if primitive.name == "pbroadcast":  # a view
            wanted = self.varying_after(primitive, varying, params)
            return lambda x: self.expand(x, varying, wanted)
        if primitive.one_result and varying == params["axes"]:  # its blocks are the entries of the first dimension
            run, size = getattr(self, "_" + primitive.name), params["size"]
            others = {k: v for k, v in params.items() if k not in ("axes", "size")}
            return lambda x: run(x.reshape(size, 1, *x.shape[1:]), size, **others)[0]
        return lambda x: self._run(primitive, x, varying, **params)[0]

    def _plan_ragged(self, primitive, varying, varying_splits, params):
        """Return the function of an operand and of its table, which is the same along the axes of the collective."""
        every = self.sort_axes({*varying, *varying_splits})
        rest = tuple(a for a in every if a not in params["axes"])

        def execute(x, splits):
            x, splits = self.expand(x, varying, every), self.reshard_data(splits, varying_splits, rest)
            return self._run(primitive, x, every, splits=splits if rest else splits[None], **params)[0]

        return execute

    def _counted(self, execute, name, nbytes):
        counter = self.counters[name]

        def execute_counted(*xs):
            counter.calls += 1
            counter.bytes += nbytes
            return execute(*xs)

        return execute_counted

    def plan_start(self, primitive, operands, params):
        execute = self.plan(primitive, operands, params).execute
        return execute if primitive.multiple_results else lambda x: [execute(x)]

    def wait(self, request: Sequence) -> list[numpy.ndarray]:
        return list(request)

    def finish(self, error: BaseException | None = None) -> None:
        pass

    def axis_index(self, axes: Axes) -> tuple[numpy.ndarray, Axes]:
        return self._join(numpy.arange(self.size(axes))[:, None], axes, ())

    # ------------------------------------------------ blocks in an array

    def expand(self, x: numpy.ndarray, varying: Axes, wanted: Axes) -> numpy.ndarray:
        """Repeat a value along axes of `wanted` not in `varying` (a view if possible)."""
        if varying == wanted or (varying and self.size(wanted) == len(x)):  # one rank along each of the other axes
            return x
        block = x.shape[1:] if varying else numpy.shape(x)
        if not varying:
            return broadcast_array(x, (self.size(wanted), *block))
        x = numpy.reshape(x, (*[self.sizes[a] if a in varying else 1 for a in wanted], *block))
        return numpy.broadcast_to(x, (*[self.sizes[a] for a in wanted], *block)).reshape(self.size(wanted), *block)

    def block_shape(self, x: numpy.ndarray, varying: Axes) -> tuple[int, ...]:
        return x.shape[1:] if varying else x.shape

    def data_shape(self, shape: tuple[int, ...], varying: Axes) -> tuple[int, ...]:
        return (self.size(varying), *shape) if varying else shape

    def mask_operand(
        self, x: numpy.ndarray, varying: Axes, axes: Axes, mask: Sequence[bool]
    ) -> tuple[numpy.ndarray, Axes]:
        """Give ranks along `axes` that do not take a branch, by the `mask`, the block of the first one that does."""
        if not set(axes).intersection(varying):
            return x, varying
        x, rest = self._split(x, varying, axes)
        return self._join(x[numpy.where(mask, numpy.arange(len(x)), numpy.argmax(mask))], axes, rest)

    def _split(self, x: numpy.ndarray, varying: Axes, axes: Axes) -> tuple[numpy.ndarray, Axes]:
        """Return x as (ranks along `axes`, ranks along the rest, *block), and the rest."""
        wanted = self.sort_axes({*varying, *axes})
        rest = tuple(a for a in wanted if a not in axes)
        x = self.expand(x, varying, wanted)
        block = x.shape[1:] if wanted else x.shape
        x = numpy.reshape(x, (*[self.sizes[a] for a in wanted], *block))
        order = [wanted.index(a) for a in (*axes, *rest)]
        x = x.transpose(*order, *range(len(wanted), x.ndim))
        return x.reshape(self.size(axes), self.size(rest), *block), rest

    def _join(self, x: numpy.ndarray, axes: Axes, rest: Axes) -> tuple[numpy.ndarray, Axes]:
        """Join what `_split` has split."""
        varying, order, block = self.sort_axes({*axes, *rest}), (*axes, *rest), x.shape[2:]
        x = x.reshape(*[self.sizes[a] for a in order], *block)
        x = x.transpose(*[order.index(a) for a in varying], *range(len(order), x.ndim))
        return x.reshape(self.size(varying), *block), varying

    # ------------------------------------------------ collectives: x is (ranks, ranks along other axes, *block)

    def _psum(self, x, size):
        return _add(x)

    def _pprod(self, x, size):
        return x.prod(0, dtype=accumulator_dtype(x.dtype)).astype(x.dtype)

    def _pmax(self, x, size):
        return x.max(0)

    def _pmin(self, x, size):
        return x.min(0)

    def _pbroadcast(self, x, size):
        return numpy.broadcast_to(x, (size, *x.shape))

    def _unreduced(self, x, size):
        return x

    _reduced = _unreduced

    def _all_gather(self, x, size, axis, tiled):
        return unsplit_dimension(x, axis + 1, tiled)

    _all_gather_invariant = _all_gather_reduced = _all_gather

    def _psum_scatter(self, x, size, axis, tiled):
        return split_dimension(_add(x), size, axis + 1, tiled)

    def _pscatter(self, x, size, axis, tiled):
        return split_dimension(x, size, axis + 1, tiled)

    def _all_to_all(self, x, size, split_axis, concat_axis, tiled):
        x = split_dimension(x, size, split_axis + 2, tiled)  # (to, from, rest, *block)
        return numpy.stack([unsplit_dimension(parts, concat_axis + 1, tiled) for parts in x])

    def _ragged_all_to_all(self, x, size, splits, axis, rows):
        x, splits = numpy.moveaxis(x, axis + 2, 2), splits.astype(int)  # splits: (rest, from, to)
        if not isinstance(splits, Tracer):
            checks.rows(splits, x.shape[2], rows)
        ends, row = splits.cumsum(1), numpy.arange(rows)  # where the rows from each rank end, in results
        source = (ends[..., None] <= row).sum(1)  # (rest, to, row); beyond all ranks for padding
        rest, to = numpy.arange(len(splits))[:, None, None], numpy.arange(size)[:, None]
        at = (splits.cumsum(2) - ends)[rest, numpy.minimum(source, size - 1), to] + row
        zeros = numpy.pad(x, [(0, 0), (0, 0), (0, 1), *[(0, 0)] * (x.ndim - 3)])  # a row for padding
        out = zeros[numpy.minimum(source, size - 1), rest, numpy.where(source == size, x.shape[2], at)]
        return numpy.moveaxis(numpy.moveaxis(out, 1, 0), 2, axis + 2)

    def _ppermute(self, x, size, perm):
        sources = {destination: source for source, destination in perm}
        nothing = numpy.zeros_like(x[0])
        return numpy.stack([x[sources[rank]] if rank in sources else nothing for rank in range(size)])

    _ppermute_start = _ppermute

    def _ppermute_wait(self, x, size, perm):
        return x

    def _pscan(self, x, size, reverse, exclusive):
        step = slice(None, None, -1 if reverse else None)
        blocks = x[step][:-1] if exclusive else x[step]
        sums = blocks.cumsum(0, dtype=accumulator_dtype(x.dtype)).astype(x.dtype)
        return (numpy.concatenate([numpy.zeros_like(x[:1]), sums]) if exclusive else sums)[step]

    def _broadcast(self, x, size, root):
        return x[root]

    _broadcast_varying = _broadcast

    def _at_root(self, x, size, root):
        nothing = numpy.zeros_like(x)
        return numpy.stack([x if rank == root else nothing for rank in range(size)])

    def _reduce(self, x, size, root):
        return self._at_root(_add(x), size, root)

    def _gather(self, x, size, root, axis, tiled):
        return self._at_root(unsplit_dimension(x, axis + 1, tiled), size, root)

    def _scatter(self, x, size, root, axis, tiled):
        return split_dimension(x[root], size, axis + 1, tiled)

    # ------------------------------------------------ in and out

    def place(self, x: numpy.ndarray, dims: Dims) -> tuple[numpy.ndarray, Axes]:
        x = x if isinstance(x, Tracer) else numpy.asarray(x)
        varying, split, order, stacked = self.cached_plan(_plan_placing, x.shape, tuple(dims))
        return (x.reshape(split).transpose(order).reshape(stacked) if varying else x), varying

    def reshard_data(self, x: numpy.ndarray, varying: Axes, wanted: Axes) -> numpy.ndarray:
        extra = tuple(a for a in varying if a not in wanted)
        if extra:
            x, varying = self._split(x, varying, extra)
            x = x[0] if varying else x[0, 0]
        return self.expand(x, varying, wanted)

    def gather(self, all_gather, x: numpy.ndarray, varying: Axes) -> numpy.ndarray:
        return x

    def is_local(self, varying: Axes) -> bool:
        return True

    def local(self, x: numpy.ndarray, varying: Axes) -> list[numpy.ndarray]:
        every = read_only_view(self.expand(x, varying, tuple(self.sizes)))
        return list(every) if self.sizes else [every]

    def show(self, x: numpy.ndarray, varying: Axes) -> str:
        return "\n".join(show_block(self.sizes, rank, block) for rank, block in enumerate(self.local(x, varying)))


def _add(x: numpy.ndarray) -> numpy.ndarray:
    """Sum along the first axis; the result has x's dtype (NumPy would promote small integers)."""
    dtype = accumulator_dtype(x.dtype)
    # NumPy starts sums from 0.0, which would turn a sum of -0.0 into 0.0.
    start = {} if dtype.kind not in "fc" or isinstance(x, Tracer) else {"initial": -dtype.type(0)}
    return x.sum(0, dtype=dtype, **start).astype(x.dtype, copy=False)


# ---------------------------------------------------------------- arrays and their blocks


def _plan_placing(ranks: Simulated, shape: tuple[int, ...], dims: Dims) -> tuple[Axes, Sequence, Sequence, Sequence]:
    """Plan `place`: the axes that blocks vary along, the shape that has them, the order of its dimensions, the last."""
    varying = ranks.sort_axes([a for axes in dims for a in axes])
    split: list[int] = []
    places, block = {}, []
    for axes, n in zip(dims, shape):
        for a in axes:
            places[a] = len(split)
            split.append(ranks.sizes[a])
        block.append(len(split))
        split.append(n // ranks.size(axes))
    order = [*[places[a] for a in varying], *block]
    return varying, split, order, (ranks.size(varying), *[split[b] for b in block])


def join_blocks(x: numpy.ndarray, dims: Dims, sizes: dict[str, int]) -> numpy.ndarray:
    """Assemble an array from stacked blocks: the inverse of `Simulated.place`."""
    named = [a for axes in dims for a in axes]
    varying = tuple(a for a in sizes if a in named)
    if not varying:
        return x
    block = x.shape[1:]
    x = x.reshape(*[sizes[a] for a in varying], *block)
    order = [i for d, axes in enumerate(dims) for i in (*[varying.index(a) for a in axes], len(varying) + d)]
    shape = [n * math.prod(sizes[a] for a in axes) for axes, n in zip(dims, block)]
    return x.transpose(order).reshape(shape)
