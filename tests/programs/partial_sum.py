"""Functions whose results are partial sums, on two mesh axes of 2: on blocks, and what they are of whole arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.checks.properties import shows
from tests.programs.on_blocks import assert_trees_close, run_and_count

X, W = np.sin(np.arange(16.0)).reshape(4, 4), np.cos(np.arange(4.0))


def halves(x: Any, axis: int) -> list:
    return np.split(x, 2, axis)


#: name: (in_specs, out_specs, f on blocks of x [4, 4] and w [4], the same of whole arrays).
PROGRAMS: dict[str, tuple] = {
    "over one axis": (
        (P("i"), P()),
        P(sum="i"),
        lambda x, w: np.sin(x * w),
        lambda x, w: sum(np.sin(b * w) for b in halves(x, 0)),
    ),
    "over both": (
        (P(("i", "j")), P()),
        P(sum=("i", "j")),
        lambda x, w: np.tanh(x) @ w,
        lambda x, w: np.tanh(x).sum(0, keepdims=True) @ w,
    ),
    "beside a mapped axis": (
        (P("i", "j"), P("j")),
        P("i", sum="j"),
        lambda x, w: x @ w,
        lambda x, w: x @ w,
    ),
    "of a second dimension": (
        (P("i", "j"), P()),
        P(None, "j", sum="i"),
        lambda x, w: x * np.sum(np.sin(w)),
        lambda x, w: sum(halves(x, 0)) * np.sum(np.sin(w)),
    ),
    "of what is the same on all ranks": ((P(), P()), P(sum="j"), lambda x, w: x * w, lambda x, w: 2 * x * w),
    "of what is the same along one": (
        (P("j"), P()),
        P(sum=("i", "j")),
        lambda x, w: x * w,
        lambda x, w: 2 * sum(b * w for b in halves(x, 0)),
    ),
    "of a scalar, after a sum": (
        (P("i", "j"), P("j")),
        P(sum=("j",)),
        lambda x, w: np.sum(np.cos(psum(x * w, "i"))),
        lambda x, w: np.sum(np.cos(sum(b * w for b in halves(x, 0)))),
    ),
}


def sharded(name: str, mesh: spmd.Mesh, **options: Any) -> Callable:
    in_specs, out_specs, f, _ = PROGRAMS[name]
    return spmd.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


Dims = tuple[tuple[str, ...], ...]  # for each dimension, the axes that it is split along


def of_whole(f: Callable, ins: Dims, outs: Dims, summed: tuple[str, ...], sizes: Mapping[str, int]) -> Callable:
    """Return the reference for a shard_map of `f`: `f` of each rank's block, the results concatenated and summed."""

    def block(x: Any, at: Mapping[str, int]) -> Any:
        for d, axes in enumerate(ins):
            for a in axes:
                x = np.split(x, sizes[a], d)[at[a]]
        return x

    def result(x: Any, at: dict[str, int], d: int = 0) -> Any:
        if d == len(outs):
            rest = [range(sizes[a]) for a in summed]
            return sum(f(block(x, {**at, **dict(zip(summed, ranks))})) for ranks in itertools.product(*rest))
        ranks = itertools.product(*[range(sizes[a]) for a in outs[d]])
        parts = [result(x, {**at, **dict(zip(outs[d], r))}, d + 1) for r in ranks]
        return np.concatenate(parts, d)

    return lambda x: result(x, dict.fromkeys(sizes, 0))


@shows("reference", "derivatives", "modes", "types", "counts")
def check_partial_sums(name: str, mesh: spmd.Mesh, check_rep: bool) -> None:
    """Values, derivatives of both modes and orders, and batches are those of whole arrays; calls are as reported."""
    f, whole = sharded(name, mesh, check_rep=check_rep), PROGRAMS[name][3]
    value, expected = run_and_count(f, mesh, X, W), whole(X, W)
    assert np.shape(value) == np.shape(expected)
    ct = np.cos(np.arange(np.size(expected) * 1.0)).reshape(np.shape(expected))
    xs, ws = np.stack([X, 2 * X, X - 1]), np.stack([W, W, 3 * W])

    def gradient(f):
        return md.grad(lambda x, w: np.sum(np.sin(f(x, w))), (0, 1))

    for of, args in (
        (lambda f: f, (X, W)),
        (md.jit, (X, W)),
        (lambda f: lambda x, w: md.vjp(f, x, w)[1](ct), (X, W)),
        (lambda f: lambda x, w: md.jvp(f, (x, w), (W * X, W)), (X, W)),
        (gradient, (X, W)),
        (lambda f: md.jit(gradient(f)), (X, W)),
        (lambda f: gradient(md.jit(f)), (X, W)),
        (lambda f: md.grad(lambda x, w: np.sum(gradient(f)(x, w)[0] ** 2), (0, 1)), (X, W)),
        (md.vmap, (xs, ws)),
        (lambda f: md.vmap(f, (None, 0), 0), (X, ws)),
        (lambda f: md.vmap(gradient(f)), (xs, ws)),
    ):
        assert_trees_close(of(f)(*args), md.tree.leaves(of(whole)(*args)))
    run_and_count(lambda ct: md.vjp(f, X, W)[1](ct), mesh, ct)
    tape = md.make_tape(gradient(f))(X, W)
    tape.check()
    assert_trees_close(tuple(tape(X, W)), gradient(whole)(X, W))
