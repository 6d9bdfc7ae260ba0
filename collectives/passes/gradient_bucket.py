"""Gradient buckets: sum cotangents of pbroadcast inputs in few calls."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from collectives.backends.base import Backend
from collectives.ops import pbroadcast_p, psum_p
from collectives.passes.hoist_pbroadcasts import hoist_pbroadcasts
from collectives.primitives import variadic
from minidiff.compiler.simplify import SETTINGS
from minidiff.core import Primitive, Value, current_interpreter, current_scope
from minidiff.location import joined, transposes
from minidiff.reverse import backward_pass
from minidiff.tape import Equation, Tape, Var


@transposes
def summed_backward_pass(
    tape: Tape, linear: Sequence[bool], values: Sequence[Value], cts: Sequence[Value | None], consume: bool = False
) -> list[Value | None]:
    """`backward_pass` with fewer all-reduces: return the cotangents of linear inputs.

    The transpose of each input's `pbroadcast` is a `psum` of its cotangent, and no other operation needs the results.
    So the psums over the same axes and of the same dtype are fused into one call when all operands are ready, or into
    several calls of at most `bucket_bytes` each.
    """
    inputs = {v for v, yes in zip(tape.inputs, linear) if yes}
    same_axes: dict[Any, list[Equation]] = defaultdict(list)
    for eqn in tape.equations:
        if eqn.primitive is pbroadcast_p and psum_p.sends(eqn.params):
            (x,) = eqn.inputs
            if isinstance(x, Var) and x in inputs:  # the operand may also be a constant, such as zeros
                same_axes[eqn.params["axes"], x.type.dtype].append(eqn)
    groups = [(_Sums(pbroadcasts[0].params), pbroadcasts) for pbroadcasts in same_axes.values() if len(pbroadcasts) > 1]
    if not groups:
        return backward_pass(tape, linear, values, cts, consume)
    taken = {pbroadcast: _handed_over(pbroadcast, sums) for sums, pbroadcasts in groups for pbroadcast in pbroadcasts}
    rest = Tape(tape.inputs, [taken.get(eqn, eqn) for eqn in tape.equations], tape.outputs)
    rest.linear, rest.may_be_sharded = tape.linear, tape.may_be_sharded
    with _finishing_on_error():
        found = backward_pass(rest, linear, values, cts, consume)
        totals = dict(zip([v for v, yes in zip(tape.inputs, linear) if yes], found))
        del found
        for sums, bucket in [(s, bucket) for s, _ in groups for bucket in s.buckets]:
            # sum for the source lines of all pbroadcasts in the bucket
            eqn = Equation(
                psum_p, (), sums.params, (), joined([pbroadcast.source for pbroadcast in bucket.pbroadcasts])
            )
            for pbroadcast, total in zip(bucket.pbroadcasts, sums.of(bucket)):
                own = totals[pbroadcast.inputs[0]]
                totals[pbroadcast.inputs[0]] = total if own is None else own + total
    return list(totals.values())


class _Bucket:
    """Terms to sum in one call, and their pbroadcasts; `begun` is the started call.

    Once it has begun, the call holds the terms.
    """

    def __init__(self):
        self.pbroadcasts: list[Equation] = []
        self.terms: list = []
        self.begun: Any = None


class _Sums:
    """Sums over the same axes and of one dtype of arriving cotangents, in buckets.

    A bucket holds `bucket_bytes`. If a backend runs the backward pass, a bucket's sum begins when the next bucket is
    opened, and frees its terms; simulated ranks reduce each cotangent as it arrives. If the backward pass is recorded,
    the sums are its last equations.
    """

    def __init__(self, params: dict):
        self.params = params
        self.interpreter: Any = current_interpreter()
        self.ranks = _backend()
        self.buckets: list[_Bucket] = []
        self.room = 0

    def take(self, pbroadcast: Equation, ct: Value) -> None:
        """Add the cotangent of a pbroadcast's result."""
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
        """The sums of a bucket's terms; frees the terms."""
        terms, bucket.terms = bucket.terms, []
        if self.ranks is None:
            one = len(terms) == 1
            return [psum_p.bind(*terms, **self.params)] if one else variadic(psum_p).bind(*terms, **self.params)
        summed = self.ranks.reduced("psum", terms, self.params) if terms else self.ranks.wait(bucket.begun)
        return [self.interpreter.held(*x) for x in summed]


class _Handover(Primitive):
    """Stands for a bucketed pbroadcast: its transpose passes the cotangent to `sums`."""

    def transpose(self, cts, operands, params):
        params["sums"].take(params["pbroadcast"], cts)
        return [None]


_handover_p = _Handover("pbroadcast")


def _handed_over(pbroadcast: Equation, sums: _Sums) -> Equation:
    return Equation(
        _handover_p, pbroadcast.inputs, {"sums": sums, "pbroadcast": pbroadcast}, pbroadcast.outputs, pbroadcast.source
    )


def _backend() -> Backend | None:
    """The backend that runs this body's operations; None if they are recorded."""
    return current_interpreter().backend


@contextlib.contextmanager
def _finishing_on_error() -> Iterator[None]:
    """On an error, finish the communication that ranks have begun."""
    ranks = _backend()
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.finish()
        raise


def backward_pass_in_body(
    tape: Tape, linear: Sequence[bool], values: Sequence[Value], cts: Sequence[Value | None], consume: bool = False
) -> list[Value | None]:
    """`summed_backward_pass` of a tape of the running body; hoist pbroadcasts first."""
    hoisted = tape if current_scope().explicit else hoist_pbroadcasts(tape)
    if consume and hoisted is not tape:
        tape.equations.clear()  # only the equation that needs a residual may keep it alive
    return summed_backward_pass(hoisted, linear, values, cts, consume)
