"""Source locations: the line of the program that applied an operation on a tape.

A tape is recorded while the program runs, so the line is on the call stack: the innermost frame outside the library.
When a tape is replayed or transposed, its equations supply the locations: the functions that do so are marked
(`@replays`, `@transposes`), and their local variable `equation` is the current one. A compiled program has a table of
locations.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy

from minidiff.values.aliasing import current_lifetimes, read_only_copy
from minidiff.values.settings import setting


class Location(NamedTuple):
    """A line of a program. `backward` is true in its backward pass, `recomputed` if that computes there again
    what the forward pass computed.

    If an operation stems from several lines (it is variadic, say), this is the line of the first operand, and `others`
    are the lines of the other operands, in order. `others` is empty if they are all the same. `place` is the rank that
    a block `with md.place(rank):` around the line names.
    """

    filename: str
    line: int
    backward: bool = False
    others: tuple[Location | None, ...] = ()
    recomputed: bool = False
    place: int | None = None

    @property
    def text(self) -> str:
        """The source text of the line, or an empty string."""
        import linecache  # only reports need it

        return linecache.getline(self.filename, self.line).strip()

    def on_the_way_back(self) -> Location:
        """Return the same line or lines, in the backward pass."""
        others = tuple(other and other.on_the_way_back() for other in self.others)
        return self if self.backward and others == self.others else self._replace(backward=True, others=others)

    def __str__(self) -> str:
        name = os.path.basename(self.filename)
        # Code typed into a session has no file, and that of a notebook cell has a meaningless name.
        typed = self.filename.startswith("<") or "ipykernel_" in self.filename
        line = f"line {self.line}" if typed else f"{name}:{self.line}"
        return f"{line}: {self.text}" if self.text else line


def fuse_locations(sources: Sequence[Location | None]) -> Location | None:
    """Return the location of a variadic operation that replaces one per operand."""
    first, *others = [line for source in sources for line in lines_of(source)]
    return first and first._replace(others=tuple(others) if any(other != first for other in others) else ())


def merge_locations(sources: Sequence[Location | None]) -> Location | None:
    """Return the location of one operation that replaces several equal ones."""
    return fuse_locations([*dict.fromkeys(line for source in sources for line in lines_of(source))])


def lines_of(source: Location | None) -> list[Location | None]:
    """Split a location into one per line."""
    return [source._replace(others=()), *source.others] if source else [None]


def split_location(source: Location | None, operands: int) -> list[Location | None]:
    """Return the location for each operand: the inverse of `fuse_locations`."""
    lines = lines_of(source)
    return lines if len(lines) == operands else lines[:1] * operands


_NUMPY = os.path.dirname(os.path.abspath(numpy.__file__)) + os.sep

#: Folders of library code, and the file of its decorators. Packages that build on this one add theirs.
LIBRARY: list[str] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, _NUMPY, contextlib.__file__]

#: Subfolders of a library whose code counts as user code: examples, and parallel networks.
_PROGRAMS = (f"examples{os.sep}", f"parallel{os.sep}")

ASKED_FOR = "__asked_for__"  # in a compiled program's globals: its line number -> the user's location

#: The rank of the innermost `with md.place(rank):`.
current_place: ContextVar[int | None] = setting("place", None)

_marked: dict[int, str] = {}  # id of a function's code -> its mark


def add_library(*folders: str) -> None:
    """Declare folders to be library code."""
    LIBRARY.extend(os.path.abspath(folder) + os.sep for folder in folders)
    _is_library.clear()


def _mark(name: str) -> Callable[[Callable], Callable]:
    def mark(function: Callable) -> Callable:
        _marked[id(function.__code__)] = name
        return function

    return mark


#: Mark a function that applies the equation in its variable `equation` again.
replays = _mark("replays")

#: Mark a function that transposes the equations of a tape, one by one, in its variable `equation`.
transposes = _mark("transposes")

#: Mark a function that computes again what the backward pass needs of the forward pass.
recomputes = _mark("recomputes")

#: Mark a step of the forward pass that runs again, in no pass but its own.
runs_again = _mark("runs again")

#: Mark a function that begins a tape. Its callers on the stack are not part of the program.
begins = _mark("begins")


def current_location() -> Location | None:
    """Return the location of the running operation; None if no frame is the user's. The caller's frame is not."""
    source, place = location_of(sys._getframe(2)), current_place.get()
    return source if place is None or source is None or source.place is not None else source._replace(place=place)


def location_of(frame: FrameType | None) -> Location | None:
    """Return the location of the operation that runs in this frame, as `current_location` does in its caller's."""
    mark_of, is_library_file = _marked.get, _belongs_to_library  # this walks the stack, for each equation
    source: Location | None = None
    while source is None and frame is not None:
        code, line = frame.f_code, frame.f_lineno
        mark = mark_of(id(code))
        if mark is None:
            if not (is_library_file(code.co_filename) or _is_generated(code)):
                lines = frame.f_globals.get(ASKED_FOR)
                source = _location(code.co_filename, line) if lines is None else lines.get(line)
        elif mark in ("replays", "transposes"):
            equation = frame.f_locals.get("equation")
            source = None if equation is None else equation.source
            if source is not None and mark == "transposes":  # a cotangent is computed once, of what may be recomputed
                return (source._replace(recomputed=False) if source.recomputed else source).on_the_way_back()
        frame = frame.f_back
    if source is None or source.backward:
        return source
    while frame is not None:  # is this the backward pass?
        mark = mark_of(id(frame.f_code))
        if mark is not None:
            if mark in ("recomputes", "runs again"):
                source = source._replace(recomputed=True)
            if mark == "transposes":
                return source.on_the_way_back()
            if mark in ("begins", "runs again"):
                break
        frame = frame.f_back
    return source


def describe_line(frame: FrameType | None) -> str:
    """Return the line of the operation that runs in a frame, and that which called its compiled program, as text."""
    line = location_of(frame)
    while frame is not None and is_library(frame):
        frame = frame.f_back
    caller = None if frame is None else _location(frame.f_code.co_filename, frame.f_lineno)
    called = caller is not None and line is not None and caller[:2] != line[:2]
    return f"{line}, called at {caller}" if called else str(line or "")


#: The location of a line: one object for all operations that it applies.
_location = functools.lru_cache(maxsize=4096)(Location)


class _IsLibrary(dict[str, bool]):
    """By the names of files: whether they are library code."""

    def __missing__(self, filename: str) -> bool:
        self[filename] = filename.startswith("<frozen ") or any(
            filename.startswith(folder) and not filename.startswith(tuple(folder + p for p in _PROGRAMS))
            for folder in LIBRARY
        )
        return self[filename]


_is_library = _IsLibrary()
_belongs_to_library = _is_library.__getitem__


def is_library(frame: FrameType) -> bool:
    """Return whether a frame belongs to the library, NumPy, a compiled program, or code that Python writes."""
    code = frame.f_code
    return _belongs_to_library(code.co_filename) or ASKED_FOR in frame.f_globals or _is_generated(code)


def _is_generated(code: CodeType) -> bool:
    """Return whether `dataclasses` wrote a function; its file is named as that of `python -c`."""
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no co_qualname
    return code.co_filename == "<string>" and name.startswith("__")


def is_own(frame: FrameType) -> bool:
    """Return whether a frame belongs to the library itself, not to NumPy, `importlib` or `contextlib`."""
    return is_library(frame) and not frame.f_code.co_filename.startswith((_NUMPY, "<frozen ", contextlib.__file__))


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame):
        frame = frame.f_back
    return frame


def called_by(name: str) -> bool:
    """Return whether the innermost function outside of the library has this name."""
    frame = _user_frame()
    return frame is not None and frame.f_code.co_name == name


def assigns_an_item() -> bool:
    """Return whether the program is running an assignment such as `y[i] = x`."""
    import opcode  # only errors ask

    frame = _user_frame()
    return frame is not None and opcode.opname[frame.f_code.co_code[frame.f_lasti]] in ("STORE_SUBSCR", "STORE_SLICE")


_warned: dict[str, dict] = defaultdict(dict)  # file -> the registry with which `warnings` warns only once per line


def warn_at(source: Location | None, message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn at a line of the program; without one, at the caller's caller."""
    if source is None:
        warnings.warn(message, category, stacklevel=3)
    else:
        warnings.warn_explicit(message, category, source.filename, source.line, registry=_warned[source.filename])


def warn_here(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line that is running. Exported programs call `warnings.warn` in its place."""
    warn_at(location_of(sys._getframe(1)), message, category)


def not_linear_message(primitive: Any, type: Any) -> str:
    """Explain why an operation cannot be transposed in an operand of this type, and where it was applied."""
    source = current_location()
    return (
        f"{primitive.name} cannot be transposed: it is not linear in the operand of type {type}"
        + (f" ({source})" if source is not None else "")
        + ". Only a linear function has a transpose; for others, transpose the derivative, md.linearize(f, *args)[1]"
    )


#: A program of LONG equations takes seconds to compile. A line that was recorded OFTEN times is in a loop.
LONG, OFTEN = 1 << 14, 1000


class RecordingMonitor:
    """A monitor of recorded operations: it warns of unrolled Python loops, and tracks lifetimes.

    If the program is recorded as it runs `eager`ly, the steps of loops are recorded one by one, and arrays that the
    library makes count as results.
    """

    eager = False

    def constant(self, x: Any, stage: Any) -> Any:
        """Return a tape's constant for an array: a read-only copy if the tape outlives the call."""
        if self.eager and (lifetimes := current_lifetimes.get()) is not None and id(x) in lifetimes.made:
            return lifetimes.variable_of(x, stage)
        return x if stage.program is None else read_only_copy(x)

    def evaluate(self, evaluation: Any, primitive: Any, args: Sequence[Any], params: dict) -> Any:
        """Return the one number that an operation computes of known integers, which loops and branches ask; or None."""
        known = all(isinstance(x, int | numpy.ndarray | numpy.generic) for x in args)
        if not (known and args) or primitive.on_ranks or primitive.has_effect:
            return None
        if any(numpy.asarray(x).dtype.kind not in "biu" for x in args):
            return None
        out = evaluation.process(primitive, args, params)
        return out if getattr(out, "size", 0) == 1 else None

    def observe(self, equations: Sequence[Any], results: Any) -> None:
        """Observe the results of the last of these equations. Warn of the line that most of LONG equations are from."""
        if (lifetimes := current_lifetimes.get()) is not None:
            lifetimes.watch_results(results, equations)
        if len(equations) != LONG:
            return
        lines = Counter(eqn.source._replace(others=()) for eqn in equations if eqn.source is not None)
        for line, times in lines.most_common(1):
            if times >= OFTEN:
                warn_at(
                    line,
                    f"a Python loop is recorded step by step, this line more than {OFTEN:,} times so far, and each "
                    "step takes time to compile. Write the loop as md.fori_loop(0, n, lambda i, x: ..., x), or as "
                    "md.scan: then one step is recorded and compiled, however many there are",
                )
