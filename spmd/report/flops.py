"""Floating-point operations of a program, on one rank."""

from __future__ import annotations

import math

from minidiff.core.tape import Equation, Tape
from minidiff.core.types import typeof
from minidiff.ops.linalg import einsum_p, matmul_p


def flops(tape: Tape) -> int:
    """The floating-point operations of a tape's matrix products: two for each term.

    In the body of a `shard_map` they are those of one rank. A loop's count for each step, and of all branches.

    >>> import numpy as np
    >>> import minidiff as md
    >>> flops(md.make_tape(lambda x, y: x @ y)(np.ones((2, 3)), np.ones((3, 4))))
    48
    """
    total = 0
    for eqn in tape.equations:
        if eqn.primitive is matmul_p:
            total += 2 * eqn.outputs[0].type.size * typeof(eqn.inputs[0]).shape[-1]
        elif eqn.primitive is einsum_p:
            labels = eqn.params["subscripts"].split("->")[0].replace(",", "")
            shape = [n for a in eqn.inputs for n in typeof(a).shape]
            total += 2 * math.prod(dict(zip(labels, shape)).values())
        total += eqn.params.get("length", 1) * sum(map(flops, eqn.bodies))
    return total


def operations_of(eqn: Equation) -> int:
    """The floating-point operations of an equation: of a product its `flops`, else one a number of the results."""
    return flops(Tape([], [eqn], [])) or sum(v.type.size for v in eqn.outputs)
