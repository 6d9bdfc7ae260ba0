"""Bodies of higher-order operations: tracing, partial evaluation, jvp, vmap.

A body is a closed `Tape`: its first inputs are the values that the function closes over. To differentiate,
vectorize or transpose a body, run it under the interpreter that does so, and trace that (`TracedBody`; its
outputs are chosen afterwards). Linearization splits a body into a known and a linear part (`PartialEval`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from minidiff.api.recording import CONSTANTS
from minidiff.control_flow.dead_code import dependents, prune_tape
from minidiff.core.forward import JVP, push_forward
from minidiff.core.interpreter import Interpreter, current_interpreter, lift, running, transforming
from minidiff.core.ranks import cast_to
from minidiff.core.reverse import Linearize
from minidiff.core.tape import Stage, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, Var, typeof, zeros_like
from minidiff.core.vmap import Batch, BatchTracer
from minidiff.inputs.arguments import as_value
from minidiff.inputs.global_random import random_state, warn_if_random
from minidiff.ops.shape import broadcast_to, expand_dims
from minidiff.values.lists import scatter, select, split_list
from minidiff.values.settings import restores_settings

# ---------------------------------------------------------------- recording


class TracedBody:
    """A function traced to a tape of its own; `close` chooses the outputs later."""

    @restores_settings
    def __init__(
        self,
        f: Callable,
        types: Iterable[ShapedArray],
        origin: tuple[str, str] | None = None,
        stage: Stage | None = None,
    ):
        self.stage = Stage(current_interpreter()) if stage is None else stage
        if origin is not None:
            self.stage.origin, self.stage.name = origin, " of ".join(origin)
        inputs = [self.stage.new_input(t) for t in types]
        before = random_state()
        try:
            with running(self.stage):
                self.result = f(*inputs)
                if origin is not None:
                    warn_if_random(before, " of ".join(origin), CONSTANTS)
        except BaseException:
            self.stage.end()
            raise

    @restores_settings
    def close(self, outputs: Callable[[Any], Sequence[Value]], prune: bool = False) -> tuple[Tape, list[Value]]:
        """Return the closed tape of `outputs(result)`, pruned if `prune`, and the values of its first inputs."""
        with transforming(self.stage):
            tape = self.stage.tape([lift_value(x) for x in outputs(self.result)])
            return (prune_tape(tape) if prune else tape).close()


def lift_value(x: Any) -> Value:
    return lift(as_value(x))


def cast_to_types(values: Sequence[Value], types: Sequence[ShapedArray]) -> list[Value]:
    """Cast values along mesh axes to these types; leave a type in place of a linear value."""
    return [x if isinstance(x, ShapedArray) else cast_to(x, t.states) for x, t in zip(values, types)]


def zeros(t: ShapedArray) -> Value:
    """Return zeros of this type."""
    return cast_to(zeros_like(t)[()], t.states)  # a number is written into tapes, an array is a constant of them


#: How a body takes an operand, and gives a result: the same one in every run, handed from one run to the next, or one
#: element of an array for each run. Operands and results are in this order.
CONST, CARRY, SCANNED = range(3)


class Operand(NamedTuple):
    """An operand of a body (None for zeros), and which operand of the original it is."""

    value: Any
    group: int
    origin: int | None = None


def merge(closed: Sequence[tuple[Tape, Sequence[Operand]]]) -> tuple[list[Tape], list[Operand]]:
    """Make tapes take the same operands, given the operands of each one's first inputs."""
    operands: dict[int, Operand] = {}
    names: list[dict[int, Var]] = []  # of each tape: what identifies an operand -> its name
    for tape, constants in closed:
        names.append({})
        for x, var in zip(constants, tape.inputs):
            key = id(var) if id(x.value) in names[-1] else id(x.value)  # a tape may take a value twice
            names[-1][key] = var
            operands.setdefault(key, x)
    return [
        Tape(
            [*[known.get(key) or Var(typeof(x.value)) for key, x in operands.items()], *tape.inputs[len(constants) :]],
            tape.equations,
            tape.outputs,
        )
        for (tape, constants), known in zip(closed, names)
    ], list(operands.values())


class PartialEval:
    """A tape split into a known part, and a part that is linear in its `linear` inputs.

    The tape of `stage` is the known part. `linear_tape` is the linear part, for the outputs that the caller chooses.
    """

    def __init__(self, tape: Tape, linear: Sequence[bool]):
        def split(*values):
            known = iter(values)
            self.recorder = Linearize(current_interpreter())
            with transforming(self.recorder):
                self.outs = tape(
                    *[self.recorder.new_input(t) if is_linear else next(known) for t, is_linear in zip(types, linear)]
                )

        types = tape.in_types
        self.known = [not is_linear for is_linear in linear]
        self.traced_body = TracedBody(split, select(types, self.known))
        self.stage = self.traced_body.stage
        self.is_linear = [self.recorder.owns(x) for x in self.outs]

    def linear_tape(
        self, outputs: Sequence[bool], operands: Sequence[Operand], repeats: bool, chosen_along: frozenset
    ) -> tuple[Tape, list[Operand]]:
        """Return the tape of the chosen outputs, and operands for its first inputs, the residuals.

        A residual that is not known outside the body is represented by its name on `stage`. If the body `repeats`,
        there is one such residual for each run; those that depend on shared operands alone are computed here, once for
        all runs. If ranks choose along some axes whether to run the body, residuals that do not vary along these are
        computed here, by all ranks: a result of the choice would vary.
        """
        tape, residuals = self.recorder.tape(select(self.outs, outputs)).close()
        known_operands = list(zip(self.stage.inputs, [x._replace(origin=None) for x in select(operands, self.known)]))
        outside = {v: x for v, x in known_operands if x.group != CARRY}
        if repeats or chosen_along:
            changing = dependents(self.stage.equations, [v for v, x in known_operands if x.group != CONST])
            wanted = [x.variable for x in residuals if self.stage.owns(x) and x.variable not in outside]
            wanted = [
                v
                for v in wanted
                if (v not in changing if repeats else chosen_along - v.type.states.varying_or_unreduced)
            ]
            computed = prune_tape(Tape([v for v, _ in known_operands], self.stage.equations, wanted), effects=False)
            values = computed(*[x.value for _, x in known_operands])
            outside.update((v, Operand(x, CONST)) for v, x in zip(wanted, values))

        def operand(x):
            if not self.stage.owns(x):
                return Operand(x, CONST)
            return outside.get(x.variable) or Operand(x, SCANNED if repeats else CONST)

        return tape, list(map(operand, residuals))

    def known_tape(self, outputs: Sequence[Value]) -> tuple[Tape, list[Value]]:
        """Return the closed tape of known outputs and residuals; a type means zeros."""
        values = lambda _: [reshard_like(zeros(x), x) if isinstance(x, ShapedArray) else x for x in outputs]  # noqa: E731
        return self.traced_body.close(values, prune=True)


def partial_eval(tape: Tape, linear: Sequence[bool]) -> tuple[PartialEval, list[bool]]:
    """Return a tape split in two, and which of its results are linear."""
    parts = PartialEval(tape, linear)
    return parts, parts.is_linear


# ---------------------------------------------------------------- jvp and vmap


def interpreters(top: Any) -> Iterator[Interpreter]:
    """Yield the interpreter `top`, and those below it."""
    while top is not None:
        yield top
        top = top.below


class Nested:
    """An interpreter that continues its `outer` one inside a body."""

    def interpret(self, primitive, args, params):
        return super().interpret(primitive, [self.lift(x) if isinstance(x, Tracer) else x for x in args], params)

    def is_in_body(self, x: Tracer) -> bool:
        """Whether `x` belongs to this interpreter or to one below it."""
        return x.interpreter in interpreters(self)


class NestedJVP(Nested, JVP):
    """Forward mode, continued inside a body."""


@functools.cache
def nested_class(kind: type[JVP]) -> type[JVP]:
    """Return the class of an interpreter that continues forward mode of this kind inside a body."""
    if kind is JVP or issubclass(kind, Nested):
        return NestedJVP if kind is JVP else kind
    return type(f"{kind.__name__}Inside", (Nested, kind), {})


class NestedBatch(Nested, Batch):
    """vmap, continued inside a body."""


class ClosureGuard(NestedJVP):
    """Forward mode, continued inside a rule; it raises if that closes over a differentiated value."""

    def __init__(self, below: Interpreter, outer: Any, function: str = ""):
        super().__init__(below, outer)
        self.function = function or outer.function  # in a shard_map's body, of the guard around it

    def lift_outer(self, x):
        raise closure_error(self.function, x)


def guard_closure(f: Callable, outside: JVP, name: str) -> Callable:
    """Make a body or a rule of `name` raise if it closes over a value that `outside` differentiates."""

    def run(*values):
        guard = ClosureGuard(current_interpreter(), outside, name)
        with transforming(guard):
            return list(map(guard.lift, f(*values)))

    return run


def closure_error(name: str, x: Value) -> TypeError:
    """Return the error that a rule of `name` closes over the differentiated value `x`."""
    return TypeError(
        f"{name} closes over a value of type {typeof(x)} that is being differentiated; its rule gives derivatives in "
        "its arguments only (except nondiff_argnums): pass the value as an argument, or apply stop_gradient if it is "
        "a constant"
    )


def jvp_of_body(body: Callable, inside: Callable[[Interpreter], JVP], active: Sequence[bool]) -> Callable:
    """Return the jvp of a body: it maps operands and tangents to results and their tangents.

    It takes tangents for the operands marked as `active`. A zero tangent is None. `inside(below)` is the interpreter
    that continues the outer forward mode.
    """

    def jvp(*values):
        primals, tangents = split_list(values, len(active))
        forward = inside(current_interpreter())
        lifted = lambda *args: [forward.lift(x) for x in body(*args)]  # noqa: E731
        return push_forward(lifted, primals, scatter(tangents, active), forward)

    return jvp


def run_batched(outside: Batch, body: Callable, values: Sequence[Value], batched: Sequence[bool]):
    """Run a body on values batched along axis 0; return the results, and which are batched."""
    inside = NestedBatch(current_interpreter(), outside.size_of_batch, outer=outside)
    with transforming(inside):
        tracers = [BatchTracer(inside, x, 0) if b and x is not None else x for x, b in zip(values, batched)]
        outs = list(map(inside.lift, body(*tracers)))
    return list(map(inside.in_front, outs)), list(map(inside.owns, outs))


def batched_body(
    body: Callable,
    outside: Batch,
    batched: Sequence[bool],
    results: list[bool] | None = None,
    decide: Callable = lambda out_batched, results: results or out_batched,
) -> Callable:
    """Vectorize a body over the first axis of batched arguments and results.

    All results are batched, unless a list `results` is given: the first run fills it with which ones depend on batched
    values, and only these are batched. For a jvp rule, which returns results and their tangents, `decide` says which.
    """

    def vectorized(*values):
        outs, out_batched = run_batched(outside, body, values, batched)
        wanted = [True] * len(outs)
        if results is not None and outside.size_of_batch:
            results[:] = decide(out_batched, results)
            wanted = results * (len(outs) // max(len(results), 1))
        outs = [x[0] if b and not flag else x for x, b, flag in zip(outs, out_batched, wanted)]
        return broadcast_unbatched(
            outs, out_batched, [flag and x is not None for x, flag in zip(outs, wanted)], outside.size_of_batch
        )

    return vectorized


def batched_by_rule(name: str, by_transpose: bool, out_batched: list[bool], results: list[bool]) -> list[bool]:
    """Return which results of a function with a rule are batched: those whose value or tangent depends on the batch.

    All tangents of a backward rule do, as far as is known (`by_transpose`); they count if no value does. TypeError if
    the function itself ran first, and `results` says that a value does not depend on the batch.
    """
    values, tangents = split_list(out_batched, len(out_batched) // 2)
    depends = values if by_transpose and any(values) else [a or b for a, b in zip(values, tangents)]
    if any(b and not flag for b, flag in zip(depends, results)):
        raise TypeError(
            f"{name}: a result does not depend on the arguments over which vmap maps, but its derivative, by the rule, "
            "does; let it depend on them, as in y + 0.0 * x"
        )
    return results or depends


def broadcast_in_front(x: Value, size: int) -> Value:
    """Broadcast along a new leading axis."""
    return broadcast_to(expand_dims(x, 0), (size, *typeof(x).shape))


def trace_batched(
    body: Callable, types: Sequence[tuple[ShapedArray, ShapedArray]], outside: Batch, batched: Sequence[bool]
) -> tuple[TracedBody, list[bool]]:
    """Trace a body on batched values by `run_batched`; also return which results are batched.

    For each operand, `types` has its type if it is not batched, and that of a batch.
    """
    chosen = [batch if b else alone for (alone, batch), b in zip(types, batched)]
    traced_body = TracedBody(lambda *values: run_batched(outside, body, values, batched), chosen)
    return traced_body, traced_body.result[1]


def reshard_like(x: Value, t: ShapedArray) -> Value:
    """Reshard `x` like the type t; an element of a batch stays unchanged."""
    have = typeof(x).sharding
    if have == t.sharding or (have is not None and have.is_element):
        return x
    return have.gather(x) if t.sharding is None else t.sharding.reshard(x)


def broadcast_unbatched(
    values: Sequence[Value], batched: Sequence[bool], wanted: Sequence[bool], size: int
) -> list[Value]:
    """Broadcast values along a leading batch axis wherever one is wanted."""
    return [broadcast_in_front(x, size) if flag and not b else x for x, b, flag in zip(values, batched, wanted)]


def concrete_value(x: Value, use: str) -> Any:
    return x.concrete(use) if isinstance(x, Tracer) else x
