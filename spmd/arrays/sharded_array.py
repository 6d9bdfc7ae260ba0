"""Arrays that are sharded: their blocks are on the ranks of a mesh."""

from __future__ import annotations

from typing import Any

import numpy

from collectives.backends.base import place_of
from collectives.backends.simulated import Simulated, join_blocks
from minidiff.core import EVALUATE, NUMPY_FUNCTIONS, Interpreter, ShapedArray, Tracer
from spmd.mesh import Mesh
from spmd.partition import PartitionSpec, global_type, with_sharding


class ShardedArray(Tracer):
    """An array split over the ranks of a mesh, such as a mapped result of `shard_map`.

    `shape` and `dtype` are those of the whole; `spec` says how it is split over `mesh`. `local` is this rank's
    block, or the list of all ranks' blocks if they are simulated (`spmd.from_local` is its inverse). `gather()`
    returns the whole as a NumPy array on every rank: a collective, which every rank must call. `numpy.asarray(x)`
    returns the whole if all blocks are in this process, and raises otherwise. Printing never communicates.

    It behaves like the whole array: operators, indexing, methods and NumPy's functions apply to it, and each operation
    is a `shard_map` of itself (`sharding_rules.py`), whose result is split as the operands are if the operation has a
    sharding rule. Functions that are not operations gather it. Under MPI, every rank must call them.
    """

    def __init__(self, mesh: Mesh, spec: PartitionSpec, block: ShapedArray, data: Any):
        super().__init__(EVALUATE)
        self.mesh = mesh
        self.spec = spec
        self.data = data  # as the backend holds it, varying along `held`
        self._type = with_sharding(global_type(block, spec, mesh.shape), mesh, spec)

    @property
    def type(self) -> ShapedArray:
        return self._type

    @property
    def held(self) -> tuple[str, ...]:
        return self.mesh.ranks.ordered(self.spec.axes)

    @property
    def local(self) -> Any:
        return self.mesh.ranks.local(self.data, self.held)

    @property
    def as_split(self) -> ShardedArray:
        """The same array, with leading (`P.stacked`) dimensions as split dimensions.

        Its spec is an ordinary one. Its blocks do not move, and operations on it keep its sharding.
        """
        ranks, lead = self.mesh.ranks, len(self.spec.lead)
        shape = (*(1,) * lead, *ranks.block_shape(self.data, self.held))
        spec = PartitionSpec.of_dims(self.spec.dims(self.ndim))
        return ShardedArray(self.mesh, spec, ShapedArray(shape, self.dtype), ranks.reshape(self.data, self.held, shape))

    def gather(self) -> numpy.ndarray:
        """The whole array on every rank: a copy, which may be written into.

        Under MPI every rank must call it.
        """
        ranks = self.mesh.ranks
        lead = len(self.spec.lead)
        blocks = ranks.gather(self.data, self.held)
        count = len(self.held) > 0
        blocks = blocks.reshape(*blocks.shape[:count], *(1,) * lead, *blocks.shape[count:])
        whole = join_blocks(blocks, self.spec.dims(self.ndim), self.mesh.shape)
        return whole.copy() if numpy.may_share_memory(whole, self.data) else whole

    def concrete(self, use: str) -> numpy.ndarray:
        return self.gather()

    def check_own(self, interpreter: Interpreter) -> None:
        pass  # a sharded array is valid under every interpreter

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        if not self.mesh.ranks.is_here(self.held):
            raise ValueError(
                f"this {self.dtype} array of shape {self.shape} is split over the ranks of {self.mesh} as {self.spec}: "
                "this rank has only a block of it (.local). Call .gather() on every rank to have it whole"
            )
        whole = self.gather()
        return whole if dtype is None else whole.astype(dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("a ShardedArray cannot be written into; make the new one instead: x = x.at[i].set(v)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not isinstance(self.mesh.ranks, Simulated):
            raise TypeError(
                f"this {self.dtype} array of shape {self.shape} is split over the ranks of {self.mesh} as {self.spec}, "
                "and cannot be pickled: its loader has other ranks. Pickle x.gather(), which every rank must call, or "
                f"each rank its x.local; the whole is split again by spmd.distribute(whole, mesh, {self.spec})"
            )
        return object.__reduce_ex__(self, protocol)

    def __array_ufunc__(self, ufunc: numpy.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        target = inputs[:1] if method == "at" else kwargs.get("out", ())
        as_a_whole = ufunc not in NUMPY_FUNCTIONS or len(target) > 0 or kwargs.get("where", True) is not True
        if as_a_whole and not _holds_others((inputs, kwargs)) and not any(isinstance(t, ShardedArray) for t in target):
            return getattr(ufunc, method)(*_whole(inputs), **_whole(kwargs))
        return super().__array_ufunc__(ufunc, method, *inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        as_a_whole = func not in NUMPY_FUNCTIONS and not _writes_into_one(func, args, kwargs)
        if as_a_whole and not _holds_others((args, kwargs)):
            return func(*_whole(args), **_whole(kwargs))
        found = super().__array_function__(func, types, args, kwargs)
        alike = func in _LIKE and args[0] is self and found.shape == self.shape
        return self.type.sharding.resharded(found) if alike else found

    def __repr__(self) -> str:
        if self.mesh.ranks.is_here(self.held):
            whole = numpy.array2string(self.gather(), prefix="ShardedArray(", separator=", ")
            return f"ShardedArray({whole}, {self.spec})"
        here = place_of(self.mesh.shape, self.mesh.ranks.rank)
        return f"ShardedArray({self.type}, {self.spec}; {here} has\n{self.local})"

    def __str__(self) -> str:
        return str(self.gather()) if self.mesh.ranks.is_here(self.held) else repr(self)


#: Functions that use only the type of their first argument; their result gets its sharding.
_LIKE = {numpy.zeros_like, numpy.ones_like, numpy.full_like, numpy.empty_like}


def _whole(x: Any) -> Any:
    """Gather sharded arrays, also inside lists, tuples and dictionaries."""
    if isinstance(x, ShardedArray):
        return x.gather()
    if isinstance(x, (list, tuple)):
        return type(x)(map(_whole, x))
    return {k: _whole(v) for k, v in x.items()} if isinstance(x, dict) else x


def _writes_into_one(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a NumPy function would write into a sharded array.

    It would write to a gathered copy, and the values would be lost.
    """
    from minidiff.numpy.coverage import writing  # imported here, since most programs do not need it

    targets = (*(args[:1] if func in writing() else ()), kwargs.get("out"))
    return any(isinstance(target, ShardedArray) for target in targets)


def _holds_others(x: Any) -> bool:
    """Whether x, or a container in it, has tracers other than sharded arrays."""
    if isinstance(x, (list, tuple)):
        return any(map(_holds_others, x))
    if isinstance(x, dict):
        return any(map(_holds_others, x.values()))
    return isinstance(x, Tracer) and not isinstance(x, ShardedArray)
