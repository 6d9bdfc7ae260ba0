"""Plan how a model is split over devices: predict choices, keep those that fit, and say why others do not.

A choice has the sizes of a mesh's axes, the examples of a microbatch, a schedule and its chunks, a ZeRO stage and what
is recomputed. The user's function makes the step for a choice. Its tape is priced (`spmd.predict`); nothing runs. If
there are few choices, all of them are predicted. Otherwise the search descends from three meshes: it changes one option
at a time, as long as that is better: exceeding the memory by less, then taking less time.

On each tape, the axes that carry most bytes get the nearest ranks. Bytes are those of a rank on the tape, as the
fastest algorithm sends them.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from minidiff import tree
from minidiff.core.tape import Tape
from minidiff.core.types import typeof
from minidiff.errors.tracebacks import hide_own_frames
from minidiff.inputs.arguments import check_function
from minidiff.values.aliasing import types_alone
from spmd.checks.ranges import CAPACITY, COUNT, FLAG, NAMES, Allowed, check_ranges, several
from spmd.mesh.mesh import Mesh
from spmd.pipeline import library
from spmd.pipeline.tables import Schedule
from spmd.prices.compiled_tape import meshes_of, rewritten
from spmd.prices.forecast import FASTEST, CostModel
from spmd.prices.machine import Machine, Placement
from spmd.prices.tape_cost import BUBBLE
from spmd.prices.walk import local_type
from spmd.report.predict import Prediction, predict
from spmd.report.strategies import plan_specs
from spmd.show import Table, plot_front, show_seconds

#: The axes of a mesh whose sizes a choice has.
AXES = "data", "shards", "experts", "stages", "tokens", "feats"
#: The cost of bytes alone.
BYTES = CostModel(alpha=0.0, beta=1.0, algorithms=FASTEST)


@dataclass(frozen=True)
class Choice:
    """A way to train a model: the sizes of the axes of a mesh, and the rest.

    >>> print(Choice(data=4, feats=2, microbatch=8))
    data=4, feats=2, microbatch=8
    """

    data: int = 1
    shards: int = 1
    experts: int = 1
    stages: int = 1
    tokens: int = 1
    feats: int = 1
    microbatch: int = 1
    schedule: str = "one_f_one_b"
    chunks: int = 1
    zero: int = 0
    recompute: str | None = None

    def __str__(self) -> str:
        other = [(each.name, x) for each in fields(self) if (x := getattr(self, each.name)) != each.default]
        return ", ".join(f"{name}={x}" for name, x in other) or "one device"

    @property
    def mesh(self) -> dict[str, int]:
        """The size of each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def order(self, microbatches: int) -> Schedule:
        """Return the schedule, by its name in `spmd.pipeline`; with several chunks, the interleaved one."""
        if self.chunks > 1:
            return library.interleaved(self.stages, microbatches, self.chunks)
        return getattr(library, self.schedule)(self.stages, microbatches)


@dataclass(frozen=True)
class Candidate:
    """A choice and its prediction, with the axes of the mesh where `placed` puts them."""

    choice: Choice
    prediction: Prediction
    placed: Placement | None

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def memory(self) -> int:
        """The bytes of a rank at the peak."""
        return sum(self.prediction.memory.values())

    def terms(self) -> dict[str, float]:
        """Return the seconds of each kind of work in which a rank does nothing else."""
        terms = {}
        for kind, entry in self.prediction.kinds.items():
            sends = " along " in kind and kind != BUBBLE
            terms[f"exposed {kind}" if sends else kind] = entry.exposed if sends else entry.seconds
        return terms

    def slowest(self) -> dict[str, str]:
        """Return the slowest link of each axis that has several ranks."""
        axes = self.placed.axes if self.placed else ()
        return {axis: self.placed.slowest((axis,)).name for axis, n in axes if n > 1}  # type: ignore[union-attr]

    def against(self, best: Candidate) -> str:
        """Say what takes longer than in another candidate, in per cent of its step, and axes that leave a fast link."""
        ours, theirs, sizes = self.terms(), best.terms(), dict(self.placed.axes) if self.placed else {}
        more = {kind: (ours.get(kind, 0.0) - theirs.get(kind, 0.0)) / best.seconds for kind in {**ours, **theirs}}
        largest = sorted((kind for kind in more if abs(more[kind]) >= 0.005), key=lambda kind: -abs(more[kind]))[:2]
        text = ", ".join(f"{100 * more[kind]:+.0f} % {kind}" for kind in sorted(largest, key=lambda kind: -more[kind]))
        fast = best.prediction.machine.links[0].name
        near, far = ({axis for axis, name in each.slowest().items() if name != fast} for each in (best, self))
        leaves = [f"{axis}={sizes[axis]} leaves {fast}" for axis in sizes if axis in far - near]
        leaves = [each for each in leaves if any(each.split("=")[0] in kind for kind in largest if more[kind] > 0)]
        return ": ".join(filter(None, [", ".join(leaves), text])) or "as fast"


@dataclass(frozen=True, repr=False)
class Plan(Table):
    """The choices that fit in memory, the fastest first: a table to print, and to draw by `plot()`.

    `predicted` has all candidates. `rejected` says why choices do not fit the model; `too_large` has the bytes of the
    arguments of choices that were not recorded. `limit` is the memory of a device.
    """

    predicted: tuple[Candidate, ...]
    rejected: Mapping[Choice, str]
    too_large: Mapping[Choice, int]
    limit: float
    count: int
    complete: bool

    @property
    def choices(self) -> tuple[Candidate, ...]:
        fits = [each for each in self.predicted if each.memory <= self.limit]
        return tuple(sorted(fits, key=lambda each: (each.seconds, each.memory)))

    @property
    def best(self) -> Candidate:
        return self.choices[0]

    @property
    def front(self) -> list[Candidate]:
        """The candidates that no other one beats in both time and memory, the fastest first."""
        front: list[Candidate] = []
        for each in sorted(self.predicted, key=lambda each: (each.seconds, each.memory)):
            if not front or each.memory < front[-1].memory:
                front.append(each)
        return front

    def _table(self) -> tuple[list, list, None]:
        rows = []
        for each in self.choices[: self.count]:
            reason = "the best" if each is self.best else each.against(self.best)
            held = f"{each.memory / 2**30:.3g}"
            rows.append([str(each.choice), show_seconds(each.seconds), held, f"{each.prediction.mfu:.1%}", reason])
        return ["choice", "step", "GiB", "MFU", "against the best, in per cent of its step"], rows, None

    def _remarks(self) -> list[str]:
        over = len(self.predicted) - len(self.choices) + len(self.too_large)
        remarks = [
            f"{len(self.predicted)} choices are predicted{'' if self.complete else ', by descent'}; "
            f"{over} need more than {self.limit / 2**30:.3g} GiB, {len(self.rejected)} do not fit the model"
        ]
        if placed := self.best.placed:
            remarks.append(f"nearest ranks of the best: {', '.join(axis for axis, n in placed.axes if n > 1)}")
        if self.rejected:
            reason, count = Counter(self.rejected.values()).most_common(1)[0]
            remarks.append(f"(does not fit the model, {count} of {len(self.rejected)}: {reason})")
        return remarks

    def plot(self, ax: Any = None) -> Any:
        """Draw the time of a step over the memory of a device, and the front. Returns the axes; needs matplotlib."""
        points, best = ([(c.memory / 2**30, c.seconds) for c in part] for part in (self.predicted, self.front))
        ax = plot_front(ax, points, best, self.limit / 2**30, "GiB on a device at the peak", "seconds a step")
        where = self.best.memory / 2**30, self.best.seconds
        ax.annotate(str(self.best.choice), where, (0, -12), textcoords="offset points")
        return ax


_SCHEDULES, _RECOMPUTED = ("one_f_one_b", "gpipe", "zero_bubble"), ("full", "selective", None)
_RANGES = {
    **{"devices": COUNT, "tries": COUNT, "count": COUNT, "memory": CAPACITY, "axes": NAMES, "overlap": NAMES},
    **{"microbatch": several(COUNT), "chunks": several(COUNT)},
    "zero": several(Allowed("a stage of ZeRO", "0, 1, 2 or 3", lambda x: x in range(4))),
    "schedule": several(Allowed("a schedule", "'one_f_one_b', 'gpipe' or 'zero_bubble'", _SCHEDULES.__contains__)),
    "recompute": several(Allowed("what is computed again", "'full', 'selective' or None", _RECOMPUTED.__contains__)),
}


@hide_own_frames
def plan(
    make_step: Callable[[Choice], tuple[Callable, tuple]],
    machine: Machine,
    *,
    devices: int | None = None,
    memory: float | None = None,
    axes: Sequence[str] = AXES,
    microbatch: Sequence[int] = (1, 2, 4, 8, 16),
    schedule: Sequence[str] = ("one_f_one_b",),
    chunks: Sequence[int] = (1, 2, 4),
    zero: Sequence[int] = (0, 1, 2, 3),
    recompute: Sequence[str | None] = ("full", "selective", None),
    overlap: Any = True,
    tries: int = 60,
    count: int = 10,
    search: str = "meshes",
    mesh: Mesh | None = None,
) -> Any:
    """Find the choices with which a step takes the least time on some devices, and say why others take longer.

    If the blocks of the arguments alone need more memory than there is, a step is not even recorded; types with a
    sharding define the blocks, and a rank has at least its share of other arrays. If there are at most `tries` choices,
    all are predicted. If not, at most `tries` are, from three meshes that fit: with as many ranks as possible along the
    first of `axes`, along the last, and with sizes as equal as possible. A move shifts a prime factor from one axis to
    another, or takes the next value of another option.

    With `search="specs"` the mesh is fixed: `plan(f, machine, search="specs", mesh=mesh)(*args)` finds the partition
    specs of all values of a function of whole arrays with which its operations, one after the other, take the least
    time, and returns a `SpecPlan`, which runs it so. The arguments are arrays or types; those that are sharded over the
    mesh keep their specs. `memory` limits the bytes of the arguments' blocks. The other options are for meshes.

    Args:
        make_step: `make_step(choice)` returns a step and the types of its arguments, as `spmd.predict` takes them. It,
            or the step, raises ValueError for a choice that does not fit the model. For specs, the function itself.
        machine: a machine of `spmd.machines`.
        devices: the number of devices.
        memory: the most bytes that a choice may need on a device; by default the machine's.
        axes: the axes to split devices over.
        microbatch: numbers of examples of a microbatch to try, the first ones to begin with, as for the next four.
        schedule: schedules of pipelines to try: "one_f_one_b", "gpipe" or "zero_bubble".
        chunks: numbers of blocks of layers of a stage to try.
        zero: stages of ZeRO to try, from 0 to 3.
        recompute: what to compute again: "full", "selective" or None.
        overlap: that of `spmd.predict`.
        tries: the most choices to predict.
        count: the number of choices that the table shows.
        search: "meshes", or "specs" for the specs on one mesh.
        mesh: that mesh.

    Raises:
        ValueError: if no choice fits the model, or if none fits in memory; if a function is too large to search.
        TypeError: for specs without a mesh, or meshes with one.

    >>> import minidiff as md, minidiff.numpy as np, spmd
    >>> from collectives import psum
    >>> from spmd import P
    >>> def make_step(choice):
    ...     mesh = spmd.make_mesh((choice.data, choice.feats), ('data', 'feats'), backend='simulated')
    ...     specs = (P(None, 'feats'), P('feats')), P('data')
    ...     def step(weights, x):
    ...         loss = lambda up, down: psum(np.sum(psum(np.tanh(x @ up) @ down, 'feats') ** 2), 'data')
    ...         return md.grad(loss, (0, 1))(*weights)
    ...     step = spmd.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[0])
    ...     t = lambda *shape: md.ShapedArray(shape, 'float32')
    ...     return step, ((t(1024, 65536), t(65536, 1024)), t(65536, 1024))
    >>> fixed = dict(microbatch=[1], chunks=[1], zero=[0], recompute=[None])
    >>> plan = spmd.plan(make_step, spmd.machines.A100, devices=16, axes=('data', 'feats'), **fixed)
    >>> print(plan.best.choice)
    data=4, feats=4

    Specs of two layers on one mesh: the first product is split by columns, the second by rows.

    >>> mesh, t = spmd.make_mesh((4,), ('x',), backend='simulated'), lambda *shape: md.ShapedArray(shape, 'float32')
    >>> f = lambda up, down, x: np.tanh(x @ up) @ down
    >>> types = t(4096, 16384), t(16384, 4096), t(512, 4096)
    >>> plan = spmd.plan(f, spmd.machines.A100, search="specs", mesh=mesh)(*types)
    >>> plan.in_specs, spmd.communication(plan)(*types).counts
    ((P(None, 'x'), P('x'), P()), {'psum': 1})

    Sources: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    section 3; Isaev et al., "Calculon: a methodology and tool for high-level codesign of systems and large language
    models"; for specs, Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep
    learning", section 4.
    """
    check_function("plan", make_step)
    options = {"microbatch": microbatch, "schedule": schedule, "chunks": chunks, "zero": zero, "recompute": recompute}
    overlapped = () if FLAG.contains(overlap) or overlap is None else overlap
    limit = machine.memory if memory is None else memory
    if not isinstance(mesh, {"meshes": type(None), "specs": Mesh}.get(search, ())):
        raise TypeError(f"plan: write search='specs' and a mesh, or 'meshes' and none; got {search!r}, mesh={mesh!r}")
    numbers = {"devices": mesh.size if mesh else devices, "memory": limit, "tries": tries, "count": count}
    check_ranges("plan", _RANGES, {**numbers, **options, "axes": axes, "overlap": overlapped})
    if mesh:
        others = {**options, "devices": devices, "axes": axes, "overlap": overlap, "tries": tries, "count": count}
        defaults = inspect.signature(plan).parameters
        if ignored := [name for name, value in others.items() if value != defaults[name].default]:
            raise TypeError(f"plan: {ignored[0]}= is for search='meshes'; search='specs' takes a mesh, and memory=")
        return plan_specs(make_step, machine, mesh, limit)
    if unknown := [axis for axis in (*axes, *overlapped) if axis not in AXES]:
        raise ValueError(f"plan: no axis is named {unknown[0]!r}; the axes are {', '.join(AXES)}")
    if empty := [name for name, values in {"axes": axes, **options}.items() if not values]:
        raise ValueError(f"plan: {empty[0]} has nothing to try; got {options.get(empty[0], axes)!r}: pass a value")
    tried = _Search(make_step, machine, limit, overlap, tries)
    return tried.result(devices, tried.run(devices, tuple(axes), options), count)  # type: ignore[arg-type]


class _Search:
    """The choices that were tried: predicted, rejected with a reason, or too large by the bytes of their arguments."""

    def __init__(self, make_step: Callable, machine: Machine, limit: float, overlap: Any, tries: int):
        self.make_step, self.machine, self.limit = make_step, machine, limit
        self.overlap, self.tries = overlap, tries
        self.predicted: dict[Choice, Candidate] = {}
        self.rejected: dict[Choice, str] = {}
        self.too_large: dict[Choice, int] = {}

    def run(self, devices: int, axes: tuple[str, ...], options: Mapping[str, Sequence]) -> bool:
        """Search, and return whether all choices were predicted."""
        meshes: list[dict[str, Any]] = [dict(zip(axes, sizes)) for sizes in _factorizations(devices, len(axes))]
        if len(meshes) * math.prod(map(len, options.values())) <= self.tries:
            for mesh, values in itertools.product(meshes, itertools.product(*options.values())):
                self.rank(Choice(**mesh, **dict(zip(options, values))))
            return True
        first = {name: values[0] for name, values in options.items()}
        last = sorted(meshes, key=lambda mesh: -mesh[axes[-1]])
        alike = sorted(meshes, key=lambda mesh: sum(math.log(n) ** 2 for n in mesh.values()))
        moves = [*_moves(devices, axes, options)]
        for order in (meshes, last, alike):
            choices = (Choice(**mesh, **first) for mesh in order)
            if start := next((choice for choice in choices if self.rank(choice)[1] < math.inf), None):
                self.descend(start, moves)
        return False

    def descend(self, choice: Choice, moves: Sequence[Callable[[Choice], Choice | None]]) -> None:
        """Make moves, each as long as it is better, until none is."""
        before = None
        while before != choice:
            before = choice
            for move in moves:
                while (moved := move(choice)) is not None and self.rank(moved) < self.rank(choice):
                    choice = moved

    def rank(self, choice: Choice) -> tuple[float, float]:
        """Return the bytes by which a choice exceeds the memory, and its seconds; predict it the first time."""
        tried = choice in self.predicted or choice in self.rejected or choice in self.too_large
        if not tried and len(self.predicted) < self.tries:
            self.predict(choice)
        if choice in self.predicted:
            return max(self.predicted[choice].memory - self.limit, 0.0), self.predicted[choice].seconds
        return self.too_large.get(choice, math.inf), math.inf

    def predict(self, choice: Choice) -> None:
        """Record a choice's step without arrays, unless its arguments are too large, and price it."""
        try:
            with types_alone():
                step, types = self.make_step(choice)
                ranks = math.prod(choice.mesh.values())
                blocks = [(t.sharding, local_type(t).nbytes) for t in map(typeof, tree.leaves(types))]
                least = sum(nbytes if sharding else nbytes / ranks for sharding, nbytes in blocks)
                if least > self.limit:
                    self.too_large[choice] = int(least)
                    return
                tape = rewritten(step)(*types)
        except ValueError as error:
            self.rejected[choice] = str(error).splitlines()[0]
            return
        self.predicted[choice] = self.price(choice, tape)

    def result(self, devices: int, complete: bool, count: int) -> Plan:
        """Return the plan. Raises ValueError if there is none, with the reason of a choice or the smallest need."""
        plan = Plan(tuple(self.predicted.values()), self.rejected, self.too_large, self.limit, count, complete)
        if not plan.predicted and not plan.too_large:
            reason = next(iter(self.rejected.values()), "there is none")
            raise ValueError(f"plan: no choice for {devices:,} devices fits the model: {reason}")
        if not plan.choices:
            least = self.smallest_need()
            raise ValueError(
                f"plan: no choice fits in {plan.limit / 2**30:.3g} GiB on a device; the smallest need is "
                f"{least.memory / 2**30:.3g} GiB, of {least.choice}: take more devices"
            )
        return plan

    def smallest_need(self) -> Candidate:
        """Return the candidate that needs the least memory, where none fits."""
        skipped, self.too_large = self.too_large, {}
        self.limit, self.tries = math.inf, self.tries + len(AXES)
        need = lambda: min((each.memory for each in self.predicted.values()), default=math.inf)  # noqa: E731
        for choice in sorted(skipped, key=skipped.__getitem__):
            if skipped[choice] < need():
                self.rank(choice)
        return min(self.predicted.values(), key=lambda each: each.memory)

    def price(self, choice: Choice, tape: Tape) -> Candidate:
        """Predict a tape, with the axes ordered by the bytes that they carry if that is faster."""
        shape: dict[str, int] = {}
        for mesh in meshes_of(tape):
            shape.update(mesh.shape)
        overlap: Any = self.overlap
        overlap = [axis for axis in overlap if axis in shape] if isinstance(overlap, Collection) else overlap
        order, prediction = tuple(reversed(shape)), predict(tape, self.machine, overlap=overlap)
        volume = bytes_along(prediction)
        by_bytes = tuple(sorted(order, key=lambda axis: -volume[axis]))
        used, moved = ([axis for axis in each if shape[axis] > 1] for each in (order, by_bytes))
        if used != moved:
            other = predict(tape, self.machine, nearest=by_bytes, overlap=overlap)
            if other.seconds < prediction.seconds:
                order, prediction = by_bytes, other
        return Candidate(choice, prediction, self.machine.on(shape, order) if shape else None)


def bytes_along(prediction: Prediction) -> dict[str, float]:
    """Return the bytes that a rank sends along each axis in a step, by the fastest algorithms."""
    volume: dict[str, float] = defaultdict(float)
    for key, entry in prediction.cost.entries.items():
        for axis in key.axes if entry.bytes and key.ranks > 1 else ():
            volume[axis] += entry.count * BYTES.seconds(key.operation, key.ranks, entry.bytes / max(entry.count, 1))
    return volume


def _factorizations(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Return all ways to write n as a product of so many factors, those with the largest first factor first."""
    if parts == 1:
        yield (n,)
        return
    for first in (d for d in range(n, 0, -1) if n % d == 0):
        yield from ((first, *rest) for rest in _factorizations(n // first, parts - 1))


def _moves(devices: int, axes: Sequence[str], options: Mapping[str, Sequence]) -> Iterator[Callable]:
    """Yield functions from a choice to a neighbor, or to None if there is none."""
    primes = [p for p in range(2, devices + 1) if devices % p == 0 and all(p % q for q in range(2, p))]

    def shift(choice: Choice, source: str, to: str, p: int) -> Choice | None:
        size = getattr(choice, source)
        return None if size % p else replace(choice, **{source: size // p, to: getattr(choice, to) * p})

    def turn(choice: Choice, name: str, by: int) -> Choice | None:
        at = options[name].index(getattr(choice, name)) + by
        return replace(choice, **{name: options[name][at]}) if 0 <= at < len(options[name]) else None

    for name, by in itertools.product(options, (1, -1)):
        yield lambda choice, name=name, by=by: turn(choice, name, by)
    for source, to in itertools.permutations(axes, 2):
        for p in primes:
            yield lambda choice, source=source, to=to, p=p: shift(choice, source, to, p)
