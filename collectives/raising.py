"""pbroadcasts moved up the tape of a linear part, to its inputs: what is lifted late is summed early, and often.

Transposed, each pbroadcast is a psum. A value that is the same on all ranks may be lifted in many places of a program:
after this operation and after that one, or in each step of a loop. Then its cotangent is made of many psums. But what
each rank computes for itself may as well be computed of what is lifted already:

    pbroadcast(f(x))                    = f(pbroadcast(x))
    pbroadcast(all_gather_invariant(x)) = all_gather(x)
    pbroadcast(broadcast(x))            = broadcast_varying(x)

So inputs may be lifted, once: their psums come at the end of the backward pass, where nothing waits for them, and those
of all inputs are one call (`boundary.py`). In a loop, what all steps share and what they take element by element is
lifted before it, and a carry is carried lifted as well. This is done where it takes less time; what other collectives
make is lifted along their axes where it was.

`sinking.py` moves psums the other way, in programs that are compiled, and finds more, since it adds shares of what does
not vary to what does. It does not look into loops. Where lifts are left that are not in one place, the transpose of the
tape is asked what it makes of it, and the tape is the transpose of that.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from collectives.along import along_those, size_of
from collectives.kinds import Collective
from collectives.ops import all_gather_invariant_p, all_gather_p, lifted_type, pbroadcast_p, psum_p
from collectives.rooted import broadcast_p, broadcast_varying_p
from collectives.sinking import CHEAP_BYTES, sink_psums, worth_moving
from minidiff.control import Cond, Scan, rounds, scan_p
from minidiff.core import Primitive, Scope, ShapedArray, is_scalar_constant
from minidiff.drafts import chosen, cut, depends, fixpoint, names_used, prune_tape
from minidiff.location import Location
from minidiff.rematerialise import Checkpoint
from minidiff.tape import Atom, Equation, Tape, Var, atom_type, bodies_of
from minidiff.transposition import transposed

#: What it is that lifts may be moved past, besides loops: nothing, operations, or the branches of choices as well.
NOTHING, OPERATIONS, CHOICES = range(3)

#: What makes the same value on all ranks; and, in one operation, a lifted one.
LIFTED = {all_gather_invariant_p: all_gather_p, broadcast_p: broadcast_varying_p}

#: What communicates nothing when it is transposed.
FREE = (psum_p, *LIFTED)

#: For a name, along which axes it is wanted lifted, and the line of the program that wants it.
Wanted = dict[frozenset, Location | None]


def raised(tape: Tape, linear: Sequence[bool], scope: Scope) -> Tape:
    """The tape of a linear part, linear in those of its inputs, with pbroadcasts where their psums take least time."""
    if not lifts_late(tape, linear):
        return tape
    loops: dict = {}
    ways = [_Raising(tape, linear, scope, through, loops=loops).tape() for through in (NOTHING, *_worth_trying(tape))]
    best = _best([tape, *ways], linear)
    return _best([best, _with_sums_sunk(best, linear, scope)], linear) if _lifts_apart(best, linear) else best


def _best(tapes: Sequence[Tape], linear: Sequence[bool]) -> Tape:
    return min(tapes, key=lambda t: _time(t, linear, [v for v, yes in zip(t.inputs, linear) if yes]))


def lifts_late(tape: Tape, linear: Sequence[bool]) -> bool:
    """Whether lifts may be saved: one is of what is computed of inputs, or of what is lifted elsewhere too."""
    inputs = {v for v, yes in zip(tape.inputs, linear) if yes}
    roots: dict[Var, Var | None] = {v: v for v in inputs}  # what a name is computed of: None if of several
    made: dict[Var, Equation] = {}  # the roots that collectives have made
    lifted: set[Var | None] = {None}
    for eqn in tape.equations:
        found = {roots[a] for a in eqn.inputs if isinstance(a, Var) and a in roots}
        if not found:
            continue
        primitive, root = eqn.primitive, found.pop() if len(found) == 1 else None
        if primitive.has_body and any(map(_lifts, bodies_of(eqn))):
            return True
        if primitive is pbroadcast_p:
            while root in made and not set(made[root].params["axes"]).intersection(eqn.params["axes"]):
                root = roots.get(made[root].inputs[0])
            if root in lifted or (root in inputs and root is not eqn.inputs[0]):
                return True
            lifted.add(root)
        if primitive in LIFTED:
            lifted.update(eqn.outputs)
        for v in eqn.outputs:
            roots[v] = v if isinstance(primitive, Collective) else root
        if isinstance(primitive, Collective):
            made.update(dict.fromkeys(eqn.outputs, eqn))
    return False


def _lifts_apart(tape: Tape, linear: Sequence[bool]) -> bool:
    """Whether several lifts may be one, though not by being moved up: outside of bodies, which nobody looks into."""
    if any(eqn.primitive.has_body for eqn in tape.equations) or not lifts_late(tape, linear):
        return False
    active = _active(tape, linear)
    steps = [(e, e.outputs, [a for a in e.inputs if isinstance(a, Var) and a in active]) for e in tape.equations]
    return bool(worth_moving(steps[::-1], pbroadcast_p, LIFTED))


def _with_sums_sunk(tape: Tape, linear: Sequence[bool], scope: Scope) -> Tape:
    """The tape whose transpose has its psums where they are fewest: what is added to one may be each rank's share.

    Its linear inputs are its last.
    """
    own = Scope(scope.axes)
    backward = sink_psums(transposed(tape, linear, own), own)
    count = len(tape.inputs) - sum(linear)
    return transposed(backward, [k >= count for k in range(len(backward.inputs))], own)


def _worth_trying(tape: Tape) -> list[int]:
    return [OPERATIONS, CHOICES] if _chooses(tape) else [OPERATIONS]


def _chooses(tape: Tape) -> bool:
    return any(isinstance(eqn.primitive, Cond) or any(map(_chooses, bodies_of(eqn))) for eqn in tape.equations)


def _lifts(tape: Tape) -> bool:
    return any(eqn.primitive is pbroadcast_p or any(map(_lifts, bodies_of(eqn))) for eqn in tape.equations)


# ---------------------------------------------------------------- what it takes


def _time(tape: Tape, linear: Sequence[bool], together: Sequence[Var] = ()) -> int:
    """How long the sums of a transposed tape take, in bytes; the psums of inputs in `together` are done in one call."""
    active, total, calls = _active(tape, linear), 0, set()
    for eqn in tape.equations:
        if not _takes(eqn, active):
            continue
        if eqn.primitive is pbroadcast_p and psum_p.sends(eqn.params):
            (x,) = eqn.inputs
            call = (eqn.params["axes"], x.type.dtype) if x in together else eqn
            total += x.type.nbytes + (0 if call in calls else CHEAP_BYTES)
            calls.add(call)
        elif isinstance(eqn.primitive, Collective) and eqn.primitive not in FREE and eqn.params["size"] > 1:
            total += (max(v.type.nbytes for v in eqn.outputs) + CHEAP_BYTES) // 2  # a psum goes there, and back
        times = [_time(body, mask) for body, mask in _bodies(eqn, active)]
        if times:  # of branches, one is run
            total += max(times) * rounds(eqn)
    return total


def _time_of_lifts(lifts: Iterable[tuple[ShapedArray, frozenset]], scope: Scope) -> int:
    return sum(t.nbytes + CHEAP_BYTES for t, axes in lifts if size_of(scope, axes) > 1)


def _active(tape: Tape, linear: Sequence[bool]) -> set[Var]:
    """The names that depend on linear inputs."""
    active = {v for v, yes in zip(tape.inputs, linear) if yes}
    for eqn in tape.equations:
        if _takes(eqn, active):
            active.update(eqn.outputs)
    return active


def _takes(eqn: Equation, active: set[Var]) -> bool:
    return any(isinstance(a, Var) and a in active for a in eqn.inputs)


def _bodies(eqn: Equation, active: set[Var]) -> Iterable[tuple[Tape, list[bool]]]:
    """The bodies of an equation, and which of their inputs are linear."""
    mask = [isinstance(a, Var) and a in active for a in eqn.inputs]
    if isinstance(eqn.primitive, Scan):
        mask, _ = _linear_in_loop(eqn, mask)
    if isinstance(eqn.primitive, Cond):
        mask = mask[1:]
    return [(body, mask) for body in bodies_of(eqn) if len(body.inputs) == len(mask)]


def _linear_in_loop(eqn: Equation, linear: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Which inputs of a loop's body are linear; and which of these are its carries."""
    body, (n, m) = eqn.params["body"], (eqn.params["consts"], eqn.params["carry"])

    def attempt(carry):
        mask = [*linear[:n], *carry, *linear[n + m :]]
        return mask, depends(body, mask)[:m]

    return fixpoint(attempt, linear[n : n + m])


# ---------------------------------------------------------------- the tape, written anew


class _Raising:
    """A tape written anew: what is lifted is followed to where it starts, `through` operations or more or less.

    `wanted` says of each name along which axes it must be there lifted: of the tape's `outputs`, that is told. Those
    of its inputs that are `given` are then further inputs. `lifted` are the names for that.
    """

    def __init__(
        self,
        tape: Tape,
        linear: Sequence[bool],
        scope: Scope,
        through: int,
        given: Sequence[Var] = (),
        outputs: Sequence[Wanted] = (),
        loops: dict | None = None,
    ):
        self.loops = {} if loops is None else loops  # the best of each loop within, found once for each thing asked
        self.old = tape
        self.scope = scope
        self.through = through
        self.given = set(given)
        self.active = _active(tape, linear)
        self.wanted: dict[Var, Wanted] = defaultdict(dict)
        self.inner: dict[int, _Loop | _Bodies] = {}
        for a, wanted in zip(tape.outputs, outputs):
            if isinstance(a, Var) and a in self.active:
                self.wanted[a].update(wanted)
        for eqn in reversed(tape.equations):
            if _takes(eqn, self.active):
                self._ask(eqn)

    def _ask(self, eqn: Equation) -> None:
        """What must be there lifted for an equation's results to be there as they are wanted."""
        if eqn.primitive is pbroadcast_p:
            axes, (x,), further = frozenset(eqn.params["axes"]), eqn.inputs, self.wanted[eqn.outputs[0]]
            self.wanted[x].update({axes.union(more): source for more, source in further.items()})
            self.wanted[x][axes] = eqn.source
        elif followed := {axes: source for axes, source in self._wanted_of(eqn).items() if self._follows(eqn, axes)}:
            for a in eqn.inputs:
                if isinstance(a, Var) and a in self.active:
                    missing = {axes.difference(a.type.variance): source for axes, source in followed.items()}
                    self.wanted[a].update({axes: source for axes, source in missing.items() if axes})
        elif eqn.primitive is scan_p and (_lifts(eqn.params["body"]) or self._wanted_of(eqn)):
            linear, results = (
                [isinstance(a, Var) and a in self.active for a in eqn.inputs],
                [self.wanted[v] for v in eqn.outputs],
            )
            key = id(eqn), tuple(linear), tuple(map(frozenset, results))
            if key not in self.loops:
                self.loops[key] = _Loop.best(eqn, linear, self.scope, results, self.loops)
            self._ask_inner(eqn, self.loops[key])
        elif isinstance(eqn.primitive, Checkpoint) or (isinstance(eqn.primitive, Cond) and self.through == CHOICES):
            ((_, mask), *_) = _bodies(eqn, self.active)
            results = [self.wanted[v] for v in eqn.outputs]
            self._ask_inner(eqn, _Bodies(eqn, mask, self.scope, results, self.through, self.loops))

    def _ask_inner(self, eqn: Equation, inner: _Loop | _Bodies | None) -> None:
        if inner is None:
            return
        self.inner[id(eqn)] = inner
        for a, wanted in zip(eqn.inputs, inner.asked):
            if isinstance(a, Var) and a in self.active:
                self.wanted[a].update(wanted)

    def _follows(self, eqn: Equation, axes: frozenset) -> bool:
        """Whether a lift along axes is moved past an equation: along other axes than those of a collective."""
        p = eqn.primitive
        if self.through == NOTHING or p.has_body:
            return False
        if p in LIFTED and (len(_runs(eqn, axes)) == 1 or eqn.params.get("tiled")):
            return True
        return axes.isdisjoint(eqn.params["axes"]) if isinstance(p, Collective) else not p.on_ranks

    def _wanted_of(self, eqn: Equation) -> Wanted:
        return {axes: source for v in eqn.outputs for axes, source in self.wanted[v].items()}

    def tape(self) -> Tape:
        """The tape, without those of its inputs that are given lifted."""
        self.equations: list[Equation] = []
        self.names: dict[Var, Var] = {}  # what stands for a name of the old tape
        self.lifted: dict[tuple[Var | int, frozenset], Var] = {}
        for v in self.old.inputs:
            for axes, source in list(self.wanted[v].items()):
                if v in self.given:
                    self.lifted[v, axes] = Var(lifted_type(v.type, axes))
                else:
                    self._pbroadcast(v, axes, source)
        for eqn in self.old.equations:
            self._write(eqn)
        return prune_tape(Tape(self.old.inputs, self.equations, [self._name(a) for a in self.old.outputs]))

    def _write(self, eqn: Equation) -> None:
        if eqn.primitive is pbroadcast_p and _takes(eqn, self.active):
            ((x,), (out,)), axes = (eqn.inputs, eqn.outputs), frozenset(eqn.params["axes"])
            self.names[out] = self.lifted[x, axes]
            self.lifted.update({(out, more): self.lifted[x, axes.union(more)] for more in self.wanted[out]})
            return
        inner = self.inner.get(id(eqn))
        if inner is None:
            inputs = [self._name(a) for a in eqn.inputs]
            self.equations.append(Equation(eqn.primitive, inputs, eqn.params, eqn.outputs, eqn.source))
        else:
            self.equations.append(inner.written(self))
        for axes, source in self._wanted_of(eqn).items():
            if self._follows(eqn, axes):
                self._write_lifted(eqn, axes)
                continue
            for v in eqn.outputs:
                if axes in self.wanted[v] and (v, axes) not in self.lifted:
                    self._pbroadcast(v, axes, source)

    def _write_lifted(self, eqn: Equation, axes: frozenset) -> None:
        """An equation once more, of what is lifted."""
        outputs = [self.of(a, axes) for a in eqn.inputs]
        for primitive, params in _lifted_as(eqn, axes, self.scope):
            inputs, types = outputs, [a if is_scalar_constant(a) else _type(a) for a in outputs]
            outputs = [Var(t) for t in primitive.typecheck(types, params)]
            self.equations.append(Equation(primitive, inputs, params, outputs, eqn.source))
        self.lifted.update({(v, axes): new for v, new in zip(eqn.outputs, outputs)})

    def of(self, a: Atom, axes: frozenset) -> Atom:
        """An atom of the old tape, lifted."""
        if isinstance(a, ShapedArray):
            return lifted_type(a, axes)
        if is_scalar_constant(a):
            return a
        axes = axes.difference(_type(a).variance)
        if not axes:
            return self._name(a)
        key = _key(a), axes
        if key not in self.lifted and key[0] not in self.active:  # what nobody differentiates
            self._pbroadcast(a, axes, None)
        return self.lifted[key]

    def given_lifted(self, entries: Sequence[tuple[int, frozenset]]) -> list[Var]:
        """The inputs, by their numbers, that are given lifted (also if nobody needs them)."""
        pairs = [(self.old.inputs[k], axes) for k, axes in entries]
        return [self.lifted.get((v, axes)) or Var(lifted_type(v.type, axes)) for v, axes in pairs]

    def _pbroadcast(self, a: Atom, axes: frozenset, source: Location | None) -> None:
        t = _type(a)
        out = self.lifted[_key(a), axes] = Var(lifted_type(t, axes))
        params = along_those(self.scope, axes - t.variance).params
        self.equations.append(Equation(pbroadcast_p, [self._name(a)], params, [out], source))

    def _name(self, a: Atom) -> Atom:
        return self.names.get(a, a) if isinstance(a, Var) else a


def _lifted_as(eqn: Equation, axes: frozenset, scope: Scope) -> list[tuple[Primitive, dict]]:
    """What is done to lifted operands of an equation, one after the other, so that its results are lifted."""
    if eqn.primitive not in LIFTED:
        return [(eqn.primitive, eqn.params)]
    return [  # the last axes first: their blocks lie beside each other
        (LIFTED[eqn.primitive] if lifted else eqn.primitive, {**eqn.params, "axes": run, "size": size_of(scope, run)})
        for lifted, run in reversed(_runs(eqn, axes))
    ]


def _runs(eqn: Equation, axes: frozenset) -> list[tuple[bool, tuple[str, ...]]]:
    """The axes of a collective, in runs that are lifted along, or not."""
    return [(lifted, tuple(run)) for lifted, run in itertools.groupby(eqn.params["axes"], axes.__contains__)]


def _key(a: Atom) -> Var | int:
    """What an atom is known by: a name by itself; an array, which the tape of a `checkpoint` may hold, by its id."""
    return a if isinstance(a, Var) else id(a)


def _type(a: Atom) -> ShapedArray:
    return a if isinstance(a, ShapedArray) else atom_type(a)


# ---------------------------------------------------------------- loops, and choices


class _Loop:
    """A scan that takes, carries, and gives some values lifted as well.

    `asked` says of each operand along which axes; `results` said it of each result, as they are wanted, and `given` are
    those that there are. Carries are lifted before the loop if they are `carried`, else in each step.
    """

    def __init__(
        self,
        eqn: Equation,
        mask: Sequence[bool],
        scope: Scope,
        results: Sequence[Wanted],
        loops: dict,
        carried: bool,
        through: int,
    ):
        self.eqn, self.mask, self.scope, self.results = eqn, mask, scope, results
        self.n, self.m = eqn.params["consts"], eqn.params["carry"]
        body = eqn.params["body"]
        consts, carry, xs = cut(body.inputs, self.n, self.m)
        asked = [dict(wanted) if carried else {} for wanted in results[: self.m]]
        while True:
            wanted = [*asked, *results[self.m :]]
            raising = _Raising(body, mask, scope, through, [*consts, *(carry if carried else ()), *xs], wanted, loops)
            # What is asked already stays as it is: lines of the program may take turns, and this would never end.
            more = [{**(raising.wanted[v] if carried else {}), **old} for v, old in zip(carry, asked)]
            if more == asked:
                break
            asked = more
        self.asked = [raising.wanted[v] if v in raising.given else {} for v in body.inputs]
        for k, of_carry in enumerate(asked):
            self.asked[self.n + k] = of_carry
        self._write(raising, wanted)

    def _write(self, raising: _Raising, wanted: Sequence[Wanted]) -> None:
        """The body, with its inputs in their groups."""
        tape, old = raising.tape(), raising.old
        taken = _entries(self.asked)
        names = dict(zip(taken, raising.given_lifted(taken)))
        self.taken = [[e for e in taken if e[0] in group] for group in self._groups(len(old.inputs))]
        inputs = [
            [*[old.inputs[k] for k in g], *map(names.get, t)] for g, t in zip(self._groups(len(old.inputs)), self.taken)
        ]
        self.given = _entries(wanted)
        lifted = [raising.of(old.outputs[k], axes) for k, axes in self.given]
        carries = sum(k < self.m for k, _ in self.given)
        outputs = [*tape.outputs[: self.m], *lifted[:carries], *tape.outputs[self.m :], *lifted[carries:]]
        full = prune_tape(Tape([v for group in inputs for v in group], raising.equations, outputs))
        used, carried = names_used(full), set(inputs[1])
        self.keep = [v in used or v in carried for v in full.inputs]
        self.body = Tape(chosen(full.inputs, self.keep), full.equations, full.outputs)
        self.counts = {"consts": sum(self.keep[: len(inputs[0])]), "carry": len(inputs[1])}

    def _groups(self, count: int) -> list[range]:
        """The numbers of the operands that all steps share, of the carries, and of the arrays."""
        return [range(self.n), range(self.n, self.n + self.m), range(self.n + self.m, count)]

    def time(self) -> int:
        """How long the psums of its transpose take, with those of what must be lifted before it, or after it."""
        inputs = self.eqn.params["body"].inputs
        fixed = {v for v, yes in zip(inputs, self.mask) if not yes}
        around = [(_type(self.eqn.inputs[k]), axes) for k, axes in _entries(self.asked)]
        around += [
            (self.eqn.outputs[k].type, axes) for k, axes in _entries(self.results) if (k, axes) not in self.given
        ]
        steps = rounds(self.eqn) * _time(self.body, [v not in fixed for v in self.body.inputs])
        return steps + _time_of_lifts(around, self.scope)

    @staticmethod
    def best(
        eqn: Equation, linear: Sequence[bool], scope: Scope, results: Sequence[Wanted], loops: dict
    ) -> _Loop | None:
        """The loop that takes least time; None if that is the one that is there."""
        mask, carry = _linear_in_loop(eqn, linear)
        if not all(carry):
            return None
        ways = itertools.product((False, True), _worth_trying(eqn.params["body"]))
        best = min([_Loop(eqn, mask, scope, results, loops, *way) for way in ways], key=_Loop.time)
        after = [(v.type, axes) for v, wanted in zip(eqn.outputs, results) for axes in wanted]
        there = rounds(eqn) * _time(eqn.params["body"], mask) + _time_of_lifts(after, scope)
        return best if best.time() < there else None

    def written(self, raising: _Raising) -> Equation:
        """The equation, of names of another tape that is being written."""
        eqn, m = self.eqn, self.m
        inputs = []
        for group, taken in zip(self._groups(len(eqn.inputs)), self.taken):
            inputs += [raising._name(eqn.inputs[k]) for k in group]
            inputs += [raising.of(eqn.inputs[k], axes) for k, axes in taken]
        new = {(k, axes): Var(lifted_type(eqn.outputs[k].type, axes)) for k, axes in self.given}
        raising.lifted.update({(eqn.outputs[k], axes): v for (k, axes), v in new.items()})
        carried, others = [v for (k, _), v in new.items() if k < m], [v for (k, _), v in new.items() if k >= m]
        outputs = [*eqn.outputs[:m], *carried, *eqn.outputs[m:], *others]
        params = {**eqn.params, "body": self.body, **self.counts}
        return Equation(eqn.primitive, chosen(inputs, self.keep), params, outputs, eqn.source)


class _Bodies:
    """What runs one of its bodies, once: a choice, or what is computed once more (`checkpoint`).

    They take, and give, some values lifted as well: `asked` says it of each operand.
    """

    def __init__(
        self, eqn: Equation, mask: Sequence[bool], scope: Scope, results: Sequence[Wanted], through: int, loops: dict
    ):
        self.eqn, self.results = eqn, results
        self.bodies = {
            name: _Raising(tape, mask, scope, through, tape.inputs, results, loops)
            for name, tape in eqn.params.items()
            if isinstance(tape, Tape)
        }
        inputs = zip(*[[r.wanted[v] for v in r.old.inputs] for r in self.bodies.values()])
        self.before = len(eqn.inputs) - len(mask)  # that which chooses is an operand of none
        self.asked: list[Wanted] = [{}] * self.before
        self.asked += [{a: s for w in wanted for a, s in w.items()} for wanted in inputs]

    def written(self, raising: _Raising) -> Equation:
        """The equation, of names of another tape that is being written."""
        eqn, taken, given = self.eqn, _entries(self.asked[self.before :]), _entries(self.results)
        inputs = [raising._name(a) for a in eqn.inputs]
        inputs += [raising.of(eqn.inputs[self.before + k], axes) for k, axes in taken]
        new = [Var(lifted_type(eqn.outputs[k].type, axes)) for k, axes in given]
        raising.lifted.update({(eqn.outputs[k], axes): v for (k, axes), v in zip(given, new)})
        params = dict(eqn.params)
        for name, body in self.bodies.items():
            outputs = body.tape().outputs + [body.of(body.old.outputs[k], axes) for k, axes in given]
            names = [*body.old.inputs, *body.given_lifted(taken)]
            params[name] = prune_tape(Tape(names, body.equations, outputs))
        return Equation(eqn.primitive, inputs, params, [*eqn.outputs, *new], eqn.source)


def _entries(wanted: Sequence[Wanted]) -> list[tuple[int, frozenset]]:
    return [(k, axes) for k, of_one in enumerate(wanted) for axes in of_one]
