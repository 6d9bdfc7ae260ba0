"""Shallow water on a rotating plane: a disturbed jet, on a grid whose rows and columns are split.

    mpirun -n 4 python -m spmd.examples.shallow_water

The state is the height h of the water and its velocity (u, v), on a staggered grid: h in the middle of a cell, u on its
eastern side, v on its northern side. In vector-invariant form,

    dh/dt = - d(h u)/dx - d(h v)/dy
    du/dt = + q (h v) - d(g h + (u^2 + v^2)/2)/dx + viscosity
    dv/dt = - q (h u) - d(g h + (u^2 + v^2)/2)/dy + viscosity,    q = (f + dv/dx - du/dy) / h,

where f, the Coriolis parameter, grows to the north. Averages are placed such that the sum of the energy is conserved
but for the viscosity. East and west are joined; in the north and south there are walls. A time step is one halo of the
three fields together, then arithmetic, then a step of Adams and Bashforth. The result is compared with plain NumPy.

Source: R. Sadourny, "The dynamics of finite-difference models of the shallow-water equations", 1975.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy

import minidiff.numpy as np
import spmd
from collectives import axis_index
from spmd import P
from spmd.examples.fields import AXES, compare, parser_of, repeat, run, scan_steps, whole_halo

DX = DY = 5000.0  # meters
GRAVITY, DEPTH = 9.81, 100.0
CORIOLIS, BETA = 2e-4, 2e-11  # at the southern wall, and its increase with each meter
VISCOSITY = 1e-3 * CORIOLIS * DX**2
DT = 0.125 * DX / (GRAVITY * DEPTH) ** 0.5  # seconds: waves cross an eighth of a cell
STATE = P(None, *AXES)  # [h u v, rows, columns]


def tendencies(state: Any, first: Any, rows: int, halo: Callable = spmd.halo) -> Any:
    """The derivative of a block of the state in time; `first` of the grid's `rows` is the block's first one."""
    p = halo(state, ((0, 0), (1, 1), (1, 1)), (None, *AXES), ("edge", "edge", "periodic"))
    row = first + numpy.arange(-1, p.shape[1] - 1).reshape(-1, 1)
    inside = 1.0 * ((row >= 0) & (row < rows - 1))  # no water flows through the walls
    h, u, v = p[0], p[1], p[2] * inside

    east = u[:, :-1] * (0.5 * (h[:, :-1] + h[:, 1:]))  # fluxes of water
    north = v[:-1] * (0.5 * (h[:-1] + h[1:]))
    vorticity = (v[:-1, 1:] - v[:-1, :-1]) / DX - (u[1:, :-1] - u[:-1, :-1]) / DY  # at the north-eastern corners
    depth = 0.25 * (h[:-1, :-1] + h[:-1, 1:] + h[1:, :-1] + h[1:, 1:])
    q = (CORIOLIS + BETA * DY * row[:-1] + vorticity) / depth
    kinetic = 0.25 * (u[1:, 1:] * u[1:, 1:] + u[1:, :-1] * u[1:, :-1] + v[1:, 1:] * v[1:, 1:] + v[:-1, 1:] * v[:-1, 1:])
    bernoulli = GRAVITY * h[1:, 1:] + kinetic
    turned_north = q * (0.5 * (north[:, :-1] + north[:, 1:]))
    turned_east = q * (0.5 * (east[:-1] + east[1:]))

    dh = (east[1:-1, :-1] - east[1:-1, 1:]) / DX + (north[:-1, 1:-1] - north[1:, 1:-1]) / DY
    du = 0.5 * (turned_north[1:, 1:] + turned_north[:-1, 1:]) - (bernoulli[:-1, 1:] - bernoulli[:-1, :-1]) / DX
    dv = -0.5 * (turned_east[1:, 1:] + turned_east[1:, :-1]) - (bernoulli[1:, :-1] - bernoulli[:-1, :-1]) / DY
    du, dv = du + _friction(u), (dv + _friction(v)) * inside[1:-1]
    return np.stack([dh, du, dv])


def _friction(x: Any) -> Any:
    middle = x[1:-1, 1:-1]
    along = (x[1:-1, :-2] - 2 * middle + x[1:-1, 2:]) / DX**2
    return VISCOSITY * (along + (x[:-2, 1:-1] - 2 * middle + x[2:, 1:-1]) / DY**2)


def advance(carry: tuple[Any, Any], tendency: Callable) -> tuple[Any, Any]:
    """A step of Adams and Bashforth: the state, and its derivative before the step."""
    state, before = carry
    now = tendency(state)
    return state + DT * (1.6 * now - 0.6 * before), now


def ocean(mesh: spmd.Mesh, steps: int) -> Callable:
    """A function from a state to the state after so many steps."""

    def on_each_rank(state):
        rows = state.shape[1]
        first = axis_index("rows") * rows
        tendency = partial(tendencies, first=first, rows=rows * mesh.shape["rows"])
        return scan_steps(partial(advance, tendency=tendency), (state, tendency(state)), steps)[0]

    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=STATE, out_specs=STATE)


def plain(state: Any, steps: int) -> Any:
    """The same with NumPy alone."""
    tendency = partial(tendencies, first=0, rows=state.shape[1], halo=whole_halo)
    return repeat(partial(advance, tendency=tendency), (state, tendency(state)), steps)[0]


def jet(shape: tuple[int, int]) -> numpy.ndarray:
    """A jet to the east that the slope of the water balances, disturbed a little."""
    y, x = ((numpy.arange(n) + 0.5) / n for n in shape)
    speed = 10 * numpy.exp(-((y - 0.5) ** 2) / 0.02)
    slope = -(CORIOLIS + BETA * DY * numpy.arange(shape[0])) * speed / GRAVITY
    height = numpy.cumsum(slope * DY)
    wave = 0.2 * numpy.outer(numpy.exp(-((y - 0.5) ** 2) / 0.01), numpy.sin(4 * numpy.pi * x))
    state = numpy.zeros((3, *shape))
    state[0] = DEPTH + (height - height.mean())[:, None] + wave
    state[1] = speed[:, None]
    return state


def main(argv: Sequence[str] | None = None) -> None:
    def act(mesh, options):
        steps = options.steps
        compare(ocean(mesh, steps), partial(plain, steps=steps), jet(options.shape), STATE, mesh)

    run(parser_of("shallow_water", __doc__, (180, 360), 500), argv, act)


if __name__ == "__main__":
    main()
