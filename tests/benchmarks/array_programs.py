"""Count the collectives of programs over whole arrays: `python -m tests.benchmarks.array_programs [--differences]`.

Each program of `array_programs.md` is compiled for arrays that are split over 4 ranks. The table has the collectives
that it runs, and the bytes that a rank passes to them: here, in the HLO that JAX compiles from the same source (where
JAX is installed), and in the best program known. "split" names the dimensions of the results that stay split.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P

from . import libraries, measure
from .state_names import by_kind

RANKS = 4
PAGE = Path(__file__).with_suffix(".md")


class Program(NamedTuple):
    """A program, its arguments with their specs, and the collectives and bytes that it needs."""

    name: str
    function: Callable
    arguments: tuple[tuple[numpy.ndarray, P], ...]
    collectives: int = 0
    bytes: int = 0


class Sent(NamedTuple):
    """The collectives of a compiled program, the bytes that a rank passes to them, and how its results are split."""

    kinds: Counter
    bytes: int
    split: str

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in sorted(self.kinds.items()))
        return f"{kinds or '-'}: {self.bytes:,}" if self.kinds else "-"

    @property
    def count(self) -> int:
        return sum(self.kinds.values())


# ---------------------------------------------------------------- the programs


def program(*row: Any) -> None:
    """Print what a program sends, if it sends anything, and whether that is more than needed: for the page."""
    needed, here = Program(*row), count(Program(*row), runs=False)
    if is_worse(here, needed.collectives, needed.bytes):
        print(f"{here}, more than needed ({needed.collectives}: {needed.bytes:,})")
    elif here.count:
        print(here)


def programs(**names: Any) -> list[Program]:
    """The programs of the page by some names for `np` and `md`; by ours if none are passed."""
    result: list[Program] = []
    names = {"np": np, "md": md, **names}
    libraries.run_page(PAGE, numpy=numpy, P=P, program=lambda *row: result.append(Program(*row)), **names)
    return result


# ---------------------------------------------------------------- counting


def count(program: Program, runs: bool = True) -> Sent:
    """Return what a rank sends in the program that `jit` compiles; where it runs, also how its results are split."""
    mesh = spmd.make_mesh((RANKS,), ("i",), backend="simulated")
    arrays = [spmd.distribute(x, mesh, spec) for x, spec in program.arguments]
    report = spmd.communication(program.function, optimized=True)(*arrays)
    results = md.tree.leaves(md.jit(program.function)(*arrays)) if runs else []
    return Sent(by_kind(report.counts), report.bytes, ", ".join(_dimensions(spmd.spec_of(x)) for x in results))


def _dimensions(spec: Any) -> str:
    """Return the dimensions that a spec splits: "0", "01", or "-" for none."""
    return "".join(str(d) for d, entry in enumerate(spec or ()) if entry) or "-"


def count_jax(program: Program) -> Sent:
    """Return what a rank sends in the HLO that JAX compiles of a program by its names."""
    jax = libraries.jax(RANKS)
    mesh = jax.make_mesh((RANKS,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P(*spec.entries))) for x, spec in program.arguments
    ]
    compiled = jax.jit(program.function).lower(*arrays).compile()
    kinds, nbytes = sent_by_hlo(compiled.as_text())
    outs = [sharding.spec for sharding in jax.tree.leaves(compiled.output_shardings)]
    return Sent(kinds, nbytes, ", ".join(map(_dimensions, outs)))


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(.*)$")
_SENDS = {"collective-permute": "ppermute"} | {
    kind: kind for kind in ("all-reduce", "all-gather", "all-to-all", "reduce-scatter")
}
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


def sent_by_hlo(text: str) -> tuple[Counter, int]:
    """Return the collectives of a compiled module, and the bytes of their operands on one rank."""
    computations: dict[str, list] = {}
    entry = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computations[header[1]] = steps = []
            entry = header[1] if line.startswith("ENTRY") else entry
        elif computations and (instruction := _INSTRUCTION.match(line)):
            steps.append(instruction.groups())
    return _sent_in(computations, entry)


def _sent_in(computations: dict[str, list], name: str) -> tuple[Counter, int]:
    """Return what a computation sends: loops as often as they run, of branches the one that sends most."""
    types_of = {result: text for result, text, *_ in computations[name]}
    kinds, nbytes = Counter(), 0
    for _, _, operation, operands, rest in computations[name]:
        kind = _SENDS.get(operation.removesuffix("-start"))
        if kind:
            kinds[kind] += 1
            nbytes += sum(_nbytes(types_of[x]) for x in re.findall(r"%([\w.\-]+)", operands))
        inner = re.findall(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)", rest) if not kind else []
        times = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)
        parts = [_sent_in(computations, x) for x in inner]
        if branches := re.search(r"branch_computations=\{(.*?)\}", rest):
            every = [_sent_in(computations, x.strip().lstrip("%")) for x in branches[1].split(",")]
            parts.append(max(every, key=lambda part: part[1]))
        elif operation == "conditional":
            every = [_sent_in(computations, x) for x in re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", rest)]
            parts.append(max(every, key=lambda part: part[1]))
        for more, size in parts:
            for _ in range(int(times[1]) if times else 1):
                kinds.update(more)
                nbytes += size
    return kinds, nbytes


def _nbytes(text: str) -> int:
    """Return the bytes of an HLO type: `f64[2,3]{1,0}`, or a tuple of such."""
    return sum(
        _SIZES[dtype] * numpy.prod([int(n) for n in shape.split(",") if n], dtype=int)
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", text)
    )


# ---------------------------------------------------------------- the report


def is_worse(here: Sent, collectives: int, nbytes: int) -> bool:
    """Whether a program runs more collectives, or sends more than 1.1 times the bytes."""
    return here.count > collectives or here.bytes > 1.1 * nbytes


def rows(only: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the verdict on each program whose name is asked for, and its cells."""
    theirs = programs(np=libraries.jax_numpy(), md=libraries.jax_names()) if libraries.jax(RANKS) else None
    for program, other in zip(programs(), theirs or itertools.repeat(None)):
        if not measure.chosen([program.name], only):
            continue
        here, jax = count(program), other and count_jax(other)
        verdict = ""
        if jax and is_worse(here, jax.count, jax.bytes):
            verdict = "more than JAX"
        elif is_worse(here, program.collectives, program.bytes):
            verdict = "more than needed"
        needed = f"{program.collectives}: {program.bytes:,}" if program.collectives else "-"
        split = here.split if jax is None or jax.split == here.split else f"{here.split} (JAX {jax.split})"
        yield verdict, [program.name, str(here), str(jax or "?"), needed, split, verdict]


def main(argv: Sequence[str] | None = None) -> None:
    options = measure.options(__doc__, argv, differences=False, only=())
    widths = 38, 44, 44, 12, 22
    print("".join(f"{name:{n}}" for name, n in zip(("program", "here", "JAX", "needed", "split"), widths)))
    verdicts: Counter = Counter()
    for verdict, cells in rows(options.only):
        verdicts[verdict or "as few as needed"] += 1
        if verdict or not options.differences:
            print("".join(f"{cell:{n}}" for cell, n in zip(cells, (*widths, 0))), flush=True)
    print(", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()), f"of {verdicts.total()} programs")


if __name__ == "__main__":
    main()
