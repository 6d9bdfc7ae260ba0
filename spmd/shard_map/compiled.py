"""Compiled calls of `shard_map`: a plan that is made once, and executed in each call.

The first call plans how arguments enter, which program runs on this process's data, and the types of results. Each
call then takes the data out of its arguments, runs that program, and makes arrays of its results: without the
interpreter and the tracers that run other bodies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from minidiff.control_flow.dead_code import has_effects
from minidiff.core.interpreter import EVALUATE, current_interpreter, running
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.errors.location import ASKED_FOR
from minidiff.values.aliasing import writable_view
from spmd.checks.agreement import LIBRARY_CALL, checks_values, compare_arguments, due_key, is_compared, is_due
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec
from spmd.shard_map.interpreter import RankTracer
from spmd.shard_map.lowering import Variance, lower
from spmd.shard_map.sharded_bodies import ShardedBodies
from spmd.sharding.sharded_array import ShardedArray, array_maker

if TYPE_CHECKING:  # the compiler loads when something is compiled
    from minidiff.compiler.codegen import CompiledTape, Source


class CompiledBodies(ShardedBodies):
    """Run bodies and steps of loops that are compiled as programs on this process's data."""

    def run_compiled(self, tape: CompiledTape, values: Sequence[Value]) -> list[Value] | None:
        """Run a compiled body as one program; None if there is no such program."""
        if self.idle and any(map(has_effects, tape.equations)):
            return None
        compiled = self.program(tape, values)
        if compiled is None:
            return None
        source, variances = compiled
        try:
            with running(self.base):  # the remaining branches and loops are on data
                results = source.results(*[self.operand(x)[0] for x in values])
        except BaseException as error:
            self.mesh.ranks.finish(error)
            raise
        return [RankTracer(self, x, *variance) for x, variance in zip(results, variances)]

    def program(
        self, tape: CompiledTape, values: Sequence[Value], donated: tuple[bool, ...] = ()
    ) -> tuple[Source, list[Variance]] | None:
        """Return a body as one program, which may write into `donated` data, and its results' variances, or None."""
        operands = [self.operand(x) for x in values]
        states = [getattr(x, "marked", None) for x in values]
        types = tuple((numpy.shape(x), typeof(x).dtype, varying, s) for (x, varying), s in zip(operands, states))
        key = self.mesh, self.scope.typed, donated, types
        if key not in tape.lowered:
            lowered, variances = lower(self, tape, operands, states, tape.options) or (None, [])
            program = None
            if lowered is not None:
                from minidiff.compiler.codegen import Source
                from minidiff.compiler.program import plan_program

                kernels, runs = tape.options.get("kernels", True), tape.source.plan.runs
                plan = plan_program(lowered, kernels, donated=donated, fills_donated=True, runs=runs)
                program = Source(plan, tape.name, options=tape.options), variances
            tape.lowered[key] = program
        return tape.lowered[key]


def plan_call(args: Sequence[Value], params: dict, evaluate: Callable) -> Callable[..., list[Value]]:
    """Return a function that runs a compiled `shard_map` on arguments that are sharded as these are.

    It runs `evaluate(args, params)` instead if an argument is sharded in another way, under another interpreter, while
    every call compares values, or if the body is not one program.
    """
    mesh, in_specs, body = params["mesh"], params["in_specs"], params["body"]
    sharded = [isinstance(x, ShardedArray) for x in args]
    fallback = lambda args: evaluate([*map(_array, args)], params)  # noqa: E731
    args = [*map(_array, args)]
    with running(EVALUATE):
        interpreter = CompiledBodies(mesh, params["check_rep"], explicit=not params["auto_pbroadcast"])
        blocks = [interpreter.enter(x, spec) for x, spec in zip(args, in_specs)]
        compiled = interpreter.program(body, blocks, donated_blocks(sharded, params))
    if compiled is None:
        return lambda *args, body: fallback(args)
    source, variances = compiled
    overwritten = [v in source.plan.overwritten for v in source.tape.inputs]
    enters = [_entry(mesh, *each) for each in zip(sharded, in_specs, overwritten)]
    leaving = zip(body.out_types, params["out_specs"], variances)
    leaves = [
        # The program's own arrays are plain ones.
        None if spec.is_trivial and t.shape and not varying else array_maker(mesh, spec, varying, t.shape, t.dtype)
        for t, spec, (varying, _) in leaving
    ]
    names = {
        ASKED_FOR: {},  # errors name the user's line, not one of this function
        **{"current_interpreter": current_interpreter, "EVALUATE": EVALUATE, "checks_values": checks_values},
        **{"ShardedArray": ShardedArray, "ndarray": numpy.ndarray, "mesh": mesh, "fallback": fallback},
        **{"program": source.results, "finish": mesh.ranks.finish},
        **{f"key{k}": spec.key for k, spec in enumerate(in_specs)},
        **{f"spec{k}": getattr(x, "spec", None) for k, x in enumerate(args)},
        **{f"enter{k}": enter for k, enter in enumerate(enters)},
        **{f"leave{k}": leave for k, leave in enumerate(leaves)},
    }
    call, compared = params.get("call") or LIBRARY_CALL, is_compared(mesh)
    if compared and all(sharded):  # their wholes; at later calls they have been computed
        compared = False
        if is_due(mesh, call, in_specs, args):
            compare_arguments(mesh, call, in_specs, args)
    elif compared:
        names["is_due"] = functools.partial(mesh.ranks.is_due, due_key(call, in_specs, args))
        names["compare"] = functools.partial(compare_arguments, mesh, call, in_specs)
    text = _source_of_call(sharded, enters, compared, leaves)
    exec(compile(text, "<shard_map, compiled by minidiff>", "exec"), names)
    return names["call"]


def _source_of_call(sharded: Sequence[bool], enters: Sequence[Any], compared: bool, leaves: Sequence[Any]) -> str:
    """Return the source of a function that runs the program; a loop over arguments would take longer than all of it.

    `enters` has the functions that take data out of arguments, `leaves` those that make arrays of results, and None
    where there is none; if arguments are `compared`, it is at some calls. The program's results share no memory with
    arguments or each other: `optimize` inserts copies where they would.

    >>> print(_source_of_call([True, False], [None, _array], True, [_array]))
    def call(a0, a1, *, body):
        if (
            current_interpreter() is not EVALUATE
            or checks_values()
            or type(a0) is not ShardedArray or a0.mesh is not mesh or (a0.spec is not spec0 and a0.spec.key != key0)
            or isinstance(a1, ShardedArray)
        ):
            return fallback([a0, a1])
        try:
            if checks_values() is None and is_due():
                compare([a0, a1])
            [r0] = program(a0.data, a1 if type(a1) is ndarray else enter1(a1))
        except BaseException as error:
            finish(error)
            raise
        return [leave0(r0)]
    """
    args, outs = [f"a{k}" for k in range(len(sharded))], [f"r{k}" for k in range(len(leaves))]
    differs = [
        f"type({a}) is not ShardedArray or {a}.mesh is not mesh or ({a}.spec is not spec{k} and {a}.spec.key != key{k})"
        if sharded[k]
        else f"isinstance({a}, ShardedArray)"
        for k, a in enumerate(args)
    ]
    blocks = [f"enter{k}({a})" if enters[k] else f"{a}.data" for k, a in enumerate(args)]
    blocks = [f"{a} if type({a}) is ndarray else {x}" if e is _array else x for a, x, e in zip(args, blocks, enters)]
    lines = [
        f"def call({', '.join([*args, '*'])}, body):",
        "    if (",
        "        current_interpreter() is not EVALUATE",
        *[f"        or {differ}" for differ in ["checks_values()", *differs]],
        "    ):",
        f"        return fallback([{', '.join(args)}])",
        "    try:",
        *(["        if checks_values() is None and is_due():"] if compared else []),
        *([f"            compare([{', '.join(args)}])"] if compared else []),
        f"        [{', '.join(outs)}] = program({', '.join(blocks)})",
        "    except BaseException as error:",
        "        finish(error)",
        "        raise",
        f"    return [{', '.join([f'leave{k}({r})' if leaves[k] else r for k, r in enumerate(outs)])}]",
    ]
    return "\n".join(lines)


def donated_blocks(sharded: Sequence[bool], params: dict) -> tuple[bool, ...]:
    """Return whether the program may write into each block: if `donated`, and not cut out of a plain array."""
    arguments = zip(params.get("donated", ()), sharded, params["in_specs"])
    return tuple([donated and (is_sharded or spec.is_trivial) for donated, is_sharded, spec in arguments])


def _array(x: Any) -> Value:
    """Return an argument as an array or a NumPy scalar: the source of a program has numbers as Python writes them."""
    return x if hasattr(x, "dtype") else numpy.asarray(x)[()]


def _entry(mesh: Mesh, sharded: bool, spec: PartitionSpec, overwritten: bool) -> Callable[[Value], Any] | None:
    """Return a function that gets an argument's local data, to be `overwritten` if donated; None if it is `x.data`."""
    if sharded:
        return (lambda x: writable_view(x.data)) if overwritten else None
    if spec.is_trivial:
        return _array
    place = mesh.ranks.place
    return lambda x: place(x := _array(x), spec.dims(x.ndim))[0]
