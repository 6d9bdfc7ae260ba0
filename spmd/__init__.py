"""SPMD programs with named axes: one function, run on the blocks that each rank of a mesh holds."""

from spmd.inspect import communication
from spmd.launch import end_job_on_exception
from spmd.mesh import Mesh, make_mesh
from spmd.partition import P, PartitionSpec
from spmd.propagation import spread as _spread  # noqa: F401  (it says what operations on sharded arrays are)
from spmd.redistribution import distribute, explain_reshard, reshard
from spmd.shard_map import shard_map
from spmd.sharded_array import ShardedArray

__all__ = [
    "Mesh",
    "P",
    "PartitionSpec",
    "ShardedArray",
    "communication",
    "distribute",
    "explain_reshard",
    "make_mesh",
    "reshard",
    "shard_map",
]

end_job_on_exception()
