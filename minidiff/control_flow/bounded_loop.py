"""Loops of at most a given number of steps, which reverse mode differentiates: `max_steps=` of `while_loop`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.api.derivatives import pull_back
from minidiff.api.recording import stage_flat
from minidiff.control_flow.bodies import type_of_batch
from minidiff.control_flow.custom_rules import custom_vjp
from minidiff.core.forward import JVP, instantiate, push_forward
from minidiff.core.interpreter import current_interpreter
from minidiff.core.tape import Equation, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import Var, typeof, zeros_like
from minidiff.ops.base import General
from minidiff.ops.dimensions import elementwise
from minidiff.ops.elementwise import add, greater, less, logical_and, subtract
from minidiff.ops.slices import dynamic_index_in_dim, dynamic_update_index_in_dim
from minidiff.values.dtypes import float0, is_differentiable
from minidiff.values.lists import scatter, select, split_list


def too_many_steps_message(caller: str, max_steps: int) -> str:
    return (
        f"{caller}: the condition still holds after max_steps={max_steps} steps. Pass a larger number, whose carries "
        "fit into memory; or end the loop by a condition on a counter among the carries"
    )


def _check_ended(goes_on: Any, x: Any, caller: str, max_steps: int) -> Any:
    if numpy.any(goes_on):
        raise RuntimeError(too_many_steps_message(caller, max_steps))
    return x


#: A result of a loop, unchanged: raises RuntimeError if the loop's condition still holds.
_ended_p = General(
    "ended",
    _check_ended,
    lambda goes_on, x, **_: (x.shape, x.dtype),
    lambda out, primals, tangents, params: tangents[1],
    transpose_rule=lambda ct, operands, **_: [ct],
    sharding=elementwise,
    shares_memory=True,
)


def with_constants(tape: Tape, values: Sequence[Value]) -> tuple[Tape, list[Value]]:
    """Let a tape, given the values of its first inputs, take only those that are traced: arrays stay its constants."""
    plain = {v: x for v, x in zip(tape.inputs, values) if not isinstance(x, Tracer)}
    look_up = lambda a: plain.get(a, a) if isinstance(a, Var) else a  # noqa: E731
    equations = [
        Equation(e.primitive, list(map(look_up, e.inputs)), e.params, e.outputs, e.source) for e in tape.equations
    ]
    inputs = [v for v in tape.inputs if v not in plain]
    return Tape(inputs, equations, list(map(look_up, tape.outputs))), [x for x in values if isinstance(x, Tracer)]


def hoist_casts(tape: Tape, values: Sequence[Value]) -> tuple[Tape, list[Value]]:
    """Let a tape, given the values of its first inputs, take these cast along mesh axes as its equations cast them.

    Cotangents are then summed over the ranks once for all steps.
    """
    shared = {*tape.inputs[: len(values)]}
    is_cast = [
        e.inputs[:1] == e.inputs
        and e.inputs[0] in shared
        and e.outputs[0].type.states != e.inputs[0].type.states
        and not e.primitive.sends(e.params)
        for e in tape.equations
    ]
    casts = select(tape.equations, is_cast)
    outputs = [e.outputs[0] for e in casts]
    more = Tape(tape.inputs[: len(values)], casts, outputs).apply(*values)
    first, others = split_list(tape.inputs, len(values))
    equations = select(tape.equations, [not flag for flag in is_cast])
    return Tape([*first, *outputs, *others], equations, tape.outputs), [*values, *more]


class BoundedLoop:
    """A recorded loop of at most `max_steps` steps, which reverse mode differentiates.

    The condition and the body are tapes that take `shared` values, then the carries. In reverse mode the loop records
    the carries before each step, and the backward pass is a loop of the same kind: it runs each step again from its
    carries, and transposes it. So derivatives have any order.
    """

    def __init__(self, run: Callable, caller: str, condition: Tape, body: Tape, shared: list, max_steps: int):
        self.while_loop, self.caller, self.max_steps = run, caller, max_steps
        self.condition, self.body, self.shared = condition, body, shared
        self.active = [is_differentiable(v.type.dtype) for v in body.inputs[len(shared) :]]
        self.run, self.recorded = map(self.with_rules, (False, True))

    def with_rules(self, recorded: bool) -> custom_vjp:
        """Return the loop as a function of the first carries and shared values, recorded or not."""

        @custom_vjp
        def steps(init: list[Value], shared: list[Value]) -> tuple[list, list, Value]:
            types = [type_of_batch(typeof(x), self.max_steps) for x in init if recorded]
            return self.loop(init, shared, [numpy.broadcast_to(numpy.zeros((), t.dtype), t.shape) for t in types])

        def with_residuals(init: list[Value], shared: list[Value]) -> tuple[tuple, tuple]:
            carries, records, count = self.recorded(init, shared)
            return (carries, records if recorded else [], count), (records, count, shared)

        steps.defvjp(with_residuals, lambda residuals, cts: self.pull_back(residuals, *cts[:2]))
        steps.defjvp(lambda *primals_and_tangents: self.push_forward(recorded, *primals_and_tangents))
        return steps

    def goes_on(self, shared: Sequence[Value], carries: Sequence[Value]) -> Value:
        return self.condition.apply(*shared, *carries)[0]

    def loop(self, init: list[Value], shared: list[Value], records: list[Value]) -> tuple[list, list, Value]:
        """Return the last carries; the carries before each step, if there are arrays for them; the number of steps."""

        def advance(state: tuple) -> tuple:
            count, carries, records = state
            records = [dynamic_update_index_in_dim(r, x, count, 0) for r, x in zip(records, carries)]
            return add(count, 1), self.body.apply(*shared, *carries), records

        test = lambda state: logical_and(less(state[0], self.max_steps), self.goes_on(shared, state[1]))  # noqa: E731
        count, carries, records = self.while_loop(test, advance, (0, init, records))
        goes_on = self.goes_on(shared, carries)
        count, *carries = [
            _ended_p.bind(goes_on, x, caller=self.caller, max_steps=self.max_steps) for x in (count, *carries)
        ]
        return carries, records, count

    # ------------------------------------------------ forward mode: a loop of carries and tangents

    def push_forward(self, recorded: bool, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
        double, operands = self.with_tangents(primals, tangents)
        carries, records, count = (double.recorded if recorded else double.run)(*operands)
        carries, t_carries = self.split(carries)
        records, t_records = self.split(records) if recorded else ([], [])
        return (carries, records, count), (t_carries, t_records, numpy.zeros((), float0))

    def with_tangents(self, primals: tuple, tangents: tuple) -> tuple[BoundedLoop, tuple[list, list]]:
        """Return the loop whose carries and shared values have tangents, too, and its operands."""
        (init, shared), (t_init, t_shared) = primals, tangents
        moving = [is_differentiable(typeof(x).dtype) for x in shared]
        init, shared = [*init, *select(t_init, self.active)], [*shared, *select(t_shared, moving)]
        n = len(self.active)

        def body(*values: Value) -> list[Value]:
            shared, t_shared, carries, t_carries = split_list(values, len(moving), sum(moving), n)
            t_values = [*scatter(t_shared, moving), *scatter(t_carries, self.active)]
            outs, t_outs = push_forward(self.body.apply, [*shared, *carries], t_values, JVP(current_interpreter()))
            return [*outs, *[instantiate(t, x) for t, x, a in zip(t_outs, outs, self.active) if a]]

        def test(*values: Value) -> Value:
            return self.goes_on(values[: len(moving)], values[len(shared) : len(shared) + n])

        types = tuple(map(typeof, [*shared, *init]))
        tapes = stage_flat(test, types)[0], stage_flat(body, types)[0]
        return BoundedLoop(self.while_loop, self.caller, *tapes, shared, self.max_steps), (init, shared)

    def split(self, values: list[Value]) -> tuple[list, list]:
        """Split the carries of the loop with tangents, or their records, into primals and tangents."""
        primals, tangents = split_list(values, len(self.active))
        filled = scatter(tangents, self.active)
        return primals, [instantiate(t, x) if t is None else t for t, x in zip(filled, primals)]

    # ------------------------------------------------ reverse mode

    def pull_back(self, residuals: tuple, cts: list[Value], ct_records: list[Value]) -> tuple[list, list]:
        """Map cotangents of the last carries, and of the records, to those of the first carries and shared values."""
        records, count, shared = residuals
        ct_records = select(ct_records, self.active)

        def pull(state: tuple) -> tuple:
            count, cts, sums = state
            count = subtract(count, 1)
            carries = [dynamic_index_in_dim(r, count, 0, False) for r in records]

            def step(moving: list[Value], shared: list[Value]) -> list[Value]:
                values = iter(moving)
                outs = self.body.apply(*shared, *[next(values) if a else x for x, a in zip(carries, self.active)])
                return select(outs, self.active)

            cts, more = pull_back(step, (select(carries, self.active), shared), cts)
            if ct_records:
                cts = [add(ct, dynamic_index_in_dim(r, count, 0, False)) for ct, r in zip(cts, ct_records)]
            return count, cts, [x if y.dtype == float0 else add(x, y) for x, y in zip(sums, more)]

        state = count, select(cts, self.active), [zeros_like(typeof(x)) for x in shared]
        _, cts, sums = self.while_loop(lambda state: greater(state[0], 0), pull, state, self.max_steps)
        return scatter(cts, self.active), sums
