"""Reverse mode: linearize, then transpose.

To linearize a function is to run it in forward mode, on tangents that are variables on a tape: that computes the primal
values, and records what is linear in the tangents. The backward pass walks this tape from its end and transposes each
equation. So reverse mode needs no rules of its own, and every function that can be linearized can be differentiated in
reverse, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minidiff.core.forward import JVP, instantiate, push_forward
from minidiff.core.interpreter import current_interpreter, current_scope, restore_interpreter, running
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import ranks, reshard_cotangent
from minidiff.core.scope import checking
from minidiff.core.tape import Atom, Equation, Recorder, Tape
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.diagnostics.location import transposes


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
    tangents = [recorder.new_input(typeof(p)) if yes else None for p, yes in zip(primals, active)]
    results, out_tangents = push_forward(f, primals, tangents, forward)
    recorder.end()
    return results, Tape(recorder.inputs, recorder.equations, [recorder.variable_of(t) for t in out_tangents])


# ---------------------------------------------------------------- transposition


class Cotangents(dict[Var, Value]):
    """The cotangents of variables as far as they are known: for each, the sum over its uses."""

    def add(self, atoms: Sequence[Atom], cts: Sequence[Value | None]) -> None:
        for a, ct in zip(atoms, cts):
            if isinstance(a, Var) and ct is not None:
                ct = ranks.cast_cotangent(ct, a.type)
                self[a] = self[a] + ct if a in self else ct


@transposes
def backward_pass(tape: Tape, cotangents: Sequence[Value | None]) -> list[Value | None]:
    """Map cotangents of a linear tape's outputs to those of its inputs. A zero cotangent is None."""
    known = Cotangents()
    known.add(tape.outputs, cotangents)
    for equation in reversed(tape.equations):
        known.add(equation.inputs, transpose_equation(equation, known))
    return [known.get(v) for v in tape.inputs]


@transposes
def transpose_equation(equation: Equation, known: dict[Var, Value]) -> Sequence[Value | None]:
    """Take the cotangents of an equation's results, and map them to those of its operands. None is zero."""
    cts, primitive = [known.pop(v, None) for v in equation.outputs], equation.primitive
    if all(ct is None for ct in cts):
        return [None] * len(equation.inputs)
    ct = cts if primitive.multiple_results else cts[0]
    operands = [a.type if isinstance(a, Var) else a for a in equation.inputs]
    return current_interpreter().apply_rule(primitive.transpose, primitive, ct, operands, equation.params)


# ---------------------------------------------------------------- which engine


class Engine:
    """What computes derivatives: the functions above, or others with the same results that are set here."""

    linearize_flat = staticmethod(linearize_flat)
    backward_pass = staticmethod(backward_pass)


engine = Engine()


@restore_interpreter
def walk_back(tape: Tape, cts: Sequence[Value | None]) -> list[Value | None]:
    """Run the backward pass by the installed engine.

    In the body of a `shard_map`, count it, and let its operations insert their casts, as in any derivative rule.
    """
    scope = current_scope()
    if scope is None:
        return engine.backward_pass(tape, cts)
    scope.transposed += 1
    with checking(scope, False):
        return engine.backward_pass(tape, cts)


def pull_back(tape: Tape, cts: Sequence[Value | None]) -> list[Value | None]:
    """As `walk_back`, for a whole transformation: in a typed body, several gradients share an all-reduce."""
    scope = current_scope()
    in_body = scope is not None and scope.typed
    return ranks.backward_pass(walk_back, tape, cts) if in_body else walk_back(tape, cts)


def as_cotangent(ct: Value | None, type: ShapedArray) -> Value:
    """A cotangent of this type: None is zeros, and a sharded array is resharded."""
    ready = ct is not None and type.sharding is None
    return ct if ready else reshard_cotangent(instantiate(ct, type), type)
