"""The residuals of a pullback: a copy of each array that the user could change before the pullback runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy

from minidiff.core.interpreter import EVALUATE, current_interpreter
from minidiff.core.tape import Equation, Tape
from minidiff.values.aliasing import copy_view, is_frozen


def keep_residuals(tape: Tape) -> None:
    """Copy the arrays on a linear tape that the user can still write into.

    These are arguments, results and closed-over arrays. An array is copied if something besides the tape refers to it
    (by its reference count), or if it is a view.
    """
    if current_interpreter() is not EVALUATE:
        return  # the pullback runs before the user can write into any array
    arrays = [x for eqn in _equations(tape) for x in eqn.inputs if isinstance(x, numpy.ndarray)]
    uses: dict[int, int] = {}
    for i in map(id, arrays):
        uses[i] = uses.get(i, 0) + 1
    counts = list(map(sys.getrefcount, arrays))  # each use is a reference by the tape and one by the list
    copies: dict[int, numpy.ndarray] = {}
    for x, count in zip(arrays, counts):
        i = id(x)
        if (count > 2 * uses[i] + _OF_THE_CALL or x.base is not None) and i not in copies and not is_frozen(x):
            copies[i] = copy_view(x)
    if copies:
        for eqn in _equations(tape):
            eqn.inputs = [copies.get(id(x), x) for x in eqn.inputs]


def _equations(tape: Tape) -> Iterator[Equation]:
    """The equations of a tape and its bodies (for a checkpoint, the recomputation)."""
    for eqn in tape.equations:
        yield eqn
        if eqn.primitive.is_higher_order:
            for body in eqn.bodies:
                yield from _equations(body)


#: The extra references to an object while `keep_residuals` counts the references to it.
_OF_THE_CALL = next(map(sys.getrefcount, [object()])) - 1
