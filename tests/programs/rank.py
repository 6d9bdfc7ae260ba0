"""Random programs of ranks: operations and collectives over any axes, on values that vary along any.

A program is a list of instructions on a growing list of blocks. It is read in two ways: on the ranks of a mesh, by
`shard_map`; and on lists, one block for each rank, by what each collective means on a list. The second reading is an
ordinary function of whole arrays, and knows nothing of types, transposes or meshes.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.collective_cases import Case, reference, size_of
from tests.checks.meshes import mesh

STEPS = (0.5, 1.0, 0.8)  # of a loop: what its carry is multiplied by
WIDTH = 2  # of blocks, which have the shape [mesh.size, WIDTH]

# ---------------------------------------------------------------- instructions


def ring(size: int, step: int = 1) -> list[tuple[int, int]]:
    return [(i, (i + step) % size) for i in range(size)]


#: Operations of one block or two, that keep the shape.
LOCAL: dict[str, Callable] = {
    "sin": lambda x: np.sin(x),
    "tanh": lambda x: np.tanh(x) / 2,
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: 2 * x - y / 3,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / (2 + np.cos(y)),
    "matmul": lambda x, y: x @ np.tanh(y[:WIDTH]) if y.shape[0] >= WIDTH else x * y,
    "where": lambda x, y: np.where(x > y, x, np.sin(y)),
    "maximum": lambda x, y: np.maximum(x, y + 0.1),
    "center": lambda x: x - np.mean(x, axis=0),
    "scalar": lambda x: x * np.sum(np.cos(x)) / x.size,
    "reverse": lambda x: x[::-1],
    "columns": lambda x, y: np.concatenate([x[:, :1], y[:, 1:]], axis=1),
    "accumulate": lambda x: np.cumsum(x, axis=1) / WIDTH,
    "sort": lambda x: np.sort(x, axis=0),
    "set": lambda x, y: np.at(x)[0].set(y[-1]),
    "einsum": lambda x, y: np.einsum("ia,ib->ib", x, y) / WIDTH,
}
BINARY = {"add", "subtract", "multiply", "divide", "matmul", "where", "maximum", "columns", "set", "einsum"}


def _fold(x: Any, n: int) -> Any:
    """Rows, n times as many as before, as their means."""
    return np.mean(x.reshape(n, x.shape[0] // n, x.shape[1]), axis=0)


def _spread(x: Any, n: int) -> Any:
    """Rows, a part of those before, repeated to as many."""
    return np.concatenate([x * (1 + k) for k in range(n)])


#: Collectives over n ranks that keep the shape: `comm(name, x, ...)` is the collective, over the instruction's axes.
COLLECTIVE: dict[str, Callable] = {
    "psum": lambda comm, x, n: comm("psum", x) / n,
    "pmean": lambda comm, x, n: comm("pmean", x),
    "psum of a scalar": lambda comm, x, n: x * comm("psum", np.sum(x, axis=0)) / (n * x.shape[0]),
    "pmax": lambda comm, x, n: comm("pmax", x),
    "pmin": lambda comm, x, n: comm("pmin", np.sin(x)),
    "all_gather": lambda comm, x, n: _fold(comm("all_gather", x, axis=0, tiled=True), n),
    "all_gather, stacked": lambda comm, x, n: np.mean(np.sin(comm("all_gather", x, axis=1, tiled=False)), axis=1),
    "all_gather_invariant": lambda comm, x, n: _fold(comm("all_gather_invariant", x, axis=0, tiled=True), n),
    "psum_scatter": lambda comm, x, n: _spread(comm("psum_scatter", x, scatter_dimension=0, tiled=True), n) / n,
    "local slice of a sum": lambda comm, x, n: _spread(comm("pscatter", comm("psum", x), axis=0, tiled=True), n) / n,
    "gathered and cut": lambda comm, x, n: comm(
        "pscatter", comm("all_gather_invariant", x, axis=0, tiled=True), axis=0, tiled=True
    ),
    "all_to_all": lambda comm, x, n: comm("all_to_all", x, split_axis=0, concat_axis=0, tiled=True),
    "ppermute": lambda comm, x, n: comm("ppermute", x, perm=ring(n)),
    "sent away": lambda comm, x, n: x - comm("ppermute", x, perm=ring(n)[:-1]),
    "axis_index": lambda comm, x, n: x * (1 + comm("axis_index")) / n,
}


def _parts(rows: int, n: int) -> list[list[int]]:
    """Rows as ranks may send them: of each one row to each other, the rest stays."""
    return [[rows - (n - 1) if s == d else 1 for d in range(n)] for s in range(n)]


def _halves(n: int) -> list[list[int]]:
    """Two groups of ranks, which may differ in size."""
    return [ranks for ranks in (list(range(n))[::-2], list(range(n))[-2::-2]) if ranks]


#: Those with a root, of uneven parts, and in groups, which programs have if they are told to.
FURTHER: dict[str, Callable] = {
    "broadcast": lambda comm, x, n: comm("broadcast", x, root=n // 2),
    "broadcast and own": lambda comm, x, n: x * np.sin(comm("broadcast", x, root=n - 1)),
    "broadcast_varying": lambda comm, x, n: comm("broadcast_varying", x, root=n - 1),
    "reduce": lambda comm, x, n: x + comm("reduce", x, root=n // 2) / n,
    "at_root": lambda comm, x, n: comm("at_root", comm("psum", np.cos(x)), root=0) / n - x,
    "gather": lambda comm, x, n: _fold(comm("gather", x, root=n - 1, axis=0, tiled=True), n),
    "gather, stacked": lambda comm, x, n: np.mean(np.sin(comm("gather", x, axis=1)), axis=1),
    "scatter": lambda comm, x, n: _spread(comm("scatter", x, root=n // 2, axis=0, tiled=True), n) / n,
    "there and back": lambda comm, x, n: comm("broadcast", comm("reduce", x)) / n,
    "all_to_all, uneven": lambda comm, x, n: comm(
        "all_to_all", x, split_axis=0, concat_axis=0, splits=_parts(x.shape[0], n)
    ),
    "psum in groups": lambda comm, x, n: comm("psum", x, axis_index_groups=_halves(n)) / n,
    "pmax in groups": lambda comm, x, n: comm("pmax", x, axis_index_groups=_halves(n)),
    "all_gather in groups": lambda comm, x, n: np.mean(
        comm("all_gather", x, axis=1, axis_index_groups=[[r] for r in range(n)]), axis=1
    ),
}


def _at(x: Any, index: Any) -> Any:
    """An entry of a block, or of each."""
    return x.each(lambda x, i: x[i], x, index) if isinstance(x, Variadic) else x[index]


def _rows(x: Any, index: Any, n: int) -> Any:
    """One of n equal parts of a block, or of each."""
    part = lambda x, i: md.dynamic_slice_in_dim(x, i * (x.shape[0] // n), x.shape[0] // n)  # noqa: E731
    return x.each(part, x, index) if isinstance(x, Variadic) else part(x, index)


def _entries(x: Any, n: int) -> Any:
    return np.stack([x * (k + 1) for k in range(n)]) / n


def _cut(comm: Comm, x: Any, axes: Sequence[str] | None = None) -> Any:
    return comm("psum_scatter", x, axes, scatter_dimension=0, tiled=True)


def _joined(comm: Comm, x: Any, axes: Sequence[str] | None = None) -> Any:
    return comm("all_gather", x, axes, axis=0, tiled=True)


#: What can be done by fewer or other collectives, which programs have if they are told to.
REDUNDANT: dict[str, Callable] = {
    "psum again": lambda comm, x, n: comm("psum", x) / n - comm("psum", np.cos(x)) / 8,
    "scatter the sum and gather": lambda comm, x, n: _joined(comm, _cut(comm, x)) / n,
    "scatter the sum and gather invariantly": lambda comm, x, n: (
        comm("all_gather_invariant", _cut(comm, x), axis=0, tiled=True) / n
    ),
    "scatter in steps, gather at once": lambda comm, x, n: (
        _joined(comm, functools.reduce(lambda part, a: _cut(comm, part, (a,)), comm.axes, x)) / n
    ),
    "gather in steps": lambda comm, x, n: _fold(
        functools.reduce(lambda part, a: _joined(comm, part, (a,)), comm.axes, np.sin(x)), n
    ),
    "gather entries and own": lambda comm, x, n: _at(comm("all_gather", x, axis=0, tiled=False), comm("axis_index")),
    "own entry of the sum": lambda comm, x, n: _at(comm("psum", _entries(x, n)), comm("axis_index")),
    "own rows of the sum": lambda comm, x, n: _joined(comm, _rows(comm("psum", x), comm("axis_index"), n)) / n,
    "terms sent alike": lambda comm, x, n: (
        comm("psum_scatter", _entries(x, n), scatter_dimension=0, tiled=False)
        - comm("psum_scatter", _entries(np.sin(x), n), scatter_dimension=0, tiled=False)
    ),
    "send on": lambda comm, x, n: comm(
        "ppermute", comm("ppermute", x, perm=ring(n)), perm=[(i, n - 1 - i) for i in range(1, n)]
    ),
    "exchange, and back": lambda comm, x, n: comm(
        "all_to_all",
        comm("all_to_all", x, split_axis=0, concat_axis=1, tiled=True),
        split_axis=1,
        concat_axis=0,
        tiled=True,
    ),
}
KEEP_SHAPES = COLLECTIVE | FURTHER | REDUNDANT


class Comm(NamedTuple):
    """The collectives over an instruction's axes, or over others."""

    call: Callable
    axes: tuple[str, ...]

    def __call__(self, name: str, x: Any = None, axes: Sequence[str] | None = None, **options: Any) -> Any:
        return self.call(name, x, self.axes if axes is None else axes, options)


#: What runs a body of instructions: three times, once more on the way back, or not at all. See `_controlled`.
CONTROL = ("scan", "checkpoint", "cond")

#: What a choice compares a sum with: not 0, since the sum of centered numbers is 0 but for rounding.
NEAR_ZERO = 1e-6


@dataclass(frozen=True)
class Instruction:
    """An operation on earlier blocks, by their numbers; a collective has one operand, and axes.

    A body of instructions has one operand, too: it begins with all blocks that there are, and that one once more.
    """

    name: str
    operands: tuple[int, ...]
    axes: tuple[str, ...] = ()
    body: tuple[Instruction, ...] = ()


@dataclass
class RankProgram:
    """Instructions on the blocks of inputs with these specs; the last block, squared and averaged, is the loss."""

    shape: dict[str, int]
    specs: tuple[P, ...]
    instructions: list[Instruction] = field(default_factory=list)

    def example(self, seed: int) -> list:
        """Arguments: arrays whose blocks have one shape, whatever their specs."""
        rng = np.random.default_rng(seed)
        rows, size = math.prod(self.shape.values()), lambda axes: math.prod(self.shape[a] for a in axes)
        splits = [[size(axes) for axes in spec.dims(2)] for spec in self.specs]
        return [rng.normal(size=(rows * m, WIDTH * n)) for m, n in splits]

    def _run(self, apply: Callable, comm: Callable, control: Callable, blocks: list) -> Any:
        blocks = self._after(self.instructions, apply, comm, control, blocks)
        return apply(lambda x: np.mean(x**2), blocks[-1])

    def _after(self, instructions: Sequence[Instruction], *how: Any) -> list:
        apply, comm, control, blocks = *how[:3], list(how[3])
        for step in instructions:
            operands = [blocks[i] for i in step.operands]
            if step.body:
                run = lambda x, step=step: self._after(step.body, *how[:3], [*blocks, x])[-1]  # noqa: E731
                blocks.append(control(step.name, run, *operands))
            elif step.axes:
                blocks.append(comm(step, *operands))
            else:
                blocks.append(apply(LOCAL[step.name], *operands))
        return blocks

    def on_ranks(
        self, over: spmd.Mesh, batched: bool = False, shard_map: Callable = spmd.shard_map, **options: Any
    ) -> Callable:
        """The loss, by `shard_map`; if `batched`, the losses of arguments along a first axis, by a vmap in the body."""

        def comm(step, x):
            call = lambda name, x, axes, options: getattr(collectives, name)(  # noqa: E731
                *([] if x is None else [x]), axis_name=axes, **options
            )
            return KEEP_SHAPES[step.name](Comm(call, step.axes), x, collectives.axis_size(step.axes))

        def control(name, run, x):
            if name == "scan":
                return md.scan(lambda x, t: (run(x * t), None), x, np.array(STEPS, x.dtype))[0]
            if name == "checkpoint":
                return md.checkpoint(run)(x)
            total = collectives.psum(np.sum(x), over.axis_names)
            return md.cond(total > NEAR_ZERO, run, lambda x: x / 2, x)

        def body(*blocks):
            loss = self._run(lambda f, *xs: f(*xs), comm, control, list(blocks))
            return collectives.pmean(loss, over.axis_names)

        specs = tuple(P(None, *spec) for spec in self.specs) if batched else self.specs
        return shard_map(md.vmap(body) if batched else body, mesh=over, in_specs=specs, out_specs=P(), **options)

    def on_lists(self) -> Callable:
        """The loss, on lists of all ranks' blocks."""
        ranks = mesh(*self.shape.values(), names=tuple(self.shape))

        def comm(step, xs):
            def call(name, x, axes, options):
                blocks = [None] * ranks.size if x is None else x.blocks
                return Variadic(reference(ranks, Case(name, (), options), axes, blocks))

            return KEEP_SHAPES[step.name](Comm(call, step.axes), Variadic(xs), size_of(ranks, step.axes)).blocks

        def loss(*arrays):
            blocks = [split(x, ranks, spec) for x, spec in zip(arrays, self.specs)]
            apply = lambda f, *xs: [f(*blocks) for blocks in zip(*xs)]  # noqa: E731

            def control(name, run, xs):
                if name == "cond" and sum(map(np.sum, xs)) <= NEAR_ZERO:
                    return apply(lambda x: x / 2, xs)
                for t in STEPS if name == "scan" else ():
                    xs = run(apply(lambda x, t=t: x * t, xs))
                return xs if name == "scan" else run(xs)

            return sum(self._run(apply, comm, control, blocks)) / ranks.size

        return loss


def split(x: Any, ranks: spmd.Mesh, spec: P) -> list:
    """Each rank's block."""
    blocks = []
    for at in np.ndindex(*ranks.shape.values()):
        place, block = dict(zip(ranks.axis_names, map(int, at))), x
        for dimension, axes in enumerate(spec.dims(2)):
            index = functools.reduce(lambda index, a, place=place: index * ranks.shape[a] + place[a], axes, 0)
            block = np.split(block, size_of(ranks, axes), dimension)[index]
        blocks.append(block)
    return blocks


class Variadic(np.lib.mixins.NDArrayOperatorsMixin):
    """A list of blocks that is handled as if it were one of them."""

    def __init__(self, blocks: list):
        self.blocks = blocks

    def each(self, f: Callable, *args: Any, **kwargs: Any) -> Variadic:
        def of(x, rank):
            if isinstance(x, Variadic):
                return x.blocks[rank]
            return [of(y, rank) for y in x] if isinstance(x, list) else x

        return Variadic([f(*[of(x, rank) for x in args], **kwargs) for rank in range(len(self.blocks))])

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        return self.each(getattr(ufunc, method), *args, **kwargs)

    def __array_function__(self, func, types, args, kwargs):
        return self.each(func, *args, **kwargs)

    def __getattr__(self, name):
        values = [getattr(x, name) for x in self.blocks]
        return (lambda *args: self.each(lambda x: getattr(x, name)(*args), self)) if callable(values[0]) else values[0]


# ---------------------------------------------------------------- random ones

SHAPES = [(1,), (2,), (3,), (2, 2), (1, 3), (2, 1, 2), (2, 2, 2)]


def random_program(
    seed: int,
    shape: Sequence[int] | None = None,
    further: bool = False,
    control: bool = False,
    redundant: bool = False,
) -> RankProgram:
    """A program on a mesh of one to three axes, the same wherever it is made.

    With `further` or `redundant` collectives too; with `control` also with loops, choices, and what is computed again.
    """
    rng = random.Random(seed)
    names = sorted(COLLECTIVE | (FURTHER if further else {}) | (REDUNDANT if redundant else {}))
    axes = dict(zip("ijk", rng.choice(SHAPES) if shape is None else shape))

    def some_axes() -> tuple[str, ...]:
        return tuple(rng.sample(list(axes), rng.randint(1, len(axes))))

    def spec() -> P:
        rows, columns = (some_axes() if rng.random() < chance else () for chance in (0.4, 0.25))
        return P(rows or None, tuple(a for a in columns if a not in rows) or None)

    def some_instructions(first: int, last: int, depth: int = 0) -> list[Instruction]:
        instructions: list[Instruction] = []
        for count in range(first, last):

            def operand(last: int = count - 1) -> int:
                return max(0, last - int(rng.expovariate(0.8)))

            if control and depth < 2 and rng.random() < 0.2:
                body = some_instructions(count + 1, count + 1 + rng.randint(1, 4), depth + 1)
                step = Instruction(rng.choice(CONTROL), (operand(),), (), tuple(body))
            elif rng.random() < 0.45:
                step = Instruction(rng.choice(names), (operand(),), some_axes())
            else:
                name = rng.choice(sorted(LOCAL))
                step = Instruction(name, tuple(operand() for _ in range(1 + (name in BINARY))))
            instructions.append(step)
        return instructions

    specs = tuple(spec() for _ in range(rng.randint(1, 3)))
    return RankProgram(axes, specs, some_instructions(len(specs), len(specs) + rng.randint(2, 7)))
