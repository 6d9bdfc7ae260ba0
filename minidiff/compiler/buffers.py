"""Buffers: which values of a program share memory, when it is used for the last time, and which results take it.

Alias analysis and liveness of a tape give `Memory`. `assign_buffers` passes its equations in order, and returns a
`ProgramPlan`: all that the printer (`codegen.py`) and reports of memory need to know. It never changes afterwards.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.control_flow.bodies import BodyOperation, Call
from minidiff.control_flow.dead_code import count_uses
from minidiff.control_flow.partial_eval import CARRY
from minidiff.control_flow.while_loop import while_p
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Atom, Equation, Tape, with_equations
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.ops import elementwise, indexing, rearranging, shape, slices, updates
from minidiff.ops.base import Specialized
from minidiff.values.dtypes import NARROW, is_scalar_constant, runs_wide
from minidiff.values.lists import select

#: Reuse the memory of operands for results of at least this size; for smaller ones NumPy allocates as fast.
REUSED_BYTES = 4096

# ---------------------------------------------------------------- aliasing

copy_p = elementwise.copy.primitive
#: A group of elementwise operations as one: its parameter `body` is a tape. See `kernels.py`.
fused_p = Call("fused")

#: Operations whose results are read-only views in NumPy.
READ_ONLY = {shape.broadcast_to_p, rearranging.diagonal_p, rearranging.windows_p}
READ_ONLY |= {elementwise.imag.primitive}  # if the operand is real


class Aliases(dict[Any, frozenset]):
    """For each name, the names whose memory it may share. A name that shares with no other is not stored."""

    def __missing__(self, v: Var) -> frozenset:
        return frozenset([v])


def find_aliases(tape: Tape) -> Aliases:
    """Alias analysis: for each name, the names whose memory it may share.

    Read-only memory is represented by an id: that of a constant, or of the equation whose result is read-only.
    """
    roots = Aliases()
    for eqn in tape.equations:
        p = eqn.primitive
        if _bodies_allocate_results(eqn) if p.is_higher_order else not p.shares_memory:
            continue
        reached = frozenset(eqn.outputs[:1]).union(*[roots_of(a, roots) for a in eqn.inputs])
        if p in READ_ONLY or p.is_higher_order:  # a body may return a constant, too
            reached |= {id(eqn)}
        roots.update((v, reached) for v in eqn.outputs)
    return roots


def _bodies_allocate_results(eqn: Equation) -> bool:
    """Return True if bodies allocate each result separately: a shard_map copies what they share."""
    if eqn.primitive.body_scope(eqn.params) is not None:
        return True
    bodies = eqn.bodies
    may_not_run = eqn.primitive is while_p or eqn.params.get("length") == 0  # then it returns its operands
    return bool(bodies) and not may_not_run and not any(map(_shared_results, bodies))


def _shared_results(tape: Tape) -> list[int]:
    """Indices of results that may share memory with inputs, constants or others."""
    roots, shared = find_aliases(tape), []
    cuts = {v: eqn for eqn in tape.equations if _splits_memory(eqn, roots) for v in eqn.outputs}
    taken: dict[Any, Any] = dict.fromkeys(tape.inputs)  # memory -> the equation that split it into results
    for k, a in enumerate(tape.outputs):
        memory, cut = roots_of(a, roots), cuts.pop(a, None) if isinstance(a, Var) else None
        if any(isinstance(r, int) or (r in taken and (cut is None or taken[r] is not cut)) for r in memory):
            shared.append(k)
        else:
            taken.update(dict.fromkeys(memory, cut))
    return shared


def _splits_memory(eqn: Equation, roots: Aliases) -> bool:
    """Return True if an equation splits its operands into results without shared memory."""
    if not (eqn.primitive.multiple_results and eqn.primitive.shares_memory):
        return False
    operands = [roots_of(a, roots) for a in eqn.inputs]
    return sum(map(len, operands)) == len(frozenset().union(*operands))


def roots_of(a: Atom, roots: Aliases) -> frozenset:
    """Return the memory that an atom may share."""
    if isinstance(a, Var):
        return roots[a]
    return frozenset() if is_scalar_constant(a) or isinstance(a, ShapedArray) else frozenset([id(a)])


def copy_shared_results(tape: Tape) -> Tape:
    """Copy results that share memory with other values: callers may write into any of them."""
    shared = _shared_results(tape)
    return _with_copies(tape, shared) if shared else tape


def copy_views(tape: Tape, types: Collection[ShapedArray]) -> Tape:
    """Copy results of these types that are views of intermediate values, whose memory is then free."""
    roots = find_aliases(tape)
    views = [k for k, a in enumerate(tape.outputs) if isinstance(a, Var) and a.type in types and len(roots[a]) > 1]
    return _with_copies(tape, views) if views else tape


def _with_copies(tape: Tape, places: Iterable[int]) -> Tape:
    """Return the tape with copies of the results at these indices, each as soon as the result is there."""
    copies: dict[Atom | int, list[Equation]] = defaultdict(list)
    outputs = list(tape.outputs)
    for k in places:
        a, outputs[k] = outputs[k], Var(typeof(outputs[k]))
        copies[a if isinstance(a, Var) else id(a)].append(Equation(copy_p, [a], {}, [outputs[k]]))
    equations = [
        e for eqn in tape.equations for e in (eqn, *itertools.chain(*[copies.pop(v, ()) for v in eqn.outputs]))
    ]
    return Tape(tape.inputs, [*equations, *itertools.chain(*copies.values())], outputs)


def donatable_carries(eqn: Equation) -> list[bool]:
    """For each input of a loop's body, return True if it is a carry whose buffer a step may overwrite.

    The carry's next value shares no memory with another result, a constant, or another input. The loop copies the first
    carry.
    """
    body = eqn.params.get("body")
    if not (isinstance(eqn.primitive, BodyOperation) and eqn.primitive.repeats and isinstance(body, Tape)):
        return []
    places = [i for i, group in enumerate(eqn.primitive.groups(eqn.params)[0]) if group == CARRY]
    roots = find_aliases(body)
    reached = [roots_of(a, roots) for a in body.outputs]
    counts = Counter(itertools.chain(*reached))
    donatable = [False] * len(body.inputs)
    for i, memory in zip(places, reached):
        other_inputs = {*body.inputs} - {body.inputs[i]}
        donatable[i] = all(counts[r] == 1 and not isinstance(r, int) and r not in other_inputs for r in memory)
    return donatable


# ---------------------------------------------------------------- writing into an operand


def _add_at(x: numpy.ndarray, v: numpy.ndarray, index: tuple, shape: tuple[int, ...]) -> numpy.ndarray:
    part = x[(*index, ...)]
    numpy.add(part, v, out=part)
    return x


def _add_along(x: numpy.ndarray, v: numpy.ndarray, start: numpy.ndarray, axis: int, length: int) -> numpy.ndarray:
    part = x[slices.slice_of(start, v.shape[axis], x, axis)]
    numpy.add(part, v, out=part)
    return x


def _add_at_indices(
    x: numpy.ndarray, v: numpy.ndarray, *indices: numpy.ndarray, shape: tuple[int, ...]
) -> numpy.ndarray:
    if indexing.are_unique(indices, shape):
        x[indices] += v
    else:  # summed first, as by the operation
        numpy.add(x, indexing.scatter_add_p.impl(v, *indices, shape=shape), out=x)
    return x


def _adding(write: Callable) -> Primitive:
    """Return an operation that adds within a copy of its first operand."""
    impl = lambda x, *args, **params: write(numpy.array(x), *args, **params)  # noqa: E731
    return Primitive(write.__name__.strip("_"), impl, lambda x, *types, **params: (x.shape, x.dtype))


#: Operation that puts an array into zeros -> the function that adds its result to an array, within that array.
_ADD: dict[Primitive, Callable[..., Any]] = {
    indexing.unslice_p: _add_at,
    slices.dynamic_unslice_p: _add_along,
    indexing.scatter_add_p: _add_at_indices,
}
#: The same -> the operation that adds its result to an array.
ADDED = {p: _adding(write) for p, write in _ADD.items()}

#: Operation -> the function that writes into its first operand, and returns it.
IN_PLACE: dict[Primitive, Callable[..., Any]] = {
    updates.update_p: updates.write_at,
    updates.scatter_set_p: updates.write_at_indices,
    slices.dynamic_update_p: slices.write_along,
    **{ADDED[p]: write for p, write in _ADD.items()},
}


def add_in_place(tape: Tape, excluded: Container[Var] = ()) -> Tape:
    """Add arrays in place: replace `x + zeros`, where `zeros` holds an array at an index and has no other use.

    (An element of -0.0 elsewhere stays -0.0.) Values in `excluded` may not be plain arrays.
    """
    candidates = {e.outputs[0]: e for e in tape.equations if e.primitive in ADDED and e.outputs[0] not in excluded}
    if not candidates:
        return tape
    uses = count_uses(tape)
    replaced: dict[Equation, Equation | None] = {}
    for eqn in tape.equations:
        if eqn.primitive is not elementwise.add.primitive or eqn.outputs[0] in excluded:
            continue
        (out,) = eqn.outputs
        for x, zeros in (eqn.inputs, eqn.inputs[::-1]):
            part = candidates.get(zeros) if isinstance(zeros, Var) else None
            if part is not None and uses[zeros] == 1 and isinstance(x, Var) and x.type == zeros.type == out.type:
                replaced[part] = None
                replaced[eqn] = Equation(ADDED[part.primitive], [x, *part.inputs], part.params, [out], eqn.source)
                break
    return with_equations(tape, [e for e in (replaced.get(e, e) for e in tape.equations) if e is not None])


# ---------------------------------------------------------------- liveness


class Memory:
    """Liveness: the last use of each name, and of the memory it shares.

    The program may write into the inputs in `donated` as into memory of its own.
    """

    def __init__(self, tape: Tape, donated: Collection[Var] = ()):
        self.roots = find_aliases(tape)
        borrowed = {*tape.inputs} - {*donated}
        #: Values whose memory the program did not allocate for them alone.
        self.shared = {v for e in tape.equations if e.primitive is not fused_p
                       and (e.primitive.shares_memory or e.primitive.is_higher_order) for v in e.outputs}  # fmt: skip
        self.shared |= borrowed
        last: dict[Var, int] = {}
        for k, eqn in enumerate(tape.equations):
            for v in eqn.outputs:
                last[v] = k
            for a in eqn.inputs:
                for root in (a, *self.roots.get(a, ())) if isinstance(a, Var) else ():
                    if isinstance(root, Var):
                        last[root] = k
        for a in tape.outputs:
            if isinstance(a, Var):
                last.update((v, -1) for v in (a, *self.roots[a]) if isinstance(v, Var))
        #: By equation: the names whose last use it is, views of their memory included.
        self.ending: dict[int, list[Var]] = defaultdict(list)
        for v, k in last.items():
            if v not in borrowed:
                self.ending[k].append(v)

    def reused_by(self, eqn: Equation, k: int, least: int, but: Container[Var] = ()) -> Var | None:
        """Return the operand of equation `k` whose memory its result can take, or None.

        Only the result of a ufunc, or of an operation that writes into its first operand, of at least `least` bytes,
        takes the memory of an operand that is not used again, and not that of values in `but`.
        """
        writes = eqn.primitive in IN_PLACE or (isinstance(eqn.primitive, Specialized) and eqn.primitive.writes(eqn))
        if not (writes or isinstance(eqn.primitive.impl, numpy.ufunc)):
            return None
        (out,) = eqn.outputs
        if out.type.shape == () or out.type.nbytes < least:
            return None
        candidates = [a for a in (eqn.inputs[:1] if writes else eqn.inputs) if isinstance(a, Var)]
        if writes and candidates and any(self._overlap(candidates[0], a) for a in eqn.inputs[1:]):
            return None
        dying = [a for a in candidates if a in self.ending[k] and a not in self.shared]
        return next((a for a in dying if a.type == out.type and a not in but), None)

    def _overlap(self, a: Var, b: Atom) -> bool:
        return not roots_of(a, self.roots).isdisjoint(roots_of(b, self.roots))


# ---------------------------------------------------------------- assignment


class ProgramPlan(NamedTuple):
    """A program as it runs: its equations in order, and the memory of their results."""

    tape: Tape
    memory: Memory  # which values share memory, and when each is used for the last time
    sharded: Collection[Var]  # values that may be sharded arrays
    reuses: Mapping[Var, Var]  # result -> the operand, or the donated argument, into whose memory it is written
    fills: Mapping[Var, Var]  # result -> the donated argument into which it is copied once it is there
    overwritten: Collection[Var]  # values whose memory others take
    in_donated: Collection[Var]  # donated arguments, and results in their memory
    donates: Mapping[Equation, tuple[bool, ...]]  # a shard_map -> the operands that it may write into
    deletes: Sequence[Sequence[Var]]  # for each equation, the values that are deleted after it
    runs: int  # how often a call of the whole program runs this one
    in_registers: Collection[Equation] = frozenset()  # loops that are kernels: see `registers.py`
    bodies: Mapping[tuple[Equation, str], Any] = {}  # an equation, and its parameter that is a tape -> the tape's plan

    @property
    def overwritten_inputs(self) -> set[int]:
        """The inputs, by index, whose memory the program may write into."""
        return {k for k, v in enumerate(self.tape.inputs) if v in self.overwritten}


def may_shard(eqn: Equation) -> bool:
    """Return True if the results of an equation may be sharded arrays: those of a shard_map."""
    return eqn.primitive.is_higher_order and eqn.primitive.body_scope(eqn.params) is not None


def sharded_results(eqn: Equation, sharded: Container[Var]) -> Sequence[Var]:
    """Return the results of an equation that may be sharded arrays, if the values in `sharded` may be.

    Results of a shard_map with the spec `P()` are plain arrays.
    """
    if may_shard(eqn):
        return [v for v in eqn.outputs if v.type.sharding is not None]
    return eqn.outputs if any(isinstance(a, Var) and a in sharded for a in eqn.inputs) else []


def upcasts(eqn: Equation) -> bool:
    """Return True if an equation computes in float32 on operands in half precision."""
    return bool(NARROW) and runs_wide(eqn.primitive, [a.type if isinstance(a, Var) else a for a in eqn.inputs])


def selects_array(eqn: Equation) -> bool:
    """Return True if an equation is a `where` that returns one of two arrays whole, without a conversion."""
    if eqn.primitive is not elementwise.where_p:
        return False
    t, (condition, *arrays) = eqn.outputs[0].type, eqn.inputs
    return typeof(condition).shape == () != t.shape and all(isinstance(a, Var) and a.type == t for a in arrays)


def assign_buffers(
    tape: Tape, sharded: Collection[Var] = (), donated: Collection[Var] = (), fills: bool = False, runs: int = 1
) -> ProgramPlan:
    """Assign memory to the values of a tape, from its first equation to its last.

    A result takes the memory of an operand that is not used again, if the tape proves that no other value shares it.
    With `fills`, results are copied into donated arguments that are not used again.
    """
    return _Assignment(tape, sharded, donated, fills).plan(runs)


class _Assignment:
    """The plan of a tape while its equations are passed in order."""

    def __init__(self, tape: Tape, sharded: Collection[Var], donated: Collection[Var], fills: bool):
        self.tape = tape
        self.memory = Memory(tape, donated)
        self.sharded = {*sharded}
        self.in_donated = {*donated} if fills else set()
        results = itertools.chain(tape.inputs, *[e.outputs for e in tape.equations])
        #: Values of REUSED_BYTES or more, and views of such values.
        self.large = {v for v in results if v.type.nbytes >= REUSED_BYTES}
        self.large |= {v for v, roots in self.memory.roots.items() if not self.large.isdisjoint(roots)}
        self.returned = {a for a in tape.outputs if isinstance(a, Var) and a in self.large}
        self.uses = count_uses(tape)
        self.reuses: dict[Var, Var] = {}
        self.fills: dict[Var, Var] = {}
        self.overwritten: set[Var] = set()
        self.donates: dict[Equation, tuple[bool, ...]] = {}
        self.free: dict[Var, None] = {}  # donated arguments after their last use, the latest first

    def plan(self, runs: int) -> ProgramPlan:
        deletes = [self._assign(eqn, k) for k, eqn in enumerate(self.tape.equations)]
        decisions = self.reuses, self.fills, self.overwritten, self.in_donated, self.donates
        return ProgramPlan(self.tape, self.memory, self.sharded, *decisions, deletes, runs)

    def _assign(self, eqn: Equation, k: int) -> list[Var]:
        """Assign memory to the results of equation `k`, and return the values to delete after it."""
        self.sharded.update(sharded := sharded_results(eqn, self.sharded))
        if may_shard(eqn):
            if isinstance(eqn.primitive, Specialized):
                self._donate(eqn)
        elif eqn.primitive is copy_p and not (sharded or upcasts(eqn)):
            self._take_donated(eqn.outputs[0], self.reuses)
        elif not (sharded or upcasts(eqn) or eqn.primitive is fused_p or selects_array(eqn)):
            self._reuse(eqn, k)
        if self.in_donated:
            ending = [v for v in self.memory.ending[k] if v in self.in_donated and v not in self.sharded]
            self.free = dict.fromkeys([*ending, *self.free])
            for v in eqn.outputs if not may_shard(eqn) else ():
                self._take_donated(v, self.fills)
        return [x for v in self.memory.ending[k] if v in self.large for x in self._names_to_delete(v)]

    def _reuse(self, eqn: Equation, k: int) -> None:
        """Let the large result of an equation take the memory of an operand that is not used again."""
        large = not self.large.isdisjoint(eqn.outputs)
        a = self.memory.reused_by(eqn, k, REUSED_BYTES, self.overwritten) if large else None
        if a is not None:
            self.overwritten.add(a)
            self.reuses[eqn.outputs[0]] = a
            if a in self.in_donated:
                self.in_donated.add(eqn.outputs[0])

    def _take_donated(self, v: Var, decisions: dict[Var, Var]) -> None:
        """Let a returned value have the memory of a donated argument of its type that is not used again."""
        if v in self.returned and v not in self.in_donated and v not in self.sharded:
            target = next((d for d in self.free if d.type == v.type and d not in self.overwritten), None)
            if target is not None:
                self.overwritten.add(target)
                self.in_donated.add(v)
                decisions[v] = target

    def _donate(self, eqn: Equation) -> None:
        """Pass on to a shard_map the donated arguments that nothing else needs."""
        donated = [isinstance(a, Var) and a in self.in_donated and self.uses[a] == 1 for a in eqn.inputs]
        self.overwritten.update(select(eqn.inputs, donated))
        self.donates[eqn] = tuple(donated)

    def _names_to_delete(self, v: Var) -> Iterator[Var]:
        """Yield a large dead value, and those whose memory it took; nothing if its memory stays in use."""
        if v not in self.overwritten and v not in self.in_donated:
            earlier = [v]
            while earlier[-1] in self.reuses:
                earlier.append(self.reuses[earlier[-1]])
            yield from reversed(earlier)
