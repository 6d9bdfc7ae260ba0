"""Transposition: a function from tapes to tapes.

A tape that is linear in some of its inputs represents a matrix, and its transpose is a tape of the transposed matrix.
To transpose a tape is to run the backward sweep of reverse mode on variables in place of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minidiff import tree
from minidiff.api.derivatives import as_cotangent
from minidiff.api.recording import stage_flat
from minidiff.compiler.simplify import apply_rules
from minidiff.core.interpreter import current_interpreter, transforming
from minidiff.core.ranks import cast_like, ranks
from minidiff.core.reverse import transpose_values
from minidiff.core.tape import Stage, Tape
from minidiff.core.types import Var, zeros_like
from minidiff.inputs.arguments import check_cotangents, linear_positions
from minidiff.values.aliasing import copy_shared
from minidiff.values.dtypes import is_differentiable
from minidiff.values.lists import positions, select
from minidiff.values.settings import restores_settings


def transpose(tape: Tape, linear: int | Sequence[int] | None = None) -> Tape:
    """Transpose a tape: map cotangents of its outputs to those of its linear inputs.

    Bodies are transposed too; that of a `shard_map` has its in_specs and out_specs swapped. The result is simplified
    (`minidiff.compiler.simplify.apply_rules`). A constant term does not appear in it. Transposing twice gives a tape of
    the same function. It is `== tape` if every operation is the transpose of its transpose, as every collective is. For
    instance, an `np.where` of two operands is not: it becomes a sum of two `np.where`, of one operand each.

    Args:
        tape: a `Tape`.
        linear: the positions of the inputs in which it is jointly linear: all of them by default. The others remain
            inputs.

    Returns:
        A tape. Cotangents, of the outputs' types, replace the linear inputs in order: with fewer outputs than linear
        inputs, the last of these positions are left out; with more, the other cotangents come directly after the last
        position. The results have the linear inputs' types.

    Raises:
        TypeError: if the tape is not linear in those inputs; it names the operation and the type of its operand.

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
    chosen = linear_positions(tape, range(len(tape.inputs)) if linear is None else linear)
    return _transpose_tape(tape, [i in chosen for i in range(len(tape.inputs))])


@restores_settings
def _transpose_tape(tape: Tape, linear: Sequence[bool]) -> Tape:
    """Transpose a tape in the inputs marked as linear."""
    stage = Stage(current_interpreter(), name="transpose")
    stage.origin = "transpose", "a tape"
    values, cts = [], []
    waiting, last = list(tape.out_types), max(positions(linear), default=None)
    for i, (t, is_linear) in enumerate(zip(tape.in_types, linear)):
        values.append(None if is_linear else stage.new_input(t))
        if is_linear:
            count = len(waiting) if i == last else min(1, len(waiting))
            cts += [stage.new_input(t.cotangent) for t in waiting[:count]]
            del waiting[:count]
    cts += [stage.new_input(t.cotangent) for t in waiting]  # for a tape without linear inputs
    ct_types = [t.cotangent for t in select(tape.in_types, linear)]
    with transforming(stage):
        in_cts = transpose_values(tape, linear, values, cts)
        results = [cast_like(zeros_like(t), t) if ct is None else ct for ct, t in zip(in_cts, ct_types)]
        return apply_rules(stage.tape(results))


def linear_transpose(f: Callable, *examples: Any) -> Callable:
    """Transpose a linear function: `linear_transpose(f, *examples)(ct)` is the tuple of arguments' cotangents.

    It applies `transpose` to the tape of `f`. A constant term, which makes `f` affine, is ignored.

    Args:
        f: a function of trees of arrays that is linear in all of them together.
        examples: arrays or `ShapedArray`s that give the types of the arguments.

    Returns:
        A function from a cotangent like the result of `f` to the tuple of cotangents of the arguments.

    Raises:
        TypeError: if `f` is not linear; it names the operation.

    >>> import numpy as np
    >>> from minidiff import ShapedArray
    >>> f_t = linear_transpose(lambda x: 3.0 * x, ShapedArray((2,), float))
    >>> f_t(np.ones(2))
    (array([3., 3.]),)
    """
    tape, structure, out_structure = stage_flat(f, examples, "linear_transpose")
    transposed, out_types = transpose(tape), tape.out_types

    def f_t(ct: Any) -> tuple:
        cts = check_cotangents(ct, out_types, out_structure)
        values = [ranks.cast_cotangent(zeros_like(t) if x is None else x, t) for x, t in zip(cts, out_types)]
        # A zero that is a constant of the tape belongs to the tape: give the caller a copy.
        known = [isinstance(a, Var) and is_differentiable(a.type.dtype) for a in transposed.outputs]
        in_cts = zip(transposed(*values), tape.in_types, known)
        results = [as_cotangent(x if is_known else None, t.cotangent) for x, t, is_known in in_cts]
        return tree.unflatten(structure, copy_shared(results, values))

    return f_t
