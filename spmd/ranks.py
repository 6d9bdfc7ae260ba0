"""What meshes and sharded arrays do for `minidiff`: see `minidiff.core.Ranks`."""

from __future__ import annotations

import os
import warnings
from typing import Any

from collectives import ranks
from minidiff.core import current_interpreter, current_scope
from spmd.arrays.dispatch import dispatch_to_shards
from spmd.fuse_shard_maps import PASSES
from spmd.shard_map import batch_axes, forgetting


class Ranks(ranks.Ranks):
    """Axes of a mesh, over which arrays are sharded."""

    folders = (os.path.dirname(__file__),)
    passes = (PASSES, *ranks.Ranks.passes)

    dispatch = staticmethod(dispatch_to_shards)

    def warn(self, message: str, category: type[Warning]) -> None:
        scope = current_scope()
        if scope is None or scope.bottom.mesh.ranks.rank == 0:
            return super().warn(message, category)
        with warnings.catch_warnings(record=True):  # say nothing; an error, if it is filtered so, is one on all ranks
            super().warn(message, category)

    def settings(self) -> Any:
        scope = current_scope()
        return forgetting.get(), frozenset(batch_axes(current_interpreter())), scope and scope.bottom.mapped
