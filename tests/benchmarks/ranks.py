"""The cost of calls, collectives and a timeline on MPI ranks, compared with the same calls of mpi4py by hand.

    mpiexec -n 2 python -m tests.benchmarks.ranks [--rounds N] [--only NAME …] [--json FILE]

Each round times all of a row's programs in turn. A time is that of the slowest rank, and what is shown are medians and
minima over rounds: ratios within a round say more than times. Every few rounds arrays get another length, so that they
have other places in memory: these alone make a sum of 64 kB up to twice as fast.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import all_gather, all_to_all, pmean, ppermute, psum, psum_scatter
from spmd import P
from spmd.checks.agreement import check_blocks
from spmd.report.communication import Clock

from .measure import chosen, options, save, time_of, times

Runs = dict[str, Callable[[], object]]
HAND = "mpi4py"
FEW, MANY = 2, 10  # collectives in a body, to see what a further one costs
LENGTHS = 5  # of arrays, in a row
LONGER = np.random.default_rng(0)


def mapped(body: Callable, mesh: spmd.Mesh, count: int = 1, out: P = P()) -> Callable:
    return spmd.shard_map(body, mesh=mesh, in_specs=(P("i"),) * count, out_specs=out)


def blocks(mesh: spmd.Mesh, size: int) -> tuple[spmd.ShardedArray, np.ndarray]:
    """An array whose blocks have `size` bytes, long ones some more, and this rank's block of it."""
    longer = LONGER.integers(0, 64) * 64 if size >= 2**13 else 0
    block = np.linspace(0.5, 1.0, (size + longer) // 8)
    return spmd.distribute(np.tile(block, mesh.size), mesh, P("i")), block


# ---------------------------------------------------------------- rows: the same by the library, and by hand


def one_sum(mesh: spmd.Mesh) -> Runs:
    x, block = blocks(mesh, 8)
    f, out = mapped(lambda x: psum(x, "i"), mesh), np.empty_like(block)
    compiled = md.jit(f)
    return {HAND: lambda: MPI.COMM_WORLD.Allreduce(block, out), "compiled": lambda: compiled(x), "eager": lambda: f(x)}


def chains(mesh: spmd.Mesh, size: int, ours: Callable, by_hand: Callable, out: P) -> Runs:
    """A few dependent calls, and many: `ours(x, block)` makes the next x of the last one, and `by_hand` does."""
    x, block = blocks(mesh, size)
    runs: Runs = {}

    def chained(step, x, n):
        last = x
        for _ in range(n):
            last = step(last, x)
        return last

    for n in (FEW, MANY):
        f = mapped(lambda x, n=n: chained(ours, x, n), mesh, out=out)
        compiled = md.jit(f)
        runs |= {
            f"{HAND}, {n}": lambda n=n: chained(by_hand, block, n),
            f"compiled, {n}": lambda f=compiled: f(x),
            f"eager, {n}": lambda f=f: f(x),
        }
    return runs


def sums(mesh: spmd.Mesh, size: int) -> Runs:
    def by_hand(last, block):
        product, total = last * block, np.empty_like(block)
        MPI.COMM_WORLD.Allreduce(product, total)
        return total

    return chains(mesh, size, lambda last, x: psum(last * x, "i"), by_hand, P())


def exchanges(mesh: spmd.Mesh, size: int) -> Runs:
    def by_hand(last, block):
        out = np.empty_like(block)
        MPI.COMM_WORLD.Alltoall(last, out)
        return out

    return chains(mesh, size, lambda last, x: all_to_all(last, "i", 0, 0, tiled=True), by_hand, P("i"))


def gathers(mesh: spmd.Mesh, size: int) -> Runs:
    """Each step gathers blocks, then sums and scatters them: two collectives."""

    def by_hand(last, block):
        whole, out = np.empty((mesh.size, *last.shape)), np.empty_like(block)
        MPI.COMM_WORLD.Allgather(last, whole)
        MPI.COMM_WORLD.Reduce_scatter_block(whole, out)
        return out

    step = lambda last, x: psum_scatter(all_gather(last, "i", tiled=True), "i", tiled=True)  # noqa: E731
    return chains(mesh, size, step, by_hand, P("i"))


def shift(mesh: spmd.Mesh) -> Runs:
    x, block = blocks(mesh, 512)
    n, out = mesh.size, np.empty_like(block)
    f = mapped(lambda x: ppermute(x, "i", [(r, (r + 1) % n) for r in range(n)]), mesh, out=P("i"))
    compiled = md.jit(f)
    to, source = (MPI.COMM_WORLD.rank + 1) % n, (MPI.COMM_WORLD.rank - 1) % n
    return {
        HAND: lambda: MPI.COMM_WORLD.Sendrecv(block, to, 0, out, source, 0),
        "compiled": lambda: compiled(x),
        "eager": lambda: f(x),
    }


def comparison(mesh: spmd.Mesh) -> Runs:
    """A comparison of values, which a call of a `shard_map` makes at times."""
    runs: Runs = {HAND: MPI.COMM_WORLD.Barrier}
    for size in (8, 2**13, 2**23):
        values = np.ones(size // 8)
        runs[f"{size:,} B"] = lambda values=values: check_blocks(mesh, [("values", values, ())], exact=False)
    return runs


LARGE, SMALL, STEPS = (784, 512, 256, 10), (64, 64, 32, 10), 50


def data_parallel(mesh: spmd.Mesh, layers: tuple[int, ...], batch: int, steps: int) -> Runs:
    """Steps of gradient descent on the squared error of a network, whose batch is split over the ranks."""
    rng, rows = np.random.default_rng(0), batch // mesh.size
    shapes = [*itertools.pairwise(layers)]
    first = [(rng.normal(size=s).astype("f4") / s[0] ** 0.5, np.zeros(s[1], "f4")) for s in shapes]
    inputs, targets = rng.normal(size=(batch, layers[0])).astype("f4"), rng.normal(size=(batch, 10)).astype("f4")
    rate = np.float32(0.01)

    def loss(params, inputs, targets):
        x = inputs
        for k, (w, b) in enumerate(params):
            x = x @ w + b
            x = mnp.tanh(x) if k < len(params) - 1 else x
        return pmean(mnp.mean((x - targets) ** 2), "i")

    total = spmd.shard_map(loss, mesh=mesh, in_specs=(P(), P("i"), P("i")), out_specs=P())

    @md.jit
    def step(params, inputs, targets):
        value, gradient = md.value_and_grad(total)(params, inputs, targets)
        return value, md.tree.map(lambda p, g: p - rate * g, params, gradient)

    split = [spmd.distribute(x, mesh, P("i")) for x in (inputs, targets)]
    here = slice(MPI.COMM_WORLD.rank * rows, (MPI.COMM_WORLD.rank + 1) * rows)
    blocks_here = inputs[here].copy(), targets[here].copy()

    by_hand = functools.partial(_by_hand, rate, batch)

    def train(step, *data):
        value, params = None, first
        for _ in range(steps):
            value, params = step(params, *data)
        return value, params

    (ours, new), (theirs, expected) = train(step, *split), train(by_hand, *blocks_here)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    for p, q in zip(md.tree.leaves(new), md.tree.leaves(expected)):
        np.testing.assert_allclose(p, q, rtol=1e-3, atol=1e-5)
    return {HAND: lambda: train(by_hand, *blocks_here), "compiled": lambda: train(step, *split)}


def _by_hand(rate, batch, params, x, wanted):
    """A step of gradient descent by NumPy and one all-reduce: the loss, and the new parameters."""
    ends = np.cumsum([0, *[x.size for layer in params for x in layer]])
    saved = []
    for k, (w, b) in enumerate(params):
        saved.append(x)
        x = x @ w
        x += b
        if k < len(params) - 1:
            np.tanh(x, out=x)
    ct = x - wanted
    value = np.vdot(ct, ct) / np.float32(10 * batch)
    ct *= np.float32(2 / (10 * batch))
    flat = np.empty(ends[-1] + 1, "f4")
    flat[-1] = value
    parts = [flat[a:b] for a, b in itertools.pairwise(ends)]
    for k in reversed(range(len(params))):
        np.matmul(saved[k].T, ct, out=parts[2 * k].reshape(params[k][0].shape))
        ct.sum(0, out=parts[2 * k + 1])
        if k:
            ct = ct @ params[k][0].T
            ct *= 1 - saved[k] * saved[k]
    summed = np.empty_like(flat)
    MPI.COMM_WORLD.Allreduce(flat, summed)
    parts = [summed[a:b] for a, b in itertools.pairwise(ends)]
    return summed[-1], [
        (w - rate * parts[2 * k].reshape(w.shape), b - rate * parts[2 * k + 1]) for k, (w, b) in enumerate(params)
    ]


def clocked(mesh: spmd.Mesh, width: int) -> Runs:
    """The gradient of a network of products of `width`, with the clock of `spmd.timeline(measured=True)` or without."""
    weights = [np.ones((width, width)) / width] * 6
    x = spmd.distribute(np.ones((width * mesh.size, width)), mesh, P("i"))

    def loss(weights, x):
        for w in weights:
            x = mnp.tanh(x @ w)
        return pmean(mnp.mean(x * x), "i")

    total = spmd.shard_map(loss, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    clock, plain, noted = Clock(), md.jit(md.grad(total)), md.jit(md.grad(total))
    with clock.in_programs():
        noted(weights, x)

    def measured():
        clock.start()
        noted(weights, x)

    return {"compiled": lambda: plain(weights, x), "measured": measured}


ROWS: dict[str, tuple[Callable[[spmd.Mesh], Runs], float]] = {  # with the seconds that a round may take
    "one psum of 8 B": (one_sum, 0.01),
    "psums of 8 B": (lambda mesh: sums(mesh, 8), 0.01),
    "psums of 64 kB": (lambda mesh: sums(mesh, 2**16), 0.03),
    "psums of 512 kB": (lambda mesh: sums(mesh, 2**19), 0.06),
    "one ppermute of 512 B": (shift, 0.01),
    "all-to-alls of 512 B": (lambda mesh: exchanges(mesh, 512), 0.01),
    "gathers and scatters of 512 B": (lambda mesh: gathers(mesh, 512), 0.01),
    "comparison of values": (comparison, 0.1),
    "data-parallel step": (lambda mesh: data_parallel(mesh, LARGE, 1024, 1), 0.1),
    f"{STEPS} steps of a small network": (lambda mesh: data_parallel(mesh, SMALL, 128, STEPS), 0.05),
    "timeline, products of 32": (lambda mesh: clocked(mesh, 32), 0.03),
    "timeline, products of 128": (lambda mesh: clocked(mesh, 128), 0.1),
}

# ---------------------------------------------------------------- measuring


def slowest(run: Callable, calls: int) -> float:
    """Seconds a call, on the slowest rank."""
    MPI.COMM_WORLD.Barrier()
    return MPI.COMM_WORLD.allreduce(time_of(run, calls), MPI.MAX)


def lines(name: str, actual: dict[str, list[float]]) -> Iterator[dict]:
    """Return the text of a row: each program compared with mpi4py's; for sums, the cost of each further one."""
    if f"{HAND}, {MANY}" in actual:
        actual = {
            kind: [
                (many - few) / (MANY - FEW) for few, many in zip(actual[f"{kind}, {FEW}"], actual[f"{kind}, {MANY}"])
            ]
            for kind in (HAND, "compiled", "eager")
        }
        name = f"each further of {name}"
    first = next(iter(actual.values()))
    for kind, took in actual.items():
        beside = [*zip(took, first)]
        yield {
            "row": name,
            "kind": kind,
            "ranks": MPI.COMM_WORLD.size,
            "minimum": min(took),
            "median": statistics.median(took),
            "over": statistics.median(a - b for a, b in beside),
            "over minima": min(took) - min(first),
            "ratio": statistics.median([a / b for a, b in beside if b > 0] or [0.0]),
        }


# ---------------------------------------------------------------- the program


def main(arguments: list[str] | None = None) -> list[dict]:
    asked = options(__doc__, arguments, rounds=40, only=(), json="")
    mesh, result = spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",), backend="mpi"), []
    say = print if MPI.COMM_WORLD.rank == 0 else lambda *_: None
    say(f"{MPI.Get_library_version().splitlines()[0].strip()}, {MPI.COMM_WORLD.size} ranks; microseconds")
    say(f"{'':47}{'':10}{'minimum':>10}{'median':>10}{'over':>10}{'ratio':>8}")
    for name in chosen(ROWS, asked.only):
        (make, seconds), actual = ROWS[name], defaultdict(list)
        lengths = min(LENGTHS, asked.rounds)
        for _ in range(lengths):
            runs = make(mesh)
            for kind, took in times(runs, -(-asked.rounds // lengths), seconds, slowest).items():
                actual[kind] += [1e6 * t for t in took]
        for line in lines(name, actual):
            result.append(line)
            numbers = "".join(f"{line[key]:10.1f}" for key in ("minimum", "median", "over"))
            say(f"{line['row']:47}{line['kind']:10}{numbers}{line['ratio']:8.2f}")
    save(asked.json if MPI.COMM_WORLD.rank == 0 else "", result)
    return result


if __name__ == "__main__":
    main()
