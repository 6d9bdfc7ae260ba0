"""The collectives of exported programs: these functions are written into their files (see `md.export`).

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

from collectives.backends.base import coordinates_of, index_along, split_dimension
from collectives.backends.functions import FUNCTIONS, all_gather, psum
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
    """Return the function by which an exported program runs a collective, with its parameters.

    Raises TypeError if there is none. See `minidiff.compiler.export`.
    """
    if not eqn.primitive.on_ranks:
        return None
    name, params = eqn.primitive.name, {k: v for k, v in eqn.params.items() if k != "typed"}
    if name not in EXPORTED:
        raise TypeError(f"export: {name} ({eqn.source}) is not supported; files may use {', '.join(EXPORTED)}")
    if eqn.primitive.multiple_results:
        return psum_several, params, {}
    if params.get("size") == 1 and len(eqn.inputs) == 1:
        is_zero = params.get("perm") == () or params.get("exclusive", False)
        return on_one_rank, {"shape": eqn.outputs[0].type.shape, "is_zero": is_zero}, {}
    return EXPORTED[name], params, {}


# ---------------------------------------------------------------- ranks


def rank_along(axes: Sequence[str]) -> Any:
    """Return this rank's index along some axes."""
    number, count = (WORLD.Get_rank(), WORLD.Get_size()) if WORLD else (0, 1)
    if count != math.prod(SIZES.values()):
        raise RuntimeError(f"this program runs on a mesh {SIZES}, but there are {count} processes: use mpiexec -n")
    return numpy.int64(index_along(axes, coordinates_of(number, SIZES), SIZES))


def communicator(axes: Sequence[str], groups: Sequence | None = None) -> Any:
    """Return the communicator of the ranks that differ only along the axes, in order; of `groups`, of this rank's."""
    index, coordinates = rank_along(axes), coordinates_of(WORLD.Get_rank(), SIZES)
    positions = itertools.product(*[range(SIZES[a]) for a in axes])
    ranks = tuple(int(index_along(SIZES, {**coordinates, **dict(zip(axes, at))}, SIZES)) for at in positions)
    if groups is not None:
        ranks = tuple(ranks[k] for k in next(group for group in groups if index in group))
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
        x = psum(communicator(axes), numpy.asarray(x)) if axes and WORLD else x
        for d, names in enumerate(dims):
            x = all_gather(communicator(names), numpy.asarray(x), d, True) if names and WORLD else x
        wholes.append(x)
    return wholes


# ---------------------------------------------------------------- collectives


def on_one_rank(x: Any, shape: tuple[int, ...], is_zero: bool) -> Any:
    """Return the result of a collective of one rank: the operand, in another shape if need be, or zeros."""
    return (numpy.zeros_like if is_zero else numpy.array)(x).reshape(shape)[()]


def identity(x: Any, **params: Any) -> Any:
    return x


def on_ranks(
    function: Callable, *xs: Any, axes: Sequence[str], size: int, groups: Sequence | None = None, **params: Any
) -> Any:
    """Run a function over a communicator on this rank's block."""
    comm = None if size == 1 else communicator(axes, groups)
    return function(comm, *map(numpy.asarray, xs), **params)[()]


def psum_several(*xs: Any, axes: Sequence[str], size: int, groups: Sequence | None = None) -> list:
    """Return the sums of several arrays, in one message."""
    total = numpy.concatenate([numpy.ravel(x) for x in xs])
    total = psum(communicator(axes, groups), total) if size > 1 else total
    parts = numpy.split(total, list(itertools.accumulate([numpy.size(x) for x in xs]))[:-1])
    return [part.reshape(numpy.shape(x))[()] for part, x in zip(parts, xs)]


def reduce_blocks(comm: Any, x: Any, ufunc: numpy.ufunc) -> Any:
    return ufunc.reduce(all_gather(comm, x, 0, False), axis=0, keepdims=True)[0]


def pscan(comm: Any, x: Any, reverse: bool, exclusive: bool) -> Any:
    blocks, rank = all_gather(comm, x, 0, False), comm.Get_rank()
    blocks = blocks[rank + exclusive :] if reverse else blocks[: rank + (not exclusive)]
    return numpy.add.reduce(blocks, axis=0, keepdims=True)[0]


def pscatter(comm: Any, x: Any, axis: int, tiled: bool) -> Any:
    return split_dimension(x, comm.Get_size(), axis, tiled)[comm.Get_rank()]


_ON_RANKS: dict[str, Callable] = {
    **FUNCTIONS,
    "ppermute_start": FUNCTIONS["ppermute"],
    "pprod": functools.partial(reduce_blocks, ufunc=numpy.multiply),
    "pmax": functools.partial(reduce_blocks, ufunc=numpy.maximum),
    "pmin": functools.partial(reduce_blocks, ufunc=numpy.minimum),
    "pscan": pscan,
    "pscatter": pscatter,
}

#: The collectives of exported programs. Casts change types alone; `ppermute_start` waits itself.
EXPORTED: dict[str, Callable] = {
    **{name: functools.partial(on_ranks, function) for name, function in _ON_RANKS.items()},
    **dict.fromkeys(("pbroadcast", "reduced", "unreduced", "ppermute_wait"), identity),
    "axis_index": rank_along,
}
