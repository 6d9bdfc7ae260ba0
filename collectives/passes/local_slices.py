"""Fewer gathers: what one inlined `shard_map` gathers, the next one slices."""

from __future__ import annotations

from collectives.ops import all_gather_invariant_p
from minidiff.compiler.simplify import Program
from minidiff.core.tape import Atom, Equation


def local_slice_of_gathered(program: Program, eqn: Equation) -> Atom | None:
    """Take the block itself for the local slice of what was gathered from it."""
    before = program.made_by(eqn.inputs[0], all_gather_invariant_p)
    if before is None or any(before.params[k] != eqn.params[k] for k in ("axes", "axis", "tiled")):
        return None
    return before.inputs[0]
