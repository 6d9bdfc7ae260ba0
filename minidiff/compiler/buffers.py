"""Alias analysis and liveness: which values share memory, and when memory is used for the last time."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable
from typing import Any

import numpy

from minidiff.compiler.in_place import IN_PLACE
from minidiff.control_flow.bodies import BodyOperation, Call
from minidiff.control_flow.loops import while_p
from minidiff.control_flow.partial_eval import CARRY
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.ops import elementwise, rearranging, shape
from minidiff.ops.base import Specialized
from minidiff.values.dtypes import is_scalar_constant

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
        if _bodies_make_all(eqn) if p.is_higher_order else not p.shares_memory:
            continue
        reached = frozenset(eqn.outputs[:1]).union(*[roots_of(a, roots) for a in eqn.inputs])
        if p in READ_ONLY or p.is_higher_order:  # a body may return a constant, too
            reached |= {id(eqn)}
        roots.update((v, reached) for v in eqn.outputs)
    return roots


def _bodies_make_all(eqn: Equation) -> bool:
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
