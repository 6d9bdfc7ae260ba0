"""Print tapes as typed programs, and types in notebooks: with each mesh axis in its own color."""

from __future__ import annotations

import itertools
import keyword
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy

from minidiff.core.tape import Equation, Tape
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.show.colors import types_as_html
from minidiff.values.dtypes import is_scalar_constant

WIDTH = 112  # of the lines of a printed tape, before bodies are indented


def letters(reserved: frozenset = frozenset()) -> Iterator[str]:
    """Generate a, b, …, z, aa, ab, …, without keywords and reserved names."""
    for length in itertools.count(1):
        for combination in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=length):
            name = "".join(combination)
            if not keyword.iskeyword(name) and name not in reserved:
                yield name


def names_of(tape: Any, names: Iterator[str]) -> dict[Any, str]:
    """Name every variable, and every constant by its id, bodies included."""
    known: dict[Any, str] = {v: next(names) for v in tape.inputs}
    known |= {id(c): next(names) for c in tape.constants}
    for eqn in tape.equations:
        for v in eqn.outputs:
            known[v] = next(names)
        for body in eqn.bodies:
            known |= names_of(body, names)
    return known


def text_of(tape: Any) -> str:
    """Return a tape as text, with its bodies indented below their equations."""
    return "\n".join(_lines(tape, names_of(tape, letters())))


def _lines(tape: Any, known: dict[Any, str]) -> Iterator[str]:
    def tuple_of(parts: list[str]) -> str:
        return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"

    inputs = ", ".join(declare(v, known) for v in tape.inputs)
    yield from _wrap(f"lambda {inputs}:" if inputs else "lambda:", "")
    for c in tape.constants:
        yield f"  {declare(c, known)} = constant"
    for eqn in tape.equations:
        yield from _wrap(show_equation(eqn, known), "  ")
        for body in eqn.bodies:
            yield from ("    " + line for line in _lines(body, known))
    yield f"  return {tuple_of([show_atom(a, known) for a in tape.outputs])}"


def show_equation(eqn: Equation, known: dict[Any, str]) -> str:
    """Return an equation as tapes print it, without its bodies; `known` are names."""
    params = eqn.primitive.show_params(eqn.settings)
    arguments = ", ".join([*[show_atom(a, known) for a in eqn.inputs], *([params] if params else [])])
    results = f"{', '.join(declare(v, known) for v in eqn.outputs)} = " if eqn.outputs else ""
    return f"{results}{eqn.primitive}({arguments})"


def declare(a: Any, known: dict[Any, str]) -> str:
    """Return a variable or a constant with its type."""
    return f"{known[a if isinstance(a, Var) else id(a)]}:{typeof(a)}"


def show_atom(a: Any, known: dict[Any, str]) -> str:
    """Return an operand as tapes print it: a name, a number or a type."""
    if isinstance(a, Var):
        return known[a]
    if isinstance(a, ShapedArray):
        return str(a)
    return repr(a.item() if isinstance(a, numpy.generic) else a) if is_scalar_constant(a) else known[id(a)]


def _wrap(line: str, indent: str) -> list[str]:
    """Wrap a long line, with a deeper indent from its second line on."""
    return textwrap.wrap(
        line,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + 6 * " ",
        break_long_words=False,
        break_on_hyphens=False,
    )


# ---------------------------------------------------------------- how tapes and types print


def tape_as_html(tape: Tape) -> str:
    """Return the printed tape as HTML, with gray types. A narrow cell breaks lines between words, and not within."""
    style = "text-align:left;font-family:monospace;white-space:pre-wrap;word-break:normal;overflow-wrap:normal"
    return f'<pre style="{style}">{types_as_html(str(tape), "color:#888")}</pre>'


def type_as_html(type: ShapedArray) -> str:
    return f"<code>{types_as_html(str(type))}</code>"
