"""Search for the partition specs of a program's values: `spmd.plan(f, machine, search="specs", mesh=mesh)`.

A strategy of an operation has a spec for each of its operands, with which it takes them as they are: each mesh axis
splits one dimension of an operand, or none. The sharding rules say which specs the results have, and what ranks
communicate. Each value has a spec, too: it is resharded to that once, where it is computed, and from that for each
operation that takes it in another one.

The time of a program is the sum of the times of its operations, one after the other, and of all resharding. It is a
function of the strategies and specs, a sum of terms that depend on one or two of them each. So its minimum is found by
eliminating one after the other. On a chain of operations this finds the shortest path.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.api.recording import make_tape, stage_flat
from minidiff.compiler.simplify import key_part
from minidiff.core.tape import Equation, Tape, evaluate_equation, read
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.errors.tracebacks import hide_own_frames_of_lambda
from minidiff.values.aliasing import types_alone
from spmd.arrays.reshard import distribute
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import WHOLE, PartitionSpec, part_count
from spmd.prices.machine import Machine
from spmd.prices.walk import Walk
from spmd.sharding.sharded_array import Sharding, with_sharding
from spmd.sharding.sharding_rules import plan_of
from spmd.show import Table, show_nbytes, show_seconds

#: The most entries of a term, which has one for each combination of its variables' options.
CAPACITY = 2**24
#: Seconds of a step, besides its own: of plans that take equally long, the one with the fewest steps is the best.
TIE = 1e-12


class PlanStep(NamedTuple):
    """An operation under a strategy, or the resharding of a value: its specs, its seconds, and what it communicates."""

    operation: str
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    seconds: float
    collectives: tuple[str, ...]


class SpecPlan(Table):
    """The specs with which a program takes the least time: a table to print, and a function to call.

    Called with arrays, it runs the program: it distributes the arguments by `in_specs`, applies operations and reshards
    values as `steps` says. The results have `out_specs`. `seconds` is the time of all steps, and `memory` the bytes of
    the arguments' blocks on a rank.
    """

    def __init__(self, tape: Tape, mesh: Mesh, chosen: Mapping, specs: Sequence, steps: Sequence, memory: int):
        self.tape, self.mesh, self.chosen, self.steps, self.memory = tape, mesh, chosen, steps, memory
        self.in_specs, self.out_specs = specs
        self.seconds = math.fsum(step.seconds for step in steps)
        show = lambda values: ", ".join(map(str, values))  # noqa: E731
        rows = [[s[0], show(s[1]), show(s[2]), show_seconds(s[3]), show(s[4])] for s in steps]
        header = ["operation", "operands", "results", "seconds", "communicates"]
        super().__init__(header, rows, ["total", "", "", show_seconds(self.seconds), ""])
        self.notes = [f"arguments of a rank: {show_nbytes(memory)}"]

    def __call__(self, *args: Any) -> Any:
        env = dict(zip(self.tape.inputs, tree.leaves(distribute(args, self.mesh, self.in_specs))))
        for eqn in self.tape.equations:
            specs = zip(_operands(eqn), self.chosen[eqn].in_specs)
            inside = {v: Sharding(self.mesh, spec).reshard(env[v]) for v, spec in specs}
            evaluate_equation(eqn, inside)
            env.update((v, Sharding(self.mesh, self.chosen[v]).reshard(inside[v])) for v in eqn.outputs)
        return tree.unflatten(tree.structure(self.out_specs), [read(env, a) for a in self.tape.outputs])


def plan_specs(f: Callable, machine: Machine, mesh: Mesh, memory: float) -> Callable[..., SpecPlan]:
    """Return a function of arguments, or of their types, that finds the best specs of `f`: see `spmd.plan`."""

    def search(*args: Any) -> SpecPlan:
        whole = tree.map(lambda x: ShapedArray(typeof(x).shape, typeof(x).dtype), args)
        tape, *structures = stage_flat(f, whole, "plan")
        with types_alone():
            options = _Options(mesh, machine, tape, [typeof(x).sharding for x in tree.leaves(args)])
            moves = [*options.moves()]
        seconds = lambda rows: numpy.array([[sum(s.seconds + TIE for s in x) for x in row] for row in rows])  # noqa: E731
        terms = [(pair, seconds(rows)) for pair, rows in moves]
        nbytes = {v: [v.type.nbytes // part_count(s.axes, mesh.shape) for s in options.of[v]] for v in tape.inputs}
        used = lambda best: sum(sizes[best[v]] for v, sizes in nbytes.items())  # noqa: E731
        best = minimum(terms)
        if used(best) > memory:
            best = minimum([*terms, *limit(memory, nbytes)])
        steps = [step for (x, y), rows in moves for step in rows[best[x]][best[y]]]
        chosen = {x: entries[best[x]] for x, entries in options.of.items()}
        specs = [[chosen[a] if isinstance(a, Var) else WHOLE for a in atoms] for atoms in (tape.inputs, tape.outputs)]
        return SpecPlan(tape, mesh, chosen, [*map(tree.unflatten, structures, specs)], steps, used(best))

    return hide_own_frames_of_lambda(search)


def _operands(eqn: Equation) -> list[Var]:
    """Return the variables among the operands of an equation, each once."""
    return [*dict.fromkeys(a for a in eqn.inputs if isinstance(a, Var))]


class _Options:
    """The specs of each value of a program, and the strategies of each equation, with their seconds on a machine."""

    def __init__(self, mesh: Mesh, machine: Machine, tape: Tape, shardings: Sequence[Sharding | None]):
        self.mesh, self.costs, self.tape, self.cache = mesh, machine.on(mesh.shape).costs, tape, dict[tuple, PlanStep]()
        values = itertools.chain(tape.inputs, *[eqn.outputs for eqn in tape.equations])
        self.of: dict[Any, Sequence[Any]] = {v: self.specs(v.type) for v in values}
        self.of.update((v, [x.spec]) for v, x in zip(tape.inputs, shardings) if x and mesh.is_like(x.mesh))
        self.of.update((eqn, self.strategies(eqn)) for eqn in tape.equations)

    def specs(self, t: ShapedArray) -> list[PartitionSpec]:
        """Return the specs of an array: each axis splits one dimension, or none."""
        sizes = {axis: n for axis, n in self.mesh.shape.items() if n > 1}
        splits = itertools.product([None, *range(t.ndim)], repeat=len(sizes))
        dims = [[tuple(a for a, at in zip(sizes, split) if at == d) for d in range(t.ndim)] for split in splits]
        divides = lambda each: not any(n % part_count(axes, sizes) for n, axes in zip(t.shape, each))  # noqa: E731
        return [PartitionSpec.of_dims(each) for each in dims if divides(each)]

    def strategies(self, eqn: Equation) -> list[PlanStep]:
        """Return the strategies of an equation: without a rule, the one with whole operands."""
        operands, has_rule = _operands(eqn), eqn.primitive.sharding is not None and not eqn.primitive.has_effect
        atoms = [(operands.index(a), a.type) if isinstance(a, Var) else id(a) for a in eqn.inputs]
        key = eqn.primitive.name, eqn.primitive, *atoms, key_part(eqn.params)
        one = Tape(operands, [eqn], eqn.outputs)
        every = itertools.product(*[self.specs(v.type) if has_rule else [WHOLE] for v in operands])
        fits = [specs for specs in every if not has_rule or self.fits(eqn, dict(zip(operands, specs)))]
        return [self.step(key, one.apply, one.in_types, specs) for specs in fits]

    def fits(self, eqn: Equation, specs: Mapping[Var, PartitionSpec]) -> bool:
        """Return whether an operation takes operands with these specs as they are, by its rule."""
        types = [a.type if isinstance(a, Var) else a for a in eqn.inputs]
        dims = [(specs[a] if isinstance(a, Var) else WHOLE).dims(typeof(a).ndim) for a in eqn.inputs]
        routes = plan_of(eqn.primitive, types, dims, eqn.params, self.mesh.shape).routes
        return not any(route for a, route in zip(eqn.inputs, routes) if isinstance(a, Var))

    def step(self, key: tuple, run: Callable, types: Sequence[ShapedArray], specs: tuple) -> PlanStep:
        """Record an operation on types with these specs, and price it. Its `key`, its name first, says which it is."""
        if (key, specs) not in self.cache:
            tape = make_tape(run)(*[with_sharding(t.update(), self.mesh, spec) for t, spec in zip(types, specs)])
            cost = Walk(self.costs, overlap=False, fused=False, kernels=False).price(tape)
            out_specs = tuple(t.sharding.spec if t.sharding else WHOLE for t in tape.out_types)
            sends = tuple(category.kind for category in cost.entries if category.axes)
            self.cache[key, specs] = PlanStep(key[0], specs, out_specs, cost.seconds, sends)
        return self.cache[key, specs]

    def reshard(self, t: ShapedArray, have: PartitionSpec, want: PartitionSpec) -> list[PlanStep]:
        """Return the step between two specs, or none if they are equal."""
        run = Sharding(self.mesh, want).reshard
        return [self.step(("reshard", t, want), run, [t], (have,))] if have != want else []

    def moves(self) -> Iterator[tuple[tuple[Any, Any], list[list[list[PlanStep]]]]]:
        """Yield pairs of a value and an equation, with the steps between them for each of their options.

        An equation's own step precedes those from its first result.
        """
        for eqn in self.tape.equations:
            some = self.of[eqn]
            for k, v in enumerate(_operands(eqn)):
                yield (v, eqn), [[self.reshard(v.type, x, s.in_specs[k]) for s in some] for x in self.of[v]]
            for k, v in enumerate(eqn.outputs):
                yield (eqn, v), [[[s][k:] + self.reshard(v.type, s.out_specs[k], x) for x in self.of[v]] for s in some]


def minimum(terms: Sequence[tuple[Sequence, numpy.ndarray]]) -> dict[Hashable, int]:
    """Return the option of each variable with which the sum of all terms is smallest.

    To eliminate a variable, replace the terms that it is in by their sum, minimized over its options: a term of the
    other variables in them. The next variable is always the one for which this sum has fewest entries. Raises
    ValueError if these are more than `CAPACITY`.

    >>> from_a_to_b, from_b_to_c = numpy.array([[1.0, 9.0], [0.0, 9.0]]), numpy.array([[9.0, 5.0], [1.0, 2.0]])
    >>> dict(minimum([("ab", from_a_to_b), ("bc", from_b_to_c)]))
    {'c': 1, 'b': 0, 'a': 1}

    Source: Bertelè and Brioschi, "Nonserial dynamic programming".
    """
    eliminated = []
    while any(variables for variables, _ in terms):
        near: dict[Hashable, dict] = defaultdict(dict)
        for v, (variables, cost) in [(v, term) for term in terms for v in term[0]]:
            near[v].update(zip(variables, cost.shape))
        entries = {v: math.prod(sizes.values()) for v, sizes in near.items()}
        v = min(entries, key=entries.__getitem__)
        if entries[v] > CAPACITY:
            raise ValueError(f"plan: {entries[v]:,} combinations of specs are too many: plan a part of the function")
        *others, _ = around = (*[u for u in near[v] if u != v], v)
        grid = dict(zip(around, numpy.ix_(*[range(near[v][u]) for u in around])))
        total = sum(cost[tuple(grid[u] for u in variables)] for variables, cost in terms if v in variables)
        terms = [*[term for term in terms if v not in term[0]], (others, total.min(-1))]
        eliminated.append((v, others, total.argmin(-1)))
    best: dict[Hashable, int] = defaultdict(int)
    for v, others, option in reversed(eliminated):
        best[v] = int(option[tuple(best[u] for u in others)])
    return best


def limit(memory: float, nbytes: Mapping[Hashable, Sequence[int]]) -> Iterator[tuple[tuple, numpy.ndarray]]:
    """Yield terms that are infinite where values need more memory than there is, each the bytes of one of its options.

    The variable k is the memory that is left for the values from the k-th on, as far as they can use it.
    """
    least, most = (sum(map(extreme, nbytes.values())) for extreme in (min, max))
    if least > memory:
        raise ValueError(f"plan: the arguments need {show_nbytes(least)} or more on a rank; take a mesh of more ranks")
    left = numpy.array([memory])
    for k, (v, sizes) in enumerate(nbytes.items()):
        most -= max(sizes)
        after = numpy.minimum(numpy.subtract.outer(left, sizes), most)
        left = numpy.unique(after[after >= 0])
        yield (k, v, k + 1), numpy.where(after[..., None] == left, 0.0, math.inf)
