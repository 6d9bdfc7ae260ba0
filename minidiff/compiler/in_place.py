"""Operations that a program may let write into an operand: each with its function that does.

As NumPy's functions with `out=`, they take the memory of an operand that is not used again (`buffers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy

from minidiff.control_flow.dead_code import count_uses
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.types import Var
from minidiff.ops import elementwise, indexing, slices, updates

# ---------------------------------------------------------------- x + zeros with v at an index


def _add_at(x: numpy.ndarray, v: numpy.ndarray, index: tuple, shape: tuple[int, ...]) -> numpy.ndarray:
    part = x[(*index, ...)]
    numpy.add(part, v, out=part)
    return x


def _add_along(x: numpy.ndarray, v: numpy.ndarray, start: numpy.ndarray, axis: int, length: int) -> numpy.ndarray:
    part = x[slices.slice_of(start, v.shape[axis], x, axis)]
    numpy.add(part, v, out=part)
    return x


def _add_at_indices(
    x: numpy.ndarray, v: numpy.ndarray, *indices: numpy.ndarray, shape: tuple[int, ...]
) -> numpy.ndarray:
    if indexing.are_unique(indices, shape):
        x[indices] += v
    else:  # summed first, as by the operation
        numpy.add(x, indexing.scatter_add_p.impl(v, *indices, shape=shape), out=x)
    return x


def _adding(name: str, write: Callable) -> Primitive:
    """Return an operation that adds within a copy of its first operand."""
    impl = lambda x, *args, **params: write(numpy.array(x), *args, **params)  # noqa: E731
    return Primitive(name, impl, lambda x, *types, **params: (x.shape, x.dtype))


#: Operation that puts an array into zeros -> the operation that adds the result to an array.
ADDED: dict[Primitive, Primitive] = {
    indexing.unslice_p: _adding("add_at", _add_at),
    slices.dynamic_unslice_p: _adding("add_along", _add_along),
    indexing.scatter_add_p: _adding("add_at_indices", _add_at_indices),
}

#: Operation -> the function that writes into its first operand, and returns it.
IN_PLACE: dict[Primitive, Callable[..., Any]] = {
    updates.update_p: updates.write_at,
    updates.scatter_set_p: updates.write_at_indices,
    slices.dynamic_update_p: slices.write_along,
    ADDED[indexing.unslice_p]: _add_at,
    ADDED[slices.dynamic_unslice_p]: _add_along,
    ADDED[indexing.scatter_add_p]: _add_at_indices,
}


def add_in_place(tape: Tape, excluded: Container[Var] = ()) -> Tape:
    """Add arrays in place: replace `x + zeros`, where `zeros` holds an array at an index and has no other use.

    (An element of -0.0 elsewhere stays -0.0.) Values in `excluded` may not be plain arrays.
    """
    candidates = {e.outputs[0]: e for e in tape.equations if e.primitive in ADDED and e.outputs[0] not in excluded}
    if not candidates:
        return tape
    uses = count_uses(tape)
    replaced: dict[Equation, Equation | None] = {}
    for eqn in tape.equations:
        if eqn.primitive is not elementwise.add.primitive or eqn.outputs[0] in excluded:
            continue
        (out,) = eqn.outputs
        for x, zeros in (eqn.inputs, eqn.inputs[::-1]):
            part = candidates.get(zeros) if isinstance(zeros, Var) else None
            if part is not None and uses[zeros] == 1 and isinstance(x, Var) and x.type == zeros.type == out.type:
                replaced[part] = None
                replaced[eqn] = Equation(ADDED[part.primitive], [x, *part.inputs], part.params, [out], eqn.source)
                break
    return with_equations(tape, [e for e in (replaced.get(e, e) for e in tape.equations) if e is not None])
