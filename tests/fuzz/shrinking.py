"""Programs that are wrong, and the smallest ones of their kind."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy

from tests.fuzz.programs import Program, smaller

SECONDS = 60  # of a search for smaller programs


class Finding(AssertionError):
    """A way to run a program gave something else than NumPy."""


@dataclasses.dataclass
class Failure:
    program: Program
    name: str  # of a route, or a way to run a program of arrays
    error: Exception

    def __str__(self) -> str:
        text = "".join(traceback.format_exception_only(self.error)).strip()
        first = f"# seed {self.program.values!r}, {self.name}: {text[:600]}".replace("\n", "\n# ")
        return f"{first}\n{self.program.script()}"


def quietly(f: Callable) -> Callable:
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings(), numpy.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return f(*args, **kwargs)

    return run


@quietly
def run(program: Program) -> None:
    """Run the script of a program."""
    exec(compile(program.script(), "<a program>", "exec"), {})


def kind_of(error: Exception) -> str:
    """Return the part of an error that a smaller program's error must share."""
    return re.split(r"[ :]", str(error))[0] if isinstance(error, Finding) else type(error).__name__


def shrunk(failure: Failure, run: Callable[[Program, Counter, str], list[Failure]]) -> Failure:
    """A smaller program with a failure of this kind, in the same way."""
    searching, end = True, time.monotonic() + SECONDS
    while searching and time.monotonic() < end:
        searching = False
        for program in smaller(failure.program):
            if raises_python_numbers(program.inputs, program.lines):
                continue
            actual = run(program, Counter(), failure.name)
            if actual and kind_of(actual[0].error) == kind_of(failure.error):
                failure, searching = actual[0], True
                break
    return failure


def raises_python_numbers(inputs: dict[str, Any], lines: dict[str, str]) -> bool:
    """Whether a program takes a power of Python's numbers alone: `3 ** 2**40` would fill the memory, for hours."""
    plain = {name for name, kind in inputs.items() if not kind.dtype and not kind.text}
    for name, line in lines.items():
        if "np." not in line and set(re.findall(r"(?<![\w.'])[a-z](?!\w)", line)) <= plain:
            if "**" in line:
                return True
            plain.add(name)
    return False
