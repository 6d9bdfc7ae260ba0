"""Sharded arrays: whole arrays whose blocks are on the ranks of a mesh.

`Sharding` says how, also in the types of traced values. `reshard_p` is the operation that changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from collectives.backends.base import Axes, describe_rank
from collectives.backends.simulated import Simulated, join_blocks
from collectives.ops import all_gather_p
from minidiff.core.interpreter import EVALUATE, current_scope
from minidiff.core.states import AxisStates
from minidiff.core.tracer import NUMPY_FUNCTIONS, Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import VarianceError, show_axes
from minidiff.errors.other_libraries import missing_attribute_error
from minidiff.errors.tracebacks import hide_own_frames
from minidiff.numpy.functions import mutating_functions
from minidiff.ops import declare_all
from minidiff.ops.base import Linear
from minidiff.values.aliasing import owner_of, read_only_view
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import P, PartitionSpec, block_type, global_type

SAMPLE = 4096  # elements of an array that is split, for ranks to compare


class Sharding(NamedTuple):
    """The mesh of an array and its spec: the `sharding` of its type.

    `is_element` is set for an element of a batch, which may be sharded along further axes. Operations on the element
    are done on the whole batch.
    """

    mesh: Mesh
    spec: PartitionSpec
    is_element: bool = False

    def is_like(self, other: Sharding) -> bool:
        """Whether both are the same sharding; one may be an element's and the other not."""
        return self.spec == other.spec and self.mesh.is_like(other.mesh)

    def cotangent(self) -> Sharding:
        """The sharding of the array's cotangent."""
        return self._replace(spec=self.spec.transposed())

    def of_element(self, axis: int, ndim: int) -> Sharding:
        """The sharding of the elements of a batch of `ndim` dimensions, whose batch axis is `axis`."""
        dims = self.spec.dims(ndim)
        return Sharding(self.mesh, self.spec.with_dims((*dims[:axis], *dims[axis + 1 :])), True)

    def of_part(self, ndim: int) -> Sharding | None:
        """The sharding of `x[i]`, where the first of x's `ndim` dimensions is whole; None if it is not sharded."""
        spec = self.of_element(0, ndim).spec
        return None if spec.is_trivial else self._replace(spec=spec)

    def of_stack(self) -> Sharding:
        """The sharding of a stack of such arrays, along a new first dimension."""
        return self._replace(spec=self.spec.batched())

    def whole_along_first(self, ndim: int) -> Sharding:
        """The same sharding with the first of `ndim` dimensions whole."""
        return self._replace(spec=self.spec.with_dims(((), *self.spec.dims(ndim)[1:])))

    def of_batch(self, axis: int, ndim: int, element: PartitionSpec) -> PartitionSpec:
        """The spec of a batch with elements split by `element`; the batch axis stays split where it can."""
        dims, batch_axes = element.dims(ndim - 1), self.spec.dims(ndim)[axis]
        return element.with_dims((*dims[:axis], tuple(a for a in batch_axes if a not in element.axes), *dims[axis:]))

    def reshard(self, x: Value) -> Value:
        """Reshard `x`, a plain array or one sharded over any mesh, to this sharding."""
        mesh, have, _ = typeof(x).sharding or Sharding(self.mesh, P())
        if not mesh.is_like(self.mesh):
            x, have = reshard_p.bind(x, mesh=mesh, have=have, want=P()), P()
        return x if have == self.spec else reshard_p.bind(x, mesh=self.mesh, have=have, want=self.spec)

    def gather(self, x: Value) -> Value:
        """Gather `x`, a plain or sharded array, on every rank."""
        return Sharding(self.mesh, P()).reshard(x)

    def elements_here(self, batch: Value) -> tuple[numpy.ndarray, numpy.ndarray] | None:
        """Return the elements of each array of a batch that this process holds, and their numbers; None if traced."""
        if not isinstance(batch, ShardedArray):
            return None
        numbers = numpy.arange(math.prod(batch.shape[1:])).reshape(1, *batch.shape[1:])
        placed, varying = self.mesh.ranks.place(numbers, self.spec.dims(batch.ndim))
        parts = [self.mesh.ranks.local(*held) for held in ((batch.data, batch.varying), (placed, varying))]
        blocks = zip(*[part if isinstance(part, list) else [part] for part in parts])
        values, elements = zip(*[(x.reshape(len(batch), -1), n.ravel()) for x, n in blocks])
        return numpy.concatenate(values, 1), numpy.concatenate(elements)


def with_sharding(t: ShapedArray, mesh: Mesh, spec: PartitionSpec) -> ShapedArray:
    """Set the sharding of a new type, which must not be shared, and return it."""
    t.sharding = None if spec.is_trivial else Sharding(mesh, spec)
    return t


def whole_type(block: ShapedArray, mesh: Mesh, spec: PartitionSpec) -> ShapedArray:
    """Return the type of the sharded array whose blocks have the type `block`."""
    return with_sharding(global_type(block, spec, mesh.shape), mesh, spec)


def reshard_argument(x: Value, mesh: Mesh, spec: PartitionSpec) -> Value:
    """Reshard a sharded argument by its spec; return any other argument unchanged."""
    sharding = x.type.sharding if isinstance(x, Tracer) else None
    if sharding is None and not (spec.unreduced or spec.reduced):
        return x
    if sharding is not None and sharding.mesh is mesh and sharding.spec.key == spec.key:
        return x
    return Sharding(mesh, spec).reshard(x)


def sum_result(x: Value, spec: PartitionSpec) -> Value:
    """Take the sum, over the axes in `sum=`, of a result outside the body."""
    if not spec.summed:
        return x
    sharding = typeof(x).sharding
    left = sharding.spec.with_states(sharding.spec.unreduced.difference(spec.summed), sharding.spec.reduced)
    return sharding._replace(spec=left).reshard(x)


class ShardedArray(Tracer):
    """An array split over the ranks of a mesh, such as a mapped result of `shard_map`.

    `shape` and `dtype` are those of the whole; `spec` says how it is split over `mesh`. `local` is this rank's
    block, or the list of all ranks' blocks if they are simulated (`spmd.from_local` is its inverse): read-only views.
    `gather()` returns the whole as a NumPy array on every rank: a collective, which every rank must call.
    `numpy.asarray(x)` returns the whole if all blocks are in this process, and raises otherwise. Both are copies:
    writing into them, or into the array that it was made from, does not change it. Printing never communicates.

    It behaves like the whole array: operators, indexing, methods and NumPy's functions apply to it, and each operation
    is a `shard_map` of itself (`dispatch.py`), whose result is split as the operands are if the operation has a
    sharding rule. Functions that are not operations gather it. Under MPI, every rank must call them.

    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> x = spmd.distribute(numpy.arange(4.0), mesh, spmd.P('i'))
    >>> x.shape, x.spec, x.local
    ((4,), P('i'), [array([0., 1.]), array([2., 3.])])
    >>> 2 * x, float(x.sum()), x.gather()
    (ShardedArray([0., 2., 4., 6.], P('i')), 6.0, array([0., 1., 2., 3.]))
    """

    __slots__ = ("mesh", "spec", "data", "type", "varying", "sample")
    interpreter = EVALUATE
    type: ShapedArray

    def __init__(self, t: ShapedArray, data: Any, varying: Axes | None = None):
        self.mesh, self.spec, _ = t.sharding
        self.data = read_only_view(data)  # as the backend holds it: blocks that differ along `varying`
        self.type = t
        self.varying = self.mesh.ranks.sort_axes(self.spec.split_axes) if varying is None else varying
        self.sample: Any = None  # of the whole that it was cut from, until ranks have compared theirs

    @hide_own_frames
    def __getattr__(self, name: str) -> Any:
        raise missing_attribute_error("ShardedArray", name)

    @property
    def local(self) -> Any:
        return self.mesh.ranks.local(self.data, self.varying)

    def gather(self) -> numpy.ndarray:
        """The whole array on every rank: a copy, which may be written into.

        Under MPI every rank must call it. Partial sums are added up.
        """
        if self.spec.unreduced:
            total = Sharding(self.mesh, self.spec.summed_up()).reshard(self)
            return total.gather() if isinstance(total, ShardedArray) else numpy.array(total)
        blocks = self.mesh.ranks.gather(all_gather_p, self.data, self.varying)
        whole = join_blocks(blocks, self.spec.dims(self.ndim), self.mesh.shape)
        return whole.copy() if numpy.may_share_memory(whole, self.data) else whole

    def concrete(self, use: str) -> numpy.ndarray:
        return self.gather()

    def check_outside(self) -> None:
        pass  # a sharded array is also a value outside of transformations

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        if not self.mesh.ranks.is_local(self.varying):
            raise ValueError(
                f"this {self.dtype} array of shape {self.shape} is split over the ranks of {self.mesh} as {self.spec}: "
                "this rank has only a block of it (.local). Call .gather() on every rank to get the whole array"
            )
        whole = self.gather()
        return whole if dtype is None else whole.astype(dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("a ShardedArray cannot be written into; make a new one instead: x = x.at[i].set(v)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not isinstance(self.mesh.ranks, Simulated):
            raise TypeError(
                f"this {self.dtype} array of shape {self.shape} is split over the ranks of {self.mesh} as {self.spec}, "
                "and cannot be pickled: its loader has other ranks. Pickle x.gather(), which every rank must call, or "
                f"each rank its x.local; the whole is split again by spmd.distribute(whole, mesh, {self.spec})"
            )
        return ShardedArray, (self.type, self.data)

    def __array_ufunc__(self, ufunc: numpy.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        target = inputs[:1] if method == "at" else kwargs.get("out", ())
        as_a_whole = not _is_operation(ufunc) or len(target) > 0 or kwargs.get("where", True) is not True
        if as_a_whole and not any(isinstance(t, ShardedArray) for t in target):
            return getattr(ufunc, method)(*_gather_nested(inputs), **_gather_nested(kwargs))
        return super().__array_ufunc__(ufunc, method, *inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not _is_operation(func) and not _writes_into_sharded_array(func, args, kwargs):
            return func(*_gather_nested(args), **_gather_nested(kwargs))
        result = super().__array_function__(func, types, args, kwargs)
        alike = func in _LIKE and args[0] is self and result.shape == self.shape
        return self.type.sharding.reshard(result) if alike else result

    def __repr__(self) -> str:
        if self.mesh.ranks.is_local(self.varying):
            whole = numpy.array2string(self.gather(), prefix="ShardedArray(", separator=", ")
            return f"ShardedArray({whole}, {self.spec})"
        rank = describe_rank(self.mesh.shape, self.mesh.ranks.rank)
        return f"ShardedArray({self.type}, {self.spec}; {rank} has\n{self.local})"

    def __str__(self) -> str:
        return str(self.gather()) if self.mesh.ranks.is_local(self.varying) else repr(self)


def array_maker(
    mesh: Mesh, spec: PartitionSpec, varying: Axes, block: tuple[int, ...], dtype: numpy.dtype
) -> Callable[[Any], Value]:
    """Return a function that wraps blocks of this shape, which differ along `varying`, as an array with a spec."""
    return mesh.ranks.cached_plan(_maker, mesh, spec, varying, block, dtype)


def _maker(
    _: Any, mesh: Mesh, spec: PartitionSpec, varying: Axes, block: tuple[int, ...], dtype: numpy.dtype
) -> Callable[[Any], Value]:
    wanted = mesh.ranks.sort_axes(spec.split_axes)
    make: Callable[[Any], Value] = _plain_array
    if not spec.is_trivial:
        t = whole_type(ShapedArray(block, dtype), mesh, spec)
        make = lambda x: ShardedArray(t, x, wanted)  # noqa: E731
    return make if varying == wanted else lambda x: make(mesh.ranks.reshard_data(x, varying, wanted))


def _plain_array(x: Any) -> Value:
    """A plain result: a NumPy scalar, whichever backend ran, or an array that may be written into."""
    return x[()] if x.ndim == 0 else x if x.flags.writeable else x.copy()


def copy_shared_results(results: list[Value], plain: set[int]) -> list[Value]:
    """Copy results that share memory with the user's `plain` arrays, and plain results that share it with others.

    Plain ones can be written into, so that they share none with sharded arguments.
    """
    if len(results) == 1 and (not plain or isinstance(results[0], numpy.generic)):
        return results
    sharded = [x for x in results if isinstance(x, ShardedArray)]
    for x in sharded:
        if id(owner_of(x.data)) in plain:
            x.data = read_only_view(x.data.copy())
    owners = plain.union(id(owner_of(x.data)) for x in sharded)
    separate: list[Value] = []
    returned: dict[int, list[numpy.ndarray]] = {}  # by owner: plain results, which may be parts of one bucket
    for result in results:
        if isinstance(result, numpy.ndarray):
            owner = id(owner_of(result))
            others = returned.setdefault(owner, [])
            shared = owner in owners or any(numpy.may_share_memory(result, x) for x in others)
            result = result.copy() if shared else result
            others.append(result)
        separate.append(result)
    return separate


#: Functions that use only the type of their first argument; their result gets its sharding.
_LIKE = {numpy.zeros_like, numpy.ones_like, numpy.full_like, numpy.empty_like}


def _is_operation(function: Any) -> bool:
    """Whether a function of NumPy runs on shards. One that does not gets whole arrays."""
    if function not in NUMPY_FUNCTIONS:
        declare_all()
    return function in NUMPY_FUNCTIONS


def _gather_nested(x: Any) -> Any:
    """Gather sharded arrays, also inside lists, tuples and dictionaries."""
    if isinstance(x, ShardedArray):
        return x.gather()
    if isinstance(x, (list, tuple)):
        return type(x)(map(_gather_nested, x))
    return {k: _gather_nested(v) for k, v in x.items()} if isinstance(x, dict) else x


def _writes_into_sharded_array(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a NumPy function would write into a sharded array: a gathered copy would lose the values."""
    targets = (*(args[:1] if func in mutating_functions() else ()), kwargs.get("out"))
    return any(isinstance(target, ShardedArray) for target in targets)


# ---------------------------------------------------------------- resharding as an operation


def _shard_whole(x: Value, mesh: Mesh, have: PartitionSpec, want: PartitionSpec) -> Value:
    """Shard a copy of an array that every rank has; only zeros may become unreduced."""
    if want.is_trivial:
        return x
    x = numpy.asarray(x)
    if want.unreduced and x.any():
        raise not_unreduced_error(typeof(x), have, want)
    data, varying = mesh.ranks.place(x, want.dims(x.ndim))
    data = mesh.ranks.reshard_data(data, varying, mesh.ranks.sort_axes(want.split_axes))
    data = data.copy() if numpy.may_share_memory(data, x) else data  # later writes into `x` do not change the result
    block = block_type(ShapedArray(x.shape, x.dtype), want, mesh.shape)
    sharded = ShardedArray(whole_type(block, mesh, want), data)
    if mesh.backend == "mpi":
        sharded.sample = x.flat[:: x.size // SAMPLE] if x.size > SAMPLE else x.copy()
    return sharded


def not_unreduced_error(t: ShapedArray, have: PartitionSpec, want: PartitionSpec) -> VarianceError:
    """The error that an array cannot become unreduced by resharding."""
    axes = show_axes(want.unreduced - have.unreduced)
    return VarianceError(
        f"reshard of {t} from {have} to {want}: along {axes} it holds no partial sums; make them in a shard_map, with "
        f"out_specs={want}, or from each rank's part, with spmd.from_local"
    )


def _reshard_batch(primitive: Linear, args: Sequence[Value], batched: Sequence[bool], mesh: Mesh, have, want) -> Value:
    """Reshard a batch whose elements are split by `want`; its axis stays split where `want` allows."""
    t = typeof(args[0])
    sharding = t.sharding if t.sharding is not None and t.sharding.mesh.is_like(mesh) else Sharding(mesh, P())
    return Sharding(mesh, sharding.of_batch(0, t.ndim, want)).reshard(args[0])


class Reshard(Linear):
    def bind(self, *args, **params):
        """Apply the operation; in a body, where an element of a split batch is whole, it has nothing to do."""
        return args[0] if current_scope() is not None else super().bind(*args, **params)


#: Reshard `x` from the spec `have` to the spec `want`, over one mesh. Of a sharded array it is a `shard_map`, in whose
#: body the collectives run that `reshard.py` chooses; `vmap` reshards the whole batch.
reshard_p = Reshard(
    "reshard",
    _shard_whole,
    lambda x, mesh, have, want: (x.shape, x.dtype),
    lambda ct, operands, mesh, have, want: [
        reshard_p.bind(ct, mesh=mesh, have=want.transposed(), want=have.transposed())
    ],
    _reshard_batch,
    result_states=lambda types, params: AxisStates.of((), params["want"].unreduced, params["want"].reduced),
    show_params=lambda params: repr(params["want"]),
)
