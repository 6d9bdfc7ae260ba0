"""Auto axes: axes of the mesh that a `shard_map` does not map over, along which values in its body are sharded.

A `shard_map` of the axes in `axis_names` hands its function blocks along these. Along the other axes, its auto axes, a
value is whole to the function; but if an argument is sharded along them, it stays so. `AutoAxes` is the interpreter of
these values, which runs on top of the others in the body. A value is a block, which to the interpreters below is one of
a body that maps over all axes, and a spec that says how the whole value is split along the auto axes. An operation
follows the same plan as on sharded arrays outside a body (`arrays/sharding_rules.py`), so communication is explicit
below: derivatives, tapes and counts need nothing new.

A `shard_map` over auto axes in the body takes a block as it is, if its spec agrees with the value's, and what it
returns stays split. It is inlined as a `pscatter` and an `all_gather_invariant`, which cost nothing here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from collectives.ops import all_gather_invariant_p, pscatter_p
from minidiff.control_flow.bodies import BodyOperation, Call
from minidiff.control_flow.custom_rules import LinearCall, custom_jvp_p
from minidiff.control_flow.partial_eval import CARRY, SCANNED, Nested, TracedBody
from minidiff.control_flow.while_loop import While
from minidiff.core.interpreter import Interpreter, current_interpreter, running, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import vary_along
from minidiff.core.tape import Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import name_of, show_axes
from minidiff.ops.reduction import max_p, min_p
from minidiff.values.dtypes import is_differentiable
from minidiff.values.lists import select, split_list
from spmd.mesh.specs import WHOLE, PartitionSpec, block_type, global_type, part_count
from spmd.sharding.routes import Dims, follow, route
from spmd.sharding.sharding_rules import BlockPlan, plan_of

Body = Callable[..., tuple[list, Sequence[PartitionSpec]]]  # blocks -> results, their specs


def with_auto_axes(body: Body, axes: Collection[str], specs: Sequence[PartitionSpec]) -> Body:
    """A body whose arguments are split further, along auto axes, by `specs`, and so are its results."""

    def run(*blocks: Value) -> tuple[list, tuple[PartitionSpec, ...]]:
        auto = AutoAxes(current_interpreter(), axes)
        with transforming(auto):
            outs, out_specs = body(*map(auto.wrap_block, blocks, specs))
            return list(map(auto.block, outs)), tuple(s.extended(auto.spec(x)) for x, s in zip(outs, out_specs))

    return run


def split_of_arguments(values: Sequence[Value], specs: Sequence[PartitionSpec], context: Any) -> tuple:
    """Return the specs of arguments' blocks along auto axes; nothing if none is split there."""
    auto = tuple(_split_of(x, spec, context) for x, spec in zip(values, specs))
    return auto if any(spec.axes for spec in auto) else ()


def _split_of(x: Value, spec: PartitionSpec, context: Any) -> PartitionSpec:
    """Return the spec of an argument's blocks along auto axes: as they are split now, where the sizes allow it."""
    sharding, sizes, dims = typeof(x).sharding, context.mesh.shape, []
    if sharding is None or not sharding.mesh.is_like(context.mesh):
        return PartitionSpec()
    for n, major, have in zip(x.shape, spec.dims(x.ndim), sharding.spec.dims(x.ndim)):
        split = [a for a in have if a in context.auto]
        while split and n % part_count((*major, *split), sizes):
            split.pop()
        dims.append(tuple(split))
    return PartitionSpec.of_dims(dims)


def check_splits_batch(axes: tuple[str, ...], specs: Sequence[PartitionSpec], size: int, params: dict) -> None:
    """Raise ValueError unless a `vmap` with this `spmd_axis_name` can split the batch of a `shard_map`."""
    sizes = params["mesh"].shape
    shown = f"vmap with spmd_axis_name={show_axes(axes)}"
    for a in axes:
        if a not in sizes:
            raise ValueError(f"{shown}: the axes of the mesh of this shard_map are {tuple(sizes)}")
        for spec in specs:
            if a in spec.states.axes:
                raise ValueError(
                    f"{shown}: the batch is split along {a!r}, but the spec {spec} of the shard_map names it: name "
                    "another axis of the mesh"
                )
    if axes and not params["check_rep"]:
        raise ValueError(f"{shown} needs the types of the shard_map: leave out its check_rep=False")
    if size % part_count(axes, sizes):
        raise ValueError(
            f"{shown}: a batch of {size} cannot be split evenly over {part_count(axes, sizes)} ranks; pad it, "
            f"x, mask = spmd.pad(x, mesh, P({show_axes(axes)})), or leave out spmd_axis_name"
        )


class AutoTracer(Tracer):
    """A value that is sharded along auto axes: this rank's block, and the spec that splits the whole."""

    __slots__ = ("block", "spec", "_type")

    def __init__(self, interpreter: AutoAxes, block: Value, spec: PartitionSpec):
        self.interpreter: Any = interpreter
        self.block = block
        self.spec = spec
        self._type = global_type(typeof(block), spec, interpreter.sizes)

    @property
    def type(self) -> ShapedArray:
        return self._type

    def concrete(self, use: str) -> Any:
        self.check_alive()
        return self.interpreter.reshard(self, WHOLE).concrete(use)

    def __repr__(self) -> str:
        return f"{self.block!r} (a block of {self.type}, split as {self.spec})"

    __str__ = __repr__


class AutoAxes(Interpreter):
    """Run operations on values that are sharded along auto axes by operations on their blocks."""

    name = "shard_map"

    def __init__(self, below: Interpreter, axes: Collection[str], outer: AutoAxes | None = None):
        super().__init__(below, outer)
        self.axes = frozenset(axes)
        self.sizes = self.scope.axes

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
        if isinstance(primitive, Call):  # its body may close over values that are sharded
            return self._call(primitive, args, params)
        if primitive is all_gather_invariant_p and params["tiled"] and self.axes.issuperset(params["axes"]):
            return self._join(args[0], params)
        if primitive.has_effect or not any(map(self.owns, args)):
            with running(self.below):
                return self.below.process(primitive, list(map(self.block, args)), params)
        if isinstance(primitive, BodyOperation):
            return self._with_bodies(primitive, args, params)
        if primitive is pscatter_p and params["tiled"] and self.axes.issuperset(params["axes"]):
            return self._split(args[0], params)
        if primitive.on_ranks:
            args = [self._whole_along(x, params["axes"]) for x in args]
        plan = plan_of(primitive, args, list(map(self.dims, args)), params, self.sizes)
        if plan.decomposed:
            with running(self):
                return primitive.decomposed(*args, **params)
        blocks = list(map(self.block, args))
        with running(self.below):
            if plan.over and primitive in (max_p, min_p):
                results = self._extremum(primitive, args[0], params, plan)
            else:
                results = self._on_ranks(plan.on_blocks, blocks)
        results = list(map(self.wrap_block, results, plan.out_specs))
        return results if primitive.multiple_results else results[0]

    def _extremum(self, primitive: Primitive, x: AutoTracer, params: dict, plan: BlockPlan) -> list[Value]:
        """Bind an extremum with its own derivative rule: all elements that attain it share, whichever rank has them."""

        def body(block: Value) -> list[Value]:
            return self._on_ranks(plan.on_blocks, [block])

        rule = self.on_blocks(lambda x, t: primitive.jvp([x], [t], params), [x.spec] * 2, [*plan.out_specs])
        return custom_jvp_p.bind(x.block, name=primitive.name, body=body, jvp=rule, consts=0)

    # ------------------------------------------------ values

    def owns(self, x: Value) -> bool:
        return type(x) is AutoTracer and x.interpreter is self

    def wrap_block(self, block: Value, spec: PartitionSpec) -> Value:
        """The value of which every rank has a block."""
        return AutoTracer(self, block, spec.with_states((), ())) if spec.axes else block

    def block(self, x: Value) -> Value:
        return x.block if self.owns(x) else x

    def spec(self, x: Value) -> PartitionSpec:
        return x.spec if self.owns(x) else WHOLE

    def dims(self, x: Value) -> Dims:
        return self.spec(x).dims(typeof(x).ndim)

    def reshard(self, x: Value, spec: PartitionSpec) -> Value:
        """Reshard `x` along the auto axes."""
        if self.spec(x) == spec:
            return x
        t = typeof(x)
        steps = route(self.dims(x), spec.dims(t.ndim), t.nbytes, self.sizes)
        with running(self.below):
            return self.wrap_block(vary_along(self._on_ranks(follow, steps, self.block(x)), spec.axes), spec)

    def _whole_along(self, x: Value, axes: Sequence[str]) -> Value:
        return self.reshard(x, _without(self.dims(x), axes)) if self.owns(x) else x

    def lift_outer(self, x: Any) -> Value:
        return AutoTracer(self, self.below.lift(x.block), x.spec)

    def _on_ranks(self, f: Callable, *args: Any) -> Any:
        """Call a function of blocks, whose collectives may be over any axis of the mesh."""
        bottom = self.scope.bottom
        mapped, bottom.mapped = bottom.mapped, ()
        try:
            return f(*args)
        finally:
            bottom.mapped = mapped

    # ------------------------------------------------ a shard_map over auto axes, inlined

    def _split(self, x: AutoTracer, params: dict) -> Value:
        """The block of `x` along further axes, which are mapped over: `pscatter`."""
        axes, d, dims = params["axes"], params["axis"], [*_without(self.dims(x), params["axes"]).dims(x.ndim)]
        if x.shape[d] % part_count((*axes, *dims[d]), self.sizes):
            dims[d] = ()
        split = [*dims[:d], (*axes, *dims[d]), *dims[d + 1 :]]
        block = self.block(self.reshard(x, PartitionSpec.of_dims(split)))
        return self.wrap_block(block, PartitionSpec.of_dims(dims))

    def _join(self, x: Value, params: dict) -> Value:
        """The value that has `x` for its blocks: `all_gather_invariant`, when it is needed."""
        axes, d, dims = params["axes"], params["axis"], [*self.dims(x)]
        dims[d] = (*axes, *dims[d])
        return self.wrap_block(self.block(x), PartitionSpec.of_dims(dims))

    # ------------------------------------------------ operations with bodies

    def on_blocks(self, f: Callable, specs: Sequence[PartitionSpec], out: list, parts: int = 1) -> Callable:
        """A body as a function of blocks, for operands that are split as `specs` says.

        `out` has the specs of the results. If it is empty, the first run fills it; later ones reshard. Results come
        in `parts` with the same specs: a rule's results and their tangents, for example.
        """

        def run(*blocks: Value) -> list[Value]:
            inside = AutoAxesInside(current_interpreter(), self.axes, outer=self)
            with transforming(inside):
                values = [x if x is None else inside.wrap_block(x, spec) for x, spec in zip(blocks, specs)]
                outs = list(map(inside.lift, f(*values)))
                if not out:
                    out.extend(map(inside.spec, outs[: len(outs) // parts]))
                pairs = zip(outs, itertools.cycle(out))
                return [x if x is None else inside.block(inside.reshard(x, spec)) for x, spec in pairs]

        run.__name__ = name_of(f)
        return run

    def _call(self, primitive: Call, args: Sequence[Value], params: dict) -> list[Value]:
        """Bind a body that runs inline, and its rules, as functions of blocks."""
        specs = list(map(self.spec, args))
        out: list = []
        changed: dict = {}
        if isinstance(primitive, LinearCall):
            out, changed = self._linear_call(args, specs, params)
        if params["body"] is not None:
            changed["body"] = self.on_blocks(params["body"], specs, out)
        if "jvp" in params:
            of_rule = specs[params["consts"] :]
            changed["jvp"] = self.on_blocks(params["jvp"], [*of_rule, *of_rule], out, 2)
        if "rule" in params:  # of a custom_vmap
            changed["rule"] = functools.partial(_refuse_rule, params["name"])
        with running(self.below):
            outs = primitive.bind(*map(self.block, args), **{**params, **changed})
        return list(map(self.wrap_block, outs, out))

    def _linear_call(self, args: Sequence[Value], specs: Sequence[PartitionSpec], params: dict) -> tuple[list, dict]:
        """The specs of a custom derivative's results, those of tangents of their shape; and its backward rule."""
        active, count = params["active"], params["residuals"]
        known, active_specs = split_list(specs, len(args) - len(params["active"]))
        tangents = list(zip(map(typeof, args[len(known) :]), active_specs))
        types = params["out_types"]
        out = [next((spec for x, spec in tangents if x.shape == t.shape), WHOLE) for t in types]
        residuals = known[params["consts"] :][:count]

        def bwd(values, cts):
            f = lambda *xs: [params["bwd"](xs[:count], xs[count:])[i] for i in active]  # noqa: E731
            in_cts = dict(zip(active, self.on_blocks(f, [*residuals, *out], active_specs)(*values, *cts)))
            return [in_cts.get(i) for i in range(max(active) + 1)]

        blocks = tuple(block_type(t, spec, self.sizes) for t, spec in zip(types, out))
        return select(out, [is_differentiable(t.dtype) for t in types]), {"bwd": bwd, "out_types": blocks}

    def _with_bodies(self, primitive: BodyOperation, args: Sequence[Value], params: dict) -> list[Value]:
        """Bind a loop or branches to tapes of blocks. A carry is split as the first step's result is."""
        leading, args = split_list([*args], primitive.count_leading(params))
        groups, results = primitive.groups(params)
        args = [self._whole_along(x, self.dims(x)[0]) if g == SCANNED else x for x, g in zip(args, groups)]
        specs = [_of_element(self.dims(x)) if g == SCANNED else self.spec(x) for x, g in zip(args, groups)]
        out: list[PartitionSpec] = []
        while True:
            traced = [self._trace(tape, specs, out) for tape in primitive.branches(params)]
            carries = iter(out)
            like = [next(carries) if g == CARRY else spec for spec, g in zip(specs, groups)]
            if like == specs:
                break
            specs = like
        operand_specs = [s.batched() if g == SCANNED else s for s, g in zip(specs, groups)]
        operands = primitive.operands_of([self.block(self.reshard(x, s)) for x, s in zip(args, operand_specs)], params)
        if isinstance(primitive, While):
            taken = [*map(self.spec, leading), *[spec for spec, g in zip(specs, groups) if g == CARRY]]
            test = self._trace(params["cond"], taken, [WHOLE])
            tape, constants = test.close(list)
            leading = [*constants, *leading]
            params = {**params, "cond": tape, "cond_consts": len(leading)}
        with running(self.below):
            closed = [b.close(list) for b in traced]
            outs = primitive.rebind(list(map(self.block, leading)), closed, operands, results, params)
        return [self.wrap_block(x, s.batched() if g == SCANNED else s) for x, s, g in zip(outs, out, results)]

    def _trace(self, tape: Tape, specs: Sequence[PartitionSpec], out: list) -> TracedBody:
        """A body on blocks, traced: see `on_blocks`."""
        types = [block_type(t, spec, self.sizes) for t, spec in zip(tape.in_types, specs)]
        with running(self.below):
            return TracedBody(self.on_blocks(tape, specs, out), types)


def _refuse_rule(name: str, *args: Any) -> Any:
    raise TypeError(
        f"{name} is a custom_vmap in the body of a shard_map that maps over some axes of the mesh alone (axis_names=): "
        "under vmap its rule would get blocks. Call vmap inside the body, or let the shard_map map over all axes"
    )


class AutoAxesInside(Nested, AutoAxes):
    """The same, continued inside a body."""


def _without(dims: Dims, axes: Collection[str]) -> PartitionSpec:
    return PartitionSpec.of_dims([tuple(a for a in split if a not in axes) for split in dims])


def _of_element(dims: Dims) -> PartitionSpec:
    return PartitionSpec.of_dims(dims[1:])
