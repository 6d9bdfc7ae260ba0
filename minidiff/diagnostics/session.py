"""The source of code that is typed into Python's interactive session.

Before Python 3.13 a session does not keep it: all code is of the file `<stdin>`, and its lines count from the start of
the statement. The lines are in the history of `readline`, though.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

_STDIN = "<stdin>"
_NEWEST = 500  # lines of the history to look through


_numbers = itertools.count(1)  # of the statements that were found


def file_name(code: CodeType) -> str:
    """The name of the file of some code; for code typed into a session, one that `linecache` knows."""
    return _name_of_statement(code) if code.co_filename == _STDIN else code.co_filename


@functools.cache
def _name_of_statement(code: CodeType) -> str:
    """A file name under which `linecache` has the statement that some code was typed in."""
    for lines, compiled in _statements():
        if _text(code) in map(_text, _codes(compiled)):
            name = f"<stdin {next(_numbers)}>"
            linecache.cache[name] = (len(lines), None, [f"{line}\n" for line in lines], name)
            return name
    return _STDIN


def _statements() -> Iterator[tuple[list[str], CodeType]]:
    """Yield the statements of the session's history, the newest first: their lines, compiled."""
    readline: Any = sys.modules.get("readline")  # a session imports it, where it exists
    count = readline.get_current_history_length() if readline is not None else 0
    history = [readline.get_history_item(n + 1) or "" for n in range(max(0, count - _NEWEST), count)]
    for start in reversed(range(len(history))):
        for end in range(start + 1, len(history) + 1):
            if end < len(history) and history[end][:1].isspace():
                continue  # the next line belongs to the statement
            lines = history[start:end]
            try:
                yield lines, compile("\n".join([*lines, ""]), _STDIN, "single")
            except (SyntaxError, ValueError):  # a decorator, or an open bracket: the next lines belong to it, too
                if end - start < 50:
                    continue
            break


def _text(code: CodeType) -> tuple:
    """What two compilations of a text have in common; code that has run is not equal to code that has not."""
    constants = [c for c in code.co_consts if not isinstance(c, CodeType)]
    return code.co_name, code.co_firstlineno, code.co_code, code.co_names, repr(constants)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield some code, and the code of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
