"""Experts whose tokens are known beforehand: messages of different lengths, and no token is dropped.

    mpirun -n 4 python -m spmd.examples.assigned_experts

The program prints the tokens' results by experts of which each multiplies by its number, and the messages.

If all ranks know the expert of every token, they know how many tokens each rank sends to each other. So the messages of
`all_to_all` have these lengths (`splits`), and there is no capacity. Each expert computes a block with as many rows as
the busiest expert has tokens; copies of a token fill the rest. The assignment may be a hash of the tokens, or the
result of an earlier router.

With p ranks, T/p tokens of d features on each, and at most R tokens received by a rank, the collectives take, per rank:

================  =========  =================  =======  =====  ===========
layer             direction  collective         axes     count  elements
================  =========  =================  =======  =====  ===========
assigned_experts  forward    ragged_all_to_all  experts  2      (T/p + R)*d
assigned_experts  backward   ragged_all_to_all  experts  2      (T/p + R)*d
================  =========  =================  =======  =====  ===========

(All ranks pad the rows that they receive to R rows; reports count R. Padding is not sent.)

Source: Roller et al., "Hash layers for large sparse models"; Lewis et al., "BASE layers: Simplifying training of large,
sparse models".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_to_all, axis_index, axis_size
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P


def assigned_experts(expert: Callable, params: Any, x: Any, assignment: Any, axis: str) -> Any:
    """A layer of experts, in the body of a `shard_map`: [tokens / ranks, d] -> [tokens / ranks, d].

    `assignment` [tokens] has integers, the same on all ranks: the expert of each token along `axis`. A token's result
    is its expert's output, without a weight. `expert(params, x)` applies one expert to tokens [n, d]; `params` are
    those of this rank's experts, stacked: leaves [experts / ranks, …]. Raises ValueError for an assignment of another
    length, or to an expert that does not exist.

    >>> mesh = spmd.make_mesh((2,), ('experts',), backend='simulated')
    >>> layer = lambda scale, x: assigned_experts(lambda s, x: s * x, scale, x, [0, 0, 0, 1], 'experts')
    >>> mapped = spmd.shard_map(layer, mesh=mesh, in_specs=spmd.P('experts'), out_specs=spmd.P('experts'))
    >>> mapped(np.array([1.0, 10.0]), np.ones((4, 1))).reshape(4)
    ShardedArray([ 1.,  1.,  1., 10.], P('experts'))
    """
    ranks, local, tokens = axis_size(axis), len(md.tree.leaves(params)[0]), x.shape[0]
    assigned = numpy.asarray(assignment)
    if assigned.shape != (ranks * tokens,) or assigned.dtype.kind not in "iu":
        raise ValueError(
            f"assigned_experts: assignment is {assigned.dtype}{list(assigned.shape)}: pass an integer, the expert, for "
            f"each of the {ranks * tokens} tokens along {axis!r}"
        )
    if wrong := [*assigned[(assigned < 0) | (assigned >= ranks * local)]]:
        raise ValueError(
            f"assigned_experts: assignment has expert {wrong[0]}, but the {ranks} ranks along {axis!r} have experts 0 "
            f"to {ranks * local - 1}, {local} each"
        )
    splits, *tables = _plan(assigned.reshape(ranks, tokens), local)
    order, inputs, outputs, back = (np.take(table, axis_index(axis), axis=0) for table in tables)
    received = all_to_all(x[order], axis, 0, 0, splits=splits)
    idle = splits.sum(axis=0) == 0
    if idle.any():  # a rank that receives no token has its own
        received = np.where(np.take(idle, axis_index(axis)), x[0], received)
    computed = md.vmap(expert)(params, received[inputs])  # [experts/ranks, most tokens of an expert, d]
    returned = computed.reshape(-1, *computed.shape[2:])[outputs]
    return all_to_all(returned, axis, 0, 0, splits=splits.T)[back]


def _plan(assigned: numpy.ndarray, local: int) -> tuple[numpy.ndarray, ...]:
    """The messages between ranks, from the experts of each rank's tokens [ranks, tokens].

    Returns the splits, and tables of indices with one row a rank: the tokens in the order of their experts; for each
    local expert, the received rows that it takes; for each received row, the place of its result; and for each token,
    its place among the results that come back. The indices that fill up a table are never read.
    """
    ranks = range(len(assigned))
    order = numpy.argsort(assigned, axis=1, kind="stable")
    splits = numpy.stack([numpy.bincount(row // local, minlength=len(assigned)) for row in assigned])
    sent = numpy.take_along_axis(assigned, order, axis=1)
    experts = [numpy.concatenate([row[row // local == rank] for row in sent]) for rank in ranks]  # of rows received
    most = numpy.bincount(assigned.ravel()).max()
    inputs = numpy.zeros((len(assigned), local, most), int)
    outputs = numpy.zeros((len(assigned), splits.sum(axis=0).max()), int)
    for rank in ranks:
        for i in range(local):
            rows = numpy.flatnonzero(experts[rank] == rank * local + i)
            inputs[rank, i] = rows[0] if len(rows) else 0
            inputs[rank, i, : len(rows)] = rows
            outputs[rank, rows] = i * most + numpy.arange(len(rows))
    return splits, order, inputs, outputs, numpy.argsort(order, axis=1)


# ---------------------------------------------------------------- the program


def show(mesh: spmd.Mesh) -> None:
    """Send each token to the expert that a hash chooses, and print the results and the collectives."""
    tokens, specs = 3 * mesh.size, (P("experts"), P("experts"))
    assignment = (7 * numpy.arange(tokens) ** 2 + 3) % mesh.size

    def layer(scale: Any, x: Any) -> Any:
        return assigned_experts(lambda scale, x: scale * x, scale, x, assignment, "experts")

    program = spmd.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("experts"))
    results = print_calls("forward", program, numpy.arange(1.0, mesh.size + 1), numpy.ones((tokens, 2)))
    print(f"experts of the tokens: {' '.join(map(str, assignment))}")
    print(f"results by them:       {numbers(spmd.gather(results)[:, 0], 0)}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("experts",), argv)


if __name__ == "__main__":
    main()
