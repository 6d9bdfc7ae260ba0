"""The hooks of `minidiff` that meshes and sharded arrays fill in: see `minidiff.core.ranks.Ranks`.

Sharded arrays, speed and checks of `shard_map` are installed here too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from collectives.ranks import CommunicatingRanks
from minidiff.core.interpreter import Evaluate, current_interpreter, current_scope
from minidiff.debug import CheckFinite
from spmd.arrays.dispatch import dispatch_to_shards, loop_over_blocks, map_elements
from spmd.arrays.shared_sums import share_sums
from spmd.checks import agreement
from spmd.mesh.checks import check_fits, check_variance
from spmd.mesh.mesh import launcher
from spmd.mesh.processes import MPILauncher
from spmd.shard_map import auto_axes
from spmd.shard_map.calls import hooks
from spmd.shard_map.check_finite import CheckFiniteOnRanks
from spmd.shard_map.compiled import plan_call
from spmd.shard_map.fuse_shard_maps import PASSES
from spmd.shard_map.interpreter import interpreters
from spmd.shard_map.lowering import exported_on_mesh, record_on_arrays
from spmd.shard_map.planned import PlannedBodies, adds_exactly, bind_planned, transpose_repeated
from spmd.shard_map.series import push_body
from spmd.shard_map.shard_map import batch_axes, untyped
from spmd.sharding.sharded_array import reshard_argument, with_sharding

launcher.__class__ = MPILauncher
interpreters.update({Evaluate: PlannedBodies, CheckFinite: CheckFiniteOnRanks})
hooks.plan, hooks.transpose, hooks.auto_axes = plan_call, transpose_repeated, auto_axes
hooks.reshard_argument, hooks.result_type = reshard_argument, with_sharding
hooks.check_fits, hooks.check_variance = check_fits, check_variance
agreement.install(hooks)


class ShardingRanks(CommunicatingRanks):
    """Axes of a mesh, over which arrays are sharded."""

    folders = (os.path.dirname(__file__),)
    passes: Sequence[Any] = (PASSES, *CommunicatingRanks.passes)

    bind = staticmethod(bind_planned)
    dispatch = staticmethod(dispatch_to_shards)
    map_elements = staticmethod(map_elements)
    loop_over_blocks = staticmethod(loop_over_blocks)
    share_sums = staticmethod(share_sums)
    exported = staticmethod(exported_on_mesh)
    record_whole = staticmethod(record_on_arrays)
    push_body = staticmethod(push_body)

    def warn(self, message: str, category: type[Warning]) -> None:
        scope = current_scope()
        if scope is None or scope.bottom.mesh.ranks.rank == 0:
            return super().warn(message, category)
        with warnings.catch_warnings(record=True):  # say nothing; an error, if it is filtered so, is one on all ranks
            super().warn(message, category)

    def settings(self) -> Any:
        scope = current_scope()
        in_body = scope and (scope.bottom.mapped, adds_exactly(scope))
        return untyped.get(), batch_axes(current_interpreter()), in_body
