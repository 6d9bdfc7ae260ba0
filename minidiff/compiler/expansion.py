"""Operations written out as those that loops compute: activations, softmax, variances.

Such an operation is one line of a tape, with a derivative of its own, and `decomposed` says what it is composed of.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from minidiff.compiler.buffers import IN_PLACE
from minidiff.compiler.kernels import MIN_ELEMENTS
from minidiff.compiler.lowering import DTYPES
from minidiff.compiler.simplify import key_part
from minidiff.core.interpreter import EVALUATE, transforming
from minidiff.core.tape import Atom, Equation, Stage, Tape, with_equations
from minidiff.core.types import Var, typeof
from minidiff.values.dtypes import is_scalar_constant


def expand_operations(tape: Tape, excluded: Container[Var] = ()) -> Tape:
    """Write out the operations on large arrays of floating-point numbers, but those with results in `excluded`.

    Two operations may have a part in common, as `logsumexp` and the softmax in its derivative have. It is written once.
    """
    expanded = {eqn for eqn in tape.equations if _expands(eqn, excluded)}
    if not expanded:
        return tape
    names: dict[Var, Atom] = {}
    known: dict[Any, Atom] = {}

    def parts(eqn: Equation) -> Iterator[Equation]:
        """Yield the equations of an operation, except those that are known, which get other names."""
        (out,), body = eqn.outputs, _body_of(eqn)
        names.update(zip(body.inputs, eqn.inputs))
        for e in body.equations:
            inputs = [names.get(a, a) if isinstance(a, Var) else a for a in e.inputs]
            key = e.primitive, *map(_key_of, inputs), key_part(e.params)
            (v,) = e.outputs
            is_result = v is body.outputs[0]
            if key in known and not is_result:
                names[v] = known[key]
                continue
            names[v] = out if is_result else v
            known.setdefault(key, names[v])
            part = Equation(e.primitive, inputs, e.params, [names[v]], eqn.source)
            yield from parts(part) if _expands(part, excluded) else [part]

    return with_equations(tape, [e for eqn in tape.equations for e in (parts(eqn) if eqn in expanded else [eqn])])


def _expands(eqn: Equation, excluded: Container[Var]) -> bool:
    """Return True if an operation is to be written out; not if it writes into an operand, which takes less time."""
    if eqn.primitive.decomposed is None or eqn.primitive in IN_PLACE or eqn.outputs[0] in excluded:
        return False
    t = typeof(eqn.inputs[0])
    return t.size >= MIN_ELEMENTS and t.dtype.kind == "f" and t.dtype in DTYPES


def _body_of(eqn: Equation) -> Tape:
    """Record what an operation is composed of."""
    stage = Stage(EVALUATE, name="optimize")
    inputs = [stage.new_input(typeof(a)) for a in eqn.inputs]
    with transforming(stage):
        return stage.tape([eqn.primitive.decomposed(*inputs, **eqn.params)])


def _key_of(a: Atom) -> Any:
    return key_part(a) if is_scalar_constant(a) else id(a)
