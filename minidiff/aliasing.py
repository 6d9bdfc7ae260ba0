"""Which results share memory, and with what.

What NumPy copies is a copy, also under every transformation: `np.copy(x)`, `+x`, `x.flatten()` are operations on the
tape. What NumPy returns as a view of an argument (`x.T`, or `x` itself) is one where the function runs eagerly: the
values that `jvp`, `vjp` and `grad` return with their derivatives, or that `checkpoint` and loops return. All other
results (tangents, cotangents, gradients, what `vmap`, `jit` and `shard_map` return) do not share memory with arguments.
No result shares memory with what the library keeps (constants of programs, buffers, what a pullback holds for its next
call); and tangents, cotangents, gradients and results of `vmap` and `jit` share none with each other, and can be
written into.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from minidiff.core import EVALUATE, Value, current_interpreter
from minidiff.tape import Equation, Tape, bodies_of


def apart(results: Sequence[Value], held: Sequence[Value] = ()) -> Sequence[Value]:
    """Copy those results that are read-only, or share memory with an earlier one or with a `held` array."""
    if len(results) == 1 and not held and getattr(results[0], "base", None) is None:
        return results
    taken = {id(x if x.base is None else owner_of(x)) for x in held if isinstance(x, numpy.ndarray)}
    found = []
    for x in results:
        if isinstance(x, numpy.ndarray):
            owner = id(x if x.base is None else owner_of(x))
            if owner in taken or not x.flags.writeable:
                x = x.copy()
            else:
                taken.add(owner)
        found.append(x)
    return found


def owner_of(x: Any) -> Any:
    """The object whose memory an array looks at: itself, or what it is a view of."""
    while (base := getattr(x, "base", None)) is not None:
        x = base
    return x


def keep_residuals(tape: Tape) -> None:
    """Copy what a linear tape holds of memory that others can write into: arguments, results, closed-over arrays.

    Others can where something besides the tape refers to an array on it; where it is a view, they are taken to.
    """
    if current_interpreter() is not EVALUATE:
        return  # the pullback is used before the user gets hold of anything that can be written into
    arrays = [x for eqn in _equations(tape) for x in eqn.inputs if isinstance(x, numpy.ndarray)]
    uses: dict[int, int] = {}
    for i in map(id, arrays):
        uses[i] = uses.get(i, 0) + 1
    counts = list(map(sys.getrefcount, arrays))  # each use is a reference by the tape and one by the list
    copies: dict[int, numpy.ndarray] = {}
    for x, count in zip(arrays, counts):
        i = id(x)
        if (count > 2 * uses[i] + _OF_THE_CALL or x.base is not None) and i not in copies:
            copies[i] = x.copy()
    if copies:
        for eqn in _equations(tape):
            eqn.inputs = [copies.get(id(x), x) for x in eqn.inputs]


def _equations(tape: Tape) -> Iterator[Equation]:
    """The equations of a tape and of the bodies on it: of a checkpoint, that is what it computes once more."""
    for eqn in tape.equations:
        yield eqn
        if eqn.primitive.is_higher_order:
            for body in bodies_of(eqn):
                yield from _equations(body)


#: The references to an object that come of counting them, as `keep_residuals` does, in a list.
_OF_THE_CALL = next(map(sys.getrefcount, [object()])) - 1
