"""Exact sums over ranks: the float that is nearest to the sum, so the same bits on any number of ranks.

============ ==================== ============ ==============
operation    type                 communicates transpose
============ ==================== ============ ==============
exact_psum   varying -> invariant all-reduces  pbroadcast
exact_psum,  varying -> invariant all-reduces  pcopies
of an axis
pcopies      invariant -> varying no           exact_psum of
                                               an axis
============ ==================== ============ ==============

A sum is rounded once, so it does not depend on the order, on how many ranks add, or on which fused calls do
(`fixed_point.py` says why). On a mesh with `exact_sums=True`, each collective that adds becomes its exact form where it
is applied, in the backward pass too; on other meshes `psum(x, axes, exact=True)` is one. Compiler passes do not move
exact sums past other operations, which would round differently. `exact_sums.py` runs them.

The examples assume what those of `ops.py` do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from collectives.axes import Axes, CollectiveAxes, single_axes
from collectives.collective import Collective, Shape, check_operand, same_shape
from collectives.fixed_point import Grid
from collectives.operands import array_of, convert_booleans, each_leaf, make_varying, parts_over
from collectives.ops import Tree, pbroadcast_p, psum_p
from minidiff.core.states import INVARIANT, VARYING
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops.shape import moveaxis
from minidiff.values.dtypes import finfo, is_differentiable

WINDOW_BYTES = 24  # of the three integers by which ranks agree on a window
CONVERTED = 60  # bytes that conversion to words and back reads and writes, for each byte that is sent
TEMPORARY = 8  # bytes that it takes at once, for each byte that is sent
EXACT = "exact_"  # begins the name of an exact form
ASSUMED_RANGE = 40  # bits between the largest and the least addend, where only types are known

# ---------------------------------------------------------------- operations


class Exact(Collective):
    """A collective that adds, `of`, with sums that are rounded once.

    A `psum` with the parameter `axis` also adds along this axis of each rank's block, before it rounds.
    """

    def __init__(self, of: Collective):
        rules: dict[str, Any] = {
            "shape": self._shape,
            "transpose_params": of.transpose_params,
            "ungrouped": of.ungrouped,
        }
        super().__init__(EXACT + of.name, of.takes, of.gives, cost=of.cost, one_result=of.one_result, **rules)
        self.of = of

    def adds_along(self, params: Mapping[str, Any]) -> int | None:
        """Return the axis of blocks along which it adds."""
        return params.get("axis") if self.of.shape_rule is same_shape else None

    def params_of_sum(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of the sum over ranks."""
        return {k: v for k, v in params.items() if k != "axis" or self.adds_along(params) is None}

    def check_fits(self, types, params, scope):
        self.of.check_fits(types, self.params_of_sum(params), scope)

    def _shape(self, x: ShapedArray, **params: Any) -> Shape:
        axis = self.adds_along(params)
        return self.of.shape_rule(x, **params) if axis is None else ((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)

    def _transposed(self, ct: Value, operands: Sequence[Any], **params: Any) -> list[Value]:
        axis = self.adds_along(params)
        if axis is None:
            return super()._transposed(ct, operands, **params)
        copies = pcopies_p.bind(ct, axes=params["axes"], size=params["size"], copies=operands[0].shape[axis])
        return [moveaxis(copies, 0, axis)]


class Copies(Collective):
    """`pcopies`."""

    def check_fits(self, types, params, scope):
        pbroadcast_p.check_fits(types, {"axes": params["axes"], "size": params["size"]}, scope)

    def _transposed(self, ct: Value, operands: Sequence[Any], **params: Any) -> list[Value]:
        return [exact(psum_p).bind(ct, axes=params["axes"], size=params["size"], axis=0)]

    def _batched(self, _, args, batched, **params):
        return moveaxis(self.bind(*args, **params), 0, 1)


exact = functools.cache(Exact)
pcopies_p = Copies(
    "pcopies",
    {INVARIANT: lambda: exact(psum_p)},
    VARYING,
    shape=lambda x, copies, **params: ((copies, *x.shape), x.dtype),
    shares_memory=True,
)


def wire_bytes(of: Exact, x: ShapedArray, params: dict) -> int:
    """Return the bytes that a rank passes to the collectives of an exact sum of blocks of type `x`.

    The number of words depends on values: here the largest addend is at most `2**40` times the least.
    """
    axis = of.adds_along(params)
    added = 1 if axis is None else x.shape[axis]
    if not is_differentiable(x.dtype):
        return x.nbytes // added
    grid = Grid.of(0, -finfo(x.dtype).nmant - 1 - ASSUMED_RANGE, added * params["size"])
    return 8 * grid.words * (1 + (x.dtype.kind == "c")) * (x.size // added) + WINDOW_BYTES


# ---------------------------------------------------------------- public functions


def exact_psum(x: Tree, axis_name: Axes, groups: Any, is_exact: bool, axis: int | None) -> Tree:
    """Return `psum(x, axis_name, exact=True, axis=axis)`."""
    if not is_exact:
        raise ValueError(f"psum: axis={axis!r} is for exact sums; write psum(x.sum({axis!r}), ...), or exact=True")
    group = _axes_of_exact("psum(exact=True)", axis_name, groups)

    def total(leaf):
        leaf = convert_booleans(array_of(leaf))
        if axis is None:
            return exact(psum_p).bind(parts_over(leaf, group), **group.params)
        along = normalize_axis(axis, typeof(leaf).ndim, "psum")
        return exact(psum_p).bind(make_varying(leaf, group), **group.params, axis=along)

    return each_leaf(total, x)


def pcopies(x: Tree, axis_name: Axes, copies: int) -> Tree:
    """Return copies of a value on each rank, along a new first axis. Invariant -> varying.

        x:                   [a]        [a]
        pcopies(x, 'i', 2):  [a,a]      [a,a]      {i}
        backward:            [u0,u1]    [v0,v1]    {i}  ->  [u0+u1+v0+v1]  [u0+u1+v0+v1]

    It does not communicate. It transposes to `psum(x, axis_name, exact=True, axis=0)`: so the cotangent of `x` is the
    exact sum of those of all copies on all ranks. Give each piece of a batch a copy of the parameters, and the gradient
    is the same to the last bit on any number of ranks among which the pieces are divided.

    >>> f = lambda x: pcopies(x, 'i', 2)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P('i'))(np.array([3, 1]))
    ShardedArray([[3, 1],
                  [3, 1],
                  [3, 1],
                  [3, 1]], P('i'))
    """
    group = _axes_of_exact("pcopies", axis_name, None)

    def repeat(leaf):
        check_operand("pcopies", pcopies_p.takes, typeof(leaf), group.params)
        return pcopies_p.bind(array_of(leaf), **group.params, copies=copies)

    return each_leaf(repeat, x)


def _axes_of_exact(name: str, axis_name: Any, groups: Any) -> CollectiveAxes:
    """Return the axes of an exact sum, or raise ValueError."""
    group = single_axes(name, tuple(axis_name) if isinstance(axis_name, (set, frozenset)) else axis_name)
    if groups is not None:
        raise ValueError(f"{name}: there are no exact sums in axis_index_groups; use a mesh with two axes")
    if not group.scope.typed:
        raise ValueError(
            f"{name} over {axis_name!r} needs types, which the axis of a vmap and a shard_map with check_rep=False do "
            "not have: make_mesh(..., exact_sums=True) makes all sums over the axes of a mesh exact"
        )
    return group
