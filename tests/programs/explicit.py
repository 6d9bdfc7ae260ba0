"""Programs whose pbroadcasts are written by hand: a typed tape of a shard_map, run again operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import minidiff as md
import spmd
from minidiff.control_flow.dead_code import prune_tape
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var


def _explicit(tape: Tape, body: Tape) -> Callable:
    """The function of a tape that is one shard_map with one result, with this body in its place."""
    (equation,) = tape.equations
    places = {v: k for k, v in enumerate(tape.inputs)}
    mapped = spmd.shard_map(
        lambda *blocks: tuple(body(*blocks)),
        mesh=equation.params["mesh"],
        in_specs=equation.params["in_specs"],
        out_specs=equation.params["out_specs"],
        auto_pbroadcast=False,
    )
    return lambda *leaves: mapped(*[leaves[places[a]] if isinstance(a, Var) else a for a in equation.inputs])[0]


def _body(tape: Tape) -> Tape:
    return tape.equations[0].params["body"]


def replayed(f: Callable, *args: Any) -> Callable:
    """`f`, one shard_map with one result, with what is automatic in it written out, in explicit mode."""
    tape = md.make_tape(f)(*args)
    return _explicit(tape, _body(tape))


def without_one(f: Callable, *args: Any) -> Iterator[Callable]:
    """The same, each time with one of the pbroadcasts left out."""
    tape = md.make_tape(f)(*args)
    body = prune_tape(_body(tape))
    for k, eqn in enumerate(body.equations):
        if eqn.primitive.name == "pbroadcast":
            names = {eqn.outputs[0]: eqn.inputs[0]}
            rest = [
                Equation(e.primitive, [_renamed(a, names) for a in e.inputs], e.params, e.outputs)
                for e in (*body.equations[:k], *body.equations[k + 1 :])
            ]
            yield _explicit(tape, Tape(body.inputs, rest, [_renamed(a, names) for a in body.outputs]))


def _renamed(a: Any, names: dict) -> Any:
    return names.get(a, a) if isinstance(a, Var) else a
