"""The layout of a tape's memory: aliases, strides, liveness, and the bytes that each operation allocates."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy
from numpy.lib.stride_tricks import as_strided

from collectives.exact import TEMPORARY, Exact, wire_bytes
from collectives.lowering import Lowered, Start
from minidiff.api.recording import make_tape
from minidiff.compiler.buffers import fused_p
from minidiff.compiler.kernels import is_one_loop
from minidiff.control_flow.bodies import BodyOperation
from minidiff.control_flow.partial_eval import CARRY, CONST, SCANNED
from minidiff.control_flow.scheduled_loop import to_disk_p
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import ShapedArray, Var, operand_type
from minidiff.ops.base import Promoting, broadcast_to_p, reshape_p
from minidiff.ops.dimensions import gather
from minidiff.ops.einsum import einsum_p, matrix_axes
from minidiff.ops.indexing import slice_p
from minidiff.ops.rearranging import windows_p
from minidiff.ops.shape import concatenate_p, split_p, stack_p, transpose_p
from minidiff.values.aliasing import watch_lifetimes
from minidiff.values.lists import positions
from spmd.prices.work import workspace

#: Operations whose results are views, if their operand's strides allow it.
_STRIDED = (reshape_p, transpose_p, broadcast_to_p, split_p, slice_p, windows_p)


class Filled(Primitive):
    """An array of one number, which the library makes. Parameters: its `shape` and `dtype`."""

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        return [ShapedArray(**params)]


filled_p = Filled("filled", sharding=gather)


class MemoryLayout:
    """The memory of a tape's values: `bases` has the values whose memory each one uses: itself, or those it views.

    Arrays of one element, with the strides of the program's arrays, tell which reshapes copy. A collective of simulated
    ranks is a tape of operations on their data, whose layout is in `inner`.
    """

    def __init__(self, tape: Tape, strided: dict[Var, Any], takes: Mapping[Var, Var] = MappingProxyType({})):
        self.tape = tape
        self.strided = strided  # of its inputs, too
        self.takes = takes  # by result: the operand whose buffer it reuses
        self.copying: set[Equation] = set()
        self.inner: dict[Equation, MemoryLayout] = {}
        self.allocations: dict[Equation, set[Var]] = {}  # of simulated collectives
        self.started: dict[Var, list[tuple[set[Var], Any]]] = {}
        self.exchanged: dict[Equation, list[tuple[Var, Any]]] = {}  # carries whose next value was another one: operands
        self.bases: dict[Var, set[Var]] = {v: {v} for v in tape.inputs}
        for eqn in tape.equations:
            if isinstance(eqn.primitive, Lowered) and eqn.params["ranks"].name == "simulated":
                self.trace_inside(eqn)
                continue
            self.trace_strides(eqn)
            operands = [a for a in eqn.inputs if isinstance(a, Var)]
            if operands and operands[0] in self.started:
                self.name_results(eqn.outputs, self.started[operands[0]])
                continue
            if isinstance(eqn.primitive, BodyOperation):
                self.trace_bodies(eqn)
                continue
            if eqn.primitive is to_disk_p:
                self.bases[eqn.outputs[0]] = set()
                continue
            views = self.is_view(eqn) and set().union(*[self.bases[a] for a in operands])
            self.bases.update((v, views or {v}) for v in eqn.outputs)

    def trace_inside(self, eqn: Equation) -> None:
        """Find the memory of a simulated collective's results from its operations."""
        tape = simulated_tape(eqn)
        inner = self.inner[eqn] = MemoryLayout(tape, {v: self.array(a) for v, a in zip(tape.inputs, eqn.inputs)})
        outer = {v: self.bases[a] if isinstance(a, Var) else set() for v, a in zip(tape.inputs, eqn.inputs)}
        new: dict[Var, Var] = {}
        results = []
        for a in (a for a in tape.outputs if isinstance(a, Var)):
            parts = [outer[b] if b in outer else {new.setdefault(b, Var(b.type))} for b in inner.bases[a]]
            results.append((set().union(*parts), inner.array(a)))
        self.allocations[eqn] = {*new.values()}
        if isinstance(eqn.primitive, Start):
            (out,) = eqn.outputs
            self.started[out], self.bases[out] = results, set().union(*[bases for bases, _ in results])
        else:
            self.name_results(eqn.outputs, results)

    def trace_bodies(self, eqn: Equation) -> None:
        """Find the results of branches and of loops that are operands, and take no memory of their own."""
        primitive: Any = eqn.primitive
        operands, groups = eqn.inputs[primitive.count_leading(eqn.params) :], primitive.groups(eqn.params)[0]
        layouts = [MemoryLayout(body, {}) for body in primitive.branches(eqn.params)]
        carried, constants = positions(g == CARRY for g in groups), set(positions(g == CONST for g in groups))
        for r, (v, group) in enumerate(zip(eqn.outputs, primitive.groups(eqn.params)[1])):
            reached: set[int | None] = {carried[r]} if group == CARRY else set()
            allowed = constants | reached
            for layout in layouts:
                numbers, a = {w: i for i, w in enumerate(layout.tape.inputs)}, layout.tape.outputs[r]
                reached |= {numbers.get(b) for b in layout.bases[a]} if isinstance(a, Var) else set()
            values = [operands[i] for i in reached if i is not None]
            memory = set().union(*[self.bases[a] for a in values if isinstance(a, Var)])
            self.bases[v] = memory if memory and reached <= allowed and group != SCANNED else {v}
            if group == CARRY and not (reached <= allowed or None in reached):
                self.exchanged.setdefault(eqn, []).append((v, operands[carried[r]]))

    def name_results(self, outputs: Sequence[Var], results: Sequence[tuple[set[Var], Any]]) -> None:
        for v, (bases, array) in zip(outputs, results):
            self.bases[v], self.strided[v] = bases, array

    def trace_strides(self, eqn: Equation) -> None:
        """Note the strides of results whose elements are not in their order, and which reshapes copy."""
        primitive, operands = eqn.primitive, [a for a in eqn.inputs if isinstance(a, Var)]
        if not (operands and eqn.outputs):
            return
        a, out = operands[0], eqn.outputs[0]
        if out in self.takes:
            self.strided[out] = self.array(self.takes[out])
        elif primitive in _STRIDED and a is eqn.inputs[0]:
            x = self.array(a)
            outs = _reshaped(x, **eqn.params) if primitive is reshape_p else primitive.impl(x, **eqn.params)
            if outs is None:
                self.copying.add(eqn)
            else:
                self.strided.update(zip(eqn.outputs, outs if primitive.multiple_results else [outs]))
        elif primitive is einsum_p:
            batch_and_rows = matrix_axes(eqn.params["subscripts"])[-1]
            self.strided[out] = _array(out.type, sorted(range(out.type.ndim), key=batch_and_rows.__getitem__))
        elif isinstance(primitive, Promoting) or (primitive is fused_p and is_one_loop(eqn.params)):
            for v in eqn.outputs:
                self.keep_order(v, operands)
        elif primitive is concatenate_p:
            self.keep_order(out, operands)
        elif primitive is stack_p:
            self.keep_order(out, operands, eqn.params["axis"])
        elif len(eqn.outputs) == 1 and self.is_view(eqn) and a in self.strided and a.type.shape == out.type.shape:
            self.strided[out] = self.strided[a]

    def keep_order(self, out: Var, operands: Sequence[Var], new_axis: int | None = None) -> None:
        """Note a result's strides: NumPy keeps the order of the operands' axes, and takes C's where they disagree."""
        if self.strided.keys().isdisjoint(operands):
            return
        arrays = [self.array(x) for x in operands]
        arrays = [numpy.expand_dims(x, new_axis or tuple(range(out.type.ndim - x.ndim))) for x in arrays]

        def compare(i: int, j: int) -> int:
            if i > j:
                return -compare(j, i)
            known = [(x.strides[i], x.strides[j]) for x in arrays if 1 not in (x.shape[i], x.shape[j])]
            known = [pair for pair in known if 0 not in pair]
            return 1 if known and all(first < second for first, second in known) else -1

        self.strided[out] = _array(out.type, sorted(range(out.type.ndim), key=functools.cmp_to_key(compare)))

    def array(self, a: Any) -> Any:
        """Return an array with the type and strides of a value, which takes no memory: do not read its elements."""
        return self.strided[a] if isinstance(a, Var) and a in self.strided else _array(operand_type(a))

    def is_view(self, eqn: Equation) -> bool:
        """Return whether results are views of operands, as those of a collective are if it has nothing to send."""
        primitive = eqn.primitive
        if primitive.is_higher_order or eqn in self.copying:
            return False
        return (primitive.shares_memory or primitive.on_ranks) and not primitive.sends(eqn.params)

    def allocated(self, eqn: Equation, size: Callable[[Any], int]) -> tuple[dict[Var, int], int]:
        """Return the bytes of each result that is allocated, and those of temporaries while the operation runs."""
        primitive = eqn.primitive
        if eqn in self.inner:
            return {v: size(v) for v in self.allocations[eqn]}, 0
        if self.is_view(eqn) or primitive is to_disk_p:
            return {}, 0
        sizes = {v: size(v) for v in eqn.outputs if v in self.bases[v] or not isinstance(primitive, BodyOperation)}
        if primitive.is_higher_order or primitive is fused_p:
            return sizes, 0
        if primitive.sends(eqn.params):
            packed = self.packed(eqn)
            if isinstance(primitive, Start) and primitive.shares_memory:  # MPI reads the message until it is waited for
                return {v: n + packed for v, n in sizes.items()}, 0
            return sizes, packed
        types = [t for t in map(operand_type, eqn.inputs) if isinstance(t, ShapedArray)]
        return sizes, workspace(primitive, types, [v.type for v in eqn.outputs]) + self.copied(eqn)

    def packed(self, eqn: Equation) -> int:
        """Return the bytes that a collective packs: messages of MPI are contiguous, one rank after the other."""
        params, collective = eqn.params.get("params", eqn.params), eqn.params.get("collective", eqn.primitive)
        name, nbytes = eqn.primitive.name, sum(operand_type(a).nbytes for a in eqn.inputs)
        if name.startswith("all_gather"):
            return sum(v.type.nbytes for v in eqn.outputs) if params["tiled"] and params["axis"] else 0
        if name == "psum_scatter":
            return nbytes if params["axis"] else 0
        if isinstance(one := collective.per_operand or collective, Exact):
            return TEMPORARY * sum(wire_bytes(one, operand_type(a), params) for a in eqn.inputs)
        if name == "all_to_all":
            return nbytes * bool(params["split_axis"])
        return sum(operand_type(a).nbytes for a in eqn.inputs if not self.array(a).flags.c_contiguous)

    def copied(self, eqn: Equation) -> int:
        """Return the bytes of operands of a contraction that are copied into matrices."""
        if eqn.primitive is not einsum_p:
            return 0
        subscripts, (a, b) = eqn.params["subscripts"], eqn.inputs
        x_axes, y_axes, batch_ndim, row_ndim, _ = matrix_axes(subscripts)
        inner = len(x_axes) - row_ndim
        if (
            inner == batch_ndim or len(eqn.outputs[0].type.shape) == batch_ndim
        ):  # nothing is summed, or there are no rows
            return 0
        x, y = self.array(a).transpose(x_axes), self.array(b).transpose(y_axes)
        summed = math.prod(y.shape[batch_ndim:inner])
        shapes = (*x.shape[:batch_ndim], -1, summed), (*y.shape[:batch_ndim], summed, -1)
        return sum(z.nbytes for z, shape in zip((x, y), shapes) if z.size and _reshaped(z, shape) is None)


def simulated_tape(eqn: Equation) -> Tape:
    """Return the tape of a lowered collective's operations on the data of simulated ranks."""
    collective: Any = eqn.primitive
    with watch_lifetimes(filled_p):  # zeros are operations too
        return make_tape(collective.simulated(eqn.params))(*map(operand_type, eqn.inputs))


def _array(t: ShapedArray, order: Sequence[int] | None = None) -> Any:
    """Return an array that takes no memory, with its axes in this order: the one with the longest stride first."""
    order = range(t.ndim) if order is None else order
    strides, step = [0] * t.ndim, t.dtype.itemsize
    for axis in reversed(order):
        strides[axis], step = step, step * t.shape[axis]
    return as_strided(numpy.zeros(1, t.dtype), t.shape, strides, writeable=False)


def _reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """Return a view of another shape; None if there is none."""
    try:
        if hasattr(numpy, "unstack"):  # NumPy 2.1
            return numpy.reshape(x, shape, copy=False)
        view = x.view()
        view.shape = shape
        return view
    except (AttributeError, ValueError):
        return None


def values_freed(tape: Tape, ended: Mapping[Var, int], bases: Mapping[Var, Any]) -> Mapping[int, list]:
    """Return the values that are freed after each equation: after their last use, when Python drops references.

    `ended` has the first equation at which a value is not referenced any more, where that is later than its last use.
    """
    last: dict[Var, int] = {}
    for k, eqn in enumerate(tape.equations):
        for v in (*(a for a in eqn.inputs if isinstance(a, Var)), *eqn.outputs):
            end = max(k, ended.get(v, 0) - 1)
            last.update((root, max(end, last.get(root, 0))) for root in (v, *bases.get(v, ())))
    for a in (a for a in tape.outputs if isinstance(a, Var)):
        last.update((v, -1) for v in (a, *bases.get(a, ())))
    freed: dict[int, list] = defaultdict(list)
    for v, k in last.items():
        if v not in tape.inputs:
            freed[min(k, len(tape.equations) - 1)].append(v)
    return freed
