"""Recurrences along a sequence: linear attention, RWKV's time mixing, state space models.

    mpirun -n 4 python -m spmd.examples.recurrence

The program computes a decaying sum of tokens in both ways, and prints its last states and the collectives.

A token's state combines those of all tokens before it: `s[t] = fn(s[t-1], x[t])`. If `fn` is associative, the states
are prefixes, and need not be computed one after the other. A sequence may also be split over the ranks of an axis, in
order. Each rank then computes the prefixes of its own tokens; ranks combine their last ones, and pass them on. With p
ranks, and states of n numbers in a tree of l leaves, per rank, forward, and backward the same in the other direction:

==========  ====================  ======================
collective  count                 elements in all
==========  ====================  ======================
ppermute    l (ceil(log2 p) + 1)  n (ceil(log2 p) + 1)
==========  ====================  ======================

Source: G. E. Blelloch, "Prefix sums and their applications", 1990; Katharopoulos et al., "Transformers are RNNs: Fast
autoregressive transformers with linear attention"; Peng et al., "RWKV: Reinventing RNNs for the transformer era".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, axis_size, ppermute
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P


def prefix_scan(fn: Callable, elems: Any, axis: str | None = None, sequential: bool = False) -> Any:
    """`md.associative_scan` of tokens that are split along an axis in order: leaves [tokens / ranks, …] -> same.

    `fn(a, b)` takes two trees of several tokens' states, those of `b` later, and combines them elementwise. It must be
    associative. With `sequential`, a rank combines its own tokens one after the other: `md.scan`, with as many
    operations as tokens, and half as much work.

    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> products = lambda x: prefix_scan(np.multiply, x, 'i')
    >>> f = spmd.shard_map(products, mesh, in_specs=spmd.P('i'), out_specs=spmd.P('i'))
    >>> f(np.array([1.0, 2.0, 3.0, 4.0]))
    ShardedArray([ 1.,  2.,  6., 24.], P('i'))
    """
    states = _in_turn(fn, elems) if sequential else md.associative_scan(fn, elems)
    if axis is None or axis_size(axis) == 1:
        return states
    ranks, rank = axis_size(axis), axis_index(axis)

    def received(state: Any, by: int) -> Any:
        return ppermute(state, axis, [(rank, rank + by) for rank in range(ranks - by)])

    def combined(by: int, before: Any, state: Any) -> Any:
        """`fn(before, state)` on ranks that have one `by` ranks before them, elsewhere the state."""
        result = fn(md.tree.map(lambda a, b: np.broadcast_to(a, b.shape), before, state), state)
        return md.tree.map(lambda a, b: np.where(rank >= by, a, b), result, state)

    last, by = md.tree.map(lambda x: x[-1:], states), 1
    while by < ranks:
        last, by = combined(by, received(last, by), last), 2 * by
    return combined(1, received(last, 1), states)


def _in_turn(fn: Callable, elems: Any) -> Any:
    """The prefixes, one after the other."""

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        state = fn(state, md.tree.map(lambda leaf: leaf[None], x))
        return state, md.tree.map(lambda leaf: leaf[0], state)

    first = md.tree.map(lambda x: x[:1], elems)
    rest = md.scan(step, first, md.tree.map(lambda x: x[1:], elems))[1]
    return md.tree.map(lambda a, b: np.concatenate([a, b]), first, rest)


# ---------------------------------------------------------------- the program


def show(mesh: spmd.Mesh) -> None:
    """Compute ``s[t] = decay[t] * s[t-1] + x[t]``, and print the states of the last tokens and the collectives."""
    rng = numpy.random.default_rng(0)
    elems = rng.uniform(0.5, 1, size=4 * mesh.size), rng.normal(size=4 * mesh.size)

    def combine(a: tuple, b: tuple) -> tuple:
        return a[0] * b[0], b[0] * a[1] + b[1]

    for sequential in (False, True):
        scan = functools.partial(prefix_scan, combine, axis="tokens", sequential=sequential)
        program = spmd.shard_map(scan, mesh=mesh, in_specs=P("tokens"), out_specs=P("tokens"))
        states = print_calls("one after the other" if sequential else "in parallel", program, elems)
        print(f"last states: {numbers(spmd.gather(states[1])[-4:])}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("tokens",), argv)


if __name__ == "__main__":
    main()
