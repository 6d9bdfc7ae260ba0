"""The interpreter of a `shard_map` body: a value is what all ranks hold, and the axes along which they may differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

import collectives.rewrites  # noqa: F401  (they are the compiler's, once there are ranks)
from collectives.backend import Axes
from collectives.exchange import exchange, index
from collectives.ops import Collective, axis_index_p
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
    leak_message,
    running,
    transforming,
    typeof,
)
from minidiff.optimize import optimize
from minidiff.source import CompiledTape, Source
from minidiff.staging import Stage
from spmd.mesh import Mesh
from spmd.sharded_array import ShardedArray

UNROLLED = 8  # steps: a scan of no more is written out where a `shard_map`'s body is compiled


class RankTracer(Tracer):
    """A value on the ranks of a mesh: `data` as the backend holds it, `held` the axes along which it may differ."""

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
        return ShapedArray(self.shape, self.data.dtype, self.held if self.interpreter.scope.typed else INVARIANT)

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


class SPMD(Interpreter):
    """Operations are applied to blocks by the mesh's backend; collectives run between its ranks."""

    name = "shard_map"

    def __init__(self, mesh: Mesh, typed: bool, base: Interpreter = EVALUATE):
        super().__init__(None)
        self.mesh = mesh
        self.base = base  # what runs operations on the data: evaluation, or a recorder
        self.scope = Scope(mesh.shape, typed)
        self.scope.bottom = self

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        ranks, recorded = self.mesh.ranks, self.base is not EVALUATE
        if primitive.has_body:
            if recorded and _is_loop(params):
                raise TracerError(f"{primitive} is a loop: its body is compiled, not what surrounds it")
            with running(self):
                return primitive.evaluate(args if self.scope.typed else [self.agreed(x) for x in args], params)
        operands = [self.operand(x) for x in args]
        with running(self.base):
            if primitive is axis_index_p:
                axes = params["axes"]
                return RankTracer(self, *(index(axes, ranks) if recorded else ranks.axis_index(axes)))
            if isinstance(primitive, Collective):
                ((x, held),) = operands
                if recorded:
                    return RankTracer(self, *exchange(primitive, x, held, ranks, params))
                return RankTracer(self, *ranks.collective(primitive.name, x, held, primitive.communicates, params))
            try:
                data, held = ranks.apply(primitive, operands, params)
            except MisfitError:  # it speaks of all ranks' blocks
                raise MisfitError(primitive, args) from None
        if primitive.multiple_results:
            return [RankTracer(self, x, held) for x in data]
        return RankTracer(self, data, held)

    def lower(self, tape: CompiledTape, values: Sequence[Value]) -> list[Value] | None:
        """Run a body as one compiled program on this process's data."""
        operands = [self.operand(x) for x in values]
        key = self.mesh, self.scope.typed, tuple((numpy.shape(x), typeof(x).dtype, held) for x, held in operands)
        if key not in tape.lowered:
            tape.lowered[key] = self._lowered(tape, operands) if self.base is EVALUATE else None
        program = tape.lowered[key]
        if program is None:
            return None
        source, helds = program
        return [RankTracer(self, x, held) for x, held in zip(source.results(*[x for x, _ in operands]), helds)]

    def _lowered(self, tape: CompiledTape, operands: Sequence[tuple[Any, Axes]]) -> tuple[Source, list[Axes]] | None:
        """A body's tape as a program on the data, and the axes along which its results are held.

        None where it cannot be recorded, since it has to look at values on its way, or would be long: a loop, whose
        body then becomes such a program.
        """
        stage = Stage(None, name="jit")
        inside = SPMD(self.mesh, self.scope.typed, stage)
        blocks = [RankTracer(inside, stage.new_input(typeof(x)), held) for x, held in operands]
        try:
            with transforming(inside), transforming(stage), running(inside):
                results = [inside.operand(x) for x in tape.apply(*blocks)]
                recorded = stage.tape([x for x, _ in results])
        except TracerError:
            return None
        return Source(optimize(recorded), tape.name), [held for _, held in results]

    def _adopt(self, x: Tracer) -> Value:
        # A sharded array that the body closes over is one that every rank has whole.
        return RankTracer(self, x.gather(), ()) if isinstance(x, ShardedArray) else super()._adopt(x)

    def agreed(self, x: Value) -> Value:
        """Without types: a predicate or an index that all ranks are found to agree about, as one value."""
        if type(x) is not RankTracer or not x.held or x.shape or x.dtype.kind not in "biu":
            return x
        ranks, params = self.mesh.ranks, {"axes": x.held, "size": self.mesh.ranks.size(x.held)}
        low, high = (ranks.collective(name, x.data, x.held, False, params)[0] for name in ("pmin", "pmax"))
        return RankTracer(self, low, ()) if numpy.array_equal(low, high) else x

    def operand(self, x: Value) -> tuple[Any, Axes]:
        """A value as the backend takes it: plain arrays are the same on all ranks."""
        if type(x) is RankTracer and x.interpreter is self:
            return x.data, x.held
        if isinstance(x, Tracer):
            raise LeakedTracerError(leak_message(x))
        return x, ()


def _is_loop(params: dict) -> bool:
    """Whether these are the parameters of a loop of more than a few steps."""
    return params.get("length", 0) > UNROLLED
