"""Draw a typed gradient on four ranks, line by line: `python docs/picture.py` writes docs/static/gradient_*.svg.

A row is a line of the tape, and the value that it computes: four blocks, in the ranks' colors, if the value differs
from rank to rank, and one bar if it is the same on all ranks. So one sees where ranks must communicate.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P

RANKS = 4
FOLDER = Path(__file__).parent / "static"
BLOCKS = ("#8fc9f0", "#f2b84b", "#7fcfa9", "#e59ac6")  # a color for each rank, as in the notebooks
MODES = {
    "light": {"text": "#1f2328", "faint": "#6e7781", "bar": "#d0d7de", "sends": "#c1272d", "line": "#d8dee4"},
    "dark": {"text": "#e6edf3", "faint": "#8b949e", "bar": "#4a525c", "sends": "#ff7b72", "line": "#30363d"},
}
STEP, TOP, LEFT, LANES, LANE, BAR = 19, 72, 16, 400, 62, 12  # pixels: of rows, margins, and lanes

TITLE = "The typed gradient of a network on four ranks: one all-reduce"
STYLE = (
    "text { font: 13px system-ui, sans-serif } .code { font: 12px ui-monospace, Menlo, Consolas, monospace } "
    ".head { font-weight: 600 }"
)
HEAD = "The gradient of mean((psum(tanh(x @ W) @ V, 'i') + c - y)**2), as a typed tape"
LEGEND = (
    "Four blocks: the value differs from rank to rank, and has {i} in its type. One bar: it is the same on all ranks."
)
FOOT = "Without types, the backward pass sends another all-reduce of this size: the transpose of the first."


def loss(W, V, c, x, y):
    """The error of a network whose hidden units are split over the ranks."""
    h = np.tanh(x @ W)
    out = psum(h @ V, "i") + c
    return np.mean((out - y) ** 2)


def body_of_gradient():
    """Return the tape of the gradient in the body of `shard_map`."""
    mesh = spmd.make_mesh((RANKS,), ("i",), backend="simulated")
    specs = P(None, "i"), P("i"), P(), P(), P()
    gradient = md.grad(loss, argnums=(0, 1, 2))
    step = spmd.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs[:3])
    shapes = (64, 128), (128, 10), (10,), (32, 64), (32, 10)
    (equation,) = md.make_tape(step)(*map(numpy.ones, shapes)).equations
    return equation.bodies[0]


def rows_of(tape):
    """Return (text, whether the value varies, operation, whether in the backward pass) for each line of a tape."""
    lines = [line.strip() for line in str(tape).splitlines() if " = " in line]
    rows, backward = [], False
    for line, equation in zip(lines, tape.equations, strict=True):
        rows.append((line, bool(equation.outputs[0].type.variance), str(equation.primitive), backward))
        backward = backward or str(equation.primitive) == "mean"
    return rows


def block(x: float, y: float, width: float, color: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BAR}" rx="3" fill="{color}"/>'


def text(x: float, y: float, content: str, color: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" {style}>{escape(content)}</text>'


def draw_row(k: int, row: tuple, colors: dict[str, str]) -> list[str]:
    """Draw the line of a tape, the value's blocks, and a remark on what is sent."""
    line, varies, operation, _ = row
    y = TOP + STEP * k
    sends = operation == "psum"
    name, _, rest = line.partition(" = ")
    parts = [text(LEFT, y + 11, f"{name} = {rest}", colors["sends" if sends else "text"], 'class="code"')]
    if varies:
        parts += [block(LANES + LANE * r + 2, y, LANE - 4, color) for r, color in enumerate(BLOCKS)]
    else:
        parts.append(block(LANES + 2, y, LANE * RANKS - 4, colors["sends" if sends else "bar"]))
    remark = {"psum": "the one all-reduce", "pbroadcast": "moves nothing"}.get(operation)
    if remark:
        parts.append(text(LANES + LANE * RANKS + 10, y + 11, remark, colors["sends" if sends else "faint"]))
    return parts


def svg(mode: str) -> str:
    """Return the picture as SVG, for a page that is light or dark."""
    colors, rows = MODES[mode], rows_of(body_of_gradient())
    height, width = TOP + STEP * len(rows) + 36, LANES + LANE * RANKS + 150
    turn = sum(not backward for *_, backward in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}</style>",
        text(LEFT, 24, HEAD, colors["text"], 'class="head"'),
        text(LEFT, 44, LEGEND, colors["faint"]),
    ]
    for r in range(RANKS):
        parts.append(text(LANES + LANE * (r + 0.5), TOP - 10, f"rank {r}", colors["faint"], 'text-anchor="middle"'))
    for k, row in enumerate(rows):
        parts += draw_row(k, row, colors)
    y = TOP + STEP * turn - 4
    parts.append(f'<path d="M{LEFT} {y}H{width - 16}" stroke="{colors["line"]}"/>')
    middle = LANES + LANE * RANKS + 10
    parts.append(text(middle, y - 8, "forward ↑", colors["faint"]))
    parts.append(text(middle, y + 17, "backward ↓", colors["faint"]))
    parts.append(text(LEFT, height - 12, FOOT, colors["faint"]))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    for name in MODES:
        (FOLDER / f"gradient_{name}.svg").write_text(svg(name))
