"""A `shard_map` of a compiled program: what is decided once, and what runs in each call.

The first call decides how arguments enter, which program runs on this process's data, and the types of results. Each
call then takes the data out of its arguments, runs that program, and makes arrays of what comes back: without the
interpreter and the tracers by which a body runs otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from collectives.backends.base import Axes, Backend
from minidiff.core.interpreter import EVALUATE, current_interpreter, running
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray
from minidiff.values.aliasing import owner_of, read_only_view
from spmd.checks.agreement import checks_values
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec, global_type
from spmd.shard_map.interpreter import SPMD
from spmd.sharding.sharded_array import ShardedArray, with_sharding


def decide_call(args: Sequence[Value], params: dict, evaluate: Callable) -> Callable[..., list[Value]]:
    """What runs a compiled `shard_map`, on arguments that are sharded as these are.

    `evaluate(args, params)` runs it where something is not as it was, or the body is not one program.
    """
    mesh, in_specs, body = params["mesh"], params["in_specs"], params["body"]
    otherwise = lambda args: evaluate([*map(_array, args)], params)  # noqa: E731
    args = [*map(_array, args)]
    with running(EVALUATE):
        interpreter = SPMD(mesh, params["check_rep"], explicit=not params["auto_pbroadcast"])
        blocks = [interpreter.enter(x, spec) for x, spec in zip(args, in_specs)]
        found = interpreter.program(body, blocks)
    if found is None:
        return lambda *args, body: otherwise(args)
    source, places = found
    finish, program = mesh.ranks.finish, source.results
    entries = [_entry(isinstance(x, ShardedArray), mesh, spec) for x, spec in zip(args, in_specs)]
    leaving = zip(body.out_types, params["out_specs"], places)
    exits = [_exit(ShapedArray(t.shape, t.dtype), mesh, spec, held) for t, spec, (held, _) in leaving]

    #: Whether the result can share memory with sharded arguments alone, whose blocks are read-only.
    alone = len(exits) == 1 and all(isinstance(x, ShardedArray) for x in args)

    def run(*args, body):
        if current_interpreter() is not EVALUATE or checks_values():
            return otherwise(args)
        blocks = []
        for enter, x in zip(entries, args):
            block = enter(x)
            if block is None:
                return otherwise(args)
            blocks.append(block)
        try:
            outs = program(*blocks)
        except BaseException:
            finish()
            raise
        results = [leave(x) for leave, x in zip(exits, outs)]
        if alone:
            return results
        return copy_shared_results(results, {id(owner_of(x)) for x in args if type(x) is numpy.ndarray})

    return run


def _array(x: Any) -> Value:
    """An argument as an array or a NumPy scalar: the source of a program has numbers as Python writes them."""
    return x if hasattr(x, "dtype") else numpy.asarray(x)[()]


def _entry(sharded: bool, mesh: Mesh, spec: PartitionSpec) -> Callable[[Value], Any]:
    """What takes this process's data out of an argument; None if the argument is not as the first one was."""
    if sharded:
        return lambda x: x.data if type(x) is ShardedArray and x.mesh is mesh and x.spec == spec else None
    whole, place = spec.is_trivial, mesh.ranks.place

    def enter(x):
        if isinstance(x, ShardedArray):
            return None
        x = _array(x)
        return x if whole else place(x, spec.dims(x.ndim))[0]

    return enter


def _exit(block: ShapedArray, mesh: Mesh, spec: PartitionSpec, held: Axes) -> Callable[[Any], Value]:
    """What makes a result, plain or sharded, of data that varies along the axes `held`."""
    ranks: Backend = mesh.ranks
    wanted = ranks.sort_axes(spec.held)
    if spec.is_trivial:
        leave: Callable[[Any], Value] = _whole
    else:
        t = with_sharding(global_type(block, spec, mesh.shape), mesh, spec)
        leave = lambda x: ShardedArray.of_type(t, x)  # noqa: E731
    return leave if held == wanted else lambda x: leave(ranks.reshard_data(x, held, wanted))


def _whole(x: Any) -> Value:
    """A plain result: a NumPy scalar, whichever backend ran, or an array that may be written into."""
    return x[()] if x.ndim == 0 else x if x.flags.writeable else x.copy()


def copy_shared_results(results: list[Value], plain: set[int]) -> list[Value]:
    """Copy results that share memory with the user's `plain` arrays, and plain ones that share it with sharded ones."""
    sharded = [x for x in results if isinstance(x, ShardedArray)]
    for x in sharded:
        if id(owner_of(x.data)) in plain:
            x.data = read_only_view(x.data.copy())
    owners = plain.union(id(owner_of(x.data)) for x in sharded)
    shared = lambda x: not x.flags.writeable or id(owner_of(x)) in owners  # noqa: E731
    return [x.copy() if isinstance(x, numpy.ndarray) and shared(x) else x for x in results]
