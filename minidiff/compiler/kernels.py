"""Fused kernels: groups of elementwise operations, each compiled into one loop.

Elementwise operations wait, and those on arrays of one shape run in one loop when something else needs a result of it.
They do not wait longer than that keeps four arrays in memory which nothing else needs.

A loop reads slices, rolls, arrays in zeros and concatenations from the arrays that they move (`layout.py`), and may end
with reductions of its elements. What needs reductions of rows, as in a softmax, is part of the loop, too: it walks over
each row several times. Values that only the loop itself uses are stored for a row at most.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import numpy

from minidiff.compiler import native
from minidiff.compiler.buffers import IN_PLACE, fused_p
from minidiff.compiler.layout import (
    REDUCTIONS,
    Shape,
    Stages,
    find_layout,
    iteration_shape,
    needs_layout,
    operands_of,
    pieces_of,
    shape_of,
)
from minidiff.compiler.loops import EXCEPTIONS_FROM, Loop
from minidiff.compiler.lowering import DTYPES, lowering_of
from minidiff.compiler.mathematics import FUNCTIONS
from minidiff.compiler.pieces import over_elements, over_regions
from minidiff.compiler.simplify import key_part
from minidiff.compiler.threads import default_threads, piece_size
from minidiff.control_flow.dead_code import count_uses, prune_tape
from minidiff.core.interpreter import EVALUATE, transforming
from minidiff.core.tape import Atom, Equation, Stage, Tape, with_equations
from minidiff.core.tracer import Value
from minidiff.core.types import Var, typeof
from minidiff.ops.base import sum_p
from minidiff.ops.indexing import slice_p
from minidiff.ops.shape import split_p
from minidiff.values.dtypes import is_scalar_constant

#: Arrays of fewer elements stay with NumPy, and so do groups of fewer elements times operations: compiling a loop takes
#: some 40 ms, as long as thousands of calls of such a group. A function such as exp counts as many operations, since
#: its loop saves that much time over NumPy's: from 4 (log) to 33 (tanh) times the time of an addition.
MIN_ELEMENTS, MIN_WORK, FUNCTION_WORK = 256, 1 << 15, 16

#: Groups of the same operations on the same shapes share a loop, so as many as this count together; and so do the steps
#: of a `scan`. (In smaller groups, the call saves little.)
MAX_SHARED_GROUPS = 4

#: The least length of rows, if a loop has several regions (`layout.py`) or more dimensions than rows and columns. Each
#: further region, which is a call, has to have half of the least work of a single group.
MIN_COLUMNS = 64

#: The most elements of a row whose reductions the same loop needs: a row stays in the cache.
MAX_COLUMNS = 1 << 14

#: The least bytes of an array for a separate loop; independent groups of smaller arrays share one, which saves calls.
MIN_PART_BYTES = 1 << 16

#: The most operations, and the most operands with results, of one kernel. NumPy's limit is 64 operands and results.
MAX_OPERATIONS, MAX_OPERANDS = 400, 48

#: The most results of a kernel with sums or reads: a generalized ufunc has at most 64 dimensions in all, and each
#: result may have two.
MAX_RESULTS_WITH_LAYOUT = 24

#: The most arrays that operations keep in memory only because they wait.
MAX_LIVE = 4

# ---------------------------------------------------------------- operations that are composed of others


def expand_operations(tape: Tape, excluded: Container[Var] = ()) -> Tape:
    """Write out the operations on large arrays of floating-point numbers, but those with results in `excluded`.

    Two operations may have a part in common, as `logsumexp` and the softmax in its derivative have. It is written once.
    So exp of `log_softmax` becomes a softmax, too.
    """
    logarithms = {id(e.outputs[0]): e for e in tape.equations if e.primitive.exponential and _expands(e, excluded)}
    names: dict[Var, Atom] = {}
    known: dict[Any, Atom] = {}

    def parts(eqn: Equation) -> Iterator[Equation]:
        """Yield an equation, or those of what it is composed of, without known ones: these get other names."""
        if not _expands(eqn, excluded):
            yield eqn
            return
        stage = Stage(EVALUATE, name="optimize")
        inputs = [stage.new_input(typeof(a)) for a in eqn.inputs]
        with transforming(stage):
            body = stage.tape([eqn.primitive.decomposed(*inputs, **eqn.params)])
        names.update(zip(body.inputs, eqn.inputs))
        for e in body.equations:
            operands, (v,) = [names.get(a, a) if isinstance(a, Var) else a for a in e.inputs], e.outputs
            key = e.primitive, key_part(e.params), *[key_part(a) if is_scalar_constant(a) else id(a) for a in operands]
            is_result = v is body.outputs[0]
            if is_result or key not in known:
                known[key] = eqn.outputs[0] if is_result else v
                yield from parts(Equation(e.primitive, operands, e.params, [known[key]], eqn.source))
            names[v] = known[key]

    def without_logarithm(eqn: Equation) -> Equation:
        log = logarithms.get(id(eqn.inputs[0])) if eqn.primitive.impl is numpy.exp else None
        return Equation(log.primitive.exponential, log.inputs, log.params, eqn.outputs, eqn.source) if log else eqn

    equations = [*map(without_logarithm, tape.equations)]
    used = count_uses(with_equations(tape, equations)) if logarithms else Counter()
    unused = {e for e in logarithms.values() if not used[e.outputs[0]]}
    return with_equations(tape, [e for eqn in equations if eqn not in unused for e in parts(eqn)])


def _expands(eqn: Equation, excluded: Container[Var]) -> bool:
    """Return True if an operation is to be written out; not if it writes into an operand, which takes less time."""
    if eqn.primitive.decomposed is None or eqn.primitive in IN_PLACE or eqn.outputs[0] in excluded:
        return False
    t = typeof(eqn.inputs[0])
    return t.size >= MIN_ELEMENTS and t.dtype.kind == "f" and t.dtype in DTYPES


# ---------------------------------------------------------------- splits


def split_operands(tape: Tape, excluded: Container[Var] = ()) -> Tape:
    """Split the operands of elementwise operations, not their result, if loops alone use its parts.

    So `a, b = np.split(x + y, 2)` and `a * b` are one loop, which does not store `x + y`. Values in `excluded` may not
    be plain arrays.
    """
    splits = [e for e in tape.equations if e.primitive is split_p and len({*e.params["sizes"]}) == 1]
    if not splits:
        return tape
    loops, uses = _find_loops(tape, excluded), count_uses(tape)
    stored, parts = _stored(tape, loops), {}
    for eqn in splits:
        if stored.isdisjoint(eqn.outputs):
            parts[eqn] = _split_operands(eqn, _elementwise_operations(tape, eqn, loops, uses))
    return prune_tape(with_equations(tape, [e for eqn in tape.equations for e in parts.get(eqn) or [eqn]]))


def _elementwise_operations(
    tape: Tape, split: Equation, loops: dict[Equation, Shape], uses: Mapping[Var, int]
) -> list[Equation]:
    """Return the operations that compute the operand of a split, and nothing else; none if a loop has to store more."""
    shape, operations, used = typeof(split.inputs[0]).shape, list[Equation](), Counter(split.inputs)
    for eqn in reversed(tape.equations):
        if loops.get(eqn) != shape or not used[eqn.outputs[0]]:
            continue
        if eqn.primitive in REDUCTIONS or used[eqn.outputs[0]] < uses[eqn.outputs[0]]:
            return []
        operations.insert(0, eqn)
        used.update(a for a in eqn.inputs if isinstance(a, Var))
    return operations if len(operations) * math.prod(shape) >= MIN_WORK else []


def _split_operands(split: Equation, operations: list[Equation]) -> list[Equation]:
    """Return the operations on each part of a split; none if there are none."""
    axis, shape = split.params["axis"], typeof(split.inputs[0]).shape
    results = {v for eqn in operations for v in eqn.outputs}
    operands = dict.fromkeys(a for eqn in operations for a in eqn.inputs if isinstance(a, Var) and a not in results)
    stage = Stage(EVALUATE, name="optimize")
    inputs = {a: stage.new_input(a.type) for a in operands}

    def part(a: Atom, k: int, size: int) -> Value:
        at = axis - len(shape) + typeof(a).ndim
        x = inputs[a] if isinstance(a, Var) else a
        return x if at < 0 or typeof(a).shape[at] == 1 else x[(slice(None),) * at + (slice(k, k + size),)]

    def compute(k: int, size: int) -> Value:
        values = {a: part(a, k, size) for a in operands}
        for eqn in operations:
            of_part = [values[a] if isinstance(a, Var) else part(a, k, size) for a in eqn.inputs]
            values[eqn.outputs[0]] = eqn.primitive.bind(*of_part, **eqn.params)
        return values[split.inputs[0]]

    if not operations:
        return []
    with transforming(stage):
        body = stage.tape([compute(k * size, size) for k, size in enumerate(split.params["sizes"])])
    names = dict(zip([*body.inputs, *body.outputs], [*operands, *split.outputs]))
    renamed = lambda atoms: [names.get(a, a) if isinstance(a, Var) else a for a in atoms]  # noqa: E731
    return [Equation(e.primitive, renamed(e.inputs), e.params, renamed(e.outputs), e.source) for e in body.equations]


# ---------------------------------------------------------------- groups


def fuse(tape: Tape, excluded: Container[Var] = (), runs: int = 1) -> Tape:
    """Group the elementwise operations of a tape, which `runs` so often, into equations of `fused_p`.

    Values in `excluded`, which may not be plain arrays, are not in groups.
    """
    loops = _find_loops(tape, excluded)
    if not loops:
        return tape
    uses, reads = count_uses(tape), find_reads(tape, excluded, loops)
    all_groups = _group(tape, loops, reads, excluded)
    groups = [part for group in all_groups for part in _independent_parts(group, loops.get(group[0]))]
    times = Counter(map(_operations, groups))
    equations: list[Equation] = []
    for group in groups:
        shape, count = loops.get(group[0]), runs * times[_operations(group)]
        least = MIN_WORK // max(1, min(count, MAX_SHARED_GROUPS))
        equations += group if shape is None else _fused(group, shape, uses, reads, least)
    tape = with_equations(tape, equations)
    unused = {*reads} - {*count_uses(tape)}
    return with_equations(tape, [e for e in tape.equations if unused.isdisjoint(e.outputs)])


def _find_loops(tape: Tape, excluded: Container[Var]) -> dict[Equation, Shape]:
    """Return the equations that can be part of loops, with the shapes of these."""
    return {eqn: shape for eqn in tape.equations if (shape := _kernel_shape(eqn, excluded)) is not None}


def find_reads(tape: Tape, excluded: Container[Var], loops: dict[Equation, Shape] | None = None) -> dict[Var, Equation]:
    """Return the equations that loops read through, by their results.

    They are slices, which are views, and the others whose results nothing but loops of their shape use.
    """
    reads = {e.outputs[0]: e for e in tape.equations if pieces_of(e) and e.outputs[0] not in excluded}
    if not reads:
        return {}
    stored = _stored(tape, _find_loops(tape, excluded) if loops is None else loops)
    return {v: e for v, e in reads.items() if e.primitive is slice_p or v not in stored}


def _stored(tape: Tape, loops: dict[Equation, Shape]) -> set[Var]:
    """Return the values that something else than a loop of their shape uses."""
    stored = {a for a in tape.outputs if isinstance(a, Var)}
    for eqn in tape.equations:
        stored.update(a for a in eqn.inputs if isinstance(a, Var) and loops.get(eqn) != a.type.shape)
    return stored


def _group(
    tape: Tape, loops: dict[Equation, Shape], reads: dict[Var, Equation], excluded: Container[Var]
) -> Iterator[list[Equation]]:
    """Yield the equations in an order in which each group is together; `loops` has the shapes of their loops.

    Those that are computed once for each row of a loop become part of it.
    """

    def operands(eqn: Equation) -> set[Var]:
        sources = [s for a in eqn.inputs for s in (reads[a].inputs if isinstance(a, Var) and a in reads else [a])]
        return {s for s in sources if isinstance(s, Var)}

    last: dict[Atom, Any] = {a: eqn for eqn in tape.equations for a in operands(eqn)}
    last.update(dict.fromkeys([*tape.inputs, *(a for a in tape.outputs if isinstance(a, Var))]))
    waiting: dict[Shape, list[Equation]] = {}
    maker: dict[Var, Equation] = {}  # of the results that wait
    rows: dict[Shape, Shape] = {}  # by loop: the shape of its rows' reductions, if operations need these
    held: Counter[Shape] = Counter()  # by loop: elements of operands that it keeps, and nothing else needs

    def close_group(shape: Shape) -> list[Equation]:
        group = waiting.pop(shape)
        del held[shape]
        rows.pop(shape, None)
        for eqn in group:
            del maker[eqn.outputs[0]]
        return group

    for eqn in tape.equations:
        makers = [maker[a] for a in eqn.inputs if isinstance(a, Var) and a in maker]
        shape = _join_rows(eqn, makers, loops, rows, excluded)
        ends = [m.primitive in REDUCTIONS and rows.get(loops[m]) != m.outputs[0].type.shape for m in makers]
        needed = dict.fromkeys([loops[m] for m, is_end in zip(makers, ends) if loops[m] != shape or is_end])
        if shape is None:
            needed |= {other: None for other, n in held.items() if n > MAX_LIVE * math.prod(other)}
        for other in needed:
            yield close_group(other)
        if shape is None:
            yield [eqn]
            continue
        waiting.setdefault(shape, []).append(eqn)
        maker[eqn.outputs[0]] = eqn
        size = math.prod(shape)
        held[shape] += sum(min(a.type.size, size) for a in operands(eqn) if a not in maker and last[a] is eqn)
    for shape in [*waiting]:
        yield close_group(shape)


def _join_rows(
    eqn: Equation, makers: list[Equation], loops: dict[Equation, Shape], rows: dict[Shape, Shape], excluded: Any
) -> Shape | None:
    """Return the loop of an equation: that of its operands if these are, or it is, computed once for each row."""
    for m in makers:
        row, loop = m.outputs[0].type.shape, loops[m]
        fits = rows.get(loop, row) == row and _is_row(row, loop)
        if fits and (loops.get(eqn) == loop or _is_on_rows(eqn, row, excluded)):
            loops[eqn], rows[loop] = loop, row
    return loops.get(eqn)


def _is_row(row: Shape, shape: Shape) -> bool:
    """Return True if an array of one shape has one element for each row of an array of another."""
    fits = any(row == shape[:k] + (1,) * (len(shape) - k) for k in range(len(shape)))
    return fits and MIN_COLUMNS <= math.prod(shape) // max(1, math.prod(row)) <= MAX_COLUMNS


def _is_on_rows(eqn: Equation, row: Shape, excluded: Container[Var]) -> bool:
    """Return True if a loop can compute an equation once for each row."""
    if len(eqn.outputs) != 1 or eqn.outputs[0] in excluded or eqn.outputs[0].type.shape != row:
        return False
    return all(typeof(a).shape in ((), row) for a in eqn.inputs) and lowering_of(eqn) is not None


def _kernel_shape(eqn: Equation, excluded: Container[Var]) -> Shape | None:
    """Return the shape of the loop that an equation can be part of, or None."""
    if not eqn.outputs or eqn.outputs[0] in excluded:
        return None
    out = eqn.outputs[0].type
    if eqn.primitive in REDUCTIONS:
        operand, kinds = typeof(eqn.inputs[0]), "iuf" if eqn.primitive is sum_p else "f"
        fits = operand.dtype == out.dtype and out.dtype in DTYPES and out.dtype.kind in kinds
        return operand.shape if fits and operand.size >= MIN_ELEMENTS else None
    return out.shape if out.size >= MIN_ELEMENTS and lowering_of(eqn) is not None else None


def _work(eqn: Equation) -> int:
    """Return the number of additions that an operation counts as."""
    return FUNCTION_WORK if eqn.primitive.name in FUNCTIONS or _is_slow(eqn) else 1


def _is_slow(eqn: Equation) -> bool:
    """Return True if NumPy has no fast loop for an operation, so that a kernel pays off for it alone."""
    impl = eqn.primitive.impl
    is_slow = impl in (numpy.logaddexp, numpy.tanh)
    return is_slow or (eqn.primitive.name in FUNCTIONS and not isinstance(impl, numpy.ufunc))


def _operations(group: list[Equation]) -> tuple:
    """Return the signature of a fusion group: groups with equal signatures probably share a loop."""
    return tuple([(e.primitive, v.type.shape, v.type.dtype) for e in group for v in e.outputs])


def _fused(
    group: list[Equation], shape: Shape, uses: dict[Var, int], reads: dict[Var, Equation], least: int
) -> list[Equation]:
    """Return the group as one kernel equation, or in parts if it is too small or too large.

    A kernel has at least so much work.
    """
    inputs = [a for eqn in group for a in eqn.inputs if isinstance(a, Var)]
    through = {a: reads[a] for a in inputs if a in reads and a.type.shape == shape}
    work = sum(map(_work, group)) + len(through)
    if (len(group) + len(through) < 2 and not _is_slow(group[0])) or work * math.prod(shape) < least:
        return group
    if len(group) <= MAX_OPERATIONS:
        for fused_reads in (through, {}) if through else ({},):
            equations = _kernel_equation(group, uses, fused_reads, least)
            if equations is not None:
                return equations
    parts = Stages(group, shape).equations
    if len(parts) == 1 and len(group) <= MAX_OPERATIONS:  # the reductions do not fit into one loop
        reductions = [[eqn] for eqn in group if eqn.primitive in REDUCTIONS]
        parts = [[eqn for eqn in group if eqn.primitive not in REDUCTIONS], *reductions]
    if [*map(bool, parts)].count(True) == 1:
        parts = [group[: len(group) // 2], group[len(group) // 2 :]] if len(group) >= 4 else []
    return [e for part in parts if part for e in _fused(part, shape_of(part[0]), uses, reads, least)] or group


def _independent_parts(group: list[Equation], shape: Shape | None) -> list[list[Equation]]:
    """Split a group of large arrays into parts that share no array of its shape, to run one after the other.

    So a step of an optimizer holds new values of one parameter at a time, and arrays that are used stay in the cache.
    """
    if shape is None or math.prod(shape) * max(e.outputs[0].type.dtype.itemsize for e in group) < MIN_PART_BYTES:
        return [group]
    root: dict[Any, Any] = {}  # of an equation, or of an array: another one of its part, or itself

    def find(x: Any) -> Any:
        while root.setdefault(x, x) is not x:
            root[x] = x = root[root[x]]
        return x

    results = {v for eqn in group for v in eqn.outputs}
    for eqn in group:
        for a in (*eqn.inputs, *eqn.outputs):
            if isinstance(a, Var) and (a.type.shape == shape or a in results):
                root[find(a)] = find(eqn)
    parts: dict[Any, list[Equation]] = {}
    for eqn in group:
        parts.setdefault(find(eqn), []).append(eqn)
    return [*parts.values()]


def _kernel_equation(
    group: list[Equation], uses: dict[Var, int], reads: dict[Var, Equation], least: int
) -> list[Equation] | None:
    """Return the equation of a kernel that reads through `reads`; None if it has too many operands or no layout."""
    names: dict[Any, Var] = {}  # a variable, or an array by identity -> its name inside
    operands: dict[Var, Atom] = {}  # name inside -> the operand

    def name_inside(a: Atom) -> Atom:
        if not isinstance(a, Var) and is_scalar_constant(a):
            return a
        key = a if isinstance(a, Var) else id(a)
        if key not in names:
            names[key] = Var(typeof(a))
            operands[names[key]] = a
        return names[key]

    def inside(eqn: Equation) -> Equation:
        inputs = [*map(name_inside, eqn.inputs)]
        return Equation(eqn.primitive, inputs, eqn.params, [Var(eqn.outputs[0].type)], eqn.source)

    equations = [*map(inside, reads.values())]
    names.update((v, eqn.outputs[0]) for v, eqn in zip(reads, equations))
    for eqn in group:
        equations.append(inside(eqn))
        names[eqn.outputs[0]] = equations[-1].outputs[0]
    used = Counter(a for eqn in group for a in eqn.inputs if isinstance(a, Var))
    results = [v for eqn in group for v in eqn.outputs if uses.get(v, 0) > used[v]]
    tape = Tape([*operands], equations, [names[v] for v in results])
    if not _is_worthwhile(tape, least):
        return None
    return [Equation(fused_p, [*operands.values()], {"body": tape}, results, group[0].source)]


def _is_worthwhile(body: Tape, least: int) -> bool:
    """Return whether NumPy can call a group's kernel, and would itself take longer for its operations."""
    work = sum(map(_work, body.equations)) * math.prod(iteration_shape(body))
    if needs_layout(body):
        layout = find_layout(body)
        if layout is None or len(body.outputs) > MAX_RESULTS_WITH_LAYOUT:
            return False
        if (layout.ndim > 2 or layout.count > 1) and layout.sizes[-1] < MIN_COLUMNS:
            return False
        least = max(least, (layout.count - 1) * MIN_WORK // 2)
    operands = len(operands_of(body)) + len(body.outputs)
    is_group = len(body.equations) > 1 or _is_slow(body.equations[0])
    return operands <= MAX_OPERANDS and is_group and work >= least


# ---------------------------------------------------------------- kernels


class Kernel:
    """A compiled loop: a function of arrays that returns its results, as NumPy's operations would compute them.

    If an operation overflowed, divided by zero or had no result, the group runs again by `reference()`, NumPy's
    operations, which then warn of it, unless all warnings are ignored.
    """

    def __init__(self, body: Tape, reference: Callable[[], Callable], threads: int | None = None):
        self.body = body
        self.reference = reference
        self.threads = threads or default_threads()
        self.loop = Loop(body, find_layout(body) if needs_layout(body) else None)

    @property
    def llvm(self) -> str:
        """The kernel in LLVM's intermediate representation."""
        return self.loop.text()

    def compiled(self) -> tuple[numpy.ufunc, Any]:
        """Return the kernel as a ufunc, compiled or from the cache, and the cell in which it reports exceptions."""
        dtypes = [tuple([p.dtype for p in ps]) for ps in (self.loop.operands, self.loop.results)]
        return compile_kernel(self.llvm, *dtypes, self.loop.signature)

    def function(self) -> Callable:
        """Return the function that the program calls."""
        (ufunc, raised), reference = self.compiled(), self.reference
        size = piece_size(math.prod(iteration_shape(self.body)), sum(map(_work, self.body.equations)))
        if self.loop.layout is None:
            run = over_elements(ufunc, self.loop, size, self.threads)
        else:
            run = over_regions(ufunc, self.loop, self.loop.layout, size, self.threads)

        def fused(*operands: Value) -> Any:
            before = raised.value
            out = run(*operands)
            if (after := raised.value) != before and is_for_numpy(before, after):
                return reference()(*operands)
            return out

        return fused


def is_for_numpy(before: int, after: int) -> bool:
    """Return whether NumPy has to compute again what a kernel reported, by its counts before and after."""
    exact = after >> EXCEPTIONS_FROM == before >> EXCEPTIONS_FROM
    return not (exact and {"ignore"}.issuperset(numpy.geterr().values()))  # else nobody sees a warning


def is_one_loop(params: dict) -> bool:
    """Return whether a kernel walks over its arrays as NumPy does over those of an elementwise operation."""
    return not (params.get("in_registers") or needs_layout(params["body"]))


@functools.lru_cache(maxsize=4096)
def compile_kernel(
    text: str, inputs: tuple[numpy.dtype, ...], outputs: tuple[numpy.dtype, ...], signature: str | None
) -> tuple[numpy.ufunc, Any]:
    """Return the ufunc of a loop, and the cell in which it says that it raised a floating-point exception."""
    raised = ctypes.c_int64(0)
    address = native.load_function(text, "kernel")
    return native.make_ufunc("fused", address, inputs, outputs, signature, raised), raised
