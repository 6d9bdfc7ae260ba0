"""Transposition: a function from tapes to tapes.

A tape that is linear in some of its inputs is a matrix; its transpose is the tape of the transposed matrix. It is
what the backward sweep of reverse mode does, done with names in place of values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from minidiff import tree
from minidiff.aliasing import apart
from minidiff.compiler.simplify import simplified
from minidiff.core import (
    current_interpreter,
    current_scope,
    is_differentiable,
    pbroadcast_to,
    restores_interpreter,
    transforming,
)
from minidiff.forward import instantiate
from minidiff.ops.base import zeros_like
from minidiff.reverse import agreeing, backward_pass, checked_cotangents, resharded
from minidiff.staging import Stage, stage_flat
from minidiff.tape import Tape, Var


def transpose(tape: Tape, linear: int | Sequence[int] | None = None) -> Tape:
    """The transpose of a tape: a tape of cotangents of its linear inputs, from cotangents of its outputs.

    `linear` are the positions of the inputs in which the tape is linear, jointly: all of them by default. The others
    stay inputs. The cotangents of the outputs take the places of the linear inputs, from the first of these on (where
    there are fewer outputs, the last places fall away; where there are more, they follow the last place), with the
    outputs' types; the results have the linear inputs' types. A constant term has no part in the transpose.

    Bodies are transposed too, that of a `shard_map` with its specs exchanged. The result is simplified
    (`minidiff.compiler.simplify.simplified`). Transposing twice gives a tape of the same function. It is `== tape` (see
    `Tape.__eq__`) where every operation is the transpose of its transpose, as every collective is; of `np.where` of two
    operands, say, it has the sum of two of one.

    Raises TypeError, naming the operation and the type of its operand, where the tape is not linear in those inputs.

    >>> import numpy as np
    >>> from minidiff import make_tape
    >>> tape = make_tape(lambda x, y: (x * y).sum())(np.ones(3), np.ones(3))
    >>> print(transpose(tape, linear=0))
    lambda a:f64[], b:f64[3]:
      c:f64[3] = multiply(a, b)
      return c
    >>> transpose(transpose(tape, linear=0), linear=0) == tape
    True

    Source: JEP 17111, "How this system solves the inefficient transpose examples".
    """
    if not isinstance(tape, Tape):
        raise TypeError(
            f"transpose: expected a Tape, got {type(tape).__name__}; that of a function f is make_tape(f)(*args), and "
            "its transpose as a function linear_transpose(f, *args)"
        )
    chosen = _checked(tape, range(len(tape.inputs)) if linear is None else linear)
    return _transposed(tape, [i in chosen for i in range(len(tape.inputs))])


@restores_interpreter
def _transposed(tape: Tape, linear: Sequence[bool]) -> Tape:
    """The transpose of a tape that is linear in those inputs."""
    stage = Stage(current_interpreter(), name="transpose")
    stage.origin = "transpose", "a tape"
    values, cts = [], []
    waiting, last = list(tape.out_types), max((i for i, yes in enumerate(linear) if yes), default=None)
    for i, (t, yes) in enumerate(zip(tape.in_types, linear)):
        values.append(None if yes else stage.new_input(t))
        if yes:
            count = len(waiting) if i == last else min(1, len(waiting))
            cts += [stage.new_input(t) for t in waiting[:count]]
            del waiting[:count]
    cts += [stage.new_input(t) for t in waiting]  # of a tape without inputs
    wanted = [t for t, yes in zip(tape.in_types, linear) if yes]
    with transforming(stage):
        found = backward_pass(tape, linear, values, cts)
        zeros = [pbroadcast_to(zeros_like(t), t.variance) if ct is None else ct for ct, t in zip(found, wanted)]
        return simplified(stage.tape(zeros))


def _checked(tape: Tape, linear: Any) -> tuple[int, ...]:
    """The positions of linear inputs, in order."""
    count = len(tape.inputs)
    try:
        positions = tuple(sorted(map(operator.index, linear if isinstance(linear, Sequence) else [linear])))
    except TypeError:
        raise TypeError(f"transpose: linear must be an int or a tuple of ints, got {linear!r}") from None
    for i in positions:
        if not 0 <= i < count:
            raise ValueError(f"transpose: linear names input {i}, but the tape has {count}, counted from 0")
    if len(set(positions)) != len(positions):
        raise ValueError(f"transpose: linear names an input twice: {positions}")
    if count and not positions:
        raise ValueError("transpose: linear names no input; a tape is transposed in one or more of its inputs")
    varying = next((t for t in tape.in_types if t.variance), None)
    if varying is not None and current_scope() is None:
        raise TypeError(
            f"transpose: the tape takes {varying}, so it is the body of a shard_map: transpose the tape around it, "
            "which transposes the body too"
        )
    return positions


def linear_transpose(f: Callable, *examples: Any) -> Callable:
    """The transpose of a linear function: `f_t(ct)` is the tuple of cotangents of `f`'s arguments.

    It is `transpose` of the tape of `f`. A constant term, which makes `f` affine, has no part in it.

    `examples` give the types of the arguments: arrays, or :class:`ShapedArray`. Raises TypeError, naming the
    operation, where `f` is not linear.

    >>> import numpy as np
    >>> from minidiff import ShapedArray
    >>> f_t = linear_transpose(lambda x: 3.0 * x, ShapedArray((2,), float))
    >>> f_t(np.ones(2))
    (array([3., 3.]),)
    """
    tape, structure, out_structure = stage_flat(f, examples, "linear_transpose")
    transposed, out_types = transpose(tape), tape.out_types

    def f_t(ct: Any) -> tuple:
        cts = checked_cotangents(ct, out_types, out_structure)
        values = [agreeing(zeros_like(t) if x is None else x, t) for x, t in zip(cts, out_types)]
        # A zero that stands on the tape is the tape's: the caller gets one of his own.
        known = [isinstance(a, Var) and is_differentiable(a.type.dtype) for a in transposed.outputs]
        found = zip(transposed(*values), tape.in_types, known)
        results = [resharded(instantiate(x if yes else None, t), t) for x, t, yes in found]
        return tree.unflatten(structure, apart(results, values))

    return f_t
