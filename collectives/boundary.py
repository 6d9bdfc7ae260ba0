"""The end of a body's backward pass: the cotangents of inputs that were lifted on the way in, summed together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from collectives.kinds import together
from collectives.ops import pbroadcast_p, psum_p
from collectives.raising import lifts_late, raised
from minidiff import reverse
from minidiff.core import Value, current_scope
from minidiff.location import joined, transposes
from minidiff.optimize import SETTINGS
from minidiff.rematerialise import with_values
from minidiff.reverse import backward_pass, evaluate_constants
from minidiff.tape import Equation, Tape, Var


@transposes
def summed_backward_pass(
    tape: Tape, linear: Sequence[bool], values: Sequence[Value], cts: Sequence[Value | None], consume: bool = False
) -> list[Value | None]:
    """What `backward_pass` gives, with fewer calls: the cotangents of linear inputs.

    Each input that is lifted (`pbroadcast`) has a cotangent that is summed (`psum`), and nothing waits for the sums:
    those over the same axes, of the same dtype, are done in one call when all are there, or in a few where there are
    more than `bucket_bytes` of them.
    """
    inputs = {v for v, yes in zip(tape.inputs, linear) if yes}
    alike: dict[Any, list[Equation]] = defaultdict(list)
    for eqn in tape.equations:
        if eqn.primitive is pbroadcast_p and eqn.inputs[0] in inputs:
            alike[eqn.params["axes"], eqn.inputs[0].type.dtype].append(eqn)
    groups = [lifts[::-1] for lifts in alike.values() if len(lifts) > 1]  # the last one's cotangent is there first
    lifts = [eqn for group in groups for eqn in group]
    if not lifts:
        return backward_pass(tape, linear, values, cts, consume)
    lifted = [eqn.outputs[0] for eqn in lifts]
    rest = Tape([*tape.inputs, *lifted], [eqn for eqn in tape.equations if eqn not in lifts], tape.outputs)
    rest.linear, rest.spread = tape.linear, tape.spread
    more = len(lifts)
    found = backward_pass(rest, [*linear, *[True] * more], [*values, *[None] * more], cts, consume)
    totals = dict(zip([v for v, yes in zip(tape.inputs, linear) if yes], found))
    waiting = {eqn: ct for eqn, ct in zip(lifts, found[-more:]) if ct is not None}
    del found
    for bucket in [bucket for group in groups for bucket in _buckets([eqn for eqn in group if eqn in waiting])]:
        first, cotangents = bucket[0], [waiting.pop(lift) for lift in bucket]
        # on whose behalf all are summed
        eqn = Equation(first.primitive, (), first.params, (), joined([lift.source for lift in bucket]))
        sums = _psums(cotangents, first.params)
        for eqn, total in zip(bucket, sums):
            own = totals[eqn.inputs[0]]
            totals[eqn.inputs[0]] = total if own is None else own + total
    return list(totals.values())


def _backward_pass_in_body(
    tape: Tape, linear: Sequence[bool], values: Sequence[Value], cts: Sequence[Value | None], consume: bool = False
) -> list[Value | None]:
    """As `summed_backward_pass`, of a tape that was recorded in the body that is running: it holds values."""
    scope = current_scope()
    if scope.explicit or not lifts_late(tape, linear):
        return summed_backward_pass(tape, linear, values, cts, consume)
    given = [k for k, ct in enumerate(cts) if ct is not None and isinstance(tape.outputs[k], Var)]
    closed, constants = Tape(tape.inputs, tape.equations, [tape.outputs[k] for k in given]).close()
    if consume:
        tape.equations.clear()
    mask = [*[False] * len(constants), *linear]
    closed = raised(closed, mask, scope)
    env, equations = evaluate_constants(closed, mask, [*constants, *values])
    better = Tape(closed.inputs[len(constants) :], with_values(equations, env), closed.outputs)
    better.linear, better.spread = True, tape.spread
    del closed, constants, equations, env  # what holds a residual now is the equation that needs it
    return summed_backward_pass(better, linear, values, [cts[k] for k in given], consume)


reverse.backward_pass_on_ranks = _backward_pass_in_body


def _buckets(lifts: Sequence[Equation]) -> list[list[Equation]]:
    """Lifts in a row, as many as have no more than `bucket_bytes` together."""
    buckets: list[list[Equation]] = []
    room = 0
    for eqn in lifts:
        size = eqn.inputs[0].type.nbytes
        if not buckets or size > room:
            buckets.append([])
            room = SETTINGS["bucket_bytes"]
        buckets[-1].append(eqn)
        room -= size
    return buckets


def _psums(values: Sequence[Value], params: dict) -> Sequence[Value]:
    return [psum_p.bind(*values, **params)] if len(values) == 1 else together(psum_p).bind(*values, **params)
