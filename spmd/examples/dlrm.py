"""Recommendation models (DLRM): embedding tables are split over the ranks, the rest is data-parallel.

    mpirun -n 4 python -m spmd.examples.dlrm

The program trains the model with tables split in each of the three ways; it prints the losses and the collectives.

A bottom MLP turns an example's dense features into d features; each of its T categorical features selects a row of a
table, a vector of d. The dot products of all pairs of these T + 1 vectors, and the bottom MLP's result, go through a
top MLP. The MLPs are the same on all ranks. The tables [T, R, d], which have nearly all parameters, are split, and so
are the examples. A rank looks up vectors for the examples of all ranks in its shard of the tables, and a collective
exchanges them for whole vectors of its own examples. With p ranks, the gradient of the loss communicates:

=======  =========  ============  =====  ================
split    direction  collective    count  numbers per rank
=======  =========  ============  =====  ================
tables   forward    all_to_all    2      N/p*T + N*T*d/p
tables   forward    psum          1      1
tables   backward   all_to_all    1      N*T*d/p
tables   backward   psum          1      mlps

columns  forward    all_gather    1      N/p*T
columns  forward    all_to_all    1      N*T*d/p
columns  forward    psum          1      1
columns  backward   all_to_all    1      N*T*d/p
columns  backward   psum          1      mlps

rows     forward    all_gather    1      N/p*T
rows     forward    psum_scatter  1      N*T*d
rows     forward    psum          1      1
rows     backward   all_gather    1      N*T*d/p
rows     backward   psum          1      mlps
=======  =========  ============  =====  ================

N is the number of examples, and mlps that of the MLPs' parameters; N/p*T indices are sent. If a few tables are large,
splitting by tables is unbalanced, but splitting by columns is not. Split by rows if a table is too long for one rank.
The gradients of tables are split like the tables.

Source: Naumov et al., "Deep learning recommendation model for personalization and recommendation systems" (2019);
Mudigere et al., "Software-hardware co-design for fast and scalable training of deep learning recommendation models"
(2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, all_to_all, axis_index, pmean, psum_scatter
from minidiff.nn import softplus
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P
from spmd.parallel.network import axes_of, init_params, predict

# ---------------------------------------------------------------- lookups in split tables


def lookup(tables: Any, indices: Any) -> Any:
    """A row of each table for each example: [T, R, d], [n, T] -> [n, T, d].

    >>> lookup(numpy.arange(8.0).reshape(2, 2, 2), numpy.array([[0, 1]]))
    array([[[0., 1.],
            [6., 7.]]])
    """
    return tables[numpy.arange(tables.shape[0]), indices]


def lookup_by_tables(tables: Any, indices: Any, axis: str) -> Any:
    """`lookup` in tables split one by one: [T/p, R, d], [n/p, T] -> [n/p, T, d]."""
    indices = all_to_all(indices, axis, split_axis=1, concat_axis=0, tiled=True)  # [n, T/p]
    return all_to_all(lookup(tables, indices), axis, split_axis=0, concat_axis=1, tiled=True)


def lookup_by_columns(tables: Any, indices: Any, axis: str) -> Any:
    """`lookup` in tables split by columns: [T, R, d/p], [n/p, T] -> [n/p, T, d]."""
    columns = lookup(tables, all_gather(indices, axis, tiled=True))  # [n, T, d/p]
    return all_to_all(columns, axis, split_axis=0, concat_axis=2, tiled=True)


def lookup_by_rows(tables: Any, indices: Any, axis: str) -> Any:
    """`lookup` in tables split by rows: [T, R/p, d], [n/p, T] -> [n/p, T, d].

    Each rank looks up its own rows, and uses -0.0 for others, which does not change a sum. The sum over the ranks is
    `lookup`. (An index out of range gives zeros; `dlrm` checks indices first.)
    """
    rows = tables.shape[1]
    local = all_gather(indices, axis, tiled=True) - axis_index(axis) * rows  # [n, T]
    is_local = np.expand_dims((local >= 0) & (local < rows), 2)
    return psum_scatter(np.where(is_local, lookup(tables, np.clip(local, 0, rows - 1)), -0.0), axis, tiled=True)


#: How tables may be split: the lookup, and the dimension of [T, R, d] that is split.
SPLITS = {"tables": (lookup_by_tables, 0), "columns": (lookup_by_columns, 2), "rows": (lookup_by_rows, 1)}


# ---------------------------------------------------------------- the model


def init_dlrm(rng: Any, tables: tuple[int, int, int], bottom: Sequence[int], top: Sequence[int]) -> dict[str, Any]:
    """Random parameters: tables [T, R, d], and MLPs with these numbers of inputs and hidden features.

    >>> params = init_dlrm(np.random.default_rng(0), tables=(2, 10, 4), bottom=(3, 8), top=(16,))
    >>> params['tables'].shape, [W.shape for W, b in params['bottom']], [W.shape for W, b in params['top']]
    ((2, 10, 4), [(3, 8), (8, 4)], [(7, 16), (16, 1)])
    """
    count, _, d = tables
    sizes = {"bottom": (*bottom, d), "top": (d + count * (count + 1) // 2, *top, 1)}
    return {"tables": rng.normal(size=tables) / numpy.sqrt(d), **{k: init_params(rng, v) for k, v in sizes.items()}}


def dlrm_loss(params: dict[str, Any], batch: tuple, lookup: Callable = lookup) -> Any:
    """The mean binary cross entropy of clicks; params are those of `init_dlrm`.

    The batch has dense features [n, F], indices [n, T] of rows of the tables, and clicks [n], 0 or 1. `lookup(tables,
    indices)` returns the vectors [n, T, d].

    >>> rng = np.random.default_rng(0)
    >>> params = init_dlrm(rng, tables=(2, 10, 4), bottom=(3, 8), top=(16,))
    >>> batch = rng.normal(size=(6, 3)), rng.integers(10, size=(6, 2)), np.array([0, 1, 1, 0, 0, 1])
    >>> dlrm_loss(params, batch).shape
    ()
    """
    dense, indices, clicks = batch
    x, vectors = predict(params["bottom"], dense), lookup(params["tables"], indices)
    vectors = np.concatenate([np.expand_dims(x, 1), vectors], axis=1)
    first, second = numpy.triu_indices(vectors.shape[1], 1)
    dots = np.einsum("nid,njd->nij", vectors, vectors)[:, first, second]
    logits = predict(params["top"], np.concatenate([x, dots], axis=1))[:, 0]
    return np.mean(softplus(logits) - clicks * logits)


def dlrm(mesh: spmd.Mesh, split: str = "tables", **options: Any) -> Callable:
    """`dlrm_loss` on ranks, as a function of (params, (dense, indices, clicks)).

    Tables are split by "tables", "columns" or "rows"; the batch by examples; `options` are those of `shard_map`. Raises
    ValueError if the ranks do not divide the examples or the tables, and IndexError for NumPy indices out of range.

    >>> mesh, rng = spmd.make_mesh((2,), ('ranks',), backend='simulated'), np.random.default_rng(0)
    >>> params = init_dlrm(rng, tables=(2, 10, 4), bottom=(3, 8), top=(16,))
    >>> batch = rng.normal(size=(6, 3)), rng.integers(10, size=(6, 2)), np.array([0, 1, 1, 0, 0, 1])
    >>> bool(np.isclose(dlrm(mesh, 'rows')(params, batch), dlrm_loss(params, batch)))
    True
    >>> md.grad(dlrm(mesh, 'columns'))(params, batch)['tables'].spec
    P(None, None, 'ranks')
    """
    (axis,) = axes_of(mesh, "dlrm", "ranks")
    if split not in SPLITS:
        raise ValueError(f"dlrm: split={split!r}; write one of {', '.join(map(repr, SPLITS))}")
    by, dimension = SPLITS[split]

    def on_each_rank(params, block):
        return pmean(dlrm_loss(params, block, functools.partial(by, axis=axis)), axis)

    def loss(params, batch):
        _check(params["tables"].shape, batch[1], split, mesh.size)
        specs = {"tables": P(*[None] * dimension, axis), "bottom": P(), "top": P()}, P(axis)
        return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=specs, out_specs=P(), **options)(params, batch)

    return loss


def _check(tables: tuple, indices: Any, split: str, ranks: int) -> None:
    if (size := tables[SPLITS[split][1]]) % ranks:
        more = -(-size // ranks) * ranks
        raise ValueError(
            f"dlrm: {size} {split} cannot be split evenly over {ranks} ranks: pad the tables to {more}, with spmd.pad"
        )
    if indices.shape[1:] != tables[:1]:
        raise ValueError(f"dlrm: {tables[0]} tables need indices of shape [n, {tables[0]}]; got {indices.shape}")
    if isinstance(indices, numpy.ndarray) and indices.size and not 0 <= indices.min() <= indices.max() < tables[1]:
        raise IndexError(f"dlrm: tables have {tables[1]} rows; got indices from {indices.min()} to {indices.max()}")


# ---------------------------------------------------------------- the program


def show(mesh: spmd.Mesh) -> None:
    """Train with tables split in each way, and print the losses and the collectives of a gradient."""
    rng, (n, tables, rows) = numpy.random.default_rng(0), (8 * mesh.size, 2 * mesh.size, 4 * mesh.size)
    start = init_dlrm(rng, (tables, rows, 2 * mesh.size), bottom=(3, 8), top=(16,))
    batch = rng.normal(size=(n, 3)), rng.integers(rows, size=(n, tables)), rng.integers(2, size=n).astype(float)
    for split in SPLITS:
        step, params, losses = md.value_and_grad(dlrm(mesh, split)), start, []
        print_calls(f"split by {split}", step, params, batch)
        for _ in range(4):
            value, gradients = step(params, batch)
            params = md.tree.map(lambda p, g: p - 0.3 * g, params, gradients)
            losses.append(value)
        print(f"losses: {numbers(losses)}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("ranks",), argv)


if __name__ == "__main__":
    main()
