"""SPMD programs with named axes: one function, run on the blocks that each rank of a mesh holds."""

from minidiff.location import add_library
from spmd.agreement import check_invariant, checking
from spmd.calibrate import calibrate
from spmd.draw import visualize_sharding
from spmd.forecast import CostModel, Forecast
from spmd.inspect import communication, compare
from spmd.launch import end_job_on_exception
from spmd.mesh import Mesh, make_mesh
from spmd.partition import P, PartitionSpec
from spmd.propagation import spread as _spread  # noqa: F401  (it says what operations on sharded arrays are)
from spmd.redistribution import distribute, explain_reshard, reshard
from spmd.rewritten import rewritten
from spmd.shard_map import shard_map
from spmd.sharded_array import ShardedArray

__all__ = [
    "CostModel",
    "Forecast",
    "Mesh",
    "P",
    "PartitionSpec",
    "ShardedArray",
    "calibrate",
    "check_invariant",
    "checking",
    "communication",
    "compare",
    "distribute",
    "explain_reshard",
    "make_mesh",
    "reshard",
    "rewritten",
    "shard_map",
    "visualize_sharding",
]


def __dir__() -> list[str]:
    return sorted(__all__)


add_library(__file__)
end_job_on_exception()
