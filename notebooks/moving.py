"""Pages that move, from programs that run: python notebooks/moving.py [folder].

The ring, each collective, a pipeline's schedules, sharded arrays, what an all-reduce costs, and a tape.
"""

import html
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
from pictures import NOTHING, RANK_COLORS, SAME, Held, follow_collective, on_ranks

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_index,
    broadcast,
    cost,
    gather,
    pbroadcast,
    pmean,
    ppermute,
    pscatter,
    psum,
    psum_scatter,
    reduce,
    scatter,
)
from spmd import P, parallel
from spmd.pipeline.tables import COLORS
from spmd.report.explore import Control, Page, PageRow

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")
NUMBERS = numpy.array([3.0, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 1, 2])
RANKS = ["", *[f"rank {r}" for r in range(4)]]
AROUND = [(r, (r + 1) % 4) for r in range(4)]

# ---------------------------------------------------------------- what ranks hold


def row_of(name: str, held: Held) -> PageRow:
    """A row with each rank's block, in the colors of the ranks whose numbers went into its entries."""
    cells = [f"{html.escape(name)}<br>{held.type}"]
    for block, origins in zip(held.blocks, held.origins):
        grid = block.reshape(-1, block.shape[-1])
        marks = origins.reshape(*grid.shape, -1)
        lines = ["".join(_entry(x, of) for x, of in zip(line, row)) for line, row in zip(grid, marks)]
        cells.append("<br>".join(lines))
    return PageRow(cells)


def _entry(number: float, origins: numpy.ndarray) -> str:
    colors = [RANK_COLORS[r] for r in numpy.flatnonzero(origins[:-1])] or [SAME if origins[-1] else NOTHING]
    return f'<span class="entry" style="background:{_bands(colors, 135)}">{number:g}</span>'


def _bands(colors: Sequence[str], degrees: int = 90) -> str:
    """Return a CSS background of bands: upright ones are copies, diagonal ones numbers of several ranks in one."""
    bands = [f"{c} {100 * k / len(colors):.0f}% {100 * (k + 1) / len(colors):.0f}%" for k, c in enumerate(colors)]
    return f"linear-gradient({degrees}deg,{','.join(bands)})"


def arrows_of(moves: Sequence[tuple[int, int, str]]) -> list[PageRow]:
    """A row of arrows, from a column above to one below, in a color each; none if nothing moves."""
    return [PageRow(["", f"<div data-moves='{json.dumps(moves)}'></div>"], "moves")] * bool(moves)


def moves_to(held: Held) -> list[tuple[int, int, str]]:
    """The ranks that a value's numbers came from, and those that they went to, where these differ."""
    arrived = [origins.reshape(-1, origins.shape[-1]).any(0)[:-1] for origins in held.origins]
    return [
        (s, r, RANK_COLORS[s]) for r, sources in enumerate(arrived) for s in map(int, sources.nonzero()[0]) if s != r
    ]


def ring_step(x: Any, step: int) -> Any:
    """Return a rank's chunks after a step of a ring all-reduce, from those before: three add, and three copy."""
    here, chunks = axis_index("i"), x.reshape(4, -1)
    arrived = ppermute(chunks[(here - step) % 4], "i", AROUND)
    chunk = chunks.at[(here - step - 1) % 4]
    return (chunk.add(arrived) if step < 3 else chunk.set(arrived)).reshape(x.shape)


def ring(x: Any) -> list[Any]:
    """Return a rank's chunks at first, and after each step of a ring all-reduce."""
    return [*itertools.accumulate(range(6), ring_step, initial=x)]


def ring_page() -> Page:
    names = [*[f"reduce-scatter, step {k}" for k in (1, 2, 3)], *[f"all-gather, step {k}" for k in (1, 2, 3)]]
    first, *others = on_ranks(ring, NUMBERS, mesh=MESH, in_specs=P("i"))
    rows, before = [row_of("at first", first)], first
    for step, (name, held) in enumerate(zip(names, others)):
        start = numpy.concatenate(before.blocks)
        (after,) = on_ranks(lambda x, step=step: [ring_step(x, step)], start, mesh=MESH, in_specs=P("i"))
        rows += [*arrows_of(moves_to(after)), row_of(name, held)]
        before = held
    text = (
        "An all-reduce on a ring of four ranks. The colors of an entry are the ranks whose numbers are in it. Arrows: "
        "each rank sends a chunk to the next one."
    )
    return Page("The ring", text, {(): (RANKS, rows)})


#: Collective -> a function that applies it, and the spec of its operand.
COLLECTIVES = {
    "psum": (lambda x: psum(x, "i"), P("i")),
    "pbroadcast": (lambda x: pbroadcast(x, "i"), P()),
    "all_gather": (lambda x: all_gather(x, "i", tiled=True), P("i")),
    "psum_scatter": (lambda x: psum_scatter(x, "i", tiled=True), P("i")),
    "all_gather_invariant": (lambda x: all_gather_invariant(x, "i", tiled=True), P("i")),
    "pscatter": (lambda x: pscatter(x, "i", tiled=True), P()),
    "ppermute": (lambda x: ppermute(x, "i", AROUND), P("i")),
    "all_to_all": (lambda x: all_to_all(x, "i", 0, 0, tiled=True), P("i")),
    "broadcast": (lambda x: broadcast(x, "i"), P("i")),
    "reduce": (lambda x: reduce(x, "i"), P("i")),
    "scatter": (lambda x: scatter(x, "i", tiled=True), P("i")),
    "gather": (lambda x: gather(x, "i", tiled=True), P("i")),
}


def collectives_page() -> Page:
    tables = {}
    for name, (f, spec) in COLLECTIVES.items():
        x = NUMBERS if spec == P("i") else NUMBERS[:4]
        _, forward, transpose, backward = follow_collective(f, x, MESH, spec)
        names = ["before", name, "a cotangent of the result", f"its transpose, {transpose}"]
        before, after, ct, back = map(row_of, names, [*forward, *backward])
        there, here = (arrows_of(moves_to(held)) for held in (forward[1], backward[1]))
        tables[name,] = RANKS, [before, *there, after, ct, *here, back]
    text = (
        "Blocks before and after each collective, forward, and backward by its transpose. Gray: all ranks have it. "
        "Arrows: numbers that move to another rank."
    )
    return Page("Collectives", text, tables, [Control("collective", list(COLLECTIVES))])


# ---------------------------------------------------------------- schedules, arrays, costs

SCHEDULES = {"GPipe": spmd.pipeline.gpipe, "1F1B": spmd.pipeline.one_f_one_b}


def pipeline_page() -> Page:
    stages, microbatches = [2, 3, 4, 6], [1, 2, 4, 6, 8, 12]
    tables = {}
    for name, p, m in itertools.product(SCHEDULES, stages, microbatches):
        schedule = SCHEDULES[name](p, m)
        ticks = [*zip(*schedule.table)]
        moves = [[], *([move for i, step in enumerate(row) for move in _sends(i, step, p)] for row in ticks)]
        rows = [
            each
            for tick, (row, sent) in enumerate(zip(ticks, moves))
            for each in (*arrows_of(sent), PageRow([str(tick), *map(_pass, row)]))
        ]
        stash = ", ".join(map(str, schedule.stashed))
        rows.append(
            PageRow(["in all", f"{schedule.ticks} ticks, idle {schedule.bubble:.0%}; stored microbatches {stash}"])
        )
        tables[name, p, m] = ["tick", *[f"stage {i}" for i in range(p)]], rows
    controls = [Control("schedule", list(SCHEDULES)), Control("stages", stages, start=2)]
    text = (
        "Blue: the forward pass of a microbatch. Green: its backward pass. Each row is a tick. Arrows: activations go "
        "to the next stage, and cotangents to the one before."
    )
    return Page("A pipeline", text, tables, [*controls, Control("microbatches", microbatches, start=2)])


def _pass(step: Any) -> str:
    return "" if step is None else f'<span class="{step.direction}-pass">{step.microbatch}</span>'


def _sends(stage: int, step: Any, stages: int) -> list[tuple[int, int, str]]:
    """The arrow of what a stage sends after a step; none at the ends, and where it is idle."""
    if step is None:
        return []
    to = stage + (1 if step.direction == "forward" else -1)
    return [(stage, to, COLORS[step.direction])] * (0 <= to < stages)


def sharding_page() -> Page:
    mesh = spmd.make_mesh((2, 2), ("x", "y"), backend="simulated")
    tables = {}
    for spec in (P("x", "y"), P("y", "x"), P("x"), P(None, "x"), P(("x", "y")), P(("y", "x")), P(None, "y"), P()):
        sharding = spmd.visualize_sharding((8, 8), mesh, spec)
        down, across = sharding.parts
        header = ["rows", *[f"columns {8 // across * k} to {8 // across * (k + 1) - 1}" for k in range(across)]]
        tables[str(spec),] = (
            header,
            [
                PageRow(
                    [
                        f"{8 // down * i} to {8 // down * (i + 1) - 1}",
                        *[_block(sharding.ranks[i, j]) for j in range(across)],
                    ]
                )
                for i in range(down)
            ],
        )
    text = "A matrix of 8 by 8 over a mesh of 2 by 2, with axes x and y: which ranks hold which block."
    return Page("A sharded array", text, tables, [Control("spec", [key for (key,) in tables])], whole=True)


def _block(ranks: Sequence[int]) -> str:
    message = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f'<span class="block" style="background:{_bands([RANK_COLORS[r] for r in ranks])}">{message}</span>'


CONSTANTS = (
    Control("seconds a step, α", [1e-7, 1e-6, 1e-5, 1e-4], "alpha", 2),
    Control("seconds a byte, β", [1e-12, 1e-11, 1e-10, 1e-9, 1e-8], "beta", 2),
)


def cost_page() -> Page:
    names = [name for name in cost.ALGORITHMS if name.endswith("all_reduce")]
    ranks, sizes = [2**k for k in range(1, 13)], [10**k for k in range(2, 11)]
    tables = {}
    for n, size in itertools.product(ranks, sizes):
        costs = {name: cost.ALGORITHMS[name](n, size) for name in names}
        tables[n, size] = (
            ["algorithm", "steps", "bytes", "seconds"],
            [PageRow([name, f"{c.steps:,}", f"{c.bytes:,.0f}", _seconds(c)]) for name, c in costs.items()],
        )
    controls = [Control("ranks", ranks, start=5), Control("bytes on each rank", sizes, start=4)]
    text = "What an all-reduce takes by each algorithm: steps times α, and bytes times β."
    return Page("The price of an all-reduce", text, tables, [*controls, *CONSTANTS], whole=True)


SIZES, EXAMPLES = [512, *[256] * 9, 8], 64  # of a network of ten layers; eight of them have equal shapes


def network_page() -> Page:
    shapes = [(md.ShapedArray((n, m), float), md.ShapedArray((m,), float)) for n, m in itertools.pairwise(SIZES)]
    batch = md.ShapedArray((EXAMPLES, SIZES[0]), float), md.ShapedArray((EXAMPLES, SIZES[-1]), float)
    ranks, microbatches = [2, 4, 8], [8, 16, 32]
    tables = {}
    for n in ranks:
        (one, feats, stages) = (spmd.make_mesh((n,), (a,), backend="simulated") for a in ("batch", "feats", "stages"))
        losses = {
            "data parallel": (parallel.data_parallel(one), shapes),
            "fully sharded": (parallel.fully_sharded(one), shapes),
            "tensor parallel": (parallel.tensor_parallel(feats), shapes),
        }
        rows = {name: _network_row(name, loss, params, batch) for name, (loss, params) in losses.items()}
        for m in microbatches:
            loss, params = parallel.pipeline_parallel(stages, microbatch=EXAMPLES // m), _stack(shapes)
            idle = f"pipeline, idle {spmd.pipeline.gpipe(n, m).bubble:.0%}"
            tables[n, m] = ["gradient", "steps", "bytes", "seconds"], [
                *rows.values(), _network_row(idle, loss, params, batch)
            ]  # fmt: skip
    controls = [
        Control("ranks, or stages", ranks, start=1),
        Control("microbatches of the pipeline", microbatches, start=1),
    ]
    text = "What the gradient of a network of ten layers communicates, and how long that takes by rings."
    return Page("The communication of a network", text, tables, [*controls, *CONSTANTS], whole=True)


def _stack(shapes: Sequence) -> Any:
    zeros = [tuple(numpy.zeros(t.shape) for t in layer) for layer in shapes]
    return md.tree.map(md.typeof, parallel.stacked_layers(zeros))


def _network_row(name: str, loss: Any, params: Any, batch: tuple) -> PageRow:
    report = spmd.communication(md.grad(loss))(params, batch)
    prices = [row.count * cost.price(row.collective, row.ranks, row.bytes / row.count) for row in report.rows]
    total = sum(prices, cost.Cost())
    return PageRow([name, f"{total.steps:,}", f"{total.bytes:,.0f}", _seconds(total)])


def _seconds(c: cost.Cost) -> str:
    return f'<span data-steps="{c.steps}" data-bytes="{c.bytes}"></span> <span class="bar"></span>'


def tape_page() -> Page:
    def error(w: Any, x: Any, y: Any) -> Any:
        return pmean(np.mean((np.tanh(x @ w) - y) ** 2), "i")

    loss = spmd.shard_map(error, mesh=MESH, in_specs=(P(), P("i"), P("i")), out_specs=P())
    rng = numpy.random.default_rng(0)
    page = spmd.explore(md.grad(loss))(rng.normal(size=3), rng.normal(size=(8, 3)), rng.normal(size=8))
    header, rows = page.tables[()]
    every_pair = arrows_of([(s, r, RANK_COLORS[s]) for s, r in itertools.permutations(range(MESH.size), 2)])
    sums = [every_pair if " = psum(" in step.text else [] for step in page.steps]
    page.tables = {(): (header, [each for arrows, row in zip(sums, rows) for each in (*arrows, row)])}
    return page


PAGES = {
    "ring": ring_page,
    "collectives": collectives_page,
    "pipeline": pipeline_page,
    "sharding": sharding_page,
    "cost": cost_page,
    "network": network_page,
    "tape": tape_page,
}


def write_pages(folder: Any) -> Iterator[Path]:
    """Write all pages into a folder, and yield their paths."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        yield make().write(Path(folder) / f"{name}.html")


if __name__ == "__main__":
    for path in write_pages(*(sys.argv[1:] or ["moving"])):
        print(path)
