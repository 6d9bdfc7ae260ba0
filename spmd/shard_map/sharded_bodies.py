"""Bodies of `shard_map` whose arguments and results are sharded arrays."""

from __future__ import annotations

from collections.abc import Sequence

from minidiff.core.interpreter import EVALUATE, running
from minidiff.core.tracer import Tracer, Value
from spmd.mesh.specs import PartitionSpec
from spmd.shard_map.branches import BranchingBodies
from spmd.shard_map.interpreter import RankTracer
from spmd.sharding.sharded_array import ShardedArray, Sharding, array_maker, copy_shared_results


class ShardedBodies(BranchingBodies):
    """Take the blocks of sharded arguments, and return the blocks of results as sharded arrays."""

    def enter(self, x: Value, spec: PartitionSpec) -> RankTracer:
        if not isinstance(x, ShardedArray):
            return super().enter(x, spec)
        mesh = self.mesh
        if not (x.spec.key == spec.key and (x.mesh is mesh or x.mesh.is_like(mesh))):
            x = Sharding(mesh, spec).reshard(x)  # a loop's step is compiled before the shardings are known
        if not isinstance(x, ShardedArray):
            return super().enter(x, spec)
        return RankTracer(self, x.data, x.varying, self.marks_of_spec(spec))

    def leave(self, outs: Sequence[Value], specs: Sequence[PartitionSpec]) -> list[Value]:
        ranks, results = self.mesh.ranks, []
        for (data, varying), spec in zip(map(self.operand, outs), specs):
            make = array_maker(self.mesh, spec, varying, ranks.block_shape(data, varying), data.dtype)
            results.append(make(data))
        return copy_shared_results(results, self.plain)

    def _lift(self, x: Tracer) -> Value:
        if not isinstance(x, ShardedArray):
            return super()._lift(x)
        with running(EVALUATE):  # arrays that the body closes over are unmapped: every rank has the whole
            return RankTracer(self, x.type.sharding.gather(x), ())
