"""The results of `vjp` and `linearize`: linear functions that are trees, with their residuals as leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minidiff import tree
from minidiff.core.tape import Tape, substitute
from minidiff.core.tracer import Value
from minidiff.errors.tracebacks import hide_own_frames


class LinearFunction:
    """A pullback, or a linear function: `apply(tape, *args)` for a linear tape.

    It is a tree, whose leaves are the residuals on the tape, and whose structure is everything else. So a compiled
    function may take and return it, `vmap` may make many at once, and a rule of `custom_vjp` may keep it.

    >>> import minidiff as md
    >>> pullback = md.jit(lambda x: md.vjp(lambda x: x * x, x)[1])(3.0)
    >>> [float(x) for x in md.tree.leaves(pullback)]
    [3.0]
    >>> float(pullback(1.0)[0])
    6.0
    """

    def __init__(self, apply: Callable, tape: Tape, closed: tuple[_Program, Sequence[Value]] | None = None):
        self.apply = apply
        self.tape = tape
        self.closed = closed  # its structure and its leaves, once they have been asked for
        self.__name__ = apply.__name__

    def __repr__(self) -> str:
        return f"<{self.__name__}, a function that is linear>"

    @hide_own_frames
    def __call__(self, *args: Any) -> Any:
        return self.apply(self.tape, *args)


class _Program(NamedTuple):
    """A linear function without its residuals, which the tape takes as its first inputs."""

    apply: Callable
    tape: Tape

    def __repr__(self) -> str:
        return self.apply.__name__


def _flatten(f: LinearFunction) -> tuple[Sequence[Value], _Program]:
    if f.closed is None:
        tape, constants = Tape(f.tape.inputs, f.tape.equations, ()).close()
        f.closed = _Program(f.apply, Tape(tape.inputs, tape.equations, f.tape.outputs)), constants
    program, residuals = f.closed
    return residuals, program


def _unflatten(program: _Program, residuals: Sequence[Value]) -> LinearFunction:
    values = dict(zip(program.tape.inputs, residuals))

    closed = program.tape
    equations = [substitute(eqn, values) for eqn in closed.equations]
    tape = Tape(closed.inputs[len(residuals) :], equations, closed.outputs)
    return LinearFunction(program.apply, tape, (program, residuals))


tree.register(LinearFunction, _flatten, _unflatten)
