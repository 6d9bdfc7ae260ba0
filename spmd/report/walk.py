"""The one walk over a tape that prices it: seconds, work and messages of every operation, by kind and by line.

`Walk.price` follows a tape as ranks run it, with two kinds of lanes: one computes, in the order of the tape, and each
link carries the collectives that use it. An operation starts when its operands are there and its lane is free. Loops
are priced once and multiplied; of branches, the one that is known to run, or else the one that takes longest. Reports
are views of what the walk returns: a `TapeCost`.

What a lane costs is asked of `Prices`: a machine (`spmd.predict`), or a model of communication and a rate
(`spmd.timeline`).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy

from minidiff.compiler.codegen import group_operations
from minidiff.compiler.fusion import fused_p, group_equations
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.diagnostics.location import Location
from minidiff.higher_order.cond import Cond
from minidiff.higher_order.dead_code import count_uses
from minidiff.higher_order.scan import Scan, run_count
from minidiff.higher_order.while_loop import While
from minidiff.ops.base import Promoting
from minidiff.ops.costs import Work, work_of
from minidiff.values.dtypes import is_scalar_constant
from spmd.mesh.specs import block_type
from spmd.report.pipelined import price_schedule
from spmd.report.tape_cost import (
    ATTENTION,
    COMPUTE,
    ELEMENTWISE,
    OPTIMIZER,
    PRODUCTS,
    Amount,
    Category,
    Operation,
    Prices,
    TapeCost,
)

LONGEST_BRANCH = "which branch is run is not known beforehand: the one that takes longest is counted"
ONE_STEP = "how many steps a while_loop takes is not known beforehand: what it does is counted for one"


# ---------------------------------------------------------------- the walk


class Walk:
    """A walk along a tape, by `prices`.

    `overlap` says which axes' collectives run beside computation: those of all (True), of none (False), or of some.
    `fused` says whether elementwise operations are one loop, as a compiler makes of them, and `kernels` whether `jit`
    compiles such loops to machine code; `asynchronous` whether the
    stages of a schedule wait for what they need alone, not for each tick; `keep` whether spans have their operations.
    """

    def __init__(
        self,
        prices: Prices,
        overlap: bool | Collection[str] = True,
        fused: bool = True,
        asynchronous: bool = True,
        keep: bool = False,
        kernels: bool = True,
    ):
        self.prices, self.overlap, self.fused, self.kernels = prices, overlap, fused, kernels
        self.asynchronous, self.keep = asynchronous, keep
        self.notes: dict[str, None] = {}
        self.coordinates: dict[str, int] = {}  # of the rank whose stage is priced, along the axis of a schedule
        self.schedules: list[Any] = []  # those that were priced

    def price(self, tape: Tape, known: Mapping[Var, Any] | None = None, whole: bool = False, runs: int = 1) -> TapeCost:
        """What a tape takes, where some integers are known.

        `whole` says that it is a whole step of training, `runs` how often a program runs the tape.
        """
        run = self.run_of(tape)
        run.known.update(known or {})
        run.is_step, run.runs = whole, runs
        run.follow(tape, [0.0] * len(tape.inputs))
        return run.finish(tape)

    def run_of(self, tape: Tape) -> TapeRun:
        """What follows a tape: it counts seconds. A walk that counts something else has another one."""
        return TapeRun(self, tape)

    def body_of(self, eqn: Equation) -> Tape:
        """The body of an operation that runs it once."""
        return eqn.bodies[0]

    def runs_beside(self, axes: Sequence[str]) -> bool:
        """Whether a collective over these axes does not stop computation."""
        return self.overlap if isinstance(self.overlap, bool) else bool(axes) and {*axes} <= {*self.overlap}


class TapeRun:
    """A tape and the bodies inlined in it: when each lane is free, when each value is ready, and what is known."""

    def __init__(self, walk: Walk, tape: Tape):
        self.walk = walk
        self.span = TapeCost()
        self.free: dict[str, float] = defaultdict(float)
        self.ready: dict[Var, float] = {}
        self.known: dict[Var, Any] = {}
        self.sent: list[tuple[float, float, Category]] = []  # the collectives that may still run: start, end
        self.nbytes: dict[Var, int] = {}  # of views: those of what they show
        self.labels: dict[Var, dict] = {}  # entries of a schedule, and a rank's number along an axis
        self.updates: set[Var] = set()  # values that depend on gradients
        self.stacked: set[Var] = set()  # results of the steps of loops
        self.is_step = False  # whether it is the whole step, which ends with the optimizer's update
        self.runs = 1  # how often a program runs it

    @property
    def is_jitted(self) -> bool:
        """Whether the program is the one that `jit` makes, with its loops."""
        fuses = self.walk.prices.fuses
        return self.walk.fused and fuses is not None and not fuses

    # ------------------------------------------------ following

    def follow(self, tape: Tape, ready: Sequence[float]) -> None:
        self.ready.update(zip(tape.inputs, ready))
        attention = _attention_shapes(tape)
        if self.is_jitted:
            tape = group_operations(tape, (), self.walk.kernels, self.runs)
        for group, used in _groups(tape, self.walk.prices.fuses if self.walk.fused else None):
            if len(group) > 1:
                self.compute(group, attention, used)
            else:
                self.step(group[0], attention)

    def step(self, eqn: Equation, attention: set) -> None:
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
            self.find_known(eqn)
            self.compute([eqn], attention)
        if primitive.is_view and isinstance(eqn.inputs[0], Var) and eqn.inputs[0] in self.labels:
            self.labels[eqn.outputs[0]] = self.labels[eqn.inputs[0]]

    def times(self, atoms: Sequence[Atom]) -> list[float]:
        return [self.ready.get(a, 0.0) if isinstance(a, Var) else 0.0 for a in atoms]

    def place(self, lane: str, seconds: float, ready: float, blocks: bool = False) -> tuple[float, float]:
        """Put work in a lane as early as it can be: its start and its end."""
        start = max(ready, self.free[lane], self.free[COMPUTE] if blocks else 0.0)
        self.free[lane] = start + seconds
        return start, start + seconds

    # ------------------------------------------------ operations

    def compute(self, group: Sequence[Equation], attention: set, used: Collection[Var] = ()) -> None:
        """Place operations that run as one, and count what they do; others use the results that are `used`."""
        works = [self.work(eqn) for eqn in group]
        made = {v for eqn in group for v in eqn.outputs}
        nbytes = self.bytes_of_group(group, made, used) if len(group) > 1 else works[0].bytes
        self.note_views(group)
        prices = self.walk.prices
        steps = prices.steps_in_loops if len(group) > 1 else prices.steps
        flops = sum(round(work.flops * steps.get(eqn.primitive.name, 1)) for eqn, work in zip(group, works))
        seconds = prices.compute(Work(flops, nbytes, works[0].product), _product_dtype(group[0]))
        operands = [a for eqn in group for a in eqn.inputs if isinstance(a, Var)]
        ready = max(self.times([a for a in operands if a not in made]), default=0.0)
        for eqn in group:
            self.mark_updates(eqn)
        if not (flops or nbytes):
            self.ready.update(dict.fromkeys(made, ready))
            return
        if seconds:
            self.wait(ready)
            self.span.issued += 1
            start, ready = self.place(COMPUTE, seconds, ready)
            self.note_operation(str(group[0].primitive), COMPUTE, start, ready, group[0].source)
        self.ready.update(dict.fromkeys(made, ready))
        whole = sum(work.bytes for work in works) or 1
        for eqn, work in zip(group, works):
            share = work.bytes / whole
            kind = self.kind(eqn, work, attention)
            again = eqn.source is not None and eqn.source.recomputed
            entry = Amount(1, seconds * share, 0.0, work.flops, 0 if again else work.flops, nbytes * share)
            self.span.entries[Category(kind, eqn.primitive.name, (), eqn.source)].add(entry)

    def work(self, eqn: Equation) -> Work:
        """The work of an equation on one rank, where views of small arrays are read as those."""
        if self.is_address(eqn) or "ranks" in eqn.params:  # or a lowered collective that sends nothing
            return Work(0, 0)
        inputs, outputs = [*map(local_type, eqn.inputs)], [*map(local_type, eqn.outputs)]
        work = work_of(eqn.primitive, inputs, outputs, eqn.params, in_place=self.walk.fused)
        saved = sum(t.nbytes - self.size(a) for a, t in zip(eqn.inputs, inputs) if isinstance(a, Var))
        return work._replace(bytes=max(work.bytes - saved, 0)) if work.bytes and saved > 0 else work

    def is_address(self, eqn: Equation) -> bool:
        """Whether an operation takes no time: compiled programs view slices, accelerators read through indices, too."""
        through_index = eqn.primitive.name == "gather"
        fuses = self.walk.prices.fuses
        return bool(fuses or (self.walk.fused and not through_index)) and is_view_of_operand(eqn)

    def size(self, a: Atom) -> int:
        """The bytes of a value, or of what it is a view of if that is smaller."""
        own = local_type(a).nbytes if isinstance(a, Var) else 0
        return min(self.nbytes.get(a, own), own)

    def note_views(self, group: Sequence[Equation]) -> None:
        for eqn in group:
            if not (eqn.primitive.is_view and eqn.inputs and isinstance(eqn.inputs[0], Var)):
                continue
            if eqn.inputs[0] in self.stacked:
                self.stacked.update(eqn.outputs)
            base = self.size(eqn.inputs[0])
            self.nbytes.update((v, base) for v in eqn.outputs if base < local_type(v).nbytes)

    def bytes_of_group(self, group: Sequence[Equation], made: set[Var], used: Collection[Var]) -> int:
        """What a fused loop reads and writes: each operand once, and the results that others use; views are neither.

        Nor is a sum with what the steps of a loop made: the products there add to it, as BLAS does (beta * C + A * B).
        """
        shown: dict[Var, Var] = {}  # what views, and what is taken of an array, show
        read: dict[Var, set[Var]] = defaultdict(set)
        for eqn in group:
            operands = [a for a in eqn.inputs if isinstance(a, Var)]
            if is_view_of_operand(eqn) and operands:
                shown[eqn.outputs[0]] = shown.get(operands[0], operands[0])
                continue
            if self.walk.prices.fuses and any(shown.get(a, a) in self.stacked for a in operands):
                if eqn.primitive.name == "convert":
                    shown[eqn.outputs[0]] = shown.get(operands[0], operands[0])
                    continue
                if eqn.primitive.name == "add":
                    made = made - {*eqn.outputs}
                    continue
            for a in operands:
                if (base := shown.get(a, a)) not in made:
                    read[base].add(a)
        written = {shown.get(v, v) for v in used} & made
        taken = [min(self.size(base), sum(map(self.size, parts))) for base, parts in read.items()]
        return sum(taken) + sum(local_type(v).nbytes for v in written)

    def send(self, eqn: Equation) -> None:
        """Place a collective in the lane of its link."""
        params = eqn.params.get("params", eqn.params)  # its own, if it is lowered
        axes, size = params["axes"], params["size"]
        name = eqn.params.get("collective", eqn.primitive).name  # of one that `jit` starts early, its own
        nbytes = sum(t.nbytes for t in map(local_type, eqn.inputs))
        seconds, lane = self.walk.prices.send(name, size, nbytes, axes)
        ready = max(self.times(eqn.inputs), default=0.0)
        self.mark_updates(eqn)
        key = Category(f"{name} along {', '.join(axes)}", name, axes, eqn.source, size)
        self.span.entries[key].add(Amount(1, seconds, 0.0, 0, 0, nbytes))
        if any(axis in self.walk.coordinates for axis in axes):  # between two steps of a schedule
            self.span.sends = max(self.span.sends, seconds)
            self.ready.update(dict.fromkeys(eqn.outputs, ready))
            return
        blocks = not self.walk.runs_beside(axes)
        start, end = self.place(lane, seconds, ready, blocks)
        self.sent.append((start, end, key))
        if blocks:
            self.wait(end)
        self.ready.update(dict.fromkeys(eqn.outputs, end))
        self.note_operation(str(eqn.primitive), lane, start, end, eqn.source)

    def wait(self, until: float) -> None:
        """Let computation wait; the collectives that run meanwhile are exposed."""
        now = self.free[COMPUTE]
        if until <= now:
            return
        self.sent = [(start, end, key) for start, end, key in self.sent if end > now]
        for start, end, key in self.sent:
            low, high = max(start, now), min(end, until)
            if high > low:
                self.span.entries[key].exposed += high - low
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
            known = [self.passed(body, eqn.inputs[1:]) for body in bodies]
            spans = [self.walk.price(body, each, runs=self.runs) for body, each in zip(bodies, known)]
            span = max(spans, key=lambda s: s.seconds)
            if any(not math.isclose(s.seconds, span.seconds) for s in spans):
                self.walk.notes[LONGEST_BRANCH] = None
            self.nest(eqn, span, 1, max(ready, default=0.0))
        elif getattr(primitive, "repeats", False) or isinstance(primitive, While):
            self.loop(eqn, max(ready, default=0.0))
        else:
            self.inline(eqn, self.walk.body_of(eqn), eqn.inputs)

    def inline(self, eqn: Equation, body: Tape, inputs: Sequence[Atom]) -> None:
        """Follow a body as if it were here."""
        with self.inlined(eqn, body, inputs):
            self.follow(body, self.times(inputs))

    @contextlib.contextmanager
    def inlined(self, eqn: Equation, body: Tape, inputs: Sequence[Atom]) -> Iterator[None]:
        """Know of the inputs of a body what is known of the operands, and afterwards of the results likewise."""
        self.known.update(self.passed(body, inputs))
        self.rename(body.inputs, inputs)
        yield
        self.rename(eqn.outputs, body.outputs)

    def rename(self, names: Sequence[Var], atoms: Sequence[Atom]) -> None:
        """Give values other names, with all that is known of them."""
        self.ready.update(zip(names, self.times(atoms)))
        renamed = [(v, a) for v, a in zip(names, atoms) if isinstance(a, Var)]
        tables: tuple[dict[Var, Any], ...] = (self.labels, self.nbytes)
        for table in tables:
            table.update((v, table[a]) for v, a in renamed if a in table)
        for marked in (self.updates, self.stacked):
            marked.update(v for v, a in renamed if a in marked)

    def passed(self, body: Tape, inputs: Sequence[Atom]) -> dict[Var, Any]:
        """The inputs of a body whose values are known."""
        values = [(v, self.value(a)) for v, a in zip(body.inputs, inputs)]
        return {v: x for v, x in values if x is not None}

    def loop(self, eqn: Equation, ready: float) -> None:
        """Place a loop: each of its steps, or those of the schedule that it follows."""
        if isinstance(eqn.primitive, While):
            self.walk.notes[ONE_STEP] = None
            condition, step = (self.walk.price(eqn.params[name]) for name in ("cond", "body"))
            step.add(condition)
            step.seconds += condition.seconds
        else:
            body, pairs = eqn.params["body"], zip(eqn.params["body"].inputs, eqn.inputs)
            known = self.passed(body, eqn.inputs[: eqn.params["consts"]])
            labels = {v: self.labels[a] for v, a in pairs if isinstance(a, Var) and a in self.labels}
            if self.walk.asynchronous and any("schedule" in label for label in labels.values()):
                # stages run their own steps, and wait for those they need
                self.nest(eqn, price_schedule(self.walk, body, labels, known), 1, ready)
                return
            step = self.walk.price(body, known, runs=self.runs * run_count(eqn))
        self.nest(eqn, step, run_count(eqn), ready)
        self.stacked.update(eqn.outputs)
        self.stack(eqn)

    def stack(self, eqn: Equation) -> None:
        """Count what a program of `jit` does with the results of each step: it copies them into one array."""
        rows = eqn.outputs[eqn.params["carry"] :] if self.is_jitted and isinstance(eqn.primitive, Scan) else ()
        if nbytes := 2 * sum(local_type(v).nbytes for v in rows):
            ready = max(self.times(rows))
            start, end = self.place(COMPUTE, self.walk.prices.compute(Work(0, nbytes), None), ready)
            self.span.entries[Category(ELEMENTWISE, "stack", (), eqn.source)].add(Amount(1, end - start, bytes=nbytes))
            self.ready.update(dict.fromkeys(rows, end))

    def nest(self, eqn: Equation, span: TapeCost, times: int, ready: float) -> None:
        """Place all that bodies do as one: a loop, or a branch."""
        self.mark_updates(eqn)
        sends = any(key.axes for key in span.entries)
        self.wait(max([ready, *self.free.values()]) if sends else ready)
        start, end = self.place(COMPUTE, times * span.seconds, ready)
        if sends:
            self.free.update((lane, max(t, end)) for lane, t in [*self.free.items()])
        self.span.add(span, times)
        self.span.sends = max(self.span.sends, span.sends)
        self.ready.update(dict.fromkeys(eqn.outputs, end))
        self.note_operation(str(eqn.primitive), COMPUTE, start, end, eqn.source)

    # ------------------------------------------------ what is known

    def value(self, a: Atom) -> Any:
        if isinstance(a, Var):
            return self.known.get(a)
        return a if is_scalar_constant(a) else None

    def find_known(self, eqn: Equation) -> None:
        """Compute an integer or a truth value whose operands are known: a stage's number, say."""
        out = eqn.outputs[0].type if len(eqn.outputs) == 1 else None
        if out is None or out.shape or out.dtype.kind not in "biu":
            return
        if eqn.primitive.name == "axis_index":
            if all(axis in self.walk.coordinates for axis in eqn.params["axes"]) and len(eqn.params["axes"]) == 1:
                self.known[eqn.outputs[0]] = numpy.int64(self.walk.coordinates[eqn.params["axes"][0]])
            return
        values = [self.value(a) for a in eqn.inputs]
        passes = isinstance(eqn.primitive, Promoting) or eqn.primitive.name in ("convert", "schedule", "pbroadcast")
        if not passes or any(x is None for x in values):
            return
        if eqn.primitive.on_ranks:
            self.known[eqn.outputs[0]] = values[0]
        else:
            self.known[eqn.outputs[0]] = eqn.primitive.impl(*values, **eqn.params)

    # ------------------------------------------------ kinds

    def mark_updates(self, eqn: Equation) -> None:
        depends = any(isinstance(a, Var) and a in self.updates for a in eqn.inputs)
        if depends or is_backward(eqn):
            self.updates.update(eqn.outputs)

    def kind(self, eqn: Equation, work: Work, attention: set) -> str:
        if work.product is not None:
            return ATTENTION if work.product.batch > 1 else PRODUCTS
        if self.is_step and not is_backward(eqn) and any(v in self.updates for v in eqn.outputs):
            return OPTIMIZER
        shapes = {typeof(a).shape for a in (*eqn.inputs, *eqn.outputs)}
        return ATTENTION if shapes & attention else ELEMENTWISE

    def note_operation(self, name: str, lane: str, start: float, end: float, source: Location | None) -> None:
        if self.walk.keep:
            self.span.operations.append(Operation(name, lane, start, end, source))

    def finish(self, tape: Tape) -> TapeCost:
        self.wait(max(self.free.values(), default=0.0))
        self.span.seconds = self.free[COMPUTE]
        return self.span


# ---------------------------------------------------------------- types and groups


def local_type(a: Atom) -> ShapedArray:
    """The type of a value on one rank: that of its block, if it is sharded."""
    t = typeof(a)
    return t if t.sharding is None else block_type(t, t.sharding.spec, t.sharding.mesh.shape)


def is_backward(eqn: Equation) -> bool:
    """Whether an equation, or one of its bodies, is of the backward pass."""
    if eqn.source is not None and eqn.source.backward:
        return True
    return any(is_backward(inner) for body in eqn.bodies for inner in body.equations)


def _product_dtype(eqn: Equation) -> Any:
    return typeof(eqn.inputs[0]).dtype if eqn.inputs else eqn.outputs[0].type.dtype


def _attention_shapes(tape: Tape) -> set[tuple[int, ...]]:
    """The shapes of operands and results of batches of products: queries, keys and values, and their scores."""
    found: set[tuple[int, ...]] = set()
    for eqn in tape.equations:
        if eqn.primitive.name in ("matmul", "einsum"):
            types = [typeof(a) for a in eqn.inputs]
            work = work_of(eqn.primitive, types, [v.type for v in eqn.outputs], eqn.params)
            if work.product is not None and work.product.batch > 1:
                found.update(t.shape for t in (*types, *(v.type for v in eqn.outputs)))
    return found


def is_view_of_operand(eqn: Equation) -> bool:
    """Whether an operation, where it is fused, is an address: a view, or a part at an index that is one number."""
    name = eqn.primitive.name
    if name == "gather":
        return all(typeof(a).size == 1 for a in eqn.inputs[1:])
    return eqn.primitive.is_view or name in ("slice", "recompute", "name")


def _groups(tape: Tape, fuses: Collection[str] | None) -> Iterator[tuple[Sequence[Equation], Collection[Var]]]:
    """The equations of a tape; elementwise ones, views and those that `fuses` names as groups, each of which is a loop.

    Each group comes with those of its results that others use. Without `fuses`, each equation is by itself.
    """
    if not fuses:
        yield from (([eqn], eqn.outputs) for eqn in tape.equations)
        return

    def key(eqn: Equation) -> Any:
        if eqn.bodies or (eqn.primitive.on_ranks and not eqn.primitive.is_view) or not eqn.outputs[0].type.shape:
            return None  # scalars may be known, and say which branch is run
        elementwise = isinstance(eqn.primitive, Promoting)
        backward = eqn.source is not None and eqn.source.backward
        return backward if elementwise or is_view_of_operand(eqn) or eqn.primitive.name in fuses else None

    uses = count_uses(tape)
    for group in group_equations(tape, key, inside=lambda *_: True):
        within = Counter(a for eqn in group for a in eqn.inputs if isinstance(a, Var))
        yield group, {v for eqn in group for v in eqn.outputs if uses.get(v, 0) > within[v]}
