"""Reverse mode: linearize, then transpose.

To linearize a function is to run it in forward mode, on tangents that are variables on a tape: that computes the primal
values, and records what is linear in the tangents. The backward pass walks this tape from its end and transposes each
equation. So reverse mode needs no rules of its own, and every function that can be linearized can be differentiated in
reverse, to any order.

A tape that is linear in some of its inputs alone is transposed in two steps: evaluate the equations that do not depend
on these, then run the backward pass of the others (`transpose_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minidiff.core.forward import JVP, push_forward
from minidiff.core.interpreter import current_interpreter, running
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import ranks
from minidiff.core.tape import Atom, ConsumedEquations, Equation, Recorder, Tape, evaluate_equation
from minidiff.core.tracer import Value
from minidiff.core.types import Var, typeof
from minidiff.errors.location import transposes
from minidiff.values.settings import restores_settings


class Linearize(Recorder):
    """Record operations on tangents; pass all others to the interpreter below."""

    name = "the linear part of a derivative"

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        if primitive.is_higher_order:
            with running(self.below):
                return primitive.linearize_body(self, args, params)
        if any(map(self.owns, args)):
            return self.record(primitive, args, params)
        return self.below.process(primitive, args, params)


def linearize_flat(
    f: Callable, primals: Sequence[Value], active: Sequence[bool], origin: tuple[str, str] | None = None
) -> tuple[list[Value], Tape]:
    """Return the results of `f`, and its derivative in the active primals as a linear tape.

    An output of the tape is None if the result does not depend on an active primal. `origin` names the transformation
    and the function in errors.
    """
    recorder = Linearize(current_interpreter())
    forward = JVP(recorder)
    forward.origin = recorder.origin = origin
    recorder.below.watch_sweep(forward)
    tangents = [recorder.new_input(typeof(p)) if is_active else None for p, is_active in zip(primals, active)]
    results, out_tangents = push_forward(f, primals, tangents, forward)
    recorder.end()
    return results, Tape(recorder.inputs, recorder.equations, [recorder.variable_of(t) for t in out_tangents])


# ---------------------------------------------------------------- transposition


class Cotangents(dict[Var, Value]):
    """The cotangents of variables: for each, the sum over the uses that the backward pass has reached."""

    def add_all(self, atoms: Sequence[Atom], cts: Sequence[Value | None]) -> None:
        for a, ct in zip(atoms, cts):
            if isinstance(a, Var) and ct is not None:
                ct = ranks.cast_cotangent(ct, a.type)
                self[a] = self[a] + ct if a in self else ct


@transposes
def backward_pass(tape: Tape, cotangents: Sequence[Value | None]) -> list[Value | None]:
    """Map cotangents of a linear tape's outputs to those of its inputs. A zero cotangent is None."""
    sums = Cotangents()
    sums.add_all(tape.outputs, cotangents)
    for equation in reversed(tape.equations):
        sums.add_all(equation.inputs, transpose_equation(equation, sums))
    return [sums.get(v) for v in tape.inputs]


@transposes
def transpose_equation(equation: Equation, sums: dict[Var, Value]) -> Sequence[Value | None]:
    """Take the cotangents of an equation's results, and map them to those of its operands. None is zero."""
    cts, primitive = [sums.pop(v, None) for v in equation.outputs], equation.primitive
    if all(ct is None for ct in cts):
        return [None] * len(equation.inputs)
    ct = cts if primitive.multiple_results else cts[0]
    operands = [a.type if isinstance(a, Var) else a for a in equation.inputs]
    return current_interpreter().apply_rule(primitive.transpose, primitive, ct, operands, equation.params)


# ---------------------------------------------------------------- running a backward pass


class Engine:
    """The implementations in use: the functions above, or others with the same results that are set here."""

    linearize_flat = staticmethod(linearize_flat)
    backward_pass = staticmethod(backward_pass)


engine = Engine()


@restores_settings
def run_backward_pass(tape: Tape, cts: Sequence[Value | None], is_whole: bool = False) -> list[Value | None]:
    """Run the backward pass of a linear tape by the installed engine; `ranks` runs it in the body of a `shard_map`.

    `is_whole` says that it is the whole backward pass of a transformation: there, gradients may share an all-reduce.
    """
    if current_interpreter().scope is None:
        return engine.backward_pass(ranks.share_sums(tape), cts)
    return ranks.backward_pass(engine.backward_pass, tape, cts, is_whole)


def transpose_values(
    tape: Tape, linear: Sequence[bool], values: Sequence[Value], cts: Sequence[Value | None]
) -> list[Value | None]:
    """Map cotangents of a tape's outputs to those of its `linear` inputs. A zero cotangent is None.

    `values` are the values of all inputs, ignored where linear.
    """
    return run_backward_pass(extract_linear_part(tape, linear, values), cts)


def extract_linear_part(tape: Tape, linear: Sequence[bool], values: Sequence[Value]) -> Tape:
    """Evaluate the equations that do not depend on linear inputs; return the others, as a linear tape.

    The values that the others need are constants on it, and all other values are freed after their last use.
    """
    linear_vars = {v for v, is_linear in zip(tape.inputs, linear) if is_linear}
    inputs = [v for v in tape.inputs if v in linear_vars]
    env = {v: x for v, x in zip(tape.inputs, values) if v not in linear_vars}
    known, remaining = [], []
    needed: set[Var] = set()
    for eqn in tape.equations:
        if any(isinstance(a, Var) and a in linear_vars for a in eqn.inputs):
            linear_vars.update(eqn.outputs)
            remaining.append(eqn)
            needed.update(a for a in eqn.inputs if isinstance(a, Var))
        else:
            known.append(eqn)
    last = {a: i for i, eqn in enumerate(known) for a in (*eqn.inputs, *eqn.outputs) if isinstance(a, Var)}
    for i, eqn in enumerate(known):
        evaluate_equation(eqn, env)
        for a in (*eqn.inputs, *eqn.outputs):
            if isinstance(a, Var) and last[a] == i and a not in needed:
                env.pop(a, None)

    equations = [substitute(eqn, env) for eqn in remaining]
    outputs = [a if isinstance(a, Var) and a in linear_vars else None for a in tape.outputs]
    return Tape(inputs, ConsumedEquations(equations), outputs)


def substitute(equation: Equation, values: dict[Var, Atom]) -> Equation:
    """Return the equation with these values in place of variables."""
    inputs = [values.get(a, a) if isinstance(a, Var) else a for a in equation.inputs]
    return Equation(equation.primitive, inputs, equation.params, equation.outputs, equation.source)
