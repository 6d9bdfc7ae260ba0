"""Arrays whose blocks lie on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from collectives.stacked import join_blocks
from minidiff.core import ShapedArray, Tracer
from spmd.mesh import Mesh
from spmd.partition import PartitionSpec, global_type


class ShardedArray(numpy.lib.mixins.NDArrayOperatorsMixin):
    """An array split over the ranks of a mesh, as results of `shard_map` are that are mapped over it.

    `shape` and `dtype` are those of the whole; `spec` says how it is split over `mesh`. `local` is this rank's
    block, or the list of all ranks' blocks where they are simulated. `gather()` returns the whole as a NumPy
    array on every rank: a collective, that every rank must call. `numpy.asarray(x)` gives the whole where all
    of it is here, and raises otherwise. Printing never communicates.

    Elementwise operations between arrays that are split alike, and with numbers, are applied block by block;
    other operations outside `shard_map` gather first.
    """

    __array_priority__ = 100

    def __init__(self, mesh: Mesh, spec: PartitionSpec, block: ShapedArray, data: Any):
        whole = global_type(block, spec, mesh.shape)
        self.mesh = mesh
        self.spec = spec
        self.shape = whole.shape
        self.dtype = whole.dtype
        self.data = data  # as the backend holds it, along `held`
        self._block = block

    @property
    def held(self) -> tuple[str, ...]:
        return self.mesh.ranks.ordered(self.spec.axes)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return ShapedArray(self.shape, self.dtype).size

    @property
    def local(self) -> Any:
        return self.mesh.ranks.local(self.data, self.held)

    def gather(self) -> numpy.ndarray:
        """The whole array, on every rank. Under MPI a collective: every rank must call it."""
        ranks = self.mesh.ranks
        lead = len(self.spec.lead)
        blocks = ranks.gather(self.data, self.held)
        count = len(self.held) > 0
        blocks = blocks.reshape(*blocks.shape[:count], *(1,) * lead, *blocks.shape[count:])
        return join_blocks(blocks, self.spec.dims(self.ndim), self.mesh.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        if not self.mesh.ranks.is_here(self.held):
            raise ValueError(
                f"this {self.dtype} array of shape {self.shape} is split over the ranks of {self.mesh} as {self.spec}: "
                "this rank has only a block of it (.local). Call .gather() on every rank to have it whole"
            )
        whole = self.gather()
        return whole if dtype is None else whole.astype(dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __getitem__(self, index: Any) -> numpy.ndarray:
        return self.gather()[index]

    @property
    def T(self) -> numpy.ndarray:
        return self.gather().T

    def astype(self, dtype: Any) -> ShardedArray:
        return self._with(self.data.astype(dtype))

    def __array_ufunc__(self, ufunc: numpy.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Tracer) for x in inputs):
            return NotImplemented
        if method == "__call__" and not kwargs and ufunc.nout == 1 and ufunc.signature is None and self._alike(inputs):
            return self._with(ufunc(*[x.data if isinstance(x, ShardedArray) else x for x in inputs]))
        return getattr(ufunc, method)(*map(_whole, inputs), **{k: _whole(v) for k, v in kwargs.items()})

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(issubclass(t, Tracer) for t in types):
            return NotImplemented
        return func(*map(_whole, args), **{k: _whole(v) for k, v in kwargs.items()})

    def _alike(self, inputs: tuple) -> bool:
        """Whether all inputs are numbers, or arrays that are split as this one is."""
        return all(
            (x.mesh is self.mesh and x.spec == self.spec and x.shape == self.shape)
            if isinstance(x, ShardedArray)
            else numpy.ndim(x) == 0
            for x in inputs
        )

    def _with(self, data: Any) -> ShardedArray:
        return ShardedArray(self.mesh, self.spec, self._block.update(dtype=data.dtype), data)

    def __repr__(self) -> str:
        if self.mesh.ranks.is_here(self.held):
            whole = numpy.array2string(self.gather(), prefix="ShardedArray(", separator=", ")
            return f"ShardedArray({whole}, {self.spec})"
        whole = ShapedArray(self.shape, self.dtype)
        return f"ShardedArray({whole}, {self.spec}; rank {self.mesh.rank} has\n{self.local})"

    def __str__(self) -> str:
        return str(self.gather()) if self.mesh.ranks.is_here(self.held) else repr(self)


def _gathering(name: str) -> Callable:
    """A method of `numpy.ndarray`, of the whole array."""
    return lambda self, *args, **kwargs: getattr(self.gather(), name)(*args, **kwargs)


_GATHERING = "sum mean max min argmax argmin dot reshape ravel flatten squeeze transpose swapaxes copy item tolist"

for _name in _GATHERING.split():
    setattr(ShardedArray, _name, _gathering(_name))


def _whole(x: Any) -> Any:
    """Sharded arrays gathered, also inside lists and tuples."""
    if isinstance(x, ShardedArray):
        return x.gather()
    if isinstance(x, (list, tuple)):
        return type(x)(map(_whole, x))
    return x
