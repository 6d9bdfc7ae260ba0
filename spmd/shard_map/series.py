"""Taylor mode of a `shard_map`: the body takes and returns the blocks of all coefficients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from minidiff.core.tracer import Value
from minidiff.values.lists import split_list
from spmd.shard_map.operation import run_body, shard_map_p


def push_body(primitive: Any, args: Sequence[list[Value]], params: dict, push: Callable) -> list[list[Value]] | None:
    """Apply a `shard_map` to several values of each operand, such as coefficients; return None for other operations.

    `push(body, blocks)` applies the body to them: it maps lists of blocks to lists of blocks.
    """
    if primitive is not shard_map_p:
        return None
    counts: list[int] = []

    def body(*blocks: Value) -> tuple[list, tuple]:
        specs: Any = ()

        def run(*block_of_each: Value) -> list:
            nonlocal specs
            outs, specs = run_body(params, list(block_of_each))
            return outs

        outs = push(run, split_list(blocks, *map(len, args))[:-1])
        counts.extend(map(len, outs))
        return list(itertools.chain(*outs)), tuple(spec for spec, n in zip(specs, counts) for _ in range(n))

    in_specs = tuple(spec for spec, x in zip(params["in_specs"], args) for _ in x)
    results = shard_map_p._bind_body(list(itertools.chain(*args)), params, body, in_specs)
    return split_list(results, *counts)[:-1]
