"""Rows of `minidiff/ops/slices.py`: starts that are known, and starts that are traced."""

from typing import Any

import numpy as np

import minidiff as md
from tests.table.rows import Row, complex_, form, real

NAMES = ("slice", "slice_in_dim", "index_in_dim")
LINEAR: dict = {f"dynamic_{name}": [(0,)] for name in NAMES}
LINEAR |= {f"dynamic_update_{name}": [(0, 1)] for name in NAMES}

#: Functions of arrays and of a start along one axis.
ALONG_AN_AXIS: list[tuple] = [
    ("dynamic_slice_in_dim", "front", lambda x, i: md.dynamic_slice_in_dim(x, i, 2), (4, 3)),
    ("dynamic_slice_in_dim", "inner", lambda x, i: md.dynamic_slice_in_dim(x, i, 2, 1), (2, 4, 3)),
    ("dynamic_index_in_dim", "", lambda x, i: md.dynamic_index_in_dim(x, i, -1), (2, 4)),
    ("dynamic_update_slice_in_dim", "inner", lambda *xs: md.dynamic_update_slice_in_dim(*xs, 1), (2, 4, 3), (2, 2, 3)),
    ("dynamic_update_index_in_dim", "", lambda *xs: md.dynamic_update_index_in_dim(*xs, 1), (3, 4), (3,)),
]
#: The same of starts along all axes, by the sizes of a part.
ALONG_AXES: list[tuple] = [
    (name, str(sizes), f, (3, 3, 4), *more)
    for sizes in ((2, 3, 2), (1, 2, 4), (3, 3, 4))
    for name, f, more in (
        ("dynamic_slice", lambda x, i, n=sizes: md.dynamic_slice(x, i, n), ()),
        ("dynamic_update_slice", md.dynamic_update_slice, (sizes,)),
    )
]


def rows(starts: Any, name: str, note: str, f: Any, *shapes: tuple) -> list[Row]:
    """With starts that are known, and with ones that are arguments, integers."""
    arrays = [real(*shape) for shape in shapes]
    return [
        form(name, f"{note}, start={starts}", lambda *xs: f(*xs, starts), *arrays),
        form(name, f"{note}, traced start={starts}", f, *arrays, np.asarray(starts)[()]),
    ]


Z, PART = complex_(3, 4), complex_(2, 2)

ROWS = [
    *(r for start in (1, -1, -9, 7) for case in ALONG_AN_AXIS for r in rows(start, *case)),
    *(r for starts in ((1, 0, 2), (-1, 5, -7), (0, 0, 0)) for case in ALONG_AXES for r in rows(starts, *case)),
    form("dynamic_slice", "one start known", lambda x, i: md.dynamic_slice(x, (1, i), (2, 2)), Z, np.int8(1)),
    form("dynamic_update_slice", "known", lambda x, v, i: md.dynamic_update_slice(x, v, (i, 1)), Z, PART, np.int8(1)),
    form("dynamic_index_in_dim", "keepdims", lambda x: md.dynamic_index_in_dim(x, 1, 1, keepdims=False), real(2, 3)),
    form("dynamic_update_slice", "zeros", lambda v: md.dynamic_update_slice(np.zeros((3, 2)), v, (1, 0)), real(2, 2)),
]
