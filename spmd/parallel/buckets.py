"""Collectives of many arrays, packed into buckets: fewer and larger calls.

Each takes a list of arrays. A bucket has arrays of one dtype that together have at most `bucket_bytes` before they are
split, or a single larger array. The last arrays come first, since a backward pass computes their gradients first.

A psum takes any number of arrays. To gather and scatter, an array that is split along dimension d becomes a matrix with
a row for each rank's shard, and a bucket is such matrices side by side.

Source: Li et al., "PyTorch Distributed: Experiences on accelerating data parallel training", section 3.2.3.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import minidiff as md
import minidiff.numpy as np
from collectives import all_gather, axis_size, psum_scatter
from collectives.collective import variadic
from collectives.ops import psum_p
from minidiff.compiler.fusion import split_by_limit

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
    gather = functools.partial(all_gather, axis_name=axis, tiled=True, to=to)
    return _apply_to_buckets(gather, arrays, dims, (1, axis_size(axis)), bucket_bytes)


def psum_scatter_buckets(arrays: list, dims: Dims, axis: str, bucket_bytes: int) -> list:
    """Sum each array over ranks, and split it: [n, …] -> [n / ranks, …]. Arrays with dimension None stay the same."""
    return _apply_to_buckets(
        lambda x: psum_scatter(x, axis, tiled=True), arrays, dims, (axis_size(axis), 1), bucket_bytes
    )


def psum_buckets(arrays: list, axis: str, bucket_bytes: int) -> list:
    """Sum the arrays that are unreduced along the axis; compiled, each bucket as soon as its arrays are ready."""
    arrays, parts = list(arrays), [k for k, x in enumerate(arrays) if axis in md.typeof(x).unreduced]
    for bucket in _buckets(arrays, parts, bucket_bytes):
        terms = [arrays[k] for k in bucket]
        for k, total in zip(bucket, variadic(psum_p).bind(*terms, axes=(axis,), size=axis_size(axis))):
            arrays[k] = total
    return arrays


def _buckets(arrays: list, chosen: list[int], bucket_bytes: int) -> Iterator[list[int]]:
    """Indices of the chosen arrays, of one dtype in each bucket."""
    alike = defaultdict(list)
    for k in reversed(chosen):
        alike[arrays[k].dtype].append(k)
    for rest in alike.values():
        while rest:
            bucket, rest = split_by_limit(rest, lambda k: arrays[k].nbytes, bucket_bytes)
            yield bucket


def _apply_to_buckets(collective: Callable, arrays: list, dims: Dims, rows: tuple[int, int], bucket_bytes: int) -> list:
    """Apply a collective of matrices, [before, w] -> [after, w], to buckets of the split arrays."""
    arrays, (before, after) = list(arrays), rows
    split = {k: d for k, d in enumerate(dims) if d is not None}
    for bucket in _buckets(arrays, [*split], bucket_bytes // after):  # whose bytes are those of whole arrays
        moved = [np.moveaxis(arrays[k], split[k], 0) for k in bucket]
        parts = [np.reshape(x, (before, -1)) for x in moved]
        ends = list(accumulate(x.shape[1] for x in parts))
        found = np.split(collective(np.concatenate(parts, axis=1)), ends[:-1], axis=1)
        for k, x, y in zip(bucket, moved, found):
            arrays[k] = np.moveaxis(np.reshape(y, (-1, *x.shape[1:])), 0, split[k])
    return arrays
