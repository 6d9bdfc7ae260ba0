"""Operations with tapes as bodies (loops, branches); partial evaluation.

A body is a closed :class:`Tape`: values that the function closes over are its first inputs. An operation with such
bodies as parameters (:class:`BodyOperation`) states its rules on tapes. To differentiate, vectorise or transpose a
body, run it under the interpreter that does so, and trace that (:class:`TracedBody`, whose outputs are chosen
afterwards). Linearisation splits a body into a known and a linear part (:class:`PartialEval`).

(Bodies that are functions, run once and inline: `inlined.py`.)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minidiff.arguments import resharded
from minidiff.core import (
    Primitive,
    ShapedArray,
    Tracer,
    Value,
    current_interpreter,
    enter,
    pbroadcast_to,
    restores_interpreter,
    running,
    transforming,
    typeof,
)
from minidiff.forward import JVP, as_value, instantiate
from minidiff.global_random import random_state, warn_if_random
from minidiff.ops.base import zeros_like
from minidiff.ops.shape import broadcast_to, expand_dims, moveaxis
from minidiff.reverse import Linearize
from minidiff.staging import CONSTANTS, Stage
from minidiff.tape import Atom, Equation, Tape, Var, has_effects, with_equations, without_effects
from minidiff.vmap import Batch, BatchTracer

# ---------------------------------------------------------------- recording


class TracedBody:
    """A function traced to a tape of its own; `close` chooses the outputs later.

    One traced `for_types` is never closed, so its equations do not record source lines.
    """

    @restores_interpreter
    def __init__(
        self, f: Callable, types: Iterable[ShapedArray], origin: tuple[str, str] | None = None, for_types: bool = False
    ):
        self.stage = Stage(current_interpreter())
        self.stage.keeps_sources = not for_types
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

    @restores_interpreter
    def close(self, outputs: Callable[[Any], Sequence[Value]], prune: bool = False) -> tuple[Tape, list[Value]]:
        """The closed tape of `outputs(result)`, and the values of its first inputs.

        With `prune`, equations that the outputs do not need are dropped.
        """
        with transforming(self.stage):
            tape = self.stage.tape([entered(x) for x in outputs(self.result)])
            return (prune_tape(tape) if prune else tape).close()


def entered(x: Any) -> Value:
    return enter(as_value(x))


def fit(values: Sequence[Value], types: Sequence[ShapedArray]) -> list[Value]:
    """Insert a pbroadcast wherever a type varies along more axes.

    A type among the values stands for a linear one, and stays.
    """
    return [x if isinstance(x, ShapedArray) else pbroadcast_to(x, t.variance) for x, t in zip(values, types)]


def instantiated(values: Sequence[Value | None], types: Sequence[ShapedArray]) -> list[Value]:
    return list(map(resharded, fit([instantiate(x, t) for x, t in zip(values, types)], types), types))


def zeros(t: ShapedArray) -> Value:
    """Zeros of this type."""
    return pbroadcast_to(zeros_like(t), t.variance)


def fixpoint(attempt: Callable[[list[bool]], tuple[Any, Sequence[bool]]], mask: Sequence[bool]) -> tuple[Any, list]:
    """Repeat `attempt`, adding what it marks to the mask, until the mask stays."""
    mask = list(mask)
    while True:
        result, more = attempt(mask)
        grown = [a or b for a, b in zip(mask, more)]
        if grown == mask:
            return result, mask
        mask = grown


def chosen(values: Iterable[Any], mask: Iterable[bool]) -> list:
    """The values that the mask marks."""
    return [x for x, yes in zip(values, mask) if yes]


def present(values: Iterable[Any]) -> list:
    """The values that are not None."""
    return [x for x in values if x is not None]


def positions(mask: Iterable[bool]) -> list[int]:
    """The indices at which a mask is set."""
    return [i for i, yes in enumerate(mask) if yes]


def placed(values: Iterable[Any], mask: Iterable[bool]) -> list:
    """The inverse of `chosen`, with None where the mask is not set."""
    values = iter(values)
    return [next(values) if yes else None for yes in mask]


def cut(values: Sequence[Any], *counts: int) -> list[list]:
    """Split a sequence into pieces of these lengths, and the rest."""
    parts, start = [], 0
    for n in counts:
        parts.append(list(values[start : start + n]))
        start += n
    return [*parts, list(values[start:])]


def prune_tape(tape: Tape, effects: bool = True) -> Tape:
    """Eliminate dead code, also in the bodies of equations.

    Equations with an effect are kept, unless `effects` is False because the effect happened elsewhere.
    """
    return with_equations(tape, needed_equations(tape.equations, tape.outputs, effects=effects)[0])


def needed_equations(
    equations: Sequence[Equation], outputs: Iterable[Atom], given: Container[Var] = (), effects: bool = False
) -> tuple[list[Equation], set[Var]]:
    """The equations `outputs` need if some values are `given`; all names in them.

    They are for recomputation and have no effects, unless `effects` keeps the equations that have one.
    """
    needed = {a for a in outputs if isinstance(a, Var)}
    kept = []
    for eqn in reversed(equations):
        used = [v in needed and v not in given for v in eqn.outputs]
        if any(used) or (effects and has_effects(eqn)):
            if not effects:
                eqn = without_effects(eqn)
            if eqn.primitive.is_higher_order or not all(used):
                eqn = eqn.primitive.without_unused_results(eqn, used)
            kept.append(eqn)
            needed.update(a for a in eqn.inputs if isinstance(a, Var))
    return kept[::-1], needed


def names_used(tape: Tape) -> set[Var]:
    """The names that equations or outputs use."""
    return {a for atoms in [tape.outputs, *[e.inputs for e in tape.equations]] for a in atoms if isinstance(a, Var)}


def depends(tape: Tape, marked: Sequence[bool]) -> list[bool]:
    """Which outputs depend on the marked inputs."""
    found = set(chosen(tape.inputs, marked))
    for eqn in tape.equations:
        if any(isinstance(a, Var) and a in found for a in eqn.inputs):
            found.update(eqn.outputs)
    return [isinstance(a, Var) and a in found for a in tape.outputs]


def merge(closed: Sequence[tuple[Tape, Sequence[tuple[Any, Value]]]]) -> tuple[list[Tape], list[Value]]:
    """Make tapes that close over different values take all of these values.

    Each tape comes with a pair of a key and a value for each of its first inputs; equal keys mean equal values. Returns
    the tapes and the values.
    """
    values = {key: x for _, pairs in closed for key, x in pairs}
    tapes = []
    for tape, pairs in closed:
        own = {key: var for (key, _), var in zip(pairs, tape.inputs)}
        shared = [own.get(key) or Var(typeof(x)) for key, x in values.items()]
        tapes.append(Tape([*shared, *tape.inputs[len(pairs) :]], tape.equations, tape.outputs))
    return tapes, list(values.values())


def by_id(closed: tuple[Tape, list[Value]]) -> tuple[Tape, list[tuple[Any, Value]]]:
    return closed[0], [(id(x), x) for x in closed[1]]


class PartialEval:
    """A tape split into a known part and a part linear in its `linear` inputs.

    The known part is on the tape of `stage`; `linear_tape` gives the linear part, once the caller has decided which
    outputs belong to it.
    """

    def __init__(self, tape: Tape, linear: Sequence[bool]):
        self.stage = Stage(current_interpreter())
        self.recorder = Linearize(self.stage)
        values = [(self.recorder if yes else self.stage).new_input(t) for t, yes in zip(tape.in_types, linear)]
        with running(self.stage), transforming(self.recorder):
            self.outs = tape(*values)
        self.is_linear = [self.recorder.owns(x) for x in self.outs]
        self.number = dict(zip(self.stage.inputs, positions(not yes for yes in linear)))

    def linear_tape(self, outputs: Sequence[bool]) -> tuple[Tape, list[Value]]:
        """The tape of the chosen outputs, and its first inputs' values, the residuals."""
        return self.recorder.tape(chosen(self.outs, outputs)).close()

    def input_number(self, x: Value) -> int | None:
        """Which input of the original tape a residual is; None if it is not an input."""
        return self.number.get(x.variable) if self.stage.owns(x) else None

    def known_tape(self, outputs: Sequence[Value]) -> tuple[Tape, list[Value]]:
        """The closed tape of known outputs and residuals; a type stands for zeros."""
        with transforming(self.stage):
            values = [zeros(x) if isinstance(x, ShapedArray) else entered(x) for x in outputs]
            return prune_tape(self.stage.tape(values)).close()

    def invariant(self, count: int) -> set[Var]:
        """The names on `stage`'s tape that depend on the first `count` inputs alone."""
        found = {v for v, i in self.number.items() if i < count}
        for eqn in self.stage.equations:
            if all(a in found for a in eqn.inputs if isinstance(a, Var)):
                found.update(eqn.outputs)
        return found

    def before(self, count: int, args: Sequence[Value], wanted: list[Var]) -> list[Value]:
        """Compute `wanted`, names in `invariant(count)`, from the operands `args`."""
        if not wanted:
            return []
        inputs = {v: args[i] for v, i in self.number.items() if i < count}
        return prune_tape(Tape(list(inputs), self.stage.equations, wanted), effects=False)(*inputs.values())


@dataclass
class LinearPart:
    """The linear equation that remains once the known part has run."""

    operands: list[tuple[int | None, Value]]  # each with its index among the original operands, or None
    params: dict
    results: list[int]  # the index of each result among the original results


# ---------------------------------------------------------------- operations with tapes for parameters


class BodyOperation(Primitive):
    """An operation with tapes as parameters, whose types its operands match exactly.

    `jvp_operands(outside, primals, tangents, params)` and `batch_operands(outside, args, batched, params)`
        differentiate and vectorise it, for the interpreter `outside`, if at least one operand is active.
    `split(args, linear, params)`
        runs the part that does not depend on the `linear` operands (which may be types, or names on a linear
        tape), and returns a dict of known results by index, and the LinearPart.
    """

    is_higher_order = True
    multiple_results = True
    operands_agree = False

    def stage_body(self, outside: Stage, args: Sequence[Value], params: dict) -> list[Value]:
        return outside.record(self, args, params)

    def jvp_body(self, outside: JVP, args: Sequence[Value], params: dict) -> list[Value]:
        primals, tangents = outside.split(args)
        if all(t is None for t in tangents):
            return self.bind(*primals, **params)
        outs, out_tangents = self.jvp_operands(outside, primals, tangents, params)
        return [outside.join(x, t) for x, t in zip(outs, out_tangents)]

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        linear = [outside.owns(x) for x in args]
        if not any(linear):
            return self.bind(*args, **params)
        outs, part = self.split(args, linear, params)
        if part.results:
            operands = fit([x for _, x in part.operands], self.operand_types(part))
            outs = {**dict(zip(part.results, outside.record(self, operands, part.params))), **outs}
        return [outs[i] for i in range(len(outs))]

    def batch_body(self, outside: Batch, args: Sequence[Value], params: dict) -> list[Value]:
        batched = [outside.owns(x) for x in args]
        return self.batch_operands(outside, args, batched, params) if any(batched) else self.bind(*args, **params)

    def bodies(self, count: int, params: dict) -> dict[str, list[int]] | None:
        """The operands (by index) that each body takes; the last body gives the results.

        None if a body takes elements of operands.
        """
        return None

    def _check_operands(self, types: Sequence[Any], expected: Sequence[ShapedArray]) -> None:
        types = [typeof(t) for t in types]
        if types != list(expected):
            raise TypeError(f"{self.name}: its body takes {list(expected)}, but the operands have the types {types}")


def batched_type(t: ShapedArray, size: int, yes: bool) -> ShapedArray:
    return t.update(shape=(size, *t.shape)) if yes else t


def in_front(x: Value, size: int, batch: Batch | None = None) -> Value:
    """Move the batch axis to the front; broadcast what `batch` does not own."""
    if batch is not None and batch.owns(x):
        return moveaxis(x.value, x.axis, 0)
    return broadcast_to(expand_dims(x, 0), (size, *typeof(x).shape))


def run_batched(outside: Batch, tape: Tape, values: Sequence[Value], batched: Sequence[bool]):
    """Run a tape on values batched along axis 0: results, and which are batched."""
    inside = Batch(current_interpreter(), outside.size_of_batch, outer=outside)
    with transforming(inside):
        outs = tape(*[BatchTracer(inside, x, 0) if b else x for x, b in zip(values, batched)])
    out_batched = [inside.owns(x) for x in outs]
    return [in_front(x, 0, inside) if b else x for x, b in zip(outs, out_batched)], out_batched


def filled(values: Sequence[Value], batched: Sequence[bool], wanted: Sequence[bool], size: int) -> list[Value]:
    """Broadcast values along a leading batch axis wherever one is wanted."""
    return [in_front(x, size) if yes and not b else x for x, b, yes in zip(values, batched, wanted)]


def concrete_value(x: Value, use: str) -> Any:
    return x.concrete(use) if isinstance(x, Tracer) else x
