"""How many bytes each rank holds while a program runs, and where the peak is.

The walk follows the tape: an equation allocates its results, and frees the values that it is the last to use. Views
allocate nothing. In the body of a `shard_map` values are blocks. Outside, a sharded array counts as a rank's block of
it, and any other array is whole on every rank. The compiler says which values share memory, and when each is used for
the last time (`minidiff/compiler/buffers.py`).
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from numpy.lib.stride_tricks import as_strided

from collectives.backends.base import Axes
from collectives.backends.simulated import Simulated
from minidiff.compiler.buffers import Memory
from minidiff.compiler.codegen import REUSED_BYTES, Source, group_operations
from minidiff.compiler.fusion import fused_p
from minidiff.compiler.jit import Jitted
from minidiff.core.operation import Primitive
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import ShapedArray, Var, operand_type, typeof
from minidiff.debug import disable_jit
from minidiff.diagnostics.errors import TracerError
from minidiff.diagnostics.location import Location, split_location
from minidiff.diagnostics.tracebacks import hide_own_frames_of_lambda
from minidiff.higher_order.cond import Cond
from minidiff.higher_order.scan import Scan, run_count
from minidiff.higher_order.while_loop import While
from minidiff.inputs.arguments import check_function
from minidiff.ops.base import broadcast_to_p, reshape_p
from minidiff.ops.indexing import slice_p
from minidiff.ops.shape import split_p, transpose_p
from minidiff.ops.workspace import workspace
from minidiff.transforms.recording import make_tape
from minidiff.values.aliasing import distinct_bytes
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import block_type
from spmd.report import plots
from spmd.report.communication import direction_of, show_line
from spmd.report.rewritten import apply_to_tape, meshes_of, rewritten
from spmd.report.table import Table
from spmd.shard_map.compiled import blocks_given_up
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

COLORS = dict(zip(KINDS, ("#9aa5b1", "#cbd2d9", "#82c98f", "#7fb3d9", "#b39ddb", "#f2b866", "#e58b88")))

ONE_BRANCH = "which branch is run is not known beforehand: the one that takes most memory is counted"
WHOLE = (
    "arguments that are plain arrays are whole on every rank; where only blocks of them are used, spmd.distribute them "
    "and save {:,} bytes a rank"
)

# ---------------------------------------------------------------- the report


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


@dataclass(frozen=True, repr=False)
class MemoryUse(Table):
    """The bytes that a rank holds along a program, shown as a table by `print` and notebooks.

    `moments` has them for each operation, in the order in which they run; of a loop, for its first and last step.
    `peak` is the moment with most bytes. `ranks` is how many ranks the program runs on; the numbers are those of each
    rank, since all run the same program on blocks of the same shapes. `notes` says where the numbers depend on values,
    and what could be saved. `arguments` has the bytes of each array among the arguments, in order.

    The kinds of memory:

    - arguments: parameters, optimizer state, data. They are held throughout.
    - constants: arrays that the program closes over. They are held throughout.
    - gradients: computed by the backward pass, and returned or used outside of it.
    - residuals: computed by the forward pass, and used by the backward pass.
    - results: other values that the program returns.
    - communication: other results of collectives.
    - temporaries: all other values.
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
        most: dict[Location | None, Moment] = {}
        for moment in self.moments:
            most[moment.source] = max(most.get(moment.source, moment), moment, key=lambda m: m.total)
        return Lines(most)

    def _table(self) -> tuple[list, list, list]:
        peak, highest = self.peak, self.highest
        rows = [[k, f"{peak.bytes.get(k, 0):,}", f"{highest[k]:,}"] for k in KINDS if highest[k]]
        return ["bytes per rank", "at the peak", "highest"], rows, ["total", f"{peak.total:,}", ""]

    def _remarks(self) -> list[str]:
        peak = self.peak
        where = [peak.operation, direction_of(peak.source), show_line(peak.source)]
        return [f"the peak: {', '.join(filter(None, where))}", *[f"({note})" for note in self.notes]]

    def plot(self, ax: Any = None) -> Any:
        """Draw the bytes along the program, by kind. Returns the axes; needs matplotlib."""
        kinds = {kind: [m.bytes.get(kind, 0) for m in self.moments] for kind in KINDS if self.highest[kind]}
        label = show_line(self.peak.source) or self.peak.operation
        return plots.bytes_along(ax, kinds, COLORS, self.moments.index(self.peak), label)

    def plot_ranks(self, ax: Any = None) -> Any:
        """Draw a bar for each rank: its bytes at the peak, by kind. Returns the axes; needs matplotlib."""
        kinds = {kind: self.peak.bytes[kind] for kind in KINDS if self.peak.bytes.get(kind)}
        return plots.bytes_on_ranks(ax, kinds, COLORS, self.ranks)


@dataclass(frozen=True, repr=False)
class Lines(Table):
    """The lines of a program, in the order in which they first run, and the moment of each with most bytes."""

    moments: dict[Location | None, Moment]

    def _table(self) -> tuple[list, list, None]:
        kinds = [kind for kind in KINDS if any(m.bytes.get(kind) for m in self.moments.values())]
        rows = []
        for line, m in self.moments.items():
            cells = [f"{n:,}" for n in (*(m.bytes.get(kind, 0) for kind in kinds), m.total)]
            rows.append([*cells, direction_of(line), show_line(line) or m.operation])
        return [*kinds, "total", "direction", "line"], rows, None


def memory(f: Callable | Tape, *args: Any, optimized: bool = False) -> Any:
    """Report the bytes that a rank holds along a tape, or along `f`: `memory(f)(*args)`.

    For a function, it returns a function that reports on `f` for its arguments. Nothing runs: the report is read from
    the tape of `f` for arguments of these types. By default it is for `f` run eagerly, where NumPy frees an array with
    the last reference to it. With `optimized` it is for the program that `jit(f)` compiles, which also writes results
    into memory that is no longer used; so it is for an `f` that `jit` returned, which writes over donated arguments,
    too. A sharded argument counts as a rank's block; a plain array is whole on every rank.

    What NumPy allocates inside an operation is counted (`minidiff/ops/workspace.py`). The report leaves out what the
    tape does not show: arrays that Python variables hold after their last use (eagerly, the lists of gradients in
    `spmd.parallel.zero`), memory that MPI takes, and, eagerly, unneeded values that a policy of `checkpoint` saves
    until the function ends. In the tests, the memory that NumPy allocates on an MPI rank is within 5 % of the report
    for compiled programs, and within 10 % for eager ones. On simulated ranks, one process holds the blocks of all.
    Raises TypeError for what is neither a function nor a tape.

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
    if isinstance(f, Jitted):
        return hide_own_frames_of_lambda(lambda *args: _report(rewritten(f)(*args), True, f.donates(*args)))
    if optimized or isinstance(f, Tape):
        return apply_to_tape(lambda tape: _report(tape, optimized), f, optimized)
    return hide_own_frames_of_lambda(lambda *args: _report(_unroll(f, args), False))


def memory_in_place(tape: Tape) -> MemoryUse:
    """Report on a program that is compiled as XLA does: results are over arguments, and carries over those before."""
    return _report(tape, False, in_place=True)


def _unroll(f: Callable, args: tuple) -> Tape:
    """The tape of `f` as it runs eagerly: the steps of scans one by one."""
    with disable_jit(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a Python loop is recorded")
        return make_tape(f)(*args)


# ---------------------------------------------------------------- the walk along a tape


def _report(tape: Tape, compiled: bool, donated: Sequence[bool] = (), in_place: bool = False) -> MemoryUse:
    arguments = [*map(_nbytes, tape.in_types)]
    held = {ARGUMENTS: sum(arguments), CONSTANTS: sum(map(_held_by_constant, _constants(tape)))}
    walk = _Walk(compiled, in_place)
    returned = _kinds_of_results(tape, [RESULTS] * len(tape.outputs))
    moments = [Moment("the arguments", None, held), *walk.along(tape, returned, Counter(held), donated)]
    ranks = max([math.prod(mesh.shape.values()) for mesh in meshes_of(tape)], default=1)
    saved = sum(_saved_by_blocks(tape))
    return MemoryUse(moments, ranks, [*walk.notes, *([WHOLE.format(saved)] if saved else [])], arguments)


class _Walk:
    """A walk along a program; `notes` says what the types do not tell.

    `in_place` says that loops write each carry over the previous one, as XLA's do; those of this library do not.
    """

    def __init__(self, compiled: bool, in_place: bool = False):
        self.compiled, self.in_place = compiled, in_place
        self.elsewhere: set[Var] = set()  # values that are written into memory that is counted outside of their body
        self.notes: dict[str, None] = {}
        self.lowered: dict[Equation, Tape | None] = {}
        self.written: dict[Equation, Sequence[bool]] = {}  # which results of a shard_map are in memory of arguments

    def along(
        self,
        tape: Tape,
        returned: Mapping[Var, str],
        outside: Counter,
        donated: Sequence[bool] = (),
        frees: bool = True,
        run_by: Equation | None = None,
    ) -> Iterator[Moment]:
        """Yield the moments of a tape, while `outside` is held around it.

        `returned` has the kind of memory of each result; `donated` are the inputs that it may write into; `frees` is
        whether memory is freed before the tape ends; `run_by` is the shard_map whose body it is.
        """
        source = None
        if self.compiled:
            foreign = [v.type.sharding is not None for v in tape.inputs]
            source = Source(tape, foreign=foreign, donated=donated, given_up=True)
            tape = source.tape
            if run_by is not None:
                self.written[run_by] = [a in source.given_up for a in tape.outputs]
        elif self.in_place:
            tape = group_operations(tape, ())
        liveness = Memory(tape) if source is None else source.memory
        copying = _copying(tape)
        kinds = _kinds(tape, returned, copying)
        ending = (
            (liveness.ending if self.compiled or self.in_place else _freed_eagerly(tape, liveness)) if frees else {}
        )
        live: dict[Var, int] = {}

        def held() -> Counter:
            total = Counter(outside)
            for v, nbytes in live.items():
                total[kinds[v]] += nbytes
            return total

        for k, eqn in enumerate(tape.equations):
            if eqn.bodies and eqn.primitive is not fused_p:
                yield from self.inside(eqn, kinds, held(), source.passed_on.get(eqn, ()) if source else ())
            made = {} if _is_view(eqn) and eqn not in copying else dict(zip(eqn.outputs, self.result_bytes(eqn)))
            if source is not None and frees:
                for v in eqn.outputs:
                    live.pop(source.takes.get(v, v), None)
                    if v in source.given_up and v not in source.copied:
                        made.pop(v, None)
            elif self.in_place and (reused := liveness.reused_by(eqn, k, REUSED_BYTES)):
                live.pop(reused, None)
            live.update((v, n) for v, n in made.items() if v not in self.elsewhere)
            now = held() + (Counter() if self.in_place else _unstacked_elements(eqn, kinds))
            now[TEMPORARIES] += _workspace(eqn)
            yield Moment(eqn.primitive.name, eqn.source, now)
            for v in [*ending.get(k, ()), *(source.copied.intersection(eqn.outputs) if source else ())]:
                live.pop(v, None)

    def inside(
        self, eqn: Equation, kinds: Mapping[Var, str], outside: Counter, donated: Sequence[bool]
    ) -> Iterator[Moment]:
        """Yield the moments of an operation's bodies."""
        given = [kinds[v] for v in eqn.outputs]
        if eqn.primitive is shard_map_p and self.compiled:
            body = self.that_runs(eqn)  # if it is not lowered as a whole, its values are kept until it ends
            lowered = body is not eqn.params["body"]
            sharded = [isinstance(a, Var) and a.type.sharding is not None for a in eqn.inputs]
            blocks = blocks_given_up(sharded, {**eqn.params, "donated": donated}) if lowered else ()
            yield from self.along(body, _kinds_of_results(body, given), outside, blocks, lowered, eqn)
            return
        if eqn.primitive is shard_map_p and self.in_place:
            left = Counter(_block(v.type) for v in eqn.params["body"].inputs)
            over = [isinstance(a, Var) and self.takes(left, _block(a.type)) for a in eqn.params["body"].outputs]
            self.write_elsewhere(eqn.params["body"], over)
            self.elsewhere |= {v for v, yes in zip(eqn.outputs, over) if yes}
        bodies = [(body, _kinds_of_results(body, given)) for body in eqn.bodies]
        if isinstance(eqn.primitive, Cond):
            for body, _ in bodies:
                self.write_elsewhere(body, [v in self.elsewhere for v in eqn.outputs])
            branches = [list(self.along(body, kept, outside)) for body, kept in bodies]
            most = [max((moment.total for moment in branch), default=0) for branch in branches]
            if len({*most}) > 1:
                self.notes[ONE_BRANCH] = None
            yield from branches[most.index(max(most))]
            return
        carry = eqn.params["carry"] if self.in_place and isinstance(eqn.primitive, Scan) else 0
        if carry:
            self.write_elsewhere(eqn.params["body"], [True] * carry)
            outside = outside + _sizes([v for v in eqn.outputs[:carry] if v not in self.elsewhere], kinds)
        for step in sorted({0, run_count(eqn) - 1}) if run_count(eqn) else ():  # the first and the last
            for body, kept in bodies:
                yield from self.along(body, kept, outside + _of_earlier_steps(eqn, kinds, step, carry))

    @staticmethod
    def takes(left: Counter, block: Any) -> bool:
        """Take one of the arguments that are left, if there is one like this."""
        left[block] -= 1
        return left[block] >= 0

    def write_elsewhere(self, body: Tape, which: Sequence[bool]) -> None:
        """Note which results of a body are in memory that is counted outside of it."""
        if any(which):
            bases = _bases(body, _copying(body))
            for a, yes in zip(body.outputs, which):
                self.elsewhere |= bases[a] if yes and isinstance(a, Var) else set()

    def that_runs(self, eqn: Equation) -> Tape:
        """The body of a `shard_map`; compiled, what it does on one rank."""
        if self.compiled and eqn not in self.lowered:
            self.lowered[eqn] = _lower_for_one_rank(eqn.params)
        return self.lowered.get(eqn) or eqn.params["body"]

    def result_bytes(self, eqn: Equation) -> Iterator[int]:
        """The bytes of each result.

        In a `shard_map`, a view of another result takes none, nor does a view of an argument that is sharded already;
        a view of any other argument is copied.
        """
        if eqn.primitive is not shard_map_p:
            yield from (_nbytes(v.type) for v in eqn.outputs)
            return
        body = self.that_runs(eqn)
        bases, sharded = (
            _bases(body, _copying(body)),
            [not isinstance(a, Var) or bool(a.type.sharding) for a in eqn.inputs],
        )
        taken = {v for v, yes in zip(body.inputs, sharded) if yes}
        written = self.written.get(eqn, [False] * len(eqn.outputs))
        for a, v, over in zip(body.outputs, eqn.outputs, written):
            base = bases[a] if isinstance(a, Var) else set()
            yield 0 if over or base & taken else _nbytes(v.type)
            taken |= base


def _freed_eagerly(tape: Tape, liveness: Memory) -> dict[int, list[Var]]:
    """The values that are freed after each equation, in a program that runs operation by operation.

    Reverse mode holds the residuals of an operation until it has the cotangents of all operands. Successive equations
    of one line compute these from one cotangent.
    """
    ending: dict[int, list[Var]] = defaultdict(list)
    last: dict[Var, int] = {}  # the last use of each value by the equations of one line
    line = None
    for k, eqn in reversed([*enumerate(tape.equations)]):
        if eqn.source != line or not _is_backward(line):
            last, line = {}, eqn.source
        used = [a for a in eqn.inputs if isinstance(a, Var)]
        ending[max((last.setdefault(a, k) for a in used), default=k)] += liveness.ending[k]
    return ending


def _of_earlier_steps(eqn: Equation, kinds: Mapping[Var, str], step: int, counted: int = 0) -> Counter:
    """The memory of earlier steps of a loop: the carries that are not counted yet, and a part of stacked results."""
    if isinstance(eqn.primitive, While):
        return _sizes(eqn.outputs, kinds)
    if not (isinstance(eqn.primitive, Scan) and step):
        return Counter()
    carry, length = eqn.params["carry"], eqn.params["length"]
    elements = _sizes(eqn.outputs[carry:], kinds)
    return _sizes(eqn.outputs[counted:carry], kinds) + Counter({k: n * step // length for k, n in elements.items()})


def _unstacked_elements(eqn: Equation, kinds: Mapping[Var, str]) -> Counter:
    """The elements that a scan still holds while it stacks them."""
    return _sizes(eqn.outputs[eqn.params["carry"] :] if isinstance(eqn.primitive, Scan) else (), kinds)


def _sizes(values: Sequence[Var], kinds: Mapping[Var, str]) -> Counter:
    found: Counter = Counter()
    for v in values:
        found[kinds[v]] += _nbytes(v.type)
    return found


def _is_view(eqn: Equation) -> bool:
    """Whether an equation's results are views of its operands: those of a collective could be, but are not."""
    primitive = eqn.primitive
    return primitive.shares_memory and not (primitive.is_higher_order or primitive.sends(eqn.params))


def _workspace(eqn: Equation) -> int:
    """What NumPy's implementation of an operation allocates beside its results."""
    primitive = eqn.primitive
    if primitive.is_higher_order or primitive is fused_p or _is_view(eqn) or primitive.sends(eqn.params):
        return 0
    types = [operand_type(a) for a in eqn.inputs]
    return workspace(primitive, [t for t in types if isinstance(t, ShapedArray)], [v.type for v in eqn.outputs])


#: Operations whose results are views, if their operand's strides allow it.
_STRIDED = (reshape_p, transpose_p, broadcast_to_p, split_p, slice_p)


def _copying(tape: Tape) -> set[Equation]:
    """The reshapes that copy, since their operands' elements are not in the order of the result's.

    Views of one element, with the strides that arrays will have, say so.
    """
    strided: dict[Any, Any] = {}
    found = set()
    for eqn in tape.equations:
        a = eqn.inputs[0] if eqn.inputs else None
        if eqn.primitive not in _STRIDED or not isinstance(a, Var):
            if isinstance(a, Var) and a in strided and _is_view(eqn) and len(eqn.outputs) == 1:
                strided.update((v, strided[a]) for v in eqn.outputs if v.type.shape == strided[a].shape)
            continue
        x = strided[a] if a in strided else _of_strides(a.type)
        outs = eqn.primitive.impl(x, **eqn.params) if eqn.primitive is not reshape_p else _reshaped(x, **eqn.params)
        if outs is None:
            found.add(eqn)
        else:
            strided.update(zip(eqn.outputs, outs if eqn.primitive.multiple_results else [outs]))
    return found


def _of_strides(t: ShapedArray) -> Any:
    """An array of a type that takes no memory: its elements must not be read."""
    steps = [*itertools.accumulate(t.shape[:0:-1], operator.mul, initial=t.dtype.itemsize)][: t.ndim]
    return as_strided(numpy.zeros(1, t.dtype), t.shape, steps[::-1], writeable=False)


def _reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """A view of another shape; None if there is none."""
    try:
        if hasattr(numpy, "unstack"):  # NumPy 2.1
            return numpy.reshape(x, shape, copy=False)
        view = x.view()
        view.shape = shape
        return view
    except (AttributeError, ValueError):
        return None


def _bases(tape: Tape, copying: Collection[Equation]) -> dict[Var, set[Var]]:
    """For each value, the values whose memory it uses: itself, or all that it may be a view of."""
    found = {v: {v} for v in tape.inputs}
    for eqn in tape.equations:
        is_view = _is_view(eqn) and eqn not in copying
        views = set().union(*[found[a] for a in eqn.inputs if isinstance(a, Var)]) if is_view else set()
        found.update((v, views if is_view else {v}) for v in eqn.outputs)
    return found


def _kinds_of_results(tape: Tape, kinds: Sequence[str]) -> dict[Var, str]:
    return {a: kind for a, kind in zip(tape.outputs, kinds) if isinstance(a, Var)}


def _nbytes(t: ShapedArray) -> int:
    """The bytes of a value on one rank: those of its block, if it is sharded."""
    return t.nbytes if t.sharding is None else block_type(t, t.sharding.spec, t.sharding.mesh.shape).nbytes


def _block(t: ShapedArray) -> tuple:
    return t.shape, t.dtype


def _held_by_constant(c: Any) -> int:
    return distinct_bytes(c) if isinstance(c, numpy.ndarray) else _nbytes(typeof(c))


def _constants(tape: Tape) -> list[Any]:
    """The distinct constant arrays of a tape and its bodies."""
    found = {id(c): c for c in tape.constants}
    for eqn in tape.equations:
        for body in eqn.bodies:
            found.update((id(c), c) for c in _constants(body))
    return list(found.values())


def _saved_by_blocks(tape: Tape) -> Iterator[int]:
    """The bytes that a rank need not hold of each argument that is whole, if only blocks of it are used."""
    for v in tape.inputs:
        users = [eqn for eqn in tape.equations if any(a is v for a in eqn.inputs)]
        if v.type.sharding is None and users and all(eqn.primitive is shard_map_p for eqn in users):
            blocks = [b.type.nbytes for eqn in users for a, b in zip(eqn.inputs, eqn.params["body"].inputs) if a is v]
            yield v.type.nbytes - max(blocks)


# ---------------------------------------------------------------- what a compiled body does


class _OneRank(Simulated):
    """One rank of a mesh and its blocks, for programs that are not run."""

    name = "mpi"
    at_once = False

    def apply(self, primitive: Primitive, operands: Sequence[tuple[Any, Axes]], params: dict) -> tuple[Any, Axes]:
        held = self.sort_axes({a for _, axes in operands for a in axes})
        return primitive.bind(*[x for x, _ in operands], **params), held

    def block_shape(self, x: Any, held: Axes) -> tuple[int, ...]:
        return x.shape

    def data_shape(self, shape: tuple[int, ...], held: Axes) -> tuple[int, ...]:
        return shape


def _lower_for_one_rank(params: dict) -> Tape | None:
    """The tape that a `shard_map` compiles for one rank; None if it does not compile its body as a whole."""
    shape, body, specs = params["mesh"].shape, params["body"], params["in_specs"]
    mesh = Mesh(shape, _OneRank(shape))
    interpreter = SPMD(mesh, params["check_rep"], explicit=not params["auto_pbroadcast"])
    operands = [
        (ShapedArray(t.shape, t.dtype), mesh.ranks.sort_axes(spec.held)) for t, spec in zip(body.in_types, specs)
    ]
    states = [t.states if t.unreduced or t.reduced else None for t in body.in_types]
    try:
        return interpreter.lowered(body, operands, states, {})[0]
    except TracerError:
        return None


# ---------------------------------------------------------------- kinds of memory


def _kinds(tape: Tape, returned: Mapping[Var, str], copying: Collection[Equation]) -> dict[Var, str]:
    """The kind of each value's memory: the first in `DYNAMIC` of all the values that share it."""
    (made, used), bases = _passes(tape), _bases(tape, copying)
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


def _is_backward(line: Location | None) -> bool:
    return line is not None and line.backward


def _passes(tape: Tape) -> tuple[dict[Var, bool], dict[Var, set[bool]]]:
    """For each value, whether the equation that makes it is in the backward pass, and whether those that use it are.

    These are equations of the body, where an operation has one with the same results, or the same operands.
    """
    made: dict[Var, bool] = {}
    used: dict[Var, set[bool]] = defaultdict(set)
    for eqn in tape.equations:
        results = [_is_backward(line) for line in split_location(eqn.source, len(eqn.outputs))]
        uses = [{_is_backward(line)} for line in split_location(eqn.source, len(eqn.inputs))]
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
