"""The interpreter of `shard_map` bodies.

A value is the ranks' data, and the axes along which it may vary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy

from collectives.backends.base import Axes, Backend, describe_rank
from collectives.collective import grouped_collective
from collectives.lowering import bind_index, run_lowered
from collectives.ops import axis_index_p, pmax_p, pmin_p
from minidiff.compiler.codegen import CompiledTape, Source
from minidiff.compiler.plan import plan_program
from minidiff.compiler.simplify import optimize
from minidiff.core.interpreter import EVALUATE, Interpreter, become, current_interpreter, running, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.scope import Scope
from minidiff.core.staging import Stage
from minidiff.core.states import REDUCED, UNREDUCED, VARYING, AxisStates
from minidiff.core.tape import Tape, tapes_of
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, Var, as_plain_operand, operand_type, typeof
from minidiff.debug import CheckFinite, error_for, finiteness, is_inexact, worst_finiteness
from minidiff.diagnostics.errors import LeakedTracerError, MisfitError, TracerError, divergence_error, leak_message
from minidiff.higher_order.bodies import BodyOperation
from minidiff.higher_order.cond import Cond, communicating_equations, run_if
from minidiff.higher_order.effects import has_effects
from minidiff.ops.reduction import any as any_of
from minidiff.values.aliasing import owner_of
from minidiff.values.dtypes import PLAIN, check_dtype
from spmd.checks.agreement import check_blocks, checks_values
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec
from spmd.sharding.sharded_array import ShardedArray, Sharding, array_maker

#: The usual reason why operands' shapes do not fit in the body of a `shard_map`.
_BLOCKS = (
    "their shapes cannot be broadcast together. In the body of a shard_map, arguments are a rank's blocks, but {} "
    "whole: split it as the others are, by its entry of in_specs"
)
UNROLLED = 8  # steps: a scan of at most this length is unrolled where a `shard_map`'s body is compiled


@functools.lru_cache(maxsize=4096)
def _type_of_blocks(shape: tuple[int, ...], dtype: numpy.dtype, states: AxisStates) -> ShapedArray:
    """The type of values in these states; cached."""
    check_dtype(dtype)
    return ShapedArray(shape, dtype, states=states)


class RankTracer(Tracer):
    """A value on the ranks of a mesh.

    `data` is the backend's, `varying` the axes along which it may differ. `marked` are its `states` along mesh axes
    if it is unreduced or reduced along one; otherwise they follow from `varying`, and it is None.
    """

    __slots__ = ("data", "varying", "marked", "states")
    interpreter: SPMD
    states: AxisStates

    def __init__(self, interpreter: SPMD, data: Any, varying: Axes, states: AxisStates | None = None):
        self.interpreter = interpreter
        self.data = data
        self.varying = varying
        self.marked = states
        self.states = states or _varying(varying if interpreter.scope.typed else ())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.interpreter.mesh.ranks.block_shape(self.data, self.varying)

    @property
    def dtype(self) -> numpy.dtype:
        return self.data.dtype

    @property
    def type(self) -> ShapedArray:
        shape = self.interpreter.mesh.ranks.block_shape(self.data, self.varying)
        return _type_of_blocks(shape, self.data.dtype, self.states)

    def concrete(self, use: str) -> numpy.ndarray:
        self.check_alive()
        if self.varying:
            shown = self.type if self.interpreter.scope.typed else ShapedArray(self.shape, self.dtype, self.varying)
            raise divergence_error(f"{use} needs one value", shown, self.varying)
        return self.data

    def __str__(self) -> str:
        return self.interpreter.mesh.ranks.show(self.data, self.varying)

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self) if self.varying or not spec else format(self.data, spec)


class SPMD(Interpreter):
    """Run operations on blocks, and collectives between ranks, by the mesh's backend; a body maps over `mapped`."""

    name = "shard_map"
    checker: Any = None  # the interpreter that evaluated its `shard_map`
    unrolled: float = UNROLLED  # the longest loop that is recorded
    idle: frozenset[int] = frozenset()  # the simulated ranks that do not take the running branch
    arguments: Sequence[tuple[RankTracer, PartitionSpec]] = ()  # of the body
    compared: dict[int, Any] | None = None  # closed-over arrays compared so far, by id; None if they are not compared

    def __init__(self, mesh: Mesh, typed: bool, base: Interpreter = EVALUATE, explicit: bool = False):
        super().__init__(None)
        self.mesh = mesh
        self.base = base  # runs operations on the data: evaluation, or a recorder
        self.mapped: Axes = ()
        self.scope = Scope(mesh.shape, typed, explicit)
        self.scope.bottom = self
        self.plain: set[int] = set()  # the ids of owners of plain operands' memory; one that is used again costs a copy

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        ranks, recorded = self.mesh.ranks, self.base is not EVALUATE
        if primitive.is_higher_order:
            if isinstance(primitive, Cond) and typeof(args[0]).variance:
                return self._branch_by_rank(primitive, args, params, recorded)
            is_long = params.get("length", 0) > self.unrolled
            if recorded and self.scope.typed and isinstance(primitive, BodyOperation):
                bodies = primitive.operands_by_body(len(args), params)
                if bodies is not None and (is_long or "length" not in params):
                    return self._record_bodies(primitive, args, params, bodies)
            if recorded and is_long:
                raise TracerError(f"{primitive} is a loop: its body is compiled, not what surrounds it")
            with running(self):
                return primitive.evaluate(
                    args if self.scope.typed else [self.make_agreed_invariant(x) for x in args], params
                )
        if primitive.has_effect:
            return self._on_each_rank(primitive, args, params)
        operands = [
            (x.data, x.varying) if type(x) is RankTracer and x.interpreter is self else self.operand(x) for x in args
        ]
        previous = current_interpreter()
        become(self.base)  # as `running` does, which takes longer
        try:
            if primitive.batch_along is not None:  # a collective
                return self._across(primitive, args, operands, params, recorded)
            try:
                data, varying = ranks.apply(primitive, operands, params)
            except MisfitError:  # its shapes include the dimensions that count ranks
                raise MisfitError(primitive, args, self._why_blocks_differ(operands)) from None
        finally:
            become(previous)
        states = self._result_states(primitive, args, params)
        if primitive.multiple_results:
            return [RankTracer(self, x, varying, states) for x in data]
        return RankTracer(self, data, varying, states)

    def _why_blocks_differ(self, operands: Sequence[tuple]) -> str:
        """The usual reason why operands' shapes do not fit; it names the unmapped argument among them."""
        owners = [owner_of(x) for x, _ in operands]
        for block, spec in self.arguments:
            if spec.path and not spec.axes and any(x is owner_of(block.data) for x in owners):
                return _BLOCKS.format(f"{spec.path}, whose spec is {spec}, is")
        return _BLOCKS.format("an unmapped argument, or an array that the body closes over, is")

    def _result_states(
        self, primitive: Primitive, args: Sequence[Value], params: dict, gives: str = VARYING
    ) -> AxisStates | None:
        """The states of an operation's results, as `RankTracer` takes them; a collective `gives` one of them."""
        for x in args:
            if type(x) is RankTracer and x.marked is not None:
                break
        else:
            if gives not in (UNREDUCED, REDUCED):
                return None
        return _marks(primitive.result_states(list(map(operand_type, args)), params))

    def _on_each_rank(self, primitive: Primitive, args: Sequence[Value], params: dict) -> list:
        """Run an operation with an effect, and no results, on each rank's blocks."""
        operands = [self.operand(x) for x in args]
        by_rank = functools.partial(_by_rank, self.mesh, self.idle, [varying for _, varying in operands])
        with running(self.base):
            return primitive.bind(*[x for x, _ in operands], **{**params, "by_rank": by_rank})

    def _across(
        self, primitive: Any, args: Sequence[Value], operands: Sequence[tuple], params: dict, recorded: bool
    ) -> Value:
        """Run a collective, or `axis_index`."""
        ranks = self.mesh.ranks
        if primitive is axis_index_p:
            axes = params["axes"]
            return RankTracer(self, *(bind_index(axes, ranks) if recorded else ranks.axis_index(axes)))
        several, each = primitive.multiple_results, primitive.each or primitive
        if not recorded and not several:
            place = ranks.collective(primitive, *operands[0], params)
            return RankTracer(self, *place, self._result_states(primitive, args, params, primitive.gives))
        if recorded:
            found = run_lowered(primitive, operands, ranks, params)
        else:
            found = ranks.variadic(primitive, operands, params)
        states = [self._result_states(each, [x], params, each.gives) for x in args]
        results = [RankTracer(self, *place, own) for place, own in zip(found, states)]
        return results if several else results[0]

    def lower(self, tape: CompiledTape, values: Sequence[Value]) -> list[Value] | None:
        """Run a body as one compiled program on this process's data; None if there is no such program."""
        if self.base is not EVALUATE or (self.idle and any(map(has_effects, tape.equations))):
            return None
        found = self.program(tape, values)
        if found is None:
            return None
        source, places = found
        try:
            with running(self.base):  # the remaining branches and loops are on data
                results = source.results(*[self.operand(x)[0] for x in values])
        except BaseException as error:
            self.mesh.ranks.finish(error)
            raise
        return [RankTracer(self, x, *place) for x, place in zip(results, places)]

    def program(
        self, tape: CompiledTape, values: Sequence[Value], donated: tuple[bool, ...] = ()
    ) -> tuple[Source, list[tuple[Axes, AxisStates | None]]] | None:
        """A body as one program on this process's data, and the places of its results.

        It may write into the data of the values that are `donated`.

        Return None if it cannot be recorded, because it needs concrete values, or if it would be long: for a loop
        over arrays, whose body then becomes such a program. Nor can a branch that prints, which some ranks do not take.
        """
        operands = [self.operand(x) for x in values]
        states = [getattr(x, "marked", None) for x in values]
        kinds = zip(operands, states)
        types = tuple((numpy.shape(x), typeof(x).dtype, varying, s) for (x, varying), s in kinds)
        key = self.mesh, self.scope.typed, donated, types
        if key not in tape.lowered:
            try:
                lowered, places = self.lowered(tape, operands, states, tape.options)
                kernels, runs = tape.options.get("kernels", True), tape.source.plan.runs
                plan = plan_program(lowered, (), donated, fills_donated=True, kernels=kernels, runs=runs)
                tape.lowered[key] = Source(plan, tape.name, options=tape.options), places
            except TracerError:
                tape.lowered[key] = None
        return tape.lowered[key]

    def lowered(
        self, tape: Tape, operands: Sequence[tuple[Any, Axes]], states: Sequence[AxisStates | None], options: dict
    ) -> tuple[Tape, list[tuple[Axes, AxisStates | None]]]:
        """The tape of what a compiled body does to this process's data, and the places of its results.

        Operands may be types. Raises TracerError if the body cannot be recorded, or would be long.
        """
        recorded, places = self._on_data(tape, operands, states)
        return optimize(recorded, **options), places

    def _on_data(
        self, tape: Tape, operands: Sequence[tuple[Any, Axes]], states: Sequence[AxisStates | None]
    ) -> tuple[Tape, list[tuple[Axes, AxisStates | None]]]:
        """Record what a body does to this process's data: the tape, and its results' axes and states."""
        stage = Stage(None, name="jit")
        inside = type(self)(self.mesh, self.scope.typed, base=stage)
        kinds = zip(operands, states)
        blocks = [RankTracer(inside, stage.new_input(typeof(x)), varying, s) for (x, varying), s in kinds]
        with transforming(inside), transforming(stage), running(inside):
            outs = tape.apply(*blocks)
            results = [inside.operand(x) for x in outs]
            places = [(varying, getattr(x, "marked", None)) for x, (_, varying) in zip(outs, results)]
            return stage.tape([x for x, _ in results]), places

    def _branch_by_rank(self, cond: Cond, args: Sequence[Value], params: dict, recorded: bool) -> list[Value]:
        """Run or record a cond whose selector varies: each rank has the results of its own branch."""
        selector, *values = [RankTracer(self, *self.operand(x), getattr(x, "marked", None)) for x in args]
        cond.check_communication(selector.type, params)
        tapes = tapes_of(params)
        for eqn in [eqn for tape in tapes for eqn in communicating_equations(tape)]:
            self.mesh.ranks.connect(eqn.params)
        if self.mesh.backend == "simulated":
            return self._branches_of_all_ranks(cond, selector, values, tapes, recorded)
        if recorded:
            return self._record_bodies(cond, [selector, *values], params, cond.operands_by_body(len(args), params))
        with running(self), self._in_branch([]):
            return tapes[cond.choose(selector.data)](*values)

    def _branches_of_all_ranks(
        self, cond: Cond, selector: RankTracer, values: Sequence[RankTracer], tapes: Sequence[Tape], recorded: bool
    ) -> list[Value]:
        """Run each branch on all simulated ranks at once, and select.

        Ranks that do not take a branch run it on the operands of one that does. On their own operands, which a branch
        never gets on real ranks, it might raise, or warn of a NaN. A branch that no rank takes does not run. Operands
        that a branch only returns are not copied; if all branches return the same one, nothing is selected.
        """
        if recorded and any(has_effects(eqn) for tape in tapes for eqn in tape.equations):
            raise TracerError(f"{cond} has an effect on some ranks only: it runs operation by operation")
        ranks: Any = self.mesh.ranks
        axes, results = selector.varying, {}
        returned: dict[tuple, RankTracer] = {}
        for i, tape in enumerate(tapes):
            with running(self.base if recorded else EVALUATE):
                takers = cond.matches(selector.data, i)
                if not recorded and not takers.any():
                    continue
            used = {a for eqn in tape.equations for a in eqn.inputs if isinstance(a, Var)}
            with running(self.base):
                lent = [
                    RankTracer(self, *ranks.mask_operand(x.data, x.varying, axes, takers), x.marked) if v in used else x
                    for v, x in zip(tape.inputs, values)
                ]
            if recorded:
                operands = [self.operand(x) for x in lent]
                on_data, places = self._on_data(tape, operands, [x.marked for x in lent])
                with running(self.base):
                    outs = run_if(any_of(takers), on_data, [x for x, _ in operands])
                results[i] = [RankTracer(self, x, *place) for x, place in zip(outs, places)]
                continue
            idle = [r for r, taken in enumerate(ranks.local(takers, axes)) if not taken]
            with running(self), self._in_branch(idle):
                made = map(self.operand, tape(*lent))
                results[i] = [
                    returned.setdefault((id(x), varying), RankTracer(self, x, varying)) for x, varying in made
                ]
        some = next(iter(results.values()))  # instead of those of branches that no rank takes
        with running(self):
            found = cond.select(selector, [results.get(i, some) for i in range(len(tapes))])
        return [RankTracer(self, x.data, x.varying, _marks(t.states)) for x, t in zip(found, tapes[0].out_types)]

    @contextlib.contextmanager
    def _in_branch(self, idle: Collection[int]) -> Iterator[None]:
        """Run a branch that some ranks do not take: these do not print, and are not there to compare arrays."""
        before = self.idle, self.compared
        self.idle, self.compared = self.idle.union(idle), None
        try:
            yield
        finally:
            self.idle, self.compared = before

    def _record_bodies(self, primitive: Primitive, args: Sequence[Value], params: dict, bodies: dict) -> list[Value]:
        """Record a cond or a loop as one on data."""
        operands = [self.operand(x) for x in args]
        changed: dict = {}
        places: list = []
        for name, taken in bodies.items():
            states = [getattr(args[k], "marked", None) for k in taken]
            changed[name], places = self._on_data(params[name], [operands[k] for k in taken], states)
        with running(self.base):
            results = primitive.bind(*[x for x, _ in operands], **{**params, **changed})
        return [RankTracer(self, x, *place) for x, place in zip(results, places)]

    def _adopt(self, x: Tracer) -> Value:
        if not isinstance(x, ShardedArray):
            return super()._adopt(x)
        with running(EVALUATE):  # arrays that the body closes over are unmapped: every rank has the whole
            return RankTracer(self, x.type.sharding.gather(x), ())

    def make_agreed_invariant(self, x: Value) -> Value:
        """Without types, make an integer or boolean scalar that is the same on all ranks invariant."""
        if type(x) is not RankTracer or not x.varying or x.shape or x.dtype.kind not in "biu":
            return x
        ranks, params = self.mesh.ranks, {"axes": x.varying, "size": self.mesh.ranks.size(x.varying)}
        data = numpy.asarray(x.data)  # raises TracerError if it is recorded
        low, high = (ranks.collective(p, data, x.varying, params, counted=False)[0] for p in (pmin_p, pmax_p))
        return RankTracer(self, low, ()) if numpy.array_equal(low, high) else x

    # ------------------------------------------------ values that enter and leave the body

    def enter(self, x: Value, spec: PartitionSpec) -> RankTracer:
        """Shard an argument by a spec, and return its blocks as a value of the body."""
        mesh = self.mesh
        if isinstance(x, ShardedArray) and not (x.spec.key == spec.key and (x.mesh is mesh or x.mesh.is_like(mesh))):
            # a loop's step is compiled before the shardings are known
            x = Sharding(mesh, spec).reshard(x)
        states = spec.states if (spec.unreduced or spec.reduced) and self.scope.typed else None
        if isinstance(x, ShardedArray):
            return RankTracer(self, x.data, x.varying, states)
        x, varying = self.operand(x)  # raises LeakedTracerError for a leaked tracer
        x = numpy.asarray(x)
        x, varying = mesh.ranks.place(x, spec.dims(x.ndim)) if spec.axes else (x, varying)
        return RankTracer(self, x, varying, states)

    def compare_results(self, outs: Sequence[Value], specs: Sequence[PartitionSpec]) -> None:
        """Check that ranks have the same blocks of results along axes that their specs do not name."""
        rows, sort = enumerate(zip(outs, specs)), self.mesh.ranks.sort_axes
        check_blocks(self.mesh, [(f"result {k}", self.operand(x)[0], sort(spec.split_axes)) for k, (x, spec) in rows])

    def leave(self, x: Value, spec: PartitionSpec) -> Value:
        """Convert a result of the body to an array, plain or sharded."""
        data, varying = self.operand(x)
        return array_maker(self.mesh, spec, varying, self.mesh.ranks.block_shape(data, varying), data.dtype)(data)

    def operand(self, x: Value) -> tuple[Any, Axes]:
        """A value as the backend takes it, and the axes that it varies along: none for plain arrays."""
        if type(x) is RankTracer and x.interpreter is self:
            return x.data, x.varying
        if isinstance(x, Tracer):
            raise LeakedTracerError(leak_message(x))
        if isinstance(x, numpy.ndarray):
            self.plain.add(id(owner_of(x)))
        if self.compared is not None and isinstance(x, (numpy.ndarray, numpy.generic)) and id(x) not in self.compared:
            self.compared[id(x)] = x
            check_blocks(self.mesh, [("an array that the body closes over", x, ())], bool(checks_values()))
        return x if type(x) in PLAIN else as_plain_operand(x), ()


_varying = functools.lru_cache(maxsize=4096)(AxisStates.of)


def _marks(states: AxisStates) -> AxisStates | None:
    """These states, as `RankTracer` takes them: None if they follow from where the value varies."""
    return states if states.unreduced or states.reduced else None


def axes_and_size(ranks: Backend, axes: Collection[str]) -> dict:
    """The parameters of a collective over all of these axes."""
    return {"axes": ranks.sort_axes(axes), "size": ranks.size(axes)}


class CheckFiniteOnRanks(SPMD):
    """`SPMD` while `debug_nans` is on.

    Each rank's results are checked against its operands. Before each sum, an all-reduce of a small integer tells every
    rank the worst state of the other ranks' operands.
    """

    keeps_sources = True

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        sums = primitive.on_ranks and getattr(primitive, "sums", False)  # others only move or select numbers
        if primitive.is_higher_order or (primitive.on_ranks and not sums):
            return super().process(primitive, args, params)
        given = [self._worst(x) for x in args]
        if sums:
            among = {k: params[k] for k in ("axes", "size", "groups") if k in params}
            maximum_p = grouped_collective(pmax_p) if "groups" in params else pmax_p
            given = [self.mesh.ranks.collective(maximum_p, x, axes, among, counted=False) for x, axes in given]
        with numpy.errstate(all="ignore"):
            out = super().process(primitive, args, params)
        outs = out if primitive.multiple_results else [out]
        self.checker.observe(str(primitive), [self.operand(x)[0] for x in outs])
        made = [self._worst(x) for x in outs]
        ranks, setting = self.mesh.ranks, worst_finiteness(params)
        before = [max(setting, *map(int, states)) for states in zip(*[_local(ranks, *x) for x in given])]
        after = [max(map(int, states)) for states in zip(*[_local(ranks, *x) for x in made])]
        worse = {r: after[r] for r in range(len(after)) if self.checker.is_wrong(before[r], after[r])}
        if worse:
            where = [describe_rank(self.mesh.shape, ranks.rank + r) for r in worse]
            raise error_for(str(primitive), args, max(worse.values()), ", ".join(where))
        return out

    def _worst(self, x: Value) -> tuple[numpy.ndarray, Axes]:
        """The worst state (finite, infinite, NaN) in each rank's block: as data, and the axes it varies along."""
        data, varying = self.operand(x)
        if not is_inexact(data):
            return numpy.zeros((), numpy.uint8), ()
        found = numpy.asarray(finiteness(data))
        block = len(self.mesh.ranks.block_shape(found, varying))
        return found.max(axis=tuple(range(found.ndim - block, found.ndim)), initial=0), varying

    def lower(self, tape: CompiledTape, values: Sequence[Value]) -> None:
        return None


def body_interpreter(params: dict) -> SPMD:
    """The interpreter that runs the body of a `shard_map` with these parameters."""
    bottom = current_interpreter()
    kind = CheckFiniteOnRanks if isinstance(bottom, CheckFinite) else SPMD
    interpreter = kind(params["mesh"], params["check_rep"], explicit=not params["auto_pbroadcast"])
    interpreter.checker = bottom
    return interpreter


def _local(ranks: Backend, x: numpy.ndarray, varying: Axes) -> list[numpy.ndarray]:
    """The blocks of a value on the ranks in this process."""
    blocks = ranks.local(numpy.asarray(x), varying)
    return blocks if isinstance(blocks, list) else [blocks]


def _by_rank(
    mesh: Mesh, idle: Collection[int], axes: Sequence[Axes], data: Sequence[Value]
) -> Iterator[tuple[str, list[Value]]]:
    """Yield the name of each rank in this process that is not idle, and its blocks of these values."""
    columns = [_local(mesh.ranks, x, varying) for x, varying in zip((0, *data), ((), *axes))]  # 0: to count the ranks
    for r, (_, *blocks) in enumerate(zip(*columns)):
        if r not in idle:
            yield describe_rank(mesh.shape, mesh.ranks.rank + r), [x[()] for x in blocks]
