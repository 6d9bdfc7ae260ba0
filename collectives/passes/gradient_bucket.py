"""The end of a body's backward pass: the cotangents of inputs that were lifted on the way in, summed together."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from collectives.backends.base import Backend
from collectives.ops import pbroadcast_p, psum_p
from collectives.passes.hoist_pbroadcasts import hoist_pbroadcasts
from collectives.primitives import variadic
from minidiff import reverse
from minidiff.compiler.simplify import SETTINGS
from minidiff.core import Primitive, Value, current_interpreter, current_scope
from minidiff.location import joined, transposes
from minidiff.reverse import backward_pass
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
        if eqn.primitive is pbroadcast_p and psum_p.sends(eqn.params):
            (x,) = eqn.inputs
            if isinstance(x, Var) and x in inputs:  # zeros, too, are lifted
                alike[eqn.params["axes"], x.type.dtype].append(eqn)
    groups = [(_Sums(pbroadcasts[0].params), pbroadcasts) for pbroadcasts in alike.values() if len(pbroadcasts) > 1]
    if not groups:
        return backward_pass(tape, linear, values, cts, consume)
    taken = {pbroadcast: _handed_over(pbroadcast, sums) for sums, pbroadcasts in groups for pbroadcast in pbroadcasts}
    rest = Tape(tape.inputs, [taken.get(eqn, eqn) for eqn in tape.equations], tape.outputs)
    rest.linear, rest.may_be_sharded = tape.linear, tape.may_be_sharded
    with _nothing_on_its_way():
        found = backward_pass(rest, linear, values, cts, consume)
        totals = dict(zip([v for v, yes in zip(tape.inputs, linear) if yes], found))
        del found
        for sums, bucket in [(s, bucket) for s, _ in groups for bucket in s.buckets]:
            # on whose behalf all are summed
            eqn = Equation(
                psum_p, (), sums.params, (), joined([pbroadcast.source for pbroadcast in bucket.pbroadcasts])
            )
            for pbroadcast, total in zip(bucket.pbroadcasts, sums.of(bucket)):
                own = totals[pbroadcast.inputs[0]]
                totals[pbroadcast.inputs[0]] = total if own is None else own + total
    return list(totals.values())


class _Bucket:
    """What is summed in one call: the terms, and their pbroadcasts. What has been `begun` holds them itself."""

    def __init__(self):
        self.pbroadcasts: list[Equation] = []
        self.terms: list = []
        self.begun: Any = None


class _Sums:
    """Sums over the same axes, of one dtype, of cotangents that come one by one, in buckets of `bucket_bytes`.

    Where ranks compute at once, a bucket's sum is begun when the next one is, and nobody holds the terms any more;
    simulated ranks add up each cotangent as it comes. Where the backward pass is recorded, sums are its end.
    """

    def __init__(self, params: dict):
        self.params = params
        self.interpreter: Any = current_interpreter()
        self.ranks = _backend()
        self.buckets: list[_Bucket] = []
        self.room = 0

    def take(self, pbroadcast: Equation, ct: Value) -> None:
        """The cotangent of what is lifted there."""
        size = pbroadcast.inputs[0].type.nbytes
        if not self.buckets or size > self.room:
            if self.buckets and self.ranks is not None:
                self._begin(self.buckets[-1])
            self.buckets.append(_Bucket())
            self.room = SETTINGS["bucket_bytes"]
        self.room -= size
        self.buckets[-1].pbroadcasts.append(pbroadcast)
        if self.ranks is not None:
            ct = self.ranks.ready("psum", *self.interpreter.operand(ct), self.params)
        self.buckets[-1].terms.append(ct)

    def _begin(self, bucket: _Bucket) -> None:
        bucket.begun = self.ranks.begin("psum", bucket.terms, self.params)
        bucket.terms = []

    def of(self, bucket: _Bucket) -> Sequence[Value]:
        """The sums of a bucket's terms, which are let go of."""
        terms, bucket.terms = bucket.terms, []
        if self.ranks is None:
            one = len(terms) == 1
            return [psum_p.bind(*terms, **self.params)] if one else variadic(psum_p).bind(*terms, **self.params)
        summed = self.ranks.reduced("psum", terms, self.params) if terms else self.ranks.wait(bucket.begun)
        return [self.interpreter.held(*x) for x in summed]


class _Handover(Primitive):
    """In the place of a lift whose cotangent is summed together with others: its transpose hands it over to `sums`."""

    def transpose(self, cts, operands, params):
        params["sums"].take(params["pbroadcast"], cts)
        return [None]


_handover_p = _Handover("pbroadcast")


def _handed_over(pbroadcast: Equation, sums: _Sums) -> Equation:
    return Equation(
        _handover_p, pbroadcast.inputs, {"sums": sums, "pbroadcast": pbroadcast}, pbroadcast.outputs, pbroadcast.source
    )


def _backend() -> Backend | None:
    """What runs the operations of this body at once; None where they are recorded, say."""
    return getattr(current_interpreter(), "backend", None)


@contextlib.contextmanager
def _nothing_on_its_way() -> Iterator[None]:
    """Where an error unwinds, what ranks have begun is over."""
    ranks = _backend()
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.finish()
        raise


def _backward_pass_in_body(
    tape: Tape, linear: Sequence[bool], values: Sequence[Value], cts: Sequence[Value | None], consume: bool = False
) -> list[Value | None]:
    """As `summed_backward_pass`, of a tape that was recorded in the body that is running: it holds values."""
    hoisted = tape if current_scope().explicit else hoist_pbroadcasts(tape)
    if consume and hoisted is not tape:
        tape.equations.clear()  # what holds a residual now is the equation that needs it
    return summed_backward_pass(hoisted, linear, values, cts, consume)


reverse.backward_pass_on_ranks = _backward_pass_in_body
