"""Random programs as data: arguments, lines of source, results, and the property that is checked, drawn from seeds.

The pieces that lines are made of are in `pieces.md`, and in `tests/table`. Every part of a program is source, so a
failure prints as a script; `smaller` yields the programs with one part less, whatever they are of.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy

import minidiff as md
from minidiff.numpy.functions import full_name
from tests.fuzz.inputs import DTYPES, LAYOUTS, Input, constant
from tests.fuzz.trials import BINARY, CALLS, SUM_OF_PRODUCTS, UNARY, tried

HEADER = """\
import numpy
import minidiff as md, minidiff.numpy as np, spmd
from collectives import *
from minidiff.scipy import linalg
from ml_dtypes import bfloat16
from numpy import float16, inf, nan
from scipy import special as sp
from spmd import P
from tests.fuzz.properties.agree import *
from tests.fuzz.properties.functions import *
from tests.fuzz.properties.numerics import *
from tests.fuzz.properties.on_ranks import *
from tests.fuzz.properties.reports import *
from tests.fuzz.properties.sharded import *
"""


def _tables() -> dict[str, list[str]]:
    """The tables of `pieces.md`."""
    text = pathlib.Path(__file__).with_name("pieces.md").read_text()
    words = {name: row.split() for name, row in re.findall(r"^- ([\w ]+): (.*)", text, re.M)}
    blocks = re.findall(r"^## ([^\n]+)\n[^`#]*(?:`[^`#]+`[^`#]*)*```text\n(.*?)```", text, re.M | re.S)
    return {**words, **{name: lines.splitlines() for name, lines in blocks}}


PIECES = _tables()
#: In braces: a name, for a table, a method of `Drawing` or what was bound before; a choice; or a range of numbers.
PLACE = re.compile(r"\{(?:(\w+)=)?([a-z][\w ]*|-?\d+\.\.-?\d+|[^{}]*\|[^{}]*)\}")
MAX_RESULTS = 3


class Route(NamedTuple):
    """A kind of programs, as templates: inputs, parameters of the function f, its lines, results, and a check."""

    inputs: dict[str, str]
    args: tuple[str, ...]
    lines: dict[str, str]
    results: tuple[str, ...]
    check: str


def _route(block: str) -> Route:
    """A route, from the text of a script."""
    inputs, body = (dict(re.findall(rf"^{indent}(\w[\w, ]*) = (.*)", block, re.M)) for indent in ("", "    "))
    (args, results) = (re.findall(p, block, re.M) for p in (r"^def f\((.*)\):", r"^    return (.*)"))
    args, results = (tuple(re.findall(r"\w+", " ".join(names))) for names in (args, results))
    return Route(inputs, args, body, results, block.splitlines()[-1])


#: By name: the kinds of programs of a route; one is drawn.
ROUTES: dict[str, list[Route]] = {
    section.split("\n")[0]: [_route(block) for block in re.findall(r"```text\n(.*?)```", section, re.S)]
    for section in pathlib.Path(__file__).with_name("routes.md").read_text().split("\n## ")[1:]
}


class Drawing:
    """Random pieces of one program, with a method for each name in braces that is no table's."""

    def __init__(self, rng: random.Random):
        self.rng, self.names, self.bound = rng, [], {}
        self.values: dict[str, Any] = {}  # those that lines of NumPy are tried with
        self.last: Any = None  # the value that axes and shapes are drawn for: the first one of the line
        n = [self.rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 3, 4]) for _ in range(2)]
        self.shapes = [(), (n[0],), (n[1],), (*n,), (*n[::-1],), (1, n[0]), (n[0], 1), (2, *n), (n[0], n[0]), (1,)]

    def fill(self, template: str) -> str:
        """The template with something drawn for all that is in braces."""
        return PLACE.sub(self._piece, template)

    def _piece(self, place: re.Match) -> str:
        name, choice = place.groups()
        if not name and choice in self.bound:
            return self.bound[choice]
        if "|" in choice:
            text = self.rng.choice(choice.split("|"))
        elif ".." in choice:
            text = str(self.rng.randint(*map(int, choice.split(".."))))
        elif choice in PIECES:
            text = self.fill(self.rng.choice(PIECES[choice]))
        else:
            text = str(getattr(self, choice)())
        if name:
            self.bound[name] = text
        return text

    def line(self) -> str:
        """A line of NumPy."""
        self.last = None
        return self.call() if self.rng.random() < 0.3 else self.fill("{step}")

    def call(self) -> str:
        """A call that the table has, of values; where it takes arrays of integers, often with those."""
        row = self.rng.choice(CALLS)
        args = [
            constant(x) if numpy.asarray(x).dtype.kind not in "fc" and self.rng.random() < 0.7 else self.x()
            for x in row.args
        ]
        options = [f"{k}={constant(v)}" for k, v in row.f.keywords.items()]
        return f"{full_name(row.function)}({', '.join(args + options)})"

    def argument(self, before: list[str]) -> Input:
        if self.rng.random() < 0.15:
            return Input(shape=self.rng.choice([float, float, int, complex]))
        if before and self.rng.random() < 0.05:
            return Input(text=self.rng.choice(before) + self.rng.choice(["", "[...]", ".T"]))
        layout, shape = self.rng.choice(["C", "C", *LAYOUTS]), self.shape()
        return Input(self.dtype(), shape, layout if shape or layout in ("C", "unaligned", "big-endian") else "C")

    def x(self) -> str:
        name = self.rng.choice([*self.values, *list(self.values)[-3:]])  # rather one of the last
        if self.last is None:
            self.last = numpy.asarray(self.values[name])
        return name

    y = x

    def a(self) -> str:
        return self.rng.choice(self.names)

    def f(self) -> str:
        return self.names[-1]

    def unary(self) -> str:
        return self.rng.choice(UNARY)

    def binary(self) -> str:
        return self.rng.choice(["add", "subtract", "multiply", "divide", *BINARY])

    def reducible(self) -> str:
        wrong = ("power", "float_power", "ldexp", "arctan2")  # in NumPy itself, which reads what it has written over
        return self.rng.choice([name for name in BINARY if name not in wrong])

    def typed(self) -> str:
        return f"np.{self.dtype().replace('bool', 'bool_')}({self.rng.choice(['0', '1', '2', '3', '100'])})"

    def dtype(self) -> str:
        """Half of all values have one of three; where all had any, most would be float64 after a few lines."""
        return self.rng.choice(DTYPES if self.rng.random() < 0.6 else ["float32", "float64", "complex128"])

    def axis(self) -> int:
        return self.rng.randrange(-self.last.ndim, self.last.ndim) if self.last.ndim else 0

    def axes(self) -> Any:
        return self.rng.choice([None, self.axis(), self.axis(), (self.axis(),), tuple({self.axis(), self.axis()}), ()])

    def shape(self) -> tuple:
        return self.rng.choice(self.shapes)

    def new_shape(self) -> tuple:
        n = self.last.size
        return self.rng.choice([(-1,), (n,), (1, n), (n, 1), self.last.shape[::-1], (2, n // 2), (n // 2, 2), ()])


# ---------------------------------------------------------------- programs


@dataclasses.dataclass(frozen=True)
class Program:
    """A function `f` of some arguments, with a line of source for each name, and results; its inputs, and its check."""

    inputs: dict[str, Input]
    args: tuple[str, ...]
    lines: dict[str, str]
    results: tuple[str, ...]
    values: str  # the seed of the arguments' values
    check: str = ""

    def source(self) -> str:
        if not self.results:
            return ""
        body = "".join(f"    {name} = {line}\n" for name, line in self.lines.items())
        return f"def f({', '.join(self.args)}):\n{body}    return {', '.join(self.results)}\n"

    def script(self) -> str:
        args = "".join(f"{name} = {source}\n" for name, source in self.arguments().items())
        return f"{HEADER}{args}{self.source()}{self.check}\n"

    def function(self, np: Any = md.numpy, noise: Callable | None = None) -> Callable:
        """It as a Python function, of this NumPy; every value passes through `noise`, if that is given."""
        if noise is None:
            return executed(self.source(), np)
        # Each use of a value has a rounding error of its own: what cancels within one operation does not here.
        used = {name: re.sub(r"(?<![\w.'])([a-z])(?![\w'=])", r"noise(\1)", line) for name, line in self.lines.items()}
        lines = {name: f"noise({line}, {SUM_OF_PRODUCTS.search(line) is not None})" for name, line in used.items()}
        first = {name: f"noise({name})" for name in self.args}
        return executed(dataclasses.replace(self, lines={**first, **lines}).source(), np, noise)

    def dtypes(self) -> set[str]:
        """Those that its source names."""
        return {d for d in DTYPES if re.search(rf"\b{d}\b", self.source())}

    def arguments(self, other: int = 0) -> dict[str, str]:
        """Arguments by name, as source. `other` ones are of the same types, and have other values."""
        return {name: kind.source(random.Random(f"{self.values}/{other}/{name}")) for name, kind in self.inputs.items()}


@functools.lru_cache(maxsize=64)
def executed(text: str, np: Any, noise: Callable | None = None) -> Callable:
    names = {"np": np, "inf": numpy.inf, "nan": numpy.nan, "noise": noise}
    exec(text, names)
    return names["f"]


def evaluated(sources: dict[str, str]) -> list:
    """Arguments, made from their source."""
    names: dict[str, Any] = {"np": numpy, "inf": numpy.inf, "nan": numpy.nan}
    for name, text in sources.items():
        names[name] = eval(text, names)
    return [names[name] for name in sources]


def drawn(route: Route, seed: str, rng: random.Random) -> Program:
    """A program of a route."""
    draw, lines = Drawing(rng), {}
    inputs = {name: Input(text=draw.fill(text)) for name, text in route.inputs.items()}
    draw.names = [*route.args]
    for name, text in route.lines.items():
        lines[name] = draw.fill(text)
        draw.names.append(name)
    results = route.results if route.results != ("some",) else tuple(rng.sample([*lines], rng.randint(1, MAX_RESULTS)))
    return Program(inputs, route.args, lines, results, seed, draw.fill(route.check))


def drawn_arrays(seed: str, rng: random.Random) -> Program:
    """A program that runs in plain NumPy, and can be recorded."""
    draw, inputs, lines = Drawing(rng), {}, {}
    for name in "abc"[: draw.rng.choice([1, 1, 2, 2, 3])]:
        inputs[name] = draw.argument([k for k, kind in inputs.items() if kind.dtype])
    program = Program(inputs, tuple(inputs), {}, (), seed)
    draw.values = dict(zip(inputs, evaluated(program.arguments())))
    wanted, names = draw.rng.randint(1, 12), "abcdefghijklmnopqrstuvwxyz"
    for _ in range(5 * wanted):
        if len(lines) == wanted:
            break
        name, line = names[len(draw.values)], draw.line()
        value = tried(line, draw.values)
        if value is not None:
            lines[name], draw.values[name] = line, value
    count = min(draw.rng.randrange(MAX_RESULTS), len(draw.values))
    results = {list(draw.values)[-1], *draw.rng.sample(list(draw.values), count)}
    results = tuple(sorted(results & {*lines} or results))
    return dataclasses.replace(program, lines=lines, results=results)


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a result, a line, an argument or a layout less."""
    inputs, lines, results = program.inputs, program.lines, program.results
    change = functools.partial(dataclasses.replace, program)
    if len(results) > 1:
        for r in results:
            yield change(results=tuple(x for x in results if x != r))
    names = [*program.args, *lines]
    for r in results:
        for name in reversed(names[: names.index(r)] if r in names else []):
            yield change(results=tuple(name if x == r else x for x in results))
    for name in reversed(lines):
        rest = {k: v for k, v in lines.items() if k != name}
        if name not in results and not any(re.search(rf"\b{name}\b", line) for line in rest.values()):
            yield change(lines=rest)
            continue
        for other in reversed(names[: names.index(name)]):
            changed = {k: re.sub(rf"\b{name}\b", other, v) for k, v in rest.items()}
            yield change(lines=changed, results=tuple(other if x == name else x for x in results))
    for name, kind in inputs.items():
        rest = {k: v for k, v in inputs.items() if k != name}
        uses = [*results, *lines.values(), program.check, *(k.text for k in rest.values())]
        if rest and not any(re.search(rf"\b{name}\b", text) for text in uses):
            yield change(inputs=rest, args=tuple(a for a in program.args if a != name))
        if kind.layout != "C":
            yield change(inputs={**inputs, name: dataclasses.replace(kind, layout="C")})
