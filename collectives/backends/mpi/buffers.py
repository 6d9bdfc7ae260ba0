"""Buffers of MPI calls, and the reductions that MPI lacks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from collectives.backends.mpi.library import MPI
from minidiff.core.types import ShapedArray
from minidiff.values.dtypes import accumulator_dtype


class Packing:
    """The layout of a bucket: values of one dtype in one buffer, in which they are summed."""

    def __init__(self, types: Sequence[ShapedArray]):
        self.dtype = types[0].dtype
        self.wide = accumulator_dtype(self.dtype)
        ends = [0, *itertools.accumulate(x.size for x in types)]
        self.slices = [(slice(*ends[k : k + 2]), x.shape) for k, x in enumerate(types)]
        self.type = ShapedArray((ends[-1],), self.wide)  # of the buffer

    def pack(self, xs: Sequence[numpy.ndarray], out: numpy.ndarray | None = None) -> numpy.ndarray:
        """Return a buffer with the values: `out`, or a new one."""
        out = numpy.empty(self.type.shape, self.wide) if out is None else out
        return numpy.concatenate([x.reshape(-1) for x in xs], out=out)

    def unpack(self, buffer: numpy.ndarray) -> list[numpy.ndarray]:
        """Return the sums, as views of the buffer."""
        buffer = buffer.astype(self.dtype, copy=False)
        return [buffer[part].reshape(shape) for part, shape in self.slices]


def reducible_dtype(dtype: numpy.dtype) -> numpy.dtype:
    """Return the dtype as which MPI reduces values of a dtype."""
    return numpy.dtype(numpy.uint8) if dtype.kind == "b" else accumulator_dtype(dtype)


def as_reducible(reduce: Callable, dtype: numpy.dtype) -> Callable:
    """Return a function that reduces values of a dtype; `reduce` takes those of its `reducible_dtype`."""
    wide = reducible_dtype(dtype)
    if wide == dtype:
        return reduce
    if dtype.kind == "b":  # MPI has no order for booleans; as bytes they are 0 and 1
        return lambda x: reduce(x.view(wide)).view(dtype)
    return lambda x: reduce(x.astype(wide)).astype(dtype)  # it has no 16-bit floats


raised_in_reductions: list[BaseException] = []  # on this rank, to be raised once the call is complete


def _as_numpy(ufunc: numpy.ufunc) -> Any:
    """Return an MPI reduction operation that applies a ufunc of two floating-point arrays."""

    def combine(one, two, datatype):
        try:
            one, two = (numpy.frombuffer(x, datatype.typestr) for x in (one, two))
            ufunc(one, two, out=two)
        except BaseException as error:  # MPI would end the job: finish, and raise it later
            raised_in_reductions.append(error)
            with numpy.errstate(all="ignore"):
                combine(one, two, datatype)

    return MPI.Op.Create(combine, commute=True)


# MPI's own MAX and MIN treat a NaN depending on the order of operands, so ranks could get different results.
MAXIMUM, MINIMUM = _as_numpy(numpy.maximum), _as_numpy(numpy.minimum)
