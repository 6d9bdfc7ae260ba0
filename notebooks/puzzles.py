"""Twenty puzzles: bodies, gradients and orders to write; what judges an attempt, in a notebook and under `mpirun`.

A puzzle is a plain function of whole arrays, and how its arguments and its result are split over ranks. An attempt is a
body that computes the same on blocks. It is right if the result has the same values and the wanted type, its transpose
gives the same cotangents, and no rank sends more bytes than with the best known body.

    python notebooks/puzzles.py answers.py              # functions puzzle_1, puzzle_2, …, on simulated ranks
    mpirun -n 4 python notebooks/puzzles.py answers.py  # on MPI ranks
"""

from __future__ import annotations

import contextlib
import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from exercises import Verdict, judge
from IPython.display import display
from pictures import Held, Picture, draw, equations_on_ranks, on_ranks

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, axis_index
from collectives.cost import counted
from minidiff.core.tape import Tape, evaluate_equation
from spmd import Mesh, P, shard_map, show_schedule
from spmd.mesh.specs import block_type
from spmd.pipeline.library import scheduled_orders
from spmd.pipeline.tables import BACKWARD, FORWARD, WEIGHT, Schedule, Step

RING = spmd.make_mesh((4,), ("i",))
PLANE = spmd.make_mesh((2, 2), ("i", "j"))
DIGITS = numpy.array([3.0, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 1, 2])


# ---------------------------------------------------------------- blocks, and gradients


@dataclass(frozen=True)
class Blocks:
    """A body to be written: from the blocks of `args` to the block of `whole(*args)`.

    `par` is how many bytes a rank sends with the best known body. If `gradient` is given, the result is a loss, and
    these are the positions of the arguments by which it is differentiated: the par includes what the gradient sends.
    """

    title: str
    ask: str
    whole: Callable
    args: tuple[Any, ...]
    in_specs: tuple[P, ...]
    out_specs: P
    par: int
    mesh: Mesh = RING
    gradient: tuple[int, ...] = ()
    linear: bool = True  # whether there are cotangents to compare

    def type(self) -> md.ShapedArray:
        """The type of the block that a rank returns."""
        return block_type(md.typeof(self.whole(*self.args)), self.out_specs, self.mesh.shape)

    def show(self) -> Picture:
        """A puzzle's blocks on all ranks, and their expected results."""
        return draw(*self._given(), ("wanted", self._wanted()))

    def _given(self) -> list[tuple[str, Held]]:
        held = on_ranks(lambda *blocks: list(blocks), *self.args, mesh=self.mesh, in_specs=self.in_specs)
        return list(zip(inspect.signature(self.whole).parameters, held))

    def _wanted(self) -> Held:
        """From a body that gathers everything, and keeps its block of the result."""

        def body(*blocks: Any) -> Any:
            y = self.whole(*map(_joined, blocks, self.in_specs))
            for d, name in _split(self.out_specs):
                size = y.shape[d] // self.mesh.shape[name]
                y = md.dynamic_slice_in_dim(y, axis_index(name) * size, size, d)
            return y

        (held,) = on_ranks(body, *self.args, mesh=self.mesh, in_specs=self.in_specs)
        return Held(self.type(), held.blocks, held.origins)

    def draw(self, body: Callable) -> Picture:
        """The blocks of the arguments, those after each collective, those that are returned, and the wanted ones."""
        names: list[str] = []

        def steps(*blocks: Any) -> list:
            tape = md.make_tape(body)(*blocks)
            names[:], held = _collectives(tape, blocks)
            return held

        held = on_ranks(steps, *self.args, mesh=self.mesh, in_specs=self.in_specs)
        return draw(*self._given(), *zip([*names, "yours"], held), ("wanted", self._wanted()))

    def judge(self, body: Callable) -> None:
        """Raise AssertionError unless the attempt is right; its text says what differs."""
        f = shard_map(body, mesh=self.mesh, in_specs=self.in_specs, out_specs=self.out_specs)
        result = self._run(f, body)  # before it is recorded: errors are about values, and not about a tape
        tape = md.make_tape(f)(*self.args)
        returned = ", ".join(str(t) for eqn in tape.equations for b in eqn.bodies for t in b.out_types)
        assert returned == str(self.type()), f"a rank returns {returned or None}, and {self.type()} is wanted"
        self._same("the result", result, self.whole(*self.args))
        program = f
        if self.gradient:
            program = md.value_and_grad(f, self.gradient)
            for k, a, b in zip(self.gradient, program(*self.args)[1], md.grad(self.whole, self.gradient)(*self.args)):
                self._same(f"the gradient by argument {k}", a, b)
        elif self.linear:
            self._same_cotangents(f)
        recorded = md.make_tape(program)(*self.args)
        for eqn in equations_on_ranks(recorded):
            for x in eqn.outputs:
                assert x.type.dtype.itemsize == 8, f"{eqn.primitive} sends {x.type}: the par is for numbers of 8 bytes"
        sent = counted(recorded).sent
        assert sent <= self.par, (
            f"this is right, and a rank sends {sent:g} bytes; the best known is {self.par}{self._longest(program)}"
        )

    def _longest(self, program: Callable) -> str:
        """Name the line that exceeds its minimum most, if one does."""
        rows = spmd.communication(program, against="minimum")(*self.args).rows
        row = max(rows, key=lambda row: row.ratio or 0, default=None)
        if row is None or (row.ratio or 0) <= 1:
            return ""
        return f". {row.asked_for_by} passes {row.ratio:.3g} times as many bytes as it must to {row.collective}"

    def _run(self, f: Callable, body: Callable) -> Any:
        """Run an attempt. That ranks may still differ is said in the puzzle's terms, which has no out_specs."""
        try:
            return f(*self.args)
        except md.VarianceError as error:
            if "out_specs" not in str(error):
                raise
            held = on_ranks(body, *self.args, mesh=self.mesh, in_specs=self.in_specs)
            types = ", ".join(str(each.type) for each in held)
            axes = {axis for each in held for axis in each.type.variance} - self.type().variance
            why = f"the braces say that ranks may differ along {', '.join(sorted(axes))}, and all should have the same"
            raise AssertionError(f"a rank returns {types}, and {self.type()} is wanted: {why}") from None

    def _same_cotangents(self, f: Callable) -> None:
        y, pull_back = md.vjp(self.whole, *self.args)
        ct = numpy.arange(1.0, 1 + numpy.size(y)).reshape(numpy.shape(y)) / numpy.size(y)
        for k, (a, b) in enumerate(zip(md.vjp(f, *self.args)[1](ct), pull_back(ct))):
            self._same(f"the transpose's cotangent of argument {k}", a, b)

    @staticmethod
    def _same(label: str, actual: Any, wanted: Any) -> None:
        blocks = (x.gather() if isinstance(x, spmd.ShardedArray) else x for x in (actual, wanted))
        actual, wanted = map(numpy.asarray, blocks)
        assert actual.shape == wanted.shape, f"{label} has the shape {actual.shape}, and {wanted.shape} is wanted"
        assert numpy.allclose(actual, wanted), f"{label} is {_short(actual)}, and {_short(wanted)} is wanted"


def _split(spec: P) -> list[tuple[int, str]]:
    """The dimensions that a spec splits, and the axis of each: those of the puzzles have one."""
    return [(d, name) for d, name in enumerate(spec) if name is not None]


def _joined(block: Any, spec: P) -> Any:
    for d, name in _split(spec):
        block = all_gather(block, name, axis=d, tiled=True)
    return block


def _collectives(tape: Tape, values: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Run a body: the names of its collectives that send something, in order; their results, and the body's last."""
    env = dict(zip(tape.inputs, values))
    names, held = [], []
    for eqn in tape.equations:
        evaluate_equation(eqn, env)
        if eqn.primitive.on_ranks and eqn.primitive.name not in ("pbroadcast", "axis_index"):
            names.append(eqn.primitive.name)
            held.append(env[eqn.outputs[0]])
    return names, [*held, *[env[v] for v in tape.outputs]]


def _short(x: numpy.ndarray) -> str:
    text = numpy.array2string(x, precision=4, threshold=8, edgeitems=2).replace("\n", "")
    return text if len(text) < 60 else text[:57] + "..."


# ---------------------------------------------------------------- orders


@dataclass(frozen=True)
class Orders:
    """The order of each stage's passes to be written, so that the pipeline ends by a tick and holds little.

    `par` is the number of ticks, with passes of one tick each; `stash` is how many activations each stage may hold.
    """

    title: str
    ask: str
    microbatches: int
    par: int
    stash: tuple[int, ...]
    split: bool = False  # whether backward passes come in two steps, B and W

    def schedule(self, orders: Callable) -> Schedule:
        """The schedule of the orders that `orders()` returns: for each stage, a text such as "F0 F1 B0 B1"."""
        kinds = {"F": FORWARD, "B": BACKWARD, "W": WEIGHT}
        inputs = orders()
        assert not isinstance(inputs, str), f"a list with a text for each stage, not {inputs!r}"
        for word in (word for order in inputs for word in order.split()):
            assert word[0] in kinds and word[1:].isdecimal(), f'a pass is written "F0" or "B12", not {word!r}'
        return scheduled_orders([[Step(kinds[word[0]], int(word[1:])) for word in order.split()] for order in inputs])

    def show(self) -> str:
        passes = "F, B and W" if self.split else "F and B"
        return f"{len(self.stash)} stages, and {passes} of {self.microbatches} microbatches on each"

    def draw(self, orders: Callable) -> Any:
        return show_schedule(self.schedule(orders))

    def judge(self, orders: Callable) -> None:
        """Raise AssertionError unless the attempt is right; its text says what is too late, or too much."""
        schedule = self.schedule(orders)
        inputs = schedule.stages, schedule.microbatches, schedule.is_split
        assert inputs == (len(self.stash), self.microbatches, self.split), f"wanted: {self.show()}"
        for stage, (held, allowed) in enumerate(zip(schedule.stashed, self.stash)):
            assert held <= allowed, f"stage {stage} holds {held} activations at once, and may hold {allowed}"
        late = f"it ends after {schedule.ticks} ticks, with a bubble of {schedule.bubble:.0%}"
        assert schedule.ticks <= self.par, f"{late}; the best known ends after {self.par}"


# ---------------------------------------------------------------- the puzzles


def _loss(w: Any, x: Any) -> Any:
    return np.mean((x.reshape(-1, np.size(w)) @ w - 1) ** 2)


def _gradient(w: Any, x: Any) -> Any:
    examples = x.reshape(-1, np.size(w))
    return 2 * (examples @ w - 1) @ examples / len(examples)


def _rows(*shape: int) -> numpy.ndarray:
    return numpy.resize(DIGITS, shape)


ROWS, COLUMNS, ALL = P("i"), P(None, "i"), P()

PUZZLES: dict[int, Blocks | Orders] = dict(
    enumerate(
        [
            Blocks(
                "The total",
                "Every rank returns the sum of all blocks.",
                lambda x: np.sum(x.reshape(4, 4), 0),
                (DIGITS,), (ROWS,), ALL, 48,
            ),
            Blocks(
                "One number",
                "Every rank returns the sum of all sixteen numbers.",
                lambda x: np.sum(x),
                (DIGITS,), (ROWS,), ALL, 12,
            ),
            Blocks(
                "Pass it on",
                "Every rank returns the block of the rank before it, rank 0 that of the last rank.",
                lambda x: np.roll(x, 4),
                (DIGITS,), (ROWS,), ROWS, 32,
            ),
            Blocks(
                "Backwards",
                "Reverse the array: the first number becomes the last.",
                lambda x: x[::-1],
                (DIGITS,), (ROWS,), ROWS, 32,
            ),
            Blocks(
                "Neighbors",
                "Each number becomes the sum of its two neighbors, around a ring of sixteen.",
                lambda x: np.roll(x, 1) + np.roll(x, -1),
                (DIGITS,), (ROWS,), ROWS, 16,
            ),
            Blocks(
                "Centered",
                "Subtract the mean of all numbers from each.",
                lambda x: x - np.mean(x),
                (numpy.where(DIGITS == 8, 1, DIGITS),), (ROWS,), ROWS, 12,  # so that the mean is 4
            ),
            Blocks(
                "Turned over",
                "Transpose a matrix that is split by rows; the result is split by rows, too.",
                lambda x: x.T,
                (_rows(4, 4),), (ROWS,), ROWS, 24,
            ),
            Blocks(
                "A part of the sum",
                "Multiply two matrices that are split where they meet. Each rank returns its rows of the product.",
                lambda a, b: a @ b,
                (_rows(4, 4), _rows(4, 3)), (COLUMNS, ROWS), ROWS, 72,
            ),
            Blocks(
                "First the matrix",
                "Every rank returns C @ s, where s is the sum of all blocks and all ranks have C.",
                lambda c, x: c @ np.sum(x.reshape(4, 4), 0),
                (_rows(2, 4), DIGITS), (ALL, ROWS), ALL, 24,
            ),
            Blocks(
                "Softmax",
                "The softmax of each row of a matrix that is split by columns. The numbers are large: subtract first. "
                "The par needs one number from each rank and row.",
                lambda x: md.nn.softmax(x, axis=1),
                (300 * _rows(2, 8),), (COLUMNS,), COLUMNS, 24,
            ),
            Blocks(
                "Which is largest?",
                "Every rank returns the position of the largest number in the whole array, the first if there are two.",
                lambda x: np.argmax(x),
                (DIGITS,), (ROWS,), ALL, 24, linear=False,
            ),
            Blocks(
                "Look it up",
                "A table is split by rows. Every rank returns the table's rows 5, 0 and 4. A psum of "
                "all three sends 72 bytes; ranks 1 and 3 have nothing in it, and could help.",
                lambda table: table[numpy.array([5, 0, 4])],
                (_rows(8, 2),), (ROWS,), ALL, 56,
            ),
            Blocks(
                "Running totals",
                "The cumulative sum of the whole array. One number from each rank is enough.",
                lambda x: np.cumsum(x),
                (DIGITS,), (ROWS,), ROWS, 8,
            ),
            Blocks(
                "Trade places",
                "On a mesh of 2 by 2, a matrix is split by P('i', 'j'). Split it by P('j', 'i').",
                lambda x: x,
                (_rows(4, 4),), (P("i", "j"),), P("j", "i"), 32, PLANE,
            ),
            Blocks(
                "The mean's gradient",
                "Return the loss, the mean of (x @ w - 1)**2 over all examples. Its gradient by w must be right, too.",
                _loss,
                (numpy.array([0.5, -1.0]), DIGITS), (ALL, ROWS), ALL, 36, gradient=(0,),
            ),
            Blocks(
                "Four microbatches, one sum",
                "Return the gradient by w of the same loss. Each rank adds up the gradients of its two examples in a "
                "loop, one after the other, by md.grad.",
                _gradient,
                (numpy.array([0.5, -1.0]), DIGITS), (ALL, ROWS), ALL, 24, linear=False,
            ),
            Blocks(
                "Weights that are split",
                "The same loss of eight weights, of which each rank has two: so is the gradient.",
                _loss,
                (numpy.linspace(-1, 1, 8), _rows(8, 8)), (ROWS, ROWS), ALL, 108, gradient=(0,),
            ),
            Blocks(
                "Two layers, one all-reduce",
                "The sum of relu(x @ V) @ W, squared: V is split by columns, W by rows, and all ranks have x. The "
                "gradients by V and W must be right, too.",
                lambda x, v, w: np.sum((md.nn.relu(x @ v) @ w) ** 2),
                (_rows(2, 4) - 4, _rows(4, 8) - 4, _rows(8, 4) - 4), (ALL, COLUMNS, ROWS), ALL, 96, gradient=(1, 2),
            ),
            Orders(
                "Early backward passes",
                "Three stages, five microbatches: end as early as GPipe does, and hold less.",
                5, 14, (3, 2, 1),
            ),
            Orders(
                "Fill the bubble",
                "The same with backward passes in two steps: B computes the cotangent that the stage before waits for, "
                "W the gradient of the weights, at any time after.",
                5, 17, (3, 3, 3), split=True,
            ),
        ],
        start=1,
    )
)  # fmt: skip


# ---------------------------------------------------------------- attempts


def show(number: int) -> Any:
    """Draw a puzzle's inputs and its goal."""
    return PUZZLES[number].show()


def attempt(number: int, answer: Callable) -> None:
    """Draw an attempt beside what is wanted, and say "your turn", "right", or "not yet" and why."""
    puzzle = PUZZLES[number]
    verdict = judge(puzzle.judge, (answer,))
    if verdict.text != "your turn":
        with contextlib.suppress(Exception):  # the verdict says why
            display(puzzle.draw(answer))
    display(verdict)


def main(path: str) -> None:
    """Judge the functions puzzle_1, puzzle_2, … of a file, and print a line for each."""
    answers = runpy.run_path(path)
    for number, puzzle in PUZZLES.items():
        verdict: Verdict = judge(puzzle.judge, (answers.get(f"puzzle_{number}", ...),))
        if spmd.process_index() == 0:
            print(f"{number:2} {puzzle.title}: {verdict}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
