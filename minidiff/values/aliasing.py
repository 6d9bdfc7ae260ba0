"""Shared memory of arrays: copies where results would share it with arguments or with each other.

Where NumPy copies, every transformation copies too: `np.copy(x)`, `+x` and `x.flatten()` are operations on the tape.
Where NumPy returns a view of an argument (`x.T`, or `x` itself), so does a function that runs eagerly: this concerns
the values that `jvp`, `vjp` and `grad` return with their derivatives, and the results of `checkpoint` and loops. All
other results (tangents, cotangents, gradients, results of `vmap`, `jit` and `shard_map`) share no memory with
arguments. No result shares memory with the library's own arrays (constants of programs, buffers, residuals of a
pullback). Tangents, cotangents, gradients and results of `vmap` and `jit` share no memory with each other, and are
writable. A sharded array cannot be written into: its blocks are read-only views (`.local`), of memory that no plain
array shares, and all other ways out of it copy (`gather()`, `numpy.asarray`, `reshard(x, P())`).

A tape that `jit` or `make_tape` records has constants of its own: read-only copies of the arrays that the function
closes over, as they are when it uses them. `vjp` and `linearize` copy what the user may write into when the function
has run.

The lifetimes of the values of a program that runs eagerly are observed while it is recorded.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy

from minidiff.values.settings import override, setting


def copy_shared(results: Sequence[Any], held: Sequence[Any] = ()) -> Sequence[Any]:
    """Copy results that are read-only or share memory with a prior one or `held`."""
    if len(results) == 1 and not held and getattr(results[0], "base", None) is None:
        return results
    taken = {id(x if x.base is None else owner_of(x)) for x in held if isinstance(x, numpy.ndarray)}
    copies = []
    for x in results:
        if isinstance(x, numpy.ndarray):
            owner = id(x if x.base is None else owner_of(x))
            if owner in taken or not x.flags.writeable:
                x = x.copy()
            else:
                taken.add(owner)
        copies.append(x)
    return copies


def owner_of(x: Any) -> Any:
    """Return the object that owns an array's memory: itself, or the base of a view."""
    while (base := getattr(x, "base", None)) is not None:
        x = base
    return x


def read_only_view(x: Any) -> Any:
    """Return a view of an array that cannot be written into; a NumPy scalar is returned unchanged."""
    if not isinstance(x, numpy.ndarray):
        return x
    view = x.view()
    view.setflags(False)  # type: ignore[call-arg]  # `write=False` takes twice as long
    return view


def writable_view(x: numpy.ndarray) -> numpy.ndarray:
    """Return a view of a read-only view that can be written into; a copy if another array shares the memory.

    >>> x = read_only_view(numpy.zeros(2))
    >>> writable_view(x)[0] = 1.0
    >>> y = x[:1]
    >>> writable_view(x)[0] = 2.0
    >>> x
    array([1., 0.])
    """
    alone = type(x.base) is numpy.ndarray and x.base.flags.writeable and _references(x) == _REFERENCES_OF_ONE
    if not alone:
        return x.copy()
    view = x.view()
    view.flags.writeable = True
    return view


def _references(x: numpy.ndarray) -> int:
    """Count the references to the owner of a view's memory, this function's included."""
    return sys.getrefcount(x.base)


_REFERENCES_OF_ONE = _references(read_only_view(numpy.zeros(1)))  # where there is one view

# ---------------------------------------------------------------- constants of tapes

#: By id of an array: a reference to it, and one to its last copy on a tape.
_copies: dict[int, tuple[weakref.ref, weakref.ref]] = {}


def read_only_copy(x: Any) -> Any:
    """Return a read-only copy of an array: the last copy, if the array has not changed since.

    Values that cannot be written into, such as numbers, are returned unchanged. Broadcast arrays are copied once.

    >>> x = numpy.zeros(2)
    >>> before, again = read_only_copy(x), read_only_copy(x)
    >>> x[0] = 1.0
    >>> before is again, before, read_only_copy(x)
    (True, array([0., 0.]), array([1., 0.]))
    """
    if is_frozen(x) or x.dtype.hasobject or _types_alone.get():  # objects are refused
        return x
    i, once = id(x), _distinct_elements(x)
    known, last = (reference() for reference in _copies.get(i, (lambda: None, lambda: None)))
    if known is x and last is not None and _same_bits(once, _distinct_elements(last)):
        return last
    copy = once.copy(order="K")
    copy.flags.writeable = False
    copy = copy if copy.shape == x.shape else numpy.broadcast_to(copy, x.shape)
    _copies[i] = weakref.ref(x, lambda _: _copies.pop(i, None)), weakref.ref(copy)
    return copy


# ---------------------------------------------------------------- lifetimes of values


class Lifetimes:
    """The lifetime of each value in a recorded program: the same as when it runs eagerly.

    `ended` maps a variable to the number of equations that its tape had when the last reference to its value went. The
    arrays of one number that the library creates during recording, such as zeros, are results of `uniform`.
    """

    def __init__(self, uniform: Any) -> None:
        self.ended: dict[Any, int] = {}
        self._watched: list[weakref.ref] = []  # a reference calls back only if it is held itself
        self._uniform = uniform
        #: By id of an array that was made: a reference to it, and its variables, each with the equations of its tape.
        self.made: dict[int, tuple[weakref.ref, list[tuple[Any, Sequence]]]] = {}

    def watch_results(self, results: Any, equations: Sequence) -> None:
        """Record when the results of the last of these equations are freed."""
        for x in results if isinstance(results, list) else [results]:
            self._watched.append(weakref.ref(x, partial(self._end, x.variable, equations)))

    def watch_array(self, x: Any) -> None:
        """Record when an array of one number is freed, and give it a variable on tapes that use it."""
        self.made[id(x)] = weakref.ref(x, partial(self._end_array, id(x))), []

    def variable_of(self, x: Any, tape: Any) -> Any:
        """The variable, on the tape of this recorder, of an array that was made."""
        _, uses = self.made[id(x)]
        use = next((variable for variable, equations in uses if equations is tape.equations), None)
        if use is None:
            use = tape.record(self._uniform, [], {"shape": x.shape, "dtype": x.dtype}).variable
            uses.append((use, tape.equations))
        return use

    def _end_array(self, i: int, _: weakref.ref) -> None:
        self.ended.update((variable, len(equations)) for variable, equations in self.made.pop(i)[1])

    def _end(self, variable: Any, equations: Sequence, _: weakref.ref) -> None:
        self.ended[variable] = len(equations)


current_lifetimes: ContextVar[Lifetimes | None] = setting("current_lifetimes", None)


def watch_lifetimes(uniform: Any) -> AbstractContextManager[Lifetimes]:
    """Watch the values of programs that are recorded in the block; `uniform` is the operation that makes zeros."""
    return override(current_lifetimes, Lifetimes(uniform))


# ---------------------------------------------------------------- arrays that library functions make

#: Whether programs are recorded for their types alone, and never run.
_types_alone: ContextVar[bool] = setting("types_alone", False)


def types_alone() -> AbstractContextManager[bool]:
    """Record programs that never run: their constants take no memory, and are not copied.

    >>> with types_alone():
    ...     uniform(0, (10**6, 10**6), "float32").strides
    (0, 0)
    """
    return override(_types_alone, True)


def uniform(value: float, shape: Sequence[int], dtype: Any) -> numpy.ndarray:
    """Return a new array with one value everywhere; one number, broadcast, in a program that never runs."""
    lifetimes = current_lifetimes.get()
    if lifetimes is None and not _types_alone.get():
        return numpy.full(shape, value, dtype) if value else numpy.zeros(shape, dtype)
    number = numpy.array(value, dtype)
    number.flags.writeable = False
    out = numpy.broadcast_to(number, shape)
    if lifetimes is not None and out.ndim:
        lifetimes.watch_array(out)
    return out


def is_frozen(x: Any) -> bool:
    """Whether an array, and each array that it is a view of, is read-only."""
    while x is not None:
        if isinstance(x, numpy.ndarray) and x.flags.writeable and x.nbytes:
            return False
        x = getattr(x, "base", None)  # windows have one that is not an array
    return True


def copy_view(x: numpy.ndarray) -> numpy.ndarray:
    """Return a copy of an array; of a view that has elements several times, such as windows, one of all that it views.

    >>> windows = numpy.lib.stride_tricks.sliding_window_view(numpy.arange(1000.0), 100)
    >>> owner_of(copy_view(windows)).nbytes
    8000
    """
    owner = owner_of(x)
    if not (isinstance(owner, numpy.ndarray) and owner.nbytes < x.nbytes and owner.flags.forc):
        return x.copy()
    start = x.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return numpy.ndarray(x.shape, x.dtype, owner.copy(order="K").ravel(order="K"), start, x.strides)


def _distinct_elements(x: numpy.ndarray) -> numpy.ndarray:
    """Return the elements of an array without those that broadcasting repeats."""
    return x[(*[slice(1) if step == 0 else slice(None) for step in x.strides], ...)]


def distinct_bytes(x: numpy.ndarray) -> int:
    """Return the bytes of an array without those that broadcasting repeats."""
    return _distinct_elements(x).nbytes


def _same_bits(x: numpy.ndarray, y: numpy.ndarray) -> bool:
    same_type = x.shape == y.shape and x.dtype == y.dtype
    return same_type and numpy.array_equal(x.ravel(order="K").view(numpy.uint8), y.ravel(order="K").view(numpy.uint8))
