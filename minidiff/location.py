"""Where an operation on a tape comes from: the line of the program that asked for it.

A tape is written while the program runs, so the line is on the stack: the nearest frame that is not the library's.
Where a tape is run again, or transposed, operations come from those on that tape: the functions that do so are marked
(`@replays`, `@transposes`), and the equation that they are at, their local variable `eqn`, says where it is from. Of a
compiled program its own table says it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple

import numpy


class Location(NamedTuple):
    """A line of a program. `backward` says whether the operation is there for its sake, in the backward pass.

    Where one operation does what several lines asked for, this is the line of the first operand, and `others` are those
    of the others, in order; empty if they are the same.
    """

    filename: str
    line: int
    backward: bool = False
    others: tuple[Location | None, ...] = ()

    @property
    def text(self) -> str:
        """The line itself, where it can be found."""
        import linecache  # which reports alone need

        return linecache.getline(self.filename, self.line).strip()

    def on_the_way_back(self) -> Location:
        """The same line, or lines, of what is there for their sake in the backward pass."""
        others = tuple(other and other.on_the_way_back() for other in self.others)
        return self if self.backward and others == self.others else self._replace(backward=True, others=others)

    def __str__(self) -> str:
        name = os.path.basename(self.filename)
        # What was typed into a session has no file, and in a notebook one that nobody has heard of.
        typed = self.filename.startswith("<") or "ipykernel_" in self.filename
        place = f"line {self.line}" if typed else f"{name}:{self.line}"
        return f"{place}: {self.text}" if self.text else place


def joined(sources: Sequence[Location | None]) -> Location | None:
    """Where an operation comes from that does what several did, each of one operand."""
    first, *others = [line for source in sources for line in lines_of(source)]
    return first and first._replace(others=tuple(others) if any(other != first for other in others) else ())


def merged(sources: Sequence[Location | None]) -> Location | None:
    """Where an operation comes from that stands for several, of one operand."""
    return joined([*dict.fromkeys(line for source in sources for line in lines_of(source))])


def lines_of(source: Location | None) -> list[Location | None]:
    """The lines that an operation comes from, each for itself."""
    return [source._replace(others=()), *source.others] if source else [None]


def parted(source: Location | None, operands: int) -> list[Location | None]:
    """Where each operand's part of an operation comes from: what `joined` put together."""
    lines = lines_of(source)
    return lines if len(lines) == operands else lines[:1] * operands


#: Folders whose frames are not the program's. Packages that stand on this one add theirs.
LIBRARY: list[str] = [os.path.dirname(os.path.abspath(f)) + os.sep for f in (__file__, numpy.__file__)]

#: Programs that come with a library are programs: examples, and networks on many ranks.
_PROGRAMS = (f"examples{os.sep}", f"parallel{os.sep}")

ASKED_FOR = "__asked_for__"  # in a compiled program: what lines of a user's it has, by its own

_is_library: dict[str, bool] = {}
_marked: dict[int, str] = {}  # id of a function's code -> what it is marked as


def add_library(file: str) -> None:
    """Declare the folder of this file to be a library's."""
    LIBRARY.append(os.path.dirname(os.path.abspath(file)) + os.sep)
    _is_library.clear()


def _mark(name: str) -> Callable[[Callable], Callable]:
    def mark(function: Callable) -> Callable:
        _marked[id(function.__code__)] = name
        return function

    return mark


#: A function that applies the operation of an equation, its variable `eqn`, once more.
replays = _mark("replays")

#: A function that transposes equations, one after the other: its variable `eqn`.
transposes = _mark("transposes")

#: A function that begins a tape. What is above it on the stack is no part of the program.
begins = _mark("begins")


def here() -> Location | None:
    """Where the operation that is running comes from. None where the library has nobody to blame but itself."""
    return location_of(sys._getframe(1))


def location_of(frame: FrameType | None) -> Location | None:
    """As `here`, for what runs in this frame."""
    found: Location | None = None
    while found is None and frame is not None:
        code = frame.f_code
        mark = _marked.get(id(code))
        if mark in ("replays", "transposes"):
            eqn = frame.f_locals.get("eqn")
            found = None if eqn is None else eqn.source
            if found is not None and mark == "transposes":
                return found.on_the_way_back()
        elif not _belongs_to_library(code.co_filename):
            compiled = frame.f_globals.get(ASKED_FOR)
            found = Location(code.co_filename, frame.f_lineno) if compiled is None else compiled.get(frame.f_lineno)
        frame = frame.f_back
    if found is None or found.backward:
        return found
    while frame is not None:  # whether that is on the way back
        mark = _marked.get(id(frame.f_code))
        if mark == "transposes":
            return found.on_the_way_back()
        if mark == "begins":
            break
        frame = frame.f_back
    return found


def _belongs_to_library(filename: str) -> bool:
    known = _is_library.get(filename)
    if known is None:
        known = _is_library[filename] = filename.startswith("<frozen ") or any(
            filename.startswith(folder) and not filename.startswith(tuple(folder + p for p in _PROGRAMS))
            for folder in LIBRARY
        )
    return known


_warned: dict[str, dict] = defaultdict(dict)  # by file, what `warnings` keeps in mind to warn once a line


def warn_at(source: Location | None, text: str) -> None:
    """Warn of what a line of the program does. Without a line, of what this function's caller was called for."""
    if source is None:
        warnings.warn(text, stacklevel=3)
    else:
        warnings.warn_explicit(text, UserWarning, source.filename, source.line, registry=_warned[source.filename])
