"""Programs of collectives with a known meaning: each step on blocks, beside the same step on the whole array.

A program works on a matrix [n, k] whose rows are split over some mesh axes. The tests compare the two
readings of a program, their derivatives too, on simulated ranks and on real ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, all_gather_invariant, all_to_all, pmean, ppermute, pscatter, psum, psum_scatter
from spmd import P
from tests.checks.meshes import mesh

COLUMNS = 4


@dataclass
class Step:
    """`block(x, w, axes, size)` on each rank, `whole(x, w, size)` on the whole array; w is a parameter [k]."""

    block: Callable
    whole: Callable


def ring(size: int, by: int = 1) -> list[tuple[int, int]]:
    return [(i, (i + by) % size) for i in range(size)]


def _cut_and_own(x: Any, axes: tuple, size: int) -> Any:
    """All rows, the same on every rank; then each rank's own again."""
    return pscatter(all_gather_invariant(x, axes, tiled=True), axes, tiled=True)


STEPS: dict[str, Step] = {
    "sine": Step(lambda x, w, axes, size: np.sin(x), lambda x, w, size: np.sin(x)),
    "scale by a parameter": Step(lambda x, w, axes, size: x * w, lambda x, w, size: x * w),
    "a parameter twice": Step(lambda x, w, axes, size: np.tanh(x * w) + w, lambda x, w, size: np.tanh(x * w) + w),
    "outer product": Step(
        lambda x, w, axes, size: x @ np.sin(w.reshape(-1, 1) * w), lambda x, w, size: x @ np.sin(w.reshape(-1, 1) * w)
    ),
    "add the column sums": Step(
        lambda x, w, axes, size: x + psum(np.sum(x, axis=0), axes) / 8, lambda x, w, size: x + np.sum(x, axis=0) / 8
    ),
    "subtract the mean": Step(lambda x, w, axes, size: x - pmean(np.mean(x), axes), lambda x, w, size: x - np.mean(x)),
    "a sum of sums": Step(
        lambda x, w, axes, size: x * np.cos(psum(w * psum(np.sum(x * w, axis=0), axes), axes)),
        lambda x, w, size: x * np.cos(size * w * np.sum(x * w, axis=0)),
    ),
    "gather, and sum back": Step(
        lambda x, w, axes, size: psum_scatter(np.sin(all_gather(x, axes, tiled=True)), axes, tiled=True) / size,
        lambda x, w, size: np.sin(x),
    ),
    "gather invariantly": Step(
        lambda x, w, axes, size: x + np.mean(np.cos(all_gather_invariant(x * w, axes)), axis=(0, 1)),
        lambda x, w, size: x + np.mean(np.cos(x * w), axis=0),
    ),
    "cut and own": Step(lambda x, w, axes, size: np.sin(_cut_and_own(x, axes, size)), lambda x, w, size: np.sin(x)),
    "shift": Step(
        lambda x, w, axes, size: ppermute(x, axes, ring(size)) * w,
        lambda x, w, size: np.concatenate([x[-(x.shape[0] // size) :], x[: -(x.shape[0] // size)]]) * w,
    ),
    "exchange rows and columns": Step(
        lambda x, w, axes, size: all_to_all(np.sin(all_to_all(np.stack([x] * size), axes, 0, 0)), axes, 0, 0)[0],
        lambda x, w, size: np.sin(x),
    ),
}


def _scanned(total):
    """A loop with a sum in each step, of whose results all are used."""

    def apply(x, w):
        step = lambda c, t: (np.sin(c) * t + total(np.sum(c, axis=0)) / 8, total(np.sum(c * w, axis=0)))  # noqa: E731
        c, ys = md.scan(step, x, np.array([0.5, 1.0]))
        return c + np.mean(ys, axis=0) / 8

    return apply


def _repeated(total):
    """A carry that is a parameter at first, the same on all ranks."""
    return lambda x, w: md.fori_loop(0, 2, lambda i, c: np.tanh(c + i * x * total(np.mean(w))), np.ones(x.shape) * w)


def _layered(x, w):
    """Layers of which each step takes one, and what they have in common."""
    return md.scan(lambda x, v: (np.tanh(x * np.sin(v)) + x * np.cos(w), None), x, np.stack([w, w * w]))[0]


def _shared_carry(x, w):
    """A carry that is the same on all ranks, throughout."""
    step = lambda c, t: ((np.sin(c[0]) * t, c[1] * c[0] + t), None)  # noqa: E731
    return md.scan(step, (w, x), np.array([0.5, 1.0, 1.5]))[0][1]


def _branching(total):
    """Branches with and without communication, one of which is the same on all ranks."""

    def apply(x, w):
        some = total(np.sum(x * w))
        y = md.cond(some > 0, lambda x: np.sin(x) * total(np.sum(x)) / 8, lambda x: np.broadcast_to(w, x.shape), x)
        return y + md.switch((some < 1).astype(int), [lambda: w * w, lambda: total(np.sum(x, axis=0)) / 8])

    return apply


def _over(axes):
    return lambda x: psum(x, axes)


STEPS |= {
    "a scan": Step(
        lambda x, w, axes, size: _scanned(_over(axes))(x, w), lambda x, w, size: _scanned(lambda y: y)(x, w)
    ),
    "a carry that is pbroadcast": Step(
        lambda x, w, axes, size: _repeated(_over(axes))(x, w / 4),
        lambda x, w, size: _repeated(lambda y: size * y)(x, w / 4),
    ),
    "layers": Step(lambda x, w, axes, size: _layered(x, w), lambda x, w, size: _layered(x, w)),
    "a carry that ranks share": Step(
        lambda x, w, axes, size: _shared_carry(x, w), lambda x, w, size: _shared_carry(x, w)
    ),
    "branches": Step(
        lambda x, w, axes, size: _branching(_over(axes))(x, w), lambda x, w, size: _branching(lambda y: y)(x, w)
    ),
}

LOOPS = {"a scan", "a carry that is pbroadcast", "layers", "a carry that ranks share"}
#: Loops that sum in each step, on the way back: of elements and carries, they compute what is to vary.
SUMS_IN_STEPS = {"layers", "a carry that ranks share"}


@dataclass
class Program:
    """Steps in order, then the mean of squares: a scalar of x [n, k] and of a list of parameters [k]."""

    steps: list[str]

    def whole(self, size: int) -> Callable:
        def loss(x, params):
            for name, w in zip(self.steps, params):
                x = STEPS[name].whole(x, w, size)
            return np.mean(x**2)

        return loss

    def on_blocks(self, mesh: spmd.Mesh, axes: tuple[str, ...]) -> Callable:
        """The same loss, of each rank's rows, in the body of a `shard_map`."""
        size = math.prod(mesh.shape[a] for a in axes)

        def loss(x, params):
            for name, w in zip(self.steps, params):
                x = STEPS[name].block(x, w, axes, size)
            return pmean(np.mean(x**2), axes)

        return loss

    def sharded(
        self,
        mesh: spmd.Mesh,
        axes: tuple[str, ...],
        closed_over: bool = False,
        shard_map: Callable = spmd.shard_map,
        **options: Any,
    ) -> Callable:
        """The same loss through `shard_map`; the parameters as an argument, or closed over."""
        on_blocks = self.on_blocks(mesh, axes)

        def loss(x, params):
            if closed_over:
                mapped = shard_map(
                    lambda x: on_blocks(x, params), mesh=mesh, in_specs=P(axes), out_specs=P(), **options
                )
                return mapped(x)
            mapped = shard_map(on_blocks, mesh=mesh, in_specs=(P(axes), P()), out_specs=P(), **options)
            return mapped(x, params)

        return loss


#: Meshes of one to three axes, some of one rank; random programs; and meshes with some of their axes in some order.
MESHES = [mesh(1), mesh(2), mesh(3), mesh(2, 2), mesh(1, 3), mesh(2, 1, 2)]
programs = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4).map(Program)


@st.composite
def placements(draw):
    over = draw(st.sampled_from(MESHES))
    axes = draw(st.lists(st.sampled_from(over.axis_names), min_size=1, max_size=3, unique=True))
    return over, tuple(axes)


def example(program: Program, rows: int, seed: int) -> tuple:
    """Arguments for a program, the same wherever they are made."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, COLUMNS)), [rng.normal(size=COLUMNS) for _ in program.steps]


def assert_trees_close(actual: Any, expected: Any, **tolerances: float) -> None:
    """Leaf by leaf, with paths in the message."""
    for (path, a), e in zip(md.tree.flatten_with_paths(actual)[0], md.tree.leaves(expected), strict=True):
        a = a.gather() if isinstance(a, spmd.ShardedArray) else a
        np.testing.assert_allclose(a, e, err_msg=f"at {path}", **{"rtol": 1e-9, "atol": 1e-12, **tolerances})


def equations(tape: md.Tape) -> Iterator:
    """All equations, also of bodies."""
    for eqn in tape.equations:
        yield eqn
        for body in eqn.bodies:
            yield from equations(body)


def by_rank_0(make: Callable[[], Any]) -> Any:
    """Return or raise on all MPI ranks the outcome of `make()` on rank 0; the others sleep meanwhile."""
    result = error = None
    if MPI.COMM_WORLD.rank == 0:
        try:
            result = make()
        except Exception as raised:
            error = raised
    is_made = MPI.COMM_WORLD.Ibarrier()
    while not is_made.Test():
        time.sleep(1e-3)
    result, error = MPI.COMM_WORLD.bcast((result, error))
    if error is not None:
        raise error
    return result


def run_and_count(f: Callable, mesh: spmd.Mesh, *args: Any) -> Any:
    """The result of `f`, having checked that it communicated as its report says.

    With branches it may be less. Of a loop, the report is about its tape, in which all steps are alike: one that is run
    step by step may need no cotangent for what it starts with, and sums in each step what its constants make.
    """
    mesh.reset_calls()
    out, tape = f(*args), md.make_tape(f)(*args)
    if "scan(" in str(tape):
        mesh.reset_calls()
        tape(*md.tree.leaves(args))
    report, sent = spmd.communication(tape), sum(mesh.bytes.values())
    if report.notes:
        assert sent <= report.bytes
    else:
        assert (mesh.calls, sent) == (report.counts, report.bytes)
    return out
