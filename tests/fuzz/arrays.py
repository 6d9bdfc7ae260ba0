"""Random NumPy programs (`programs.py`) under every transformation (`checks.py`), and the smallest that are wrong.

A program is Python source, one NumPy call a line, and so are its arguments: a failure prints as a script. Each program
is drawn from a seed, runs in plain NumPy, and is compared with itself under `jvp`, `vjp`, `jit`, `vmap`, `checkpoint`
and on tapes: values, dtypes, shapes, who shares memory with whom, and what is held while inputs and results change.

Between these, it runs one program of each route of `tests/fuzz/scripts.py`.

    python -m tests.fuzz.arrays --minutes 20 --seed 0
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import random
import re
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from unittest import mock

from minidiff.compiler import buffers
from tests.fuzz.checks import Check, Finding, quietly
from tests.fuzz.programs import REFUSED, Program, drawn
from tests.fuzz.scripts import fuzz_routes


@dataclasses.dataclass
class Failure:
    program: Program
    name: str
    error: Exception

    def __str__(self) -> str:
        args = [f"{name} = {source}" for name, source in self.program.arguments().items()]
        text = "".join(traceback.format_exception_only(self.error)).strip()
        return "\n".join(
            [
                f"# seed {self.program.values!r}, {self.name}: {text[:600]}".replace("\n", "\n# "),
                "import minidiff as md, minidiff.numpy as np; from numpy import inf, nan",
                *args,
                self.program.source(),
            ]
        )


@quietly
def failures(program: Program, counts: Counter, only: str = "") -> list[Failure]:
    """Yield the failures of a program, in all ways or in one."""
    reused = random.Random(program.values).choice([0, buffers.REUSED_BYTES])  # compiled, arrays of any size are reused
    with mock.patch.object(buffers, "REUSED_BYTES", reused):
        try:
            names = [name for name, _ in Check(program, counts).all()]
        except Exception:
            return []
        return [f for name in names if only in ("", name) if (f := _failure(program, counts, name))]


def _failure(program: Program, counts: Counter, name: str) -> Failure | None:
    try:
        dict(Check(program, counts).all())[name]()
    except Exception as error:
        return Failure(program, name, error)
    counts[name, "checked"] += 1
    return None


def kind_of(error: Exception) -> str:
    """Return the part of an error that a smaller program's error must share."""
    return re.split(r"[ :]", str(error))[0] if isinstance(error, Finding) else type(error).__name__


def shrunk(failure: Failure) -> Failure:
    """A smaller program with a failure of this kind, in the same way."""
    smaller = True
    while smaller:
        smaller = False
        for program in _smaller(failure.program):
            if raises_python_numbers(program):
                continue
            actual = failures(program, Counter(), failure.name)
            if actual and kind_of(actual[0].error) == kind_of(failure.error):
                failure, smaller = actual[0], True
                break
    return failure


def raises_python_numbers(program: Program) -> bool:
    """Whether it takes a power of nothing but Python's numbers: `3 ** 2**40` would fill the memory, for hours."""
    plain = {name for name, kind in program.inputs.items() if not kind.dtype and not kind.same_as}
    for name, line in program.lines.items():
        if "np." not in line and set(re.findall(r"(?<![\w.'])[a-z](?!\w)", line)) <= plain:
            if "**" in line:
                return True
            plain.add(name)
    return False


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with a result, a line, an argument or a layout less."""
    inputs, lines, results = program.inputs, program.lines, program.results
    if len(results) > 1:
        for r in results:
            yield dataclasses.replace(program, results=tuple(x for x in results if x != r))
    names = [*inputs, *lines]
    for r in results:
        for name in reversed(names[: names.index(r)]):
            yield dataclasses.replace(program, results=tuple(name if x == r else x for x in results))
    for name in reversed(lines):
        rest = {k: v for k, v in lines.items() if k != name}
        used = name in results or any(re.search(rf"\b{name}\b", line) for line in rest.values())
        if not used:
            yield dataclasses.replace(program, lines=rest)
            continue
        for other in reversed(names[: names.index(name)]):
            changed = {k: re.sub(rf"\b{name}\b", other, v) for k, v in rest.items()}
            yield dataclasses.replace(program, lines=changed, results=tuple(other if x == name else x for x in results))
    for name, kind in inputs.items():
        rest = {k: v for k, v in inputs.items() if k != name}
        uses = [*results, *lines.values(), *(k.same_as for k in rest.values())]
        if rest and not any(re.search(rf"\b{name}\b", text) for text in uses):
            yield dataclasses.replace(program, inputs=rest)
        if kind.layout != "C":
            yield dataclasses.replace(program, inputs={**inputs, name: dataclasses.replace(kind, layout="C")})


def fuzz(seeds: Iterable[str], counts: Counter) -> Iterator[list[Failure]]:
    """For each program of these seeds in which something is wrong: all that is."""
    for seed in seeds:
        program = quietly(drawn)(seed)
        counts["programs"] += 1
        counts["lines"] += len(program.lines)
        if actual := failures(program, counts):
            yield actual


def resident_memory() -> int:
    """Return the memory of this process now, in MiB."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


def most_memory() -> int:
    """Return the highest memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10


#: Of random programs, before each route has its turn: then they take about the same time.
PROGRAMS_A_ROUTE = 10
#: The programs after which all modules are imported, and caches filled: the memory grows little from then on.
PROGRAMS_TO_WARM_UP = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--programs", type=int, default=10**9, help="how many at most")
    parser.add_argument("--shown", type=int, default=3, help="how many failures of one kind are made small and printed")
    options = parser.parse_args()
    end, counts, kinds = time.monotonic() + 60 * options.minutes, Counter(), Counter()
    numbers = itertools.takewhile(lambda k: time.monotonic() < end, range(options.programs))
    start = resident_memory()
    for k in numbers:
        seed = f"{options.seed}/{k}"
        start = resident_memory() if k == PROGRAMS_TO_WARM_UP else start
        for actual in fuzz([seed], counts):
            kind = kind_of(actual[0].error)
            kinds[kind] += 1
            if kinds[kind] <= options.shown:
                print(f"# wrong in: {', '.join(f.name for f in actual)}\n{shrunk(actual[0])}", flush=True)
        if k % PROGRAMS_A_ROUTE == 0:
            for text in fuzz_routes([seed], counts):
                kind = text[2:].split(",")[0]
                kinds[kind] += 1
                if kinds[kind] <= options.shown:
                    print(text, flush=True)
    for key, n in sorted(counts.items(), key=str):
        print(f"{n:8} {key if isinstance(key, str) else ', '.join(key)}")
    for text, n in REFUSED.most_common():
        print(f"{n:8} refused: {text}")
    print(f"resident memory in MiB: {start} at first, {resident_memory()} at the end, {most_memory()} at most")
    print(f"{sum(kinds.values())} programs with findings, seed {options.seed}: {dict(kinds)}")
    sys.exit(bool(kinds))


if __name__ == "__main__":
    main()
