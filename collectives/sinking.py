"""psums moved down a tape, past what is linear, to where they can be one.

A value that is the same on all ranks and is used several times is lifted several times, and its cotangent is made of
several psums: not of their sum as it stands, since each was multiplied by this and reshaped by that on its way. But a
psum may as well come after what is linear:

    f(psum(x))          = psum(f(x))                where f is linear, and knows nothing of ranks, or of other axes only
    psum(x) * c         = psum(x * pbroadcast(c))   where c does not vary along the axes
    psum(x) + psum(y)   = psum(x + y)
    psum(x) + y         = psum(x + y / n)           which is done only where it saves a psum further down
    psum(psum(x, i), j) = psum(x, (i, j))
    pscatter(psum(x))   = psum_scatter(x)
    at_root(psum(x))    = reduce(x)

Terms are added up in another order, and may be rounded otherwise; each sum is in the dtype in which it was.

No rank computes more by it: what is the same everywhere is computed everywhere. So each psum is moved on until it meets
another, or this rank's part is taken of it. Those to which nothing happens stay where they were, since they may be
small there: psums are moved past broadcasts too.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from collectives.along import Along, along_those, size_of
from collectives.kinds import Collective
from collectives.ops import lifted_type, pbroadcast_p, pscatter_p, psum_p, psum_scatter_p
from collectives.rooted import at_root_p, reduce_p
from minidiff.core import Primitive, Scope, ShapedArray, is_differentiable, is_scalar_constant
from minidiff.location import merged
from minidiff.ops.elementwise import Divide, Sum, Where, divide
from minidiff.ops.kinds import Differential, Linear, Multilinear
from minidiff.optimize import rewrites_tapes
from minidiff.tape import Atom, Equation, Tape, Var, atom_type

divide_p = divide.primitive

#: An all-reduce of up to so many bytes takes about as long as one of a single number.
CHEAP_BYTES = 1 << 16


class Waiting(NamedTuple):
    """A psum that has not been written yet: of what, over which axes, and which of the tape's psums it stands for."""

    operand: Atom
    axes: tuple[str, ...]
    origins: frozenset[int]  # ids of equations
    nbytes: int  # of these
    source: Any = None  # the line that asks for it
    gained: bool = False  # whether there is less to do already


#: What each rank takes for itself of what all have; and of a sum, in one collective.
OF_A_SUM = {pscatter_p: psum_scatter_p, at_root_p: reduce_p}

#: Of an equation that has been written, as another one.
DONE = Waiting(None, (), frozenset(), 0)


@rewrites_tapes(in_scope=True)
def sink_psums(tape: Tape, scope: Scope | None) -> Tape:
    """The typed body of a `shard_map`, with fewer psums where several become one when they are moved down."""
    if scope is None or not any(eqn.primitive is psum_p for eqn in tape.equations):
        return tape
    movable = worth_moving([(eqn, eqn.inputs, eqn.outputs) for eqn in tape.equations])
    best = _best([tape, *_in_all_ways(tape, scope, movable, shares=False)])
    if movable and _cost(best).psums > 1:  # to divide costs something: it must save something
        other = _best(_in_all_ways(tape, scope, movable, shares=True))
        return other if _cost(other)[:2] < _cost(best)[:2] else best
    return best


def _in_all_ways(tape: Tape, scope: Scope, movable: set[int], shares: bool) -> Iterator[Tape]:
    for split in (False, True):
        moved = functools.cache(lambda chosen, split=split: _Sinking(tape, scope, chosen, split, shares))
        for staying in STAYING.values():
            yield from _sunk(tape, moved, movable, staying)


def _best(tapes: Iterable[Tape]) -> Tape:
    return min(tapes, key=_cost)


class Cost(NamedTuple):
    """What a tape's collectives take. An all-reduce is two steps, a reduce-scatter and an all-gather."""

    steps: int
    psums: int
    nbytes: int


def _cost(tape: Tape) -> Cost:
    sent = [eqn for eqn in tape.equations if eqn.primitive.sends(eqn.params)]
    psums = sum(eqn.primitive is psum_p for eqn in sent)
    return Cost(psums + len(sent), psums, sum(atom_type(a).nbytes for eqn in sent for a in eqn.inputs))


#: Which of those psums should stay where they are whose copies, in the order of the tape, have not come together again.
STAYING: dict[str, Callable[[list[int]], Sequence[int]]] = {
    "all": lambda copied: copied,
    "the last": lambda copied: copied[-1 - len(copied) // 8 :],  # of many, several at once
    "none": lambda copied: (),
}


def _sunk(tape: Tape, moved: Callable[[frozenset], _Sinking], movable: set[int], staying: Callable) -> Iterator[Tape]:
    """The tape with all psums moved, and then with more and more of them where they were."""
    every = [id(eqn) for eqn in tape.equations if eqn.primitive is psum_p or eqn.primitive in OF_A_SUM]
    chosen = frozenset(every)
    while chosen:
        found = moved(chosen)
        yield found.tape
        times = Counter(o for origins, _ in found.written for o in origins)
        # Those whose copies have not come together again are several now. Then, those that nothing came of stay.
        copied = [o for o in every if o in chosen and times[o] > 1]
        kept = chosen.difference(staying(copied), [o for o in copied if o not in movable])
        if kept == chosen:
            kept = chosen.intersection(o for origins, gain in found.written if gain for o in origins)
        if kept == chosen:
            return
        chosen = kept


#: An equation, what it takes, and what it gives: those of a tape, or the other way around, those of its transpose.
Step = tuple[Equation, Sequence[Atom], Sequence[Atom]]


def worth_moving(steps: Sequence[Step], sums: Primitive = psum_p, parts: Collection[Primitive] = OF_A_SUM) -> set[int]:
    """Of what is a psum (`sums`), those (ids of equations) that may be one with another one, or become a part.

    The others may be moved, but nothing would come of it: what they meet has to wait until they are over. Sets of
    psums are integers, with a bit for each.
    """
    given = Counter(v for _, _, gives in steps for v in gives if isinstance(v, Var))
    taken = {a for _, takes, _ in steps for a in takes if isinstance(a, Var)}
    taken.update(v for v, times in given.items() if times > 1)  # which is a sum
    bits: dict[int, int] = {}  # by id of an equation
    along: dict[str, int] = defaultdict(int)
    over: dict[Atom, int] = defaultdict(int)  # by name: the psums that are over when it is there
    held: dict[Atom, int] = defaultdict(int)  # and those that may be moved past it
    meeting = stopped = ending = 0  # those that meet others; that are done at some place; that end in another psum
    for eqn, takes, gives in steps:
        done = waiting = 0
        for a in takes:
            if isinstance(a, Var):
                done, waiting = done | over[a], waiting | held[a]
        if eqn.primitive is not sums:
            meeting |= waiting & ~done if eqn.primitive in parts else 0
            here = waiting & _stopped(eqn, along)
            done, waiting, stopped = done | here, waiting & ~here, stopped | here
        elif taken.isdisjoint(gives):
            ending |= waiting & ~done
        else:
            bit = bits[id(eqn)] = 1 << len(bits)
            waiting |= bit
            for axis in eqn.params["axes"]:
                along[axis] |= bit
        for v in gives if done or waiting else ():
            if isinstance(v, Var):
                over[v], held[v] = over[v] | done, held[v] | waiting
                together = held[v] & ~over[v]
                meeting |= together if together & together - 1 else 0  # more than one bit
    meeting |= ending & ~stopped
    return {number for number, bit in bits.items() if bit & meeting}


def _stopped(eqn: Equation, along: dict[str, int]) -> int:
    """Of psums along these axes, those that are not moved past an equation in any case."""
    if isinstance(eqn.primitive, Collective):
        return functools.reduce(operator.or_, [along[a] for a in eqn.params["axes"]])
    return 0 if isinstance(eqn.primitive, (Sum, Where, Multilinear, Linear, Differential)) else -1


class _Sinking:
    """A tape written anew, with those psums (and parts of sums) that are `chosen` as late as possible.

    They are known by their equations' ids. With `split` a psum may become a reduce-scatter and another psum; with
    `shares` what is added to one may become each rank's share of it.
    """

    def __init__(self, tape: Tape, scope: Scope, chosen: frozenset[int], split: bool, shares: bool):
        self.scope = scope
        self.chosen = chosen
        self.split = split
        self.shares = shares
        self.waiting: dict[Var, Waiting] = {}
        self.lifted: dict[tuple, Var] = {}
        self.equations: list[Equation] = []
        #: For each that has waited, what psums of the tape it stands for, and whether anything was gained.
        self.written: list[tuple[frozenset[int], bool]] = []
        for eqn in tape.equations:
            found = self._moved(eqn)
            if found is DONE:
                continue
            if found is None:
                self._write_those(eqn.inputs)
                self.equations.append(eqn)
            else:
                self.waiting[eqn.outputs[0]] = found
        self._write_those(tape.outputs)
        self.tape = Tape(tape.inputs, self.equations, tape.outputs)

    def _moved(self, eqn: Equation) -> Waiting | None:
        """The result of an equation as a psum that can wait; None where there is none, or it cannot; or DONE."""
        waits = [self.waiting.get(a) if isinstance(a, Var) else None for a in eqn.inputs]
        if eqn.primitive is psum_p:
            return self._started(eqn, waits[0])
        if eqn.primitive in OF_A_SUM and waits[0] is not None and set(waits[0].axes).intersection(eqn.params["axes"]):
            return self._part(eqn, waits[0])
        held = [w for w in waits if w is not None]
        linear = _linear_in(eqn, waits) if held else ()
        if not linear:
            return None
        axes = self._ordered({a for w in held for a in w.axes})
        # Those of the operands that are added up, of which ranks must have shares along these axes.
        missing = {k: self._ordered(set(axes).difference(waits[k].axes if waits[k] else ())) for k in linear}
        missing = {k: along for k, along in missing.items() if along and not _is_zero(eqn.inputs[k])}
        if missing and not (self.shares and all(_can_be_shared(eqn.inputs[k]) for k in missing)):
            return None
        origins = frozenset().union(*[w.origins for w in held])
        nbytes = sum({w.origins: w.nbytes for w in held}.values())
        inputs = [a if w is None else w.operand for a, w in zip(eqn.inputs, waits)]
        types = [a if is_scalar_constant(a) else lifted_type(atom_type(a), axes) for a in inputs]
        (type,) = eqn.primitive.typecheck(types, eqn.params)
        if type.nbytes > max(CHEAP_BYTES, nbytes) or any(atom_type(w.operand).dtype != type.dtype for w in held):
            return None  # (what is summed in a smaller dtype may overflow there)
        inputs = [self._shared(a, missing[k]) if k in missing else a for k, a in enumerate(inputs)]
        inputs = [
            self._lift(a, axes) if w is None and k not in missing else a for k, (a, w) in enumerate(zip(inputs, waits))
        ]
        moved = self._write(eqn.primitive, inputs, eqn.params, type, source=eqn.source)
        return Waiting(moved, axes, origins, nbytes, merged([w.source for w in held]), any(w.gained for w in held))

    def _started(self, eqn: Equation, before: Waiting | None) -> Waiting | None:
        """A psum as one that waits, together with the one before it; if it is to stay, both are done here."""
        (x,), axes, chosen = eqn.inputs, eqn.params["axes"], id(eqn) in self.chosen
        if before is None:
            return Waiting(x, axes, frozenset([id(eqn)]), atom_type(x).nbytes, eqn.source) if chosen else None
        axes, source = (*before.axes, *axes), merged([before.source, eqn.source])
        both = before._replace(axes=axes, origins=before.origins.union([id(eqn)]), source=source)
        if chosen:
            return both
        self._write_sum(both, eqn.outputs[0])
        return DONE

    def _part(self, eqn: Equation, w: Waiting) -> Waiting | None:
        """This rank's part of a sum, in one collective; None where that would take more (or may, with `split`)."""
        (out,), params = eqn.outputs, eqn.params
        rest = tuple(a for a in w.axes if a not in params["axes"])
        runs = [tuple(g) for _, g in itertools.groupby(params["axes"], key=lambda a: a in w.axes)]
        collectives = sum(axes[0] in w.axes for axes in runs) + bool(rest)
        if id(eqn) not in self.chosen or (len(runs) > 1 and not params.get("tiled")):
            return None
        if collectives > len(w.origins) and not self.split:
            return None
        x = w.operand
        for axes in runs:  # a part of a part: the first axis' ranks count most
            primitive = OF_A_SUM[eqn.primitive] if axes[0] in w.axes else eqn.primitive
            step = {**params, **Along(self.scope, axes).params}
            (type,) = primitive.typecheck([atom_type(x)], step)
            x = self._write(primitive, [x], step, type, out if axes is runs[-1] and not rest else None, w.source)
        self.written.append((w.origins.union([id(eqn)] if not rest else []), True))
        return Waiting(x, rest, frozenset([id(eqn)]), w.nbytes, w.source, gained=True) if rest else DONE

    def _lift(self, a: Atom, axes: tuple[str, ...]) -> Atom:
        if is_scalar_constant(a):
            return a
        key = (a if isinstance(a, Var) else id(a)), frozenset(axes)
        if key not in self.lifted:
            params = Along(self.scope, axes).params
            self.lifted[key] = self._write(pbroadcast_p, [a], params, lifted_type(atom_type(a), axes))
        return self.lifted[key]

    def _shared(self, a: Atom, axes: tuple[str, ...]) -> Atom:
        """What adds up to `a` over the ranks along `axes`, where it is the same."""
        if is_scalar_constant(a):
            return a / size_of(self.scope, axes)
        lifted = self._lift(a, axes)
        return self._write(divide_p, [lifted, size_of(self.scope, axes)], {}, atom_type(lifted))

    def _ordered(self, axes: Collection[str]) -> tuple[str, ...]:
        return along_those(self.scope, axes).axes

    def _write(
        self,
        primitive: Primitive,
        inputs: Sequence[Atom],
        params: dict,
        type: ShapedArray,
        out: Var | None = None,
        source: Any = None,
    ) -> Var:
        out = Var(type) if out is None else out
        self.equations.append(Equation(primitive, inputs, params, [out], source))
        return out

    def _write_those(self, atoms: Sequence[Atom]) -> None:
        """What waits among these is needed now."""
        for a in atoms:
            if isinstance(a, Var) and a in self.waiting:
                self._write_sum(self.waiting.pop(a), a)

    def _write_sum(self, w: Waiting, out: Var) -> None:
        params = Along(self.scope, w.axes).params
        self.equations.append(Equation(psum_p, [w.operand], params, [out], w.source))
        self.written.append((w.origins, w.gained or len(w.origins) > 1))


# ---------------------------------------------------------------- what a psum may be moved past


def _linear_in(eqn: Equation, waits: Sequence[Waiting | None]) -> Collection[int]:
    """The operands in which an equation is linear, together, on every rank for itself; none if not all psums are."""
    primitive, waiting = eqn.primitive, {k for k, w in enumerate(waits) if w is not None}
    linear: Collection[int] = ()
    if primitive.multiple_results or not is_differentiable(eqn.outputs[0].type.dtype):
        return ()
    if isinstance(primitive, Collective):
        apart = type(primitive) is Collective and not set(waits[0].axes).intersection(eqn.params["axes"])
        linear = (0,) if apart else ()
    elif isinstance(primitive, Sum):
        linear = (0, 1)
    elif isinstance(primitive, Where):
        linear = (1, 2)
    elif isinstance(primitive, Divide):
        linear = (0,)
    elif isinstance(primitive, Multilinear):
        linear = waiting if len(waiting) == 1 and primitive.transpose_rules[min(waiting)] is not None else ()
    elif isinstance(primitive, Linear):
        linear = range(len(waits) if primitive.linear_operands is None else primitive.linear_operands)
    return linear if waiting.issubset(linear) else ()


def _can_be_shared(a: Atom) -> bool:
    return is_scalar_constant(a) or is_differentiable(atom_type(a).dtype)


def _is_zero(a: Atom) -> bool:
    return is_scalar_constant(a) and a == 0
