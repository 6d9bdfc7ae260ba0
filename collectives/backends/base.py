"""The backend interface: the ranks of a mesh, and how operations run on them.

A backend holds a value as `data` together with `varying`, the axes along which blocks may differ. How blocks
are stored is up to the backend.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from minidiff.core.primitive import Primitive

if TYPE_CHECKING:
    from collectives.collective import Collective

Axes = tuple[str, ...]  # axes along which a value varies, in mesh order
Dims = Sequence[Axes]  # for each dimension of an array, the axes it is split along
GROUP = "the ranks of a group"  # the name of the axis of a group's ranks

MAX_PLANS = 4096  # plans that a backend caches


class CallCounter:
    """A counter of the calls of a collective, and of the bytes of each rank's operands."""

    __slots__ = ("bytes", "calls")

    def __init__(self) -> None:
        self.calls = self.bytes = 0


class CollectivePlan(NamedTuple):
    """A collective on operands of known types: `execute` runs it, and results vary along `axes`, one tuple for each."""

    execute: Callable[..., Any]
    axes: Sequence[Axes]


class Backend(ABC):
    """The ranks along axes of these `sizes`, and how they run a collective, which they get as a primitive."""

    name: str
    rank = 0
    at_once = False  # whether a collective is complete as soon as it has started
    compare_once: Any  # MPI ranks alone have these
    compare_values: Any
    is_due: Any

    def __init__(self, sizes: dict[str, int]):
        self.sizes = dict(sizes)
        self.counters: defaultdict[str, CallCounter] = defaultdict(CallCounter)  # by collective
        self.plans: dict[tuple, Any] = {}  # by what they depend on

    def __getstate__(self) -> dict:
        return {**self.__dict__, "plans": {}}  # functions that cannot be pickled

    def same_ranks(self, other: Backend) -> bool:
        """Whether another backend of the same sizes has the same ranks, so that each can use the other's values."""
        return type(self) is type(other)

    def cached_plan(self, make: Callable, *key: Any) -> Any:
        """Return `make(self, *key)`, computed once and cached on this backend."""
        plan = self.plans.get((make, key))
        return self.cache((make, key), make(self, *key)) if plan is None else plan

    def cache(self, key: tuple, plan: Any) -> Any:
        """Cache a plan, and return it."""
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        self.plans[key] = plan
        return plan

    def size(self, axes: Iterable[str]) -> int:
        """Return the number of ranks along `axes`."""
        return math.prod(self.sizes[a] for a in axes)

    def sort_axes(self, axes: Iterable[str]) -> Axes:
        """Return the axes in mesh order, without duplicates."""
        wanted = frozenset(axes)
        return tuple(a for a in self.sizes if a in wanted)

    def varying_after(self, primitive: Collective, varying: Axes, params: Mapping[str, Any]) -> Axes:
        """Return the axes that a collective's result varies along."""
        if primitive.one_result:
            return tuple(a for a in varying if a not in params["axes"])
        return varying if varying == params["axes"] else self.sort_axes({*varying, *params["axes"]})

    def barrier(self) -> None:  # noqa: B027  (simulated ranks need not wait)
        """Wait until all ranks have reached this call."""

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all processes, in the order of their ranks; every rank must call it."""
        return [text]

    def clock_offset(self) -> float:
        """Return the seconds by which the clock of rank 0 is ahead of this process's; every rank must call it."""
        return 0.0

    def connect(self, params: Mapping[str, Any]) -> None:  # noqa: B027  (only MPI needs communicators)
        """Prepare all ranks for a collective that some of them may call later."""

    @abstractmethod
    def apply(self, primitive: Primitive, operands: Sequence[tuple[Any, Axes]], params: dict) -> tuple[Any, Axes]:
        """Bind an ordinary operation on every rank, by the current interpreter: its results, and their axes."""

    def collective(
        self, primitive: Collective, x: Any, varying: Axes, params: dict, counted: bool = True
    ) -> tuple[Any, Axes]:
        """Run a collective on one operand, within each of `params["groups"]` if given: the result, and its axes.

        If it communicates, it is counted, unless `counted` is false.
        """
        key = (primitive, counted, *params.values(), varying, x.shape, x.dtype)
        plan = self.plans.get(key) or self.cache(key, self.plan(primitive, [(x, varying)], params, counted))
        return plan.execute(x), plan.axes[0]

    def variadic(
        self, primitive: Collective, operands: Sequence[tuple[Any, Axes]], params: dict, counted: bool = True
    ) -> list[tuple[Any, Axes]]:
        """Run a collective on several operands in one call: the results, with their axes."""
        key = (primitive, counted, *params.values(), *[(varying, x.shape, x.dtype) for x, varying in operands])
        plan = self.plans.get(key) or self.cache(key, self.plan(primitive, operands, params, counted))
        results = plan.execute(*[x for x, _ in operands])
        return [*zip(results if primitive.multiple_results else [results], plan.axes)]

    def sums_in_place(self, x: Any, size: int) -> bool:
        """Whether a sum over `size` ranks can write its result into an operand of x's type."""
        return False

    def moves_nothing(self, primitive: Collective, x: Any, varying: Axes, params: Mapping[str, Any]) -> bool:
        """Whether the data of a collective's result is that of its operand, an array or a type."""
        return False

    @abstractmethod
    def plan(
        self,
        primitive: Collective,
        operands: Sequence[tuple[Any, Axes]],
        params: dict,
        counted: bool = True,
        in_place: bool = False,
    ) -> CollectivePlan:
        """Plan a collective on operands of these types: `execute` takes their data, and returns that of the result.

        It returns a list if the collective has several results. With `in_place`, a `psum` writes into its operand. All
        ranks call this when they first call the collective.
        """

    @abstractmethod
    def plan_start(
        self, primitive: Collective, operands: Sequence[tuple[Any, Axes]], params: dict
    ) -> Callable[..., Any]:
        """Return a function that starts an all-reduce of several values, or a `ppermute` of one: it returns a request.

        All ranks start in one order, and call this when they first start the collective.
        """

    @abstractmethod
    def wait(self, request: Any) -> list[Any]:
        """Wait for a collective that has started, and return the data of the results."""

    @abstractmethod
    def finish(self, error: BaseException | None = None) -> None:
        """Wait for all requests, at the end of a body or when an `error` leaves it: nothing stays in flight."""

    @abstractmethod
    def axis_index(self, axes: Axes) -> tuple[Any, Axes]:
        """Return each rank's index along `axes`, in the given order, and the result's axes."""

    @abstractmethod
    def block_shape(self, data: Any, varying: Axes) -> tuple[int, ...]:
        """Return the shape of one rank's block."""

    @abstractmethod
    def data_shape(self, shape: tuple[int, ...], varying: Axes) -> tuple[int, ...]:
        """Return the shape of the data for blocks of this shape."""

    @abstractmethod
    def place(self, x: Any, dims: Dims) -> tuple[Any, Axes]:
        """Shard an array: split its dimensions along axes."""

    @abstractmethod
    def reshard_data(self, data: Any, varying: Axes, wanted: Axes) -> Any:
        """Repeat data along missing axes of `wanted`; keep one copy along others."""

    @abstractmethod
    def gather(self, all_gather: Collective, data: Any, varying: Axes) -> numpy.ndarray:
        """Return all blocks, stacked in mesh order (just the block, if `varying` is empty)."""

    @abstractmethod
    def is_local(self, varying: Axes) -> bool:
        """Whether `gather` needs no communication."""

    @abstractmethod
    def local(self, data: Any, varying: Axes) -> Any:
        """Return this process's block, or the list of all blocks if ranks are simulated."""

    @abstractmethod
    def show(self, data: Any, varying: Axes) -> str:
        """Return the text that `print` shows: blocks by rank, with mesh coordinates."""


# ---------------------------------------------------------------- blocks


def split_dimension(x: numpy.ndarray, size: int, axis: int, tiled: bool) -> numpy.ndarray:
    """Move entries of x along `axis`, or with `tiled` `size` slices, to a first axis."""
    if tiled:
        x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return x if axis == 0 else x.transpose(axis, *range(axis), *range(axis + 1, x.ndim))


def unsplit_dimension(parts: numpy.ndarray, axis: int, tiled: bool) -> numpy.ndarray:
    """Stack parts, or with `tiled` concatenate them: the inverse of `split_dimension`."""
    x = parts if axis == 0 else parts.transpose(*range(1, axis + 1), 0, *range(axis + 1, parts.ndim))
    if not tiled:
        return x
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def show_block(sizes: dict[str, int], rank: int, block: numpy.ndarray) -> str:
    """Return one rank's block, under its mesh coordinates."""
    return f"On {describe_rank(sizes, rank)}:\n{block}\n"


def coordinates_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a rank's coordinate along each axis; the last axis runs fastest.

    >>> coordinates_of(3, {'i': 2, 'j': 2})
    {'i': 1, 'j': 1}
    """
    return dict(zip(sizes, map(int, numpy.unravel_index(rank, tuple(sizes.values())))))


def index_along(axes: Iterable[str], coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return a rank's index along `axes`, in the given order, from its coordinates.

    The last axis runs fastest.

    >>> index_along(('j', 'i'), {'i': 0, 'j': 1}, {'i': 2, 'j': 2})
    2
    """
    index = 0
    for a in axes:
        index = index * sizes[a] + coordinates[a]
    return index


def describe_rank(sizes: dict[str, int], rank: int) -> str:
    """Describe a rank and its mesh coordinates."""
    coordinates = tuple(coordinates_of(rank, sizes).values())
    names = "(" + ", ".join(sizes) + ("," if len(sizes) == 1 else "") + ")"
    return f"rank {rank} at mesh coordinates {names} = {coordinates}"
