"""Split a tape in two: the equations that some results need, and the further ones that the others need.

So a backward pass becomes two: one for the cotangents that others wait for, one for the gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidiff.control_flow.dead_code import needed_equations
from minidiff.control_flow.loops import Scan
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var
from minidiff.values.lists import select, split_list


def split_tape(tape: Tape, first: Sequence[bool]) -> tuple[Tape, Tape]:
    """Return two tapes: one that computes the results marked `first`, and one that computes the rest.

    The first tape has further results, which the second one takes as its last inputs; it computes numbers
    again. A loop over elements becomes two loops. Any other operation with a body is on both tapes if
    both need its results.

    >>> import numpy as np
    >>> from minidiff import make_tape
    >>> tape = make_tape(lambda x: (np.cos(y := np.sin(x)), np.exp(y)))(np.ones(3))
    >>> for part in split_tape(tape, [True, False]):
    ...     print(part)
    lambda a:f64[3]:
      b:f64[3] = sin(a)
      c:f64[3] = cos(b)
      return (c, b)
    lambda a:f64[3], b:f64[3]:
      c:f64[3] = exp(b)
      return c
    """
    wanted, others = select(tape.outputs, first), select(tape.outputs, [not flag for flag in first])
    early: list[Equation] = []
    late: list[Equation] = []
    needed = {a for a in wanted if isinstance(a, Var)}
    for eqn in reversed(tape.equations):
        used = [v in needed for v in eqn.outputs]
        if not any(used):
            late.append(eqn)
            continue
        if isinstance(eqn.primitive, Scan) and not all(used):
            parts = _split_scan(eqn, used)
            early.append(parts[0])
            late += parts[1:]
        elif eqn.primitive.is_higher_order and not all(used):
            early.append(eqn.primitive.without_unused_results(eqn, used))
            late.append(eqn)
        else:
            early.append(eqn)
            late += [eqn] if _is_number(eqn) else []
        needed.update(a for a in early[-1].inputs if isinstance(a, Var))
    computed = {v: None for eqn in reversed(early) for v in eqn.outputs if not _is_number(eqn)}
    equations, names = needed_equations(late[::-1], others, computed)
    crossing = [v for v in computed if v in names]
    return Tape(tape.inputs, early[::-1], [*wanted, *crossing]), Tape([*tape.inputs, *crossing], equations, others)


def _is_number(eqn: Equation) -> bool:
    """Return whether an equation computes only numbers, without a body or communication."""
    return not (eqn.bodies or eqn.primitive.sends(eqn.params)) and all(v.type.shape == () for v in eqn.outputs)


def _split_scan(eqn: Equation, used: Sequence[bool]) -> list[Equation]:
    """Split a loop in one for the results that are used and one for the others; keep the loop if it cannot be split."""
    body, length, consts, count = (eqn.params[name] for name in ("body", "length", "consts", "carry"))
    first, before = list(used), None
    while first != before:  # a carry that the first loop reads is one of its own
        before = list(first)
        outputs = select(body.outputs, first)
        names = needed_equations(body.equations, outputs)[1].union(a for a in outputs if isinstance(a, Var))
        first[:count] = [flag or v in names for flag, v in zip(first, body.inputs[consts : consts + count])]
    if all(first):
        return [eqn]
    one, other = split_tape(body, first)
    shared, carries, elements = split_list(body.inputs, consts, count)
    used_later = {a for e in other.equations for a in e.inputs if isinstance(a, Var)}.union(
        a for a in other.outputs if isinstance(a, Var)
    )
    carried, carried_later = select(carries, first[:count]), select(carries, [not flag for flag in first[:count]])
    passed = [*other.inputs[len(body.inputs) :], *(v for v in carried if v in used_later)]
    stacks = [Var(v.type.update(shape=(length, *v.type.shape))) for v in passed]
    shared_inputs, start, arrays = split_list(eqn.inputs, consts, count)
    flags = [not flag for flag in first]
    bodies = (
        Tape([*shared, *carried, *elements], one.equations, [*select(body.outputs, first), *passed]),
        Tape([*shared, *carried_later, *elements, *passed], other.equations, other.outputs),
    )
    inputs = (
        [*shared_inputs, *select(start, first[:count]), *arrays],
        [*shared_inputs, *select(start, flags[:count]), *arrays, *stacks],
    )
    outputs_of = [*select(eqn.outputs, first), *stacks], select(eqn.outputs, flags)
    return [
        Equation(eqn.primitive, xs, {**eqn.params, "body": b, "carry": len(c)}, outs, eqn.source)
        for xs, b, c, outs in zip(inputs, bodies, (carried, carried_later), outputs_of)
    ]
