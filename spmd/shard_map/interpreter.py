"""The interpreter of `shard_map` bodies.

A value is the ranks' data, and the axes along which it may vary. Subclasses of the interpreter compile bodies, or check
numbers: see `interpreters`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy

from collectives.backends.base import Axes, Backend
from collectives.backends.simulated import join_blocks
from collectives.ops import axis_index_p
from minidiff.core.interpreter import EVALUATE, Interpreter, current_interpreter, running, set_interpreter
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import Scope
from minidiff.core.states import REDUCED, UNREDUCED, VARYING, AxisStates
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, as_plain_operand, operand_type
from minidiff.errors import LeakedTracerError, MisfitError, VarianceError, divergence_error, leak_message
from minidiff.values.aliasing import owner_of
from minidiff.values.dtypes import PLAIN, check_dtype
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec

#: The usual reason why operands' shapes do not fit in the body of a `shard_map`.
_BLOCKS = (
    "their shapes cannot be broadcast together. In the body of a shard_map, arguments are a rank's blocks, but {} "
    "a whole array: split it like the others, with its entry of in_specs"
)


@functools.lru_cache(maxsize=4096)
def _type_of_blocks(shape: tuple[int, ...], dtype: numpy.dtype, states: AxisStates) -> ShapedArray:
    """The type of values in these states; cached."""
    check_dtype(dtype)
    return ShapedArray(shape, dtype, states)


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
    arguments: Sequence[tuple[RankTracer, PartitionSpec]] = ()  # of the body
    compare_constant: Callable[[Any], None] | None = None  # is called with plain arrays that the body closes over

    def __init__(self, mesh: Mesh, typed: bool, base: Interpreter = EVALUATE, explicit: bool = False):
        super().__init__(None)
        self.mesh = mesh
        self.base = base  # runs operations on the data: evaluation, or a recorder
        self.mapped: Axes = ()
        self.scope = Scope(mesh.shape, typed, explicit)
        self.scope.bottom = self
        self.plain: set[int] = set()  # ids of the arrays that own plain operands' memory; using one again costs a copy

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        if primitive.is_higher_order:
            return self.run_higher_order(primitive, args, params)
        if primitive.has_effect:
            return self.run_effect(primitive, args, params)
        operands = [
            (x.data, x.varying) if type(x) is RankTracer and x.interpreter is self else self.operand(x) for x in args
        ]
        previous = current_interpreter()
        set_interpreter(self.base)  # as `running` does, which takes longer
        try:
            if primitive.batch_along is not None:  # a collective
                return self._run_collective(primitive, args, operands, params)
            try:
                data, varying = self.mesh.ranks.apply(primitive, operands, params)
            except MisfitError:  # its shapes include the dimensions that count ranks
                raise MisfitError(primitive, args, self._why_blocks_differ(operands)) from None
        finally:
            set_interpreter(previous)
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
        return marks_of(primitive.result_states(list(map(operand_type, args)), params))

    def _run_collective(
        self, primitive: Any, args: Sequence[Value], operands: Sequence[tuple[Any, Axes]], params: dict
    ) -> Value:
        """Run a collective, or `axis_index`."""
        if primitive is axis_index_p:
            return RankTracer(self, *self.axis_index(params["axes"]))
        if primitive.linear_operands:  # the operand varies where its table does
            every = self.mesh.ranks.sort_axes({a for _, axes in operands for a in axes})
            operands = [(self.mesh.ranks.reshard_data(*operands[0], every), every), operands[1]]
        blocks = self.communicate(primitive, operands, params)
        if not primitive.multiple_results:
            return RankTracer(self, *blocks[0], self._result_states(primitive, args, params, primitive.gives))
        each = primitive.per_operand or primitive
        states = [self._result_states(each, [x], params, each.gives) for x in args]
        return [RankTracer(self, *block, state) for block, state in zip(blocks, states)]

    # ------------------------------------------------ steps that subclasses replace

    def run_effect(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
        """Run an operation with an effect, on values that are the same on all ranks."""
        values = [x.concrete(primitive.name) if isinstance(x, RankTracer) else x for x in args]
        with running(self.base):
            return primitive.bind(*values, **params)

    def axis_index(self, axes: Axes) -> tuple[Any, Axes]:
        return self.mesh.ranks.axis_index(axes)

    def communicate(
        self, primitive: Any, operands: Sequence[tuple[Any, Axes]], params: dict
    ) -> Sequence[tuple[Any, Axes]]:
        """Run a collective on the backend's data; return the results' data and axes."""
        if primitive.multiple_results or len(operands) > 1:
            return self.mesh.ranks.variadic(primitive, operands, params)
        return [self.mesh.ranks.collective(primitive, *operands[0], params)]

    def run_higher_order(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
        """Run an operation with bodies, whose conditions are the same on all ranks."""
        with running(self):
            return primitive.evaluate(args, params)

    # ------------------------------------------------ values that enter and leave the body

    def enter(self, x: Value, spec: PartitionSpec) -> RankTracer:
        """Split a whole array by a spec, and return its blocks as a value of the body."""
        x, varying = self.operand(x)  # raises LeakedTracerError for a leaked tracer
        x = numpy.asarray(x)
        x, varying = self.mesh.ranks.place(x, spec.dims(x.ndim)) if spec.axes else (x, varying)
        return RankTracer(self, x, varying, self.marks_of_spec(spec))

    def marks_of_spec(self, spec: PartitionSpec) -> AxisStates | None:
        """Return the states of an argument's blocks, as `RankTracer` takes them."""
        return spec.states if (spec.unreduced or spec.reduced) and self.scope.typed else None

    def leave(self, outs: Sequence[Value], specs: Sequence[PartitionSpec]) -> list[Value]:
        """Join the results of the body as whole arrays, which share no memory with arguments."""
        wholes = [self._join(*self.operand(x), spec) for x, spec in zip(outs, specs)]
        return [x.copy() if id(owner_of(x)) in self.plain else x for x in wholes]

    def _join(self, data: Any, varying: Axes, spec: PartitionSpec) -> numpy.ndarray:
        ranks = self.mesh.ranks
        if spec.unreduced:
            raise VarianceError(f"a result with the spec {spec} is a sharded array of partial sums: import spmd")
        wanted = ranks.sort_axes(spec.axes)
        data = data if varying == wanted else ranks.reshard_data(data, varying, wanted)
        whole = join_blocks(data, spec.dims(len(ranks.block_shape(data, wanted))), ranks.sizes)
        return whole if whole.flags.writeable else whole.copy()

    def operand(self, x: Value) -> tuple[Any, Axes]:
        """A value as the backend takes it, and the axes that it varies along: none for plain arrays."""
        if type(x) is RankTracer and x.interpreter is self:
            return x.data, x.varying
        if isinstance(x, Tracer):
            raise LeakedTracerError(leak_message(x))
        if isinstance(x, numpy.ndarray):
            self.plain.add(id(owner_of(x)))
        if self.compare_constant is not None and isinstance(x, (numpy.ndarray, numpy.generic)):
            self.compare_constant(x)
        return x if type(x) in PLAIN else as_plain_operand(x), ()


_varying = functools.lru_cache(maxsize=4096)(AxisStates.of)


def marks_of(states: AxisStates) -> AxisStates | None:
    """Return these states as `RankTracer` takes them: None if they follow from where the value varies."""
    return states if states.unreduced or states.reduced else None


def axes_and_size(ranks: Backend, axes: Collection[str]) -> dict:
    """The parameters of a collective over all of these axes."""
    return {"axes": ranks.sort_axes(axes), "size": ranks.size(axes)}


#: Subclasses of `SPMD` for bodies of a `shard_map` that an interpreter of these types evaluates, instead of `SPMD`.
interpreters: dict[type[Interpreter], type[SPMD]] = {}


def body_interpreter(params: dict) -> SPMD:
    """Return the interpreter that runs the body of a `shard_map` with these parameters."""
    classes = type(current_interpreter()).__mro__
    kind = next((interpreters[c] for c in classes if c in interpreters), SPMD)
    return kind(params["mesh"], params["check_rep"], explicit=not params["auto_pbroadcast"])
