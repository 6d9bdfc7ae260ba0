"""Run random programs, print those that are wrong as scripts, and make them smaller."""

from __future__ import annotations

import dataclasses
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable
from unittest import mock

from minidiff.compiler import buffers
from tests.fuzz.checks import Check, Finding, quietly
from tests.fuzz.programs import ROUTES, Program, drawn, drawn_arrays, smaller
from tests.fuzz.trials import raises_python_numbers

#: The route of programs of NumPy, whose property is that all ways to run them agree.
ARRAYS = "arrays"
#: Routes whose programs MPI ranks run, many in a launch; and those after which ranks may be unable to go on.
ON_RANKS = ["collectives", "arguments", "reports", "lengths", "masks", "uneven data", "indices"]
ALONE = ["waits"]
HERE = [ARRAYS, *[name for name in ROUTES if name not in ("collectives", "arguments", "waits")]]
SECONDS = 60  # of a search for smaller programs


@dataclasses.dataclass
class Failure:
    program: Program
    name: str  # of a route, or a way to run a program of arrays
    error: Exception

    def __str__(self) -> str:
        text = "".join(traceback.format_exception_only(self.error)).strip()
        first = f"# seed {self.program.values!r}, {self.name}: {text[:600]}".replace("\n", "\n# ")
        return f"{first}\n{self.program.script()}"


def program_of(name: str, seed: str, rng: random.Random | None = None) -> Program:
    """A program of a route; the same one for the same seed."""
    rng = rng or random.Random(f"{name}/{seed}")
    if name == ARRAYS:
        return quietly(drawn_arrays)(seed, rng)
    return drawn(rng.choice(ROUTES[name]), seed, rng)


@quietly
def failures(program: Program, counts: Counter, name: str = ARRAYS) -> list[Failure]:
    """Return the failures of a program of a route; or of one of arrays, in all ways or in one."""
    if program.check:
        return _tried(program, name, counts, lambda: exec(compile(program.script(), "<a program>", "exec"), {}))
    reused = random.Random(program.values).choice([0, buffers.REUSED_BYTES])  # compiled, arrays of any size are reused
    with mock.patch.object(buffers, "REUSED_BYTES", reused):
        try:
            names = [way for way, _ in Check(program, counts).all()]
        except Exception:
            return []
        ways = [way for way in names if name in (ARRAYS, way)]
        runs = {way: lambda way=way: dict(Check(program, counts).all())[way]() for way in ways}
        return [failure for way, run in runs.items() for failure in _tried(program, way, counts, run)]


def _tried(program: Program, name: str, counts: Counter, run: Callable) -> list[Failure]:
    try:
        run()
    except Exception as error:
        return [Failure(program, name, error)]
    counts[name, "checked"] += 1
    return []


def kind_of(error: Exception) -> str:
    """Return the part of an error that a smaller program's error must share."""
    return re.split(r"[ :]", str(error))[0] if isinstance(error, Finding) else type(error).__name__


def shrunk(failure: Failure, run: Callable[[Program, Counter, str], list[Failure]] = failures) -> Failure:
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
