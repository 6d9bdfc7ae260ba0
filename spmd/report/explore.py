"""A tape, step by step: the values on each rank after each equation, as an interactive page.

A page is HTML that needs no server and no network. It has tables, and controls that choose one. A row is a step.
Without its script a page shows all of the first table.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from collectives import pbroadcast
from minidiff import tree
from minidiff.compiler.jit import program_p
from minidiff.core.tape import Equation, Tape, evaluate_equation, read
from minidiff.core.tracer import Value
from minidiff.core.types import Var, typeof
from minidiff.errors.tracebacks import hide_own_frames
from minidiff.inputs.arguments import as_value, check_function
from minidiff.printing import declare, letters, names_of, show_equation, types_as_html
from spmd.arrays.reshard import distribute
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import P, PartitionSpec
from spmd.prices.compiled_tape import tape_of, without_static
from spmd.shard_map.operation import shard_map_p
from spmd.shard_map.shard_map import shard_map
from spmd.sharding.sharded_array import ShardedArray
from spmd.show import direction_of, show_line

HERE = Path(__file__).parent

# ---------------------------------------------------------------- pages


@dataclass(frozen=True)
class PageRow:
    """A row of a table: its cells as HTML, and marks, which are its CSS classes. The last cell spans missing ones."""

    cells: Sequence[str]
    marks: str = ""


@dataclass(frozen=True)
class Control:
    """A slider with named positions, or a menu of names.

    `role` is "table" if it chooses one, or the name of a constant of a cost.
    """

    name: str
    options: Sequence[Any]
    role: str = "table"
    start: int = 0


@dataclass
class Page:
    """A page: its title, a text, the header of its columns, and tables by the options of its controls.

    `write` writes it to a file. Notebooks show it in the cell.

    >>> page = Page("Squares", "One after the other.", {(): (["n", "n²"], [PageRow(["1", "1"]), PageRow(["2", "4"])])})
    >>> "<td>4</td>" in page.html, "http" in page.html
    (True, False)
    """

    title: str
    text: str
    tables: Mapping[tuple, tuple[Sequence[str], Sequence[PageRow]]]
    controls: Sequence[Control] = field(default_factory=tuple)
    whole: bool = False  # whether it begins at the last step

    @property
    def html(self) -> str:
        """The whole page, its style and its script included."""
        files = {kind: (HERE / f"page.{kind}").read_text() for kind in ("html", "css", "js")}
        first = tuple(c.options[c.start] for c in self.controls if c.role == "table")
        return files["html"].format(
            title=html.escape(self.title),
            text=html.escape(self.text),
            begins=" data-whole" if self.whole else "",
            controls="".join(map(_control, self.controls)),
            tables="".join(_table(key, *table, key == first) for key, table in self.tables.items()),
            **files,
        )

    def write(self, filename: Any) -> Path:
        """Write the page to a file, and return its path."""
        path = Path(filename)
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        page, title = html.escape(self.html), html.escape(self.title)
        return f'<iframe srcdoc="{page}" style="width:100%;height:36em;border:0" title="{title}"></iframe>'

    def __repr__(self) -> str:
        steps = max(len(steps) for _, steps in self.tables.values())
        return f"<a page of {steps} steps: {self.title}; write it by .write('page.html')>"


def _control(control: Control) -> str:
    name, options, start = html.escape(control.name), list(control.options), control.start
    data = f'data-role="{control.role}" data-options="{html.escape(json.dumps(options))}" aria-label="{name}"'
    if all(isinstance(option, str) for option in options):
        names = [f'<option value="{k}">{html.escape(option)}</option>' for k, option in enumerate(options)]
        names[start] = names[start].replace("<option", "<option selected")
        chooser = f"<select {data}>{''.join(names)}</select></label>"
    else:
        shown = f"<output>{html.escape(str(options[start]))}</output>"
        chooser = f'<input type="range" min="0" max="{len(options) - 1}" value="{start}" {data}></label>{shown}'
    return f'<div class="controls"><label>{name} {chooser}</div>'


def _table(key: tuple, header: Sequence[str], steps: Sequence[PageRow], shown: bool) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    rows = "".join(f'<tr class="{s.marks}">{_cells(s.cells, len(header))}</tr>' for s in steps)
    name, style = html.escape(json.dumps(list(key))), f"--columns:{len(header) - 1}"
    start = f'<table data-key="{name}" style="{style}"{"" if shown else " hidden"}>'
    return f"{start}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cells(cells: Sequence[str], columns: int) -> str:
    missing = columns - len(cells)
    spans = ["<td>"] * (len(cells) - 1) + [f'<td colspan="{missing + 1}">' if missing else "<td>"]
    return "".join(f"{start}{cell}</td>" for start, cell in zip(spans, cells))


# ---------------------------------------------------------------- a program, step by step

MOST_EQUATIONS = 500  # of a page
CORNER = 6  # numbers of an array that a cell shows along a dimension; of larger ones it shows the corners


class ExploredStep(NamedTuple):
    """A step of a program: its equation as text, the values on each rank, and the bytes that each rank passes.

    `blocks` has a block for each rank, for each result; outside of bodies it has one array for all ranks. `bytes` is
    None if it does not communicate. `direction` is "forward" or "backward". `source` is the line of the program.
    """

    text: str
    blocks: list[list[numpy.ndarray]]
    bytes: int | None
    direction: str
    source: str = ""


class Exploration(Page):
    """A page of a program, equation by equation."""

    def __init__(self, title: str, steps: Sequence[ExploredStep], size: int):
        self.steps = steps
        rows = [_row(step) for step in steps]
        text = "One equation a step. A bar at the left: it communicates. A green field: it is in the backward pass."
        header = ["equation", *[f"rank {r}" for r in range(size)]]
        super().__init__(title, text, {(): (header, rows)})


def explore(f: Callable | Tape) -> Callable[..., Exploration]:
    """Step through a program: `explore(f)(*args)` is a page with each equation, its type, and its value on every rank.

    Notebooks show the page; `.write("page.html")` writes it to a file that a browser reads without a network. The arrow
    keys, Home and End step. In the body of a `shard_map` a cell has the rank's block, elsewhere the whole array; of
    large arrays it has the corners. Equations that communicate, and those of the backward pass, are marked. A loop or a
    branch is one step. Ranks are simulated.

    Args:
        f: a function, or a tape.

    Raises:
        TypeError: if `f` is neither a function nor a tape.
        ValueError: for MPI ranks, and for programs of more than 500 equations.

    >>> import numpy as np
    >>> import spmd, minidiff as md
    >>> from collectives import psum
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> loss = spmd.shard_map(lambda w, x: psum(w * x[0], 'i'), mesh=mesh, in_specs=(P(), P('i')), out_specs=P())
    >>> page = spmd.explore(md.grad(loss))(2.0, np.array([3.0, 5.0]))
    >>> for step in page.steps:
    ...     if step.bytes is not None:
    ...         print(step.text, [x.tolist() for x in step.blocks[0]], step.direction)
    j:f64[] = psum(i, 'i') [16.0, 16.0] forward
    r:f64[] = psum(q, 'i') [8.0, 8.0] backward
    """
    check_function("explore", f)

    @hide_own_frames
    def explored(*args: Any) -> Exploration:
        tape = f if isinstance(f, Tape) else tape_of(f)(*args)
        count = _count(tape)
        if count > MOST_EQUATIONS:
            raise ValueError(
                f"explore: the program has {count} equations, and a page shows {MOST_EQUATIONS}: explore a part of it, "
                "such as one layer, or a step of its loop"
            )
        values = [as_value(x) for x in tree.leaves(without_static(f, args))]
        steps = list(_steps_of(tape, values, names_of(tape, letters())))
        size = max([len(blocks) for step in steps for blocks in step.blocks], default=1)
        title = getattr(f, "__name__", "a program")
        if any(step.direction == "backward" for step in steps):  # `grad(f)` has the name of f
            title += " and its gradient"
        return Exploration(f"{title}, step by step", steps, size)

    return explored


def _count(tape: Tape) -> int:
    return sum(1 + sum(map(_count, eqn.bodies)) for eqn in tape.equations)


def _steps_of(tape: Tape, values: Sequence[Value], names: dict[Any, str]) -> Iterator[ExploredStep]:
    """Run a program equation by equation, and those of the bodies of its `shard_map`s on every rank."""
    env = dict(zip(tape.inputs, values))
    for v, x in env.items():
        yield ExploredStep(declare(v, names), [[_array(x)]], None, "forward")
    for equation in tape.equations:
        if equation.primitive is program_p:
            yield from _steps_of(equation.bodies[0], [read(env, a) for a in equation.inputs], names)
        if equation.primitive is shard_map_p:
            operands = [read(env, a) for a in equation.inputs]
            yield from _in_body(equation, operands, names)
        evaluate_equation(equation, env)
        if equation.primitive is not shard_map_p:
            yield _explored(equation, names, [[_array(env[v])] for v in equation.outputs])


def _in_body(outer: Equation, operands: Sequence[Value], names: dict[Any, str]) -> Iterator[ExploredStep]:
    mesh, body = outer.params["mesh"], outer.params["body"]
    if mesh.backend != "simulated":
        raise ValueError("explore runs on simulated ranks: make the mesh with backend='simulated'")
    blocks = [_blocks(x, mesh, spec) for x, spec in zip(operands, outer.params["in_specs"])]
    for v, by_rank in zip(body.inputs, blocks):
        yield ExploredStep(declare(v, names), [list(by_rank)], None, "forward")

    variables = [*body.inputs, *[v for equation in body.equations for v in equation.outputs]]
    # Values that are unreduced or reduced cannot leave a body as they are. Without types, they can.
    typed = outer.params["check_rep"] and not any(v.type.unreduced or v.type.reduced for v in variables)

    def everything(*arguments: Value) -> list[Value]:
        env = dict(zip(body.inputs, arguments if typed else [x[0] for x in arguments]))
        for equation in body.equations:
            evaluate_equation(equation, env)
        return [pbroadcast(env[v], _invariant_axes(env[v], mesh))[None] for v in variables[len(body.inputs) :]]

    ranks = P(mesh.axis_names)
    specs = outer.params["in_specs"] if typed else ranks
    run = shard_map(everything, mesh=mesh, in_specs=specs, out_specs=ranks, check_rep=typed)
    results = iter([list(numpy.asarray(x)) for x in run(*(operands if typed else blocks))] if body.equations else [])
    for equation in body.equations:
        yield _explored(equation, names, [next(results) for _ in equation.outputs])


def _invariant_axes(x: Value, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh along which a value does not vary."""
    return tuple(a for a in mesh.axis_names if a not in typeof(x).variance)


def _blocks(x: Value, mesh: Mesh, spec: PartitionSpec) -> numpy.ndarray:
    """Return every rank's block of a value, stacked."""
    split = x if isinstance(x, ShardedArray) and x.spec == spec else distribute(x, mesh, spec)
    return numpy.stack(split.local if isinstance(split, ShardedArray) else [numpy.asarray(split)] * mesh.size)


def _array(x: Value) -> numpy.ndarray:
    if isinstance(x, ShardedArray) and typeof(x).unreduced:
        return numpy.stack(x.local).sum(0)  # the value of partial sums
    return numpy.asarray(x)


def _explored(equation: Equation, names: dict[Any, str], blocks: list[list[numpy.ndarray]]) -> ExploredStep:
    sends = equation.primitive.sends(equation.params)
    nbytes = sum(typeof(a).nbytes for a in equation.inputs if isinstance(a, Var)) if sends else None
    return ExploredStep(
        show_equation(equation, names), blocks, nbytes, direction_of(equation.source), show_line(equation.source)
    )


def _row(step: ExploredStep) -> PageRow:
    sent = "" if step.bytes is None else f"<br>{step.bytes:,} bytes per rank"
    line = f'<br><span class="line">{html.escape(step.source)}</span>' if step.source else ""
    cells = [html.escape("\n".join(map(_shown, column))) for column in zip(*step.blocks)] or [""]
    marks = [step.direction] * (step.direction == "backward") + ["collective"] * (step.bytes is not None)
    return PageRow([types_as_html(step.text) + sent + line, *cells], " ".join(marks))


def _shown(x: numpy.ndarray) -> str:
    return numpy.array2string(
        numpy.asarray(x), precision=4, threshold=CORNER**2, edgeitems=CORNER // 2, suppress_small=True
    )
