"""Draw a typed gradient on four ranks, line by line: `python docs/picture.py` writes docs/static/gradient_*.svg.

A row is a line of the tape, and the value that it computes: four blocks, in the ranks' colors, if the value differs
from rank to rank, and one bar if it is the same on all ranks. So one sees where ranks must communicate.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.core.types import Var
from minidiff.printing import show_equation
from spmd import P

RANKS = 4
FOLDER = Path(__file__).parent / "static"
BLOCKS = ("#8fc9f0", "#f2b84b", "#7fcfa9", "#e59ac6")  # a color for each rank, as in the notebooks
MODES = {
    "light": {"text": "#1f2328", "faint": "#6e7781", "bar": "#d0d7de", "sends": "#c1272d", "line": "#d8dee4"},
    "dark": {"text": "#e6edf3", "faint": "#8b949e", "bar": "#4a525c", "sends": "#ff7b72", "line": "#30363d"},
}
STEP, TOP, LEFT, LANES, LANE, BAR = 19, 92, 16, 396, 52, 12  # pixels: of rows, margins, and lanes
TITLE = "The typed gradient of a network on four ranks: one all-reduce"
STYLE = (
    "text { font: 13px system-ui, sans-serif } .code { font: 12px ui-monospace, Menlo, Consolas, monospace } "
    ".head { font-weight: 600 }"
)
HEAD = "The gradient of mean((psum(tanh(x @ W) @ V, 'ranks') + c - y)**2) in W, V and c, line by line"
LEGEND = (
    "Four blocks: the value differs from rank to rank, and has {ranks} in its type. One bar: it is the same on all.",
    "Each rank has 32 of the 128 columns of W, and the same rows of V. g is the cotangent of the result.",
)


def loss(W, V, c, x, y):
    """The error of a network whose hidden units are split over the ranks."""
    out = psum(np.tanh(x @ W) @ V, "ranks") + c
    return np.mean((out - y) ** 2)


def tape_of_gradient():
    """Return the tape of the gradient: a `shard_map` for each pass."""
    mesh = spmd.make_mesh((RANKS,), ("ranks",), backend="simulated")
    in_specs = P(None, "ranks"), P("ranks"), P(), P(), P()
    gradient = md.grad(spmd.shard_map(loss, mesh=mesh, in_specs=in_specs, out_specs=P()), argnums=(0, 1, 2))
    shapes = (64, 128), (128, 10), (10,), (32, 64), (32, 10)
    return md.make_tape(gradient)(*map(numpy.ones, shapes))


@dataclass
class Row:
    """A line of the tape: its text, whether its value varies, whether it sends, and a remark."""

    text: str
    varies: bool
    sends: bool = False
    backward: bool = False
    remark: str = ""


def rows_of(tape) -> list[Row]:
    """Return the lines of both passes; a value has one name in both, results are dW, dV and dc."""
    known, rows = dict(zip(tape.inputs, "WVcxy")), []
    results = dict(zip(tape.outputs, ("dW", "dV", "dc")))
    for backward, outside in enumerate(tape.equations):
        (body,) = outside.bodies
        known |= {v: known.get(a, "g") if isinstance(a, Var) else "g" for v, a in zip(body.inputs, outside.inputs)}
        known |= {v: results[a] for v, a in zip(body.outputs, outside.outputs) if a in results}
        for equation in body.equations:
            (out,) = equation.outputs
            known.setdefault(out, f"v{len(rows) + 1}")
            row = Row(show_equation(equation, known), bool(out.type.variance), backward=bool(backward))
            row.sends, row.remark = equation.primitive.name == "psum", remark_on(equation, known)
            rows.append(row)
        known |= {a: known[v] for a, v in zip(outside.outputs, body.outputs)}
    return rows


def remark_on(equation, known) -> str:
    """Return a remark on what is sent, or would be sent without types."""
    (out,) = equation.outputs
    if equation.primitive.name == "psum":
        return "the one all-reduce"
    if equation.primitive.name == "pbroadcast":
        return "moves nothing" if known[equation.inputs[0]] == "x" else "without types, a second all-reduce"
    return "without types, an all-reduce of dc" if known[out] == "dc" else ""


def block(x: float, y: float, width: float, color: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BAR}" rx="3" fill="{color}"/>'


def text(x: float, y: float, content: str, color: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" {style}>{escape(content)}</text>'


def draw_row(k: int, row: Row, colors: dict[str, str]) -> list[str]:
    """Draw the line of a tape, the value's blocks, and a remark on what is sent."""
    y = TOP + STEP * k
    color = colors["sends" if row.sends else "text"]
    parts = [text(LEFT, y + 11, row.text, color, 'class="code"')]
    if row.varies:
        parts += [block(LANES + LANE * r + 2, y, LANE - 4, color) for r, color in enumerate(BLOCKS)]
    else:
        parts.append(block(LANES + 2, y, LANE * RANKS - 4, colors["sends" if row.sends else "bar"]))
    if row.remark:
        parts.append(text(LANES + LANE * RANKS + 10, y + 11, row.remark, colors["sends" if row.sends else "faint"]))
    return parts


def svg(mode: str) -> str:
    """Return the picture as SVG, for a page that is light or dark."""
    colors, rows = MODES[mode], rows_of(tape_of_gradient())
    height, width = TOP + STEP * len(rows) + 12, LANES + LANE * RANKS + 270
    turn = sum(not row.backward for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}</style>",
        text(LEFT, 22, HEAD, colors["text"], 'class="head"'),
        *[text(LEFT, 42 + 18 * k, line, colors["faint"]) for k, line in enumerate(LEGEND)],
    ]
    for r in range(RANKS):
        parts.append(text(LANES + LANE * (r + 0.5), TOP - 10, f"rank {r}", colors["faint"], 'text-anchor="middle"'))
    for k, row in enumerate(rows):
        parts += draw_row(k, row, colors)
    y = TOP + STEP * turn - 4
    parts.append(f'<path d="M{LEFT} {y}H{width - 16}" stroke="{colors["line"]}"/>')
    for dy, label in ((-8, "forward pass ↑"), (STEP + 17, "backward pass ↓")):
        parts.append(text(width - 16, y + dy, label, colors["faint"], 'text-anchor="end"'))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    for name in MODES:
        (FOLDER / f"gradient_{name}.svg").write_text(svg(name))
