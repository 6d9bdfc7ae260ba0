"""The interpreter of `shard_map` bodies.

A value is the ranks' data, and the axes along which it may vary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from collectives.backends.base import Axes, Backend, place_of
from collectives.ops import axis_index_p
from collectives.passes.overlap import index, run_lowered
from minidiff.compiler.codegen import CompiledTape, Source
from minidiff.compiler.simplify import optimize
from minidiff.core import (
    EVALUATE,
    INVARIANT,
    Interpreter,
    LeakedTracerError,
    MisfitError,
    Primitive,
    Scope,
    ShapedArray,
    Tracer,
    TracerError,
    Value,
    VarianceError,
    check_dtype,
    leak_message,
    plain_operand,
    running,
    transforming,
    typeof,
)
from minidiff.debug import error_for, is_inexact, state, worst
from minidiff.higher_order.bodies import BodyOperation
from minidiff.ops.base import is_elementwise
from minidiff.staging import Stage
from minidiff.tape import Tape
from spmd.agreement import check_blocks
from spmd.arrays.sharded_array import ShardedArray
from spmd.mesh import Mesh
from spmd.partition import PartitionSpec, global_type

#: The usual reason why operands' shapes do not fit in the body of a `shard_map`.
_BLOCKS = (
    "they do not fit. In the body of a shard_map arguments are a rank's blocks, and what the body closes over is "
    "whole: make it an argument, with a spec of its own in in_specs"
)
UNROLLED = 8  # steps: a scan of at most this length is unrolled where a `shard_map`'s body is compiled


@functools.lru_cache(maxsize=4096)
def _type_of_blocks(shape: tuple[int, ...], dtype: numpy.dtype, variance: Sequence[str]) -> ShapedArray:
    """The type of values that vary along some axes, cached."""
    check_dtype(dtype)
    return ShapedArray(shape, dtype, variance)


class RankTracer(Tracer):
    """A value on the ranks of a mesh.

    `data` is what the backend holds, `held` the axes along which it may vary.
    """

    __slots__ = ("data", "held")

    def __init__(self, interpreter: SPMD, data: numpy.ndarray, held: Axes):
        self.interpreter = interpreter
        self.data = data
        self.held = held

    @property
    def shape(self) -> tuple[int, ...]:
        return self.interpreter.mesh.ranks.block_shape(self.data, self.held)

    @property
    def dtype(self) -> numpy.dtype:
        return self.data.dtype

    @property
    def type(self) -> ShapedArray:
        interpreter, data, held = self.interpreter, self.data, self.held
        shape = interpreter.mesh.ranks.block_shape(data, held)
        return _type_of_blocks(shape, data.dtype, held if interpreter.scope.typed else INVARIANT)

    def concrete(self, use: str) -> numpy.ndarray:
        self.check_alive()
        if self.held:
            axes = ", ".join(map(repr, self.held))
            raise VarianceError(
                f"{use} needs one value, but {ShapedArray(self.shape, self.dtype, self.held)} varies along {axes}: the "
                "ranks would go different ways, and wait for each other for ever. Make them agree first (psum, pmax "
                f"or pmin over {axes}), or choose element by element with np.where"
            )
        return self.data

    def __str__(self) -> str:
        return self.interpreter.mesh.ranks.show(self.data, self.held)

    def __repr__(self) -> str:
        return str(self)

    def __format__(self, spec: str) -> str:
        return str(self) if self.held or not spec else format(self.data, spec)


class SplitTracer(Tracer):
    """A value that is whole in a body, but held by the ranks in blocks.

    They are split by `spec`. A `shard_map` inside the body returns its mapped results so: another one inside the body
    can take the blocks as they are. Any other operation gathers them first (except elementwise ones, which run on the
    blocks).
    """

    __slots__ = ("data", "held", "spec", "type", "_whole")

    def __init__(self, interpreter: SPMD, data: numpy.ndarray, held: Axes, spec: PartitionSpec):
        self.interpreter = interpreter
        self.data = data
        self.held = held
        self.spec = spec
        block = ShapedArray(interpreter.mesh.ranks.block_shape(data, held), data.dtype, held)
        whole = global_type(block, spec, interpreter.mesh.shape)
        self.type = whole if interpreter.scope.typed else whole.update(variance=INVARIANT)
        self._whole: RankTracer | None = None

    def whole(self) -> RankTracer:
        """The whole value, gathered on every rank: under MPI all ranks must call it."""
        if self._whole is None:
            ranks, lead = self.interpreter.mesh.ranks, len(self.spec.lead)
            block = (1,) * lead + ranks.block_shape(self.data, self.held)
            data = ranks.reshape(self.data, self.held, block) if lead else self.data
            self._whole = RankTracer(self.interpreter, *ranks.join(data, self.held, self.spec.dims(len(block))))
        return self._whole

    def concrete(self, use: str) -> numpy.ndarray:
        self.check_alive()
        return self.whole().concrete(use)

    def __str__(self) -> str:
        return self.interpreter.mesh.ranks.show(self.data, self.held)

    __repr__ = __str__


class SPMD(Interpreter):
    """The interpreter that runs operations on blocks by the mesh's backend.

    Collectives run between its ranks. It maps over `axes` of the mesh. Inside the body of another `shard_map`, `outer`
    is that one's interpreter, and its axes are bound too.
    """

    name = "shard_map"
    checker: Interpreter | None = None  # the interpreter that evaluated its `shard_map`

    def __init__(
        self,
        mesh: Mesh,
        typed: bool,
        axes: Axes,
        outer: SPMD | None = None,
        base: Interpreter = EVALUATE,
        explicit: bool = False,
    ):
        super().__init__(None, outer)
        self.mesh = mesh
        self.base = base  # runs operations on the data: evaluation, or a recorder
        self.axes = axes
        bound = mesh.ranks.ordered({*axes, *(outer.scope.axes if outer is not None else ())})
        self.scope = Scope({a: mesh.shape[a] for a in bound}, typed, explicit)
        self.scope.bottom = self

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        ranks, recorded = self.mesh.ranks, self.base is not EVALUATE
        if primitive.is_higher_order:
            if recorded and _is_loop(params):
                raise TracerError(f"{primitive} is a loop: its body is compiled, not what surrounds it")
            if recorded and self.scope.typed and isinstance(primitive, BodyOperation):
                bodies = primitive.bodies(len(args), params)
                if bodies is not None:
                    return self._record_bodies(primitive, args, params, bodies)
            with running(self):
                return primitive.evaluate(args if self.scope.typed else [self.agreed(x) for x in args], params)
        if primitive.has_effect:
            return self._on_each_rank(primitive, args, params)
        spec = self._common_spec(primitive, args)
        if spec is not None:
            return self._on_blocks(primitive, args, params, spec)
        operands = [
            (x.data, x.held) if type(x) is RankTracer and x.interpreter is self else self.operand(x) for x in args
        ]
        with running(self.base):
            if primitive.on_ranks:
                return self._across(primitive, operands, params, recorded)
            try:
                data, held = ranks.apply(primitive, operands, params)
            except MisfitError:  # its shapes include the dimensions that count ranks
                raise MisfitError(primitive, args, _BLOCKS) from None
        if primitive.multiple_results:
            return [RankTracer(self, x, held) for x in data]
        return RankTracer(self, data, held)

    def _on_each_rank(self, primitive: Primitive, args: Sequence[Value], params: dict) -> list:
        """Run an operation with an effect, and no results, on each rank's blocks."""
        operands = [self.operand(x) for x in args]
        by_rank = functools.partial(_by_rank, self.mesh, [held for _, held in operands])
        with running(self.base):
            return primitive.bind(*[x for x, _ in operands], **{**params, "by_rank": by_rank})

    def _across(self, primitive: Primitive, operands: Sequence[tuple], params: dict, recorded: bool) -> Value:
        """Run a collective, or `axis_index`."""
        ranks = self.mesh.ranks
        for x, _ in operands:
            check_dtype(x.dtype)  # Python objects cannot be sent to other ranks
        if primitive is axis_index_p:
            axes = params["axes"]
            return RankTracer(self, *(index(axes, ranks) if recorded else ranks.axis_index(axes)))
        if recorded:
            found = run_lowered(primitive, operands, ranks, params)
        elif primitive.multiple_results:
            found = ranks.variadic(primitive.name, operands, primitive.sends(params), params)
        else:
            found = [ranks.collective(primitive.name, *operands[0], primitive.sends(params), params)]
        results = [RankTracer(self, *x) for x in found]
        return results if primitive.multiple_results else results[0]

    def _common_spec(self, primitive: Primitive, args: Sequence[Value]) -> PartitionSpec | None:
        """The spec that operands share, if an elementwise operation can run on blocks.

        It is None otherwise.
        """
        if SplitTracer not in map(type, args) or not is_elementwise(primitive):
            return None
        split = [x for x in args if type(x) is SplitTracer]
        spec, shape = split[0].spec, split[0].shape
        alike = all(x.spec == spec for x in split) and all(numpy.shape(x) in ((), shape) for x in args)
        return spec if alike else None

    def _on_blocks(self, primitive: Primitive, args: Sequence[Value], params: dict, spec: PartitionSpec) -> SplitTracer:
        operands = [self.blocks(x, spec) if numpy.shape(x) else self.operand(x) for x in args]
        with running(self.base):
            return SplitTracer(self, *self.mesh.ranks.apply(primitive, operands, params), spec)

    def blocks(self, x: Value, spec: PartitionSpec) -> tuple[Any, Axes]:
        """The blocks of a value of this body, split by `spec`.

        The axes of `spec` are some that the body does not map over.
        """
        if type(x) is SplitTracer and x.interpreter is self and x.spec == spec:
            return x.data, x.held
        return place(self.mesh.ranks, *self.operand(x), spec)

    def enter_sharded(self, x: Value, spec: PartitionSpec) -> Value | None:
        """Convert a sharded value to one of this body; None if that would move data."""
        if x.spec == spec:
            return RankTracer(self, x.data, x.held)
        if spec.lead and x.spec.dims(x.ndim) == spec.dims(x.ndim):  # stacked blocks that a loop has carried
            ranks = self.mesh.ranks
            shape = ranks.block_shape(x.data, x.held)[len(spec.lead) - len(x.spec.lead) :]
            return RankTracer(self, ranks.reshape(x.data, x.held, shape), x.held)
        rest = spec.rest_of(x.spec)
        if rest is None or not rest.axes.isdisjoint(self.scope.axes):
            return None
        return SplitTracer(self, x.data, x.held, rest)

    def lower(self, tape: CompiledTape, values: Sequence[Value]) -> list[Value] | None:
        """Run a body as one compiled program on this process's data."""
        operands = [self.operand(x) for x in values]
        key = self.mesh, self.scope.typed, tuple((numpy.shape(x), typeof(x).dtype, held) for x, held in operands)
        if self.base is not EVALUATE:
            return None
        if key not in tape.lowered:
            tape.lowered[key] = self._lowered(tape, operands)
        program = tape.lowered[key]
        if program is None:
            return None
        source, helds = program
        try:
            with running(self.base):  # branches and loops that are left are on data
                results = source.results(*[x for x, _ in operands])
        except BaseException:
            self.mesh.ranks.finish()
            raise
        return [RankTracer(self, x, held) for x, held in zip(results, helds)]

    def _lowered(self, tape: CompiledTape, operands: Sequence[tuple[Any, Axes]]) -> tuple[Source, list[Axes]] | None:
        """Compile a body's tape to a program on this process's data.

        Returns it, and the axes along which its results vary. Return None if it cannot be recorded, because it needs
        concrete values, or if it would be long: for a loop, whose body then becomes such a program.
        """
        try:
            recorded, helds = self._on_data(tape, operands)
        except TracerError:
            return None
        return Source(optimize(recorded, **tape.options), tape.name, options=tape.options), helds

    def _on_data(self, tape: Tape, operands: Sequence[tuple[Any, Axes]]) -> tuple[Tape, list[Axes]]:
        """Record what a body does to this process's data.

        Returns the tape, and the axes along which its results vary.
        """
        stage = Stage(None, name="jit")
        inside = SPMD(self.mesh, self.scope.typed, tuple(self.scope.axes), base=stage)
        blocks = [RankTracer(inside, stage.new_input(typeof(x)), held) for x, held in operands]
        with transforming(inside), transforming(stage), running(inside):
            results = [inside.operand(x) for x in tape.apply(*blocks)]
            return stage.tape([x for x, _ in results]), [held for _, held in results]

    def _record_bodies(self, primitive: Primitive, args: Sequence[Value], params: dict, bodies: dict) -> list[Value]:
        """Record a cond or a loop as one on data.

        Its predicate is invariant, so all ranks take the same branch.
        """
        operands = [self.operand(x) for x in args]
        changed, helds = {}, []
        for name, taken in bodies.items():
            changed[name], helds = self._on_data(params[name], [operands[k] for k in taken])
        with running(self.base):
            results = primitive.bind(*[x for x, _ in operands], **{**params, **changed})
        return [RankTracer(self, x, held) for x, held in zip(results, helds)]

    def adopt_own(self, x: Tracer) -> RankTracer:
        return RankTracer(self, *self.outer.operand(x))

    def _adopt(self, x: Tracer) -> Value:
        if not isinstance(x, ShardedArray):
            return super()._adopt(x)
        with running(EVALUATE):  # arrays that the body closes over are unmapped: every rank has the whole
            return RankTracer(self, x.type.sharding.gathered(x), ())

    def agreed(self, x: Value) -> Value:
        """Without types, make a scalar that all ranks agree on invariant.

        Only integers and booleans are compared: predicates and indices.
        """
        if type(x) is not RankTracer or not x.held or x.shape or x.dtype.kind not in "biu":
            return x
        ranks, params = self.mesh.ranks, {"axes": x.held, "size": self.mesh.ranks.size(x.held)}
        low, high = (ranks.collective(name, x.data, x.held, False, params)[0] for name in ("pmin", "pmax"))
        return RankTracer(self, low, ()) if numpy.array_equal(low, high) else x

    def operand(self, x: Value) -> tuple[Any, Axes]:
        """A value as the backend takes it, and the axes that it varies along.

        Plain arrays vary along none.
        """
        if type(x) is RankTracer and x.interpreter is self:
            return x.data, x.held
        if type(x) is SplitTracer and x.interpreter is self:
            return self.operand(x.whole())
        if isinstance(x, Tracer):
            raise LeakedTracerError(leak_message(x))
        return plain_operand(x), ()


#: Collectives that may produce a NaN or an infinity. The others only move or select numbers.
_SUMS = ("psum", "psum_scatter", "reduce")


class CheckFiniteOnRanks(SPMD):
    """`SPMD` while `debug_nans` is on.

    Each rank's results are checked against its operands. Before each sum, an all-reduce of a small integer tells every
    rank the worst state of the other ranks' operands.
    """

    keeps_sources = True

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        sums = (primitive.each or primitive).name in _SUMS
        if primitive.is_higher_order or (primitive.on_ranks and not sums):
            return super().process(primitive, args, params)
        given = [self._worst(x) for x in args]
        if sums:
            among = {k: params[k] for k in ("axes", "size", "groups") if k in params}
            given = [self.mesh.ranks.collective("pmax", x, held, False, among) for x, held in given]
        with numpy.errstate(all="ignore"):
            out = super().process(primitive, args, params)
        made = [self._worst(x) for x in (out if primitive.multiple_results else [out])]
        ranks, setting = self.mesh.ranks, worst(params)
        before = [max(setting, *states) for states in zip(*[self._by_rank(*x) for x in given])]
        after = [max(states) for states in zip(*[self._by_rank(*x) for x in made])]
        worse = {r: after[r] for r in range(len(after)) if self.checker.is_wrong(before[r], after[r])}
        if worse:
            where = [place_of(self.mesh.shape, ranks.rank + r) for r in worse]
            raise error_for(str(primitive), args, max(worse.values()), ", ".join(where))
        return out

    def _worst(self, x: Value) -> tuple[numpy.ndarray, Axes]:
        """The worst state (finite, infinite, NaN) in each rank's block.

        It is returned as data, and the axes that it varies along.
        """
        data, held = (x.data, x.held) if isinstance(x, (RankTracer, SplitTracer)) else self.operand(x)
        if not is_inexact(data):
            return numpy.zeros((), numpy.uint8), ()
        found = numpy.asarray(state(data))
        block = len(self.mesh.ranks.block_shape(found, held))
        return found.max(axis=tuple(range(found.ndim - block, found.ndim)), initial=0), held

    def _by_rank(self, x: numpy.ndarray, held: Axes) -> list[int]:
        found = self.mesh.ranks.local(numpy.asarray(x), held)
        return list(map(int, found)) if isinstance(found, list) else [int(found)]

    def lower(self, tape: CompiledTape, values: Sequence[Value]) -> None:
        return None


class CompareUnmapped(SPMD):
    """`SPMD` that checks that unmapped values are the same on all ranks.

    These are unmapped arguments, and arrays that the body closes over.
    """

    checked: dict[int, Any] | None = None  # closed-over arrays that were compared, by id; None before the body runs

    def check_arguments(self, blocks: Sequence[RankTracer | SplitTracer], specs: Sequence[PartitionSpec]) -> None:
        names = [spec.path or "an unmapped operand" for spec in specs]
        check_blocks(self.mesh, [(name, x.data, x.held) for name, x in zip(names, blocks)])
        self.checked = {}

    def operand(self, x: Value) -> tuple[Any, Axes]:
        if self.checked is not None and isinstance(x, (numpy.ndarray, numpy.generic)) and id(x) not in self.checked:
            self.checked[id(x)] = x
            check_blocks(self.mesh, [("an array that the body closes over", x, ())])
        return super().operand(x)


class CheckAll(CompareUnmapped, CheckFiniteOnRanks):
    """Both checks: `CompareUnmapped` and `CheckFiniteOnRanks`."""


#: Body interpreters, keyed by (whether unmapped values are compared, whether results are checked to be finite).
CHECKED = {
    (False, False): SPMD,
    (True, False): CompareUnmapped,
    (False, True): CheckFiniteOnRanks,
    (True, True): CheckAll,
}


def place(ranks: Backend, data: Any, held: Axes, spec: PartitionSpec) -> tuple[Any, Axes]:
    """Split an array (or one for each rank along `held`) into blocks by `spec`."""
    data = data if held else numpy.asarray(data)
    data, held = ranks.place(data, spec.dims(len(ranks.block_shape(data, held))), held)
    if spec.lead:
        data = ranks.reshape(data, held, ranks.block_shape(data, held)[len(spec.lead) :])
    return data, held


def _by_rank(mesh: Mesh, helds: Sequence[Axes], data: Sequence[Value]) -> Iterator[tuple[str, list[Value]]]:
    """Yield the name of each rank in this process, and its blocks of these values."""
    ranks = mesh.ranks
    local = [ranks.local(numpy.asarray(x), held) for x, held in zip((0, *data), ((), *helds))]  # 0: to count the ranks
    columns = [blocks if isinstance(blocks, list) else [blocks] for blocks in local]
    for r, (_, *blocks) in enumerate(zip(*columns)):
        yield place_of(mesh.shape, ranks.rank + r), [x[()] for x in blocks]


def _is_loop(params: dict) -> bool:
    """Whether these are the parameters of a loop that is too long to unroll."""
    return params.get("length", 0) > UNROLLED
