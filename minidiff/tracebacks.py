"""Tracebacks and warnings that show the user's lines, not the library's.

An exception may pass through forty frames of the library on its way through three of the user's. They are left out
where it is displayed: by Python, where it ends a program or a thread; by IPython and Jupyter; by pytest. The exception
keeps all its frames: no operation runs slower, and debuggers, `traceback.print_exc` and `logging` see every frame. So
does everyone with `MINIDIFF_TRACEBACK=full` in the environment, which is read when something is displayed.

NumPy warns of an overflow at the line that called its function, and that is a line of the library. Where the warning is
displayed it gets the user's line, and is displayed once for each of these. (`warnings.catch_warnings(record=True)`
displays nothing, and records the library's line.)
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from minidiff.location import is_library, is_own, location_of, warn_at


def _shows_all() -> bool:
    return os.environ.get("MINIDIFF_TRACEBACK") == "full"


# ---------------------------------------------------------------- tracebacks


def _hidden(trace: TracebackType | None) -> list[TracebackType]:
    """The entries of a traceback to leave out: the library's and NumPy's, or none where only NumPy's are in it."""
    library = []
    while trace is not None:
        if is_library(trace.tb_frame):
            library.append(trace)
        trace = trace.tb_next
    return library if any(is_own(entry.tb_frame) for entry in library) else []


def _shortened(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the library's frames. None where there are no others."""
    hidden, shown = _hidden(trace), []
    while trace is not None:
        if trace not in hidden:
            shown.append(trace)
        trace = trace.tb_next
    for entry in reversed(shown):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _displayed(error: BaseException | None) -> list[BaseException]:
    """An exception, and all those that are displayed with it: causes, contexts, members of groups."""
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
    """Leave the library's frames out of an exception's traceback, and those it came of, while it is displayed.

    A context without any other frames is one that the library dealt with: it is not displayed at all.
    """
    whole = [] if _shows_all() else [(e, e.__traceback__, e.__suppress_context__) for e in _displayed(error)]
    try:
        for e, trace, _ in reversed(whole):  # those that it came of first
            e.__traceback__ = _short_or_whole(trace) if e is error else _shortened(trace)
            if e.__context__ is not None and e.__context__.__traceback__ is None:
                e.__suppress_context__ = True  # a cause is displayed all the same
        yield
    finally:
        for e, trace, suppresses in whole:
            e.__traceback__, e.__suppress_context__ = trace, suppresses


def _short_or_whole(trace: TracebackType | None) -> TracebackType | None:
    """A traceback as it is displayed: whole where the library runs a program of its own, and all frames are its."""
    return trace if _shows_all() else _shortened(trace) or trace


def displays_short(show: Callable) -> Callable:
    """What displays an exception, given its type, itself and its traceback; made to leave out the library's frames."""

    def show_short(kind: Any = None, error: Any = None, trace: Any = None, *args: Any, **kwargs: Any) -> Any:
        with short(error):
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
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != filename:
            frame = frame.f_back
        source = None if frame is None or _shows_all() or not is_own(frame) else location_of(frame)
        if source is None:
            show(message, category, filename, lineno, *args, **kwargs)
            return
        # What says that this line of the library has warned would silence the user's other lines.
        frame.f_globals.get("__warningregistry__", {}).clear()
        warn_at(source, message, category)

    return show_at_users_line


# ---------------------------------------------------------------- what displays both


def install() -> None:
    """Leave out the library's frames of what Python and IPython display from now on, whoever displays it now."""
    sys.excepthook = displays_short(sys.excepthook)
    threading.excepthook = _displays_short_in_thread(threading.excepthook)
    warnings.showwarning = _at_users_line(warnings.showwarning)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.InteractiveTB.structured_traceback = displays_short(shell.InteractiveTB.structured_traceback)


# This module is a plugin of pytest, too, which knows it by the entry point in `setup.cfg`.


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Mark the library's frames of a test's exception as pytest hides them."""
    for e in [] if call.excinfo is None or _shows_all() else _displayed(call.excinfo.value):
        for entry in _hidden(e.__traceback__):
            entry.tb_frame.f_locals["__tracebackhide__"] = True


def pytest_runtest_setup(item: Any) -> None:
    """Give the warnings of a test the user's lines: pytest records them instead of displaying them, until it ends."""
    warnings.showwarning = _at_users_line(warnings.showwarning)
