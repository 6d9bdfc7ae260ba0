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
from tests.fuzz.inputs import DTYPES, Input

HEADER = """\
import numpy
import minidiff as md, minidiff.numpy as np, spmd
from collectives import *
from numpy import float16, inf, nan
from spmd import P
"""
#: The functions of properties, and other names, by the module from which a script imports those that it has.
NAMES = {
    f"tests.fuzz.properties.{path.stem}": {*re.findall(r"^def ([a-z]\w*)", path.read_text(), re.M)}
    for path in sorted(pathlib.Path(__file__).parent.glob("properties/*.py"))
}
NAMES |= {"minidiff.scipy": {"linalg"}, "ml_dtypes": {"bfloat16"}}
NAMES["scipy.special"] = {"dawsn", "elliprd", "erfcx", "expit", "log_ndtr", "psi", "wrightomega"}


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
#: Lines whose zeros have one sign or the other, as it begins with a zero or with the first product.
SUM_OF_PRODUCTS = re.compile(r"@|(dot|einsum|inner|convolve|correlate)\(")


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

#: Routes whose programs MPI ranks run, many in a launch; and those after which ranks may be unable to go on.
ON_RANKS = ["collectives", "arguments", "reports", "lengths", "masks", "uneven data", "indices"]
ALONE = ["waits"]
HERE = [name for name in ROUTES if name not in ("collectives", "arguments", "waits")]


class Drawing:
    """Random pieces of one program, with a method for each name in braces that is no table's or bound."""

    def __init__(self, rng: random.Random):
        self.rng, self.names, self.bound = rng, [], {}

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

    def a(self) -> str:
        return self.rng.choice(self.names)

    def f(self) -> str:
        return self.names[-1]


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
        text = f"{args}{self.source()}{self.check}\n"
        words = {*re.findall(r"(?<![\w.])[a-z]\w*", text)}
        imports = [(module, sorted(names & words)) for module, names in NAMES.items() if names & words]
        return HEADER + "".join(f"from {module} import {', '.join(names)}\n" for module, names in imports) + text

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


def program_of_route(name: str, seed: str, rng: random.Random | None = None) -> Program:
    """A program of a route; the same one for the same seed."""
    rng = rng or random.Random(f"{name}/{seed}")
    return drawn(rng.choice(ROUTES[name]), seed, rng)


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
