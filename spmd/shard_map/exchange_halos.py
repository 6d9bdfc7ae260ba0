"""Gathered arrays of which each rank needs a part: it gets the edges that its block lacks.

A slice that the mesh does not divide, such as `x[1:]`, gathers its operand. If each rank then keeps its block of what
depends on it, or all need a sum over it, a rank computes its part alone: of the operands it needs parts, and of the
gathered array its block with a halo.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from collectives import pscatter, psum
from collectives.ops import all_gather_invariant_p, pscatter_p
from minidiff.compiler.simplify import Inline, Program
from minidiff.control_flow.dead_code import prune_tape
from minidiff.core.interpreter import transforming
from minidiff.core.ranks import Scope
from minidiff.core.states import INVARIANT
from minidiff.core.tape import Atom, Equation, Tape, evaluate_equation, read
from minidiff.core.tracer import Value
from minidiff.core.types import Var, typeof
from minidiff.errors.location import replays
from minidiff.ops.elementwise import multiply, where
from minidiff.ops.indexing import slice_along, slice_p, unslice_p
from minidiff.ops.reduction import mean_p
from minidiff.values.dtypes import accumulator_dtype
from spmd.halo import HaloDimension
from spmd.sharding.block_operations import MUST_KNOW_BLOCK


def exchange_halos(tape: Tape, scope: Scope | None, _: Mapping[str, Any]) -> Tape:
    """Exchange halos instead of gathering arrays, where ranks need only parts of what depends on these."""
    gathers = [e for e in tape.equations if e.primitive is all_gather_invariant_p and e.params["tiled"]]
    if scope is None or not scope.typed or scope.explicit or not gathers:
        return tape
    best = Program(tape, {}).simplify()  # which gathers an array once
    for gather in {(e.params["axes"], e.inputs[0].type.shape[e.params["axis"]]): e for e in gathers}.values():
        in_parts, stage = BodyInParts(best, gather), Inline(None, name="optimize")
        if in_parts.roots:
            stage.scope, scope.bottom = scope, stage
            with transforming(stage):
                new = prune_tape(stage.tape(in_parts.run([stage.new_input(v.type) for v in best.inputs])))
            best = tape = min(best, new, key=_bytes_sent)
    return tape


def _bytes_sent(body: Tape) -> int:
    return sum(typeof(a).nbytes for e in body.equations if e.primitive.sends(e.params) for a in e.inputs)


Dimensions = dict[int, tuple[int, int]]  # by position of an operand: its dimension, and where the result begins there


def _operand_dimensions(eqn: Equation) -> tuple[dict[int, Dimensions], list[Dimensions]]:
    """Return the operands' dimensions to which each of the result's corresponds, and those that are summed over."""
    primitive, params, outs = eqn.primitive, eqn.params, [v.type for v in eqn.outputs]
    types = list(map(typeof, eqn.inputs))
    if primitive in (slice_p, unslice_p) and all(type(i) is slice for i in params["index"]):
        sign, shape = (1, types[0].shape) if primitive is slice_p else (-1, outs[0].shape)
        places = [range(n)[i] for n, i in zip(shape, (*params["index"], *[slice(None)] * len(shape)))]
        return {d: {0: (d, sign * x.start)} for d, x in enumerate(places) if x.step == 1}, []
    if not primitive.sharding or len(outs) != 1 or primitive in MUST_KNOW_BLOCK:
        return {}, []
    (out,), rule, by_label = outs, primitive.sharding(types, outs, params), defaultdict[Any, Dimensions](dict)
    for k, labels in enumerate(() if rule.params else rule.operands):
        by_label.update({x: {**by_label[x], k: (d, 0)} for d, x in enumerate(labels) if x is not None})
    results = {d: by_label.pop(x) for d, x in enumerate(rule.results[0]) if x in by_label}
    is_alike = lambda d, dims: all(types[k].shape[e] == out.shape[d] for k, (e, _) in dims.items())  # noqa: E731
    is_sum = rule.combine in ("sum", "mean") and accumulator_dtype(out.dtype) == out.dtype
    return {d: dims for d, dims in results.items() if is_alike(d, dims)}, [*by_label.values()] if is_sum else []


class NotInPartsError(Exception):
    """A part of a value cannot be computed from parts."""


class BodyInParts:
    """A body in which ranks compute their parts of values, of those that depend on what is gathered as by `gather`.

    A part of a dimension has as many places as a block has, from `start` on, counted from the first one of the block.
    `roots` are equations that take a block of such a value, or sum over it.
    """

    def __init__(self, body: Tape, gather: Equation):
        self.body, self.axes, self.size = body, gather.params["axes"], gather.params["size"]
        self.block = gather.inputs[0].type.shape[gather.params["axis"]]
        self.definitions = {v: eqn for eqn in body.equations for v in eqn.outputs}
        self.derived, self.roots = set[Var](), set[Equation]()
        for eqn in body.equations:
            is_invariant = all(typeof(a).states.along(x) == INVARIANT for a in eqn.inputs for x in self.axes)
            is_derived = is_invariant and any(isinstance(a, Var) and a in self.derived for a in eqn.inputs)
            if is_derived and (self._is(pscatter_p, eqn) or _operand_dimensions(eqn)[1]):
                self.roots.add(eqn)
            if is_derived or self._is(all_gather_invariant_p, eqn):
                self.derived.update(eqn.outputs)

    def _is(self, primitive: Any, eqn: Equation) -> bool:
        """Whether an equation is this collective, of such blocks."""
        params = eqn.params if eqn.primitive is primitive else {}
        is_over = params.get("axes") == self.axes and params["tiled"]
        return is_over and self.block == min(typeof(a).shape[params["axis"]] for a in (*eqn.inputs, *eqn.outputs))

    def run(self, blocks: Sequence[Value]) -> list[Value]:
        self.values: dict[Any, Value] = dict(zip(self.body.inputs, blocks))  # of variables, and of their parts
        for eqn in self.body.equations:
            self._run_equation(eqn)
        return [read(self.values, a) for a in self.body.outputs]

    @replays
    def _run_equation(self, equation: Equation) -> None:
        if equation in self.roots:
            with contextlib.suppress(NotInPartsError):
                self.values[equation.outputs[0]] = self._run_root(equation)
                self.derived.discard(equation.outputs[0])  # it is whole
                return
        evaluate_equation(equation, self.values)

    def _run_root(self, eqn: Equation) -> Value:
        if eqn.primitive is pscatter_p:
            return self._part(eqn.inputs[0], eqn.params["axis"], 0)
        for dims in _operand_dimensions(eqn)[1]:
            n = max(typeof(eqn.inputs[k]).shape[d] for k, (d, _) in dims.items())
            with contextlib.suppress(NotInPartsError):
                if (spare := self.size * self.block - n) >= 0:
                    total = psum(self._bind(eqn, dims, -(spare // 2), 0, {}), self.axes)
                    return multiply(total, self.block / n) if eqn.primitive is mean_p else total
        raise NotInPartsError

    def _bind(self, eqn: Equation, dims: Dimensions, start: int, outside: int | None, changed: dict) -> Value:
        """Apply an operation, with changed parameters, to the parts of operands that have a dimension."""
        if self.derived.isdisjoint([a for k, a in enumerate(eqn.inputs) if k in dims and isinstance(a, Var)]):
            raise NotInPartsError
        values = [
            self._part(a, dims[k][0], start + dims[k][1], outside) if k in dims else read(self.values, a)
            for k, a in enumerate(eqn.inputs)
        ]
        return eqn.primitive.bind(*values, **{**eqn.params, **changed})

    def _part(self, a: Atom, d: int, start: int, outside: int | None = None) -> Value:
        """Return a part of a value; if `outside` is given, with this number outside of the value."""
        t = typeof(a)
        if not (isinstance(a, Var) and a in self.derived):
            x = self._cut(read(self.values, a), d, start)
        elif (x := self.values.get((a, d, start))) is None:
            x = self.values[a, d, start] = self._compute(self.definitions[a], d, start)
        if outside is None or 0 <= start <= t.shape[d] - self.size * self.block:
            return x
        is_inside = self._cut(numpy.ones((t.shape[d], *[1] * (t.ndim - d - 1)), bool), 0, start)
        return where(is_inside, x, numpy.array(outside, t.dtype)[()])

    def _cut(self, x: Value, d: int, start: int) -> Value:
        """Return a part of what every rank has; there are zeros outside."""
        before, length = max(0, -start), self.size * self.block
        after = max(0, start + length - typeof(x).shape[d])
        x = numpy.pad(x, [(before, after) if e == d else (0, 0) for e in range(typeof(x).ndim)])
        return pscatter(slice_along(x, d, start + before, start + before + length), self.axes, axis=d, tiled=True)

    @replays
    def _compute(self, equation: Equation, d: int, start: int) -> Value:
        """Compute a part of the result of an equation."""
        primitive, operands, changed = equation.primitive, equation.inputs, dict[str, tuple]()
        if self._is(all_gather_invariant_p, equation) and equation.params["axis"] == d:
            return HaloDimension(d, self.axes, "zeros").part(self.values[operands[0]], start, self.block)
        dims = _operand_dimensions(equation)[0].get(d, {})
        for name, entry in (("index", slice(None)), ("shape", self.block)):
            if name in equation.params:
                changed[name] = (*equation.params[name][:d], entry, *equation.params[name][d + 1 :])
        if dims and "index" in changed and all(i == slice(None) for i in changed["index"]):
            return self._part(operands[0], d, start + dims[0][1], 0 if primitive is unslice_p else None)
        is_linear = lambda *positions: primitive.is_linear_in({*positions}, len(operands))  # noqa: E731
        outside = 0 if primitive is unslice_p else None if is_linear(*dims) or all(map(is_linear, dims)) else 1
        return self._bind(equation, dims, start, outside, changed)
