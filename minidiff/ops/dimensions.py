"""The correspondence of the dimensions of an operation's operands and results: the rule `sharding=` of a primitive.

A rule labels each dimension of each operand and result, as the subscripts of an einsum do. If operands are split along
a label, so are the results that have the label. For a result without it, each part gives a partial result, and
`combine` names how these are combined. A dimension labeled None must be whole. An operation that needs all dimensions
whole says so: `sharding=gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from minidiff.core.types import ShapedArray

Label = Hashable
Labels = tuple[Label, ...]  # one for each dimension of an array
Types = Sequence[ShapedArray]


class Dimensions(NamedTuple):
    """The labels of the dimensions of all operands and results.

    `combine` is "sum", "mean", "prod", "max" or "min". `params` are the parameters that differ for a part; a `shape`,
    which is that of the part, need not be among them.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    combine: str | None = None
    params: dict = {}  # noqa: RUF012 (never written)


#: Returns the dimensions for the types of operands and results, and the parameters.
Rule = Callable[[Types, Types, dict], Dimensions]


def gather(types: Types, outs: Types, params: dict) -> Dimensions:
    """Keep all dimensions whole."""
    operands, results = (tuple((None,) * t.ndim for t in some) for some in (types, outs))
    return Dimensions(operands, results)


def dimension_labels(types: Types) -> tuple[Labels, ...]:
    """Labels for arrays of one shape: the number of each dimension."""
    return tuple(tuple(range(t.ndim)) for t in types)


def broadcast_labels(shape: tuple[int, ...], wide: tuple[int, ...]) -> Labels:
    """Labels for an array that is broadcast to the shape `wide`.

    Dimensions are aligned from the last; those that are broadcast stay whole.
    """
    extra = len(wide) - len(shape)
    return tuple(d + extra if n == wide[d + extra] else None for d, n in enumerate(shape))


def elementwise(types: Types, outs: Types, params: dict) -> Dimensions:
    """Label the dimensions of elementwise operations, with NumPy's broadcasting.

    >>> x, y = ShapedArray((2, 3), float), ShapedArray((3,), float)
    >>> elementwise([x, y], [x], {})
    Dimensions(operands=((0, 1), (1,)), results=((0, 1),), combine=None, params={})
    """
    return Dimensions(tuple(broadcast_labels(t.shape, outs[0].shape) for t in types), dimension_labels(outs))


def cumulative(types: Types, outs: Types, params: dict) -> Dimensions:
    """Return the dimensions of an operation that accumulates along one: blocks go on from the totals of others.

    Each element depends on others along the dimension, as after `axiswise("axis")`.
    """
    return elementwise(types, outs, params)


def reduction(combine: str | None) -> Rule:
    """Return the rule of reductions along the parameter `axes`, which must be whole if `combine` is None.

    They must also be whole for an extremum of complex numbers.
    """

    def rule(types: Types, outs: Types, params: dict) -> Dimensions:
        (x,), axes, keepdims = types, params["axes"], params.get("keepdims", False)
        whole = combine is None or (combine in ("max", "min") and outs[0].dtype.kind == "c")
        labels = tuple(None if whole and d in axes else d for d in range(x.ndim))
        out = [None if d in axes else d for d in range(x.ndim) if keepdims or d not in axes]
        return Dimensions((labels,), (tuple(out),), None if whole else combine)

    return rule


def axiswise(name: str) -> Rule:
    """Return the rule of operations along axes that a parameter names: they must be whole; a result may lack them.

    Operands have one shape, or are numbers.
    """

    def rule(types: Types, outs: Types, params: dict) -> Dimensions:
        axes = params[name]
        whole = axes if isinstance(axes, tuple) else (axes,)
        labels = tuple(None if d in whole else d for d in range(types[0].ndim))
        fewer = tuple(d for d in labels if d is not None)
        operands = tuple(labels if t.ndim else () for t in types)
        return Dimensions(operands, tuple(labels if t.ndim == len(labels) else fewer for t in outs))

    return rule


def batch(ndim: int) -> Rule:
    """Return the rule of operations on the last `ndim` dimensions, for each batch element."""

    def rule(types: Types, outs: Types, params: dict) -> Dimensions:
        stack = tuple(range(types[0].ndim - ndim))
        operands, results = (tuple((*stack, *[None] * (t.ndim - len(stack))) for t in some) for some in (types, outs))
        return Dimensions(operands, results)

    return rule


def look_up(table: int) -> Rule:
    """Return the rule of elementwise look-ups in the operand `table`, which must be whole."""

    def rule(types: Types, outs: Types, params: dict) -> Dimensions:
        labels = dimension_labels(types)
        return Dimensions(
            tuple((None,) * len(x) if i == table else x for i, x in enumerate(labels)), dimension_labels(outs)
        )

    return rule


def products(outs: Types) -> str:
    """Return the combination of sums of products: "max" of booleans."""
    return "max" if outs[0].dtype == bool else "sum"
