"""Bodies of `shard_map` recorded on the data of one process, so that they are compiled, or exported, as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from collectives import exported
from collectives.backends.base import Axes
from collectives.backends.simulated import join_blocks
from collectives.lowering import bind_index, run_lowered
from minidiff.control_flow.bodies import BodyOperation
from minidiff.control_flow.cond import Cond, run_if
from minidiff.control_flow.dead_code import has_effects
from minidiff.control_flow.while_loop import While
from minidiff.core.interpreter import running, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.states import AxisStates
from minidiff.core.tape import Equation, Stage, Tape, tapes_of
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof
from minidiff.errors import TracerError
from minidiff.ops.reduction import any as any_of
from minidiff.values.lists import split_list
from spmd.mesh.mesh import make_mesh
from spmd.shard_map.branches import BranchingBodies
from spmd.shard_map.interpreter import SPMD, RankTracer
from spmd.shard_map.operation import shard_map_p

UNROLLED = 8  # steps: a scan of at most this length is unrolled where a `shard_map`'s body is compiled
Variance = tuple[Axes, AxisStates | None]  # of a `RankTracer`: its varying axes, and its marked states


class Lowering(BranchingBodies):
    """Record what a body does to this process's data, on the tape of `base`."""

    unrolled: float = UNROLLED  # the longest loop that is recorded step by step

    def axis_index(self, axes: Axes) -> tuple[Any, Axes]:
        return bind_index(axes, self.mesh.ranks)

    def communicate(
        self, primitive: Any, operands: Sequence[tuple[Any, Axes]], params: dict
    ) -> Sequence[tuple[Any, Axes]]:
        return run_lowered(primitive, operands, self.mesh.ranks, params)

    def run_bodies(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
        is_long = params.get("length", 0) > self.unrolled
        if self.scope.typed and isinstance(primitive, BodyOperation) and (is_long or "length" not in params):
            bodies = primitive.operands_by_body(len(args), params)
            if bodies is not None:
                return self._record_bodies(primitive, args, params, bodies)
        if is_long:
            raise TracerError(f"{primitive} is a loop: its body is compiled, not what surrounds it")
        return super().run_bodies(primitive, args, params)

    def run_branches(self, cond: Cond, selector: RankTracer, values: Sequence[RankTracer], params: dict) -> list[Value]:
        tapes = tapes_of(params)
        if not isinstance(selector.data, Tracer):
            return super().run_branches(cond, selector, values, params)
        if self.mesh.backend == "mpi":
            return self._record_bodies(
                cond, [selector, *values], params, cond.operands_by_body(len(values) + 1, params)
            )
        if any(has_effects(eqn) for tape in tapes for eqn in tape.equations):
            raise TracerError(f"{cond} has an effect on some ranks only: it runs operation by operation")
        results: dict[int, list[Value]] = {}
        for i, tape in enumerate(tapes):
            with running(self.base):
                mask = cond.matches(selector.data, i)
            operands = self.mask_operands(RankTracer(self, mask, selector.varying), values, tape)
            branch, variances = self.record(tape, [(x.data, x.varying) for x in operands], [x.marked for x in operands])
            with running(self.base):
                outs = run_if(any_of(mask), branch, [x.data for x in operands])
            results[i] = [RankTracer(self, x, *variance) for x, variance in zip(outs, variances)]
        return self.select_results(cond, selector, results, tapes)

    def run_loop(self, loop: While, args: Sequence[Value], params: dict) -> list[Value]:
        """Record a loop on the data: on all ranks in this process, until none of them continues."""
        k, n, test, body = (params[name] for name in ("cond_consts", "body_consts", "cond", "body"))
        if not self.scope.typed:
            raise TracerError(f"{loop} runs operation by operation: only its condition's values say who takes a step")
        self.prepare_divergence(loop, test.out_types[0], params)
        if self.mesh.backend == "mpi":
            return self._record_bodies(loop, args, params, loop.operands_by_body(len(args), params))
        if any(has_effects(eqn) for tape in tapes_of(params) for eqn in tape.equations):
            raise TracerError(f"{loop} has an effect on some ranks only: it runs operation by operation")

        def continues(*values: RankTracer) -> list[Value]:
            active = test.apply(*values)[0]
            ranks = active.interpreter
            with running(ranks.base):
                return [RankTracer(ranks, any_of(active.data), ())]

        def step(*values: RankTracer) -> list[Value]:
            leading, operands = split_list(values, k)
            active = test.apply(*leading, *operands[n:])[0]
            return active.interpreter.run_step(active, body, operands)

        args, masked = [*args[:k], *args], {"cond": continues, "body": step, "cond_consts": k, "body_consts": k + n}
        return self._record_bodies(loop, args, masked, loop.operands_by_body(len(args), masked))

    def _record_bodies(self, primitive: Primitive, args: Sequence[Value], params: dict, bodies: dict) -> list[Value]:
        """Record a cond or a loop as one on data."""
        operands = [self.operand(x) for x in args]
        recorded: dict = {}
        variances: list[Variance] = []
        for name, positions in bodies.items():
            states = [getattr(args[k], "marked", None) for k in positions]
            recorded[name], variances = self.record(params[name], [operands[k] for k in positions], states)
        with running(self.base):
            results = primitive.bind(*[x for x, _ in operands], **{**params, **recorded})
        return [RankTracer(self, x, *variance) for x, variance in zip(results, variances)]

    def record(
        self, body: Tape | Callable, operands: Sequence[tuple[Any, Axes]], states: Sequence[AxisStates | None]
    ) -> tuple[Tape, list[Variance]]:
        """Record what a body does to data like the operands', which may be types; return the results' variances too."""
        run = body.apply if isinstance(body, Tape) else body
        stage = Stage(None, name="jit")
        inside = type(self)(self.mesh, self.scope.typed, base=stage)
        kinds = zip(operands, states)
        blocks = [RankTracer(inside, stage.new_input(typeof(x)), varying, s) for (x, varying), s in kinds]
        with transforming(inside), transforming(stage), running(inside):
            outs = run(*blocks)
            results = [inside.operand(x) for x in outs]
            variances = [(varying, getattr(x, "marked", None)) for x, (_, varying) in zip(outs, results)]
            return stage.tape([x for x, _ in results]), variances


def lower(
    interpreter: SPMD, tape: Tape, operands: Sequence[tuple[Any, Axes]], states: Sequence, options: dict
) -> tuple[Tape, list[Variance]] | None:
    """Return the compiled tape of a body on this process's data, and its results' variances.

    Return None if it cannot be recorded, because it needs concrete values; or if it would be long, for a loop over
    arrays, whose body then becomes such a program. Nor can a branch that prints, which some ranks do not take.
    """
    from minidiff.compiler.program import optimize  # loads when something is compiled

    try:
        recorded, variances = Lowering(interpreter.mesh, interpreter.scope.typed).record(tape, operands, states)
        return optimize(recorded, **options), variances
    except TracerError:
        return None


class OnArrays(Lowering):
    """Record what simulated ranks compute, collectives as well, as operations on arrays."""

    unrolled = math.inf
    axis_index = SPMD.axis_index
    communicate = SPMD.communicate


def record_on_arrays(eqn: Equation) -> Tape | None:
    """Return the tape of a `shard_map` on whole arrays, as simulated ranks would run it; None for other operations."""
    if eqn.primitive is not shard_map_p:
        return None
    mesh, body, in_specs, out_specs = (eqn.params[k] for k in ("mesh", "body", "in_specs", "out_specs"))
    simulated = make_mesh(tuple(mesh.shape.values()), tuple(mesh.shape), backend="simulated")
    stage = Stage(None, name="shard_map")
    inside = OnArrays(simulated, eqn.params["check_rep"], base=stage)
    ranks = simulated.ranks
    with transforming(inside), transforming(stage):
        inputs = [stage.new_input(t.update(sharding=None)) for t in map(typeof, eqn.inputs)]
        blocks = [
            RankTracer(inside, *(ranks.place(x, spec.dims(x.ndim)) if spec.axes else (x, ())))
            for x, spec in zip(inputs, in_specs)
        ]
        with running(inside):
            outs = body.apply(*blocks)
        results = []
        for out, spec in zip(outs, out_specs):
            data = ranks.reshard_data(*inside.operand(out), ranks.sort_axes(spec.axes))
            results.append(join_blocks(data, spec.dims(typeof(out).ndim), ranks.sizes))
        return stage.tape(results)


def exported_on_mesh(eqn: Equation) -> exported.Form | None:
    """Return the form of a shard_map in an exported program: see `minidiff.compiler.export`.

    Raises TypeError if it has none.
    """
    if eqn.primitive is not shard_map_p:
        return exported.exported_collective(eqn)
    mesh, body, in_specs, out_specs = (eqn.params[k] for k in ("mesh", "body", "in_specs", "out_specs"))
    if any(spec.unreduced for spec in in_specs):
        raise TypeError("export: an argument of a shard_map is unreduced, which a plain array cannot be: sum it first")
    shown = {
        "body": body,
        "split": [spec.dims(len(t.shape)) for spec, t in zip(in_specs, body.in_types)],
        "gathered": [spec.dims(len(t.shape)) for spec, t in zip(out_specs, body.out_types)],
        "summed": [mesh.ranks.sort_axes(spec.unreduced) for spec in out_specs],
    }
    return exported.map_over_ranks, shown, exported.variables_for(mesh.shape)
