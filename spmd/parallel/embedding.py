"""Embedding tables that are split over the ranks: by tables, by columns or by rows.

T tables of R rows of d numbers, [T, R, d], are model-parallel; the n examples, with an index into each table, [n, T],
are data-parallel. A rank looks up vectors for the examples of all ranks in its shard of the tables, and a collective
exchanges them for whole vectors of its own examples. On p ranks, these are called in bodies of `shard_map`:

=================  ===========  ============================  ==========================
lookup             tables       forward                       backward
=================  ===========  ============================  ==========================
lookup_by_tables   [T/p, R, d]  all_to_all of indices,        all_to_all of [n/p, T, d]
                                all_to_all of [n, T/p, d]
lookup_by_columns  [T, R, d/p]  all_gather of indices,        all_to_all of [n/p, T, d]
                                all_to_all of [n, T, d/p]
lookup_by_rows     [T, R/p, d]  all_gather of indices,        all_gather of [n/p, T, d]
                                psum_scatter of [n, T, d]
=================  ===========  ============================  ==========================

`dlrm.py` counts this in a whole model.

Source: Naumov et al., "Deep learning recommendation model for personalization and recommendation systems" (2019);
Mudigere et al., "Software-hardware co-design for fast and scalable training of deep learning recommendation models"
(2022).
"""

from __future__ import annotations

from typing import Any

import numpy

import minidiff.numpy as np
from collectives import all_gather, all_to_all, axis_index, psum_scatter


def lookup(tables: Any, indices: Any) -> Any:
    """A row of each table for each example: [T, R, d], [n, T] -> [n, T, d].

    >>> lookup(numpy.arange(8.0).reshape(2, 2, 2), numpy.array([[0, 1]]))
    array([[[0., 1.],
            [6., 7.]]])
    """
    return tables[numpy.arange(tables.shape[0]), indices]


def lookup_by_tables(tables: Any, indices: Any, axis: str) -> Any:
    """`lookup` in tables split one by one: [T/p, R, d], [n/p, T] -> [n/p, T, d].

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh, specs = make_mesh((2,), ('i',), backend='simulated'), (P('i'), P('i'))
    >>> f = shard_map(lambda t, i: lookup_by_tables(t, i, 'i'), mesh, in_specs=specs, out_specs=P('i'))
    >>> tables, indices = np.arange(16.0).reshape(2, 4, 2), np.array([[0, 3], [1, 1]])
    >>> bool(np.all(np.asarray(f(tables, indices)) == lookup(tables, indices)))
    True
    """
    indices = all_to_all(indices, axis, split_axis=1, concat_axis=0, tiled=True)  # [n, T/p]
    return all_to_all(lookup(tables, indices), axis, split_axis=0, concat_axis=1, tiled=True)


def lookup_by_columns(tables: Any, indices: Any, axis: str) -> Any:
    """`lookup` in tables split by columns: [T, R, d/p], [n/p, T] -> [n/p, T, d].

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh, specs = make_mesh((2,), ('i',), backend='simulated'), (P(None, None, 'i'), P('i'))
    >>> f = shard_map(lambda t, i: lookup_by_columns(t, i, 'i'), mesh, in_specs=specs, out_specs=P('i'))
    >>> tables, indices = np.arange(16.0).reshape(2, 4, 2), np.array([[0, 3], [1, 1]])
    >>> bool(np.all(np.asarray(f(tables, indices)) == lookup(tables, indices)))
    True
    """
    found = lookup(tables, all_gather(indices, axis, tiled=True))  # [n, T, d/p]
    return all_to_all(found, axis, split_axis=0, concat_axis=2, tiled=True)


def lookup_by_rows(tables: Any, indices: Any, axis: str) -> Any:
    """`lookup` in tables split by rows: [T, R/p, d], [n/p, T] -> [n/p, T, d].

    Each rank looks up its own rows, and uses -0.0 for others, which does not change a sum. The sum over the ranks is
    `lookup`. (An index out of range gives zeros; `dlrm` checks indices first.)

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh, specs = make_mesh((2,), ('i',), backend='simulated'), (P(None, 'i'), P('i'))
    >>> f = shard_map(lambda t, i: lookup_by_rows(t, i, 'i'), mesh, in_specs=specs, out_specs=P('i'))
    >>> tables, indices = np.arange(16.0).reshape(2, 4, 2), np.array([[0, 3], [1, 1]])
    >>> bool(np.all(np.asarray(f(tables, indices)) == lookup(tables, indices)))
    True
    """
    rows = tables.shape[1]
    local = all_gather(indices, axis, tiled=True) - axis_index(axis) * rows  # [n, T]
    here = np.expand_dims((local >= 0) & (local < rows), 2)
    return psum_scatter(np.where(here, lookup(tables, np.clip(local, 0, rows - 1)), -0.0), axis, tiled=True)


#: How tables may be split: the lookup, and the dimension of [T, R, d] that is split.
SPLITS = {"tables": (lookup_by_tables, 0), "columns": (lookup_by_columns, 2), "rows": (lookup_by_rows, 1)}
