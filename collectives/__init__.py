"""Collectives over named axes: what each means, its type, its transpose, and how it runs.

They are called inside the body of a `spmd.shard_map`, which binds the axes they name.
"""

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
