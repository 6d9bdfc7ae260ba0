"""Properties of elementwise derivative rules, found by recording them: what they read, and as one Python expression.

For speed alone: without the expressions, the rules themselves are applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from minidiff.core import ShapedArray, running, typeof
from minidiff.tape import Recorder, Tape

if TYPE_CHECKING:
    from minidiff.ops.base import Differentiable


class _Rule(Recorder):
    """Record a rule as it is written."""

    interpret = Recorder.record


def _tape_of(rule: Callable, dtypes: Sequence[Any]) -> Tape:
    """Record a rule on scalars of these dtypes, without the equations that its result does not need."""
    recorder = _Rule(None)
    inputs = [recorder.new_input(ShapedArray((), dtype)) for dtype in dtypes]
    with running(recorder):
        tape = recorder.tape([rule(*inputs)])
    needed, equations = {id(a) for a in tape.outputs}, []
    for eqn in reversed(tape.equations):
        if any(id(v) in needed for v in eqn.outputs):
            needed.update(map(id, eqn.inputs))
            equations.insert(0, eqn)
    return Tape(tape.inputs, equations, tape.outputs)


def _tapes_of(rule: Callable, *dtypes: Sequence[Any]) -> list[Tape]:
    """Record a rule on scalars of each choice of dtypes that it accepts."""
    tapes = []
    for choice in dtypes:
        with contextlib.suppress(TypeError):
            tapes.append(_tape_of(rule, choice))
    return tapes


def arguments_read(rule: Callable, count: int) -> set[int]:
    """Positions of the arguments that a derivative rule uses, read from its tape."""
    used: set[int] = set()
    for tape in _tapes_of(rule, [float] * count, [complex] * count):
        atoms = {id(a) for atoms in (*(e.inputs for e in tape.equations), tape.outputs) for a in atoms}
        used |= {i for i, v in enumerate(tape.inputs) if id(v) in atoms}
    return used


def compiled_cotangent(primitive: Differentiable, i: int, count: int, tangents: int) -> Callable | None:
    """Compile an elementwise primitive's cotangent in operand i to one function.

    Return None where the rule has cases (real or complex, a literal or a value) or parameters.
    """
    numbers = {2 + j: 1.0 + 0.123 * (j + 1) for j in range(count) if j != i}
    rule = _cotangent_rule(primitive, i, {})
    functions: dict[str, Any] = {}
    names = {repr(number): f"x{k}" for k, number in numbers.items()}
    reals, complexes = [float] * (2 + count), [complex] * (2 + count)
    tapes = _tapes_of(rule, reals, complexes)
    sources = {_expression(tape, functions, {}) for tape in tapes}
    sources |= {
        _expression(tape, functions, names) for tape in _tapes_of(_cotangent_rule(primitive, i, numbers), reals)
    }
    if len(sources) != 1 or None in sources:
        return None
    source, arguments = sources.pop(), [f"x{k}" for k in range(2 + count)]
    frugal = _expression(tapes[0], functions, {}, whole=3 if count == 1 else 2)
    source = f"{frugal} if x0.shape else {source}" if ":=" in frugal else source
    arguments += [f"t{k}" for k in range(tangents)]
    place = f"{__file__}: a cotangent of {primitive.name}"  # tracebacks and warnings then name a file of the library
    return eval(compile(f"lambda {', '.join(arguments)}: {source}", place, "eval"), functions)


def _cotangent_rule(primitive: Differentiable, i: int, numbers: dict[int, float]) -> Callable:
    """The cotangent of operand i as a function of `(ct, out, *operands)`, some of which are numbers."""

    def rule(*args: Any) -> Any:
        ct, out, *operands = [numbers.get(k, x) for k, x in enumerate(args)]
        return primitive.cotangent(i, ct, out, operands, typeof(operands[i]), {})

    return rule


_SIGNS = {numpy.add: " + ", numpy.subtract: " - ", numpy.multiply: " * ", numpy.divide: " / "}


def _expression(tape: Tape, functions: dict[str, Any], names: dict[str, str], whole: int = 0) -> str | None:
    """The result of a tape as one Python expression of x0, x1, …

    The functions that it calls are added to `functions`.

    A constant whose text is in `names` is replaced by that name. The first `whole` arguments have the shape of the
    result, and so do values computed from them: their buffers are reused once they have been read.
    """
    texts = {v: f"x{k}" for k, v in enumerate(tape.inputs)}
    wide, made = set(tape.inputs[:whole]), set()
    for k, eqn in enumerate(tape.equations):
        uses = sum(a is v for e in tape.equations for a in e.inputs for v in eqn.outputs)
        if eqn.params or eqn.primitive.impl is None or uses > 1:
            return None
        functions[eqn.primitive.name] = impl = eqn.primitive.impl
        sign = _SIGNS.get(impl)
        arguments = [texts[a] if a in texts else names.get(repr(a), repr(a)) for a in eqn.inputs]
        if "d" * len(arguments) + "->d" in getattr(impl, "types", ()):
            free = [i for i, a in enumerate(eqn.inputs) if a in made and a.type == eqn.outputs[0].type]
            if free:
                arguments[free[0]] = f"(y{k} := {arguments[free[0]]})"
                arguments.append(f"y{k}")
                sign = None
        if not wide.isdisjoint(eqn.inputs):
            wide.update(eqn.outputs)
            made.update(eqn.outputs)
        texts[eqn.outputs[0]] = (
            f"{eqn.primitive.name}({', '.join(arguments)})" if sign is None else f"({sign.join(arguments)})"
        )
    (result,) = tape.outputs
    return texts.get(result)
