"""Gradient buckets: sum cotangents of pbroadcast inputs in few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collectives.ops import psum_p
from collectives.passes.fuse_psums import MAX_BUCKET, SETTINGS
from collectives.passes.hoist_pbroadcasts import HOISTED, hoist_pbroadcasts
from collectives.passes.order import split_into_buckets
from collectives.passes.variadic import variadic
from minidiff.core.interpreter import current_scope
from minidiff.core.reverse import run_backward_pass
from minidiff.core.tape import ConsumedEquations, Equation, Tape
from minidiff.core.tracer import Value
from minidiff.core.types import Var, typeof
from minidiff.errors.location import fuse_locations, transposes
from minidiff.values.settings import checking


@transposes
def summed_backward_pass(tape: Tape, cts: Sequence[Value | None]) -> list[Value | None]:
    """Run a backward pass with fewer all-reduces: map cotangents of a linear tape's outputs to those of its inputs.

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
    remaining = replace_equations(tape, [e for e in tape.equations if e not in left_out])
    in_cts = run_backward_pass(Tape(names, remaining, tape.outputs), cts)
    totals = dict(zip(tape.inputs, in_cts))
    terms = [(cast, ct) for cast, ct in zip(cut, in_cts[len(totals) :]) if ct is not None]
    del in_cts  # once a bucket is summed, its terms are free
    limit = SETTINGS["bucket_bytes"] or MAX_BUCKET  # the values are there anyway, and nothing overlaps
    for bucket in split_into_buckets(terms, _bucket_key, lambda term: typeof(term[0].inputs[0]).nbytes, limit):
        casts, cts = zip(*bucket)
        del bucket
        # sum for the source lines of all casts in the bucket
        equation = Equation(psum_p, (), casts[0].params, (), fuse_locations([cast.source for cast in casts]))
        for cast, total in zip(casts, variadic(psum_p).bind(*cts, **equation.params)):
            other_uses = totals[cast.inputs[0]]
            totals[cast.inputs[0]] = total if other_uses is None else other_uses + total
    return list(totals.values())


def _bucket_key(term: tuple[Equation, Value]) -> tuple:
    cast, _ = term
    return cast.params["axes"], typeof(cast.inputs[0]).dtype


def replace_equations(tape: Tape, equations: list[Equation]) -> list[Equation]:
    """Return new equations of a tape, whose old ones are freed if it is walked only once."""
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
        tape = Tape(hoisted.inputs, replace_equations(tape, hoisted.equations), hoisted.outputs)
    return summed_backward_pass(tape, cts)
