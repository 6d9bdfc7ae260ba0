"""Draw tapes with Graphviz: operations as boxes, values by printed names.

A value's colors are the mesh axes along which it may vary from rank to rank: white for none, two colors for two axes.
The color of an axis along which the value is unreduced is cut into parts. A reduced value has a dotted border, and
white next to the color. A dashed border means that there are no types to tell. A collective has a double border, an
arrow, and the bytes that each rank passes to it. A legend explains this.

Drawing needs the Python package `graphviz`. Viewing a picture needs Graphviz itself: its program `dot`, or else the
package `pygraphviz`, whose wheels include Graphviz. Without either there is still the DOT text.
"""

from __future__ import annotations

import html
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minidiff.api.recording import make_tape
from minidiff.control_flow.loops import run_count
from minidiff.control_flow.schedules import CheckpointSchedule
from minidiff.control_flow.while_loop import While
from minidiff.core.states import ALL_INVARIANT, NONE, REDUCED, STATES, UNREDUCED, VARYING, AxisStates
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.types import Var, typeof
from minidiff.errors.location import Location, lines_of
from minidiff.errors.tracebacks import hide_own_frames_of_lambda
from minidiff.inputs.arguments import check_function
from minidiff.printing import INVARIANT_COLOR, assign_colors, bands, bands_of, declare, letters, names_of, show_atom
from minidiff.show.matrix import coloring_table
from minidiff.show.schedule import CheckpointPicture
from minidiff.sparse.coloring import Coloring
from minidiff.sparse.jacobians import SparseJacobian
from minidiff.values.dtypes import is_scalar_constant

NO_PROGRAM = (
    "Graphviz's program `dot`, which makes the picture, was not found, nor the package pygraphviz, which needs no "
    "program. Install one: `pip install pygraphviz`, or Graphviz itself (apt install graphviz, brew install graphviz, "
    "conda install graphviz, or from https://graphviz.org/download)"
)

#: A script that draws with pygraphviz, run in a subprocess because Graphviz writes warnings to standard error.
_WITHOUT_DOT = """
import sys, pygraphviz
picture = pygraphviz.AGraph(sys.stdin.buffer.read().decode()).draw(format=sys.argv[1], prog="dot")
sys.stdout.buffer.write(picture)
"""

#: The look of each kind of node, except its color.
LOOKS = {
    "input": {"shape": "ellipse", "style": "filled"},
    "constant": {"shape": "note", "style": "filled"},
    "operation": {"shape": "box", "style": "rounded,filled"},
    "collective": {"shape": "box", "style": "filled", "peripheries": "2", "penwidth": "2"},
    "output": {"shape": "ellipse", "style": "filled", "peripheries": "2"},
}
#: Shapes with more than two colors. The lines between colors look like the border; in an ellipse they cross the text.
_SEVERAL = {
    "box": {"style": "striped", "color": "#00000070"},
    "ellipse": {"style": "wedged", "color": "#00000070", "penwidth": "2"},
    "note": {"style": "filled"},
}
_SENDS = "\u21c4"  # arrows to the right and to the left
_FONT = {"fontname": "Helvetica", "fontsize": "11"}
_LABEL_WIDTH = 40
#: A cluster in an SVG, with its label.
_CLUSTER = re.compile(r'(<g id="clust\d+"(?:(?!</?g).)*?)((?:<text.*?</text>\s*)+)(</g>)', re.DOTALL)
_HALO = 'stroke="#f7f7f7" stroke-width="5" stroke-linejoin="round" paint-order="stroke"'
_PIXELS, _UNLIMITED = 96, 1000  # pixels in an inch; inches of height


def draw(f: Callable | Tape | CheckpointSchedule, *args: Any, width: float | None = None, fold: bool = False) -> Any:
    """Draw a tape, `draw(tape)`, the tape of a function, `draw(f)(*args)`, or the colors of a `sparse_jacobian`.

    A schedule of checkpoints, `draw(revolve(5))(steps)`, has its steps downward, and the time that they take to the
    right. In the body of a `shard_map` a value has the colors of the mesh axes along which it is not invariant, and
    collectives stand out, with the bytes that each rank passes to them. Each element of a sparse Jacobian has the color
    and the number of the product that computes it.

    Args:
        f: a tape, a function of trees of arrays, a function that `sparse_jacobian` or `sparse_hessian` returned, or a
            schedule.
        width: a number of pixels, to which a wider picture is scaled down; a cell of JupyterLab has about 850.
        fold: draw bodies below each other, in the order of the tape, and not side by side.

    Returns:
        A `Drawing`; for a function, a function of arguments as for `make_tape` that returns one.

    Raises:
        ImportError: if the package `graphviz` is missing.
        TypeError: if `f` is not a function or tape.
        ValueError: if `width` is not positive, or a sparse Jacobian is too large.

    >>> import numpy as np
    >>> picture = draw(lambda x: np.sin(x) * 2, width=400)(1.0)
    >>> "sin(a)" in picture.source
    True
    """
    if isinstance(f, CheckpointSchedule):
        return hide_own_frames_of_lambda(lambda steps: Drawing(CheckpointPicture(f, steps)))
    check_function("draw", f, args)
    if width is not None and not width > 0:
        raise ValueError(f"draw: width must be a number of pixels, got {width!r}")
    if isinstance(f, Tape):
        return Drawing(_Drawer(width, fold).draw(f))
    if isinstance(f, SparseJacobian):
        return hide_own_frames_of_lambda(lambda *args: Drawing(_Drawer(width, fold).draw_coloring(f.coloring(*args))))
    return hide_own_frames_of_lambda(lambda *args: Drawing(_Drawer(width, fold).draw(make_tape(f)(*args))))


class Drawing:
    """A picture of a tape, of a sparse matrix, or of a schedule.

    Notebooks show it inline; `render` writes it to a file; `source` is its DOT text, of a schedule SVG.
    """

    def __init__(self, graph: Any):
        self.graph = graph

    @property
    def source(self) -> str:
        """The picture in Graphviz's language, DOT."""
        return self.graph.source

    def __repr__(self) -> str:
        return self.source

    def render(self, filename: str | os.PathLike) -> Path:
        """Write the picture to a file.

        Args:
            filename: a path, whose suffix is the format: `.svg`, `.pdf` or `.png`, or `.gv` for the DOT text.

        Returns:
            The path.

        Raises:
            RuntimeError: if the format needs Graphviz, and that is missing.
            ValueError: if there is no suffix.
        """
        path = Path(filename)
        if not path.suffix:
            raise ValueError(f"render: the file needs a suffix that names the format, as in {path}.svg")
        picture = self.source.encode() if path.suffix in (".gv", ".dot") else self._pipe(path.suffix[1:])
        if picture is None:
            raise RuntimeError(f"render: {NO_PROGRAM}; without it, only the text can be written: .gv")
        path.write_bytes(picture)
        return path

    def _pipe(self, format: str) -> bytes | None:
        """Return the picture's bytes, or None if no renderer is installed."""
        try:
            picture = self.graph.pipe(format=format)
        except _graphviz().ExecutableNotFound:
            if importlib.util.find_spec("pygraphviz") is None:
                return None
            command = [sys.executable, "-c", _WITHOUT_DOT, format]
            picture = subprocess.run(command, input=self.source.encode(), capture_output=True, check=True).stdout
        return _draw_labels_last(picture.decode()).encode() if format == "svg" else picture

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        svg = self._pipe("svg")
        if svg is None:
            return {"text/plain": f"{NO_PROGRAM}. Its text:\n\n{self.source}"}
        return {"image/svg+xml": svg.decode(), "text/plain": self.source}


def _draw_labels_last(svg: str) -> str:
    """Draw the labels of clusters, with a halo, after the edges that cross them."""
    labels = "".join(match[2] for match in _CLUSTER.finditer(svg)).replace("<text ", f"<text {_HALO} ")
    return _CLUSTER.sub(r"\1\3", svg).replace("</g>\n</svg>", f"{labels}</g>\n</svg>")


def _graphviz() -> Any:
    try:
        import graphviz
    except ImportError:
        raise ImportError("drawing needs the package graphviz: `pip install graphviz pygraphviz`") from None
    return graphviz


class _Drawer:
    """Draw a tape and its bodies into one graph, with the printed tape's names."""

    def __init__(self, width: float | None, fold: bool):
        self.graphviz = _graphviz()
        self.size = {} if width is None else {"size": f"{width / _PIXELS},{_UNLIMITED}"}
        self.fold = fold
        self.above: list[str] = []  # the results of the last body, which the next one is drawn below
        self.nodes = (f"n{i}" for i in itertools.count())
        self.clusters = (f"cluster{i}" for i in itertools.count())
        self.known: dict[Any, str] = {}  # a Var, or the id of a constant -> its name
        self.source: dict[Any, str] = {}  # the same -> the node it comes from
        self.states: set[tuple[int, str]] = set()  # of values: the number of a state in STATES, and an axis
        self.communicates = False
        self.typed, self.untyped = True, False  # whether the current body has variance types; whether some body has not
        self.times = 1  # how often the current body runs
        self.steps = False  # whether it runs in each step of a loop of unknown length

    def draw(self, tape: Tape) -> Any:
        graph = self.graphviz.Digraph(graph_attr=_FONT | self.size, node_attr=_FONT, edge_attr={"color": "#555555"})
        self.known = names_of(tape, letters())
        assign_colors(axis for v in self.known if isinstance(v, Var) for axis in v.type.states.axes)
        self.add(graph, tape)
        if self.states or self.communicates or self.untyped:
            graph.node("legend", _legend(sorted(self.states), self.untyped, self.communicates), shape="plain")
        return graph

    def draw_coloring(self, coloring: Coloring) -> Any:
        graph = self.graphviz.Digraph(graph_attr=_FONT | self.size, node_attr=_FONT | {"shape": "plain"})
        graph.node("matrix", coloring_table(coloring))
        return graph

    def add(self, graph: Any, tape: Tape) -> tuple[list[str], list[str]]:
        """Draw a tape into a graph or cluster; return its input and output nodes."""
        inputs = [self.declare(graph, v, "input") for v in tape.inputs]
        for c in tape.constants:
            self.declare(graph, c, "constant")
        for eqn in tape.equations:
            self.equation(graph, eqn)
        return inputs, [self.output(graph, a) for a in tape.outputs]

    def declare(self, graph: Any, a: Atom, look: str) -> str:
        """Add a node for an input or constant."""
        node = self.source[_key(a)] = self.node(graph, look, [declare(a, self.known)], [a])
        return node

    def equation(self, graph: Any, eqn: Equation) -> None:
        named = [declare(v, self.known) for v in eqn.outputs]
        bodies = [(name, x) for name, x in eqn.params.items() if isinstance(x, Tape)]
        shown = [*[show_atom(a, self.known) for a in eqn.inputs], eqn.primitive.show_params(eqn.settings)]
        text = f"{eqn.primitive}({', '.join(filter(None, shown))})"
        if len(bodies) == 1:
            body = bodies[0][1]
            if (len(body.inputs), len(body.outputs)) == (len(eqn.inputs), len(eqn.outputs)):
                self.through(graph, eqn, text, body, named)
                return
        look, lines = "operation", [text, *named]
        if eqn.primitive.sends(eqn.params):
            self.communicates = True
            nbytes = sum(typeof(a).nbytes for a in eqn.inputs)
            often = (f", {self.times:,} times" if self.times > 1 else "") + (", in each step" if self.steps else "")
            look, lines = "collective", [f"{_SENDS} {text}", *named, f"{nbytes:,} bytes per rank{often}"]
        node = self.node(graph, look, lines, eqn.outputs, eqn.source)
        self.connect(graph, eqn.inputs, [node] * len(eqn.inputs))
        outside, self.steps = self.steps, self.steps or isinstance(eqn.primitive, While)
        for label, body in bodies:
            inputs, _ = self.body(graph, label, body)
            for inside in inputs:
                graph.edge(node, inside, style="dotted")
        self.steps = outside
        self.source.update((v, node) for v in eqn.outputs)

    def through(self, graph: Any, eqn: Equation, text: str, body: Tape, named: list[str]) -> None:
        """Draw an operation as its body, between its operands and results."""
        outside = self.typed, self.times
        scope = eqn.primitive.body_scope(eqn.params)
        self.typed, self.times = self.typed and (scope is None or scope.typed), self.times * run_count(eqn)
        inputs, outputs = self.body(graph, text, body)
        self.typed, self.times = outside
        self.connect(graph, eqn.inputs, inputs)
        for v, inside, name in zip(eqn.outputs, outputs, named):
            self.source[v] = self.node(graph, "operation", [name], [v])
            graph.edge(inside, self.source[v])

    def body(self, graph: Any, label: str, tape: Tape) -> tuple[list[str], list[str]]:
        """Draw a body into a cluster; if bodies are folded, below the last one. Return its input and output nodes."""
        outside, self.above = self.above, []
        attributes = {"label": _wrap(label, 2 * _LABEL_WIDTH, "\\l"), "labeljust": "l", "color": "#888888"}
        attributes |= {"style": "rounded,filled", "fillcolor": "#f7f7f7"}
        with graph.subgraph(name=next(self.clusters), graph_attr=attributes) as part:
            inputs, outputs = self.add(part, tape)
        if self.fold:
            for start, end in itertools.product(outside, inputs):
                graph.edge(start, end, style="invis")
        self.above = outputs or outside
        return inputs, outputs

    def output(self, graph: Any, a: Atom) -> str:
        node = self.node(graph, "output", [f"return {show_atom(a, self.known)}"], [a])
        self.connect(graph, [a], [node])
        return node

    def node(
        self, graph: Any, look: str, lines: Sequence[str], values: Sequence[Atom], source: Location | None = None
    ) -> str:
        """Add a node with these lines for these values; its tooltip is the source."""
        node = next(self.nodes)
        states = AxisStates(*map(NONE.union, ALL_INVARIANT, *[typeof(a).states for a in values]))
        self.states.update((i, str(axis)) for i, axes in enumerate(states) for axis in axes)
        self.untyped = self.untyped or not self.typed
        label = "\\n".join(_wrap(line, _LABEL_WIDTH) for line in lines)
        asked = {"tooltip": _tooltip(source)} if source is not None else {}
        looks = LOOKS[look] | _fill(LOOKS[look]["shape"], states)
        if states.reduced or not self.typed:
            looks["style"] += ",dotted" if self.typed else ",dashed"
        graph.node(node, label, **looks | asked)
        return node

    def connect(self, graph: Any, atoms: Sequence[Atom], nodes: Sequence[str]) -> None:
        """Add one edge per value, even if it is used twice; none for numbers."""
        for key, node in dict.fromkeys(zip(map(_key, atoms), nodes)):
            if key in self.source:
                graph.edge(self.source[key], node)


def _key(a: Atom) -> Any:
    """Return the key of a value; None for a number, which has no node."""
    return a if isinstance(a, Var) else None if is_scalar_constant(a) else id(a)


def _fill(shape: str, states: AxisStates) -> dict[str, str]:
    """Return the attributes that color the node of a value in these states."""
    first, *more = bands_of(states)
    if len(more) < 2:  # two halves, without a line between them
        return {"fillcolor": ":".join([f"{first};0.5", *more]) if more else first}
    return {"fillcolor": ":".join([first, *more]), **_SEVERAL[shape]}


def _tooltip(source: Location) -> str:
    """Source lines, escaped for Graphviz."""
    lines = dict.fromkeys(filter(None, lines_of(source)))
    return "\\n".join(f"{'backward, of ' * line.backward}{line}".replace("\\", "\\\\") for line in lines)


_THIN, _DASHED, _DOTTED = ('BORDER="1"', 'BORDER="1" STYLE="dashed"', 'BORDER="1" STYLE="dotted"')
#: What the legend says of a value's state along an axis, and its border.
_MEANINGS = {
    VARYING: ("may vary along {}", _THIN),
    UNREDUCED: ("partial sums along {}", _THIN),
    REDUCED: ("the same along {}, its cotangent unreduced", _DOTTED),
}


def _legend(states: Sequence[tuple[int, str]], untyped: bool, communicates: bool) -> str:
    """Return the legend of colors and borders, as a table in Graphviz's HTML."""
    white = [INVARIANT_COLOR]
    meanings = [(white, _THIN, "", "the same on all ranks")]
    for i, axis in states:
        text, border = _MEANINGS[STATES[i]]
        meanings.append((bands(axis, STATES[i]), border, "", text.format(html.escape(axis))))
    if untyped:
        meanings.append((white, _DASHED, "", "may vary: there are no types"))
    if communicates:
        meanings.append((white, 'BORDER="2"', _SENDS, "communicates"))
    rows = "".join(
        f'<TR>{_sample(colors, border, mark)}<TD ALIGN="LEFT">{text}</TD></TR>'
        for colors, border, mark, text in meanings
    )
    return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="3">{rows}</TABLE>>'


def _sample(colors: Sequence[str], border: str, mark: str) -> str:
    """Return a cell of the legend with these bands and this border."""
    if len(colors) == 1:
        return f'<TD WIDTH="30" {border} BGCOLOR="{colors[0]}">{mark}</TD>'
    cells = "".join(f'<TD WIDTH="{30 // len(colors)}" BGCOLOR="{color}"></TD>' for color in colors)
    return f'<TD><TABLE {border} CELLBORDER="0" CELLSPACING="0" CELLPADDING="0"><TR>{cells}</TR></TABLE></TD>'


def _wrap(text: str, columns: int, end: str = "\\n") -> str:
    """Escape and wrap a line of a label for Graphviz; each line ends with `end`.

    `end` sets the alignment of the lines: `\\n` centers them; `\\l` aligns them left, and the last line needs it too.
    """
    lines = textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)
    return end.join(line.replace("\\", "\\\\") for line in lines) + (end if len(lines) > 1 and end != "\\n" else "")
