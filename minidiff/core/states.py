"""The state of a value along each mesh axis, and how the states of operands combine.

=========== ======= ================================ ===========================
state       printed ranks along the axis hold        its cotangent is
=========== ======= ================================ ===========================
invariant           the same value                   invariant
varying     `i`     values that may differ           varying
unreduced   `U:i`   partial sums, not yet added up   reduced
reduced     `R:i`   the same value                   unreduced
=========== ======= ================================ ===========================

Operands of an operation agree along each axis. Where they do not, casts that move nothing are inserted, by this rule:

- with a varying operand, all become varying;
- with a reduced one, and no varying one, all become reduced;
- with an unreduced one, the others become reduced. The operation must be linear in the unreduced operands together,
  and is then applied to the parts: its result is unreduced.

Sources: JEP 17111 for the first two states; JAX, "Autodiff and sharding", for the other two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

Axes = frozenset[str]
NONE: Axes = frozenset()

VARYING, UNREDUCED, REDUCED, INVARIANT = STATES = "varying", "unreduced", "reduced", "invariant"


class AxisStates(NamedTuple):
    """The axes along which a value varies, is unreduced, and is reduced; along all others it is invariant.

    >>> AxisStates(frozenset({'i'}), reduced=frozenset({'k'}))
    {i,R:k}
    """

    varying: Axes = NONE
    unreduced: Axes = NONE
    reduced: Axes = NONE

    @classmethod
    def of(cls, varying: Iterable[str], unreduced: Iterable[str] = NONE, reduced: Iterable[str] = NONE) -> AxisStates:
        """The states with these axes. Raises ValueError if an axis is in two of them."""
        if not (varying or unreduced or reduced):
            return ALL_INVARIANT
        states = cls(frozenset(varying), frozenset(unreduced), frozenset(reduced))
        if len(states.axes) < sum(map(len, states)):
            raise ValueError(f"{states}: a value has only one state along each axis")
        return states

    @property
    def axes(self) -> Axes:
        """The axes along which the value is not invariant."""
        return self.varying.union(self.unreduced, self.reduced)

    @property
    def varying_or_unreduced(self) -> Axes:
        """The axes along which ranks may have different data."""
        return self.varying | self.unreduced

    def along(self, axis: str) -> str:
        """The state along one axis."""
        return next((state for state, axes in zip(STATES, self) if axis in axes), INVARIANT)

    def with_state(self, axes: Iterable[str], state: str) -> AxisStates:
        """These states, changed along some axes."""
        return _with_state(self, frozenset(axes), state)

    def cotangent(self) -> AxisStates:
        """The states of the value's cotangent."""
        return AxisStates(self.varying, self.reduced, self.unreduced) if self.unreduced or self.reduced else self

    def __repr__(self) -> str:
        marks = [f"{mark}{axis}" for mark, axes in zip(("", "U:", "R:"), self) for axis in sorted(map(str, axes))]
        return f"{{{','.join(marks)}}}" if marks else "{}"


ALL_INVARIANT = AxisStates()


@functools.lru_cache(maxsize=4096)
def _with_state(states: AxisStates, axes: Axes, state: str) -> AxisStates:
    return AxisStates.of(*[a | axes if state == name else a - axes for name, a in zip(STATES, states)])


@functools.lru_cache(maxsize=4096)
def combine_states(*states: AxisStates) -> AxisStates:
    """The states of the result of an operation on operands in these states."""
    varying, unreduced, reduced = (NONE.union(*axes) for axes in zip(ALL_INVARIANT, *states))
    return AxisStates.of(varying - unreduced, unreduced, reduced - varying - unreduced)


@functools.lru_cache(maxsize=4096)
def common_states(states: tuple[AxisStates, ...]) -> list[AxisStates]:
    """The states that operands are cast to. A varying one with an unreduced one is not cast: that is an error."""
    varying, unreduced, reduced = combine_states(*states)
    return [
        AxisStates(varying | s.varying, s.unreduced, (reduced | unreduced) - s.varying_or_unreduced) for s in states
    ]
