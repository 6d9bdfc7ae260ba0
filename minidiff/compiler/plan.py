"""Plan a program: the passes from a simplified tape to the memory of each value.

`plan_program` lists the passes in order. The last one assigns buffers, and returns a `ProgramPlan`: all that the
printer (`codegen.py`) and reports of memory need to know. It never changes afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from minidiff.compiler import native
from minidiff.compiler.buffers import Memory, copy_p, copy_views, fused_p
from minidiff.compiler.factorizations import share_factorizations
from minidiff.compiler.in_place import add_in_place
from minidiff.compiler.kernels import find_reads, fuse
from minidiff.control_flow.dead_code import count_uses, dependents
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var, typeof
from minidiff.ops.base import Specialized
from minidiff.ops.elementwise import where_p
from minidiff.values.dtypes import NARROW
from minidiff.values.half import runs_wide
from minidiff.values.lists import choose

#: Reuse the memory of operands for results of at least this size; for smaller ones NumPy allocates as fast.
REUSED_BYTES = 4096


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

    @property
    def overwritten_inputs(self) -> set[int]:
        """The inputs, by index, whose memory the program may write into."""
        return {k for k, v in enumerate(self.tape.inputs) if v in self.overwritten}


def plan_program(
    tape: Tape,
    sharded: Sequence[bool] = (),
    donated: Sequence[bool] = (),
    fills_donated: bool = False,
    kernels: bool = True,
    runs: int = 1,
) -> ProgramPlan:
    """Plan how a tape runs, `runs` times in each call of its program.

    `sharded` marks inputs that may be sharded arrays: NumPy's functions compute what depends on them, and their memory
    is not reused. The program may write into inputs that are `donated`; with `fills_donated`, it copies results into
    them. `kernels=False` leaves all operations to NumPy.
    """
    not_plain = [*itertools.compress(tape.inputs, sharded)]
    writable = [*itertools.compress(tape.inputs, donated)]
    tape = group_operations(tape, not_plain, kernels, runs)
    if writable and fills_donated:
        tape = copy_views(tape, {v.type for v in writable} - {v.type for v in not_plain})
    return assign_buffers(tape, not_plain, writable, fills_donated, runs)


def group_operations(tape: Tape, sharded: Collection[Var] = (), kernels: bool = True, runs: int = 1) -> Tape:
    """Group the operations of a tape: sums within an array, shared factorizations, and fused loops.

    Inputs in `sharded` may be sharded arrays. A call of the program runs the tape `runs` times.
    """
    results = [v for eqn in tape.equations if may_shard(eqn) for v in eqn.outputs]
    excluded = dependents(tape.equations, [*sharded, *results]) if sharded or results else frozenset()
    has_loops = kernels and native.is_available()
    tape = add_in_place(tape, {*excluded, *find_reads(tape, excluded)} if has_loops else excluded)
    if kernels and native.is_wanted():
        tape = share_factorizations(tape, excluded)
    return add_in_place(fuse(tape, excluded, runs), excluded) if has_loops else tape


def may_shard(eqn: Equation) -> bool:
    """Return True if the results of an equation may be sharded arrays: those of a shard_map."""
    return eqn.primitive.is_higher_order and eqn.primitive.body_scope(eqn.params) is not None


def upcasts(eqn: Equation) -> bool:
    """Return True if an equation computes in float32 what it has in half precision."""
    return bool(NARROW) and runs_wide(eqn.primitive, [a.type if isinstance(a, Var) else a for a in eqn.inputs])


def selects_array(eqn: Equation) -> bool:
    """Return True if an equation is a `where` that returns one of two arrays whole, without a conversion."""
    if eqn.primitive is not where_p:
        return False
    t, (condition, *arrays) = eqn.outputs[0].type, eqn.inputs
    return typeof(condition).shape == () != t.shape and all(isinstance(a, Var) and a.type == t for a in arrays)


# ---------------------------------------------------------------- buffers


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
        operands = [a for a in eqn.inputs if isinstance(a, Var)]
        if may_shard(eqn) or not self.sharded.isdisjoint(operands):
            self.sharded.update(eqn.outputs)
            if may_shard(eqn) and isinstance(eqn.primitive, Specialized):
                self._donate(eqn)
        elif eqn.primitive is copy_p and not upcasts(eqn):
            self._take_donated(eqn.outputs[0], self.reuses)
        elif not (upcasts(eqn) or eqn.primitive is fused_p or selects_array(eqn)):
            self._reuse(eqn, k)
        if self.in_donated:
            ending = [v for v in self.memory.ending[k] if v in self.in_donated and v not in self.sharded]
            self.free = dict.fromkeys([*ending, *self.free])
            for v in eqn.outputs:
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
        self.overwritten.update(choose(eqn.inputs, donated))
        self.donates[eqn] = tuple(donated)

    def _names_to_delete(self, v: Var) -> Iterator[Var]:
        """Yield a large dead value, and those whose memory it took; nothing if its memory stays in use."""
        if v not in self.overwritten and v not in self.in_donated:
            earlier = [v]
            while earlier[-1] in self.reuses:
                earlier.append(self.reuses[earlier[-1]])
            yield from reversed(earlier)
