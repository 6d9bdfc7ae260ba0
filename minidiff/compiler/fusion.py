"""Group equations that can run together without making the program cyclic."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minidiff.tape import Atom, Equation, Tape, Var, has_effects


def _nothing(*args: Any) -> int:
    return 0


def _effects_before(tape: Tape) -> dict[Equation, Equation | None]:
    """For each equation with an effect, the previous one with an effect, or None."""
    effects = [eqn for eqn in tape.equations if has_effects(eqn)]
    return dict(zip(effects, [None, *effects]))


class Groups:
    """Groups of equations with equal keys, `members`; no group depends on itself.

    Only equations of the same `key` share a group, in the order of the tape (key None: in no group), while the sum of
    their sizes is at most `limit`. `inside(maker, a, user)` says whether an operand may pass within a group, from the
    member that makes it to the one that uses it; otherwise no member depends on another.

    Equations with effects keep their order: each depends on the one before it.

    Sets of equations are integers, with a bit for each equation that has a key, so one walk finds all dependencies.
    """

    def __init__(
        self,
        tape: Tape,
        key: Callable[[Equation], Any],
        size: Callable[[Equation], int] = _nothing,
        limit: int = 0,
        inside: Callable[[Equation, Atom, Equation], bool] = _nothing,
    ):
        self.tape = tape
        self.members: list[list[Equation]] = []
        self._size, self._limit, self._inside = size, limit, inside
        self._number: dict[Equation, int] = {}  # the number of an equation's group
        self._needs: list[int] = []  # by group: the equations that it depends on
        self._bits: list[int] = []  # by group: the equations in it
        self._sizes: list[int] = []
        self._filling: dict[Any, int] = {}  # by key: the group that is being filled
        self._depends: dict[Var | Equation, int] = {}
        self._maker: dict[Var | Equation, Equation] = {}
        self._before = _effects_before(tape)
        for eqn in tape.equations:
            own, needs = key(eqn), self._needed(eqn)
            if own is not None:
                needs |= self._put(eqn, own)
            if needs:
                self._depends.update((v, needs) for v in self._gives(eqn))
            self._maker.update((v, eqn) for v in self._gives(eqn))

    def _put(self, eqn: Equation, key: Any) -> int:
        """Put an equation into a group; return the set of this equation alone."""
        k, bit = self._filling.get(key), 1 << len(self._number)
        if k is None or not self._fits(eqn, k):
            self._filling[key] = k = len(self.members)
            self.members.append([])
            for numbers in (self._needs, self._bits, self._sizes):
                numbers.append(0)
        self._needs[k] |= self._needed(eqn, k)
        self._bits[k] |= bit
        self._sizes[k] += self._size(eqn)
        self.members[k].append(eqn)
        self._number[eqn] = k
        return bit

    def _fits(self, eqn: Equation, k: int) -> bool:
        return self._sizes[k] + self._size(eqn) <= self._limit and not self._waits_for(self._needed(eqn, k), k)

    def _needed(self, eqn: Equation, k: int | None = None) -> int:
        """The equations `eqn` depends on, except those in group k that pass it operands."""
        needs = 0
        for a in self._takes(eqn):
            made = self._maker.get(a)
            within = k is not None and self._number.get(made) == k and (a in self._before or self._inside(made, a, eqn))
            needs |= self._needs[k] if within else self._depends.get(a, 0)
        return needs

    def _takes(self, eqn: Equation) -> list[Var | Equation]:
        """The names an equation depends on; for an effect, also the previous effect."""
        names = [a for a in eqn.inputs if isinstance(a, Var)]
        return [*names, self._before[eqn]] if self._before.get(eqn) else names

    def _gives(self, eqn: Equation) -> Sequence[Var | Equation]:
        """The names of an equation's results, and the equation if it has an effect."""
        return [*eqn.outputs, eqn] if eqn in self._before else eqn.outputs

    def _waits_for(self, needs: int, k: int) -> bool:
        """Whether depending on these equations and their groups means depending on k."""
        before = None
        while needs != before:
            before = needs
            for bits, further in zip(self._bits, self._needs):
                if bits & needs:
                    needs |= bits | further
        return bool(needs & self._bits[k])

    def in_order(self) -> Iterator[list[Equation]]:
        """Yield groups and single equations in topological order.

        That is the tape's order where possible; a group takes the place of its last equation.
        """
        parts: dict[int, list[Equation]] = {}
        for place, eqn in enumerate(self.tape.equations):
            part = self.members[self._number[eqn]] if eqn in self._number else [eqn]
            if part[-1] is eqn:
                parts[place] = part
        maker = {v: place for place, part in parts.items() for e in part for v in self._gives(e)}
        missing = {
            place: {maker[a] for e in part for a in self._takes(e) if a in maker} - {place}
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
