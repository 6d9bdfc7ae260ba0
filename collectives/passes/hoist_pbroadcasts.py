"""Hoist pbroadcasts out of loops: their transposes then sum once, after the loop.

The transpose of a `pbroadcast` is a `psum`, so a `pbroadcast` in the body of a loop becomes a psum in each step. In a
linear tape, hoist a `pbroadcast` from the body of a `scan`

- if its operand is a constant of the loop, or computed from constants alone (hoist that computation too);
- if its operand is an element of a scanned array: broadcast the whole array, and scan over the result.

A `pbroadcast` of an input of a `checkpoint` moves before the `checkpoint`. There is one per value and axes. A carry
changes from step to step, so its pbroadcasts stay.

Source: loop-invariant code motion, a standard compiler optimization.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

from collectives.casts import cast_type
from collectives.ops import pbroadcast_p, reduced_p
from minidiff.control_flow.checkpoint import Checkpoint
from minidiff.control_flow.dead_code import needed_equations, used_names
from minidiff.control_flow.loops import scan_p
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.types import Var, typeof
from minidiff.values.lists import split_list

#: The casts that transpose to a `psum`.
HOISTED = (pbroadcast_p, reduced_p)


def hoist_pbroadcasts(tape: Tape) -> Tape:
    """Move pbroadcasts before loops and checkpoints; return the tape itself if no body has one."""
    if not any(map(_has_pbroadcast, tape.equations)):
        return tape
    equations: list[Equation] = []
    names: dict[Var, Var] = {}  # the result of a pbroadcast -> the variable that replaces it
    casts: dict[tuple, Var] = {}  # a value, a cast and its axes -> the result of the only such cast
    views: dict[Var, Equation] = {}

    def cast(x: Var, eqn: Equation) -> Var:
        """Cast `x` as `eqn` does; for a view, cast its base and view that."""
        key = eqn.primitive, frozenset(eqn.params["axes"])
        if (x, *key) not in casts:
            view = views.get(x)
            source = Equation(eqn.primitive, [x], eqn.params, [x], eqn.source) if view is None else view
            operand = x if view is None else cast(view.inputs[0], eqn)
            results = [Var(cast_type(v.type, *key)) for v in source.outputs]
            equations.append(Equation(source.primitive, [operand], source.params, results, source.source))
            casts.update(((v, *key), new) for v, new in zip(source.outputs, results))
        return casts[(x, *key)]

    for eqn in itertools.chain(*map(_hoist, tape.equations)):
        inputs = [_look_up(names, a) for a in eqn.inputs]
        if eqn.primitive in HOISTED and isinstance(inputs[0], Var):
            names[eqn.outputs[0]] = cast(inputs[0], eqn)
            continue
        equations.append(Equation(eqn.primitive, inputs, eqn.params, eqn.outputs, eqn.source))
        if eqn.primitive.is_view and isinstance(inputs[0], Var):
            views.update(dict.fromkeys(eqn.outputs, equations[-1]))
    return Tape(tape.inputs, equations, [_look_up(names, a) for a in tape.outputs])


def _has_pbroadcast(eqn: Equation) -> bool:
    """Return whether the body of a loop or a checkpoint has a pbroadcast."""
    body = _body(eqn)
    return body is not None and any(e.primitive in HOISTED or _has_pbroadcast(e) for e in body.equations)


def _body(eqn: Equation) -> Tape | None:
    body = eqn.params.get("body") if eqn.primitive is scan_p or isinstance(eqn.primitive, Checkpoint) else None
    return body if isinstance(body, Tape) else None


def _hoist(eqn: Equation) -> list[Equation]:
    """Return an equation, preceded by the pbroadcasts that are hoisted out of its body."""
    body = _body(eqn)
    if body is None:
        return [eqn]
    body, loop = hoist_pbroadcasts(body), eqn.primitive is scan_p
    counts = (eqn.params["consts"], eqn.params["carry"]) if loop else (len(eqn.inputs), 0)
    consts, carry, xs = split_list(list(zip(body.inputs, eqn.inputs)), *counts)
    outside: dict[Var, Atom] = dict([*consts, *xs])  # a name of the body -> its value outside
    elements = {v for v, _ in xs}
    hoisted = _names_before_loop(body, consts) if loop else set()
    before, inside = [], []
    for e in body.equations:
        is_cast = e.primitive in HOISTED and isinstance(_look_up(outside, e.inputs[0], None), Var)
        if not is_cast and hoisted.isdisjoint(e.outputs):
            inside.append(e)
            continue
        inputs, types = [_look_up(outside, a) for a in e.inputs], [v.type for v in e.outputs]
        if is_cast:
            types = [cast_type(typeof(inputs[0]), e.primitive, e.params["axes"])]
            if e.inputs[0] in elements:
                elements.add(e.outputs[0])
        results = list(map(Var, types))
        before.append(Equation(e.primitive, inputs, e.params, results, e.source))
        outside.update(zip(e.outputs, results))
    used = used_names(Tape([], inside, body.outputs))
    operands_inside = [(v, a) for v, a in outside.items() if v in used]
    consts, xs = ([(v, a) for v, a in operands_inside if (v in elements) is scanned] for scanned in (False, True))
    operands = [*consts, *carry, *xs]
    params = {**eqn.params, "body": Tape([v for v, _ in operands], inside, body.outputs)}
    if loop:
        params["consts"] = len(consts)
    return [*before, Equation(eqn.primitive, [a for _, a in operands], params, eqn.outputs, eqn.source)]


def _names_before_loop(body: Tape, consts: Collection[tuple[Var, Atom]]) -> set[Var]:
    """Return the names computed from a loop's constants alone that a pbroadcast needs."""
    constant = {v for v, _ in consts}
    traced = {v for v, a in consts if isinstance(a, Var)}  # others are known values, whose cotangents are not summed
    invariant = []
    for eqn in body.equations:
        names = {a for a in eqn.inputs if isinstance(a, Var)}
        if names <= constant and not names.isdisjoint(traced) and not eqn.primitive.is_higher_order:
            invariant.append(eqn)
            constant.update(eqn.outputs)
            traced.update(eqn.outputs)
    wanted = [eqn.inputs[0] for eqn in invariant if eqn.primitive in HOISTED]
    return {v for eqn in needed_equations(invariant, wanted)[0] for v in eqn.outputs}


def _look_up(names: dict[Var, Atom], a: Atom, *otherwise: Atom) -> Atom:
    return names.get(a, *(otherwise or (a,))) if isinstance(a, Var) else a
