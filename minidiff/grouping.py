"""Equations of a tape put into groups, each of which can be done in one place."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from minidiff.tape import Atom, Equation, Tape, Var


def _none(*args: Any) -> int:
    return 0


class Groups:
    """`members`, lists of equations of a tape that are alike, so chosen that no group waits for itself.

    Only equations of the same `key` come together, in the order of the tape (None: they come to nobody), as long as
    the sum of their sizes is no more than `limit`. `inside(maker, a, user)` says that an operand may be handed over
    within a group, from the member that makes it to one that takes it; otherwise no member depends on another one.

    Sets of equations are integers, with a bit for each that has a key: what depends on what is found in one walk.
    """

    def __init__(
        self,
        tape: Tape,
        key: Callable[[Equation], Any],
        size: Callable[[Equation], int] = _none,
        limit: int = 0,
        inside: Callable[[Equation, Atom, Equation], bool] = _none,
    ):
        self.tape = tape
        self.members: list[list[Equation]] = []
        self._number: dict[Equation, int] = {}  # of an equation's group
        self._needs: list[int] = []  # by group: the equations that it depends on
        self._bits: list[int] = []  # by group: the equations in it
        sizes: list[int] = []
        filling: dict[Any, int] = {}  # by key: the group that has room
        depends: dict[Var, int] = {}
        maker: dict[Var, Equation] = {}
        for eqn in tape.equations:
            operands = [a for a in eqn.inputs if isinstance(a, Var)]
            own, needs = key(eqn), 0
            if own is not None:
                k = filling.get(own)
                for a in operands:
                    made = maker.get(a)
                    within = k is not None and self._number.get(made) == k and inside(made, a, eqn)
                    needs |= self._needs[k] if within else depends.get(a, 0)
                if k is None or sizes[k] + size(eqn) > limit or self._waits_for(needs, k):
                    filling[own] = k = len(self.members)
                    self.members.append([])
                    self._needs.append(0)
                    self._bits.append(0)
                    sizes.append(0)
                    needs = _union(depends, operands)
                bit = 1 << len(self._number)
                self.members[k].append(eqn)
                self._number[eqn] = k
                self._needs[k] |= needs
                self._bits[k] |= bit
                sizes[k] += size(eqn)
            needs = _union(depends, operands) | (bit if own is not None else 0)
            if needs:
                depends.update((v, needs) for v in eqn.outputs)
            maker.update((v, eqn) for v in eqn.outputs)

    def _waits_for(self, needs: int, k: int) -> bool:
        """Whether what depends on these equations, and so on all that is in a group with them, depends on group k."""
        before = None
        while needs != before:
            before = needs
            for bits, further in zip(self._bits, self._needs):
                if bits & needs:
                    needs |= bits | further
        return bool(needs & self._bits[k])

    def in_order(self) -> Iterator[list[Equation]]:
        """Groups, and all other equations by themselves, each when what it takes is there.

        That is the tape's order, where it can be; a group has the place of the last of its equations.
        """
        parts: dict[int, list[Equation]] = {}
        for place, eqn in enumerate(self.tape.equations):
            part = self.members[self._number[eqn]] if eqn in self._number else [eqn]
            if part[-1] is eqn:
                parts[place] = part
        maker = {v: place for place, part in parts.items() for e in part for v in e.outputs}
        missing = {
            place: {maker[a] for e in part for a in e.inputs if isinstance(a, Var) and a in maker} - {place}
            for place, part in parts.items()
        }
        users: dict[int, list[int]] = {}
        for place, needed in missing.items():
            for other in needed:
                users.setdefault(other, []).append(place)
        ready = [place for place, needed in missing.items() if not needed]
        heapq.heapify(ready)
        while ready:
            place = heapq.heappop(ready)
            yield parts[place]
            for user in users.get(place, ()):
                missing[user].discard(place)
                if not missing[user]:
                    heapq.heappush(ready, user)


def _union(depends: dict[Var, int], operands: list[Var]) -> int:
    needs = 0
    for a in operands:
        needs |= depends.get(a, 0)
    return needs
