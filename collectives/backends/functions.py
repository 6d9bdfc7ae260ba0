"""The collectives as plain functions over an MPI communicator.

Each takes a communicator, this rank's block, and the parameters of its operation except axes and groups. The MPI
backend calls them. Exported programs do too: `md.export` copies them into files, so they call NumPy and methods of the
communicator alone. Sums are of values that MPI can add.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from collectives.backends.base import split_dimension, unsplit_dimension


def contiguous(x: Any) -> numpy.ndarray:
    """Return x contiguous, aligned and in native byte order, as MPI requires; copy only if needed."""
    if type(x) is numpy.ndarray and x.flags.num & 0x101 == 0x101 and x.dtype.isnative:  # C_CONTIGUOUS and ALIGNED
        return x
    x = numpy.asarray(x, order="C")
    x = x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    return x if x.flags.aligned else x.copy()


def as_bytes(x: numpy.ndarray) -> list:
    """Return a buffer specification that moves data as bytes: MPI need not know the dtype."""
    return [x.view(numpy.uint16) if x.dtype.kind == "V" else x, "B"]  # mpi4py cannot read bfloat16


def as_parts(x: numpy.ndarray, counts: Sequence[int]) -> list:
    """Return a buffer specification as `as_bytes`, of consecutive parts of `counts` bytes."""
    buffer, kind = as_bytes(x)
    return [buffer, (counts, [0, *itertools.accumulate(counts)][:-1]), kind]


def psum(comm: Any, x: Any) -> numpy.ndarray:
    x = contiguous(x)
    out = numpy.empty(x.shape, x.dtype)
    comm.Allreduce(x, out)
    return out


def all_gather(comm: Any, x: Any, axis: int, tiled: bool) -> numpy.ndarray:
    x = contiguous(x)
    blocks = numpy.empty((comm.Get_size(), *x.shape), x.dtype)
    comm.Allgather(as_bytes(x), as_bytes(blocks))
    return unsplit_dimension(blocks, axis, tiled)


def psum_scatter(comm: Any, x: Any, axis: int, tiled: bool) -> numpy.ndarray:
    parts = contiguous(split_dimension(x, comm.Get_size(), axis, tiled))
    out = numpy.empty(parts.shape[1:], parts.dtype)
    comm.Reduce_scatter_block(parts, out)
    return out


def all_to_all(comm: Any, x: Any, split_axis: int, concat_axis: int, tiled: bool) -> numpy.ndarray:
    parts = contiguous(split_dimension(x, comm.Get_size(), split_axis, tiled))
    out = numpy.empty(parts.shape, parts.dtype)
    comm.Alltoall(as_bytes(parts), as_bytes(out))
    return unsplit_dimension(out, concat_axis, tiled)


def check_rows(splits: numpy.ndarray, rows: int, capacity: int) -> None:
    """Raise ValueError if a rank sends more than `rows` rows, or receives more than `capacity`, by a table of them."""
    if splits.min() < 0:
        source, destination = numpy.argwhere(splits == splits.min())[0, -2:]
        raise ValueError(f"all_to_all: splits[{source}][{destination}] is {splits.min()}: for no rows, write 0")
    for does, room, table in (("sends", rows, splits), ("receives", capacity, splits.swapaxes(-1, -2))):
        counts = table.sum(-1)
        if counts.max() > room:
            parts = table.reshape(-1, table.shape[-1])[counts.argmax()].tolist()
            raise ValueError(
                f"all_to_all: rank {counts.argmax() % len(parts)} {does} {sum(parts)} rows, which are {parts} by rank, "
                f"and there is room for {room}: give operands more rows, and results a larger capacity"
            )


def ragged_all_to_all(comm: Any, x: Any, splits: Any, axis: int, rows: int) -> numpy.ndarray:
    x = contiguous(numpy.moveaxis(x, axis, 0) if axis else x)
    check_rows(splits, len(x), rows)
    out = numpy.zeros((rows, *x.shape[1:]), x.dtype)
    if comm is None:  # a single rank
        out[: splits[0, 0]] = x[: splits[0, 0]]
    else:
        rank, nbytes = comm.Get_rank(), math.prod(x.shape[1:]) * x.itemsize  # of a row
        sent, received = ([n * nbytes for n in counts.tolist()] for counts in (splits[rank], splits[:, rank]))
        comm.Alltoallv(as_parts(x, sent), as_parts(out, received))
    return numpy.moveaxis(out, 0, axis) if axis else out


def broadcast(comm: Any, x: Any, root: int) -> numpy.ndarray:
    # A copy also on the root: programs may write into results, and mpi4py wants a writable buffer.
    out = numpy.array(contiguous(x)) if comm.Get_rank() == root else numpy.empty(numpy.shape(x), x.dtype)
    comm.Bcast(as_bytes(out), root)
    return out


def gather(comm: Any, x: Any, root: int, axis: int, tiled: bool) -> numpy.ndarray:
    x = contiguous(x)
    blocks = numpy.zeros((comm.Get_size(), *x.shape), x.dtype)
    comm.Gather(as_bytes(x), as_bytes(blocks) if comm.Get_rank() == root else None, root)
    return unsplit_dimension(blocks, axis, tiled)


def scatter(comm: Any, x: Any, root: int, axis: int, tiled: bool) -> numpy.ndarray:
    parts = split_dimension(x, comm.Get_size(), axis, tiled)
    out = numpy.empty(parts.shape[1:], parts.dtype)
    comm.Scatter(as_bytes(contiguous(parts)) if comm.Get_rank() == root else None, as_bytes(out), root)
    return out


def start_messages(
    comm: Any, x: Any, out: Any, perm: Sequence[tuple[int, int]], persistent: bool = False
) -> Iterator[Any]:
    """Start the messages of a permutation that this rank receives into `out` and sends from `x`, one by one.

    Or make `persistent` requests for them, which are not started.
    """
    rank = comm.Get_rank()
    receive, send = (comm.Recv_init, comm.Send_init) if persistent else (comm.Irecv, comm.Isend)
    for source, destination in perm:
        if destination == rank:
            yield receive(as_bytes(out), source, 0)
    for source, destination in perm:
        if source == rank:
            yield send(as_bytes(x), destination, 0)


def ppermute(comm: Any, x: Any, perm: Sequence[tuple[int, int]]) -> numpy.ndarray:
    x = contiguous(x)
    out = numpy.zeros(x.shape, x.dtype)
    for request in list(start_messages(comm, x, out, perm)):
        request.Wait()
    return out


#: The functions by the names of their collectives.
FUNCTIONS: dict[str, Callable[..., numpy.ndarray]] = {
    "psum": psum,
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), all_gather),
    "psum_scatter": psum_scatter,
    "all_to_all": all_to_all,
    "ragged_all_to_all": ragged_all_to_all,
    **dict.fromkeys(("broadcast", "broadcast_varying"), broadcast),
    "gather": gather,
    "scatter": scatter,
    "ppermute": ppermute,
}
