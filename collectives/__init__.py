"""Collectives over named axes: what each means, its type, its transpose, and how it runs.

They are called inside the body of a `spmd.shard_map`, which binds the axes they name. How they are made of messages is
in `collectives.algorithms`, what they cost in `collectives.cost`.
"""

import importlib as _importlib
import typing as _typing

from collectives.ops import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pscatter,
    psum,
    psum_scatter,
)
from collectives.rooted import at_root, broadcast, broadcast_varying, gather, reduce, scatter
from minidiff.location import add_library

__all__ = [
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "at_root",
    "axis_index",
    "axis_size",
    "broadcast",
    "broadcast_varying",
    "gather",
    "pbroadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pscatter",
    "psum",
    "psum_scatter",
    "reduce",
    "scatter",
]

add_library(__file__)

_LATER = ("algorithms", "cost", "reference")  # modules that most programs do without

if _typing.TYPE_CHECKING:  # what type checkers and editors know of these
    from collectives import algorithms as algorithms
    from collectives import cost as cost
    from collectives import reference as reference
else:  # to them it would say that there is every name

    def __getattr__(name: str) -> _typing.Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_LATER])
