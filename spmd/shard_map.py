"""shard_map: a function of blocks, run on every rank of a mesh.

It is an operation with the same rules as any other, whose parameter is a body:

========== =====================================================================================
evaluate   split the inputs by `in_specs`, run the body on the ranks, assemble by `out_specs`
jvp        the body's jvp; the tangents have the specs of their primals
linearise  the body linearised; what the linear part needs (residuals) stays on its ranks
transpose  the body's linear tape transposed, input and output specs swapped
batch      the body vectorised, with one more dimension in every spec
stage      the body on a tape of its own
========== =====================================================================================

Because types say exactly where values may differ from rank to rank, no correction is needed where values enter
and leave: an unmapped argument is invariant, and so is its cotangent. Without types (`check_rep=False`) the
variance is not known, and transposition divides cotangents on entry and sums them on exit: the recipe of the
JEP's problem statement, kept for comparison.

Results may be partial sums, `out_specs=P(sum='i')`: they are added up on their way out. The transpose of that
is an unmapped argument (all ranks along i get the whole) typed as varying: no communication.

A shard_map may map over only some axes of the mesh. Its body may then contain another one, over other axes of the
same mesh, in whose body the axes of both are bound: types carry both, collectives name either. The inner one treats
values of the outer body as the outer one treats arrays: it splits them along its own axes, values it closes over are
unmapped, and their variance along the outer axes passes through unchanged, in and out. So no correction is needed
there either, and each rule above applies unchanged. (A result that the inner one maps over its axes stays sharded in
the outer body until an operation needs it whole: see `SplitTracer`. Elementwise operations do not need it whole, nor
do inner bodies that take it with the same spec, nor mapped results, nor residuals.)

A body is a function of blocks that returns its results *and their specs*: the number of residuals is known only
after it has run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy

from collectives.backends.base import Backend
from collectives.ops import pbroadcast_p, psum_p, untyped_psum_p
from collectives.passes.gradient_bucket import summed_backward_pass
from collectives.passes.hoist_pbroadcasts import hoist_pbroadcasts
from collectives.primitives import Collective
from minidiff import tree
from minidiff.aliasing import owner_of
from minidiff.compiler.jit import key_of
from minidiff.core import (
    EVALUATE,
    Interpreter,
    LeakedTracerError,
    Primitive,
    Scope,
    ShapedArray,
    Tracer,
    TracerError,
    Value,
    VarianceError,
    checking,
    current_interpreter,
    current_scope,
    is_scalar_constant,
    leak_message,
    name_of,
    restores_interpreter,
    running,
    transforming,
    typeof,
)
from minidiff.debug import CheckFinite
from minidiff.forward import JVP, as_values, result_values
from minidiff.global_random import random_state, warn_if_random
from minidiff.higher_order.partial_eval import names_used, prune_tape
from minidiff.keywords import transformation
from minidiff.ops.elementwise import divide
from minidiff.ops.shape import moveaxis
from minidiff.promotion import are_weak, weak_where
from minidiff.reverse import Linearize, backward_pass
from minidiff.staging import Stage
from minidiff.tape import Equation, Tape, Var, has_effects
from minidiff.vmap import Batch, BatchTracer
from spmd.agreement import NO_CALL, Call, checks_values, compare_call, described
from spmd.arrays.sharded_array import ShardedArray
from spmd.interpreter import CHECKED, SPMD, RankTracer, SplitTracer, place
from spmd.mesh import Mesh
from spmd.partition import (
    P,
    PartitionSpec,
    Sharding,
    block_type,
    check_divides,
    check_fits,
    check_is_spec,
    check_ndim,
    check_not_summed,
    check_spec,
    global_type,
    is_spec,
    with_sharding,
)
from spmd.variance import checked_result

Specs = tuple[PartitionSpec, ...]
Body = Callable[..., tuple[list, Specs]]  # blocks -> (results, their specs)


class StageBody(Stage):
    """Record the tape of a body; values that the body closes over become inputs."""

    mesh: Mesh

    def _adopt(self, x: Tracer) -> Value:
        x = self.outer.adopt(x)
        if x.interpreter.ended:
            raise LeakedTracerError(leak_message(x))
        return self.adopt_own(x)


class ShardMap(Primitive):
    """The `shard_map` operation.

    Parameters: `body`, a Body or a Tape; `mesh`; `axes`, which it maps over; `around`, the axes that enclosing
    shard_maps map over; `in_specs`; `out_specs` (if the body is a Tape); `check_rep`, `auto_pbroadcast`; `call`, what
    ranks compare before the first run.
    """

    is_higher_order = True
    binds_axes = True
    multiple_results = True
    commutes = True
    per_operand = ("in_specs",)
    operands_agree = False

    def bind(self, *args: Value, **params) -> list[Value]:
        """Apply the operation, resharding sharded arguments to their specs first."""
        if not params["around"]:
            if current_interpreter() is EVALUATE:
                compare_call(params)  # before anything is resharded
            args = tuple(_resharded(x, params["mesh"], spec) for x, spec in zip(args, params["in_specs"]))
        return super().bind(*args, **params)

    # ------------------------------------------------ running

    @restores_interpreter
    def evaluate(self, args: Sequence[Value], params: dict) -> list[Value]:
        outer = current_interpreter() if params["around"] else None
        if outer is not None and outer.base is not EVALUATE:
            raise TracerError("a shard_map inside another: its body is compiled, not what surrounds it")
        compare_call(params)
        explicit, in_specs = not params["auto_pbroadcast"], params["in_specs"]
        bottom = current_interpreter() if outer is None else outer.checker
        kind = CHECKED[checks_values(), isinstance(bottom, CheckFinite)]
        interpreter = kind(params["mesh"], params["check_rep"], params["axes"], outer, explicit=explicit)
        interpreter.checker = bottom
        blocks = [_place(interpreter, x, spec) for x, spec in zip(args, in_specs)]
        if checks_values():
            interpreter.check_arguments(blocks, in_specs)
        if params["check_rep"]:
            blocks = [_across(interpreter, pbroadcast_p, x, spec.varying) for x, spec in zip(blocks, in_specs)]
        with transforming(interpreter):
            outs, out_specs = run_body(params, blocks)
        owners = {id(owner_of(x)) for x in args if isinstance(x, numpy.ndarray)}
        return [_unshared(_take(interpreter, x, spec), owners) for x, spec in zip(outs, out_specs)]

    # ------------------------------------------------ forward mode

    def jvp_body(self, outside: JVP, args: Sequence[Value], params: dict) -> list[Value]:
        primals, tangents = outside.split(args)
        moving = [i for i, t in enumerate(tangents) if t is not None]
        out_moving: list[int] = []

        def body(*blocks):
            inside = type(outside)(current_interpreter(), outer=outside)
            block_tangents = dict(zip(moving, blocks[len(primals) :]))
            with transforming(inside):
                outs, specs = run_body(
                    params, [inside.join(p, block_tangents.get(i)) for i, p in enumerate(blocks[: len(primals)])]
                )
            out_primals, out_tangents = inside.split(outs)
            out_moving.extend(i for i, t in enumerate(out_tangents) if t is not None)
            return (
                [*out_primals, *[out_tangents[i] for i in out_moving]],
                (*specs, *[specs[i] for i in out_moving]),
            )

        results = self._bind_body(
            [*primals, *[tangents[i] for i in moving]],
            params,
            body,
            (*params["in_specs"], *[params["in_specs"][i] for i in moving]),
        )
        count = len(results) - len(out_moving)
        out_tangents = dict(zip(out_moving, results[count:]))
        return [outside.join(p, out_tangents.get(i)) for i, p in enumerate(results[:count])]

    # ------------------------------------------------ reverse mode

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        """Run the known part; record the linear part as one linear equation."""
        mesh, in_specs, typed = params["mesh"], params["in_specs"], params["check_rep"]
        known = [i for i, x in enumerate(args) if not outside.owns(x)]
        linear = [i for i, x in enumerate(args) if outside.owns(x)]
        ran: LinearBody

        def body(*blocks):
            nonlocal ran
            inside = Linearize(current_interpreter(), outer=outside)
            values = dict(zip(known, blocks))
            for i in linear:
                values[i] = inside.new_input(block_type(args[i].type, in_specs[i], mesh.shape, typed))
            with transforming(inside):
                outs, specs = run_body(params, [values[i] for i in range(len(args))])
                ran = LinearBody(inside, outs, specs, dict(zip(map(id, blocks), known)), params["axes"], typed)
            return ran.results, ran.result_specs

        results = self._bind_body([args[i] for i in known], params, body, tuple(in_specs[i] for i in known))
        outs = dict(zip(ran.known_outs, results))
        if ran.linear_outs:
            residuals, residual_specs = ran.residuals(args, in_specs, results[len(ran.known_outs) :])
            captured = _closed_over(outside, ran.captured, params)
            recorded = outside.record(
                self,
                [*residuals, *[args[i] for i in linear], *captured],
                {
                    **_where(params),
                    "in_specs": (*residual_specs, *[in_specs[i] for i in linear], *[P()] * len(captured)),
                    "out_specs": tuple(ran.specs[i] for i in ran.linear_outs),
                    "body": ran.tape,
                },
            )
            outs.update(zip(ran.linear_outs, recorded))
        return [outs[i] for i in range(len(outs))]

    def transpose(self, cts: Sequence[Value | None], operands: Sequence[Any], params: dict) -> list[Value | None]:
        mesh, in_specs, typed = params["mesh"], params["in_specs"], params["check_rep"]
        tape, out_specs, axes = params["body"], params["out_specs"], params["axes"]
        linear = [isinstance(x, ShapedArray) for x in operands]
        fixed = [i for i, yes in enumerate(linear) if not yes]
        wanted = [i for i, yes in enumerate(linear) if yes]
        given = [i for i, ct in enumerate(cts) if ct is not None]
        found: list[int] = []

        def body(*blocks):
            values = dict(zip(fixed, blocks))
            block_cts = dict(zip(given, blocks[len(fixed) :]))
            if not typed:
                block_cts = {i: _unscale(ct, out_specs[i], mesh, axes) for i, ct in block_cts.items()}
            in_cts = (summed_backward_pass if typed else backward_pass)(
                tape, linear, [values.get(i) for i in range(len(operands))], [block_cts.get(i) for i in range(len(cts))]
            )
            by_input = {i: ct for i, ct in zip(wanted, in_cts) if ct is not None}
            found.extend(by_input)
            if not typed:
                by_input = {i: _sum_unmapped(ct, in_specs[i], mesh, axes) for i, ct in by_input.items()}
            return list(by_input.values()), tuple(in_specs[i].transposed() for i in by_input)

        results = self._bind_body(
            [*[operands[i] for i in fixed], *[cts[i] for i in given]],
            params,
            body,
            (*[in_specs[i] for i in fixed], *[out_specs[i].transposed() for i in given]),
        )
        by_input = dict(zip(found, results))
        return [by_input.get(i) for i in range(len(operands))]

    # ------------------------------------------------ vmap

    def batch_body(self, outside: Batch, args: Sequence[Value], params: dict) -> list[Value]:
        in_specs = params["in_specs"]
        batched = [outside.owns(x) for x in args]
        values = [_batch_in_front(x, spec) if b else x for x, spec, b in zip(args, in_specs, batched)]
        out_axes: list[int | None] = []

        def body(*blocks):
            inside = Batch(current_interpreter(), outside.size_of_batch, outer=outside)
            with transforming(inside):
                outs, specs = run_body(params, [BatchTracer(inside, x, 0) if b else x for x, b in zip(blocks, batched)])
            out_axes.extend(len(s.lead) if inside.owns(x) else None for x, s in zip(outs, specs))
            return (
                [moveaxis(x.value, x.axis, 0) if inside.owns(x) else x for x in outs],
                tuple(s.batched() if inside.owns(x) else s for x, s in zip(outs, specs)),
            )

        specs = tuple(s.batched() if b else s for s, b in zip(in_specs, batched))
        results = self._bind_body(values, params, body, specs)
        return [x if axis is None else BatchTracer(outside, x, axis) for x, axis in zip(results, out_axes)]

    # ------------------------------------------------ tapes

    def stage_body(self, outside: Stage, args: Sequence[Value], params: dict) -> list[Value]:
        mesh, in_specs, typed = params["mesh"], params["in_specs"], params["check_rep"]
        inside = StageBody(None, outer=outside)
        inside.mesh, inside.scope = mesh, self.body_scope(params)
        inside.scope.bottom = inside
        blocks = [inside.new_input(block_type(typeof(x), spec, mesh.shape, typed)) for x, spec in zip(args, in_specs)]
        with transforming(inside):
            outs, out_specs = run_body(params, blocks)
        if not (outs or any(map(has_effects, inside.equations))):
            return []
        tape, constants = inside.tape(outs).close()
        return outside.record(
            self,
            [*constants, *args, *_closed_over(outside, inside.captured, params)],
            {
                **_where(params),
                "in_specs": (*[P()] * len(constants), *in_specs, *[P()] * len(inside.captured)),
                "out_specs": tuple(out_specs),
                "body": tape,
            },
        )

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        mesh, typed, tape = params["mesh"], params["check_rep"], params["body"]
        types = [typeof(t) for t in types]
        blocks = [block_type(t, spec, mesh.shape, typed) for t, spec in zip(types, params["in_specs"])]
        # A value that varies outside, where none should, varies inside too.
        blocks = [b.update(variance=b.variance | t.variance) for b, t in zip(blocks, types)]
        if blocks != tape.in_types:
            raise TypeError(f"shard_map: its body takes {tape.in_types}, but the blocks have the types {blocks}")
        out_specs = params["out_specs"]
        if len(tape.out_types) != len(out_specs):
            raise TypeError(f"shard_map: its body returns {tape.out_types}, but the out_specs are {out_specs}")
        found = [global_type(t, spec, mesh.shape) for t, spec in zip(tape.out_types, out_specs)]
        return found if params["around"] else [with_sharding(t, mesh, spec) for t, spec in zip(found, out_specs)]

    def check_fits(self, types: Sequence[ShapedArray], params: dict, scope: Scope | None) -> None:
        mesh, in_specs = params["mesh"], params["in_specs"]
        if len(in_specs) != len(types):
            raise ValueError(f"there are {len(types)} operands, and in_specs for {len(in_specs)}")
        for what, specs in (("in_specs", in_specs), ("out_specs", params["out_specs"])):
            _check_axes([(f"{what}[{i}]", spec) for i, spec in enumerate(specs)], params)
        for i, (x, spec) in enumerate(zip(types, in_specs)):
            check_not_summed(spec, f"in_specs[{i}]")
            check_fits(x, spec, mesh.shape)
        for t, spec in zip(params["body"].out_types, params["out_specs"]):
            check_ndim(spec, t.shape, "out_specs", f"a result of type {t}")

    def without_unused_results(self, eqn: Equation, used: Sequence[bool]) -> Equation:
        """The shard_map with its used results only, and the arguments they need."""
        params, wanted = eqn.params, [i for i, yes in enumerate(used) if yes]
        body = params["body"]
        if not isinstance(body, Tape):
            return eqn
        smaller = prune_tape(Tape(body.inputs, body.equations, [body.outputs[i] for i in wanted]))
        needed = names_used(smaller)
        kept = [i for i, v in enumerate(body.inputs) if v in needed]
        specs = {k: tuple(params[k][i] for i in chosen) for k, chosen in (("in_specs", kept), ("out_specs", wanted))}
        smaller = Tape([body.inputs[i] for i in kept], smaller.equations, smaller.outputs)
        inputs, outputs = [eqn.inputs[i] for i in kept], [eqn.outputs[i] for i in wanted]
        return Equation(self, inputs, {**params, **specs, "body": smaller}, outputs, eqn.source)

    def check_variance(self, types: Sequence[ShapedArray], params: dict) -> None:
        for t, spec in zip(params["body"].out_types, params["out_specs"]):
            if t.variance.intersection(params["axes"]).difference(spec.axes, spec.summed):
                raise VarianceError(
                    f"shard_map: a result of type {t} may differ where its spec {spec} says it does not"
                )

    def show_params(self, params: dict) -> str:
        mesh, axes = ", ".join(f"{a}: {n}" for a, n in params["mesh"].shape.items()), params["axes"]
        chosen = "" if axes == params["mesh"].axis_names else f"axis_names={{{', '.join(map(repr, axes))}}}, "
        shown = f"{chosen}mesh=({mesh}), in_specs={_show(params['in_specs'])}, out_specs={_show(params['out_specs'])}"
        return ", ".join([shown, *[f"{name}=False" for name in ("check_rep", "auto_pbroadcast") if not params[name]]])

    def _bind_body(self, args: Sequence[Value], params: dict, body: Body, in_specs: Specs) -> list[Value]:
        """The same operation with another body."""
        return self.bind(*args, body=body, in_specs=in_specs, **_where(params))

    def body_scope(self, params: dict) -> Scope:
        """The scope in which the body is recorded, and its tape rewritten."""
        bound, explicit = {*params["axes"], *params["around"]}, not params["auto_pbroadcast"]
        sizes = {a: n for a, n in params["mesh"].shape.items() if a in bound}
        return Scope(sizes, params["check_rep"], explicit)

    def sums(self, params: dict) -> dict[int, dict]:
        summed = {i: spec.summed for i, spec in enumerate(params["out_specs"]) if spec.summed}
        found = {i: _axes_and_size(params["mesh"].ranks, axes) for i, axes in summed.items()}
        return {i: psum_params for i, psum_params in found.items() if psum_p.sends(psum_params)}


shard_map_p = ShardMap("shard_map")


def run_body(params: dict, blocks: Sequence[Value]) -> tuple[list, Specs]:
    """Apply a body to blocks; return its results and their specs."""
    body = params["body"]
    return (body(*blocks), params["out_specs"]) if isinstance(body, Tape) else body(*blocks)


def everywhere(mesh: Mesh) -> dict:
    """Parameters of a typed shard_map over all axes of a mesh."""
    where = {"mesh": mesh, "axes": mesh.axis_names, "around": (), "check_rep": True, "auto_pbroadcast": True}
    return {**where, "call": NO_CALL}


def _where(params: dict) -> dict:
    """The parameters that do not depend on the body."""
    where = {k: params[k] for k in ("mesh", "axes", "around", "check_rep", "auto_pbroadcast")}
    return {**where, "call": params.get("call", NO_CALL)}


def _show(specs: Specs) -> str:
    return f"({', '.join(map(repr, specs))}{',' if len(specs) == 1 else ''})"


# ---------------------------------------------------------------- linearising


class LinearBody:
    """A body linearised: its known results, and the tape of its linear results.

    It has run under `inside`. Known values that the tape uses are its residuals. A residual that is an input of the
    body, or was closed over, is passed in again from outside; a view of one is recomputed on the tape; only the others
    become extra results.
    """

    def __init__(
        self, inside: Linearize, outs: list, specs: Specs, argument_of: dict[int, int], axes: tuple, typed: bool
    ):
        self.specs = specs
        self.captured = inside.captured
        self.known_outs = [i for i, x in enumerate(outs) if not inside.owns(x)]
        self.linear_outs = [i for i, x in enumerate(outs) if inside.owns(x)]
        self._argument_of = argument_of  # id of a block -> which argument of the shard_map it is a block of
        self._closed_over = inside.below.adopted()  # id of a value -> the value outside that it was adopted from
        self._scope = inside.scope
        self._sources: list[tuple[str, Any]] = []  # where each non-tangent input of the tape comes from
        self._inputs: list[Var] = []
        self._views: list[Equation] = []
        self._kept: list[Value] = []
        tape, constants = inside.tape([outs[i] for i in self.linear_outs]).close()
        self._names = {id(c): var for var, c in zip(tape.inputs, constants)}
        self._defined: set[Var] = set()
        for c in constants:
            self._define(c)
        self.tape = Tape([*self._inputs, *tape.inputs[len(constants) :]], [*self._views, *tape.equations], tape.outputs)
        if typed and not inside.scope.explicit:
            self.tape = hoist_pbroadcasts(self.tape)
        self.kept_specs = [
            PartitionSpec.stacked(*[a for a in axes if not typed or a in typeof(x).variance]) for x in self._kept
        ]
        self.results = [*[outs[i] for i in self.known_outs], *self._kept]
        self.result_specs = (*[specs[i] for i in self.known_outs], *self.kept_specs)

    def _define(self, x: Value) -> Var:
        """Define a residual on the linear tape, and return its variable.

        It becomes an input, or the result of a view.
        """
        var = self._names.setdefault(id(x), Var(typeof(x)))
        if var in self._defined:
            return var
        self._defined.add(var)
        view = self._scope.views.get(id(x))
        if id(x) in self._argument_of:
            self._input(var, "argument", self._argument_of[id(x)])
        elif id(x) in self._closed_over:
            self._input(var, "closed over", self._closed_over[id(x)])
        elif not isinstance(x, Tracer):
            self._input(var, "closed over", x)
        elif view is not None:
            views, primitive, operand, params = view
            name = operand if is_scalar_constant(operand) else self._define(operand)
            results = [self._names.setdefault(id(v), Var(typeof(v))) for v in views]
            self._views.append(Equation(primitive, [name], params, results))
            self._defined.update(results)
        else:
            self._input(var, "kept", len(self._kept))
            self._kept.append(x)
        return var

    def _input(self, var: Var, source: str, what: Any) -> None:
        self._inputs.append(var)
        self._sources.append((source, what))

    def residuals(self, args: Sequence[Value], in_specs: Specs, kept: Sequence[Value]) -> tuple[list[Value], Specs]:
        """The operands to pass for the residuals of the linear tape, and their specs."""
        find = {
            "argument": lambda i: (args[i], in_specs[i]),
            "closed over": lambda x: (x, P()),
            "kept": lambda i: (kept[i], self.kept_specs[i]),
        }
        pairs = [find[source](what) for source, what in self._sources]
        return [x for x, _ in pairs], tuple(spec for _, spec in pairs)


# ---------------------------------------------------------------- the old recipe: divide on entry, sum on exit


def _unscale(ct: Value, spec: PartitionSpec, mesh: Mesh, axes: tuple[str, ...]) -> Value:
    """Divide a cotangent by the number of ranks with a copy of it.

    Axes over which the result was summed do not count.
    """
    copies = mesh.ranks.size(a for a in axes if a not in spec.axes and a not in spec.summed)
    return divide(ct, copies) if copies != 1 else ct


def _sum_unmapped(ct: Value, spec: PartitionSpec, mesh: Mesh, axes: tuple[str, ...]) -> Value:
    """Sum an unmapped input's cotangent over the ranks that got copies of it.

    Axes along which it is summed on the way out are left out.
    """
    axes = tuple(a for a in axes if a not in spec.axes and a not in spec.varying)
    return untyped_psum_p.bind(ct, **_axes_and_size(mesh.ranks, axes)) if axes else ct


# ---------------------------------------------------------------- blocks in and out


def _place(interpreter: SPMD, x: Value, spec: PartitionSpec) -> RankTracer:
    """Shard a value, and return its blocks as a value of the body."""
    outer = interpreter.outer
    if isinstance(x, ShardedArray):
        is_sharded_here = x.mesh.is_like(interpreter.mesh)
    else:
        is_sharded_here = isinstance(x, SplitTracer) and x.interpreter is outer
    found = interpreter.enter_sharded(x, spec) if is_sharded_here else None
    if found is not None:
        return found
    if isinstance(x, ShardedArray):  # a loop's step, for example, is compiled before the shardings are known
        x = x.as_split
        return _place(interpreter, x.gather() if spec.stays else _resharded(x, interpreter.mesh, spec), spec)
    data, held = (outer or interpreter).operand(x)  # raises LeakedTracerError for a leaked tracer
    return RankTracer(interpreter, *place(interpreter.mesh.ranks, data, held, spec))


def _resharded(x: Value, mesh: Mesh, spec: PartitionSpec) -> Value:
    """Reshard a sharded argument by its spec; return any other argument unchanged."""
    sharding = typeof(x).sharding
    if sharding is None or spec.stays or (sharding.mesh is mesh and sharding.spec == spec and not spec.summed):
        return x
    return Sharding(mesh, spec.without_sum()).resharded(x)


def _closed_over(interpreter: Interpreter, values: Sequence[Tracer], params: dict) -> list[Value]:
    """The values that a body closes over, gathered, as unmapped arguments."""
    if params["around"]:
        return list(values)
    with running(interpreter):
        return [_resharded(x, params["mesh"], P()) for x in values]


def _across(interpreter: SPMD, collective: Collective, x: Value, axes: tuple[str, ...]) -> Value:
    """Apply a collective to a value that enters or leaves the body."""
    if not axes:
        return x
    return interpreter.process(collective, [x], _axes_and_size(interpreter.mesh.ranks, axes))


def _axes_and_size(ranks: Backend, axes: Collection[str]) -> dict:
    """The parameters of a collective over all of these axes."""
    return {"axes": ranks.ordered(axes), "size": ranks.size(axes)}


def _take(interpreter: SPMD, x: Value, spec: PartitionSpec) -> Value:
    """Convert a body's result to a value outside.

    That is a value of the enclosing body, if there is one, or an array, plain or sharded.
    """
    ranks, outer = interpreter.mesh.ranks, interpreter.outer
    x = _across(interpreter, psum_p, x, spec.summed)
    further = None
    if type(x) is SplitTracer and x.interpreter is interpreter and (outer is not None or spec.axes or spec.stays):
        further = spec.split_further(x.spec)
    if further is not None:
        data, held, spec = x.data, x.held, further
    else:
        data, held = interpreter.operand(x)
    wanted = ranks.ordered({*spec.axes, *[a for a in held if outer is not None and a in outer.scope.axes]})
    data = ranks.reshard_data(data, held, wanted)
    if outer is not None:
        return SplitTracer(outer, data, wanted, spec) if spec.axes else RankTracer(outer, data, wanted)
    if not wanted:
        return data if data.ndim else data[()]  # a NumPy scalar, whichever backend ran
    block = ShapedArray(ranks.block_shape(data, wanted), data.dtype)
    return ShardedArray(interpreter.mesh, spec.without_sum(), block, data)


def _unshared(x: Value, owners: set[int]) -> Value:
    """Copy a result if it is a view of memory that these owners, the arguments, hold."""
    if type(x) is ShardedArray:
        x.data = _unshared(x.data, owners)
    elif isinstance(x, numpy.ndarray) and id(owner_of(x)) in owners:
        x = x.copy()
    return x


def _batch_in_front(x: BatchTracer, spec: PartitionSpec) -> Value:
    """A batched argument's value, with its batch axis after the rank dimensions."""
    return x.value if x.axis == len(spec.lead) else moveaxis(x.value, x.axis, len(spec.lead))


# ---------------------------------------------------------------- what users call


@transformation
def shard_map(
    f: Callable,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    axis_names: Collection[str] = frozenset(),
    check_rep: bool = True,
    auto_pbroadcast: bool = True,
) -> Callable:
    """Run `f` on every rank of `mesh`, each on its blocks of the arguments.

    `in_specs` says how each argument is split: a tree of partition specs that is a prefix of the tuple of arguments.
    A mesh axis that a spec does not name is unmapped: all ranks along it get the same block. In `f`, collectives
    communicate over the mesh's axes. `out_specs` says likewise how the results' blocks form the whole; along an
    unnamed axis they must be the same, and their types prove it. An axis in `sum=` is one along which they are
    partial sums: `out_specs=P(sum='i')` adds them up as they leave, by one all-reduce. (A result that is the same on
    all ranks is multiplied by their number, as by `psum`: nothing is sent.)

    Under MPI every rank calls it with the same arguments, and takes its own blocks of them. Arguments and results
    are trees. Results that are mapped over an axis are `ShardedArray`s, others plain arrays.
    Arrays that `f` closes over are unmapped inputs, and can be differentiated with respect to.

    It maps over the axes of the mesh in `axis_names`, by default over all. Along the others every rank computes the
    same, and values are whole; a further `shard_map` inside `f` may map over these. It has the same mesh (which may be
    left out), and by default maps over all axes that are not yet in use. Its arguments are split along its own axes,
    the axes of both are bound in its body, and its results may vary along those of the outer body. A result that it
    maps over its axes is whole again outside: under MPI ranks gather it on use, unless it enters another such
    `shard_map`.

    `check_rep=False` turns off the types, the check of `out_specs`, and the savings in transposition.
    `auto_pbroadcast=False` inserts no `pbroadcast` in `f`, nor in a `shard_map` inside it: where values disagree in
    variance, `f` must write one, and so say where its derivative sums.

    Raises ValueError for specs that do not fit the mesh, the axes or the arrays, and for an inner `shard_map` over
    another mesh or over axes in use; VarianceError for a result that may differ along an axis its spec does not name,
    and with `auto_pbroadcast=False` wherever a `pbroadcast` is missing.

    >>> import numpy as np
    >>> from collectives import psum
    >>> from spmd import P, make_mesh
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> total = shard_map(lambda x: psum(x, 'i'), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> total(np.arange(8.0))
    array([12., 16.])
    >>> shard_map(lambda x: x, mesh=mesh, in_specs=P('i'), out_specs=P(sum='i'))(np.arange(8.0))
    array([12., 16.])

    Rows on the ranks along `i`, and in the body columns on those along `j`:

    >>> mesh = make_mesh((2, 2), ('i', 'j'), backend='simulated')
    >>> columns = lambda x: shard_map(lambda x: psum(x, ('i', 'j')), in_specs=P(None, 'j'), out_specs=P())(x)
    >>> shard_map(columns, mesh=mesh, in_specs=P('i'), out_specs=P(), axis_names={'i'})(np.arange(8.0).reshape(2, 4))
    array([[12., 16.]])

    Source: shard_map tutorial, "API specification"; JEP 17111 for the types, for `sum=` its "Partial solution", for
    `auto_pbroadcast` its "How to make the API convenient".
    """
    if not (callable(f) and (mesh is None or isinstance(mesh, Mesh))):
        raise TypeError(f"shard_map takes a function and a mesh, in this order; got {f!r} and {mesh!r}")
    if in_specs is None:
        raise TypeError(
            "shard_map: in_specs says how each argument is split: write in_specs=(P('i'), P()) for two arguments, "
            "the second the same on all ranks; and in_specs=() for none"
        )
    if not (check_rep or auto_pbroadcast):
        raise ValueError(
            "shard_map: auto_pbroadcast=False says that types must agree as they are written, but with check_rep=False "
            "there are no types: leave out one of them"
        )
    out_paths = tree.flatten_with_paths(out_specs, "out_specs")[0]
    paths = [*tree.flatten_with_paths(in_specs, "in_specs")[0], *out_paths]
    if mesh is not None:
        _check_axis_names(axis_names, mesh)
        for path, spec in paths:
            _check_leaf(path, spec, mesh)
    for path, spec in tree.flatten_with_paths(in_specs, "in_specs")[0]:
        if is_spec(spec):
            check_not_summed(spec, path)

    known: dict[Any, tuple[Specs, Call]] = {}  # keyed by the call's parameters and the types of its arguments

    def checked(args: tuple, values: Sequence[Value], where: dict) -> tuple[Specs, Call]:
        """Check the specs against `args`; return them, and the call to compare.

        There is one spec for each array in `args`.
        """
        _check_axes(paths, where)
        names = [path for path, _ in tree.flatten_with_paths(args, "args")[0]]
        specs = tree.broadcast_prefix(in_specs, args, is_spec, "in_specs")
        specs = tuple(spec.of(path) for spec, path in zip(specs, names))
        for spec, x in zip(specs, values):
            check_ndim(spec, x.shape, "in_specs", spec.path)
            check_divides(spec, x.shape, where["mesh"].shape, "in_specs", spec.path)
        if where["mesh"].backend == "simulated":
            return specs, NO_CALL
        return specs, Call(name_of(f), described(where, specs, [typeof(x) for x in values], out_paths))

    def mapped(*args: Any, **named: Any) -> Any:
        if named:
            raise TypeError(
                f"shard_map: {name_of(f)} takes its arguments by position, since in_specs has an entry for each, in "
                f"order; got {', '.join(f'{name}=' for name in named)} by name"
            )
        typed, around = check_rep and not forgetting.get(), current_scope()
        explicit = typed and (not auto_pbroadcast or (around is not None and around.explicit))
        where = {**_where_it_maps(mesh, axis_names, typed), "auto_pbroadcast": not explicit}
        leaves, structure = tree.flatten(args)
        values = as_values("shard_map", leaves, lambda: [path for path, _ in tree.flatten_with_paths(args, "args")[0]])
        key = structure, *where.values(), *map(key_of, values)
        if key not in known:
            known[key] = checked(args, values, where)
        (specs, call), axes = known[key], where["axes"]
        out_structure, weak = None, are_weak(leaves)

        def body(*blocks):
            nonlocal out_structure
            scope = current_scope()
            scope.function = name_of(f)
            before = random_state()
            with checking(scope, True):
                out = f(*tree.unflatten(structure, weak_where(weak, blocks)))
            warn_if_random(before, f"shard_map of {name_of(f)}", _EACH_ITS_OWN)
            leaves, out_structure = tree.flatten(out)
            outs = result_values(("shard_map", name_of(f)), leaves, out_structure)
            result_specs = tree.broadcast_prefix(out_specs, out, is_spec, "out_specs")
            paths = tree.paths(out_structure, "the result")
            resharded = [checked_result(*result, axes, scope) for result in zip(outs, result_specs, paths)]
            return [x for x, _ in resharded], tuple(spec for _, spec in resharded)

        results = shard_map_p.bind(*values, body=body, in_specs=specs, call=call, **where)
        return tree.unflatten(out_structure, results)

    return mapped


_EACH_ITS_OWN = (
    "on real ranks each has a generator of its own, and what the body's types say is the same on all ranks may differ"
)

#: Whether every `shard_map` is called as with `check_rep=False`.
forgetting: ContextVar[bool] = ContextVar("forgetting", default=False)


@contextlib.contextmanager
def without_types() -> Iterator[None]:
    """Treat every `shard_map` in `with without_types():` as with `check_rep=False`."""
    token = forgetting.set(True)
    try:
        yield
    finally:
        forgetting.reset(token)


def _where_it_maps(mesh: Mesh | None, axis_names: Collection[str], typed: bool) -> dict:
    """Parameters that say where a body runs: mesh, axes, around, check_rep.

    `around` has the axes of the enclosing bodies.
    """
    scope = current_scope()
    if scope is None:
        if mesh is None:
            raise TypeError("shard_map: mesh is missing; only inside the body of another shard_map it may be left out")
        around: tuple[str, ...] = ()
    else:
        around = tuple(scope.axes)
        mesh = _inner_mesh(mesh, scope, typed)
        _check_axis_names(axis_names, mesh)
    free = tuple(a for a in mesh.axis_names if a not in around)
    taken = [a for a in axis_names if a in around] if axis_names else [*around] * (not free)
    if taken:
        raise ValueError(
            f"a shard_map inside the body of another cannot map over {_names(taken)}, which the one around it maps "
            f"over: blocks are split along it already, and collectives over it can be called here. "
            + (
                f"Map over others, axis_names={_names(free)}"
                if free
                else f"Let the one around map over fewer of the axes {_names(mesh.axis_names)}, by its axis_names"
            )
        )
    axes = tuple(a for a in free if a in axis_names) if axis_names else free
    return {"mesh": mesh, "axes": axes, "around": around, "check_rep": typed}


def _inner_mesh(mesh: Mesh | None, scope: Scope, typed: bool) -> Mesh:
    """The mesh of a shard_map inside another's body: the outer one's."""
    outer = scope.bottom.mesh
    if mesh is not None and mesh is not outer:
        raise ValueError(
            f"a shard_map inside the body of another takes the same mesh, {outer}, and got {mesh}: make one mesh with "
            "the axes of both, and let each shard_map map over its own, by axis_names={…}"
        )
    if typed is not scope.typed:
        raise ValueError(
            f"a shard_map inside the body of another has types where that one has them: write check_rep={scope.typed} "
            "here, or change it there"
        )
    return outer


def _names(axes: Collection[str]) -> str:
    return f"{{{', '.join(map(repr, axes))}}}"


def _check_axis_names(axis_names: Collection[str], mesh: Mesh) -> None:
    if isinstance(axis_names, str):
        raise TypeError(f"shard_map: axis_names is a set of names, {{{axis_names!r}}}, got {axis_names!r}")
    for a in axis_names:
        if a not in mesh.shape:
            raise ValueError(f"shard_map: axis_names names {a!r}, but the axes of the mesh are {mesh.axis_names}")


def _check_axes(paths: Sequence[tuple[str, Any]], where: dict) -> None:
    """Raise ValueError for a spec with an axis that this shard_map does not map over."""
    for path, spec in paths:
        _check_leaf(path, spec, where["mesh"])
        for a in sorted(spec.axes.union(spec.summed).difference(where["axes"])):
            inside = a in where["around"]
            raise ValueError(
                f"{path} = {spec} names the axis {a!r}, but this shard_map maps over {_names(where['axes'])}: "
                + (
                    f"the one around it maps over {a!r}, and values here are blocks along it already; leave it out"
                    if inside
                    else f"add {a!r} to axis_names, or leave it out, and split the value inside by a further shard_map"
                )
            )


def _check_leaf(path: str, spec: Any, mesh: Mesh) -> None:
    check_is_spec(path, spec)
    check_spec(spec, mesh.shape, path)
