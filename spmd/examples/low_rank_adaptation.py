"""Fine-tuning by low-rank adaptation (LoRA): large weights are frozen, and the product of two thin matrices is trained.

    mpirun -n 4 python -m spmd.examples.low_rank_adaptation

For all weights, and for adapters of rank 1, 2 and 4, the program prints the numbers that are trained, those of the
optimizer's states on a rank, the collectives of a gradient, and the loss at the end, on ranks and on one rank. For
adapters it also prints the least loss that a change of this rank can have, and whether the frozen weights are the same.

A layer computes x (W + A B), with W [n, n] frozen, A [n, r] drawn, and B [r, n] zero at first: training begins at the
network that was pretrained. W has no gradient, so it has no sum over ranks and no state of Adam. Here it is fully
sharded: each rank holds a part of its rows, and gathers the others where the layer uses them. Afterwards W + A B is a
matrix like W, so that the adapted layer is as fast as before.

The inputs are orthonormal, so the loss is the squared distance to the matrix of the new task. The best change of rank r
comes from the largest singular values, and leaves the squares of the others (Eckart and Young).

Source: Hu et al., "LoRA: Low-rank adaptation of large language models".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import spmd
from collectives import all_gather, psum
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P

N, EXAMPLES, STEPS = 64, 128, 400


def squared_error(params: dict, frozen: dict, batch: tuple, axis: str | None = None) -> Any:
    """Return the squared error of a layer, with adapters if there are some; a rank has a part of the rows of W.

    The product x A B is computed from the left, which costs less than A B.
    """
    x, y = batch
    w = (params | frozen)["w"]
    out = x @ (w if axis is None else all_gather(w, axis, tiled=True))
    out = out + x @ params["a"] @ params["b"] if "a" in params else out
    return ((out - y) ** 2).sum()


def train(gradient: Callable, params: Any, frozen: Any, batch: tuple) -> tuple[Any, Any]:
    """Train by Adam; return the parameters, and the optimizer's state."""
    optimizer = md.optim.adam(md.optim.cosine_decay_schedule(0.1, STEPS))
    state = optimizer.init(params)

    @md.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(gradient(params, frozen, batch), state, params)
        return md.optim.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    return params, state


def problem() -> tuple[numpy.ndarray, numpy.ndarray, tuple]:
    """Return the pretrained matrix, the change that the new task needs, and examples with orthonormal inputs."""
    rng = numpy.random.default_rng(0)
    w, x = rng.normal(size=(N, N)), numpy.linalg.qr(rng.normal(size=(EXAMPLES, N)))[0]
    u, v = (numpy.linalg.qr(rng.normal(size=(N, N)))[0] for _ in range(2))
    change = u @ numpy.diag(2.0 ** -numpy.arange(N)) @ v
    return w, change, (x, x @ (w + change))


def least_loss(change: numpy.ndarray, rank: int) -> float:
    """Return the squares of the singular values that a matrix of this rank leaves."""
    return float((numpy.linalg.svd(change, compute_uv=False)[rank:] ** 2).sum())


def adapters(rank: int) -> dict:
    """Return an A that is drawn, and a B of zeros."""
    return {"a": md.random.normal(md.random.key(rank), (N, rank)) / N**0.5, "b": numpy.zeros((rank, N))}


def show(mesh: spmd.Mesh) -> None:
    """Fine-tune all weights, and adapters of three ranks."""
    split, (w, change, batch) = P("batch"), problem()
    cases: list[tuple] = [({"w": w}, {}, {"w": split})]
    cases += [(adapters(r), {"w": w}, {"a": P(), "b": P()}) for r in (1, 2, 4)]
    for params, frozen, specs in cases:
        mapped = spmd.shard_map(
            lambda p, f, b: psum(squared_error(p, f, b, "batch"), "batch"),
            mesh=mesh,
            in_specs=(specs, dict.fromkeys(frozen, split), split),
            out_specs=P(),
        )
        placed = spmd.distribute(params, mesh, specs)
        stored = spmd.distribute(frozen, mesh, dict.fromkeys(frozen, split))
        trained = sum(map(numpy.size, params.values()))
        print(f"rank {len(params['b'])}: {trained} of {N * N} numbers" if frozen else f"all {trained} numbers")
        print_calls("gradient", md.grad(mapped), placed, stored, batch)
        placed, state = train(md.grad(mapped), placed, stored, batch)
        alone, _ = train(md.grad(squared_error), params, frozen, batch)
        held = sum(md.typeof(x).size // (mesh.size if spmd.spec_of(x) == split else 1) for x in md.tree.leaves(state))
        print(f"states of Adam on a rank: {held} numbers")
        losses = [mapped(placed, stored, batch), squared_error(alone, frozen, batch)]
        print(f"loss: {numbers(losses)} (one rank)")
        if frozen:
            same = (spmd.gather(stored["w"]) == w).all()
            print(f"the least loss: {least_loss(change, len(params['b'])):.4f}; the same W: {'yes' if same else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("batch",), argv)


if __name__ == "__main__":
    main()
