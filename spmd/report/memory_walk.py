"""The bytes that a rank holds along a tape: a walk that counts bytes in place of seconds.

An equation allocates its results, and frees the values that it is the last to use. Views allocate nothing. The compiler
says which values share memory, and when each is used for the last time (`minidiff/compiler/buffers.py`). Of a program
that runs eagerly, values are held as long as Python holds them (`minidiff/values/lifetimes.py`). Where `jit` compiles
the steps of a loop alone, a step is one operation, whose body is that program.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy

from collectives import lowering
from collectives.backends.base import CASTS, Axes, OneRank
from collectives.backends.simulated import Simulated
from collectives.lowering import Lowered
from collectives.ops import axis_index_p
from minidiff.compiler.buffers import Memory
from minidiff.compiler.codegen import REUSED_BYTES, Source, group_operations
from minidiff.compiler.fusion import fused_p
from minidiff.core.interpreter import EVALUATE, running, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.staging import Stage
from minidiff.core.tape import Equation, Tape, evaluate_equation, read, with_equations
from minidiff.core.tracer import Tracer
from minidiff.core.types import ShapedArray, Var, operand_type, typeof
from minidiff.diagnostics.errors import TracerError
from minidiff.diagnostics.location import Location, split_location
from minidiff.higher_order.bodies import Call
from minidiff.higher_order.cond import Cond
from minidiff.higher_order.lists import split_list
from minidiff.higher_order.scan import Scan, run_count
from minidiff.higher_order.while_loop import While
from minidiff.transforms.recording import make_tape
from minidiff.values.lifetimes import watch_lifetimes
from spmd.mesh.mesh import Mesh
from spmd.report.groups import is_backward, local_type
from spmd.report.memory_layout import MemoryLayout, uniform_p
from spmd.report.tape_cost import OperationCosts, TapeCost
from spmd.report.walk import TapeRun, Walk
from spmd.shard_map.compiled import blocks_given_up
from spmd.shard_map.interpreter import SPMD, RankTracer, _marks
from spmd.shard_map.operation import shard_map_p

ARGUMENTS, CONSTANTS = "arguments", "constants"
GRADIENTS, RESIDUALS, RESULTS = "gradients", "residuals", "results"
COMMUNICATION, TEMPORARIES = "communication", "temporaries"

#: What is held throughout. Arguments are parameters, optimizer state and data.
STATIC = (ARGUMENTS, CONSTANTS)
#: What comes and goes. Memory that several of these describe counts as the first.
DYNAMIC = (GRADIENTS, RESIDUALS, RESULTS, COMMUNICATION, TEMPORARIES)
KINDS = (*STATIC, *DYNAMIC)
MAX_CONSTANT_SIZE = 4096  # integers: of values whose numbers are known


@dataclass(frozen=True)
class Moment:
    """What a rank holds while one operation runs, including its operands and results.

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
class Around:
    """What a body needs to know of the operation that runs it.

    `kinds` are those of its results' memory; `donated` are the inputs that it may write into; `frees` is whether memory
    is freed before it ends; `stepwise` is whether its operations run one by one, and values are held by Python; `runs`
    says how often it runs.
    """

    kinds: Sequence[str]
    donated: Sequence[bool] = ()
    frees: bool = True
    eqn: Equation | None = None
    stepwise: bool = False
    runs: int = 1


class MemoryWalk(Walk):
    """A walk that counts bytes.

    `compiled` says that the program is the one that `jit` makes; `in_place` that loops write each carry over the
    previous one, as XLA's do (those of this library do not). `lifetimes` are those of a program that runs eagerly. With
    `every_rank`, this process holds what all ranks do.
    """

    def __init__(
        self, compiled=False, in_place=False, lifetimes: Any = None, every_rank=False, place: Any = None, kernels=True
    ):
        super().__init__(OperationCosts(), fused=False, asynchronous=False, kernels=kernels)
        self.compiled, self.in_place, self.every_rank, self.place = compiled, in_place, every_rank, place
        self.ended: dict[Var, int] = {**lifetimes.ended} if lifetimes else {}
        self.eager = lifetimes is not None
        self.around: dict[Tape, Around] = {}
        self.elsewhere: set[Var] = set()  # values that are written into memory that is counted outside of their body
        self.lowered: dict[Equation, Tape] = {}
        self.stepwise: set[Equation] = set()  # each shard_map whose operations run one by one
        self.written: dict[Equation, Sequence[bool]] = {}  # which results of a shard_map are in memory of arguments
        self.strided: dict[Var, Any] = {}  # arrays that have the strides of values
        self.data: dict[Var, Any] = {}  # of sharded arrays, those of what this process holds
        self.copied: dict[Equation, int] = {}  # what cutting blocks out of arguments copies, for a shard_map
        self.layouts: dict[Tape, MemoryLayout] = {}  # of what ran for a tape

    def start(self, tape: Tape) -> TapeRun:
        return MemoryRun(self)

    def layout(self, tape: Tape) -> MemoryLayout:
        return self.layouts.get(tape) or self.layouts.setdefault(tape, MemoryLayout(tape, self.strided))

    def write_elsewhere(self, body: Tape, which: Sequence[bool]) -> None:
        """Note which results of a body are in memory that is counted outside of it."""
        for a, yes in zip(body.outputs, which):
            self.elsewhere |= self.layout(body).bases[a] if yes and isinstance(a, Var) else set()

    def body_of(self, eqn: Equation) -> Tape:
        """The body of an operation; of a shard_map, what it does to this process's data."""
        if eqn.primitive is not shard_map_p or self.in_place:
            return eqn.bodies[0]
        if eqn not in self.lowered:
            shape = eqn.params["mesh"].shape
            ranks = Simulated(shape) if self.every_rank else _OneRank(shape, self.place)
            whole = lower_body(eqn.params, ranks) if self.compiled else None
            if whole is not None:
                self.copied[eqn] = sum(
                    self.cut(*x, ranks) for x in zip(whole.inputs, eqn.inputs, eqn.params["in_specs"])
                )
            else:
                self.stepwise.add(eqn)
                with watch_lifetimes(uniform_p) as lifetimes:  # data is held as long as values were in the body
                    whole = self.replay(eqn, ranks)
                self.ended.update(lifetimes.ended)
            self.lowered[eqn] = whole
            data = [self.data.get(a) if isinstance(a, Var) else None for a in eqn.inputs]
            self.strided.update((v, x) for v, x in zip(whole.inputs, data) if x is not None and x.shape == v.type.shape)
        return self.lowered[eqn]

    def cut(self, v: Var, a: Any, spec: Any, ranks: Simulated) -> int:
        """Note the strides of a block that is cut out of a plain argument, and return the bytes that this copies."""
        t = operand_type(a)
        if t.sharding is not None or spec.is_trivial:
            return 0
        tape = make_tape(lambda x: ranks.place(x, spec.dims(t.ndim))[0])(t)
        layout = MemoryLayout(tape, {})
        self.strided[v] = layout.array(tape.outputs[0])
        return 0 if layout.bases[tape.outputs[0]] <= {*tape.inputs} else self.strided[v].nbytes

    def replay(self, eqn: Equation, ranks: Simulated) -> Tape:
        """Record what a body does to this process's data, one operation after the other."""
        params, body, stage = eqn.params, eqn.params["body"], Stage(None)
        stage.monitor.eager = True
        inside = _Replay(Mesh(ranks.sizes, ranks), params["check_rep"], base=stage)
        inside.compiled = self.compiled
        ending = _ending(body, self.ended, {})
        with transforming(inside), transforming(stage), running(inside):
            env: dict[Var, Any] = {}
            data: Any
            for v, a, spec in zip(body.inputs, eqn.inputs, params["in_specs"]):
                t = operand_type(a)
                if t.sharding is None:
                    whole: Any = stage.new_input(t)
                    is_table = isinstance(a, numpy.ndarray) and a.dtype.kind in "biu" and spec.is_trivial
                    with running(stage):
                        data, varying = ranks.place(a if is_table else whole, spec.dims(t.ndim))
                else:
                    varying = ranks.sort_axes(spec.split_axes)
                    data = stage.new_input(ShapedArray(ranks.data_shape(v.type.shape, varying), t.dtype))
                env[v] = RankTracer(inside, data, varying, _marks(v.type.states))
            for k, equation in enumerate(body.equations):
                evaluate_equation(equation, env)
                for v in ending[k]:
                    del env[v]
            outs = [inside.operand(read(env, a)) for a in body.outputs]
            wanted = [ranks.sort_axes(spec.split_axes) for spec in params["out_specs"]]
            with running(stage):
                return stage.tape([ranks.reshard_data(*out, axes) for out, axes in zip(outs, wanted)])


class MemoryRun(TapeRun):
    """A tape whose equations allocate and free."""

    walk: MemoryWalk

    def follow(self, tape: Tape, ready: Sequence[float]) -> None:
        walk, around = self.walk, self.walk.around.get(tape, Around([RESULTS] * len(tape.outputs)))
        self.around, self.source, given = around, None, tape
        if walk.compiled and not around.stepwise:
            foreign = [v.type.sharding is not None for v in tape.inputs]
            donated, options, runs = around.donated, {"kernels": walk.kernels}, around.runs
            self.source = Source(tape, foreign=foreign, options=options, donated=donated, given_up=True, runs=runs)
            tape = self.source.tape
            if around.eqn is not None:
                walk.written[around.eqn] = [a in self.source.given_up for a in tape.outputs]
        elif walk.in_place:
            tape = group_operations(tape, (), runs=around.runs)
        liveness = Memory(tape) if self.source is None else self.source.memory
        if tape is not given:
            walk.layouts[given] = MemoryLayout(tape, walk.strided, self.source.takes if self.source else {})
        self.layout = walk.layout(given)
        self.backward, used = _passes(tape)
        self.kinds = self.find_kinds(tape, used)
        self.factors: set[Var] = set()  # what the rules of cotangents compute of their operands alone
        bases = self.layout.bases
        if not around.stepwise:  # names go when nothing may share their memory
            bases = {v: {*memory, *liveness.roots[v]} for v, memory in bases.items()}
        self.ending = _ending(tape, walk.ended if around.stepwise else {}, bases)
        self.live: dict[Any, int] = {}
        self.returned: dict[Equation, list] = {}  # results of branches that are operands or constants, with these
        for k, eqn in enumerate(tape.equations):
            if eqn.bodies and eqn.primitive is not fused_p:
                self.run_bodies(eqn)
            else:
                self.propagate_constants(eqn)
            self.allocate(eqn, k, liveness)
            freed = self.source.copied.intersection(eqn.outputs) if self.source else ()
            for v in [*(self.ending[k] if around.frees else ()), *freed]:
                self.live.pop(v, None)

    def finish(self, tape: Tape) -> TapeCost:
        self.cost.seconds = max((sample.total for sample in self.cost.samples), default=0)
        return self.cost

    # ------------------------------------------------ what is held

    def sum_kinds(self, sizes: Any) -> Counter:
        total: Counter = Counter()
        for v, nbytes in sizes:
            total[self.kinds.get(v, TEMPORARIES)] += nbytes
        return total

    def sizes_of(self, values: Sequence[Var]) -> Counter:
        return self.sum_kinds((v, self.size(v)) for v in values)

    def size(self, a: Var) -> int:
        """The bytes of a value in this process."""
        return nbytes_of(a.type, self.walk.every_rank)

    # ------------------------------------------------ operations

    def allocate(self, eqn: Equation, k: int, liveness: Memory) -> None:
        """Note what is held while an equation runs, and its results from now on."""
        source = self.source
        extra: Counter = Counter()
        if eqn.primitive is shard_map_p:
            made = self.results_of_body(eqn)
        else:
            made, extra[TEMPORARIES] = self.layout.allocated(eqn, self.size)
            if eqn in self.layout.inner:
                extra[TEMPORARIES] = peak_of(self.layout.inner[eqn], eqn) - sum(made.values())
        for v, a in self.returned.get(eqn, ()):  # in the memory of an operand that is not used again
            bases = self.layout.bases[a] if isinstance(a, Var) else ()
            made[v] = sum(self.live.pop(b, 0) for b in bases if b in self.ending[k])
        if source is not None and self.around.frees:
            for v in eqn.outputs:
                self.live.pop(source.takes.get(v, v), None)
                if v in source.given_up and v not in source.copied:
                    made.pop(v, None)
        elif reused := self.reused(eqn, k, liveness):
            self.live.pop(reused, None)
        self.live.update((v, n) for v, n in made.items() if v not in self.walk.elsewhere)
        if isinstance(eqn.primitive, Scan) and self.lists_elements:  # the elements, while they are stacked
            extra += self.sizes_of(eqn.outputs[eqn.params["carry"] :])
        self.cost.samples.append(Moment(eqn.primitive.name, eqn.source, self.sum_kinds(self.live.items()) + extra))

    def reused(self, eqn: Equation, k: int, liveness: Memory) -> Var | None:
        """The operand whose memory a result takes; None if it takes none."""
        if self.walk.in_place:
            return liveness.reused_by(eqn, k, REUSED_BYTES)
        recomputed = eqn.source is not None and eqn.source.recomputed
        if not self.around.stepwise or self.around.eqn or not is_backward(eqn) or recomputed:
            return None
        # Cotangents of plain arrays are compiled: what a rule computes of its operands alone, its next step overwrites.
        operands = [a for a in eqn.inputs if isinstance(a, Var)]
        if operands and all(a in self.factors or not self.backward.get(a) for a in operands):
            self.factors.update(eqn.outputs)
        return liveness.reused_by(eqn, k, 0, but=[a for a in operands if a not in self.factors])

    def results_of_body(self, eqn: Equation) -> dict[Var, int]:
        """The bytes of each result of a shard_map: those of the memory that it is a view of.

        A view of another result takes none, nor does one of a sharded argument; a view of another argument is copied.
        """
        layout = self.walk.layout(self.walk.body_of(eqn))
        body, bases = layout.tape, layout.bases
        sharded = [not isinstance(a, Var) or bool(a.type.sharding) for a in eqn.inputs]
        taken, given = {v for v, yes in zip(body.inputs, sharded) if yes}, {*body.inputs}
        written = self.walk.written.get(eqn, [False] * len(eqn.outputs))
        made = {}
        for a, v, over in zip(body.outputs, eqn.outputs, written):
            base = bases[a] if isinstance(a, Var) else set()
            copied = not base or not given.isdisjoint(base)
            new = [v] if copied else base - taken
            made[v] = 0 if over or base & taken & given else sum(map(self.size, new))
            taken |= base - given
            if base:
                self.walk.data[v] = layout.array(a)
        return made

    # ------------------------------------------------ bodies

    def around_body(self, eqn: Equation) -> Around:
        walk, given = self.walk, [self.kinds[v] for v in eqn.outputs]
        if eqn.primitive is not shard_map_p:  # eagerly, a recorded branch holds all of its values until it ends
            inside = self.around.eqn if walk.eager else None
            runs = self.around.runs * eqn.params.get("runs", run_count(eqn))
            frees = not walk.eager or inside is not None or isinstance(eqn.primitive, Call)
            return Around(given, (), frees, inside, walk.eager, runs)
        walk.body_of(eqn)
        if walk.compiled and eqn not in walk.stepwise:
            sharded = [isinstance(a, Var) and a.type.sharding is not None for a in eqn.inputs]
            donated = self.source.passed_on.get(eqn, ()) if self.source else ()
            return Around(given, blocks_given_up(sharded, {**eqn.params, "donated": donated}), eqn=eqn)
        return Around(given, eqn=eqn, stepwise=eqn in walk.stepwise)

    def run_bodies(self, eqn: Equation) -> None:
        walk = self.walk
        if walk.in_place and eqn.primitive is shard_map_p:
            body, over = eqn.params["body"], []
            left = Counter((t.shape, t.dtype) for t in body.in_types)
            for a in body.outputs:  # over an argument of this type, if one is left
                block = typeof(a).shape, typeof(a).dtype
                over.append(isinstance(a, Var) and left[block] > 0)
                left[block] -= over[-1]
            walk.write_elsewhere(body, over)
            walk.elsewhere |= {v for v, yes in zip(eqn.outputs, over) if yes}
        elif isinstance(eqn.primitive, Cond):
            for body in eqn.bodies:
                walk.write_elsewhere(body, [v in walk.elsewhere for v in eqn.outputs])
        elif walk.in_place and isinstance(eqn.primitive, Scan):
            walk.write_elsewhere(eqn.params["body"], [True] * eqn.params["carry"])
        walk.around.update(dict.fromkeys([*eqn.bodies, walk.body_of(eqn)], self.around_body(eqn)))
        super().run_bodies(eqn)

    def inline(self, eqn: Equation, body: Tape, inputs: Sequence[Any]) -> None:
        body = self.walk.body_of(eqn) if eqn.primitive is shard_map_p else body
        if isinstance(eqn.primitive, Cond):
            given = dict(zip(body.inputs, inputs))
            self.returned[eqn] = [
                (v, given.get(a) if isinstance(a, Var) else a)
                for v, a in zip(eqn.outputs, body.outputs)
                if not isinstance(a, Var) or a in given
            ]
        self.nest(eqn, self.walk.price(body, self.constant_inputs(body, inputs)), 1, 0.0)

    def nest(self, eqn: Equation, cost: TapeCost, times: int, ready: float) -> None:
        """Add the moments of bodies to what is held around them; of a loop, those of its first and last step."""
        outside = self.sum_kinds(self.live.items()) + Counter({TEMPORARIES: self.walk.copied.get(eqn, 0)})
        for step in sorted({0, times - 1}) if times else ():
            around = outside + self.of_loop(eqn, step)
            self.cost.samples += [replace(m, bytes=around + Counter(m.bytes)) for m in cost.samples]

    def of_loop(self, eqn: Equation, step: int) -> Counter:
        """What a loop holds of earlier steps: carries, which a scan may write in place, and rows of its results."""
        if not isinstance(eqn.primitive, Scan):
            return self.sizes_of(eqn.outputs if isinstance(eqn.primitive, While) else ())
        carry, rows = split_list(eqn.outputs, eqn.params["carry"])
        by_step, in_place = self.walk.in_place or self.lists_elements, self.walk.in_place
        part = step / eqn.params["length"] if by_step else bool(step)
        held = self.sizes_of([v for v in carry if (v not in self.walk.elsewhere if in_place else step)])
        return held + Counter({kind: int(n * part) for kind, n in self.sizes_of(rows).items()})

    @property
    def lists_elements(self) -> bool:
        """Whether loops make lists of blocks on ranks, and stack them at the end; others write into the whole array."""
        return self.around.stepwise and self.around.eqn is not None

    # ------------------------------------------------ what is known

    def value(self, a: Any) -> Any:
        is_table = isinstance(a, numpy.ndarray) and a.dtype.kind in "biu"
        return a if is_table else super().value(a)

    def propagate_constants(self, eqn: Equation) -> None:
        """Compute few integers whose operands are known: ranks' numbers, and what a schedule has for them."""
        primitive, params, values = eqn.primitive, eqn.params, [self.value(a) for a in eqn.inputs]
        few = all(v.type.dtype.kind in "biu" and v.type.size <= MAX_CONSTANT_SIZE for v in eqn.outputs)
        if not few or any(x is None for x in values) or primitive in (fused_p, uniform_p):
            return
        if primitive.on_ranks:
            super().propagate_constants(eqn)
        elif not isinstance(ranks := params.get("ranks"), _OneRank) or (
            ranks.is_known and primitive is lowering.index_p
        ):
            run = primitive.simulated(params) if isinstance(primitive, Lowered) else partial(primitive.impl, **params)
            found = run(*values)
            self.constants.update(zip(eqn.outputs, found if primitive.multiple_results else [found]))

    # ------------------------------------------------ kinds

    def find_kinds(self, tape: Tape, used: Mapping[Var, set[bool]]) -> dict[Var, str]:
        """The kind of each value's memory: the first in `DYNAMIC` of all the values that share it."""
        returned = {a: kind for a, kind in zip(tape.outputs, self.around.kinds) if isinstance(a, Var)}
        found: dict[Var, str] = {}
        for eqn in tape.equations:
            for v in eqn.outputs:
                kind = _kind(eqn, self.backward[v], used[v], returned.get(v))
                for a in self.layout.bases[v]:
                    found[a] = min(kind, found.get(a, kind), key=DYNAMIC.index)
        return found


def nbytes_of(t: ShapedArray, every_rank: bool = False) -> int:
    """The bytes of a value on one rank, or on every one: those of its block, if it is sharded."""
    axes = t.sharding.spec.split_axes if every_rank and t.sharding else ()
    return math.prod(t.sharding.mesh.shape[axis] for axis in axes) * local_type(t).nbytes


def peak_of(layout: MemoryLayout, eqn: Equation) -> int:
    """The most bytes that what an operation does allocates, if each value is freed after its last use."""
    walk = MemoryWalk()
    walk.layouts[layout.tape], walk.around[layout.tape] = layout, Around((), eqn=eqn, stepwise=True)
    return int(walk.price(layout.tape).seconds)


# ---------------------------------------------------------------- what a compiled body does


class _OneRank(OneRank, Simulated):
    """A rank of a mesh, for programs that are not run: at this place along each axis, or anywhere."""

    name = "mpi"
    at_once = False

    def __init__(self, sizes: dict[str, int], place: Callable[[int], int] | None):
        super().__init__(sizes)
        self.is_known = place is not None
        self.coordinates = {a: place(n) if place else 0 for a, n in sizes.items()}

    def moves_nothing(self, name: str, x: Any, varying: Axes, params: Mapping[str, Any]) -> bool:
        return name in CASTS


def lower_body(params: dict, ranks: Simulated | None = None) -> Tape | None:
    """The tape of what a `shard_map` does to the data of these ranks, or of any one, if it is compiled as a whole."""
    return _lower_inside(params, params["body"], [spec.split_axes for spec in params["in_specs"]], ranks)


def lower_parts(params: dict, tape: Tape) -> Tape:
    """A tape in a `shard_map` that runs operation by operation; their bodies, such as a loop's step, are compiled."""

    def lowered(body: Any) -> Any:
        if not isinstance(body, Tape):
            return body
        return _lower_inside(params, body, [t.states.varying_or_unreduced for t in body.in_types]) or lower_parts(
            params, body
        )

    changed = [
        Equation(eqn.primitive, eqn.inputs, {k: lowered(x) for k, x in eqn.params.items()}, eqn.outputs, eqn.source)
        for eqn in tape.equations
    ]
    return with_equations(tape, changed)


def _lower_inside(params: dict, body: Tape, varying: Sequence, ranks: Simulated | None = None) -> Tape | None:
    """The tape to which a body in a `shard_map` is compiled, whose inputs vary along these axes."""
    ranks = _OneRank(params["mesh"].shape, None) if ranks is None else ranks
    interpreter = SPMD(Mesh(ranks.sizes, ranks), params["check_rep"], explicit=not params["auto_pbroadcast"])
    varying = map(ranks.sort_axes, varying)
    operands = [(ShapedArray(ranks.data_shape(t.shape, h), t.dtype), h) for t, h in zip(body.in_types, varying)]
    return (_lower(interpreter, body, operands, [_marks(t.states) for t in body.in_types]) or [None])[0]


program_p = Call("program")


class _Replay(SPMD):
    """Records what a body does to the data of the ranks in this process, loops of any length included.

    The numbers of simulated ranks are known, and so are integers computed from them: the branches that ranks take.
    """

    unrolled = math.inf
    compiled = False  # whether the step of a loop is a program

    def process(self, primitive: Primitive, args: Sequence[Any], params: dict) -> Any:
        simulated = self.mesh.backend == "simulated"
        if primitive is axis_index_p and getattr(self.mesh.ranks, "is_known", True):
            return RankTracer(self, *self.mesh.ranks.axis_index(params["axes"]))
        if isinstance(primitive, Scan):
            if self.compiled:
                params = {**params, "body": self.step_of(params["body"], params["length"])}
            with running(self):
                return primitive.evaluate(args, params)
        recorder, data = self.base, [self.operand(x)[0] for x in args]
        runs_here = not primitive.is_higher_order and (simulated or not primitive.on_ranks)
        known = [not isinstance(x, Tracer) and typeof(x).dtype.kind in "biu" for x in data]
        if data and runs_here and all(known):
            self.base = EVALUATE
        try:
            return super().process(primitive, args, params)
        finally:
            self.base = recorder

    def step_of(self, body: Tape, runs: int) -> Any:
        """The step of a loop as one operation, whose body is the program to which it is compiled."""
        stage: Any = self.base
        cache: dict[tuple, Any] = {}

        def step(*values: Any) -> list:
            operands, states = [self.operand(x) for x in values], [getattr(x, "marked", None) for x in values]
            key = tuple((typeof(x), varying, s) for (x, varying), s in zip(operands, states))
            if key not in cache:
                cache[key] = _lower(SPMD(self.mesh, self.scope.typed), body, operands, states)
            if cache[key] is None:
                return body.apply(*values)
            whole, places = cache[key]
            results = stage.record(program_p, [x for x, _ in operands], {"body": whole, "runs": runs})
            return [RankTracer(self, x, *place) for x, place in zip(results, places)]

        step.out_types = body.out_types  # type: ignore[attr-defined]
        return step

    def _branch_by_rank(self, cond: Cond, args: Sequence[Any], params: dict, recorded: bool) -> list:
        return super()._branch_by_rank(cond, args, params, isinstance(self.operand(args[0])[0], Tracer))


def _lower(interpreter: SPMD, body: Tape, operands: Sequence, states: Sequence) -> tuple[Tape, list] | None:
    """The tape to which a body is compiled, and the places of its results; None if it is not compiled as a whole."""
    try:
        return interpreter.lowered(body, operands, states, {})
    except TracerError:
        return None


def _ending(tape: Tape, ended: Mapping[Var, int], bases: Mapping[Var, Any]) -> Mapping[int, list]:
    """The values that are freed after each equation: after their last use, when Python lets go of them."""
    last: dict[Var, int] = {}
    for k, eqn in enumerate(tape.equations):
        for v in (*(a for a in eqn.inputs if isinstance(a, Var)), *eqn.outputs):
            end = max(k, ended.get(v, 0) - 1)
            last.update((root, max(end, last.get(root, 0))) for root in (v, *bases.get(v, ())))
    for a in (a for a in tape.outputs if isinstance(a, Var)):
        last.update((v, -1) for v in (a, *bases.get(a, ())))
    ending: dict[int, list] = defaultdict(list)
    for v, k in last.items():
        if v not in tape.inputs:
            ending[min(k, len(tape.equations) - 1)].append(v)
    return ending


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
    """For each value, whether the equation that makes it is in the backward pass, and whether those that use it are.

    These are equations of the body, where an operation has one with the same results, or the same operands.
    """
    made: dict[Var, bool] = {}
    used: dict[Var, set[bool]] = defaultdict(set)
    for eqn in tape.equations:
        results = [line is not None and line.backward for line in split_location(eqn.source, len(eqn.outputs))]
        uses = [{line is not None and line.backward} for line in split_location(eqn.source, len(eqn.inputs))]
        if len(eqn.bodies) == 1:
            (body,) = eqn.bodies
            made_inside, used_inside = _passes(body)
            if len(body.outputs) == len(results):
                inside = [made_inside.get(a) if isinstance(a, Var) else None for a in body.outputs]
                results = [own if x is None else x for x, own in zip(inside, results)]
            if len(body.inputs) == len(uses):
                uses = [used_inside[b] for b in body.inputs]
        made.update(zip(eqn.outputs, results))
        for a, backward in zip(eqn.inputs, uses):
            if isinstance(a, Var):
                used[a] |= backward
    return made, used
