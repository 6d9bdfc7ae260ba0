"""Which part of an array each rank takes, where that follows from nothing but which rank it is.

`axis_index('i') * k`, `np.arange(k) + k * axis_index('i')`, `axis_index('i') * axis_size('j') + axis_index('j')`: there
are many ways to write where this rank's part begins. They need not be told apart: what is computed of `axis_index` and
of constants alone is computed here for all ranks, as if they were simulated, and compared with where their parts are.
"""

from __future__ import annotations

import numpy

from collectives.backend import Axes
from collectives.ops import axis_index_p, pbroadcast_p
from collectives.stacked import Stacked
from minidiff.core import EVALUATE, is_scalar_constant, running
from minidiff.optimize import FOLDED_BYTES, Program
from minidiff.tape import Atom, Var, atom_type

#: Of how many operations, at most, an index is made.
OPERATIONS = 32


def own_axes(program: Program, index: Atom, rows: int | None, along: Axes) -> Axes | None:
    """The order of the axes `along` in which an index takes parts of one array: the first rank the first part.

    A part is one entry, whose number is the index (`rows` is None), or so many rows: the index is the number of the
    first of them, or those of all. None where the index is anything else.
    """
    found = _Simulated(program).value(index) if isinstance(index, Var) else None
    if found is None or set(found[1]) != set(along) or not found[0].size:
        return None
    numbers, held = found
    sizes = program.scope.axes
    numbers = numbers.reshape(*[sizes[a] for a in held], -1)
    # One step along an axis, from the first rank on: the longest is that of the axis that counts most.
    steps = {a: numbers[(*(int(b == a) for b in held), 0)] - numbers.flat[0] for a in held if sizes[a] > 1}
    ordered = iter(sorted(steps, key=lambda a: -steps[a]))
    axes = tuple([next(ordered) if a in steps else a for a in along])
    numbers = numbers.transpose(*map(held.index, axes), len(held)).reshape(-1, numbers.shape[-1])
    length = rows or 1
    wanted = length * numpy.arange(len(numbers))[:, None] + numpy.arange(numbers.shape[1])
    return axes if numbers.shape[1] in (1, length) and numpy.array_equal(numbers, wanted) else None


class _Simulated:
    """Values of a program as they are on all ranks; those that nothing is known of are None."""

    def __init__(self, program: Program):
        self.program = program
        self.ranks = Stacked(program.scope.axes) if program.scope is not None else None
        self.left = OPERATIONS
        self.known: dict[Var, tuple[numpy.ndarray, Axes] | None] = {}

    def value(self, a: Atom) -> tuple[numpy.ndarray, Axes] | None:
        """An atom's value on all ranks, stacked, and the axes along which they are held."""
        if is_scalar_constant(a) or type(a) is numpy.ndarray:
            return a, ()
        if a in self.program.arrays:
            return self.program.arrays[a], ()
        if a not in self.known:
            self.known[a] = self._computed(a)
        return self.known[a]

    def _computed(self, a: Var) -> tuple[numpy.ndarray, Axes] | None:
        eqn, t, self.left = self.program.producer.get(a), atom_type(a), self.left - 1
        if eqn is None or self.ranks is None or self.left < 0 or t.dtype.kind not in "biu":
            return None
        if eqn.primitive is axis_index_p:
            return self.ranks.axis_index(eqn.params["axes"])
        if eqn.primitive is pbroadcast_p:
            return self.value(eqn.inputs[0])
        p = eqn.primitive
        if (
            p.on_ranks
            or p.has_body
            or p.multiple_results
            or t.nbytes * self.ranks.size(self.ranks.sizes) > FOLDED_BYTES
        ):
            return None
        operands = []
        for x in eqn.inputs:
            operands.append(self.value(x))
            if operands[-1] is None:
                return None
        with running(EVALUATE), numpy.errstate(all="ignore"):
            return self.ranks.apply(p, operands, eqn.params)
