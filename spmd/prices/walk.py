"""The one walk over a tape that prices it: seconds, work and messages of every operation, by kind and by line.

`Walk.price` follows a tape as ranks run it on several resources: one computes, in the order of the tape, and each link
carries the collectives that use it. An operation starts when its operands are ready and its resource is free. Loops are
priced once and multiplied; of the branches of a cond, the one that is known to run is priced, or else the slowest.
Reports are views of the result, a `TapeCost`.

The seconds of an operation come from `OperationCosts`: a machine (`spmd.predict`), or a network and a rate
(`spmd.timeline`).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from collectives.exact import CONVERTED, WINDOW_BYTES, Exact, wire_bytes
from minidiff.compiler.buffers import fused_p
from minidiff.compiler.program import group_operations
from minidiff.control_flow.cond import Cond
from minidiff.control_flow.loops import Scan, run_count
from minidiff.control_flow.while_loop import While
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.errors.location import Location
from minidiff.ops.base import Promoting
from minidiff.values.dtypes import is_scalar_constant
from spmd.mesh.specs import block_type
from spmd.pipeline.tables import Timed
from spmd.prices import tape_cost
from spmd.prices.kernels import attention_shapes, groups_of, is_attention, is_view_of_operand, products_side_by_side
from spmd.prices.tape_cost import COMPUTE, Amount, Category, Operation, OperationCosts, TapeCost, price_schedule
from spmd.prices.work import Work, work_of

LONGEST_BRANCH = "which branch is run is not known beforehand: the one that takes longest is counted"
ONE_STEP = "how many steps a while_loop takes is not known beforehand: one step is counted"
BEFORE = -math.inf  # ready a step before, in a loop
ANY_SHAPE: frozenset = frozenset()  # in place of the shapes of attention


# ---------------------------------------------------------------- the walk


@dataclass(eq=False)
class Walk:
    """A walk along a tape, priced by `costs`.

    `overlap` says which axes' collectives overlap with computation: those of all (True), of none (False), or of some.
    `fused` says whether elementwise operations are one loop, as a compiler makes of them, `fused_optimizer` whether
    those of the optimizer are, and `kernels` whether `jit` compiles such loops to machine code; `asynchronous` whether
    the stages of a schedule wait only for the data that they need, not for each tick; `record` whether costs list their
    operations.

    `coordinates` are those of the rank whose stage is priced, along the axes of schedules.
    """

    costs: OperationCosts
    overlap: bool | Collection[str] = True
    fused: bool = True
    fused_optimizer: bool = True
    asynchronous: bool = True
    record: bool = False
    kernels: bool = True
    notes: dict[str, None] = field(default_factory=dict)
    coordinates: dict[str, int] = field(default_factory=dict)
    schedules: list[Timed] = field(default_factory=list)
    product_flops: Counter = field(default_factory=Counter)  # by dtype

    def price(
        self,
        tape: Tape,
        constants: Mapping[Var, Any] | None = None,
        is_step: bool = False,
        runs: int = 1,
        carry: range | None = None,
    ) -> TapeCost:
        """Price a tape, with the values of some integers in `constants`.

        `is_step` says that it is a whole step of training, `runs` how often a program runs the tape. For a step of a
        loop, `carry` are the inputs that the step before computes: collectives that overlap with computation, and do
        not depend on these, start a step before; and those whose results no operation of the step needs end in the
        next one. So a step takes as long as its computation, or as its busiest link.
        """
        run = self.start(tape)
        run.constants.update(constants or {})
        run.is_step, run.runs, run.carry = is_step, runs, carry if self.overlap else None
        run.follow(tape, [0.0 if run.carry is None or i in run.carry else BEFORE for i in range(len(tape.inputs))])
        return run.finish(tape)

    def start(self, tape: Tape) -> TapeRun:
        """Return the state of one run over a tape, which counts seconds; subclasses count something else."""
        return TapeRun(self)

    def body_of(self, eqn: Equation) -> Tape:
        """Return the body of an operation that runs it once."""
        return eqn.bodies[0]

    def overlaps(self, axes: Sequence[str]) -> bool:
        """Return whether a collective over these axes overlaps with computation."""
        return self.overlap if isinstance(self.overlap, bool) else bool(axes) and {*axes} <= {*self.overlap}

    def price_schedule(self, body: Tape, labels: Mapping[Var, dict], constants: Mapping[Var, Any]) -> TapeCost:
        """Price the loop over a schedule's ticks: its `body`, as each stage runs it in each step of the schedule.

        Inner stages do the same work: the first, the last and one inner block are priced, in each direction.
        """
        label = next(label for label in labels.values() if "schedule" in label)
        schedule, axis = label["schedule"], label["along"]
        fields = {v: x.get("field", "stage") for v, x in labels.items() if x.get("axes", (axis,)) == (axis,)}
        last = schedule.stages * schedule.chunks - 1
        cache: dict[tuple, TapeCost] = {}

        def price_step(stage: int, step: Any) -> TapeCost:
            block = step.chunk * schedule.stages + stage
            key = block == 0, block == last, step.direction
            if key not in cache:
                entry = {"kind": step.kind, "chunk": step.chunk, "stage": stage}
                values = {v: numpy.int64(entry[name]) for v, name in fields.items()}
                before, self.coordinates = self.coordinates, {**self.coordinates, axis: stage}
                try:
                    cache[key] = self.price(body, {**constants, **values})
                finally:
                    self.coordinates = before
                _add_launch_overhead(cache[key], self.costs.issue)
                if step.direction != "forward":
                    _count_as_recomputed(cache[key])
            return cache[key]

        timed, cost = price_schedule(schedule, axis, price_step, self.overlaps((axis,)))
        self.schedules.append(timed)
        return cost


class TapeRun:
    """A run over a tape and the bodies inlined in it: when resources are free, when values are ready, constants."""

    def __init__(self, walk: Walk):
        self.walk = walk
        self.cost = TapeCost()
        self.free: dict[str, float] = defaultdict(float)
        self.ready: dict[Var, float] = {}
        self.constants: dict[Var, Any] = {}
        self.sent: list[tuple[float, float, Category]] = []  # the collectives that may still run: start, end
        self.nbytes: dict[Var, int] = {}  # of views: the bytes of their bases
        self.labels: dict[Var, dict] = {}  # entries of a schedule, and a rank's index along an axis
        self.updates: set[Var] = set()  # values that depend on gradients
        self.stacked: set[Var] = set()  # results of the steps of loops
        self.rows: dict[Equation, float] = {}  # of products that run side by side: all rows, by those of each
        self.is_step = False  # whether it is the whole step, which ends with the optimizer's update
        self.runs = 1  # how often a program runs it
        self.carry: range | None = None  # of a step of a loop whose collectives overlap with other steps
        self.busy: dict[str, float] = defaultdict(float)  # seconds of each resource

    @property
    def is_jitted(self) -> bool:
        """Whether the program is the one that `jit` makes, with its loops."""
        fuses = self.walk.costs.fuses
        return self.walk.fused and fuses is not None and not fuses

    # ------------------------------------------------ following

    def follow(self, tape: Tape, ready: Sequence[float]) -> None:
        self.ready.update(zip(tape.inputs, ready))
        attention = ANY_SHAPE if self.walk.costs.attend and is_attention(tape) else attention_shapes(tape)
        self.rows.update(products_side_by_side(tape) if self.walk.costs.fuses else {})
        if self.is_jitted:
            tape = group_operations(tape, (), self.walk.kernels, self.runs)
        for group, used in groups_of(tape, self.walk.costs.fuses if self.walk.fused else None):
            if len(group) > 1 and (self.walk.fused_optimizer or not any(map(self.is_update, group))):
                self.compute(group, attention, used)
            else:
                for eqn in group:
                    self.step(eqn, attention)

    def step(self, eqn: Equation, attention: frozenset) -> None:
        primitive = eqn.primitive
        if primitive is fused_p:
            (body,) = eqn.bodies
            with self.inlined(eqn, body, eqn.inputs):
                self.compute(body.equations, attention, body.outputs)
        elif eqn.bodies:
            self.run_bodies(eqn)
        elif primitive.sends(eqn.params):
            self.send(eqn)
        else:
            if primitive.name in ("schedule", "axis_index"):
                self.labels[eqn.outputs[0]] = eqn.params
            self.propagate_constants(eqn)
            self.compute([eqn], attention)
        if primitive.is_view and isinstance(eqn.inputs[0], Var) and eqn.inputs[0] in self.labels:
            self.labels[eqn.outputs[0]] = self.labels[eqn.inputs[0]]

    def times(self, atoms: Sequence[Atom]) -> list[float]:
        return [self.ready.get(a, 0.0) if isinstance(a, Var) else 0.0 for a in atoms]

    def occupy(self, resource: str, seconds: float, ready: float, blocks: bool = False) -> tuple[float, float]:
        """Occupy a resource as early as possible; return the start and the end."""
        start = max(ready, self.free[resource], self.free[COMPUTE] if blocks else 0.0)
        self.free[resource] = start + seconds
        self.busy[resource] += seconds
        return start, start + seconds

    # ------------------------------------------------ operations

    def compute(self, group: Sequence[Equation], attention: frozenset, used: Collection[Var] = ()) -> None:
        """Run operations as one, and count their work; operations outside of the group read the results in `used`."""
        works = [self.work(eqn) for eqn in group]
        results = {v for eqn in group for v in eqn.outputs}
        nbytes = self.bytes_of_group(group, results, used) if len(group) > 1 else works[0].bytes
        self.note_views(group)
        costs = self.walk.costs
        steps = costs.steps_in_loops if len(group) > 1 else costs.steps
        flops = sum(round(work.flops * steps.get(eqn.primitive.name, 1)) for eqn, work in zip(group, works))
        first = group[0]
        dtype = typeof((*first.inputs, *first.outputs)[0]).dtype
        if works[0].product is not None:
            self.walk.product_flops[dtype] += flops
        for eqn in group:
            self.mark_updates(eqn)
        kinds = [self.kind(eqn, work, attention) for eqn, work in zip(group, works)]
        if costs.attend and {*kinds} == {tape_cost.ATTENTION}:
            seconds = 0.0 if works[0].product is None else costs.attend(flops, dtype)
        else:
            product = works[0].product
            if product and first in self.rows:
                product = product._replace(rows=round(product.rows * self.rows[first]))
            seconds = costs.compute(Work(flops, nbytes, product), dtype)
        operands = [a for eqn in group for a in eqn.inputs if isinstance(a, Var)]
        ready = max(self.times([a for a in operands if a not in results]), default=0.0)
        if not (flops or nbytes):
            self.ready.update(dict.fromkeys(results, ready))
            return
        if seconds:
            self.wait(ready)
            self.cost.launches += 1
            start, ready = self.occupy(COMPUTE, seconds, ready)
            self.record_operation(str(first.primitive), COMPUTE, start, ready, first.source)
        self.ready.update(dict.fromkeys(results, ready))
        total = sum(work.bytes for work in works) or 1
        for eqn, work, kind in zip(group, works, kinds):
            share = work.bytes / total
            recomputed = eqn.source is not None and eqn.source.recomputed
            entry = Amount(1, seconds * share, 0.0, work.flops, 0 if recomputed else work.flops, nbytes * share)
            self.cost.entries[Category(kind, eqn.primitive.name, (), eqn.source)].add(entry)

    def work(self, eqn: Equation) -> Work:
        """Return the work of an equation on one rank; reading a view costs no more bytes than its array has."""
        if self.is_address(eqn) or eqn.primitive.on_ranks or "ranks" in eqn.params:  # a collective that sends nothing
            return Work(0, 0)
        inputs, outputs = [*map(local_type, eqn.inputs)], [*map(local_type, eqn.outputs)]
        work = work_of(eqn.primitive, inputs, outputs, eqn.params, in_place=self.walk.fused)
        saved = sum(t.nbytes - self.size(a) for a, t in zip(eqn.inputs, inputs) if isinstance(a, Var))
        return work._replace(bytes=max(work.bytes - saved, 0)) if work.bytes and saved > 0 else work

    def is_address(self, eqn: Equation) -> bool:
        """Return whether an equation takes no time: compiled programs view slices, accelerators also gather."""
        through_index = eqn.primitive.name == "gather"
        fuses = self.walk.costs.fuses
        return bool(fuses or (self.walk.fused and not through_index)) and is_view_of_operand(eqn)

    def size(self, a: Atom) -> int:
        """Return the bytes of a value, or of the array that it views if that is smaller."""
        nbytes = local_type(a).nbytes if isinstance(a, Var) else 0
        return min(self.nbytes.get(a, nbytes), nbytes)

    def note_views(self, group: Sequence[Equation]) -> None:
        for eqn in group:
            if not (eqn.primitive.is_view and eqn.inputs and isinstance(eqn.inputs[0], Var)):
                continue
            if eqn.inputs[0] in self.stacked:
                self.stacked.update(eqn.outputs)
            base = self.size(eqn.inputs[0])
            self.nbytes.update((v, base) for v in eqn.outputs if base < local_type(v).nbytes)

    def bytes_of_group(self, group: Sequence[Equation], results: set[Var], used: Collection[Var]) -> int:
        """Return the bytes that a fused loop reads and writes: each operand once, and the results in `used`.

        Views cost nothing. Neither does adding to the stacked results of a loop that an accelerator's compiler fuses:
        its products accumulate into them, as in BLAS (beta * C + A * B).
        """
        bases: dict[Var, Var] = {}  # of views, and of parts of an array
        read: dict[Var, set[Var]] = defaultdict(set)
        for eqn in group:
            operands = [a for a in eqn.inputs if isinstance(a, Var)]
            name = eqn.primitive.name
            adds = self.walk.costs.fuses and any(bases.get(a, a) in self.stacked for a in operands)
            if operands and (is_view_of_operand(eqn) or (adds and name == "convert")):
                bases[eqn.outputs[0]] = bases.get(operands[0], operands[0])
            elif adds and name == "add":
                results = results - {*eqn.outputs}
            else:
                for a in operands:
                    if (base := bases.get(a, a)) not in results:
                        read[base].add(a)
        written = {bases.get(v, v) for v in used} & results
        parts = [min(self.size(base), sum(map(self.size, views))) for base, views in read.items()]
        return sum(parts) + sum(local_type(v).nbytes for v in written)

    def send(self, eqn: Equation) -> None:
        """Send a collective over its link."""
        params = eqn.params.get("params", eqn.params)  # of a lowered collective
        axes, size = params["axes"], params["size"]
        collective = eqn.params.get("collective", eqn.primitive)  # that `jit` starts early
        name, sent = collective.name, eqn.inputs[: collective.linear_operands]
        nbytes = sum(t.nbytes for t in map(local_type, sent))
        one = collective.per_operand or collective
        if isinstance(one, Exact):
            nbytes = sum(wire_bytes(one, t, params) for t in map(local_type, sent))
            seconds, resource = self.walk.costs.send(one.of.name, size, nbytes, axes)
            seconds += self.walk.costs.send("pmax", size, WINDOW_BYTES, axes)[0]
            seconds += self.walk.costs.compute(Work(0, CONVERTED * nbytes), numpy.dtype(float))
        else:
            seconds, resource = self.walk.costs.send(name, size, nbytes, axes)
        ready = max(self.times(eqn.inputs), default=0.0)
        self.mark_updates(eqn)
        key = Category(f"{name} along {', '.join(axes)}", name, axes, eqn.source, size)
        self.cost.entries[key].add(Amount(1, seconds, 0.0, 0, 0, nbytes))
        if any(axis in self.walk.coordinates for axis in axes):  # between two steps of a schedule
            self.cost.sends = max(self.cost.sends, seconds)
            self.ready.update(dict.fromkeys(eqn.outputs, ready))
            return
        blocks = not self.walk.overlaps(axes)
        start, end = self.occupy(resource, seconds, ready, blocks)
        self.sent.append((start, end, key))
        if blocks:
            self.wait(end)
        self.ready.update(dict.fromkeys(eqn.outputs, BEFORE if ready == BEFORE and not blocks else end))
        self.record_operation(str(eqn.primitive), resource, start, end, eqn.source)

    def wait(self, until: float) -> None:
        """Let computation wait; collectives in flight are exposed meanwhile."""
        now = self.free[COMPUTE]
        if until <= now:
            return
        self.sent = [(start, end, key) for start, end, key in self.sent if end > now]
        for start, end, key in self.sent:
            low, high = max(start, now), min(end, until)
            if high > low:
                self.cost.entries[key].exposed += high - low
                now = max(now, high)
        self.free[COMPUTE] = until

    # ------------------------------------------------ bodies

    def run_bodies(self, eqn: Equation) -> None:
        primitive, bodies = eqn.primitive, eqn.bodies
        ready = self.times(eqn.inputs)
        if isinstance(primitive, Cond):
            selector = self.value(eqn.inputs[0])
            if selector is not None:
                body, inputs = bodies[primitive.choose(selector)], eqn.inputs[1:]
                self.inline(eqn, body, inputs)
                return
            branches = [
                self.walk.price(body, self.constant_inputs(body, eqn.inputs[1:]), runs=self.runs) for body in bodies
            ]
            cost = max(branches, key=lambda cost: cost.seconds)
            if any(not math.isclose(s.seconds, cost.seconds) for s in branches):
                self.walk.notes[LONGEST_BRANCH] = None
            self.nest(eqn, cost, 1, max(ready, default=0.0))
        elif getattr(primitive, "repeats", False) or isinstance(primitive, While):
            self.loop(eqn, max(ready, default=0.0))
        else:
            self.inline(eqn, self.walk.body_of(eqn), eqn.inputs)

    def inline(self, eqn: Equation, body: Tape, inputs: Sequence[Atom]) -> None:
        """Follow a body as a part of this run."""
        with self.inlined(eqn, body, inputs):
            self.follow(body, self.times(inputs))

    @contextlib.contextmanager
    def inlined(self, eqn: Equation, body: Tape, inputs: Sequence[Atom]) -> Iterator[None]:
        """Give the inputs of a body the properties of the operands, and afterwards likewise for the results."""
        self.constants.update(self.constant_inputs(body, inputs))
        self.rename(body.inputs, inputs)
        yield
        self.rename(eqn.outputs, body.outputs)

    def rename(self, names: Sequence[Var], atoms: Sequence[Atom]) -> None:
        """Give values other names, and these their properties."""
        self.ready.update(zip(names, self.times(atoms)))
        renamed = [(v, a) for v, a in zip(names, atoms) if isinstance(a, Var)]
        tables: tuple[dict[Var, Any], ...] = (self.labels, self.nbytes)
        for table in tables:
            table.update((v, table[a]) for v, a in renamed if a in table)
        for marked in (self.updates, self.stacked):
            marked.update(v for v, a in renamed if a in marked)

    def constant_inputs(self, body: Tape, inputs: Sequence[Atom]) -> dict[Var, Any]:
        """Return the inputs of a body whose values are known, with their values."""
        values = [(v, self.value(a)) for v, a in zip(body.inputs, inputs)]
        return {v: x for v, x in values if x is not None}

    def loop(self, eqn: Equation, ready: float) -> None:
        """Run a loop: each of its steps, or those of the schedule that it follows."""
        if isinstance(eqn.primitive, While):
            self.walk.notes[ONE_STEP] = None
            condition, step = (self.walk.price(eqn.params[name]) for name in ("cond", "body"))
            step.add(condition)
            step.seconds += condition.seconds
        else:
            body = eqn.params["body"]
            constants = self.constant_inputs(body, eqn.inputs[: eqn.params["consts"]])
            labeled = [(v, a) for v, a in zip(body.inputs, eqn.inputs) if isinstance(a, Var) and a in self.labels]
            labels = {v: self.labels[a] for v, a in labeled}
            if self.walk.asynchronous and any("schedule" in label for label in labels.values()):
                self.nest(eqn, self.walk.price_schedule(body, labels, constants), 1, ready)
                return
            first = eqn.params["consts"]
            carry = range(first, first + eqn.params["carry"])
            step = self.walk.price(body, constants, runs=self.runs * run_count(eqn), carry=carry)
        self.nest(eqn, step, run_count(eqn), ready)
        self.stacked.update(eqn.outputs)
        self.stack(eqn)

    def stack(self, eqn: Equation) -> None:
        """Count the copies of the results of each step into one array, which programs of `jit` make."""
        rows = eqn.outputs[eqn.params["carry"] :] if self.is_jitted and isinstance(eqn.primitive, Scan) else ()
        if nbytes := 2 * sum(local_type(v).nbytes for v in rows):
            ready = max(self.times(rows))
            start, end = self.occupy(COMPUTE, self.walk.costs.compute(Work(0, nbytes), None), ready)
            self.cost.entries[Category(tape_cost.ELEMENTWISE, "stack", (), eqn.source)].add(
                Amount(1, end - start, bytes=nbytes)
            )
            self.ready.update(dict.fromkeys(rows, end))

    def nest(self, eqn: Equation, cost: TapeCost, times: int, ready: float) -> None:
        """Run all operations of bodies as one: a loop, or a branch."""
        self.mark_updates(eqn)
        sends = any(key.axes for key in cost.entries)
        self.wait(max([ready, *self.free.values()]) if sends else ready)
        start, end = self.occupy(COMPUTE, times * cost.seconds, ready)
        if sends:
            self.free.update({resource: max(t, end) for resource, t in self.free.items()})
        self.cost.add(cost, times)
        self.cost.sends = max(self.cost.sends, cost.sends)
        self.ready.update(dict.fromkeys(eqn.outputs, end))
        self.record_operation(str(eqn.primitive), COMPUTE, start, end, eqn.source)

    # ------------------------------------------------ constants

    def value(self, a: Atom) -> Any:
        if isinstance(a, Var):
            return self.constants.get(a)
        return a if is_scalar_constant(a) else None

    def propagate_constants(self, eqn: Equation) -> None:
        """Compute an integer or a truth value whose operands are constants: a stage's index, for example."""
        out = eqn.outputs[0].type if len(eqn.outputs) == 1 else None
        if out is None or out.shape or out.dtype.kind not in "biu":
            return
        if eqn.primitive.name == "axis_index":
            axis, *more = eqn.params["axes"]
            if axis in self.walk.coordinates and not more:
                self.constants[eqn.outputs[0]] = numpy.int64(self.walk.coordinates[axis])
            return
        values = [self.value(a) for a in eqn.inputs]
        passes = isinstance(eqn.primitive, Promoting) or eqn.primitive.name in ("convert", "schedule", "pbroadcast")
        if not passes or any(x is None for x in values):
            return
        on_ranks = eqn.primitive.on_ranks
        self.constants[eqn.outputs[0]] = values[0] if on_ranks else eqn.primitive.impl(*values, **eqn.params)

    # ------------------------------------------------ kinds

    def mark_updates(self, eqn: Equation) -> None:
        depends = any(isinstance(a, Var) and a in self.updates for a in eqn.inputs)
        if depends or is_backward(eqn):
            self.updates.update(eqn.outputs)

    def is_update(self, eqn: Equation) -> bool:
        """Return whether an equation is of the optimizer: after the backward pass, of values that depend on it."""
        return self.is_step and not is_backward(eqn) and any(a in self.updates for a in eqn.inputs if type(a) is Var)

    def kind(self, eqn: Equation, work: Work, attention: frozenset) -> str:
        if work.product is not None:
            return tape_cost.ATTENTION if work.product.batch > 1 else tape_cost.PRODUCTS
        if self.is_update(eqn):
            return tape_cost.OPTIMIZER
        if attention is ANY_SHAPE:
            return tape_cost.ATTENTION
        shapes = {typeof(a).shape for a in (*eqn.inputs, *eqn.outputs)}
        return tape_cost.ATTENTION if shapes & attention else tape_cost.ELEMENTWISE

    def record_operation(self, name: str, resource: str, start: float, end: float, source: Location | None) -> None:
        if self.walk.record:
            self.cost.operations.append(Operation(name, resource, start, end, source))

    def finish(self, tape: Tape) -> TapeCost:
        carried = () if self.carry is None else self.times(tape.outputs[: len(self.carry)])
        ends = self.free if self.carry is None else self.busy
        self.wait(max([*ends.values(), *carried], default=0.0))
        self.cost.seconds = self.free[COMPUTE]
        return self.cost


def _add_launch_overhead(cost: TapeCost, seconds: float) -> None:
    """Let the device wait for the host, which takes `seconds` to launch each operation."""
    if (idle := cost.launches * seconds - cost.seconds) > 0:
        cost.seconds += idle
        cost.entries[Category(tape_cost.ISSUE, "idle", (), None)].add(Amount(1, idle))


def _count_as_recomputed(cost: TapeCost) -> None:
    """Leave the forward pass, which a backward step computes again, out of the operations of the model."""
    for key, entry in cost.entries.items():
        if not (key.source and key.source.backward):
            entry.model_flops = 0


def local_type(a: Atom) -> ShapedArray:
    """Return the type of a value on one rank: of its block, if it is sharded."""
    t = typeof(a)
    return t if t.sharding is None else block_type(t, t.sharding.spec, t.sharding.mesh.shape)


def is_backward(eqn: Equation) -> bool:
    """Return whether an equation, or one in its bodies, is in the backward pass."""
    if eqn.source is not None and eqn.source.backward:
        return True
    return any(is_backward(inner) for body in eqn.bodies for inner in body.equations)
