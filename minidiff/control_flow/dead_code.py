"""Dependencies between equations, dead-code elimination, and side effects.

Dead code with a side effect, such as a print or a callback, is kept; recomputed, it has no effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from minidiff.core.tape import Atom, Equation, Tape, with_equations
from minidiff.core.types import Var
from minidiff.values.lists import select


def prune_tape(tape: Tape, effects: bool = True) -> Tape:
    """Eliminate dead code, also in the bodies of equations.

    Equations with an effect are kept, unless `effects` is False because the effect happened elsewhere.
    """
    return with_equations(tape, needed_equations(tape.equations, tape.outputs, effects=effects)[0])


def needed_equations(
    equations: Sequence[Equation], outputs: Iterable[Atom], known: Container[Var] = (), effects: bool = False
) -> tuple[list[Equation], set[Var]]:
    """Return the equations that `outputs` need if some values are `known`, and all names in them.

    They are for recomputation and have no effects, unless `effects` keeps the equations with an effect.
    """
    needed = {a for a in outputs if isinstance(a, Var)}
    remaining = []
    for eqn in reversed(equations):
        used = [v in needed and v not in known for v in eqn.outputs]
        if any(used) or (effects and has_effects(eqn)):
            if not effects:
                eqn = without_effects(eqn)
            if eqn.primitive.is_higher_order or not all(used):
                eqn = eqn.primitive.without_unused_results(eqn, used)
            remaining.append(eqn)
            needed.update([a for a in eqn.inputs if isinstance(a, Var)])
    return remaining[::-1], needed


def with_used_results(
    eqn: Equation, used: Sequence[bool], per_operand: Sequence[str] = (), per_result: Sequence[str] = ()
) -> Equation:
    """Drop unused results of a body that takes the operands unchanged, and the operands that only they need.

    `per_operand` and `per_result` name the parameters with one entry for each.
    """
    params, body = eqn.params, eqn.params["body"]
    tape = prune_tape(Tape(body.inputs, body.equations, select(body.outputs, used)))
    names = used_names(tape)
    used_inputs = [v in names for v in body.inputs]
    masks = {**dict.fromkeys(per_operand, used_inputs), **dict.fromkeys(per_result, used)}
    params = {**params, **{name: tuple(select(params[name], mask)) for name, mask in masks.items()}}
    params["body"] = Tape(select(body.inputs, used_inputs), tape.equations, tape.outputs)
    return Equation(eqn.primitive, select(eqn.inputs, used_inputs), params, select(eqn.outputs, used), eqn.source)


def count_uses(tape: Tape) -> Counter[Var]:
    """Count how often equations and outputs use each name."""
    return Counter(
        a for atoms in [tape.outputs, *[e.inputs for e in tape.equations]] for a in atoms if isinstance(a, Var)
    )


def used_names(tape: Tape) -> set[Var]:
    """Return the names that equations or outputs use."""
    return {*count_uses(tape)}


def dependents(equations: Sequence[Equation], names: Iterable[Var]) -> set[Var]:
    """Return these names, and those of all results that depend on them."""
    marked = set(names)
    for eqn in equations:
        if any(isinstance(a, Var) and a in marked for a in eqn.inputs):
            marked.update(eqn.outputs)
    return marked


def depends_on_marked(tape: Tape, marked: Sequence[bool]) -> list[bool]:
    """Return whether each output depends on a marked input."""
    names = dependents(tape.equations, select(tape.inputs, marked))
    return [isinstance(a, Var) and a in names for a in tape.outputs]


# ---------------------------------------------------------------- side effects


def has_effects(eqn: Equation) -> bool:
    """Whether an equation or one in its bodies has a side effect, so must be kept."""
    return eqn.primitive.has_effect or any(has_effects(e) for body in eqn.bodies for e in body.equations)


def without_effects(eqn: Equation) -> Equation:
    """Remove side effects from an equation's bodies, to recompute it."""
    if not has_effects(eqn):
        return eqn
    params = dict(eqn.params)
    for name, body in params.items():
        if isinstance(body, Tape):
            equations = [without_effects(e) for e in body.equations if not e.primitive.has_effect]
            params[name] = Tape(body.inputs, equations, body.outputs)
    return Equation(eqn.primitive, eqn.inputs, params, eqn.outputs, eqn.source)
