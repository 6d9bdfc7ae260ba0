"""How many bytes each rank holds along a program, and where most.

The tape is walked in order: an equation allocates its results, and frees what it was the last to use. Views allocate
nothing. In the body of a `shard_map` values are blocks; outside, a sharded array counts with the block that a rank has
of it, and any other array is whole on every rank. Which values share memory, and when it is used for the last time, is
what the compiler knows (`minidiff/compiler/buffers.py`).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from collectives.backends.base import Axes
from collectives.backends.simulated import Simulated
from minidiff.compiler.buffers import Memory
from minidiff.compiler.codegen import REUSED_BYTES
from minidiff.core.operation import Primitive
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.debug import disable_jit
from minidiff.diagnostics.errors import TracerError
from minidiff.diagnostics.location import Location, parted
from minidiff.higher_order.cond import Cond
from minidiff.higher_order.scan import Scan, rounds
from minidiff.higher_order.while_loop import While
from minidiff.inputs.arguments import check_function
from minidiff.transforms.recording import make_tape
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import block_type
from spmd.report.communication import _direction, _shown, meshes_of
from spmd.report.forecast import axes_or_new
from spmd.report.rewritten import of_tape
from spmd.report.table import Table
from spmd.shard_map.interpreter import SPMD
from spmd.shard_map.operation import shard_map_p

ARGUMENTS, CONSTANTS = "arguments", "constants"
GRADIENTS, RESIDUALS, RESULTS = "gradients", "residuals", "results"
COMMUNICATION, TEMPORARIES = "communication", "temporaries"

#: What is held throughout. Arguments are parameters, optimizer state and data.
STATIC = (ARGUMENTS, CONSTANTS)
#: What comes and goes. Memory that several of these describe counts as the first.
DYNAMIC = (GRADIENTS, RESIDUALS, RESULTS, COMMUNICATION, TEMPORARIES)
KINDS = (*STATIC, *DYNAMIC)

COLOURS = dict(zip(KINDS, ("#9aa5b1", "#cbd2d9", "#82c98f", "#7fb3d9", "#b39ddb", "#f2b866", "#e58b88")))

ONE_BRANCH = "which branch is run is not known beforehand: the one that takes most memory is counted"
WHOLE = (
    "arguments that are plain arrays are whole on every rank; where only blocks of them are used, spmd.distribute them "
    "and save {:,} bytes a rank"
)

# ---------------------------------------------------------------- the report


@dataclass(frozen=True)
class Moment:
    """What a rank holds while one operation runs: its operands and its results included.

    `bytes` maps each kind of memory to its bytes, `source` is the line that asked for the operation; in the backward
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


@dataclass(frozen=True, repr=False)
class MemoryUse(Table):
    """The bytes that a rank holds along a program, shown as a table by `print` and notebooks.

    `moments` has them for each operation, in the order in which they run; a loop's body is there for its first and its
    last step. `peak` is the moment at which they are most. `ranks` is how many ranks the program runs on: all run the
    same program on blocks of the same shapes, so the numbers are those of each of them. `notes` says where the numbers
    depend on values, and what could be saved. `arguments` has the bytes of each array among the arguments, in order.

    The kinds of memory:

    - arguments: what the program is given, such as parameters, optimizer state and data. They are held throughout.
    - constants: arrays that the program closes over. They are held throughout.
    - gradients: what the backward pass makes, and the program returns or uses outside the backward pass.
    - residuals: what the forward pass makes and the backward pass uses.
    - results: what else the program returns.
    - communication: what else collectives return.
    - temporaries: all else.
    """

    moments: Sequence[Moment]
    ranks: int = 1
    notes: Sequence[str] = field(default_factory=list)
    arguments: Sequence[int] = ()

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def highest(self) -> dict[str, int]:
        """The most bytes of each kind, at whatever moment."""
        return {kind: max(moment.bytes.get(kind, 0) for moment in self.moments) for kind in KINDS}

    @property
    def lines(self) -> Lines:
        """The most bytes during each line of the program: a table to print."""
        return Lines(self)

    def _table(self) -> tuple[list, list, list]:
        peak, highest = self.peak, self.highest
        rows = [[k, f"{peak.bytes.get(k, 0):,}", f"{highest[k]:,}"] for k in KINDS if highest[k]]
        return ["bytes per rank", "at the peak", "highest"], rows, ["total", f"{peak.total:,}", ""]

    def _remarks(self) -> list[str]:
        peak = self.peak
        where = f"{peak.operation}, {_direction(peak.source)}" + (f", {_shown(peak.source)}" if peak.source else "")
        return [f"the peak: {where}", *[f"({note})" for note in self.notes]]

    def plot(self, ax: Any = None) -> Any:
        """Draw the bytes along the program, by kind. Returns the axes; needs matplotlib."""
        ax, unit, peak = axes_or_new(ax), _unit(self.peak.total), self.peak
        kinds = [kind for kind in KINDS if self.highest[kind]]
        heights = [[moment.bytes.get(kind, 0) / unit[0] for moment in self.moments] for kind in kinds]
        places = range(len(self.moments) + 1)  # an operation is a step as wide as all others
        heights = [[*row, row[-1]] for row in heights]
        ax.stackplot(places, heights, labels=kinds, colors=[COLOURS[kind] for kind in kinds], step="post")
        k, top = self.moments.index(peak) + 0.5, peak.total / unit[0]
        ax.plot([k], [top], "kv", markersize=5)
        ax.annotate(
            f"{top:.3g} {unit[1]}: {_shown(peak.source) or peak.operation}",
            (k, top),
            (0, 6),
            textcoords="offset points",
            ha="left" if k < len(self.moments) / 2 else "right",
            fontsize="small",
        )
        ax.set(xlim=(0, len(self.moments)), ylim=(0, 1.3 * top), xlabel="operation", ylabel=f"{unit[1]} per rank")
        ax.legend(loc="upper left", ncols=4, frameon=False, fontsize="small")
        return ax

    def plot_ranks(self, ax: Any = None) -> Any:
        """Draw a bar for each rank: its bytes at the peak, by kind. Returns the axes; needs matplotlib."""
        ax, (size, name), bottom = axes_or_new(ax), _unit(self.peak.total), 0.0
        for kind in KINDS:
            height = self.peak.bytes.get(kind, 0) / size
            if height:
                ax.bar(range(self.ranks), height, 0.8, bottom, color=COLOURS[kind], label=kind)
            bottom += height
        ax.set(xlabel="rank", ylabel=f"{name} at the peak")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False, fontsize="small")
        return ax


class Lines(Table):
    """The lines of a program, in the order in which they first run, and the most bytes during each."""

    def __init__(self, use: MemoryUse):
        most: dict[Location | None, Moment] = {}
        for moment in use.moments:
            known = most.get(moment.source)
            if known is None or moment.total > known.total:
                most[moment.source] = moment
        self.moments = most

    def _table(self) -> tuple[list, list, None]:
        kinds = [kind for kind in KINDS if any(m.bytes.get(kind) for m in self.moments.values())]
        rows = [
            [*[f"{m.bytes.get(kind, 0):,}" for kind in kinds], f"{m.total:,}", _direction(line), text]
            for line, m in self.moments.items()
            for text in [_shown(line) or m.operation]
        ]
        return [*kinds, "total", "direction", "line"], rows, None


def _unit(nbytes: int) -> tuple[int, str]:
    """A power of 1000 below a number of bytes, and the name of so many bytes."""
    return next(((10**k, name) for k, name in ((9, "GB"), (6, "MB"), (3, "kB")) if nbytes >= 10**k), (1, "bytes"))


def memory(f: Callable | Tape, *args: Any, optimized: bool = False) -> Any:
    """Report the bytes that a rank holds along a tape, or along `f`: `memory(f)(*args)`.

    For a function, it returns a function that reports on `f` for its arguments. Nothing runs: the report is read from
    the tape of `f` for arguments of these types. It is for `f` run eagerly, where NumPy frees an array with the last
    reference to it; with `optimized`, for what `jit(f)` compiles, which also writes results into memory that is no
    longer used. A sharded argument counts with a rank's block; a plain array is whole on every rank.

    What the tape does not say is not counted: what Python's variables hold on to after their last use, what NumPy or
    MPI take inside one operation, and eagerly what a policy of `checkpoint` saves in vain until the function ends. The
    tests find what NumPy allocates on a rank within 10 % of the report.

    >>> import numpy as np
    >>> import minidiff as md
    >>> from spmd import P, distribute, make_mesh, shard_map
    >>> from collectives import psum
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> loss = shard_map(lambda w, x: psum((w * x).sum(), 'i'), mesh=mesh, in_specs=(P(), P('i')), out_specs=P())
    >>> w, x = np.ones(1000), distribute(np.ones((4, 1000)), mesh, P('i'))
    >>> use = memory(md.grad(loss))(w, x)
    >>> print(use)
    bytes per rank  at the peak  highest
    --------------  -----------  -------
    arguments            16,000   16,000
    gradients             8,000    8,000
    communication             0        8
    temporaries           8,000    8,008
    --------------  -----------  -------
    total                32,000
    the peak: psum, backward, line 1: loss = shard_map(lambda w, x: psum((w * x).sum(), '…
    >>> use.peak.operation, use.peak.total
    ('psum', 32000)
    """
    check_function("memory", f, args)
    if optimized or isinstance(f, Tape):
        return of_tape(lambda tape: _report(tape, optimized), f, optimized)
    return lambda *args: _report(_unrolled(f, args), False)


def _unrolled(f: Callable, args: tuple) -> Tape:
    """The tape of all that `f` does where nothing is recorded: the steps of scans one by one."""
    with disable_jit(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a Python loop is recorded")
        return make_tape(f)(*args)


# ---------------------------------------------------------------- the walk along a tape


def _report(tape: Tape, compiled: bool) -> MemoryUse:
    arguments = [*map(_nbytes, tape.in_types)]
    held = {ARGUMENTS: sum(arguments), CONSTANTS: sum(map(_nbytes, map(typeof, _constants(tape))))}
    walk = _Walk(compiled)
    returned = _returned(tape, [RESULTS] * len(tape.outputs))
    moments = [Moment("the arguments", None, held), *walk.along(tape, returned, Counter(held))]
    ranks = max([math.prod(mesh.shape.values()) for mesh in meshes_of(tape)], default=1)
    saved = sum(_saved_by_blocks(tape))
    return MemoryUse(moments, ranks, [*walk.notes, *([WHOLE.format(saved)] if saved else [])], arguments)


class _Walk:
    """A walk along a program, which notes what it does not know."""

    def __init__(self, compiled: bool):
        self.compiled = compiled
        self.notes: dict[str, None] = {}
        self.lowered: dict[Equation, Tape | None] = {}

    def along(self, tape: Tape, returned: Mapping[Var, str], outside: Counter, frees: bool = True) -> Iterator[Moment]:
        """Yield the moments of a tape, while `outside` is held around it.

        `returned` says what kind of memory the results are to the program, `frees` whether memory is freed before the
        tape ends.
        """
        liveness, kinds = Memory(tape), _kinds(tape, returned)
        ending = (liveness.ending if self.compiled else _ending_eagerly(tape, liveness)) if frees else {}
        live: dict[Var, int] = {}
        foreign: set[Var] = set()  # values that may be sharded, into whose memory compiled code does not write

        def held() -> Counter:
            total = Counter(outside)
            for v, nbytes in live.items():
                total[kinds[v]] += nbytes
            return total

        for k, eqn in enumerate(tape.equations):
            if eqn.bodies:
                yield from self.inside(eqn, kinds, held())
            on_ranks = eqn.primitive.body_scope(eqn.params) is not None
            if on_ranks or not foreign.isdisjoint(a for a in eqn.inputs if isinstance(a, Var)):
                foreign.update(eqn.outputs)
            elif self.compiled and frees and (reused := liveness.reused_by(eqn, k, REUSED_BYTES)):
                live.pop(reused, None)
            if not _is_view(eqn):
                live.update(zip(eqn.outputs, self.allocated(eqn)))
            yield Moment(eqn.primitive.name, eqn.source, held() + _unstacked(eqn, kinds))
            for v in ending.get(k, ()):
                live.pop(v, None)

    def inside(self, eqn: Equation, kinds: Mapping[Var, str], outside: Counter) -> Iterator[Moment]:
        """Yield the moments of an operation's bodies."""
        given = [kinds[v] for v in eqn.outputs]
        if eqn.primitive is shard_map_p and self.compiled:
            body = self.that_runs(eqn)  # if it is not lowered as a whole, its values are kept until it ends
            yield from self.along(body, _returned(body, given), outside, frees=body is not eqn.params["body"])
            return
        bodies = [(body, _returned(body, given)) for body in eqn.bodies]
        if isinstance(eqn.primitive, Cond):
            branches = [list(self.along(body, kept, outside)) for body, kept in bodies]
            most = [max((moment.total for moment in branch), default=0) for branch in branches]
            if len({*most}) > 1:
                self.notes[ONE_BRANCH] = None
            yield from branches[most.index(max(most))]
            return
        for step in sorted({0, rounds(eqn) - 1}) if rounds(eqn) else ():  # the first and the last
            for body, kept in bodies:
                yield from self.along(body, kept, outside + _of_earlier_steps(eqn, kinds, step))

    def that_runs(self, eqn: Equation) -> Tape:
        """The body of a `shard_map`; compiled, what it does on one rank."""
        if self.compiled and eqn not in self.lowered:
            self.lowered[eqn] = _lowered(eqn.params)
        return self.lowered.get(eqn) or eqn.params["body"]

    def allocated(self, eqn: Equation) -> Iterator[int]:
        """The bytes of each result.

        A result of a `shard_map` that is a view of another one takes none, nor does a view of a block of an argument
        that was sharded before; of other arguments, results are copies.
        """
        if eqn.primitive is not shard_map_p:
            yield from (_nbytes(v.type) for v in eqn.outputs)
            return
        body = self.that_runs(eqn)
        bases, sharded = _bases(body), [not isinstance(a, Var) or bool(a.type.sharding) for a in eqn.inputs]
        taken = {v for v, yes in zip(body.inputs, sharded) if yes}
        for a, v in zip(body.outputs, eqn.outputs):
            base = bases[a] if isinstance(a, Var) else set()
            yield 0 if base & taken else _nbytes(v.type)
            taken |= base


def _ending_eagerly(tape: Tape, liveness: Memory) -> dict[int, list[Var]]:
    """By equation: the names that are freed after it, in a program that runs operation by operation.

    Reverse mode transposes an operation at once: its residuals are held until the cotangents of all its operands are
    there. Those are computed by successive equations of one line, from one cotangent.
    """
    ending: dict[int, list[Var]] = defaultdict(list)
    last: dict[Var, int] = {}  # of the equations from here on that are of one line: the last that uses a value
    line = None
    for k, eqn in reversed([*enumerate(tape.equations)]):
        if eqn.source != line or not _is_backward(eqn):
            last, line = {}, eqn.source
        used = [a for a in eqn.inputs if isinstance(a, Var)]
        ending[max((last.setdefault(a, k) for a in used), default=k)] += liveness.ending[k]
    return ending


def _of_earlier_steps(eqn: Equation, kinds: Mapping[Var, str], step: int) -> Counter:
    """What earlier steps of a loop have left: the carries, and an element of each stacked result for each of them."""
    if isinstance(eqn.primitive, While):
        return _sizes(eqn.outputs, kinds)
    if not (isinstance(eqn.primitive, Scan) and step):
        return Counter()
    carry, length = eqn.params["carry"], eqn.params["length"]
    elements = _sizes(eqn.outputs[carry:], kinds)
    return _sizes(eqn.outputs[:carry], kinds) + Counter({k: n * step // length for k, n in elements.items()})


def _unstacked(eqn: Equation, kinds: Mapping[Var, str]) -> Counter:
    """The elements that a scan still holds when it has stacked them."""
    return _sizes(eqn.outputs[eqn.params["carry"] :] if isinstance(eqn.primitive, Scan) else (), kinds)


def _sizes(values: Sequence[Var], kinds: Mapping[Var, str]) -> Counter:
    found: Counter = Counter()
    for v in values:
        found[kinds[v]] += _nbytes(v.type)
    return found


def _is_view(eqn: Equation) -> bool:
    """Whether an equation's results are views of its operands. (A lowered collective may return one, and does not.)"""
    primitive = eqn.primitive
    return primitive.shares_memory and not (primitive.is_higher_order or primitive.sends(eqn.params))


def _bases(tape: Tape) -> dict[Var, set[Var]]:
    """For each value, the values in whose memory it is: itself, or if it is a view, what it may be a view of."""
    found = {v: {v} for v in tape.inputs}
    for eqn in tape.equations:
        views = set().union(*[found[a] for a in eqn.inputs if isinstance(a, Var)]) if _is_view(eqn) else set()
        found.update((v, views if _is_view(eqn) else {v}) for v in eqn.outputs)
    return found


def _returned(tape: Tape, kinds: Sequence[str]) -> dict[Var, str]:
    return {a: kind for a, kind in zip(tape.outputs, kinds) if isinstance(a, Var)}


def _nbytes(t: ShapedArray) -> int:
    """The bytes of a value on one rank: those of its block, if it is sharded."""
    return t.nbytes if t.sharding is None else block_type(t, t.sharding.spec, t.sharding.mesh.shape).nbytes


def _constants(tape: Tape) -> list[Any]:
    """The distinct constant arrays of a tape and its bodies."""
    found = {id(c): c for c in tape.constants}
    for eqn in tape.equations:
        for body in eqn.bodies:
            found.update((id(c), c) for c in _constants(body))
    return list(found.values())


def _saved_by_blocks(tape: Tape) -> Iterator[int]:
    """For each argument that is whole though only blocks of it are used: the bytes that a rank need not hold."""
    for v in tape.inputs:
        users = [eqn for eqn in tape.equations if any(a is v for a in eqn.inputs)]
        if v.type.sharding is None and users and all(eqn.primitive is shard_map_p for eqn in users):
            blocks = [b.type.nbytes for eqn in users for a, b in zip(eqn.inputs, eqn.params["body"].inputs) if a is v]
            yield v.type.nbytes - max(blocks)


# ---------------------------------------------------------------- what a compiled body does


class _OneRank(Simulated):
    """One rank of a mesh, and its blocks: for programs that are read, and not run."""

    name = "mpi"
    at_once = False

    def apply(self, primitive: Primitive, operands: Sequence[tuple[Any, Axes]], params: dict) -> tuple[Any, Axes]:
        held = self.ordered({a for _, axes in operands for a in axes})
        return primitive.bind(*[x for x, _ in operands], **params), held

    def block_shape(self, x: Any, held: Axes) -> tuple[int, ...]:
        return x.shape

    def data_shape(self, shape: tuple[int, ...], held: Axes) -> tuple[int, ...]:
        return shape


def _lowered(params: dict) -> Tape | None:
    """The tape that a `shard_map` compiles for one rank; None if it does not compile its body as a whole."""
    shape, body, specs = params["mesh"].shape, params["body"], params["in_specs"]
    mesh = Mesh(shape, _OneRank(shape))
    interpreter = SPMD(mesh, params["check_rep"], explicit=not params["auto_pbroadcast"])
    operands = [(ShapedArray(t.shape, t.dtype), mesh.ranks.ordered(spec.held)) for t, spec in zip(body.in_types, specs)]
    states = [t.states if t.unreduced or t.reduced else None for t in body.in_types]
    try:
        return interpreter.lowered(body, operands, states, {})[0]
    except TracerError:
        return None


# ---------------------------------------------------------------- kinds of memory


def _kinds(tape: Tape, returned: Mapping[Var, str]) -> dict[Var, str]:
    """The kind of each value's memory: the first in `DYNAMIC` of all the values that share it."""
    made, used, bases = _made_backward(tape), _used_backward(tape), _bases(tape)
    found: dict[Var, str] = {}
    for eqn in tape.equations:
        for v in eqn.outputs:
            kind = _kind(eqn, made[v], used[v], returned.get(v))
            for a in bases[v]:
                found[a] = min(kind, found.get(a, kind), key=DYNAMIC.index)
    return found


def _kind(eqn: Equation, backward: bool, used_backward: set[bool], returned: str | None) -> str:
    if backward and (False in used_backward or returned in (RESULTS, GRADIENTS)):
        return GRADIENTS
    if not backward and (True in used_backward or returned == RESIDUALS):
        return RESIDUALS
    if returned in (RESULTS, GRADIENTS):
        return RESULTS
    return COMMUNICATION if eqn.primitive.sends(eqn.params) else TEMPORARIES


def _is_backward(eqn: Equation) -> bool:
    return eqn.source is not None and eqn.source.backward


def _directions(eqn: Equation, count: int) -> list[bool]:
    """For each operand or result, whether it is in the backward pass: those of a variadic sum may differ."""
    return [line is not None and line.backward for line in parted(eqn.source, count)]


def _like(eqn: Equation, role: str) -> Tape | None:
    """The body of an equation that has one, with as many "inputs" or "outputs" as the equation; else None."""
    alike = [body for body in eqn.bodies if len(getattr(body, role)) == len(getattr(eqn, role))]
    return alike[0] if len(alike) == len(eqn.bodies) == 1 else None


def _made_backward(tape: Tape) -> dict[Var, bool]:
    """For each value, whether the equation that makes it, if need be in a body, is in the backward pass."""
    found: dict[Var, bool] = {}
    for eqn in tape.equations:
        body, own = _like(eqn, "outputs"), _directions(eqn, len(eqn.outputs))
        inner = _made_backward(body) if body else {}
        for v, a, backward in zip(eqn.outputs, body.outputs if body else eqn.outputs, own):
            found[v] = inner.get(a, backward) if isinstance(a, Var) else backward
    return found


def _used_backward(tape: Tape) -> dict[Var, set[bool]]:
    """For each value, whether the equations that use it, if need be in a body, are in the backward pass."""
    found: dict[Var, set[bool]] = defaultdict(set)
    for eqn in tape.equations:
        body, uses = _like(eqn, "inputs"), [{backward} for backward in _directions(eqn, len(eqn.inputs))]
        if body:
            inner = _used_backward(body)
            uses = [inner[b] for b in body.inputs]
        for a, backward in zip(eqn.inputs, uses):
            if isinstance(a, Var):
                found[a] |= backward
    return found
