"""Pictures of programs as graphs, for the notebooks: computed from tapes, and drawn by Graphviz."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterable, Mapping
from typing import Any

import graphviz
import numpy

import minidiff as md
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var
from minidiff.errors.location import lines_of
from minidiff.show.graph import Drawing

_LOOK = """
  graph [fontname=Helvetica fontsize=11 labeljust=l]
  node [fontname=Helvetica fontsize=11 shape=box style="rounded,filled" fillcolor=white]
  edge [fontname=Helvetica fontsize=10 color="#555555"]
"""
SUBSCRIPTS = str.maketrans("-0123456789", "₋₀₁₂₃₄₅₆₇₈₉")
FORWARD, BACKWARD, AFTER, STORED = "#cfe5f7", "#fbd9b5", "#e4e4e4", "#c1272d"


class Graph(Drawing):
    """A picture of a text in Graphviz's language: notebooks show the picture, `print` the text."""

    def __init__(self, lines: Iterable[str], look: str = _LOOK):
        self.graph = graphviz.Source("digraph {" + look + "".join(f"  {line}\n" for line in lines) + "}\n")


def beside(drawings: Mapping[str, Drawing | str]) -> Graph:
    """Drawings, or texts in Graphviz's language, side by side: each in a frame with its title."""
    lines = []
    for k, (title, drawing) in enumerate(drawings.items()):
        source = drawing if isinstance(drawing, str) else drawing.source
        body = source.partition("{")[2].rpartition("}")[0]
        body = re.sub(r"(?m)^(\s*)n(\d+)( -> n(\d+))?", rf"\1n{k}_\2\3", body)  # names of nodes, one set a drawing
        body = re.sub(rf"(?m)^(\s*n{k}_\d+ -> )n(\d+)", rf"\1n{k}_\2", body)
        body = re.sub(r"\bcluster(\d+)", rf"cluster{k}_\1", body)
        lines.append(f'subgraph cluster_{k} {{ {body} label="{title}" color="#888888" style=rounded }}')
    return Graph(lines)


def draw_adjoints(f: Any, *values: float) -> Graph:
    """The graph of a function of numbers: values, adjoints, and the derivative that an adjoint passes on each arrow."""
    tape = md.make_tape(f)(*values)
    known: dict[Any, Any] = dict(zip(tape.inputs, values))
    pulls = []
    for eqn in tape.equations:
        operands = [a for a in dict.fromkeys(eqn.inputs) if isinstance(a, Var)]

        def run(*inputs: Any, eqn: Equation = eqn, operands: list = operands) -> Any:
            of = dict(zip(operands, inputs))
            return eqn.primitive.bind(*[of[a] if isinstance(a, Var) else a for a in eqn.inputs], **eqn.params)

        known[eqn.outputs[0]], pull = md.vjp(run, *[known[a] for a in operands])
        pulls.append((eqn, operands, pull(1.0)))
    adjoints = dict.fromkeys(known, 0.0) | {tape.outputs[0]: 1.0}
    for eqn, operands, partials in reversed(pulls):
        for a, partial in zip(operands, partials):
            adjoints[a] += adjoints[eqn.outputs[0]] * partial
    numbers = {a: k - len(tape.inputs) + 1 for k, a in enumerate(known)}
    names = {a: "v" + str(n).translate(SUBSCRIPTS) for a, n in numbers.items()}
    titles = dict(zip(tape.inputs, ("x" + str(k + 1).translate(SUBSCRIPTS) for k in range(len(tape.inputs)))))
    titles |= {eqn.outputs[0]: html.escape(eqn.primitive.name) for eqn in tape.equations}
    lines = ["rankdir=LR"]
    for a, n in numbers.items():
        adjoint = f'<FONT COLOR="#d55e00">adjoint {adjoints[a]:.4g}</FONT>'
        label = f"<<B>{titles[a]}</B><BR/>{names[a]} = {known[a]:.4g}<BR/>{adjoint}>"
        lines.append(f'"{n}" [label={label}]')
    for eqn, operands, partials in pulls:
        for a, partial in zip(operands, partials):
            ends = f'"{numbers[a]}" -> "{numbers[eqn.outputs[0]]}"'
            lines.append(ends)
            back = f'label="× {partial:.4g}" style=dashed dir=back color="#d55e00" fontcolor="#d55e00"'
            lines.append(f"{ends} [{back}]")
    return Graph(lines)


def draw_sweeps(tape: Tape) -> Graph:
    """The equations of a gradient: forward ones down the left, backward ones up the right, what comes after in gray.

    Red arrows are what the backward sweep needs of the forward sweep, with its bytes. Transposes, which are views, are
    left out.
    """
    result: dict[Any, int] = {}
    back: set[int] = set()
    after: set[int] = set()
    lines, stored = [], set()
    for k, eqn in enumerate(tape.equations):
        needs = dict.fromkeys(result[a] for a in eqn.inputs if isinstance(a, Var) and a in result)
        if eqn.primitive.name == "transpose":
            result.update(dict.fromkeys(eqn.outputs, *needs) if needs else {})
            continue
        result[eqn.outputs[0]] = k
        if any(line.backward for line in lines_of(eqn.source)):
            back.add(k)
        elif needs.keys() & (back | after):
            after.add(k)
        color = BACKWARD if k in back else AFTER if k in after else FORWARD
        lines.append(f'{k} [label="{_with_numbers(eqn)}\\n{eqn.outputs[0].type}" fillcolor="{color}"]')
        for j in needs:
            if k in back and j in back:
                lines.append(f"{k} -> {j} [dir=back]")
            elif k in back:
                nbytes = "" if j in stored else f"{sum(v.type.nbytes for v in tape.equations[j].outputs):,} bytes"
                stored.add(j)
                style = f'color="{STORED}" fontcolor="{STORED}" penwidth=2 constraint=false label="  {nbytes}  "'
                lines.append(f"{j} -> {k} [{style}]")
            else:
                lines.append(f"{j} -> {k}" + " [constraint=false]" * (k in after))
        if k in after and not needs.keys() & after:
            lines.append(f"{k} -> {next(j for j in needs if j in back)} [style=invis]")
    return Graph(lines)


def _with_numbers(eqn: Equation) -> str:
    """An operation's name, and the numbers among its operands: `multiply(2, ·)`."""
    shown = [f"{a:g}" if not isinstance(a, Var) and numpy.ndim(a) == 0 else "·" for a in eqn.inputs]
    return f"{eqn.primitive}({', '.join(shown)})" if set(shown) != {"·"} else str(eqn.primitive)


def draw_tree(source: str) -> Graph:
    """The tree that Python's parser makes of an expression."""
    lines: list[str] = []

    def add(node: ast.AST) -> int:
        here = len(lines)
        lines.append("")
        children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]
        text = "" if not children and not isinstance(node, (ast.Name, ast.Constant)) else ast.unparse(node)
        lines[here] = f'{here} [label="{type(node).__name__}\\n{text}"]'
        lines.extend(f"{here} -> {add(child)}" for child in children)
        return here

    add(ast.parse(source, mode="eval").body)
    return Graph(lines)


def draw_steps(arrows: Mapping[tuple[str, str], str]) -> Graph:
    """Boxes with texts, from left to right, and arrows between them that say how one is made of the other."""
    number: dict[str, int] = {}
    lines = ["rankdir=LR"]
    for ends, label in arrows.items():
        for text in ends:
            if text not in number:
                number[text] = len(number)
                lines.append(f"{number[text]} [label={_quoted(text)}]")
        lines.append(f"{number[ends[0]]} -> {number[ends[1]]} [label={_quoted(label)}]")
    return Graph(lines)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"').replace("\n", "\\n") + '"'
