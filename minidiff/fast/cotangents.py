"""Differential rules of elementwise operations, compiled: one Python expression for each cotangent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core.tape import Tape
from minidiff.core.types import Var, typeof
from minidiff.ops.base import Differentiable
from minidiff.transforms.recording import scalar_tapes


def compile_cotangent(primitive: Differentiable, i: int, count: int, tangents: int) -> Callable | None:
    """Compile an elementwise primitive's cotangent in operand i to one function.

    Return None where the rule has cases (real or complex, a literal or a value), parameters, or conversions of a dtype.
    """
    numbers = {2 + j: 1.0 + 0.123 * (j + 1) for j in range(count) if j != i}

    def rule(*args):
        ct, out, *operands = args
        return primitive.cotangent(i, ct, out, operands, typeof(operands[i]), {})

    def rule_of_numbers(*args):
        return rule(*[numbers.get(k, x) for k, x in enumerate(args)])

    functions: dict[str, Any] = {}
    names = {repr(number): f"x{k}" for k, number in numbers.items()}
    tapes = scalar_tapes(rule, 2 + count, (float, numpy.float32, complex))
    sources = {_expression(tape, functions, {}) for tape in tapes}
    sources |= {_expression(tape, functions, names) for tape in scalar_tapes(rule_of_numbers, 2 + count)[:1]}
    if len(sources) != 1 or None in sources:
        return None
    source, arguments = sources.pop(), [f"x{k}" for k in range(2 + count)]
    frugal = _expression(tapes[0], functions, {}, whole=3 if count == 1 else 2)
    source = f"{frugal} if x0.shape else {source}" if ":=" in frugal else source
    arguments += [f"t{k}" for k in range(tangents)]
    place = f"{__file__}: a cotangent of {primitive.name}"  # tracebacks and warnings then name a file of the library
    return eval(compile(f"lambda {', '.join(arguments)}: {source}", place, "eval"), functions)


_SIGNS = {numpy.add: " + ", numpy.subtract: " - ", numpy.multiply: " * ", numpy.divide: " / "}


def _expression(tape: Tape, functions: dict[str, Any], names: dict[str, str], whole: int = 0) -> str | None:
    """Return the result of a tape as one Python expression of x0, x1, …

    The functions that it calls are added to `functions`.

    A constant whose text is in `names` is replaced by that name. The first `whole` arguments have the shape of the
    result, and so do values computed from them: their buffers are reused once they have been read.
    """
    texts = {v: f"x{k}" for k, v in enumerate(tape.inputs)}
    whole_size: set[Var] = set(tape.inputs[:whole])
    computed: set[Var] = set()
    for k, eqn in enumerate(tape.equations):
        uses = sum(a is v for e in tape.equations for a in e.inputs for v in eqn.outputs)
        if eqn.params or eqn.primitive.impl is None or uses > 1:
            return None
        impl = eqn.primitive.impl
        name = next((n for n, f in functions.items() if f is impl), f"f{len(functions)}")
        functions[name] = impl
        sign = _SIGNS.get(impl)
        arguments = [texts[a] if a in texts else names.get(repr(a), repr(a)) for a in eqn.inputs]
        if "d" * len(arguments) + "->d" in getattr(impl, "types", ()):
            free = [i for i, a in enumerate(eqn.inputs) if a in computed and a.type == eqn.outputs[0].type]
            if free:
                arguments[free[0]] = f"(_y{k} := {arguments[free[0]]})"  # y0 and y1 are functions
                arguments.append(f"_y{k}")
                sign = None
        if not whole_size.isdisjoint(eqn.inputs):
            whole_size.update(eqn.outputs)
            computed.update(eqn.outputs)
        texts[eqn.outputs[0]] = f"{name}({', '.join(arguments)})" if sign is None else f"({sign.join(arguments)})"
    (result,) = tape.outputs
    return texts.get(result)
