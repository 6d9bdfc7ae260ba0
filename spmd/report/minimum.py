"""The least that a rank must send for each line of a program.

The operations of a line are a function from the values on ranks that it takes to those that it gives. `minidiff.sparse`
says which numbers of the one depend on which numbers of the other. A rank must send what results on other ranks depend
on: either its numbers, or one partial result for each of these, whichever is fewer. So an elementwise operation sends
nothing, a shift the edge, a sum one number for each result, and a change of sharding all that another rank has next.

All pairs of numbers are counted, so a line with more than `LARGEST` has no minimum.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from collectives.backends.base import Axes, coordinates_of
from minidiff.control_flow.loops import run_count
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.errors.location import Location, lines_of
from minidiff.ops.base import Linear
from minidiff.ops.dimensions import gather
from minidiff.sparse.pattern import Dependence, Pattern, PatternWalk, dependence_by_labels, dependences
from minidiff.values.dtypes import is_differentiable
from spmd.mesh.mesh import Mesh, make_mesh
from spmd.prices.messages import Communication
from spmd.prices.work import work_of_equation
from spmd.shard_map.fuse_shard_maps import fuse_shard_maps
from spmd.shard_map.lowering import OnArrays
from spmd.shard_map.operation import shard_map_p

LARGEST = 1 << 22  # pairs of numbers of a line, of which one depends on the other
INCLUDES_ITS_OWN = frozenset({"all_to_all", "psum_scatter"})  # a part of the operand stays on the rank


def add_minimum(report: Communication, tape: Tape) -> Communication:
    """Add the least bytes of each line to a report on the tape."""
    least, seen, numbers = least_bytes(tape), set[Any](), list[int | None]()
    for row in report.rows:
        lines = [line for line in row.lines if line not in seen]
        seen.update(lines)
        if not lines:
            continue
        by_line = [least.get(line) for line in lines]
        rows = [other for other in report.rows if {*other.lines} & {*lines}]
        sent = sum(other.bytes for other in rows)
        needed = None if None in by_line else sum(n for n in by_line if n is not None)
        if needed is not None:
            stays = any(other.collective in INCLUDES_ITS_OWN for other in rows)
            row.minimum = sent if needed >= sent * (1 - stays / row.ranks) else needed
            row.ratio = sent / row.minimum if row.minimum else None
        numbers.append(row.minimum)
    report.shows_minimum = True
    report.minimum = None if None in numbers else sum(n for n in numbers if n is not None)
    return report


def least_bytes(tape: Tape) -> dict[Location | None, int | None]:
    """Return the least bytes for each line that communicates; None if there are too many numbers to tell."""
    least: dict[Location | None, int | None] = defaultdict(int)
    for body, mesh, runs in _bodies(tape, None, 1):
        groups: dict[Location | None, list[Equation]] = defaultdict(list)
        for eqn in body.equations:
            groups[lines_of(eqn.source)[0]].append(eqn)
        for line, group in groups.items():
            if any(eqn.primitive.sends(eqn.params) for eqn in group):
                part = _part(body, [eqn for eqn in group if not (eqn.bodies or eqn.primitive.has_effect)])
                fits = mesh.size * sum(map(_count_pairs, part.equations)) <= LARGEST
                before = least[line]
                least[line] = before + runs * _least(part, mesh) if fits and before is not None else None
    return least


def _bodies(tape: Tape, mesh: Mesh | None, runs: int) -> Iterator[tuple[Tape, Mesh, int]]:
    """Yield bodies that run on ranks, with their mesh, and how often they run."""
    tape = fuse_shard_maps(tape)
    if mesh is not None:
        yield tape, mesh, runs
    for eqn in tape.equations:
        inside = mesh
        if eqn.primitive is shard_map_p:
            inside = eqn.params["mesh"] if eqn.params["check_rep"] else None
        for body in eqn.bodies:
            yield from _bodies(body, inside, runs * run_count(eqn))


def _count_pairs(eqn: Equation) -> int:
    """Return about how many pairs of numbers an equation relates."""
    return max(work_of_equation(eqn).flops, *[typeof(a).size for a in (*eqn.inputs, *eqn.outputs)])


def _part(body: Tape, group: Sequence[Equation]) -> Tape:
    """Return the tape of some equations of a body: from what they take to what others use."""
    results, chosen = {v for eqn in group for v in eqn.outputs}, set(map(id, group))
    taken = dict.fromkeys(a for eqn in group for a in eqn.inputs if isinstance(a, Var) and a not in results)
    others = [a for eqn in body.equations if id(eqn) not in chosen for a in eqn.inputs]
    used = dict.fromkeys(a for a in (*others, *body.outputs) if isinstance(a, Var) and a in results)
    return Tape([*taken], [*group], [*used])


class ValueWalk(PatternWalk):
    """A walk for values, which also depend on operands in which the derivative is zero."""

    def follow_operation(self, equation: Equation, operands: Sequence[Any]) -> list[Pattern]:
        pairs: list[list] = [[] for _ in equation.outputs]
        for i, x in enumerate(operands):
            if isinstance(x, Pattern) and len(x.columns):
                for n, dependence in enumerate(_dependences(equation, i, operands)):
                    if dependence is not None:
                        pairs[n].append(x.through(dependence))
        return [self.independent.union(some, v.type.size) for some, v in zip(pairs, equation.outputs)]


def _dependences(equation: Equation, i: int, operands: Sequence[Any]) -> Iterator[Dependence | None]:
    """Yield how each result depends on the values of operand `i`."""
    types = [typeof(a) for a in equation.inputs]
    is_moved = equation.primitive.moves is not None or isinstance(equation.primitive, Linear)
    if is_moved and all(is_differentiable(t.dtype) for t in (types[i], *[v.type for v in equation.outputs])):
        yield from dependences(equation, i, operands)
        return
    outs = [v.type for v in equation.outputs]
    rule = equation.primitive.sharding or gather
    dimensions = rule(types, outs, equation.params)
    for t, labels in zip(outs, dimensions.results):
        yield dependence_by_labels(t, types[i], labels, dimensions.operands[i])


def _least(part: Tape, mesh: Mesh) -> int:
    """Return the bytes of the rank that must send most, for the results of a part of a body."""
    simulated = make_mesh(tuple(mesh.shape.values()), tuple(mesh.shape), backend="simulated")
    ranks = simulated.ranks
    ranks.one_copy = True  # of what a gather gives: the ranks' results from it are the same
    axes = [ranks.sort_axes(v.type.states.varying_or_unreduced) for v in part.inputs]
    data = [ShapedArray((*[ranks.size(a)] * bool(a), *v.type.shape), v.type.dtype) for v, a in zip(part.inputs, axes)]
    tape, variances = OnArrays(simulated, True).record(part, list(zip(data, axes)), [None] * len(axes))
    starts = numpy.cumsum([0, *[t.size for t in data]])
    walk = ValueWalk(int(starts[-1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of operations without a rule
        patterns = walk.follow(tape, [walk.inputs(start, t) for start, t in zip(starts, data)])
    outs = [(x, t, a) for x, t, (a, _) in zip(patterns, tape.out_types, variances) if isinstance(x, Pattern)]
    if not outs:
        return 0
    held = _coordinates(data, axes, mesh)
    wanted = _coordinates([t for _, t, _ in outs], [a for *_, a in outs], mesh)
    begins = numpy.cumsum([0, *[t.size for _, t, _ in outs]])
    rows = numpy.concatenate([x.rows + begin for (x, *_), begin in zip(outs, begins)])
    columns = numpy.concatenate([x.columns for x, *_ in outs])
    sent = ((held[columns] >= 0) & (held[columns] != wanted[rows])).any(axis=1)
    rows, columns = rows[sent], columns[sent]
    sizes = _itemsizes([t for _, t, _ in outs])[rows], _itemsizes(data)[columns]
    by_rank = []
    for rank in range(mesh.size):
        place = numpy.array([*coordinates_of(rank, mesh.shape).values()])
        here = ((held[columns] < 0) | (held[columns] == place)).all(axis=1)
        by_rank.append(_fewer_bytes(rows[here], columns[here], sizes[0][here], sizes[1][here]))
    return max(by_rank)


def _coordinates(types: Sequence[ShapedArray], axes: Sequence[Axes], mesh: Mesh) -> numpy.ndarray:
    """Return the coordinates of the ranks that have each number: -1 along an axis if all have it."""
    parts = []
    for t, varying in zip(types, axes):
        part = numpy.full((t.size, len(mesh.shape)), -1)
        sizes = tuple(mesh.shape[a] for a in varying)
        count = math.prod(sizes)
        blocks = numpy.repeat(numpy.arange(count), t.size // count)
        for axis, index in zip(varying, numpy.unravel_index(blocks, sizes) if varying else ()):
            if mesh.shape[axis] > 1:
                part[:, mesh.axis_names.index(axis)] = index
        parts.append(part)
    return numpy.concatenate(parts)


def _itemsizes(types: Sequence[ShapedArray]) -> numpy.ndarray:
    return numpy.repeat([t.dtype.itemsize for t in types], [t.size for t in types])


def _fewer_bytes(
    rows: numpy.ndarray, columns: numpy.ndarray, row_sizes: numpy.ndarray, column_sizes: numpy.ndarray
) -> int:
    """Return the bytes of rows or of columns, whichever are fewer, for each part of these pairs that is connected."""
    rows, row_sizes = _numbered(rows, row_sizes)
    columns, column_sizes = _numbered(columns, column_sizes)
    labels = numpy.arange(len(column_sizes))
    while True:
        of_rows = numpy.full(len(row_sizes), len(labels))
        numpy.minimum.at(of_rows, rows, labels[columns])
        after = labels.copy()
        numpy.minimum.at(after, columns, of_rows[rows])
        if numpy.array_equal(after, labels):
            break
        labels = after
    by_part = [numpy.bincount(x, sizes, len(labels)) for x, sizes in ((of_rows, row_sizes), (labels, column_sizes))]
    return int(numpy.minimum(*by_part).sum())


def _numbered(elements: numpy.ndarray, sizes: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Number elements from 0 on; return the numbers, and the size of each element."""
    _, first, numbers = numpy.unique(elements, return_index=True, return_inverse=True)
    return numbers, sizes[first]
