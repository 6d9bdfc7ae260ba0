"""Fewer collectives for the same result: what a tape with collectives may be simplified to.

================================== ======================
psum of psum                       one psum over both axes
pbroadcast of pbroadcast           one pbroadcast
psum of pbroadcast, along one axis a multiplication
psum + psum, over the same axes    the psum of the sum
================================== ======================
"""

from __future__ import annotations

from typing import Any

from collectives.ops import pbroadcast_p, psum_p
from minidiff.ops.elementwise import add, multiply
from minidiff.optimize import Program, simplifies
from minidiff.tape import Equation, Var


@simplifies(psum_p, pbroadcast_p)
def _twice(program: Program, eqn: Equation) -> Equation | None:
    before = program.made_by(eqn.inputs[0], eqn.primitive)
    if before is None or program.uses[before.outputs[0]] > 1:
        return None
    params = {
        "axes": (*before.params["axes"], *eqn.params["axes"]),
        "size": before.params["size"] * eqn.params["size"],
    }
    return Equation(eqn.primitive, before.inputs, params, eqn.outputs)


@simplifies(psum_p)
def _sum_of_copies(program: Program, eqn: Equation) -> Equation | None:
    before = program.made_by(eqn.inputs[0], pbroadcast_p)
    if before is None or set(before.params["axes"]) != set(eqn.params["axes"]):
        return None
    return Equation(multiply.primitive, [before.inputs[0], eqn.params["size"]], {}, eqn.outputs)


@simplifies(add.primitive)
def _sum_of_sums(program: Program, eqn: Equation) -> Any:
    sums = [program.made_by(a, psum_p) for a in eqn.inputs]
    if None in sums or sums[0] is sums[1] or sums[0].params != sums[1].params:
        return None
    (x,), (y,) = sums[0].inputs, sums[1].inputs
    if not (isinstance(x, Var) and isinstance(y, Var) and x.type == y.type):
        return None
    if any(program.uses[s.outputs[0]] > 1 for s in sums) or eqn.outputs[0].type.shape != x.type.shape:
        return None
    total = program.add(add.primitive, [x, y], {})
    return Equation(psum_p, [total], sums[0].params, eqn.outputs, sums[0].source)
