"""Hoist pbroadcasts out of loops: their transposes then sum once, after the loop.

The transpose of a `pbroadcast` is a `psum`, so a `pbroadcast` in the body of a loop becomes a psum in each step. In a
linear tape, hoist a `pbroadcast` from the body of a `scan`

- if its operand is a constant of the loop, or computed from constants alone (hoist that computation too);
- if its operand is an element of a scanned array: broadcast the whole array, and scan over the result;
- if its operand is computed from elements and constants by linear operations: these commute with a cast, so
  `pbroadcast(w[k])` is `pbroadcast(w)[k]`. The sum is then of all that is cast; unless it is long, and longer than the
  sums of all steps;
- if it is in a branch of a `cond` in the loop, and its operand is such a value.

A `pbroadcast` of an input of a `checkpoint` moves before the `checkpoint`. There is one per value and axes. A carry
changes from step to step, so its pbroadcasts stay. Without a loop, casts of several values that are computed from the
same inputs become casts of these.

Source: loop-invariant code motion, a standard compiler optimization.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from collectives.casts import cast_type
from collectives.ops import pbroadcast_p, reduced_p
from minidiff.control_flow.checkpoint import Checkpoint
from minidiff.control_flow.cond import Cond
from minidiff.control_flow.dead_code import needed_equations, prune_tape
from minidiff.control_flow.loops import scan_p
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.types import ShapedArray, Var
from minidiff.values.lists import split_list

#: The casts that transpose to a `psum`.
HOISTED = (pbroadcast_p, reduced_p)
SHORT_MESSAGE = 1 << 16  # a message of this many bytes takes about as long as one of a single number

Sources = frozenset[Var] | None


def hoist_pbroadcasts(tape: Tape) -> Tape:
    """Move pbroadcasts before loops and checkpoints; return the tape itself if there is none to move."""
    inputs = {*tape.inputs}
    computed = [e.inputs for e in tape.equations if e.primitive in HOISTED and e.inputs[0] not in inputs]
    in_bodies = any(_is_rewritten(e, False) for e in tape.equations if e.primitive.is_higher_order)
    if len(computed) < 2 and not in_bodies:
        return tape
    uses: Counter[Var] = Counter()
    fits = lambda sources, x: all(uses[v] > 1 for v in sources)  # noqa: E731
    hoisting = Hoisting(tape, [frozenset({v}) for v in tape.inputs], fits)
    for eqn in tape.equations:
        hoisting.define(eqn)
        if eqn.primitive in HOISTED:
            uses.update(hoisting.sources_of(eqn.inputs[:1]) or ())
    hoisting.defined.clear()
    sources = map(hoisting.sources_of, computed)
    return hoisting.rewrite() if in_bodies or any(s and fits(s, None) for s in sources) else tape


def _is_rewritten(eqn: Equation, in_loop: bool) -> bool:
    """Return whether a body of an equation has a pbroadcast that may move: not in a branch outside of loops."""
    return (in_loop or not isinstance(eqn.primitive, Cond)) and _has_pbroadcast(eqn)


def _has_pbroadcast(eqn: Equation) -> bool:
    """Return whether the body of a loop or a checkpoint, or a branch, has a pbroadcast."""
    return any(e.primitive in HOISTED or _has_pbroadcast(e) for body in _bodies(eqn).values() for e in body.equations)


def _bodies(eqn: Equation) -> dict[str, Tape]:
    inside = eqn.primitive is scan_p or isinstance(eqn.primitive, (Cond, Checkpoint))
    return {name: x for name, x in eqn.params.items() if isinstance(x, Tape)} if inside else {}


class Hoisting:
    """A tape whose casts move to its inputs, and from there out of the equation, if any, whose body it is.

    `sources` has, for each value, the inputs that it is computed from by linear operations, and None if its casts stay
    where they are. `fits(sources, x)` says whether a cast of x is worth those of its sources.
    """

    in_loop = False
    constants: frozenset[Var] = frozenset()  # of a loop: what is computed from them alone is computed before it
    elements: frozenset[Var] = frozenset()

    def __init__(
        self, tape: Tape, sources: Sequence[Sources], fits: Callable, outer: Any = None, operands: Sequence = ()
    ):
        self.tape, self.fits, self.outer = tape, fits, outer
        self.sources: dict[Var, Any] = dict(zip(tape.inputs, sources))
        self.outside: dict[Var, Atom] = dict(zip(tape.inputs, operands or tape.inputs))  # values outside of the body
        self.definitions: dict[Var, Equation] = {}
        self.defined: list[Equation] = []
        self.casts: dict[tuple, dict[Var, Var]] = defaultdict(dict)  # a cast and its axes -> a value -> its cast
        self.added: dict[tuple[Var, bool], Var] = {}  # a value outside, and whether it is scanned -> the body's input
        self.equations: list[Equation] = []

    def rewrite(self) -> Tape:
        """Return the tape with its casts moved, without the inputs that were `added`."""
        names: dict[Var, Var] = {}
        for eqn in self.tape.equations:
            inputs = [names.get(a, a) if isinstance(a, Var) else a for a in eqn.inputs]
            eqn = Equation(eqn.primitive, inputs, eqn.params, eqn.outputs, eqn.source)
            if eqn.primitive in HOISTED and isinstance(inputs[0], Var):
                names[eqn.outputs[0]] = self.cast(inputs[0], eqn)
                continue
            self.equations.append(self._rewrite_bodies(eqn) if _is_rewritten(eqn, self.in_loop) else eqn)
            self.define(eqn)
        outputs = [names.get(a, a) if isinstance(a, Var) else a for a in self.tape.outputs]
        return prune_tape(Tape(self.tape.inputs, self.equations, outputs))

    def define(self, eqn: Equation) -> None:
        """Record the sources of an equation's results: on a linear tape, operations are linear."""
        p = eqn.primitive
        is_moved = not (p.is_higher_order or p.on_ranks or (len(eqn.outputs) > 1 and not p.is_view))
        self.sources.update(dict.fromkeys(eqn.outputs, self.sources_of(eqn.inputs) if is_moved else None))
        self.definitions.update(dict.fromkeys(eqn.outputs, eqn))
        self.defined.append(eqn)

    def sources_of(self, atoms: Sequence[Atom]) -> Sources:
        each: list[Any] = [self.sources.get(a) for a in atoms if isinstance(a, Var)]
        return None if None in each else frozenset().union(*each)

    def emit(self, eqn: Equation, types: Sequence[ShapedArray]) -> list[Var]:
        """Add an equation with results of these types."""
        results = list(map(Var, types))
        self.equations.append(Equation(eqn.primitive, eqn.inputs, eqn.params, results, eqn.source))
        self.define(self.equations[-1])
        return results

    def cast(self, x: Var, eqn: Equation) -> Var:
        """Return the cast of `x`, as the equation `eqn` casts: as far outside as it can be taken."""
        key = eqn.primitive, frozenset(eqn.params["axes"])
        casts, sources, definition = self.casts[key], self.sources.get(x), self.definitions.get(x)
        if x in casts:
            return casts[x]
        if definition is not None and definition.primitive.is_view and isinstance(definition.inputs[0], Var):
            self._cast_results(definition, eqn)
        elif sources and x not in self.outside and sources <= self.constants:
            for e in needed_equations(self.defined, [x], known=self.outside)[0]:
                inputs = [self.outside[a] if isinstance(a, Var) else a for a in e.inputs]
                moved = Equation(e.primitive, inputs, e.params, e.outputs, e.source)
                self.outside.update(zip(e.outputs, self.outer.emit(moved, [v.type for v in e.outputs])))
            casts[x] = self._cast_outside(x, eqn)
        elif sources and x not in self.outside and self.fits(sources, x):
            for e in needed_equations(self.defined, [x], known={*casts, *self.outside})[0]:
                self._cast_results(e, eqn)
        elif sources is not None and x in self.outside and self.outer and isinstance(self.outside[x], Var):
            casts[x] = self._cast_outside(x, eqn)
        else:
            cast = Equation(eqn.primitive, [x], eqn.params, [x], eqn.source)
            casts[x] = self.emit(cast, [cast_type(x.type, *key)])[0]
        return casts[x]

    def _cast_results(self, definition: Equation, eqn: Equation) -> None:
        """Compute the casts of an equation's results from casts of its operands."""
        key = eqn.primitive, frozenset(eqn.params["axes"])
        in_types = [cast_type(a, *key) if isinstance(a, ShapedArray) else a for a in definition.inputs]
        inputs = [self.cast(a, eqn) if isinstance(a, Var) else a for a in in_types]
        moved = Equation(definition.primitive, inputs, definition.params, definition.outputs, definition.source)
        results = self.emit(moved, [cast_type(v.type, *key) for v in definition.outputs])
        self.casts[key].update(zip(definition.outputs, results))

    def _cast_outside(self, x: Var, eqn: Equation) -> Var:
        """Cast the value outside of the body, and let the body take that."""
        value, is_element = self.outer.cast(self.outside[x], eqn), x in self.elements
        if (value, is_element) not in self.added:
            v = Var(cast_type(x.type, eqn.primitive, eqn.params["axes"]))
            self.added[value, is_element], self.outside[v], self.sources[v] = v, value, self.sources[x]
            if is_element:
                self.elements |= {v}
            elif self.sources[x] <= self.constants:
                self.constants |= {v}
        return self.added[value, is_element]

    # ------------------------------------------------ bodies

    def _rewrite_bodies(self, eqn: Equation) -> Equation:
        """Hoist casts from the bodies of an equation, which then take further operands."""
        inside = {name: self._inside(eqn, body) for name, body in _bodies(eqn).items()}
        tapes = {name: hoisting.rewrite() for name, hoisting in inside.items()}
        added = dict.fromkeys(key for hoisting in inside.values() for key in hoisting.added)
        counts = (eqn.params["consts"], eqn.params["carry"]) if eqn.primitive is scan_p else (len(eqn.inputs), 0)

        def operands(atoms: Sequence[Atom], new: Sequence[Atom]) -> list[Atom]:
            consts, carry, xs = split_list(atoms, *counts)
            of_steps = [x for x, (_, is_element) in zip(new, added) if is_element]
            return [*consts, *[x for x, (_, is_element) in zip(new, added) if not is_element], *carry, *xs, *of_steps]

        for name, hoisting in inside.items():
            new = [hoisting.added.get(key) or Var(key[0].type) for key in added]
            tapes[name] = Tape(operands(tapes[name].inputs, new), tapes[name].equations, tapes[name].outputs)
        params = {**eqn.params, **tapes}
        if eqn.primitive is scan_p:
            params["consts"] += sum(not is_element for _, is_element in added)
        inputs = operands(eqn.inputs, [value for value, _ in added])
        eqn = Equation(eqn.primitive, inputs, params, eqn.outputs, eqn.source)
        return eqn.primitive.without_unused_results(eqn, [True] * len(eqn.outputs))

    def _inside(self, eqn: Equation, body: Tape) -> Hoisting:
        """Return the hoisting of a body of an equation."""
        if isinstance(eqn.primitive, Cond):
            sources = [self.sources_of([a]) for a in eqn.inputs[1:]]
            pairs = zip(sources, eqn.inputs[1:])
            sources = [s if s and (a in self.outside or self.fits(s, a)) else None for s, a in pairs]
            hoisting = Hoisting(body, sources, self.fits, self, eqn.inputs[1:])
        elif isinstance(eqn.primitive, Checkpoint):
            hoisting = Hoisting(body, [frozenset({v}) for v in body.inputs], self.fits, self, eqn.inputs)
        else:
            n, m, length = (eqn.params[name] for name in ("consts", "carry", "length"))
            fits = lambda sources, x: _nbytes(sources) <= max(SHORT_MESSAGE, length * x.type.nbytes)  # noqa: E731
            sources = [None if n <= k < n + m else frozenset({v}) for k, v in enumerate(body.inputs)]
            hoisting = Hoisting(body, sources, fits, self, eqn.inputs)
            hoisting.constants, hoisting.elements = frozenset(body.inputs[:n]), frozenset(body.inputs[n + m :])
        hoisting.in_loop = self.in_loop or eqn.primitive is scan_p
        return hoisting


def _nbytes(values: frozenset[Var]) -> int:
    return sum(v.type.nbytes for v in values)
