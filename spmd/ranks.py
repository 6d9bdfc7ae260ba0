"""What meshes and sharded arrays do for `minidiff`: see `minidiff.core.Ranks`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from collectives import ranks
from minidiff.core import Interpreter, Primitive, Value
from spmd.arrays.sharding_rules import dispatch_to_shards
from spmd.shard_map import forgetting


class Ranks(ranks.Ranks):
    """Axes of a mesh, over which arrays are sharded."""

    folders = (*ranks.Ranks.folders, os.path.dirname(__file__))

    def dispatch(self, interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
        return dispatch_to_shards(interpreter, primitive, args, params)

    def settings(self) -> Any:
        return forgetting.get()
