"""A `shard_map` of a compiled program: what is decided once, and what runs in each call.

The first call decides how arguments enter, which program runs on this process's data, and the types of results. Each
call then takes the data out of its arguments, runs that program, and makes arrays of what comes back: without the
interpreter and the tracers by which a body runs otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.interpreter import EVALUATE, current_interpreter, running
from minidiff.core.tracer import Value
from minidiff.diagnostics.location import ASKED_FOR
from minidiff.values.aliasing import owner_of, read_only_view, writable_view
from spmd.checks.agreement import NO_CALL, checks_values, compare_arguments, due_key, is_compared, is_due
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
    sharded, written = [isinstance(x, ShardedArray) for x in args], source.overwritten
    enters = [_entry(yes, mesh, spec, k in written) for k, (yes, spec) in enumerate(zip(sharded, in_specs))]
    leaving = zip(body.out_types, params["out_specs"], places)
    leaves = [array_maker(mesh, spec, varying, t.shape, t.dtype) for t, spec, (varying, _) in leaving]
    names = {
        ASKED_FOR: {},  # errors name the user's line, not one of this function
        **{"current_interpreter": current_interpreter, "EVALUATE": EVALUATE, "checks_values": checks_values},
        **{"ShardedArray": ShardedArray, "mesh": mesh, "separate": _separate, "otherwise": otherwise},
        **{"program": source.results, "finish": mesh.ranks.finish},
        **{f"key{k}": spec.key for k, spec in enumerate(in_specs)},
        **{f"enter{k}": enter for k, enter in enumerate(enters)},
        **{f"leave{k}": leave for k, leave in enumerate(leaves)},
    }
    call, compared = params.get("call", NO_CALL), is_compared(mesh)
    if compared and all(sharded):  # their wholes; at later calls they have been computed
        compared = False
        if is_due(mesh, call, in_specs, args):
            compare_arguments(mesh, call, in_specs, args)
    elif compared:
        names["is_due"] = functools.partial(mesh.ranks.is_due, due_key(call, in_specs, args))
        names["compare"] = functools.partial(compare_arguments, mesh, call, in_specs)
    plain = [k for k, yes in enumerate(sharded) if not yes and k not in written]
    text = _source_of_call(sharded, [enter is not None for enter in enters], plain, compared, len(leaves))
    exec(compile(text, "<shard_map, compiled by minidiff>", "exec"), names)
    return names["call"]


def _source_of_call(
    sharded: Sequence[bool], enters: Sequence[bool], plain: Sequence[int], compared: bool, results: int
) -> str:
    """The source of a function that runs the program: a loop over arguments and results would take longer than it.

    `enters` says which arguments a function takes the data out of; `plain` arguments may share memory with results;
    if they are `compared`, it is at some calls.

    >>> print(_source_of_call([True, False], [False, True], [1], True, 1))
    def call(a0, a1, *, body):
        if (
            current_interpreter() is not EVALUATE
            or checks_values()
            or type(a0) is not ShardedArray or a0.mesh is not mesh or a0.spec.key != key0
            or isinstance(a1, ShardedArray)
        ):
            return otherwise([a0, a1])
        if checks_values() is None and is_due():
            compare([a0, a1])
        try:
            [r0] = program(a0.data, enter1(a1))
        except BaseException as error:
            finish(error)
            raise
        return separate([leave0(r0)], [a1])
    """
    args, outs = [f"a{k}" for k in range(len(sharded))], [f"r{k}" for k in range(results)]
    others = [
        f"type({a}) is not ShardedArray or {a}.mesh is not mesh or {a}.spec.key != key{k}"
        if sharded[k]
        else f"isinstance({a}, ShardedArray)"
        for k, a in enumerate(args)
    ]
    blocks = [f"enter{k}({a})" if enters[k] else f"{a}.data" for k, a in enumerate(args)]
    made = f"[{', '.join([f'leave{k}({r})' for k, r in enumerate(outs)])}]"
    if plain or results > 1:
        made = f"separate({made}, [{', '.join([args[k] for k in plain])}])"
    lines = [
        f"def call({', '.join([*args, '*'])}, body):",
        "    if (",
        "        current_interpreter() is not EVALUATE",
        *[f"        or {other}" for other in ["checks_values()", *others]],
        "    ):",
        f"        return otherwise([{', '.join(args)}])",
        *([f"    if checks_values() is None and is_due():\n        compare([{', '.join(args)}])"] if compared else []),
        "    try:",
        f"        [{', '.join(outs)}] = program({', '.join(blocks)})",
        "    except BaseException as error:",
        "        finish(error)",
        "        raise",
        f"    return {made}",
    ]
    return "\n".join(lines)


def blocks_given_up(sharded: Sequence[bool], params: dict) -> tuple[bool, ...]:
    """Which blocks the program may write into: of the `donated` arguments, all but those cut out of plain arrays."""
    given = zip(params.get("donated", ()), sharded, params["in_specs"])
    return tuple([yes and (is_sharded or spec.is_trivial) for yes, is_sharded, spec in given])


def _array(x: Any) -> Value:
    """An argument as an array or a NumPy scalar: the source of a program has numbers as Python writes them."""
    return x if hasattr(x, "dtype") else numpy.asarray(x)[()]


def _entry(sharded: bool, mesh: Mesh, spec: PartitionSpec, written: bool) -> Callable[[Value], Any] | None:
    """What takes this process's data out of an argument, to be `written` into if it was given up; None: it is that."""
    if sharded:
        return (lambda x: writable_view(x.data)) if written else None
    if spec.is_trivial:
        return _array
    place = mesh.ranks.place
    return lambda x: place(x := _array(x), spec.dims(x.ndim))[0]


def _separate(results: list[Value], plain: Sequence[Any]) -> list[Value]:
    """The results, where they share memory with each other or with these arguments as copies."""
    return copy_shared_results(results, {id(owner_of(x)) for x in plain if type(x) is numpy.ndarray})


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
            owner = id(owner_of(result))
            others = returned.setdefault(owner, [])
            shared = owner in owners or any(numpy.may_share_memory(result, x) for x in others)
            result = result.copy() if shared else result
            others.append(result)
        found.append(result)
    return found
