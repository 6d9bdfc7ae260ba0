"""Rows of `minidiff/ops/slices.py`: starts that are known, and starts that are traced."""

from typing import Any

import numpy as np

import minidiff as md
from tests.table.rows import Row, complex_, form, real

DISCRETE: set = set()

LINEAR = {
    "dynamic_slice": [(0,)],
    "dynamic_slice_in_dim": [(0,)],
    "dynamic_index_in_dim": [(0,)],
    "dynamic_update_slice": [(0, 1)],
    "dynamic_update_slice_in_dim": [(0, 1)],
    "dynamic_update_index_in_dim": [(0, 1)],
}

STARTS = (1, -1, -9, 7)


def rows(name: str, note: str, f: Any, *args: Any) -> list[Row]:
    """With starts that are known, and with ones that are arguments: `args[-1]`, integers."""
    *arrays, starts = args
    return [
        form(name, f"{note}, start={starts}", lambda *xs: f(*xs, starts), *arrays),
        form(name, f"{note}, traced start={starts}", f, *arrays, np.asarray(starts)[()]),
    ]


ROWS = [
    *(
        r
        for s in STARTS
        for r in (
            *rows("dynamic_slice_in_dim", "front", lambda x, i: md.dynamic_slice_in_dim(x, i, 2), real(4, 3), s),
            *rows("dynamic_slice_in_dim", "inner", lambda x, i: md.dynamic_slice_in_dim(x, i, 2, 1), real(2, 4, 3), s),
            *rows("dynamic_index_in_dim", "", lambda x, i: md.dynamic_index_in_dim(x, i, -1), real(2, 4), s),
            *rows(
                "dynamic_update_slice_in_dim",
                "inner",
                lambda x, v, i: md.dynamic_update_slice_in_dim(x, v, i, 1),
                *(real(2, 4, 3), real(2, 2, 3), s),
            ),
            *rows(
                "dynamic_update_index_in_dim",
                "",
                lambda x, v, i: md.dynamic_update_index_in_dim(x, v, i, 1),
                *(real(3, 4), real(3), s),
            ),
        )
    ),
    *(
        r
        for starts in ((1, 0, 2), (-1, 5, -7), (0, 0, 0))
        for sizes in ((2, 3, 2), (1, 2, 4), (3, 3, 4))
        for r in (
            *rows(
                "dynamic_slice",
                str(sizes),
                lambda x, i, n=sizes: md.dynamic_slice(x, i, n),
                *(real(3, 3, 4), starts),
            ),
            *rows("dynamic_update_slice", str(sizes), md.dynamic_update_slice, real(3, 3, 4), real(*sizes), starts),
        )
    ),
    form(
        "dynamic_slice",
        "one start known",
        lambda x, i: md.dynamic_slice(x, (1, i), (2, 2)),
        *(complex_(3, 4), np.int8(1)),
    ),
    form(
        "dynamic_update_slice",
        "one start known",
        lambda x, v, i: md.dynamic_update_slice(x, v, (i, 1)),
        *(complex_(3, 4), complex_(2, 2), np.uint8(1)),
    ),
    form("dynamic_index_in_dim", "keepdims", lambda x: md.dynamic_index_in_dim(x, 1, 1, keepdims=False), real(2, 3)),
    form(
        "dynamic_update_slice", "constants", lambda v: md.dynamic_update_slice(np.zeros((3, 2)), v, (1, 0)), real(2, 2)
    ),
]
