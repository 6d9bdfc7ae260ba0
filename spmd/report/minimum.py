"""The least that a rank must send for each line of a program.

The operations of a line are a function from the values on ranks that it takes to those that it gives. `minidiff.sparse`
says which numbers of the one depend on which numbers of the other. A rank must send what results on other ranks depend
on: either its numbers, or one partial result for each of these, whichever is fewer. So an elementwise operation sends
nothing, a shift the edge, a sum one number for each result, and a change of sharding all that another rank has next.

All pairs of numbers are counted, so a line with more than `LARGEST` has no minimum.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from collectives.backends.base import coordinates_of
from minidiff.control_flow.loops import run_count
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.errors.location import Location, lines_of
from minidiff.ops.base import Linear
from minidiff.ops.dimensions import gather
from minidiff.sparse.pattern import Dependence, PatternWalk, dependence_by_labels, dependences_of_moved, is_moved
from minidiff.values.dtypes import is_differentiable
from spmd.mesh.mesh import Mesh, make_mesh
from spmd.prices.messages import Communication, Row
from spmd.prices.work import work_of_equation
from spmd.shard_map.fuse_shard_maps import fuse_shard_maps
from spmd.shard_map.lowering import OnArrays
from spmd.shard_map.operation import shard_map_p

LARGEST = 1 << 22  # pairs of numbers of a line, of which one depends on the other
INCLUDES_ITS_OWN = frozenset({"all_to_all", "psum_scatter"})  # a part of the operand stays on the rank


def add_minimum(report: Communication, tape: Tape) -> Communication:
    """Add the least bytes of each line to a report on the tape."""
    least, report.shows_minimum, report.minimum = least_bytes(tape), True, 0
    by_lines: dict[tuple, list[Row]] = defaultdict(list)
    for row in report.rows:
        by_lines[tuple(row.lines)].append(row)
    for lines, rows in by_lines.items():
        needed, sent = [least.get(line) for line in lines], sum(row.bytes for row in rows)
        if None in needed:
            report.minimum = None
            continue
        total = sum(n or 0 for n in needed)
        stays = any(row.collective in INCLUDES_ITS_OWN for row in rows) / rows[0].ranks
        rows[0].minimum = sent if total >= sent * (1 - stays) else total
        rows[0].ratio = sent / rows[0].minimum if rows[0].minimum else None
        report.minimum = None if report.minimum is None else report.minimum + rows[0].minimum
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
    if mesh is not None:
        yield tape, mesh, runs
    else:
        tape = fuse_shard_maps(tape, None)
    for eqn in tape.equations:
        untyped = eqn.primitive is shard_map_p and not eqn.params["check_rep"]
        inside = None if untyped else eqn.params.get("mesh", mesh)
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

    def dependences(self, equation: Equation, i: int, operands: Sequence[Any]) -> Iterator[Dependence | None]:
        primitive, operand, outs = equation.primitive, typeof(equation.inputs[i]), [v.type for v in equation.outputs]
        if is_moved(equation, i, operands):  # of any dtype: integers have no derivatives
            return dependences_of_moved(equation, i, operands)
        if isinstance(primitive, Linear) and all(is_differentiable(t.dtype) for t in (operand, *outs)):
            return super().dependences(equation, i, operands)
        rule = primitive.sharding or gather
        dimensions = rule([typeof(a) for a in equation.inputs], outs, equation.params)
        labels = dimensions.operands[i]
        return (dependence_by_labels(t, operand, of_out, labels) for t, of_out in zip(outs, dimensions.results))


def _least(part: Tape, mesh: Mesh) -> int:
    """Return the bytes of the rank that must send most, for the results of a part of a body."""
    simulated = make_mesh(tuple(mesh.shape.values()), tuple(mesh.shape), backend="simulated")
    ranks: Any = simulated.ranks
    ranks.one_copy = True  # of what a gather gives: the ranks' results from it are the same
    axes = [ranks.sort_axes(v.type.states.varying_or_unreduced) for v in part.inputs]
    data = [ShapedArray((*[ranks.size(a)] * bool(a), *v.type.shape), v.type.dtype) for v, a in zip(part.inputs, axes)]
    tape, variances = OnArrays(simulated, True).record(part, list(zip(data, axes)), [None] * len(axes))
    starts = numpy.cumsum([0, *[t.size for t in data]])
    walk = ValueWalk(int(starts[-1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of operations without a rule
        patterns = walk.follow(tape, [walk.inputs(start, t) for start, t in zip(starts, data)])
    pattern = walk.stack(patterns, tape.out_types)
    held, wanted = _table(data, axes, mesh), _table(tape.out_types, [a for a, _ in variances], mesh)
    rows, columns = pattern.rows, pattern.columns
    by_rank = [0]
    for rank in range(mesh.size):
        place = [*coordinates_of(rank, mesh.shape).values()]
        here, there = held[columns, :-1], wanted[rows, :-1]
        sends = ((here < 0) | (here == place)).all(axis=1) & ((here >= 0) & (here != there)).any(axis=1)
        by_rank.append(_fewer_bytes(rows[sends], columns[sends], wanted[:, -1], held[:, -1]))
    return max(by_rank)


def _table(types: Sequence[ShapedArray], axes: Sequence[Sequence[str]], mesh: Mesh) -> numpy.ndarray:
    """Return a row for each number: the coordinates of the ranks that have it, -1 if all do, and its bytes."""
    parts = [numpy.zeros((0, len(mesh.shape) + 1), int)]
    for t, varying in zip(types, axes):
        part = numpy.full((t.size, len(mesh.shape) + 1), -1)
        part[:, -1] = t.dtype.itemsize
        if varying:
            blocks = numpy.arange(t.size) // (t.size // t.shape[0] or 1)
            for axis, index in zip(varying, numpy.unravel_index(blocks, [mesh.shape[a] for a in varying])):
                part[:, mesh.axis_names.index(axis)] = index if mesh.shape[axis] > 1 else -1
        parts.append(part)
    return numpy.concatenate(parts)


def _fewer_bytes(rows: numpy.ndarray, columns: numpy.ndarray, *nbytes: numpy.ndarray) -> int:
    """Return the bytes of rows or of columns, whichever are fewer, for each part of these pairs that is connected."""
    of_rows, of_columns = (numpy.arange(len(x)) + len(nbytes[0]) * k for k, x in enumerate(nbytes))
    before = None
    while before is None or not numpy.array_equal(before, of_columns):
        before = of_columns.copy()
        numpy.minimum.at(of_rows, rows, of_columns[columns])
        numpy.minimum.at(of_columns, columns, of_rows[rows])
    chosen = numpy.unique(rows), numpy.unique(columns)
    labels, count = (of_rows, of_columns), len(of_rows) + len(of_columns)
    sums = [numpy.bincount(label[x], size[x], count) for label, x, size in zip(labels, chosen, nbytes)]
    return int(numpy.minimum(*sums).sum())
