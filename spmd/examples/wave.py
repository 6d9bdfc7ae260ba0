"""Waves in a drum, and what it looked like at first: gradient descent through all time steps finds the initial field.

    mpirun -n 4 python -m spmd.examples.wave

The field is at rest at first, and zero at the border. Sensors in every fourth row record it at each time step. From
their record alone the initial field is found again: the gradient of the squared misfit runs the adjoint of the wave
equation backward in time, in which each halo is added to the neighbors it came from. The equation is linear, but the
program need not know: the backward pass stores a few fields, and computes all others again, by the schedule that takes
the fewest steps. The waves are compared with plain NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from spmd.examples.fields import AXES, FIELD, bumps, compare, laplacian, parser_of, run, whole_halo
from spmd.examples.loop import positive_integer

SPEED = 0.4  # the square of the part of a cell that a wave crosses in a step
SENSORS = 4  # one row in so many has sensors


def first_step(u: Any, halo: Callable = spmd.halo) -> tuple[Any, Any]:
    """The field after the first step, from rest, and the one before it."""
    return u + 0.5 * SPEED * laplacian(halo(u, 1, AXES, "zeros")), u


def step(fields: tuple[Any, Any], halo: Callable = spmd.halo) -> tuple[Any, Any]:
    """The field after a further step, and the one before it."""
    u, before = fields
    return 2 * u - before + SPEED * laplacian(halo(u, 1, AXES, "zeros")), u


def recorded(mesh: spmd.Mesh, steps: int) -> Callable:
    """A function from the initial field to what the sensors record, [steps, sensors, columns]."""

    def on_each_rank(u):
        return md.scan(lambda fields, _: (step(fields), fields[0][::SENSORS]), first_step(u), length=steps)[1]

    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=FIELD, out_specs=P(None, *AXES))


def plain_recorded(u: Any, steps: int) -> Any:
    """The same with NumPy alone."""
    fields, record = first_step(u, whole_halo), []
    for _ in range(steps):
        record.append(fields[0][::SENSORS])
        fields = step(fields, whole_halo)
    return numpy.stack(record)


def misfit(mesh: spmd.Mesh, slots: int | None = None) -> Callable:
    """Half the squared difference between a record and that of an initial field: a function of both.

    The backward pass needs the differences at all time steps, in reverse. With `slots`, it stores so many fields, and
    computes the others again.
    """
    schedule = slots and md.revolve(slots)

    def observe(carry, record):
        (u, before), total = carry
        return (step((u, before)), total + 0.5 * np.sum((u[::SENSORS] - record) ** 2)), None

    def on_each_rank(u, record):
        return psum(md.scan(observe, (first_step(u), 0.0), record, schedule=schedule)[0][1], AXES)

    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=(FIELD, P(None, *AXES)), out_specs=P())


def recover(mesh: spmd.Mesh, record: Any, shape: tuple[int, int], iterations: int, slots: int | None = None) -> Any:
    """The initial field that fits a record, by gradient descent from zero, and the misfits on the way."""
    descent, misfits = md.jit(md.value_and_grad(misfit(mesh, slots))), []
    u = spmd.distribute(numpy.zeros(shape), mesh, FIELD)
    for _ in range(iterations):
        value, gradient = descent(u, record)
        u = u - SENSORS / len(record) * gradient  # waves last: the curvature is at most about the number of records
        misfits.append(float(value))
    return u, misfits


def main(argv: Sequence[str] | None = None) -> None:
    def act(mesh, options):
        steps, field = options.steps, bumps(options.shape)
        record = compare(recorded(mesh, steps), partial(plain_recorded, steps=steps), field, FIELD, mesh)
        initial, misfits = recover(mesh, record, options.shape, options.iterations, options.slots)
        error = numpy.linalg.norm(spmd.gather(initial) - field) / numpy.linalg.norm(field)
        print(f"\nAfter {len(misfits)} steps of gradient descent, through all time steps and back:")
        print(f"the misfit fell from {misfits[0]:.3g} to {misfits[-1]:.3g}")
        print(f"the initial field is found again, with an error of {error:.2%}", flush=True)

    parser = parser_of("wave", __doc__, (64, 64), 100)
    parser.add_argument("--iterations", type=positive_integer, default=10, help="of descent (default: %(default)s)")
    parser.add_argument("--slots", type=positive_integer, default=8, help="fields to store (default: %(default)s)")
    run(parser, argv, act)


if __name__ == "__main__":
    main()
