"""The operations of a tape, placed on the ranks of a mesh.

    mpirun -n 4 python -m spmd.examples.placement

The program places the operations of a function on ranks, by a schedule and as `with md.place(rank):` says, and prints
the placements, the results and the collectives.

Every rank runs its own operations, and sends a value by one `ppermute` to each rank that needs it. The program is a
sequence of rounds: in each, a `md.switch` on the rank's index runs the operations whose operands are ready, and then
values move. Arguments are the same on all ranks; owners send results to all. The program is a `shard_map`, so it is
differentiated like any other: where the forward pass sends a value, the backward pass sends a cotangent back.

`list_schedule` finds a placement. It takes operations in the order of their distance to the end, the longest first, and
gives each to the rank that can finish it first, counting the time that its operands take to arrive.

Sources: Abadi et al., "TensorFlow: Large-scale machine learning on heterogeneous distributed systems", section 3.2;
Graham, "Bounds on multiprocessing timing anomalies", for list scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
from collectives import axis_index, broadcast, ppermute
from minidiff.core.interpreter import lift
from minidiff.core.ranks import vary_along
from minidiff.core.states import VARYING
from minidiff.core.tape import Equation, Tape, evaluate_equation, read
from minidiff.core.types import Var, zeros_like
from minidiff.ops.elementwise import where
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import P
from spmd.prices.forecast import CostModel
from spmd.prices.walk import Walk
from spmd.report.timeline import Lanes, Operation
from spmd.shard_map.shard_map import shard_map


def partition_tape(tape: Tape, placement: Sequence[int] | None, mesh: Mesh) -> Callable:
    """The function of a tape whose operation number k runs on rank `placement[k]`: f(*args) -> list of results.

    `mesh` has one axis. A placement of None follows the program: see `written_placement`. Raises ValueError unless the
    placement has one of the mesh's ranks for each operation.

    >>> import spmd
    >>> tape = md.make_tape(lambda x, y: np.log(x) + x * y - np.sin(y))(2.0, 5.0)
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> f = partition_tape(tape, [0, 0, 0, 1, 1], mesh)  # log, multiply, add; sin, subtract
    >>> [round(float(d), 3) for d in md.grad(lambda x, y: f(x, y)[0], argnums=(0, 1))(2.0, 5.0)]
    [5.5, 1.716]
    """
    if len(mesh.axis_names) != 1:
        raise ValueError(f"partition_tape: {mesh} has {len(mesh.axis_names)} axes; pieces are on the ranks along one")
    placement = written_placement(tape) if placement is None else placement
    if len(placement) != len(tape.equations) or not all(0 <= rank < mesh.size for rank in placement):
        raise ValueError(
            f"partition_tape: the placement {list(placement)} must have one of the ranks 0 to {mesh.size - 1} for each "
            f"of the {len(tape.equations)} operations of the tape"
        )
    (axis,), tape = mesh.axis_names, _make_varying(tape, mesh.axis_names)
    ranks = dict(zip(tape.equations, placement))
    owner = {v: rank for eqn, rank in ranks.items() for v in eqn.outputs}

    def body(*args: Any) -> list:
        known: dict[Var, Any] = dict(zip(tape.inputs, [vary_along(lift(x), (axis,)) for x in args]))
        holders = {v: set(range(mesh.size)) for v in tape.inputs}  # value -> the ranks that have it
        left = list(tape.equations)
        while left:
            pieces = _round(left, ranks, holders, mesh.size)
            results = [v for piece in pieces for eqn in piece for v in eqn.outputs]
            branches = [_branch(piece, results, known, axis) for piece in pieces]
            known.update(zip(results, md.switch(axis_index(axis), branches)))
            holders.update((v, {owner[v]}) for v in results)
            left = [eqn for eqn in left if eqn.outputs[0] not in holders]
            for v, rank in _sends(left, ranks, holders, results):
                arrived = ppermute(known[v], axis, [(owner[v], rank)])
                known[v] = where(axis_index(axis) == rank, arrived, known[v])
                holders[v].add(rank)
        arguments = dict(zip(tape.inputs, args))
        return [broadcast(known[a], axis, owner[a]) if a in owner else arguments.get(a, a) for a in tape.outputs]

    return shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())


def written_placement(tape: Tape) -> list[int]:
    """Return the rank of each operation: that of the block `with md.place(rank):` in which the program applies it.

    An operation outside of blocks runs where its first operand is computed, or on rank 0.

    >>> def f(x):
    ...     with md.place(1):
    ...         y = np.sin(x)
    ...     return y * 2.0 + np.cos(x)
    >>> tape = md.make_tape(f)(1.0)
    >>> [(eqn.primitive.name, k) for eqn, k in zip(tape.equations, written_placement(tape))]
    [('sin', 1), ('multiply', 1), ('cos', 0), ('add', 1)]
    """
    owner: dict[Var, int] = {}
    for eqn in tape.equations:
        rank = eqn.source and eqn.source.place
        if rank is None:
            rank = next((owner[a] for a in eqn.inputs if isinstance(a, Var) and a in owner), 0)
        owner.update(dict.fromkeys(eqn.outputs, rank))
    return [owner[eqn.outputs[0]] for eqn in tape.equations]


def _round(left: Sequence[Equation], ranks: dict, holders: dict, size: int) -> list[list[Equation]]:
    """For each rank, its operations whose operands it has, or computes in this round."""
    pieces: list[list[Equation]] = [[] for _ in range(size)]
    computed: dict[Var, int] = {}
    for eqn in left:
        rank = ranks[eqn]
        operands = [a for a in eqn.inputs if isinstance(a, Var)]
        if all(rank in holders.get(a, ()) or computed.get(a) == rank for a in operands):
            pieces[rank].append(eqn)
            computed.update(dict.fromkeys(eqn.outputs, rank))
    return pieces


def _make_varying(tape: Tape, axes: tuple[str, ...]) -> Tape:
    """The same tape with all its values varying along the axes, also in bodies."""
    names: dict[Var, Var] = {}

    def named(atoms: Sequence[Any]) -> list[Any]:
        for a in atoms:
            if isinstance(a, Var) and a not in names:
                names[a] = Var(a.type.update(states=a.type.states.with_state(axes, VARYING)))
        return [names[a] if isinstance(a, Var) else a for a in atoms]

    inputs, equations = named(tape.inputs), []
    for eqn in tape.equations:
        params = {k: _make_varying(x, axes) if isinstance(x, Tape) else x for k, x in eqn.params.items()}
        equations.append(Equation(eqn.primitive, named(eqn.inputs), params, named(eqn.outputs), eqn.source))
    return Tape(inputs, equations, named(tape.outputs))


def _branch(piece: Sequence[Equation], results: Sequence[Var], known: dict, axis: str) -> Callable[[], list]:
    """A function that runs a rank's piece: the values of all ranks in this round, with zeros for those of others."""

    def run() -> list:
        env = dict(known)
        for eqn in piece:
            if eqn.primitive.is_higher_order:  # its body takes varying values, constants too
                operands = [vary_along(read(env, a), (axis,)) for a in eqn.inputs]
                eqn = Equation(eqn.primitive, operands, eqn.params, eqn.outputs, eqn.source)
            evaluate_equation(eqn, env)
        computed = {v for eqn in piece for v in eqn.outputs}
        return [env[v] if v in computed else zeros_like(v.type)[()] for v in results]

    return run


def _sends(left: Sequence[Equation], ranks: dict, holders: dict, results: Sequence[Var]) -> list[tuple[Var, int]]:
    """The values of this round that another rank needs, with each rank that needs them."""
    needed = dict.fromkeys((a, ranks[eqn]) for eqn in left for a in eqn.inputs if isinstance(a, Var))
    return [(a, rank) for a, rank in needed if a in results and rank not in holders[a]]


# ---------------------------------------------------------------- finding a placement


@dataclass(frozen=True, repr=False)
class Placed(Lanes):
    """A schedule of a tape's operations, with a lane for each rank."""

    @property
    def placement(self) -> list[int]:
        """The rank of each operation."""
        return [operation.lane for operation in self.operations]


def list_schedule(tape: Tape, ranks: int, model: CostModel | None = None, flops_per_second: float = 1e9) -> Placed:
    """Place a tape's operations on ranks by list scheduling.

    An operation takes one floating-point operation for each number it returns; a product takes those of its terms. A
    value takes the time of a `ppermute` to another rank, by the α–β model (along its slowest axis). If a single rank is
    as fast, it gets all operations.

    >>> x = np.ones((64, 64))
    >>> tape = md.make_tape(lambda a, b: np.tanh(a @ a) + np.tanh(b @ b))(x, x)
    >>> list_schedule(tape, ranks=2, model=CostModel(1e-6, 1e-9)).placement
    [0, 0, 1, 1, 0]
    """
    model = model or CostModel(alpha=1e-6, beta=1e-9)
    walk = Walk(model.costs(flops_per_second), fused=False)
    seconds = [walk.price(Tape([], [eqn], [])).seconds for eqn in tape.equations]
    number = {v: k for k, eqn in enumerate(tape.equations) for v in eqn.outputs}
    needs = [[number[a] for a in eqn.inputs if isinstance(a, Var) and a in number] for eqn in tape.equations]
    distance = list(seconds)
    for k in reversed(range(len(needs))):
        for j in needs[k]:
            distance[j] = max(distance[j], seconds[j] + distance[k])
    free = [0.0] * ranks
    done: dict = {}
    placed: dict = {}
    while len(placed) < len(needs):
        ready = [k for k in range(len(needs)) if k not in placed and all(j in placed for j in needs[k])]
        k = max(ready, key=distance.__getitem__)
        starts = []
        for rank in range(ranks):
            arrivals = [done[j] + (placed[j][1] != rank) * _delay(tape, j, model) for j in needs[k]]
            starts.append(max([free[rank], *arrivals]))
        rank = int(numpy.argmin(starts))
        free[rank] = done[k] = starts[rank] + seconds[k]
        placed[k] = Operation(str(tape.equations[k].primitive), rank, starts[rank], done[k])
    lanes = Placed(tuple(placed[k] for k in range(len(needs))), tuple(f"rank {rank}" for rank in range(ranks)))
    if ranks > 1 and sum(seconds) <= lanes.seconds:
        return replace(list_schedule(tape, 1, model, flops_per_second), names=lanes.names)
    return lanes


def _delay(tape: Tape, k: int, model: CostModel) -> float:
    return model.seconds("ppermute", 2, sum(v.type.nbytes for v in tape.equations[k].outputs))


# ---------------------------------------------------------------- the program


def show(mesh: Mesh) -> None:
    """Place four products on ranks, and print where, the derivative of their sum, and the collectives."""
    x = numpy.full((16, 16), 0.01)

    def total(a: Any, b: Any) -> Any:
        return np.sum(np.tanh(a @ a) @ b + np.tanh(b @ b) @ a)

    def layers(a: Any, b: Any) -> Any:
        with md.place(0):
            hidden = np.tanh(a @ b)
        with md.place(mesh.size - 1):
            return np.sum(np.tanh(hidden @ b))

    tape = md.make_tape(total)(x, 2 * x)
    placed = list_schedule(tape, mesh.size, CostModel(1e-6, 1e-9))
    f = partition_tape(tape, placed.placement, mesh)
    for eqn, rank in zip(tape.equations, placed.placement):
        print(f"rank {rank}: {eqn.primitive}")
    (value,) = print_calls("forward", f, x, 2 * x)
    gradient = print_calls("gradient", md.grad(lambda a, b: f(a, b)[0]), x, 2 * x)
    print(f"value {numbers([value])}, sum of the gradient {numbers([np.sum(gradient)])}")
    tape = md.make_tape(md.value_and_grad(layers, argnums=(0, 1)))(x, 2 * x)
    f = partition_tape(tape, None, mesh)
    placement = written_placement(tape)
    print("written:", ", ".join(f"{eqn.primitive} {rank}" for eqn, rank in zip(tape.equations, placement)))
    value, *gradient = print_calls("forward and backward", f, x, 2 * x)
    print(f"value {numbers([value])}, sum of the gradient {numbers([np.sum(gradient)])}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("ranks",), argv)


if __name__ == "__main__":
    main()
