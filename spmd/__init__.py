"""SPMD programs: one function, run on every rank's blocks of its arguments."""

import typing as _typing

from minidiff import __version__ as __version__
from minidiff.core.ranks import install as _install
from minidiff.errors.other_libraries import imports_at_first_use as _imports_at_first_use
from minidiff.errors.other_libraries import module_getattr as _module_getattr
from minidiff.errors.tracebacks import hide_frames_of as _hide_frames_of
from spmd.arrays.from_local import from_local
from spmd.arrays.reshard import distribute, explain_reshard, gather, pad, reshard, spec_of
from spmd.checks.agreement import check_invariant, checking
from spmd.halo import halo
from spmd.mesh.launch import end_job_on_exception
from spmd.mesh.mesh import Mesh, make_mesh
from spmd.mesh.processes import barrier, process_count, process_index
from spmd.mesh.specs import P, PartitionSpec
from spmd.random import initialize, local_block
from spmd.ranks import ShardingRanks as _Ranks
from spmd.shard_map.shard_map import shard_map
from spmd.sharding.sharded_array import ShardedArray

__all__ = [
    "CostModel",
    "Forecast",
    "Mesh",
    "P",
    "PartitionSpec",
    "ShardedArray",
    "barrier",
    "calibrate",
    "check_invariant",
    "checking",
    "communication",
    "compare",
    "distribute",
    "explain_reshard",
    "explore",
    "from_local",
    "gather",
    "halo",
    "initialize",
    "local_block",
    "make_mesh",
    "memory",
    "pad",
    "plan",
    "predict",
    "process_count",
    "process_index",
    "reshard",
    "rewritten",
    "shard_map",
    "show_schedule",
    "spec_of",
    "speed_up",
    "timeline",
    "visualize_sharding",
]


_MOVED = {name: f"spmd.examples.placement.{name}" for name in ("list_schedule", "partition_tape")}

_LATER, _NAMES = _imports_at_first_use(__name__)

if _typing.TYPE_CHECKING:  # imported at first use: many ranks that start together share few processors
    from spmd import checkpoint as checkpoint
    from spmd import data as data
    from spmd import examples as examples
    from spmd import machines as machines
    from spmd import parallel as parallel
    from spmd import pipeline as pipeline
    from spmd.pipeline.pictures import show_schedule
    from spmd.prices.calibrate import calibrate
    from spmd.prices.compiled_tape import rewritten
    from spmd.prices.forecast import CostModel, Forecast
    from spmd.report.communication import communication, compare
    from spmd.report.draw import visualize_sharding
    from spmd.report.explore import explore
    from spmd.report.memory import memory
    from spmd.report.plan import plan
    from spmd.report.predict import predict, speed_up
    from spmd.report.timeline import timeline
else:  # a type checker that saw __getattr__ would accept any name
    __getattr__ = _module_getattr(__name__, _LATER, _NAMES, _MOVED)


def __dir__() -> list[str]:
    return sorted([*__all__, *_LATER])


_install(_Ranks)
_hide_frames_of(globals(), [name for name in __all__ if name not in _NAMES])
end_job_on_exception()
