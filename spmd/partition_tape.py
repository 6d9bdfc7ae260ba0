"""Run the operations of one tape on several ranks: each where it is placed.

This is how a framework with a graph runs a program on several devices: the graph is cut where an edge goes from one
device to another, and a pair of operations, send and receive, is put on the cut. Here it is a `ppermute`. All ranks run
one program, in which each rank computes what is placed on it, by a `cond` on its index. The derivative needs no rule of
its own: the transpose of a send goes the other way.

Source: Abadi et al., "TensorFlow: A system for large-scale machine learning", section 3.3, "Distributed execution".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import minidiff.numpy as np
from collectives import axis_index, broadcast, ppermute
from collectives.axes import check_rank
from minidiff import cond
from minidiff.core import Value
from minidiff.tape import Atom, Tape
from minidiff.types import Var
from spmd.mesh import Mesh
from spmd.partition import P
from spmd.shard_map import shard_map


def partition_tape(tape: Tape, placement: Sequence[int], mesh: Mesh) -> Callable[..., list[Value]]:
    """Place the operations of a tape on ranks; return a function of the same values.

    `placement` has the rank of each equation, along the mesh's only axis. All ranks have the inputs. An operand that is
    computed on another rank is sent by one `ppermute`, once to each rank that needs it; each output is broadcast from
    its rank. So the result is a function of whole values, which can be differentiated, recorded and compiled. In the
    backward pass each `ppermute` runs the other way, and one `psum` adds up the cotangents of the inputs. Raises
    ValueError for a placement of another length, a rank out of range, a mesh of several axes, and a tape with loops or
    branches.

    >>> import minidiff as md, spmd
    >>> f = lambda x, y: np.log(x) + x * y - np.sin(y)
    >>> tape, mesh = md.make_tape(f)(2.0, 5.0), spmd.make_mesh((2,), ('ranks',), backend='simulated')
    >>> print(tape)
    lambda a:f64[], b:f64[]:
      c:f64[] = log(a)
      d:f64[] = multiply(a, b)
      e:f64[] = add(c, d)
      f:f64[] = sin(b)
      g:f64[] = subtract(e, f)
      return g
    >>> placed = partition_tape(tape, [0, 0, 0, 1, 0], mesh)  # the sine is computed on the second rank
    >>> gradient = md.grad(lambda x, y: placed(x, y)[0], (0, 1))
    >>> [round(float(g), 3) for g in gradient(2.0, 5.0)]
    [5.5, 1.716]
    >>> [(row.collective, row.direction) for row in spmd.communication(gradient)(2.0, 5.0).rows]
    [('ppermute', 'forward'), ('broadcast', 'forward'), ('ppermute', 'backward'), ('psum', 'backward')]
    """
    axis = _check(tape, placement, mesh)
    segments = _segments(tape, placement)

    def on_each_rank(*values: Value) -> list[Value]:
        inputs = dict(zip(tape.inputs, values))
        home: dict[Var, int] = {}  # the rank that a value is computed on
        held: dict[tuple[Var, int], Value] = {}  # a value, right on this rank, zeros elsewhere

        def operand(a: Atom, rank: int) -> Value:
            if a in inputs:
                return inputs[a]
            if (a, rank) not in held:
                held[a, rank] = ppermute(held[a, home[a]], axis, [(home[a], rank)])
            return held[a, rank]

        def output(a: Atom) -> Value:
            if not isinstance(a, Var):
                return a
            return broadcast(held[a, home[a]], axis, root=home[a]) if a in home else inputs[a]

        for rank, segment in segments:
            operands = [operand(a, rank) for a in segment.inputs]
            results = cond(axis_index(axis) == rank, segment.apply, _zeros(segment), *operands)
            for var, value in zip(segment.outputs, results):
                home[var], held[var, rank] = rank, value
        return [output(a) for a in tape.outputs]

    return shard_map(on_each_rank, mesh=mesh, in_specs=P(), out_specs=P())


def _segments(tape: Tape, placement: Sequence[int]) -> list[tuple[int, Tape]]:
    """Runs of equations on one rank, as tapes: inputs are what they use of others, outputs what others use of them."""
    runs = [
        (rank, [eqn for _, eqn in run])
        for rank, run in itertools.groupby(zip(placement, tape.equations), key=lambda placed: placed[0])
    ]
    used, segments = {a for a in tape.outputs if isinstance(a, Var)}, []
    for rank, equations in reversed(runs):
        made = {var: None for eqn in equations for var in eqn.outputs}
        inputs = dict.fromkeys(a for eqn in equations for a in eqn.inputs if isinstance(a, Var) and a not in made)
        segments.append((rank, Tape([*inputs], equations, [var for var in made if var in used])))
        used |= inputs.keys()
    return segments[::-1]


def _zeros(segment: Tape) -> Callable[..., list[Value]]:
    return lambda *_: [np.zeros(t.shape, t.dtype) for t in segment.out_types]


def _check(tape: Tape, placement: Sequence[int], mesh: Mesh) -> str:
    """The mesh's axis, if the placement fits it and the tape."""
    if not isinstance(tape, Tape):
        raise TypeError(f"partition_tape takes a tape, got {type(tape).__name__}: write make_tape(f)(*args)")
    if len(mesh.axis_names) != 1:
        raise ValueError(f"partition_tape takes a mesh with one axis, such as make_mesh((2,), ('ranks',)); got {mesh}")
    if len(placement) != len(tape.equations):
        raise ValueError(
            f"partition_tape: placement has {len(placement)} ranks: give one for each of the {len(tape.equations)} "
            "equations of the tape"
        )
    for eqn in tape.equations:
        if eqn.bodies:
            raise ValueError(
                f"partition_tape: {eqn.primitive} has a body, which was recorded for values that are the same on all "
                "ranks: write a loop as Python's, whose steps are recorded one by one, and a choice as np.where"
            )
    for rank in placement:
        check_rank("partition_tape", "placement: rank", rank, mesh.axis_names[0], mesh.size)
    return mesh.axis_names[0]
