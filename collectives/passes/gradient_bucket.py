"""Gradient buckets: sum cotangents of pbroadcast inputs in few calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from collectives.collective import variadic
from collectives.ops import psum_p
from collectives.passes.fuse_psums import MOST_BUCKET, SETTINGS
from collectives.passes.grouping import split_by_limit
from collectives.passes.hoist_pbroadcasts import HOISTED, hoist_pbroadcasts
from minidiff.core.interpreter import current_scope
from minidiff.core.reverse import run_backward_pass
from minidiff.core.tape import ConsumedEquations, Equation, Tape
from minidiff.core.tracer import Value
from minidiff.core.types import Var, typeof
from minidiff.diagnostics.location import fuse_locations, transposes
from minidiff.values.settings import checking


@transposes
def summed_backward_pass(tape: Tape, cts: Sequence[Value | None]) -> list[Value | None]:
    """`run_backward_pass` with fewer all-reduces: map cotangents of a linear tape's outputs to those of its inputs.

    The transpose of each input's `pbroadcast` or `reduced` is a `psum` of its cotangent, and no other operation needs
    the results. So the tape is cut at these casts: their results become inputs. The backward pass returns their
    cotangents, and those over the same axes and of the same dtype are then summed in one call, or in several of at most
    `bucket_bytes` each.
    """
    inputs = set(tape.inputs)
    cut = [
        eqn
        for eqn in tape.equations
        if eqn.primitive in HOISTED
        and isinstance(eqn.inputs[0], Var)  # the operand may also be a constant, such as zeros
        and eqn.inputs[0] in inputs
        and not eqn.inputs[0].type.reduced  # whose cotangent is not summed
        and psum_p.sends(eqn.params)
    ]
    if not cut:
        return run_backward_pass(tape, cts)
    names, left_out = [*tape.inputs, *[eqn.outputs[0] for eqn in cut]], set(cut)
    remaining = let_go(tape, [e for e in tape.equations if e not in left_out])
    in_cts = run_backward_pass(Tape(names, remaining, tape.outputs), cts)
    totals = dict(zip(tape.inputs, in_cts))
    buckets = _buckets(list(zip(cut, in_cts[len(totals) :])))
    del in_cts  # once a bucket is summed, its terms are free
    while buckets:
        pbroadcasts, terms = zip(*buckets.pop(0))
        # sum for the source lines of all pbroadcasts in the bucket
        equation = Equation(
            psum_p, (), pbroadcasts[0].params, (), fuse_locations([cast.source for cast in pbroadcasts])
        )
        for pbroadcast, total in zip(pbroadcasts, variadic(psum_p).bind(*terms, **equation.params)):
            own = totals[pbroadcast.inputs[0]]
            totals[pbroadcast.inputs[0]] = total if own is None else own + total
    return list(totals.values())


def _buckets(terms: Sequence[tuple[Equation, Value | None]]) -> list[list[tuple[Equation, Value]]]:
    """Pbroadcasts and their cotangents, the last first, by axes and dtype, of at most `bucket_bytes`."""
    alike: dict[Any, list] = defaultdict(list)
    for pbroadcast, ct in reversed(terms):
        if ct is not None:
            alike[pbroadcast.params["axes"], typeof(pbroadcast.inputs[0]).dtype].append((pbroadcast, ct))
    buckets = []
    nbytes = lambda term: typeof(term[0].inputs[0]).nbytes  # noqa: E731
    limit = SETTINGS["bucket_bytes"] or MOST_BUCKET  # the values are there anyway, and nothing overlaps
    for rest in alike.values():
        while rest:
            bucket, rest = split_by_limit(rest, nbytes, limit)
            buckets.append(bucket)
    return buckets


def let_go(tape: Tape, equations: list[Equation]) -> list[Equation]:
    """The equations that replace those of a tape, which it gives up if it is walked only once."""
    if equations is tape.equations or not isinstance(tape.equations, ConsumedEquations):
        return equations
    tape.equations.clear()
    return ConsumedEquations(equations)


def backward_pass_in_body(run: Callable, tape: Tape, cts: Sequence[Value | None], is_whole: bool) -> list[Value | None]:
    """Run the backward pass of a tape of the running body, `run(tape, cts)`.

    Count it, and let its operations insert their casts, as in any derivative rule. If it `is_whole`, hoist pbroadcasts
    and run `summed_backward_pass`.
    """
    scope = current_scope()
    if not (is_whole and scope.typed):
        scope.transposed += 1
        with checking(scope, False):
            return run(tape, cts)
    if not scope.explicit:
        hoisted = hoist_pbroadcasts(tape)
        tape = Tape(hoisted.inputs, let_go(tape, hoisted.equations), hoisted.outputs)
    return summed_backward_pass(tape, cts)
