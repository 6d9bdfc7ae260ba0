"""Heat in an insulated plate, on a grid whose rows and columns are split.

    mpirun -n 4 python -m spmd.examples.heat

In each step a point takes a part of the heat of its four neighbors. Those of another rank are in the halo; at the
plate's edge it repeats the edge, through which no heat flows. The result is compared with plain NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import spmd
from spmd.examples.fields import AXES, FIELD, bumps, compare, laplacian, parser_of, repeat, run, scan_steps, whole_halo

CONDUCTIVITY = 0.2  # the part of a difference that flows in a step


def step(u: Any, halo: Callable = spmd.halo) -> Any:
    """The heat after a step."""
    return u + CONDUCTIVITY * laplacian(halo(u, 1, AXES, "edge"))


def plate(mesh: spmd.Mesh, steps: int) -> Callable:
    """A function from a field to the field after so many steps."""
    return spmd.shard_map(lambda u: scan_steps(step, u, steps), mesh=mesh, in_specs=FIELD, out_specs=FIELD)


def plain(u: Any, steps: int) -> Any:
    """The same with NumPy alone."""
    return repeat(partial(step, halo=whole_halo), u, steps)


def main(argv: Sequence[str] | None = None) -> None:
    def act(mesh, options):
        steps, field = options.steps, bumps(options.shape)
        compare(plate(mesh, steps), partial(plain, steps=steps), field, FIELD, mesh)

    run(parser_of("heat", __doc__, (240, 240), 500), argv, act)


if __name__ == "__main__":
    main()
