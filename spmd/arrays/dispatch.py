"""Operations on sharded arrays: each runs as a `shard_map` of itself.

The body of the `shard_map` follows the operation's plan (`sharding_rules.py`): it reshards blocks, computes and
reduces. So it is typed, counted and differentiated like any other. Its transpose gives each operand a cotangent with
the operand's sharding.

A recorded loop is one `shard_map` of the loop, if each operation of its step takes its operands as they are split, so
that nothing is needed between them. A value that the loop does not change is then a constant of a loop in a body: its
cotangent is summed once, after the loop (`collectives/passes/hoist_pbroadcasts.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from minidiff.compiler.simplify import key_part
from minidiff.control_flow.checkpoint import Checkpoint
from minidiff.control_flow.cond import Cond
from minidiff.control_flow.dead_code import has_effects
from minidiff.control_flow.loops import Scan
from minidiff.control_flow.partial_eval import SCANNED, Operand, TracedBody, cast_to_types, interpreters
from minidiff.core.forward import JVP
from minidiff.core.interpreter import (
    EVALUATE,
    Evaluate,
    Interpreter,
    current_interpreter,
    current_scope,
    running,
    transforming,
)
from minidiff.core.primitive import Primitive
from minidiff.core.reverse import Linearize
from minidiff.core.tape import Equation, Stage, Tape, evaluate_equation, read, tapes_of
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import as_plain_operand, typeof
from minidiff.core.vmap import Batch, BatchTracer
from minidiff.errors import LeakedTracerError, leak_message
from minidiff.values.dtypes import is_scalar_constant
from spmd.arrays.reshard import redistribute
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import WHOLE, PartitionSpec, block_type, part_count
from spmd.shard_map.operation import shard_map_p, typed_params
from spmd.shard_map.planned import linearize_repeated, run_repeated
from spmd.sharding.sharded_array import ShardedArray, reshard_p
from spmd.sharding.sharding_rules import BlockPlan, plan_of, with_counted


def dispatch_to_shards(interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
    """Run an operation on sharded operands as a `shard_map` of it, which is compiled if it repeats.

    Returns None if no operand is sharded.
    """
    if interpreter.scope is not None:
        return None
    forward = interpreter if isinstance(interpreter, JVP) and type(interpreter.below) is Linearize else None
    values = forward.split(args)[0] if forward else args
    mesh = next((x.mesh for x in values if type(x) is ShardedArray), None)
    bottom = forward.below.below if forward else interpreter
    is_plain = primitive.shape_rule is not None and not primitive.has_effect and primitive is not reshard_p
    if mesh is None or bottom is not EVALUATE or not is_plain:
        return _dispatch(interpreter, primitive, args, params)

    params = with_counted(primitive, values, params)

    def run(*operands: Value) -> Sequence[Value]:
        out = _dispatch(current_interpreter(), primitive, operands, params)
        return () if out is None else out if primitive.multiple_results else [out]

    key = primitive, key_part(params)
    with running(EVALUATE):  # even if operands without tangents have come here from an interpreter above
        if forward:
            outs: Sequence[Value] = linearize_repeated(mesh, key, run, forward, list(map(as_plain_operand, args)))
        else:
            outs, _ = run_repeated(mesh, key, lambda *operands: (run(*operands), run), args)
    return outs if primitive.multiple_results else outs[0] if outs else None


def _dispatch(interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
    """Run an operation on sharded operands as a `shard_map` of it.

    Returns None if no operand is sharded. Operands on another mesh than that of the first sharded one are gathered.
    Raises LeakedTracerError for tracers of a transformation that has ended.
    """
    shardings = [typeof(x).sharding if isinstance(x, Tracer) else None for x in args]
    sharded = [sharding for sharding in shardings if sharding is not None]
    if any(sharding.is_element for sharding in sharded) or (
        (sharded or primitive is reshard_p) and _is_of_element(interpreter)
    ):
        return None  # `vmap`, beneath, runs it on all elements at once
    if primitive is reshard_p:  # its operand was found not to be batched
        with running(interpreter):
            return redistribute(*args, **params)
    if primitive.has_effect and not isinstance(interpreter, Evaluate):
        return None
    if isinstance(interpreter, Evaluate):
        for x in args:
            if isinstance(x, Tracer) and not isinstance(x, ShardedArray):
                raise LeakedTracerError(leak_message(x))
        if primitive.has_effect:  # it sees sharded arrays as the user does
            return primitive.impl(*args, **params)
    if not sharded:
        return None
    mesh = sharded[0].mesh
    if not all(other.mesh.is_like(mesh) for other in sharded):
        on_mesh = [t is None or t.mesh.is_like(mesh) for t in shardings]
        with running(interpreter):
            args = [x if is_like or t is None else t.gather(x) for x, t, is_like in zip(args, shardings, on_mesh)]
        shardings = [t if is_like else None for t, is_like in zip(shardings, on_mesh)]
    specs = [WHOLE if sharding is None else sharding.spec for sharding in shardings]
    dims = [spec.dims(typeof(x).ndim) for spec, x in zip(specs, args)]
    plan = plan_of(primitive, args, dims, params, mesh.shape)
    if plan.combine in ("max", "min") and isinstance(interpreter, JVP):
        return None  # the derivative depends on the whole result
    with running(interpreter):
        if plan.decomposed:
            return primitive.decomposed(*args, **params)
        return _map_over_shards(primitive, args, mesh, specs, plan)


def _is_of_element(interpreter: Interpreter) -> bool:
    """Whether the interpreter records the body of a loop, or a branch, for the elements of a batch."""
    return isinstance(interpreter, Stage) and any(isinstance(x, Batch) for x in interpreters(interpreter))


def _map_over_shards(
    primitive: Primitive, args: Sequence[Value], mesh: Mesh, specs: Sequence[PartitionSpec], plan: BlockPlan
) -> Any:
    """Run the operation as a `shard_map` with its arguments' specs as `in_specs`."""
    arrays = [i for i, x in enumerate(args) if not is_scalar_constant(x)]

    def body(*blocks: Value) -> tuple:
        current_scope().function = primitive.name
        values = list(args)
        for i, block in zip(arrays, blocks):
            values[i] = block
        return plan.on_blocks(values), plan.out_specs

    in_specs = tuple(specs[i] for i in arrays)
    results = shard_map_p.bind(*[args[i] for i in arrays], body=body, in_specs=in_specs, **typed_params(mesh))
    return results if primitive.multiple_results else results[0]


def map_elements(batch: Batch, args: Sequence[Value], run: Callable) -> list[Value] | None:
    """Apply `run` to the elements of a batch that is split over ranks, as a `shard_map`: each rank to its own elements.

    Elements are independent, so nothing is sent. Returns None if the batch is not split, or if elements or other
    arguments are sharded themselves.
    """
    batched = [batch.owns(x) for x in args]
    values = [batch.in_front(x) for x in args]
    shardings = [typeof(x).sharding if isinstance(x, Tracer) else None for x in values]
    first = next((t for t, b in zip(shardings, batched) if b and t is not None), None)
    if first is None or batch.below.scope is not None:
        return None
    mesh, axes = first.mesh, first.spec.dims(1)[0]
    whole_elements = [
        t is None or (b and not t.is_element and t.of_part(1) is None) for t, b in zip(shardings, batched)
    ]
    if not axes or not all(whole_elements):
        return None
    size, out_batched = batch.size_of_batch // part_count(axes, mesh.shape), list[bool]()
    part = PartitionSpec.of_dims((axes,))

    def body(*blocks: Value) -> tuple:
        inside = Batch(current_interpreter(), size, outer=batch)
        inside.is_block = True
        with transforming(inside):
            outs = run(*[BatchTracer(inside, x, 0) if b else x for x, b in zip(blocks, batched)])
        out_batched[:] = map(inside.owns, outs)
        return list(map(inside.in_front, outs)), tuple([part if b else WHOLE for b in out_batched])

    in_specs = tuple([part if b else WHOLE for b in batched])
    outs = shard_map_p.bind(*values, body=body, in_specs=in_specs, **typed_params(mesh))
    return [BatchTracer(batch, x, 0) if b else x for x, b in zip(outs, out_batched)]


# ---------------------------------------------------------------- loops whose steps leave blocks where they are


def loop_over_blocks(loop: Scan, args: Sequence[Value], params: dict) -> list[Value] | None:
    """Run a scan over sharded arrays as a `shard_map` of it; return None if its step has to move blocks."""
    body, carried = params["body"], slice(params["consts"], params["consts"] + params["carry"])
    mesh = next((v.type.sharding.mesh for v in body.inputs if v.type.sharding is not None), None)
    interpreter = current_interpreter()
    if mesh is None or interpreter.scope is not None or any(isinstance(x, Batch) for x in interpreters(interpreter)):
        return None
    (groups, results), (specs, out_specs) = loop.groups(params), _specs_of(body)
    if specs[carried] != out_specs[: params["carry"]] or not _keeps_blocks(body, mesh):
        return None

    def run(*blocks: Value) -> tuple:
        operands = list(map(Operand, blocks, groups))
        return loop.rebind([], [_on_blocks(body, mesh)], operands, results, params), _stacked(out_specs, results)

    return shard_map_p.bind(*args, body=run, in_specs=_stacked(specs, groups), **typed_params(mesh))


def _specs_of(tape: Tape | Equation) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
    specs = [[t.sharding.spec if t.sharding else WHOLE for t in map(typeof, x)] for x in (tape.inputs, tape.outputs)]
    return specs[0], specs[1]


def _stacked(specs: Sequence[PartitionSpec], groups: Sequence[int]) -> tuple[PartitionSpec, ...]:
    return tuple([spec.batched() if group == SCANNED else spec for spec, group in zip(specs, groups)])


def _keeps_blocks(tape: Tape, mesh: Mesh) -> bool:
    """Return whether all operations take blocks on this mesh, as they are, of arrays that are not partial sums."""
    values = itertools.chain(tape.inputs, *[eqn.outputs for eqn in tape.equations])
    shardings = [v.type.sharding for v in values if v.type.sharding is not None]
    are_split = all(s.mesh is mesh and not (s.is_element or s.spec.unreduced or s.spec.reduced) for s in shardings)
    return are_split and all(_takes_blocks(eqn, mesh) for eqn in tape.equations)


def _takes_blocks(eqn: Equation, mesh: Mesh) -> bool:
    specs, out_specs = _specs_of(eqn)
    if has_effects(eqn):
        return False
    if eqn.primitive is shard_map_p:
        is_typed = all(eqn.params[name] == value for name, value in typed_params(mesh).items())
        return is_typed and [*eqn.params["in_specs"]] == specs
    if isinstance(eqn.primitive, Cond):
        specs = specs[1:]
    if isinstance(eqn.primitive, (Cond, Checkpoint)):
        return all(_specs_of(t) == (specs, out_specs) and _keeps_blocks(t, mesh) for t in tapes_of(eqn.params))
    return all(spec is WHOLE for spec in (*specs, *out_specs))


def _on_blocks(tape: Tape, mesh: Mesh) -> tuple[Tape, list[Value]]:
    """Return the closed tape on blocks, in the body of a `shard_map`."""
    types, out_types = (
        [block_type(typeof(x), spec, mesh.shape) for x, spec in zip(values, specs)]
        for values, specs in zip((tape.inputs, tape.outputs), _specs_of(tape))
    )
    traced_body = TracedBody(functools.partial(_run_on_blocks, tape, mesh), types)
    return traced_body.close(lambda outs: cast_to_types(outs, out_types))


def _run_on_blocks(tape: Tape, mesh: Mesh, *blocks: Value) -> list[Value]:
    env: dict[Any, Value] = dict(zip(tape.inputs, blocks))
    for eqn in tape.equations:
        values = [read(env, a) for a in eqn.inputs]
        if eqn.primitive is shard_map_p:
            body = eqn.params["body"]
            env.update(zip(eqn.outputs, body(*cast_to_types(values, body.in_types))))
        elif isinstance(eqn.primitive, Cond):
            branches = {name: _on_blocks(branch, mesh) for name, branch in eqn.params.items()}
            env.update(zip(eqn.outputs, eqn.primitive.choose_from(values[0], branches, values[1:])))
        elif isinstance(eqn.primitive, Checkpoint):
            body = functools.partial(_run_on_blocks, eqn.params["body"], mesh)
            env.update(zip(eqn.outputs, eqn.primitive.bind(*values, **{**eqn.params, "body": body})))
        else:
            evaluate_equation(eqn, env)
    return [read(env, a) for a in tape.outputs]
