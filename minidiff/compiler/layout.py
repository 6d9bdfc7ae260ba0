"""How a loop sees its arrays: the dimensions of a group as rows and columns, and the operands that have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from minidiff.compiler.ir import constant, type_of
from minidiff.core.tape import Tape
from minidiff.core.types import typeof
from minidiff.ops.base import sum_p

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """The first `split` dimensions of a shape are seen as rows, the others as columns."""

    shape: Shape
    split: int

    @property
    def sizes(self) -> tuple[int, int]:
        return math.prod(self.shape[: self.split]), math.prod(self.shape[self.split :])

    def dimensions_of(self, shape: Shape) -> str | None:
        """The dimensions of an operand that broadcasts: "mn" rows and columns, "m" rows; None if it has part of one."""
        padded = (1,) * (len(self.shape) - len(shape)) + shape
        found = ""
        for name, part in (("m", slice(0, self.split)), ("n", slice(self.split, None))):
            own, whole = math.prod(padded[part]), math.prod(self.shape[part])
            if own not in (1, whole):
                return None
            found += name if own == whole != 1 else ""
        return found


class Parameter(NamedTuple):
    """An operand or a result of a loop: its name, its dtype, the dimensions that it has, and whether it is a sum."""

    name: str
    dtype: numpy.dtype
    dimensions: str
    is_sum: bool = False

    @property
    def has_columns(self) -> bool:
        return "n" in self.dimensions

    @property
    def texts(self) -> dict[str, object]:
        """What the templates in `loops.py` are filled with."""
        is_float, is_bool = self.dtype.kind == "f", self.dtype.kind == "b"
        return {
            "x": self.name,
            "type": type_of(self.dtype),
            "memory": "i8" if is_bool else type_of(self.dtype),  # a bool is a byte
            "size": self.dtype.itemsize,
            "add": "fadd" if is_float else "add",
            "reorder": "reassoc " if is_float else "",
            "zero": constant(None, -0.0 if is_float else 0, self.dtype).text,  # -0.0 + x is x, for 0.0 too
        }


def group_shape(body: Tape) -> Shape:
    """The shape of the elements that a group's loop runs over."""
    eqn = body.equations[0]
    return typeof(eqn.inputs[0]).shape if eqn.primitive is sum_p else eqn.outputs[0].type.shape


def kept_shape(shape: Shape, axes: Sequence[int]) -> Shape:
    """A shape with 1 in place of the sizes along these axes."""
    return tuple([1 if i in axes else n for i, n in enumerate(shape)])


def find_layout(body: Tape) -> Layout | None:
    """Rows and columns that fit all operands and sums of a group, or None."""
    shape = group_shape(body)
    summed = [eqn.params["axes"] for eqn in body.equations if eqn.primitive is sum_p]
    shapes = [v.type.shape for v in body.inputs] + [kept_shape(shape, axes) for axes in summed]
    for split in (0, *range(len(shape) - 1, 0, -1)):
        layout = Layout(shape, split)
        if all(layout.dimensions_of(s) is not None for s in shapes):
            return layout if math.prod(shape) > 1 else None
    return None
