"""The source of code that is typed into Python's interactive session.

Before Python 3.13 a session does not keep it: all code is of the file `<stdin>`, and its lines count from the start of
the statement. The lines are in the history of `readline`, though.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

_STDIN = "<stdin>"
_NEWEST = 500  # lines of the history to look through


class _FileNames(dict[CodeType, str]):
    """By code: a file name under which `linecache` has the statement that it was typed in."""

    def __missing__(self, code: CodeType) -> str:
        self[code] = _STDIN
        for lines, compiled in _statements():
            if _text(code) in map(_text, _codes(compiled)):
                self[code] = f"<stdin {len(self)}>"
                linecache.cache[self[code]] = (len(lines), None, [f"{line}\n" for line in lines], self[code])
                break
        return self[code]


_file_names = _FileNames()


def file_name(code: CodeType) -> str:
    """The name of the file of some code; for code typed into a session, one that `linecache` knows."""
    return _file_names[code] if code.co_filename == _STDIN else code.co_filename


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
