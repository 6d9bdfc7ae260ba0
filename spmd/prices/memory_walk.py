"""The bytes that a rank holds along a tape: a walk that counts bytes in place of seconds.

An equation allocates its results, and frees the values that it is the last to use. Views allocate nothing. The compiler
says which values share memory, and when each is used for the last time (`minidiff/compiler/buffers.py`). Of a program
that runs eagerly, values live as long as Python holds them (`minidiff/values/aliasing.py`). Where `jit` compiles
the steps of a loop alone, a step is one operation, whose body is that program.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any

import numpy

from collectives import lowering
from collectives.exact_sums import SimulatedRanks
from collectives.lowering import Lowered
from minidiff.api.recording import make_tape
from minidiff.compiler.buffers import REUSED_BYTES, Memory, ProgramPlan, donatable_carries, fused_p
from minidiff.compiler.program import group_operations, plan_body, plan_tape
from minidiff.control_flow.bodies import Call
from minidiff.control_flow.cond import Cond
from minidiff.control_flow.loops import Scan, run_count
from minidiff.control_flow.while_loop import While
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import ShapedArray, Var, operand_type, typeof
from minidiff.errors.location import Location, split_location
from minidiff.values.aliasing import Lifetimes, watch_lifetimes
from minidiff.values.lists import split_list
from spmd.prices.compiled_tape import RankOfMesh, lower_body, record_op_by_op
from spmd.prices.memory_layout import MemoryLayout, filled_p, values_freed
from spmd.prices.tape_cost import OperationCosts, TapeCost
from spmd.prices.walk import TapeRun, Walk, is_backward, local_type
from spmd.shard_map.compiled import donated_blocks
from spmd.shard_map.operation import shard_map_p

ARGUMENTS, CONSTANTS = "arguments", "constants"
GRADIENTS, RESIDUALS, RESULTS = "gradients", "residuals", "results"
COMMUNICATION, TEMPORARIES = "communication", "temporaries"

#: Kinds that a program holds throughout. Arguments are parameters, optimizer state and data.
STATIC = (ARGUMENTS, CONSTANTS)
#: Kinds that a program allocates. Memory that several of these describe counts as the first.
DYNAMIC = (GRADIENTS, RESIDUALS, RESULTS, COMMUNICATION, TEMPORARIES)
KINDS = (*STATIC, *DYNAMIC)
MAX_CONSTANT_SIZE = 4096  # integers that are computed if their operands are known


@dataclass(frozen=True)
class MemorySample:
    """The bytes that a rank holds while one operation runs, including its operands and results.

    `bytes` maps each kind of memory to its bytes. `source` is the line that asked for the operation; in the backward
    direction, the line whose derivative needs it; None if unknown.
    """

    operation: str
    source: Location | None
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def dynamic(self) -> int:
        """The bytes that the program allocates: all but arguments and constants."""
        return sum(self.bytes.get(kind, 0) for kind in DYNAMIC)


@dataclass
class BodyContext:
    """The context of a body: the operation that runs it, as far as memory depends on it.

    `kinds` are those of its results' memory; `donated` are the inputs that it may write into; `frees` is whether memory
    is freed before it ends; `shard_map` is the equation that it belongs to, if any; `op_by_op` is whether its
    operations run one by one, and Python holds their values; `runs` is the number of times that it runs; `fills` is
    whether results are copied into donated inputs.
    """

    kinds: Sequence[str]
    donated: Sequence[bool] = ()
    frees: bool = True
    shard_map: Equation | None = None
    op_by_op: bool = False
    runs: int = 1
    fills: bool = True


@dataclass
class RankBody:
    """The body of a `shard_map` on the data of this process.

    `copied` is the bytes of blocks that are copied out of arguments; `written` marks the results that are written into
    donated arguments.
    """

    tape: Tape
    op_by_op: bool
    copied: int = 0
    written: Sequence[bool] = ()


@dataclass(eq=False)
class MemoryWalk(Walk):
    """A walk that counts bytes.

    `compiled` says that the program is the one that `jit` makes; `in_place` that loops write each carry over the
    previous one, as XLA's do (those of this library do not). `lifetimes` are those of a program that runs eagerly. With
    `every_rank`, this process holds the blocks of all ranks. `coordinate` maps the size of an axis to this rank's
    coordinate, if it matters.

    `in_callers_buffer` has the values whose memory is counted outside of their body, `strided` arrays with the strides
    of values, and `data` those of this process's blocks of sharded arrays.
    """

    costs: OperationCosts = field(default_factory=OperationCosts)
    fused: bool = False
    asynchronous: bool = False
    compiled: bool = False
    in_place: bool = False
    lifetimes: Lifetimes | None = None
    every_rank: bool = False
    coordinate: Callable[[int], int] | None = None
    contexts: dict[Tape, BodyContext] = field(default_factory=dict)
    rank_bodies: dict[Equation, RankBody] = field(default_factory=dict)
    in_callers_buffer: set[Var] = field(default_factory=set)
    strided: dict[Var, Any] = field(default_factory=dict)
    data: dict[Var, Any] = field(default_factory=dict)
    layouts: dict[Tape, MemoryLayout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.eager = self.lifetimes is not None
        self.ended: dict[Var, int] = {**self.lifetimes.ended} if self.lifetimes else {}

    def start(self, tape: Tape) -> TapeRun:
        return MemoryRun(self)

    def layout(self, tape: Tape) -> MemoryLayout:
        return self.layouts.get(tape) or self.layouts.setdefault(tape, MemoryLayout(tape, self.strided))

    def write_to_caller(self, body: Tape, results: Sequence[bool]) -> None:
        """Note the results of a body whose memory is counted outside of it."""
        for a, counted in zip(body.outputs, results):
            self.in_callers_buffer |= self.layout(body).bases[a] if counted and isinstance(a, Var) else set()

    def body_of(self, eqn: Equation) -> Tape:
        """Return the body of an operation; of a shard_map, as it runs on this process's data."""
        if eqn.primitive is not shard_map_p or self.in_place:
            return eqn.bodies[0]
        if eqn not in self.rank_bodies:
            self.rank_bodies[eqn] = body = self.rank_body(eqn)
            data = [self.data.get(a) if isinstance(a, Var) else None for a in eqn.inputs]
            pairs = [(v, x) for v, x in zip(body.tape.inputs, data) if x is not None]
            self.strided.update((v, x) for v, x in pairs if x.shape == v.type.shape)
        return self.rank_bodies[eqn].tape

    def rank_body(self, eqn: Equation) -> RankBody:
        params, shape = eqn.params, eqn.params["mesh"].shape
        ranks = SimulatedRanks(shape) if self.every_rank else RankOfMesh(shape, self.coordinate)
        if self.compiled and (tape := lower_body(params, ranks)) is not None:
            blocks = zip(tape.inputs, eqn.inputs, params["in_specs"])
            return RankBody(tape, False, sum(self.note_block(*block, ranks) for block in blocks))
        freed = values_freed(params["body"], self.ended, {})  # data lives as long as values in the body
        with watch_lifetimes(filled_p) as lifetimes:
            tape = record_op_by_op(eqn, ranks, freed, self.compiled)
        self.ended.update(lifetimes.ended)
        return RankBody(tape, True)

    def note_block(self, v: Var, a: Any, spec: Any, ranks: SimulatedRanks) -> int:
        """Note the strides of a block that is cut out of a plain argument, and return the bytes that this copies."""
        t = operand_type(a)
        if t.sharding is not None or spec.is_trivial:
            return 0
        tape = make_tape(lambda x: ranks.place(x, spec.dims(t.ndim))[0])(t)
        layout = MemoryLayout(tape, {})
        self.strided[v] = layout.array(tape.outputs[0])
        return 0 if layout.bases[tape.outputs[0]] <= {*tape.inputs} else self.strided[v].nbytes


class Allocations:
    """Bytes of the values in memory, and their sums by kind."""

    def __init__(self, kinds: Mapping[Var, str]):
        self.kinds, self.sizes, self.by_kind = kinds, dict[Var, int](), Counter[str]()

    def hold(self, v: Var, nbytes: int) -> None:
        self.free(v)
        self.sizes[v] = nbytes
        self.by_kind[self.kinds.get(v, TEMPORARIES)] += nbytes

    def free(self, v: Var) -> int:
        """Free a value, if it is there, and return its bytes."""
        nbytes = self.sizes.pop(v, 0)
        self.by_kind[self.kinds.get(v, TEMPORARIES)] -= nbytes
        return nbytes


class MemoryRun(TapeRun):
    """A run over a tape whose equations allocate and free."""

    walk: MemoryWalk
    plan: ProgramPlan | None = None

    def follow(self, tape: Tape, ready: Sequence[float]) -> None:
        walk, context = self.walk, self.walk.contexts.get(tape) or BodyContext([RESULTS] * len(tape.outputs))
        self.context, original = context, tape
        if walk.compiled and not context.op_by_op:
            sharded = [v.type.sharding is not None for v in tape.inputs]
            self.plan = plan_tape(tape, sharded, context.donated, context.fills, walk.kernels, context.runs)
            tape = self.plan.tape
            if context.shard_map is not None:
                walk.rank_bodies[context.shard_map].written = [a in self.plan.in_donated for a in tape.outputs]
        elif walk.in_place:
            tape = group_operations(tape, (), runs=context.runs)
        liveness = Memory(tape) if self.plan is None else self.plan.memory
        if tape is not original:
            walk.layouts[original] = MemoryLayout(tape, walk.strided, self.plan.reuses if self.plan else {})
        self.layout = walk.layout(original)
        self.backward, used = _passes(tape)
        self.kinds = self.find_kinds(tape, used)
        self.factors: set[Var] = set()  # values that rules of cotangents compute of their operands alone
        bases = self.layout.bases
        if not context.op_by_op:  # names go when nothing may share their memory
            bases = {v: {*memory, *liveness.roots[v]} for v, memory in bases.items()}
        self.freed = values_freed(tape, walk.ended if context.op_by_op else {}, bases)
        free = {*tape.inputs} if original in walk.contexts else set()  # a loop replaces its carries
        pairs = [(k, *pair) for k, eqn in enumerate(tape.equations) for pair in self.layout.exchanged.get(eqn, ())]
        #: Carries that exchange the memory of operands, which nothing else needs.
        self.exchanged = {
            v for k, v, a in pairs if isinstance(a, Var) and self.layout.bases[a] <= {*self.freed[k], *free}
        }
        #: Carries that a step may overwrite, and values in their memory.
        self.carries = set(() if context.fills else compress(tape.inputs, context.donated))
        self.live = Allocations(self.kinds)
        self.returned: dict[Equation, list] = {}  # results of branches that are operands or constants, with these
        for k, eqn in enumerate(tape.equations):
            if eqn.bodies and eqn.primitive is not fused_p:
                self.run_bodies(eqn)
            else:
                self.propagate_constants(eqn)
            self.allocate(eqn, k, liveness)
            copied = [v for v in eqn.outputs if self.plan and v in self.plan.fills]
            for v in [*(self.freed[k] if context.frees else ()), *copied]:
                self.live.free(v)

    def finish(self, tape: Tape) -> TapeCost:
        self.cost.seconds = max((sample.total for sample in self.cost.samples), default=0)
        return self.cost

    # ------------------------------------------------ sizes

    def sizes_of(self, values: Sequence[Var]) -> Counter:
        sizes = Allocations(self.kinds)
        for v in values:
            sizes.hold(v, self.size(v))
        return sizes.by_kind

    def size(self, a: Var) -> int:
        """Return the bytes of a value in this process."""
        return nbytes_of(a.type, self.walk.every_rank)

    # ------------------------------------------------ operations

    def allocate(self, eqn: Equation, k: int, liveness: Memory) -> None:
        """Allocate the results of an equation, and record a sample while it runs."""
        plan = self.plan
        extra: Counter = Counter()
        if eqn.primitive is shard_map_p:
            sizes = self.results_of_shard_map(eqn)
        else:
            sizes, extra[TEMPORARIES] = self.layout.allocated(eqn, self.size)
            sizes = {v: n for v, n in sizes.items() if v not in self.exchanged}
            if eqn in self.layout.inner:
                extra[TEMPORARIES] = peak_of(self.layout.inner[eqn], eqn) - sum(sizes.values())
        for v, a in self.returned.get(eqn, ()):  # in the memory of an operand that is not used again
            bases = self.layout.bases[a] if isinstance(a, Var) else ()
            sizes[v] = sum(self.live.free(b) for b in bases if b in self.freed[k])
        if plan is not None and self.context.frees:
            for v in eqn.outputs:
                self.live.free(reused := plan.reuses.get(v, v))
                if reused in self.carries:
                    self.carries.add(v)
                if v in self.carries or (v in plan.in_donated and v not in plan.fills):
                    sizes.pop(v, None)
        elif operand := self.reused_operand(eqn, k, liveness):
            self.live.free(operand)
        for v, nbytes in sizes.items():
            if v not in self.walk.in_callers_buffer:
                self.live.hold(v, nbytes)
        if isinstance(eqn.primitive, Scan) and self.lists_elements:  # the elements, while they are stacked
            extra += self.sizes_of(eqn.outputs[eqn.params["carry"] :])
        self.cost.samples.append(MemorySample(eqn.primitive.name, eqn.source, self.live.by_kind + extra))

    def reused_operand(self, eqn: Equation, k: int, liveness: Memory) -> Var | None:
        """Return the operand whose memory a result takes; None if it takes none."""
        if self.walk.in_place:
            return liveness.reused_by(eqn, k, REUSED_BYTES)
        recomputed = eqn.source is not None and eqn.source.recomputed
        if not self.context.op_by_op or self.context.shard_map or not is_backward(eqn) or recomputed:
            return None
        # Cotangents of plain arrays are compiled: a factor that a rule computes of its operands is overwritten.
        operands = [a for a in eqn.inputs if isinstance(a, Var)]
        is_known = lambda a: not any(map(self.backward.get, self.layout.bases[a]))  # noqa: E731
        if operands and all(a in self.factors or is_known(a) for a in operands):
            self.factors.update(eqn.outputs)
        return liveness.reused_by(eqn, k, 0, but=[a for a in operands if a not in self.factors])

    def results_of_shard_map(self, eqn: Equation) -> dict[Var, int]:
        """Return the bytes of each result of a shard_map: of the memory that it views.

        A view of another result takes none, nor does one of a sharded argument; a view of another argument is copied.
        """
        layout = self.walk.layout(self.walk.body_of(eqn))
        body, bases = layout.tape, layout.bases
        inputs, counted = {*body.inputs}, set()
        for v, a in zip(body.inputs, eqn.inputs):
            if not isinstance(a, Var) or a.type.sharding:
                counted.add(v)
        rank_body = self.walk.rank_bodies.get(eqn)
        written = rank_body.written if rank_body and rank_body.written else [False] * len(eqn.outputs)
        sizes = {}
        for a, v, is_written in zip(body.outputs, eqn.outputs, written):
            base = bases[a] if isinstance(a, Var) else set()
            memory = [v] if not base or not inputs.isdisjoint(base) else base - counted
            sizes[v] = 0 if is_written or base & counted & inputs else sum(map(self.size, memory))
            counted |= base - inputs
            if base:
                self.walk.data[v] = layout.array(a)
        return sizes

    # ------------------------------------------------ bodies

    def context_of(self, eqn: Equation) -> BodyContext:
        """Return the context of the bodies of an operation."""
        walk, kinds = self.walk, [self.kinds[v] for v in eqn.outputs]
        if eqn.primitive is not shard_map_p:  # eagerly, a recorded branch holds all of its values until it ends
            outer = self.context.shard_map if walk.eager else None
            runs = self.context.runs * eqn.params.get("runs", run_count(eqn))
            frees = not walk.eager or outer is not None or isinstance(eqn.primitive, Call)
            return BodyContext(kinds, self.overwritten_carries(eqn), frees, outer, walk.eager, runs, False)
        walk.body_of(eqn)
        op_by_op = eqn in walk.rank_bodies and walk.rank_bodies[eqn].op_by_op
        if not walk.compiled or op_by_op:
            return BodyContext(kinds, shard_map=eqn, op_by_op=op_by_op)
        sharded = [isinstance(a, Var) and a.type.sharding is not None for a in eqn.inputs]
        forwarded = self.plan.donates.get(eqn, ()) if self.plan else ()
        donated = donated_blocks(sharded, {**eqn.params, "donated": forwarded})
        return BodyContext(kinds, donated, shard_map=eqn)

    def overwritten_carries(self, eqn: Equation) -> list[bool]:
        """For each input of a compiled loop's body, return True if it is a carry that a step may overwrite."""
        is_plain = self.plan is not None and {*self.plan.sharded}.isdisjoint(
            a for a in eqn.inputs if isinstance(a, Var)
        )
        return donatable_carries(eqn) if is_plain else []

    def run_bodies(self, eqn: Equation) -> None:
        walk = self.walk
        if walk.in_place and eqn.primitive is shard_map_p:
            body, in_arguments = eqn.params["body"], []
            free = Counter((t.shape, t.dtype) for t in body.in_types)
            for a in body.outputs:  # in the memory of an argument of this type, if one is left
                block = typeof(a).shape, typeof(a).dtype
                in_arguments.append(isinstance(a, Var) and free[block] > 0)
                free[block] -= in_arguments[-1]
            walk.write_to_caller(body, in_arguments)
            walk.in_callers_buffer.update(v for v, counted in zip(eqn.outputs, in_arguments) if counted)
        elif isinstance(eqn.primitive, Cond):
            for body in eqn.bodies:
                walk.write_to_caller(body, [v in walk.in_callers_buffer for v in eqn.outputs])
        elif walk.in_place and isinstance(eqn.primitive, Scan):
            walk.write_to_caller(eqn.params["body"], [True] * eqn.params["carry"])
        walk.contexts.update(dict.fromkeys([*eqn.bodies, walk.body_of(eqn)], self.context_of(eqn)))
        super().run_bodies(eqn)

    def inline(self, eqn: Equation, body: Tape, inputs: Sequence[Any]) -> None:
        body = self.walk.body_of(eqn) if eqn.primitive is shard_map_p else body
        if isinstance(eqn.primitive, Cond):
            operands = dict(zip(body.inputs, inputs))
            self.returned[eqn] = [
                (v, operands.get(a) if isinstance(a, Var) else a)
                for v, a in zip(eqn.outputs, body.outputs)
                if not isinstance(a, Var) or a in operands
            ]
        self.nest(eqn, self.walk.price(body, self.constant_inputs(body, inputs)), 1, 0.0)

    def nest(self, eqn: Equation, cost: TapeCost, times: int, ready: float) -> None:
        """Add the samples of bodies to the memory in use around them; of a loop, those of its first and last step."""
        rank_body = self.walk.rank_bodies.get(eqn)
        outside = self.live.by_kind + Counter({TEMPORARIES: rank_body.copied if rank_body else 0})
        for step in sorted({0, times - 1}) if times else ():
            around = outside + self.earlier_steps(eqn, step)
            self.cost.samples += [replace(sample, bytes=around + Counter(sample.bytes)) for sample in cost.samples]

    def earlier_steps(self, eqn: Equation, step: int) -> Counter:
        """Return the bytes of earlier steps of a loop: carries that are not written in place, and stacked results."""
        new = [v for v in eqn.outputs if v in self.layout.bases[v] and v not in self.exchanged]
        if not isinstance(eqn.primitive, Scan):
            return self.sizes_of(new if isinstance(eqn.primitive, While) else ())
        carry, rows = split_list(eqn.outputs, eqn.params["carry"])
        carry = [v for v in carry if v in new]
        by_step, in_place = self.walk.in_place or self.lists_elements, self.walk.in_place
        part = step / eqn.params["length"] if by_step else bool(step)
        body = self.plan and plan_body(self.plan, eqn, "body", self.walk.kernels, plan_tape)
        copied = {eqn.outputs[k - eqn.params["consts"]] for k in body.overwritten_inputs} if body else set()
        carries = self.sizes_of(
            [v for v in carry if (v not in self.walk.in_callers_buffer if in_place else step or v in copied)]
        )
        return carries + Counter({kind: int(n * part) for kind, n in self.sizes_of(rows).items()})

    @property
    def lists_elements(self) -> bool:
        """Whether loops make lists of blocks on ranks, and stack them at the end; others write into the whole array."""
        return self.context.op_by_op and self.context.shard_map is not None

    # ------------------------------------------------ constants

    def value(self, a: Any) -> Any:
        is_table = isinstance(a, numpy.ndarray) and a.dtype.kind in "biu"
        return a if is_table else super().value(a)

    def propagate_constants(self, eqn: Equation) -> None:
        """Compute integers whose operands are constants: indices of ranks, and entries of a schedule for them."""
        primitive, params, values = eqn.primitive, eqn.params, [self.value(a) for a in eqn.inputs]
        few = all(v.type.dtype.kind in "biu" and v.type.size <= MAX_CONSTANT_SIZE for v in eqn.outputs)
        if not few or any(x is None for x in values) or primitive in (fused_p, filled_p):
            return
        ranks = params.get("ranks")
        if primitive.on_ranks:
            super().propagate_constants(eqn)
        elif not isinstance(ranks, RankOfMesh) or (ranks.is_known and primitive is lowering.index_p):
            run = primitive.simulated(params) if isinstance(primitive, Lowered) else partial(primitive.impl, **params)
            results = run(*values)
            self.constants.update(zip(eqn.outputs, results if primitive.multiple_results else [results]))

    # ------------------------------------------------ kinds

    def find_kinds(self, tape: Tape, used: Mapping[Var, set[bool]]) -> dict[Var, str]:
        """Return the kind of each value's memory: the first in `DYNAMIC` of all the values that share it."""
        returned = {a: kind for a, kind in zip(tape.outputs, self.context.kinds) if isinstance(a, Var)}
        kinds: dict[Var, str] = {}
        for eqn in tape.equations:
            for v in eqn.outputs:
                kind = _kind(eqn, self.backward[v], used[v], returned.get(v))
                for a in (v, *self.layout.bases[v]):
                    kinds[a] = min(kind, kinds.get(a, kind), key=DYNAMIC.index)
        return kinds


def nbytes_of(t: ShapedArray, every_rank: bool = False) -> int:
    """Return the bytes of a value on one rank, or on every one: of its block, if it is sharded."""
    axes = t.sharding.spec.split_axes if every_rank and t.sharding else ()
    return math.prod(t.sharding.mesh.shape[axis] for axis in axes) * local_type(t).nbytes


def peak_of(layout: MemoryLayout, eqn: Equation) -> int:
    """Return the most bytes that the operations of a tape allocate, if each value is freed after its last use."""
    walk = MemoryWalk()
    walk.layouts[layout.tape], walk.contexts[layout.tape] = layout, BodyContext((), shard_map=eqn, op_by_op=True)
    return int(walk.price(layout.tape).seconds)


# ---------------------------------------------------------------- kinds of memory


def _kind(eqn: Equation, backward: bool, used_backward: set[bool], returned: str | None) -> str:
    if backward and (False in used_backward or returned in (RESULTS, GRADIENTS)):
        return GRADIENTS
    if not backward and (True in used_backward or returned == RESIDUALS):
        return RESIDUALS
    if returned in (RESULTS, GRADIENTS):
        return RESULTS
    return COMMUNICATION if eqn.primitive.sends(eqn.params) else TEMPORARIES


def _passes(tape: Tape) -> tuple[dict[Var, bool], dict[Var, set[bool]]]:
    """Return whether the equation that makes a value is in the backward pass, and whether its users are, by value.

    Where an operation has one body with the same results or operands, the equations of the body count.
    """
    backward: dict[Var, bool] = {}
    used: dict[Var, set[bool]] = defaultdict(set)
    for eqn in tape.equations:
        results = [line is not None and line.backward for line in split_location(eqn.source, len(eqn.outputs))]
        uses = [{line is not None and line.backward} for line in split_location(eqn.source, len(eqn.inputs))]
        if len(eqn.bodies) == 1:
            (body,) = eqn.bodies
            backward_inside, used_inside = _passes(body)
            if len(body.outputs) == len(results):
                inside = [backward_inside.get(a) if isinstance(a, Var) else None for a in body.outputs]
                results = [outer if x is None else x for x, outer in zip(inside, results)]
            if len(body.inputs) == len(uses):
                uses = [used_inside[b] for b in body.inputs]
        backward.update(zip(eqn.outputs, results))
        for a, passes in zip(eqn.inputs, uses):
            if isinstance(a, Var):
                used[a] |= passes
    return backward, used
