"""Collectives over named axes: their meaning, types, transposes and backends.

Call them inside the body of a `spmd.shard_map`, over the axes of its mesh. `collectives.algorithms` builds them
from point-to-point messages; `collectives.cost` has their costs.

The help of each draws its operand, its result and its backward pass on two ranks, as in `help(collectives.psum)`.
"""

import typing as _typing

from collectives.casts import pbroadcast, pcast, pvary, reduced, unreduced
from collectives.exact import pcopies
from collectives.in_flight import InFlight, ppermute_start
from collectives.ops import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_index,
    axis_size,
    pmean,
    ppermute,
    pscatter,
    psum,
    psum_scatter,
)
from collectives.ranks import CommunicatingRanks as _Ranks
from collectives.reductions import pall, pany, pmax, pmin, pprod, preduce, pscan
from collectives.rooted import at_root, broadcast, broadcast_varying, gather, reduce, scatter
from minidiff import __version__ as __version__
from minidiff.core.ranks import install as _install
from minidiff.errors.other_libraries import module_getattr as _module_getattr
from minidiff.errors.tracebacks import hide_frames_of as _hide_frames_of

__all__ = [
    "InFlight", "all_gather", "all_gather_invariant", "all_to_all", "at_root", "axis_index", "axis_size",
    "broadcast", "broadcast_varying", "gather", "pall", "pany", "pbroadcast", "pcast", "pcopies", "pmax", "pmean",
    "pmin", "ppermute", "ppermute_start", "pprod", "preduce", "pscan", "pscatter", "psum", "psum_scatter", "pvary",
    "reduce", "reduced", "scatter", "unreduced",
]  # fmt: skip

_install(_Ranks)
_hide_frames_of(globals(), __all__)

#: Imported on first use: most programs do not need them.
_LATER = {name: f"collectives.{name}" for name in ("algorithms", "cost", "reference")}

if _typing.TYPE_CHECKING:  # let type checkers and editors find these modules
    from collectives import algorithms as algorithms
    from collectives import cost as cost
    from collectives import reference as reference
else:  # a type checker that saw __getattr__ would accept any name
    __getattr__ = _module_getattr(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted([*__all__, *_LATER])
