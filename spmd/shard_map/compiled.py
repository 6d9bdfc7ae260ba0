"""A `shard_map` of a compiled program: what is decided once, and what runs in each call.

The first call decides how arguments enter, which program runs on this process's data, and the types of results. Each
call then takes the data out of its arguments, runs that program, and makes arrays of what comes back: without the
interpreter and the tracers by which a body runs otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.interpreter import EVALUATE, current_interpreter, running
from minidiff.core.tracer import Value
from minidiff.values.aliasing import owner_of, read_only_view, writable_view
from spmd.checks.agreement import checks_values
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec
from spmd.shard_map.interpreter import SPMD
from spmd.sharding.sharded_array import ShardedArray, array_maker


def decide_call(args: Sequence[Value], params: dict, evaluate: Callable) -> Callable[..., list[Value]]:
    """What runs a compiled `shard_map`, on arguments that are sharded as these are.

    `evaluate(args, params)` runs it where something is not as it was, or the body is not one program.
    """
    mesh, in_specs, body = params["mesh"], params["in_specs"], params["body"]
    donated = blocks_given_up([isinstance(x, ShardedArray) for x in args], params)
    otherwise = lambda args: evaluate([*map(_array, args)], params)  # noqa: E731
    args = [*map(_array, args)]
    with running(EVALUATE):
        interpreter = SPMD(mesh, params["check_rep"], explicit=not params["auto_pbroadcast"])
        blocks = [interpreter.enter(x, spec) for x, spec in zip(args, in_specs)]
        found = interpreter.program(body, blocks, donated)
    if found is None:
        return lambda *args, body: otherwise(args)
    source, places = found
    finish, program = mesh.ranks.finish, source.results
    written = source.overwritten
    entries = [
        _entry(isinstance(x, ShardedArray), mesh, spec, k in written) for k, (x, spec) in enumerate(zip(args, in_specs))
    ]
    leaving = zip(body.out_types, params["out_specs"], places)
    exits = [array_maker(mesh, spec, held, t.shape, t.dtype) for t, spec, (held, _) in leaving]

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
        results = []
        for leave, x in zip(exits, outs):
            results.append(leave(x))
        if alone:
            return results
        kept = [x for k, x in enumerate(args) if type(x) is numpy.ndarray and k not in written]
        return copy_shared_results(results, {id(owner_of(x)) for x in kept})

    return run


def blocks_given_up(sharded: Sequence[bool], params: dict) -> tuple[bool, ...]:
    """Which blocks the program may write into: of the `donated` arguments, all but those cut out of plain arrays."""
    given = zip(params.get("donated", ()), sharded, params["in_specs"])
    return tuple([yes and (is_sharded or spec.is_trivial) for yes, is_sharded, spec in given])


def _array(x: Any) -> Value:
    """An argument as an array or a NumPy scalar: the source of a program has numbers as Python writes them."""
    return x if hasattr(x, "dtype") else numpy.asarray(x)[()]


def _entry(sharded: bool, mesh: Mesh, spec: PartitionSpec, written: bool) -> Callable[[Value], Any]:
    """What takes this process's data out of an argument, to be `written` into if it was given up.

    None if the argument is not as the first one was.
    """
    whole, place, latest = spec.is_trivial, mesh.ranks.place, spec

    def enter_data(x):
        nonlocal latest
        if type(x) is not ShardedArray or x.mesh is not mesh:
            return None
        if x.spec is not latest:
            if x.spec != spec:
                return None
            latest = x.spec  # a comparison of the same object is faster
        return writable_view(x.data) if written else x.data

    def enter(x):
        if isinstance(x, ShardedArray):
            return None
        x = _array(x)
        return x if whole else place(x, spec.dims(x.ndim))[0]

    return enter_data if sharded else enter


def copy_shared_results(results: list[Value], plain: set[int]) -> list[Value]:
    """Copy results that share memory with the user's `plain` arrays, and plain results that share it with others.

    Plain ones can be written into, so that they share none with sharded arguments.
    """
    if not plain and len(results) == 1:
        return results
    sharded = [x for x in results if isinstance(x, ShardedArray)]
    for x in sharded:
        if id(owner_of(x.data)) in plain:
            x.data = read_only_view(x.data.copy())
    owners = plain.union(id(owner_of(x.data)) for x in sharded)
    found: list[Value] = []
    returned: dict[int, list[numpy.ndarray]] = {}  # by owner: plain results, which may be parts of one bucket
    for result in results:
        if isinstance(result, numpy.ndarray):
            others = returned.setdefault(id(owner_of(result)), [])
            shared = id(owner_of(result)) in owners or any(numpy.may_share_memory(result, x) for x in others)
            result = result.copy() if shared else result
            others.append(result)
        found.append(result)
    return found
