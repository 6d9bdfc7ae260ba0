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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy

from minidiff.core import EVALUATE, Value, current_interpreter
from minidiff.tape import Equation, Tape, bodies_of


def apart(results: Sequence[Value], held: Iterable[Value] = ()) -> Sequence[Value]:
    """Copy those results that are read-only, or share memory with an earlier one or with a `held` array."""
    taken = {id(owner_of(x)) for x in held if isinstance(x, numpy.ndarray)} if held else set()
    if len(results) == 1 and not taken and getattr(results[0], "base", None) is None:
        return results
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


def _chain(x: Any) -> Iterator[Any]:
    """An array, what it is a view of, and so on to the object that owns the memory."""
    while x is not None:
        yield x
        x = getattr(x, "base", None)


def owner_of(x: Any) -> Any:
    """The object whose memory an array looks at: itself, or what it is a view of."""
    while (base := getattr(x, "base", None)) is not None:
        x = base
    return x


def keep_residuals(tape: Tape) -> None:
    """Copy what a linear tape holds of memory that others can write into: arguments, results, closed-over arrays.

    Others can where something besides the tape refers to an array on it, or to one that this is a view of.
    """
    if current_interpreter() is not EVALUATE:
        return  # the pullback is used before the user gets hold of anything that can be written into
    arrays = {id(x): x for eqn in _equations(tape) for x in eqn.inputs if isinstance(x, numpy.ndarray)}
    objects = dict(arrays)  # with what they are views of
    uses = dict.fromkeys(objects, 1)  # the references to each that are accounted for: here that of `arrays`
    for x in arrays.values():
        while (x := getattr(x, "base", None)) is not None:
            uses[id(x)] = uses.get(id(x), 0) + 1
            if id(x) in objects:
                break
            objects[id(x)] = x
    for eqn in _equations(tape):
        for x in eqn.inputs:
            if id(x) in arrays:
                uses[id(x)] += 1
    x = None  # which is no reference any more
    shared = {i for i, n in zip(objects, map(sys.getrefcount, objects.values())) if n > uses[i] + _OWN}
    shared |= {i for i, x in objects.items() if not isinstance(x, numpy.ndarray)}  # a buffer, in which others may write
    copies = {i: x.copy() for i, x in arrays.items() if not shared.isdisjoint(map(id, _chain(x)))} if shared else {}
    if copies:
        for eqn in _equations(tape):
            eqn.inputs = [copies.get(id(x), x) for x in eqn.inputs]


def _equations(tape: Tape) -> Iterator[Equation]:
    """The equations of a tape and of the bodies on it: of a checkpoint, that is what it computes once more."""
    for eqn in tape.equations:
        yield eqn
        if eqn.primitive.has_body:
            for body in bodies_of(eqn):
                yield from _equations(body)


#: The references to an object in a dictionary that nothing else refers to, as `keep_residuals` counts them.
_OWN = next(map(sys.getrefcount, {0: object()}.values()))
