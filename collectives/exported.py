"""Collectives as exported programs call them: these functions are written into their files (see `md.export`).

A file defines WORLD, MPI's communicator of all processes (None for one rank); SIZES, of the mesh's axes; and
COMMUNICATORS, those that it has made. The functions take a rank's blocks, and the parameters of their operation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from collectives.backends.base import coordinates_of, index_along, split_dimension, unsplit_dimension
from minidiff.core.tape import Equation

WORLD: Any = None
SIZES: dict[str, int] = {}
COMMUNICATORS: dict[tuple, Any] = {}


def variables_for(sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the expressions of the file's variables for a program on a mesh; on one rank, it needs no MPI."""
    world = "None" if math.prod(sizes.values()) == 1 else "mpi4py.MPI.COMM_WORLD"
    return {"SIZES": str({"".join(name): size for name, size in sizes.items()}), "WORLD": world, "COMMUNICATORS": "{}"}


Form = tuple[Callable, dict[str, Any], Mapping[str, str]]


def exported_collective(eqn: Equation) -> Form | None:
    """How an exported program runs a collective: see `minidiff.compiler.export`. Raises TypeError if it cannot."""
    if not eqn.primitive.on_ranks:
        return None
    name, params = eqn.primitive.name, {k: v for k, v in eqn.params.items() if k != "typed"}
    if name not in EXPORTED:
        raise TypeError(f"export: {name} ({eqn.source}) is not among the collectives of files: {', '.join(EXPORTED)}")
    if params.get("size") == 1 and name != "psum":
        nothing = params.get("perm") == () or params.get("exclusive", False)
        return of_one_rank, {"shape": eqn.outputs[0].type.shape, "nothing": nothing}, {}
    return (psum_several if eqn.primitive.multiple_results else EXPORTED[name]), params, {}


# ---------------------------------------------------------------- ranks


def rank_along(axes: Sequence[str]) -> Any:
    """This rank's index along some axes."""
    number, count = (WORLD.Get_rank(), WORLD.Get_size()) if WORLD else (0, 1)
    if count != math.prod(SIZES.values()):
        raise RuntimeError(f"this program runs on a mesh {SIZES}, and there are {count} processes: use mpiexec -n")
    return numpy.int64(index_along(axes, coordinates_of(number, SIZES), SIZES))


def communicator(axes: Sequence[str], groups: Sequence | None = None) -> Any:
    """The communicator of the ranks that differ only along the axes, in their order; of `groups`, of this rank's."""
    me, here = rank_along(axes), coordinates_of(WORLD.Get_rank(), SIZES)
    places = itertools.product(*[range(SIZES[a]) for a in axes])
    ranks = tuple(int(index_along(SIZES, {**here, **dict(zip(axes, place))}, SIZES)) for place in places)
    if groups is not None:
        ranks = tuple(ranks[k] for k in next(group for group in groups if me in group))
    if ranks not in COMMUNICATORS:
        COMMUNICATORS[ranks] = WORLD.Create_group(WORLD.Get_group().Incl(ranks))
    return COMMUNICATORS[ranks]


def map_over_ranks(*args: Any, body: Callable, split: Sequence, gathered: Sequence, summed: Sequence) -> list:
    """Run the body on this rank's blocks of whole arrays, and make whole arrays of the blocks that it returns."""
    blocks, wholes = [], []
    for x, dims in zip(args, split):
        lengths = [n // math.prod([SIZES[a] for a in axes]) for n, axes in zip(numpy.shape(x), dims)]
        starts = [n * rank_along(axes) for n, axes in zip(lengths, dims)]
        blocks.append(numpy.asarray(x)[tuple([slice(i, i + n) for i, n in zip(starts, lengths)])])
    for x, dims, axes in zip(body(*blocks), gathered, summed):
        x = psum(x, axes, WORLD.Get_size()) if axes and WORLD else x
        for d, held in enumerate(dims):
            x = all_gather(x, held, 0, d, True) if held and WORLD else x
        wholes.append(x)
    return wholes


# ---------------------------------------------------------------- collectives


def of_one_rank(x: Any, shape: tuple[int, ...], nothing: bool) -> Any:
    """What a collective of one rank returns: the operand, in another shape if need be, or zeros."""
    return (numpy.zeros_like if nothing else numpy.array)(x).reshape(shape)[()]


def identity(x: Any, **params: Any) -> Any:
    return x


def blocks_of(x: Any, axes: Sequence[str], **groups: Any) -> Any:
    """The blocks of all ranks, in order, along a new first axis."""
    x, comm = numpy.asarray(x, order="C"), communicator(axes, **groups)
    out = numpy.empty((comm.Get_size(), *x.shape), x.dtype)
    comm.Allgather(x, out)
    return out


def psum(x: Any, axes: Sequence[str], size: int, **groups: Any) -> Any:
    out = numpy.array(x, order="C")
    if size > 1:
        communicator(axes, **groups).Allreduce(numpy.asarray(x, order="C"), out)
    return out[()]


def psum_several(*xs: Any, axes: Sequence[str], size: int, **groups: Any) -> list:
    """The sums of several arrays, in one message."""
    total = psum(numpy.concatenate([numpy.ravel(x) for x in xs]), axes, size, **groups)
    parts = numpy.split(total, list(itertools.accumulate([numpy.size(x) for x in xs]))[:-1])
    return [part.reshape(numpy.shape(x))[()] for part, x in zip(parts, xs)]


def reduce_blocks(add: numpy.ufunc, x: Any, axes: Sequence[str], size: int, **groups: Any) -> Any:
    return add.reduce(blocks_of(x, axes, **groups), axis=0)


def pscan(x: Any, axes: Sequence[str], size: int, reverse: bool, exclusive: bool) -> Any:
    blocks, me = blocks_of(x, axes), rank_along(axes)
    return numpy.add.reduce(blocks[me + exclusive :] if reverse else blocks[: me + (not exclusive)], axis=0)


def all_gather(x: Any, axes: Sequence[str], size: int, axis: int, tiled: bool, **groups: Any) -> Any:
    return unsplit_dimension(blocks_of(x, axes, **groups), axis, tiled)


def psum_scatter(x: Any, axes: Sequence[str], size: int, axis: int, tiled: bool, **groups: Any) -> Any:
    parts = numpy.asarray(split_dimension(x, size, axis, tiled), order="C")
    out = numpy.empty(parts.shape[1:], parts.dtype)
    communicator(axes, **groups).Reduce_scatter_block(parts, out)
    return out[()]


def pscatter(x: Any, axes: Sequence[str], size: int, axis: int, tiled: bool) -> Any:
    return split_dimension(x, size, axis, tiled)[rank_along(axes)]


def all_to_all(
    x: Any, axes: Sequence[str], size: int, split_axis: int, concat_axis: int, tiled: bool, **groups: Any
) -> Any:
    parts = numpy.asarray(split_dimension(x, size, split_axis, tiled), order="C")
    out = numpy.empty_like(parts)
    communicator(axes, **groups).Alltoall(parts, out)
    return unsplit_dimension(out, concat_axis, tiled)


def ppermute(x: Any, axes: Sequence[str], size: int, perm: Sequence[tuple[int, int]]) -> Any:
    x, comm, me = numpy.asarray(x, order="C"), communicator(axes), rank_along(axes)
    out = numpy.zeros_like(x)
    requests = [comm.Irecv(out, source) for source, destination in perm if destination == me]
    requests += [comm.Isend(x, destination) for source, destination in perm if source == me]
    for request in requests:
        request.Wait()
    return out[()]


#: The collectives of exported programs. Casts change types alone; `ppermute_start` waits itself.
EXPORTED: dict[str, Callable] = {
    **dict.fromkeys(("pbroadcast", "reduced", "unreduced", "ppermute_wait"), identity),
    "axis_index": rank_along,
    "psum": psum,
    "pprod": functools.partial(reduce_blocks, numpy.multiply),
    "pmax": functools.partial(reduce_blocks, numpy.maximum),
    "pmin": functools.partial(reduce_blocks, numpy.minimum),
    "pscan": pscan,
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), all_gather),
    "psum_scatter": psum_scatter,
    "pscatter": pscatter,
    "all_to_all": all_to_all,
    **dict.fromkeys(("ppermute", "ppermute_start"), ppermute),
}
