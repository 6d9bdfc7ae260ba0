"""shard_map as an operation, whose parameter is a body: a function of blocks.

It has the same rules as any other operation:

========== =====================================================================================
evaluate   split the inputs by `in_specs`, run the body on the ranks, assemble by `out_specs`
jvp        the body's jvp; the tangents have the specs of their primals
linearize  the body linearized; what the linear part needs (residuals) stays on its ranks
transpose  the body's linear tape transposed, input and output specs swapped
batch      the body vectorized, with one more dimension in every spec
stage      the body recorded on its own tape
========== =====================================================================================

Types say exactly where values may differ from rank to rank, so values need no correction where they enter and leave:
an unmapped argument is invariant, and so is its cotangent. Without types (`check_rep=False`) the variance is not known.
Transposition then divides cotangents on entry and sums them on exit: the recipe of the JEP's problem statement, kept
for comparison.

A result may be unreduced: `out_specs=P(unreduced={'i'})`. Its cotangent enters as a reduced argument, which needs no
communication. `P(sum='i')` is the same, followed by the sum, which is another operation.

A body returns its results *and their specs*: the number of residuals is known only after it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives.ops import untyped_psum_p
from minidiff.control_flow.bodies import HigherOrder
from minidiff.control_flow.dead_code import has_effects, with_used_results
from minidiff.core.forward import JVP
from minidiff.core.interpreter import (
    EVALUATE,
    Interpreter,
    current_interpreter,
    running,
    transforming,
)
from minidiff.core.ranks import Scope
from minidiff.core.reverse import Linearize, extract_linear_part, run_backward_pass
from minidiff.core.tape import Equation, Stage, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.core.vmap import Batch, BatchTracer
from minidiff.errors import LeakedTracerError, leak_message
from minidiff.ops.base import Specialized
from minidiff.ops.elementwise import divide
from minidiff.values.lists import positions, scatter, select, split_list
from minidiff.values.settings import restores_settings
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import WHOLE, P, PartitionSpec, axes_of_entry, block_type, global_type
from spmd.shard_map.calls import hooks
from spmd.shard_map.interpreter import axes_and_size, body_interpreter
from spmd.shard_map.residuals import LinearBody, Specs

Body = Callable[..., tuple[list, Specs]]  # blocks -> (results, their specs)


class StageBody(Stage):
    """Record the tape of a body; values that the body closes over become inputs."""

    base = None  # nothing runs

    def __init__(self, outer: Stage, mesh: Mesh, scope: Scope):
        super().__init__(None, outer)
        self.mesh = mesh
        self.scope = scope
        self.scope.bottom = self
        self.monitor.eager = outer.monitor.eager
        self.mapped: tuple[str, ...] = ()  # the axes that the body maps over

    def _lift(self, x: Tracer) -> Value:
        x = self.outer.lift(x)
        if x.interpreter.ended:
            raise LeakedTracerError(leak_message(x))
        return self.lift_outer(x)


class ShardMap(HigherOrder, Specialized):
    """The `shard_map` operation.

    Parameters: `body`, a Body or a Tape; `mesh`; `in_specs`; `out_specs` (if the body is a Tape); `check_rep`,
    `auto_pbroadcast`; `call`, the description of a user's call: see `calls.py`.
    """

    commutes = ("in_specs",)

    def bind(self, *args: Value, **params) -> list[Value]:
        """Apply the operation, resharding sharded arguments to their specs first."""
        mesh, call = params["mesh"], params.get("call")
        if call is not None and current_interpreter() is EVALUATE:
            hooks.compare_call(mesh, call)  # before anything is resharded
        return super().bind(
            *[hooks.reshard_argument(x, mesh, spec) for x, spec in zip(args, params["in_specs"])], **params
        )

    # ------------------------------------------------ running

    @restores_settings
    def evaluate(self, args: Sequence[Value], params: dict) -> list[Value]:
        mesh, in_specs, call = params["mesh"], params["in_specs"], params.get("call")
        interpreter = body_interpreter(params)
        try:
            if call is not None:
                hooks.compare_call(mesh, call)
            compare_constant = hooks.compare_arguments(args, params)
            blocks = list(map(interpreter.enter, args, in_specs))
            interpreter.arguments = [*zip(blocks, in_specs)]
            interpreter.compare_constant = compare_constant  # arguments, which enter as plain operands, are compared
            with transforming(interpreter):
                outs, out_specs = run_body(params, blocks)
        except BaseException as error:
            mesh.ranks.finish(error)
            raise
        finally:
            interpreter.arguments = ()  # which refer to it
        mesh.ranks.finish()  # collectives that were started and never waited for
        if not params["check_rep"]:
            hooks.compare_results(interpreter, outs, out_specs)
        return interpreter.leave(outs, out_specs)

    def specialize(self, operands: Sequence[Value], params: dict) -> Callable[..., list[Value]]:
        """Return the function that runs it in a compiled program."""
        if (call := params.get("call")) is not None:
            hooks.compare_call(params["mesh"], call)
        return hooks.plan(operands, params, self.evaluate)

    # ------------------------------------------------ forward mode

    def jvp_body(self, outside: JVP, args: Sequence[Value], params: dict) -> list[Value]:
        (primals, tangents), in_specs = outside.split(args), params["in_specs"]
        active, out_active = [t is not None for t in tangents], []

        def body(*blocks):
            inside = type(outside)(current_interpreter(), outer=outside)
            block_primals, block_tangents = split_list(blocks, len(args))
            with transforming(inside):
                outs, specs = run_body(params, list(map(inside.join, block_primals, scatter(block_tangents, active))))
            out_primals, out_tangents = inside.split(outs)
            out_active.extend(t is not None for t in out_tangents)
            return [*out_primals, *select(out_tangents, out_active)], (*specs, *select(specs, out_active))

        specs = (*in_specs, *select(in_specs, active))
        results = self._bind_body([*primals, *select(tangents, active)], params, body, specs)
        out_primals, out_tangents = split_list(results, len(out_active))
        return list(map(outside.join, out_primals, scatter(out_tangents, out_active)))

    # ------------------------------------------------ reverse mode

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        """Run the known part; record the linear part as one linear equation."""
        mesh, in_specs, typed = params["mesh"], params["in_specs"], params["check_rep"]
        linear = [outside.owns(x) for x in args]
        known = [not is_linear for is_linear in linear]
        ran: LinearBody

        def body(*blocks):
            nonlocal ran
            inside = Linearize(current_interpreter(), outer=outside)
            values = scatter(blocks, known)
            for i in positions(linear):
                values[i] = inside.new_input(block_type(args[i].type, in_specs[i], mesh.shape, typed))
            with transforming(inside):
                outs, specs = run_body(params, values)
                arguments = zip(select(args, known), select(in_specs, known))
                ran = LinearBody(inside, outs, specs, dict(zip(map(id, blocks), arguments)))
            return ran.results, ran.result_specs

        results = self._bind_body(select(args, known), params, body, tuple(select(in_specs, known)))
        known_outs, residual_values = split_list(results, ran.linear.count(False))
        linear_outs: list[Value] = []
        if any(ran.linear):
            residuals, residual_specs = ran.residuals(residual_values)
            captured = _closed_over_arguments(outside, ran.captured, mesh)
            where = {
                **_mesh_params(params, linear=True),
                "in_specs": (*residual_specs, *select(in_specs, linear), *[WHOLE] * len(captured)),
                "out_specs": ran.linear_specs,
            }
            operands = [*residuals, *select(args, linear), *captured]
            linear_outs = outside.record(self, operands, {**where, "body": ran.tape})
        outs = iter(known_outs), iter(linear_outs)
        return [next(outs[is_linear]) for is_linear in ran.linear]

    def transpose(self, cts: Sequence[Value | None], operands: Sequence[Any], params: dict) -> list[Value | None]:
        return hooks.transpose(self.transpose_body, cts, operands, params)

    def transpose_body(self, cts: Sequence[Value | None], operands: Sequence[Any], params: dict) -> list[Value | None]:
        """Bind the operation with the transpose of its linear body."""
        mesh, in_specs, out_specs = params["mesh"], params["in_specs"], params["out_specs"]
        linear = [isinstance(x, ShapedArray) for x in operands]
        known, has_cotangent = [not is_linear for is_linear in linear], [ct is not None for ct in cts]
        is_nonzero: list[bool] = []

        def body(*blocks):
            values, block_cts = split_list(blocks, sum(known))
            tape = extract_linear_part(params["body"], linear, scatter(values, known))
            if not params["check_rep"]:
                block_cts = [_unscale(ct, spec, mesh) for ct, spec in zip(block_cts, select(out_specs, has_cotangent))]
            in_cts = run_backward_pass(tape, scatter(block_cts, has_cotangent), is_whole=True)
            is_nonzero.extend(ct is not None for ct in in_cts)
            in_cts, specs = select(in_cts, is_nonzero), select(select(in_specs, linear), is_nonzero)
            if not params["check_rep"]:
                in_cts = [_sum_unmapped(ct, spec, mesh) for ct, spec in zip(in_cts, specs)]
            return in_cts, tuple(spec.transposed() for spec in specs)

        specs = (*select(in_specs, known), *[spec.transposed() for spec in select(out_specs, has_cotangent)])
        operands = [*select(operands, known), *select(cts, has_cotangent)]
        results = self.bind(*operands, body=body, in_specs=specs, **_mesh_params(params, linear=True))
        return scatter(scatter(results, is_nonzero), linear)

    # ------------------------------------------------ vmap

    def batch_body(self, outside: Batch, args: Sequence[Value], params: dict) -> list[Value]:
        in_specs, batched = params["in_specs"], [outside.owns(x) for x in args]
        axes, size = axes_of_entry(outside.spmd_axis_name), outside.size_of_batch
        out_batched: list[bool] = []

        def body(*blocks):
            inside = Batch(current_interpreter(), size, outer=outside)
            with transforming(inside):
                outs, specs = run_body(params, [BatchTracer(inside, x, 0) if b else x for x, b in zip(blocks, batched)])
            out_batched.extend(map(inside.owns, outs))
            results = [inside.in_front(x) for x in outs]
            if axes:
                hooks.auto_axes.check_splits_batch(axes, specs, size, params)
            return results, tuple(s.batched() if b else s for s, b in zip(specs, out_batched))

        if axes:  # elements are whole along these axes, and the batch is split along them
            hooks.auto_axes.check_splits_batch(axes, in_specs, size, params)
            body = hooks.auto_axes.with_auto_axes(body, axes, [P(axes) if b else P() for b in batched])
        specs = tuple(s.batched(axes) if b else s for s, b in zip(in_specs, batched))
        results = self._bind_body([outside.in_front(x) for x in args], params, body, specs)
        return [BatchTracer(outside, x, 0) if b else x for x, b in zip(results, out_batched)]

    # ------------------------------------------------ tapes

    def stage_body(self, outside: Stage, args: Sequence[Value], params: dict) -> list[Value]:
        mesh, in_specs, typed = params["mesh"], params["in_specs"], params["check_rep"]
        inside = StageBody(outside, mesh, self.body_scope(params))
        blocks = [inside.new_input(block_type(typeof(x), spec, mesh.shape, typed)) for x, spec in zip(args, in_specs)]
        with transforming(inside):
            outs, out_specs = run_body(params, blocks)
        if not (outs or any(map(has_effects, inside.equations))):
            return []
        tape, constants = inside.tape(outs).close()
        return outside.record(
            self,
            [*constants, *args, *_closed_over_arguments(outside, inside.captured, mesh)],
            {
                **_mesh_params(params),
                "in_specs": (*[_CLOSED_OVER] * len(constants), *in_specs, *[_CLOSED_OVER] * len(inside.captured)),
                "out_specs": tuple(out_specs),
                "body": tape,
            },
        )

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        mesh, typed, tape = params["mesh"], params["check_rep"], params["body"]
        blocks = [block_type(typeof(t), spec, mesh.shape, typed) for t, spec in zip(types, params["in_specs"])]
        self._check_operands(blocks, tape.in_types)
        out_specs = params["out_specs"]
        if len(tape.out_types) != len(out_specs):
            raise TypeError(f"shard_map: its body returns {tape.out_types}, but the out_specs are {out_specs}")
        wholes = [global_type(t, spec, mesh.shape) for t, spec in zip(tape.out_types, out_specs)]
        return [hooks.result_type(t, mesh, spec) for t, spec in zip(wholes, out_specs)]

    def check_fits(self, types: Sequence[ShapedArray], params: dict, scope: Scope | None) -> None:
        hooks.check_fits(types, params)

    def without_unused_results(self, eqn: Equation, used: Sequence[bool]) -> Equation:
        """The shard_map with its used results only, and the arguments they need."""
        return with_used_results(eqn, used, ("in_specs",), ("out_specs",))

    def check_variance(self, types: Sequence[ShapedArray], params: dict) -> None:
        hooks.check_variance(params)

    def show_params(self, params: dict) -> str:
        mesh = ", ".join(f"{a}: {n}" for a, n in params["mesh"].shape.items())
        shown = f"mesh=({mesh}), in_specs={params['in_specs']}, out_specs={params['out_specs']}"
        return ", ".join([shown, *[f"{name}=False" for name in ("check_rep", "auto_pbroadcast") if not params[name]]])

    def _bind_body(self, args: Sequence[Value], params: dict, body: Body, in_specs: Specs) -> list[Value]:
        """The same operation with another body."""
        return self.bind(*args, body=body, in_specs=in_specs, **_mesh_params(params))

    def body_scope(self, params: dict) -> Scope:
        """The scope in which the body is recorded, and its tape rewritten."""
        return Scope(params["mesh"].shape, params["check_rep"], not params["auto_pbroadcast"])


shard_map_p = ShardMap("shard_map")
_CLOSED_OVER = P().for_argument("a closed-over array")


def run_body(params: dict, blocks: Sequence[Value]) -> tuple[list, Specs]:
    """Apply a body to blocks; return its results and their specs."""
    body = params["body"]
    return (body(*blocks), params["out_specs"]) if isinstance(body, Tape) else body(*blocks)


def typed_params(mesh: Mesh) -> dict:
    """Parameters of a typed shard_map over a mesh."""
    return {"mesh": mesh, "check_rep": True, "auto_pbroadcast": True, "call": None}


def _mesh_params(params: dict, linear: bool = False) -> dict:
    """Return the parameters that do not depend on the body, which may be the `linear` part of a derivative."""
    call = hooks.linear_part(params["call"]) if linear else params["call"]
    return {**{k: params[k] for k in ("mesh", "check_rep", "auto_pbroadcast")}, "call": call}


# ---------------------------------------------------------------- the old recipe: divide on entry, sum on exit


def _unscale(ct: Value, spec: PartitionSpec, mesh: Mesh) -> Value:
    """Divide a cotangent by the number of ranks that got a copy of all of it."""
    copies = mesh.ranks.size(_unmapped_axes(spec, mesh))
    return divide(ct, copies) if copies != 1 else ct


def _sum_unmapped(ct: Value, spec: PartitionSpec, mesh: Mesh) -> Value:
    """Sum an unmapped input's cotangent over the ranks that got copies of it."""
    axes = _unmapped_axes(spec, mesh)
    return untyped_psum_p.bind(ct, **axes_and_size(mesh.ranks, axes)) if axes else ct


def _unmapped_axes(spec: PartitionSpec, mesh: Mesh) -> tuple[str, ...]:
    """The axes that a spec does not name, not even as reduced: there the cotangent is unreduced, and needs no sum."""
    return tuple(a for a in mesh.axis_names if a not in spec.states.axes)


# ---------------------------------------------------------------- operands and results


def _closed_over_arguments(interpreter: Interpreter, values: Sequence[Tracer], mesh: Mesh) -> list[Value]:
    """The values that a body closes over, gathered, as unmapped arguments."""
    with running(interpreter):
        return [hooks.reshard_argument(x, mesh, WHOLE) for x in values]
