"""Tracebacks and warnings that show the user's lines, not the library's.

An exception may pass through forty library frames and only three of the user's. The library frames are hidden when the
exception is displayed: by Python at the end of a program or a thread, by IPython and Jupyter, and by pytest. The
exception itself keeps all its frames, so nothing runs slower, and debuggers, `traceback.print_exc` and `logging` see
every frame. `MINIDIFF_TRACEBACK=full` in the environment shows them all; it is read at display time.

NumPy reports an overflow at the line that called its function, which is a library line. When the warning is displayed,
the user's line replaces it, and it is displayed once per user line. (`warnings.catch_warnings(record=True)` displays
nothing, and records the library's line.)
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from minidiff.diagnostics.errors import TracerError
from minidiff.diagnostics.location import is_library, is_own, location_of, warn_at


def _shows_all() -> bool:
    return os.environ.get("MINIDIFF_TRACEBACK") == "full"


# ---------------------------------------------------------------- tracebacks


def _hidden(trace: TracebackType | None) -> list[TracebackType]:
    """The entries to hide: the library's and NumPy's; none if only NumPy's are there."""
    library = []
    while trace is not None:
        if is_library(trace.tb_frame):
            library.append(trace)
        trace = trace.tb_next
    return library if any(is_own(entry.tb_frame) for entry in library) else []


def _shortened(trace: TracebackType | None) -> TracebackType | None:
    """Remove the library's frames from a traceback; None if there are no others."""
    hidden, shown = _hidden(trace), []
    while trace is not None:
        if trace not in hidden:
            shown.append(trace)
        trace = trace.tb_next
    for entry in reversed(shown):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _displayed(error: BaseException | None) -> list[BaseException]:
    """An exception and those displayed with it: causes, contexts, group members."""
    found: dict[int, BaseException] = {}
    waiting = [error]
    while waiting:
        e = waiting.pop()
        if e is not None and id(e) not in found:
            found[id(e)] = e
            context = None if e.__suppress_context__ else e.__context__
            waiting += [e.__cause__, context, *getattr(e, "exceptions", ())]
    return [*found.values()]


@contextlib.contextmanager
def short(error: BaseException | None) -> Iterator[None]:
    """Hide the library's frames of an exception while it is displayed.

    This includes its causes and contexts. A context that has only library frames was handled by the library, and is not
    displayed at all.
    """
    whole = [] if _shows_all() else [(e, e.__traceback__, e.__suppress_context__) for e in _displayed(error)]
    try:
        for e, trace, _ in reversed(whole):  # causes and contexts first
            e.__traceback__ = _short_or_whole(trace) if e is error else _shortened(trace)
            if e.__context__ is not None and e.__context__.__traceback__ is None:
                e.__suppress_context__ = True  # a cause is displayed anyway
        yield
    finally:
        for e, trace, suppresses in whole:
            e.__traceback__, e.__suppress_context__ = trace, suppresses


def _short_or_whole(trace: TracebackType | None) -> TracebackType | None:
    """Shorten a traceback, unless all of its frames are the library's own."""
    return trace if _shows_all() else _shortened(trace) or trace


@contextlib.contextmanager
def _told_by_cause(kind: Any, error: Any) -> Iterator[tuple[Any, Any]]:
    """Display TracerError in place of the error that NumPy raises from it, at the same line.

    Where the user writes `y[i] = x`, NumPy's error is "setting an array element with a sequence".
    """
    cause = getattr(error, "__cause__", None)
    if _shows_all() or type(error) is not ValueError or not isinstance(cause, TracerError):
        yield kind, error
        return
    trace, cause.__traceback__ = cause.__traceback__, error.__traceback__
    try:
        yield type(cause), cause
    finally:
        cause.__traceback__ = trace


def displays_short(show: Callable) -> Callable:
    """Wrap `show(type, exception, traceback)` so that it hides the library's frames."""

    def show_short(kind: Any = None, error: Any = None, trace: Any = None, *args: Any, **kwargs: Any) -> Any:
        with _told_by_cause(kind, error) as (kind, error), short(error):
            return show(kind, error, _short_or_whole(trace), *args, **kwargs)

    return show_short


def _displays_short_in_thread(show: Callable) -> Callable:
    def show_short(args: Any) -> None:
        with short(args.exc_value):
            trace = _short_or_whole(args.exc_traceback)
            show(threading.ExceptHookArgs((args.exc_type, args.exc_value, trace, args.thread)))

    return show_short


# ---------------------------------------------------------------- warnings


def _at_users_line(show: Callable) -> Callable:
    def show_at_users_line(message: Any, category: Any, filename: str, lineno: int, *args: Any, **kwargs: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != filename:
            frame = frame.f_back
        source = None if frame is None or _shows_all() or not is_own(frame) else location_of(frame)
        if frame is None or source is None:
            show(message, category, filename, lineno, *args, **kwargs)
            return
        # The registry entry for the library's line would silence the warning at other user lines.
        frame.f_globals.get("__warningregistry__", {}).clear()
        warn_at(source, message, category)

    return show_at_users_line


# ---------------------------------------------------------------- installation


def install() -> None:
    """Wrap the display hooks of Python and IPython to hide the library's frames."""
    sys.excepthook = displays_short(sys.excepthook)
    threading.excepthook = _displays_short_in_thread(threading.excepthook)
    warnings.showwarning = _at_users_line(warnings.showwarning)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.InteractiveTB.structured_traceback = displays_short(shell.InteractiveTB.structured_traceback)


# This module is also a pytest plugin, through an entry point in `setup.cfg`.


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Mark the library's frames of a test's exception for pytest to hide."""
    for e in [] if call.excinfo is None or _shows_all() else _displayed(call.excinfo.value):
        for entry in _hidden(e.__traceback__):
            entry.tb_frame.f_locals["__tracebackhide__"] = True


def pytest_runtest_setup(item: Any) -> None:
    """Move a test's warnings to the user's lines: pytest replaces `showwarning`."""
    warnings.showwarning = _at_users_line(warnings.showwarning)
