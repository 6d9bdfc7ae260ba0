"""Side effects of equations, such as prints and callbacks: dead code with them is kept, and recomputed without them."""

from __future__ import annotations

from minidiff.core.tape import Equation, Tape


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
