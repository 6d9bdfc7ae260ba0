"""Data whose rows follow from their numbers, and what ranks with different amounts of it have."""

import itertools

import numpy as np

import spmd
from spmd import P
from spmd.data import join
from tests.checks.meshes import mesh

ONE = mesh(1)


def data_of(n):
    """Numbers [n], and rows [n, 2] that follow from them."""
    return np.arange(n), np.arange(2 * n).reshape(n, 2)


def stream_of(n):
    """The same as examples, in an order that differs from epoch to epoch."""
    numbers, rows = data_of(n)
    return lambda epoch: ((numbers[k], rows[k]) for k in np.roll(numbers, epoch))


def seen(actual):
    """The numbers in each batch, whose rows must be those of the numbers."""
    result = []
    for numbers, rows in actual:
        numbers, rows = np.asarray(numbers), np.asarray(rows)
        np.testing.assert_array_equal(rows, 2 * numbers[:, None] + [0, 1])
        result.append(numbers.tolist())
    return result


def check_join(mesh, lengths, until):
    """Ranks have so many examples in each block, along one axis; their masked batches have these, step by step."""
    numbers = itertools.count()
    data = [[[next(numbers) for _ in range(n)] for n in rank] for rank in lengths]
    rows = max(rank[0] for rank in lengths)
    data = [[block[:rows] for block in rank] for rank in data]
    make = lambda rank: ({"x": np.array(block, float), "y": np.zeros((len(block), 2))} for block in data[rank])  # noqa: E731
    count = (min if until == "first" else max)(map(len, data))
    steps, calls = join(make, mesh, P("i"), until), mesh.calls
    pairs = [*steps]
    assert len(pairs) == count and [*steps] == []
    if mesh.backend == "mpi":
        assert mesh.calls["psum"] - calls.get("psum", 0) == count + 1  # and nothing else that is counted
    for k, (batch, mask) in enumerate(pairs):
        x, y, mask = spmd.gather((batch["x"], batch["y"], mask))
        assert x.shape == mask.shape == (rows * mesh.size,) and y.shape == (rows * mesh.size, 2) and not y.any()
        for rank, (of_rank, keep) in enumerate(zip(x.reshape(mesh.size, rows), mask.reshape(mesh.size, rows))):
            real = data[rank][k] if k < len(data[rank]) else []
            assert of_rank[keep].tolist() == real and (np.flatnonzero(keep) == np.arange(len(real))).all()
            latest = real or data[rank][min(k, len(data[rank]) - 1)]
            assert {*of_rank[len(real) :]} <= ({*latest[-1:]} or {0.0}) | {*latest[len(real) :]}


class Recorded:
    """An array that records the places that are read."""

    def __init__(self, x):
        self.x, self.shape, self.dtype, self.read = x, x.shape, x.dtype, []

    def __getitem__(self, index):
        actual = self.x[index]
        self.read.append((index[0].tolist(), actual.shape))
        return actual


def broken(rank):
    """Blocks of which rank 1 cannot read the second."""
    yield np.ones(2)
    if rank == 1:
        raise OSError("the disk is full")
    yield np.ones(2)
