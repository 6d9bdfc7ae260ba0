"""Collectives of many arrays, packed into buckets: fewer and larger calls.

Each takes a list of arrays, the same list on all ranks. An array split along dimension d is packed as rows of a matrix,
one row for each rank's part, and a bucket is such matrices side by side: so one call moves each rank's parts of all of
them. A bucket has arrays of one dtype, and of at most `bucket_bytes` when whole, or a single larger one. The last
arrays come first, since theirs are the first gradients of a backward pass.

Source: Li et al., "PyTorch Distributed: Experiences on accelerating data parallel training", section 3.2.3.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import all_gather, axis_size, psum, psum_scatter
from minidiff.compiler.fusion import filled

Dims = Sequence[int | None]  # for each array, the dimension that is split; None for one that is whole


def split_dimension(shape: Sequence[int], ranks: int) -> int | None:
    """The first dimension that the number of ranks divides; None if there is none.

    >>> split_dimension((3, 8), 4), split_dimension((3,), 4)
    (1, None)
    """
    return next((d for d, n in enumerate(shape) if math.prod(shape) and n % ranks == 0), None)


def all_gather_buckets(arrays: list, dims: Dims, axis: str, bucket_bytes: int, to: str = "varying") -> list:
    """Gather each array along its split dimension: [n / ranks, …] -> [n, …]; `to` is that of `all_gather`.

    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> f = lambda x, y: all_gather_buckets([x, y], (1, 0), 'i', 1000, to='invariant')
    >>> mapped = spmd.shard_map(f, mesh=mesh, in_specs=(spmd.P(None, 'i'), spmd.P('i')), out_specs=spmd.P())
    >>> mapped(np.eye(2), np.arange(4))
    [array([[1., 0.],
           [0., 1.]]), array([0, 1, 2, 3])]
    >>> spmd.communication(mapped)(np.eye(2), np.arange(4.0)).counts
    {'all_gather_invariant': 1}
    """
    split = [k for k, d in enumerate(dims) if d is not None]
    gather = functools.partial(all_gather, axis_name=axis, tiled=True, to=to)
    return _packed(gather, arrays, dims, split, (1, axis_size(axis)), bucket_bytes)


def psum_scatter_buckets(arrays: list, dims: Dims, axis: str, bucket_bytes: int) -> list:
    """Sum each array over ranks, and split it: [n, …] -> [n / ranks, …]. Arrays with dimension None are left."""
    split = [k for k, d in enumerate(dims) if d is not None]
    return _packed(lambda x: psum_scatter(x, axis, tiled=True), arrays, dims, split, (axis_size(axis), 1), bucket_bytes)


def psum_buckets(arrays: list, axis: str, bucket_bytes: int) -> list:
    """Sum the arrays that are unreduced along the axis; the others are left."""
    parts = [k for k, x in enumerate(arrays) if axis in md.typeof(x).unreduced]
    return _packed(lambda x: psum(x, axis), arrays, [None] * len(arrays), parts, (1, 1), bucket_bytes)


def _packed(
    collective: Callable, arrays: list, dims: Dims, chosen: list[int], rows: tuple[int, int], bucket_bytes: int
) -> list:
    """Apply a collective of matrices, [before, w] -> [after, w], to buckets of the chosen arrays."""
    arrays, alike, (before, after) = list(arrays), defaultdict(list), rows
    for k in reversed(chosen):
        alike[arrays[k].dtype].append(k)
    for rest in alike.values():
        while rest:
            bucket, rest = filled(rest, lambda k: arrays[k].nbytes * after, bucket_bytes)
            parts = [_as_rows(arrays[k], dims[k], before) for k in bucket]
            ends = list(accumulate(x.shape[1] for x in parts))
            found = np.split(collective(np.concatenate(parts, axis=1)), ends[:-1], axis=1)
            for k, x in zip(bucket, found):
                arrays[k] = _from_rows(x, arrays[k].shape, dims[k])
    return arrays


def _as_rows(x: Any, d: int | None, rows: int) -> Any:
    return np.reshape(x if d is None else np.moveaxis(x, d, 0), (rows, -1))


def _from_rows(x: Any, shape: tuple[int, ...], d: int | None) -> Any:
    return np.reshape(x, shape) if d is None else np.moveaxis(np.reshape(x, (-1, *shape[:d], *shape[d + 1 :])), 0, d)
