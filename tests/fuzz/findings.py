"""Draw random programs of NumPy and of all routes, and run them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from unittest import mock

from minidiff.compiler import buffers
from tests.fuzz.checks import Check
from tests.fuzz.numpy_programs import drawn_arrays
from tests.fuzz.programs import Program, program_of_route
from tests.fuzz.shrinking import Failure, quietly, run

#: The route of programs of NumPy, whose property is that all ways to run them agree.
ARRAYS = "arrays"


def program_of(name: str, seed: str, rng: random.Random | None = None) -> Program:
    """A program of NumPy, or of a route; the same one for the same seed."""
    rng = rng or random.Random(f"{name}/{seed}")
    return quietly(drawn_arrays)(seed, rng) if name == ARRAYS else program_of_route(name, seed, rng)


@quietly
def failures(program: Program, counts: Counter, name: str = ARRAYS) -> list[Failure]:
    """Return the failures of a program of a route; or of one of arrays, in all ways or in one."""
    if program.check:
        return _tried(program, name, counts, lambda: run(program))
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
