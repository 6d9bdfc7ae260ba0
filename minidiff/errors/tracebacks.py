"""Tracebacks that show the user's lines, not the library's.

An exception may pass through forty library frames and only three of the user's. The library's frames are removed from
its traceback where it leaves a public function for the user's code, so that whatever displays it, or logs it, shows
the user's lines. (Python 3.10 adds the frame of that function again.) `MINIDIFF_TRACEBACK=full` in the environment
keeps them all; it is read when an exception is raised.

A `try` costs nothing where nothing is raised, so frequent functions have one; others are decorated.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, TracebackType
from typing import Any, TypeVar

from minidiff.errors.location import is_library, is_own

F = TypeVar("F", bound=Callable)


def _is_own(trace: TracebackType) -> bool:
    return is_own(trace.tb_frame)


def _list_entries(trace: TracebackType | None) -> list[TracebackType]:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    return entries


def _shorten_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Remove the library's frames and NumPy's from a traceback that has some of the library; None if none are left."""
    entries, trace_of_user = _list_entries(trace), None
    if not any(map(_is_own, entries)):
        return trace
    for entry in reversed(entries):
        if not is_library(entry.tb_frame):
            trace_of_user = TracebackType(trace_of_user, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace_of_user


def _displayed_exceptions(error: BaseException) -> list[BaseException]:
    """Return an exception and those displayed with it: causes, contexts, group members."""
    displayed: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        e = waiting.pop()
        if e is not None and id(e) not in displayed:
            displayed[id(e)] = e
            waiting += [e.__cause__, None if e.__suppress_context__ else e.__context__, *getattr(e, "exceptions", ())]
    return [*displayed.values()]


def shorten(error: BaseException) -> None:
    """Remove the library's frames from the tracebacks of an exception, and of its causes and contexts.

    A context that has only library frames was handled by the library, and is not displayed at all.
    """
    if os.environ.get("MINIDIFF_TRACEBACK") == "full":
        return
    displayed, handled = _displayed_exceptions(error), set()
    for e in displayed:
        trace, e.__traceback__ = e.__traceback__, _shorten_traceback(e.__traceback__)
        if trace is not None and _is_own(trace):
            trace.tb_next = e.__traceback__  # Python 3.10 raises it again with the traceback that it has caught
        if trace is not None and e.__traceback__ is None:
            handled.add(id(e))
    for e in displayed:
        if id(e.__context__) in handled:
            e.__suppress_context__ = True  # a cause is displayed anyway


def _explain_cause(error: BaseException) -> None:
    """Explain why NumPy cannot write a traced value into an array, or which attribute a traced value lacks.

    Where the user writes `y[i] = x`, NumPy replaces our error by "setting an array element with a sequence". Python's
    AttributeError names the class, since a `__getattr__` that does not would make all attributes slower.
    """
    cause = error.__cause__
    if type(error) is ValueError and cause is not None and error.args[:1] == (_ASSIGNED,):
        error.args, error.__cause__ = cause.args, None
    if type(error) is AttributeError:
        owner: Any = error.obj
        if hasattr(type(owner), "missing_attribute"):
            error.args = (owner.missing_attribute(error.name),)


_ASSIGNED = "setting an array element with a sequence."


def trim_traceback(error: BaseException) -> None:
    """Prepare an exception that leaves the calling function, to be raised again: hide frames if its caller is a user.

    >>> def public(x):
    ...     try:
    ...         return 1 / x
    ...     except BaseException as error:
    ...         trim_traceback(error)
    ...         raise
    """
    caller = sys._getframe(1).f_back
    if caller is None or not is_own(caller):
        _explain_cause(error)
        shorten(error)


def hide_own_frames(function: F) -> F:
    """Decorate a public function: an exception that leaves it for the user's code has only the user's frames.

    Of a class, decorate the public methods.
    """
    if not isinstance(function, type):
        hiding: Any = functools.wraps(function)(hide_own_frames_of_lambda(function))
        return hiding
    for name, method in [*vars(function).items()]:
        if type(method) is FunctionType and (name in ("__init__", "__call__") or not name.startswith("_")):
            setattr(function, name, hide_own_frames(method))
    return function


def hide_own_frames_of_lambda(function: Callable) -> Callable:
    """Decorate a function as `hide_own_frames` does, but drop its name and docstring."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs) if kwargs else function(*args)
        except BaseException as error:
            trim_traceback(error)
            raise

    return call


def hide_frames_of(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Decorate the functions among these names of a module, which is where users import them from."""
    for name in names:
        function = namespace.get(name)
        if type(function) is FunctionType:
            namespace[name] = _make_public(function, namespace["__name__"])


@functools.cache
def _make_public(function: FunctionType, module: str) -> Callable:
    """Return the function that users import from a module, where pickle looks for it: one, also under two names."""
    public = hide_own_frames(function)
    public.__module__ = module
    return public
