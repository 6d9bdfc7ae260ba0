"""Move psums past linear operations, to where several of them become one.

An invariant value that is used several times has a cotangent with several psums, one per use. They cannot
be fused directly, because other operations (products, reshapes) come between each psum and the addition. But a psum
commutes with linear operations:

    f(psum(x))          = psum(f(x))                if f is linear and local
    psum(x) * c         = psum(x * pbroadcast(c))   if c does not vary along the axes
    psum(x) + psum(y)   = psum(x + y)
    psum(psum(x, i), j) = psum(x, (i, j))
    pscatter(psum(x))   = psum_scatter(x)
    at_root(psum(x))    = reduce(x)

A psum is delayed until another one over the same axes is added to it, or a local slice of it is taken; if neither
happens, it stays where it was. It moves only past values that are used once, and only if the message is short or no
longer than before: so there are never more psums.

The terms are added in another order, so rounding may differ; each sum keeps its dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from collectives.axes import axes_in_scope
from collectives.casts import cast_type
from collectives.collective import Collective
from collectives.ops import pbroadcast_p, pscatter_p, psum_p, psum_scatter_p
from collectives.passes.hoist_pbroadcasts import SHORT_MESSAGE
from collectives.rooted import at_root_p, reduce_p
from minidiff.control_flow.dead_code import prune_tape
from minidiff.core.ranks import Scope
from minidiff.core.tape import Atom, Equation, Tape, with_equations
from minidiff.core.types import Var, operand_type, typeof
from minidiff.errors.location import Location, merge_locations
from minidiff.ops.base import Linear, Multilinear
from minidiff.ops.elementwise import Divide, Sum
from minidiff.values.dtypes import accumulator_dtype, is_differentiable, is_scalar_constant

#: Operations that take a local part of an invariant value, and the collective that each forms with a psum before it.
_FUSED_WITH_PSUM = {pscatter_p: psum_scatter_p, at_root_p: reduce_p}


class Delayed(NamedTuple):
    """A value as a delayed psum of `operand`, in place of psums of `nbytes` in total."""

    operand: Atom
    axes: frozenset[str]
    psums: int
    nbytes: int
    source: Location | None

    @staticmethod
    def psum(equation: Equation) -> Delayed:
        x, (out,) = equation.inputs[0], equation.outputs
        return Delayed(x, frozenset(equation.params["axes"]), 1, out.type.nbytes, equation.source)

    def costs_no_more(self) -> bool:
        """Return whether one psum costs no more than those that it replaces."""
        return typeof(self.operand).nbytes <= max(SHORT_MESSAGE, self.nbytes)


def delay_psums(tape: Tape, scope: Scope | None, settings: Mapping[str, Any]) -> Tape:
    """Move the psums of a typed `shard_map` body to where several become one."""
    if scope is None or not any(eqn.primitive is psum_p for eqn in tape.equations):
        return tape
    return prune_tape(with_equations(tape, _Delaying(tape, scope).equations))


class _Delaying:
    """Builds the equations of a tape with delayed psums.

    An equation that is linear in psums is copied, and the copy applies to the psums' operands. Where psums meet, one
    psum of the copy's result replaces them; dead-code elimination then drops what is unused.
    """

    def __init__(self, tape: Tape, scope: Scope):
        self.scope = scope
        self.equations: list[Equation] = []
        self.delayed: dict[Var, Delayed] = {}
        self.broadcast: dict[tuple, Var] = {}
        self.uses = Counter(a for eqn in tape.equations for a in eqn.inputs if isinstance(a, Var))
        self.uses.update(a for a in tape.outputs if isinstance(a, Var))
        for eqn in tape.equations:
            self.equations.append(self._rewritten(eqn))

    def _rewritten(self, eqn: Equation) -> Equation:
        """Return the equation, or the collective that replaces it if its operands are delayed psums that become one."""
        p, sums = eqn.primitive, [self._find_delayed(a) for a in eqn.inputs]
        before = sums[0] if sums and sums[0] and sums[0].costs_no_more() else None
        if p in _FUSED_WITH_PSUM and before and before.axes == {*eqn.params["axes"]}:
            return Equation(_FUSED_WITH_PSUM[p], [before.operand], eqn.params, eqn.outputs, before.source)
        if p is psum_p and not typeof(eqn.inputs[0]).unreduced:  # those are taken where the user says
            if before:
                both = before._replace(axes=before.axes.union(eqn.params["axes"]))
                eqn = self._psum(both, eqn.outputs[0], merge_locations([before.source, eqn.source]))
            self.delayed[eqn.outputs[0]] = Delayed.psum(eqn)
        elif after := self._after(eqn, sums):
            if after.psums > 1 and after.costs_no_more():
                eqn = self._psum(after, eqn.outputs[0], after.source)
                after = Delayed.psum(eqn)
            self.delayed[eqn.outputs[0]] = after
        return eqn

    def _find_delayed(self, a: Atom) -> Delayed | None:
        """Return an operand as a delayed psum, if it is one that nothing else uses."""
        return self.delayed.get(a) if isinstance(a, Var) and self.uses[a] == 1 else None

    def _psum(self, of: Delayed, out: Var, source: Location | None) -> Equation:
        return Equation(psum_p, [of.operand], axes_in_scope(self.scope, of.axes).params, [out], source)

    def _after(self, eqn: Equation, sums: Sequence[Delayed | None]) -> Delayed | None:
        """Delay the psums past an equation that is linear in them, if it is."""
        delayed = [d for d in sums if d]
        if not delayed or any(d.axes != delayed[0].axes for d in delayed):
            return None
        axes = delayed[0].axes
        linear = _linear_together(eqn, [k for k, d in enumerate(sums) if d])
        if not linear or not all(sums[k] for k in linear):
            return None
        inputs = [d.operand if d else self._broadcast(a, axes) for a, d in zip(eqn.inputs, sums)]
        (type,) = eqn.primitive.typecheck([operand_type(a) for a in inputs], eqn.params)
        if any(typeof(d.operand).dtype != type.dtype for d in delayed):
            return None  # a sum in a smaller dtype might overflow
        if accumulator_dtype(type.dtype) != type.dtype and not eqn.primitive.is_view:
            return None  # each rank would round its own 16-bit term, where the psum rounds the sum
        out = Var(type)
        self.equations.append(Equation(eqn.primitive, inputs, eqn.params, [out], eqn.source))
        psums, nbytes = sum(d.psums for d in delayed), sum(d.nbytes for d in delayed)
        return Delayed(out, axes, psums, nbytes, merge_locations([d.source for d in delayed]))

    def _broadcast(self, a: Atom, axes: frozenset[str]) -> Atom:
        """Insert a pbroadcast of an invariant operand, once per value."""
        if is_scalar_constant(a):
            return a
        key = a if isinstance(a, Var) else id(a), axes
        if key not in self.broadcast:
            self.broadcast[key] = Var(cast_type(typeof(a), pbroadcast_p, axes))
            params = axes_in_scope(self.scope, axes).params
            self.equations.append(Equation(pbroadcast_p, [a], params, [self.broadcast[key]]))
        return self.broadcast[key]


def _linear_together(eqn: Equation, wanted: Sequence[int]) -> Collection[int]:
    """Return the operands an equation is jointly linear in, if they include `wanted`."""
    p: Any = eqn.primitive
    linear: Collection[int] = ()
    if p.multiple_results or isinstance(p, Collective) or not is_differentiable(eqn.outputs[0].type.dtype):
        return ()
    if isinstance(p, Sum):
        linear = (0, 1)
    elif isinstance(p, Divide):
        linear = (0,)
    elif isinstance(p, Multilinear):
        linear = wanted if len(wanted) == 1 and p.transpose_rules[wanted[0]] is not None else ()
    elif isinstance(p, Linear):
        linear = range(len(eqn.inputs) if p.linear_operands is None else p.linear_operands)
    return linear if set(wanted).issubset(linear) else ()
