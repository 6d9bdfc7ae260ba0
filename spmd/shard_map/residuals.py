"""The residuals of a linearized `shard_map` body: what its linear tape needs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from minidiff.core.reverse import Linearize
from minidiff.core.tape import Equation, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import Var, typeof
from minidiff.ops.base import reshape_p
from minidiff.ops.shape import reshape
from minidiff.values.dtypes import is_scalar_constant
from minidiff.values.lists import select
from spmd.mesh.specs import WHOLE, PartitionSpec

Specs = tuple[PartitionSpec, ...]


@functools.lru_cache(maxsize=4096)
def _spec_of_stacked(varying: tuple[str, ...], *others: frozenset[str]) -> PartitionSpec:
    """Return the spec of blocks that are concatenated along varying axes, unreduced and reduced along others."""
    return PartitionSpec.of_dims([varying], *others)


class LinearBody:
    """A body linearized: its known results, and the tape of its linear results.

    It has run under `inside`. Known values that the tape uses are its residuals. A residual that is an input of the
    body (`arguments` maps its block's id to the argument and its spec), or was closed over, is passed in again from
    outside; a view of one is recomputed on the tape; only the others become extra results.
    """

    def __init__(self, inside: Linearize, outs: list, specs: Specs, arguments: dict[int, tuple[Value, PartitionSpec]]):
        self.linear = [inside.owns(x) for x in outs]  # which results are linear
        known = [not is_linear for is_linear in self.linear]
        self.linear_specs = tuple(select(specs, self.linear))
        self.captured = inside.captured
        self._scope = inside.scope
        closed_over = {id(x): (outside, WHOLE) for outside, x in inside.below.lifted.values()}
        self._outside = {**closed_over, **arguments}  # id of a value -> the value outside that it was, and its spec
        self._inputs: list[tuple[Var, Value | None, PartitionSpec]] = []  # and operands; None: the next extra result
        self._views: list[Equation] = []
        self._extra_results: list[Value] = []
        tape, constants = inside.tape(select(outs, self.linear)).close()
        self._names = {id(c): var for var, c in zip(tape.inputs, constants)}
        self._defined: set[Var] = set()
        for c in constants:
            self._define(c)
        inputs = [*[var for var, _, _ in self._inputs], *tape.inputs[len(constants) :]]
        self.tape = Tape(inputs, [*self._views, *tape.equations], tape.outputs)
        self.results = [*select(outs, known), *self._extra_results]
        self.result_specs = (*select(specs, known), *[spec for _, x, spec in self._inputs if x is None])

    def _define(self, x: Value) -> Var:
        """Define a residual on the linear tape, as an input or the result of a view; return its variable."""
        var = self._names.setdefault(id(x), Var(typeof(x)))
        if var in self._defined:
            return var
        self._defined.add(var)
        view = self._scope.views.get(id(x))
        if id(x) in self._outside or not isinstance(x, Tracer):
            self._inputs.append((var, *self._outside.get(id(x), (x, WHOLE))))
        elif view is not None:
            several, primitive, operand, params, _ = view
            name = operand if is_scalar_constant(operand) else self._define(operand)
            results = [self._names.setdefault(id(v), Var(typeof(v))) for v in several or [x]]
            self._views.append(Equation(primitive, [name], params, results))
            self._defined.update(results)
        else:
            self._return_block(var, x)
        return var

    def _return_block(self, var: Var, x: Value) -> None:
        """Make a residual a result of the body, whose blocks are concatenated along the first dimension."""
        if not typeof(x).ndim:
            block = Var(typeof(x).update(shape=(1,)))
            self._views.append(Equation(reshape_p, [block], {"shape": ()}, [var]))
            x, var = reshape(x, (1,)), block
        self._extra_results.append(x)
        states = typeof(x).states
        varying = tuple(a for a in self._scope.axes if not self._scope.typed or a in states.varying)
        self._inputs.append((var, None, _spec_of_stacked(varying, states.unreduced, states.reduced)))

    def residuals(self, extra_results: Sequence[Value]) -> tuple[list[Value], Specs]:
        """The operands to pass for the residuals of the linear tape, and their specs."""
        extra = iter(extra_results)
        return [next(extra) if x is None else x for _, x, _ in self._inputs], tuple(spec for *_, spec in self._inputs)
