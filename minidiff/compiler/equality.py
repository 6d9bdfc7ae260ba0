"""Equality of tapes: simplify both, and compare them by value numbering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy

from minidiff.compiler.simplify import apply_rules, key_part
from minidiff.control_flow.bodies import Call
from minidiff.control_flow.checkpoint import recompute_p
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.tracer import Tracer
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.ops.elementwise import Sum


def same(one: Tape, two: object) -> bool:
    """Return True if two tapes are the same program, up to names.

    Both are simplified first (`minidiff.compiler.simplify.apply_rules`). Then they are equal if they compute the
    same results from the same inputs by the same operations. The order of independent equations does not matter,
    nor the order of the terms of a sum, of the factors of a product or of the operands of a `shard_map`, nor how
    often a value is computed. A `checkpoint`, or a function with a custom rule, equals its body inlined.
    """
    if not isinstance(two, Tape):
        return NotImplemented
    numbers = _ValueNumbers()
    return numbers.program(apply_rules(one)) == numbers.program(apply_rules(two))


class _ValueNumbers:
    """Value numbers: equal for the same operation on equal operands."""

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}
        self.effects: list[int] = []  # the numbers of the calls with an effect, in order
        self.terms: dict[int, Counter] = {}  # a sum's number -> the count of each of its terms (sign, number)

    def number(self, *key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))

    def program(self, tape: Tape) -> tuple:
        inputs = [self.number("input", i, t) for i, t in enumerate(tape.in_types)]
        before, self.effects = self.effects, []
        results, effects = self.results(tape, inputs), self.effects
        self.effects = before
        return tuple(tape.in_types), tuple(tape.out_types), tuple(results), tuple(effects)

    def results(self, tape: Tape, inputs: Sequence[int]) -> list[int]:
        """Compute the numbers of a tape's results from those of its inputs."""
        env = dict(zip(tape.inputs, inputs))
        for eqn in tape.equations:
            env.update(zip(eqn.outputs, self.outputs(eqn, [self.atom(a, env) for a in eqn.inputs])))
        return [self.atom(a, env) for a in tape.outputs]

    def atom(self, a: Atom, env: dict[Var, int]) -> int:
        if isinstance(a, Var):
            return env[a]
        if isinstance(a, Tracer):
            return self.number("traced", id(a))
        return self.number("constant", typeof(a), None if isinstance(a, ShapedArray) else numpy.asarray(a).tobytes())

    def outputs(self, eqn: Equation, operands: list[int]) -> list[int]:
        """Compute the numbers of an equation's results from those of its operands."""
        p, params = eqn.primitive, eqn.params
        if isinstance(p, Call) and isinstance(params["body"], Tape):
            return self.results(params["body"], operands)
        if p is recompute_p:
            return operands
        if isinstance(p, Sum):
            return [self.sum(eqn, operands, p.signs)]
        if p.per_operand is not None:  # a variadic operation: number each value as if by a call of its own
            calls = [Equation(p.per_operand, (), params, [v]) for v in eqn.outputs]
            return [self.outputs(call, [n])[0] for call, n in zip(calls, operands)]
        if p.commutes is not None:
            operands, params = _sort_operands(p, operands, params)
        shown = [(k, self.program(v) if isinstance(v, Tape) else key_part(v)) for k, v in sorted(params.items())]
        call = self.number(p, *shown, *operands)
        if p.has_effect:
            self.effects.append(call)
        return [self.number("result", k, call, v.type) for k, v in enumerate(eqn.outputs)]

    def sum(self, eqn: Equation, operands: list[int], signs: Sequence[int]) -> int:
        """Return the number of a sum, with nested sums flattened and terms in any order."""
        terms: Counter = Counter()
        for a, n, sign in zip(eqn.inputs, operands, signs):
            whole = n not in self.terms or typeof(a) != eqn.outputs[0].type  # not a sum, or broadcast or converted
            for (s, m), count in ({(1, n): 1} if whole else self.terms[n]).items():
                terms[sign * s, m] += count
        number = self.number("sum", eqn.outputs[0].type, frozenset(terms.items()))
        self.terms[number] = terms
        return number


def _sort_operands(primitive: Primitive, operands: list[int], params: dict) -> tuple[list[int], dict]:
    """Sort operands by their numbers, and reorder the parameters to match."""
    order = sorted(range(len(operands)), key=lambda i: operands[i])
    changes: dict[str, Any] = {k: tuple([params[k][i] for i in order]) for k in primitive.commutes or ()}
    for k, v in params.items():
        if isinstance(v, Tape):
            changes[k] = Tape([v.inputs[i] for i in order], v.equations, v.outputs)
    return [operands[i] for i in order], {**params, **changes}
