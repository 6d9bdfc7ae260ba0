"""Transposition of any tape that is linear in some of its inputs: compute the rest of it, then walk back."""

from __future__ import annotations

from collections.abc import Sequence

from minidiff.core.reverse import walk_back
from minidiff.core.tape import Equation, Once, Tape, evaluate_equation
from minidiff.core.tracer import Value
from minidiff.core.types import Var


def transpose_values(
    tape: Tape, linear: Sequence[bool], values: Sequence[Value], cts: Sequence[Value | None]
) -> list[Value | None]:
    """Map cotangents of a tape's outputs to those of its `linear` inputs. A zero cotangent is None.

    `values` are the values of all inputs, ignored where linear.
    """
    return walk_back(linear_part(tape, linear, values), cts)


def linear_part(tape: Tape, linear: Sequence[bool], values: Sequence[Value]) -> Tape:
    """Compute what does not depend on linear inputs; the rest is a linear tape.

    The values that the rest needs are constants on it, and all others are freed after their last use.
    """
    linear_vars = {v for v, yes in zip(tape.inputs, linear) if yes}
    env = {v: x for v, x, yes in zip(tape.inputs, values, linear) if not yes}
    known, rest = [], []
    needed: set[Var] = set()
    for eqn in tape.equations:
        if any(isinstance(a, Var) and a in linear_vars for a in eqn.inputs):
            linear_vars.update(eqn.outputs)
            rest.append(eqn)
            needed.update(a for a in eqn.inputs if isinstance(a, Var))
        else:
            known.append(eqn)
    last = {a: i for i, eqn in enumerate(known) for a in (*eqn.inputs, *eqn.outputs) if isinstance(a, Var)}
    for i, eqn in enumerate(known):
        evaluate_equation(eqn, env)
        for a in (*eqn.inputs, *eqn.outputs):
            if isinstance(a, Var) and last[a] == i and a not in needed:
                env.pop(a, None)

    operands = [[env.get(a, a) if isinstance(a, Var) else a for a in e.inputs] for e in rest]
    equations = [Equation(e.primitive, xs, e.params, e.outputs, e.source) for e, xs in zip(rest, operands)]
    inputs = [v for v, yes in zip(tape.inputs, linear) if yes]
    outputs = [a if isinstance(a, Var) and a in linear_vars else None for a in tape.outputs]
    return Tape(inputs, Once(equations), outputs)
