"""Examples 1 to 5 of JEP 17111 as functions, with what it says of them: their types, their transposes, and the cost.

`g` is a linear function of the JEP's choosing; here it is `2 * x`, summed up where the JEP wants a scalar. Each example
is written for a mesh with one axis, 'i', of any size n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, all_gather_invariant, psum
from spmd import P
from tests.checks.whole import whole


class Example(NamedTuple):
    """A body with its specs, linear in its first argument; and what is to be expected.

    `whole` is the same function of whole arrays, of the number of ranks and the arguments. `forward` and `backward` say
    how often the function and its transpose run each collective that communicates, and `backward_untyped` what the
    transpose runs with `check_rep=False`. The tapes on 8 ranks are in `tests/golden/jep.txt`.
    """

    body: Callable
    in_specs: tuple
    out_specs: P
    shapes: Callable[[int], list[tuple[int, ...]]]
    whole: Callable
    forward: dict[str, int]
    backward: dict[str, int]
    backward_untyped: dict[str, int]

    def on(self, mesh: spmd.Mesh, **options: Any) -> Callable:
        """The example as a function of whole arrays."""
        return spmd.shard_map(self.body, mesh=mesh, in_specs=self.in_specs, out_specs=self.out_specs, **options)

    def arguments(self, n: int) -> list[np.ndarray]:
        """Arguments for n ranks, the same wherever they are made."""
        rng = np.random.default_rng(n)
        return [rng.normal(size=shape) for shape in self.shapes(n)]

    def tape(self, mesh: spmd.Mesh, **options: Any) -> md.Tape:
        """The example's tape."""
        return md.make_tape(self.on(mesh, **options))(*self.arguments(mesh.size))


EXAMPLES: dict[str, Example] = {
    "1: psum to an unmapped output": Example(
        lambda x: psum(np.sum(2.0 * x), "i"),
        (P("i"),),
        P(),
        lambda n: [(3 * n, 4)],
        lambda n, x: np.sum(2.0 * x),
        forward={"psum": 1},
        backward={},
        backward_untyped={"psum": 1},
    ),
    "2: psum to a mapped output": Example(
        lambda x, y: psum(2.0 * x, "i") * y,
        (P("i"), P("i")),
        P("i"),
        lambda n: [(3 * n, 4), (3 * n, 4)],
        lambda n, x, y: np.tile(2.0 * x.reshape(n, 3, 4).sum(0), (n, 1)) * y,
        forward={"psum": 1},
        backward={"psum": 1},
        backward_untyped={"psum": 1},
    ),
    "3: cursed identity": Example(
        lambda x: x,
        (P(),),
        P(),
        lambda n: [(3, 4)],
        lambda n, x: x,
        forward={},
        backward={},
        backward_untyped={"psum": 1},
    ),
    "4: all_gather_invariant to an unmapped output": Example(
        lambda x: all_gather_invariant(x, "i", tiled=True),
        (P("i"),),
        P(),
        lambda n: [(n,)],
        lambda n, x: x,
        forward={"all_gather_invariant": 1},
        backward={},
        backward_untyped={"psum_scatter": 1},
    ),
    "5: all_gather to a mapped output": Example(
        lambda x, y: all_gather(x, "i", tiled=True) * y,
        (P("i"), P("i")),
        P("i"),
        lambda n: [(n,), (n * n,)],
        lambda n, x, y: np.tile(x, n) * y,
        forward={"all_gather": 1},
        backward={"psum_scatter": 1},
        backward_untyped={"psum_scatter": 1},
    ),
}


def check_on(mesh: spmd.Mesh, example: Example, calls: Callable[[], dict[str, int]], **options: Any) -> None:
    """The numbers, the inner-product identity, and the communication of an example and of its transpose on a mesh.

    Run operation by operation, and compiled. `calls` gives what has been communicated since it was called last: by one
    rank alone, nothing.
    """
    args = example.arguments(mesh.size)
    tape = example.tape(mesh, **options)
    transposed = md.transpose(tape, linear=0)
    back = md.transpose(transposed, linear=0)
    (t,) = tape.out_types
    ct = np.cos(np.arange(float(t.size))).reshape(t.shape)
    backward = example.backward_untyped if options else example.backward
    for run in (lambda tape: tape, md.jit):
        calls()
        (y,) = run(tape)(*args)
        counted = calls()
        assert options or counted == (example.forward if mesh.size > 1 else {})
        np.testing.assert_allclose(whole(y), example.whole(mesh.size, *args), rtol=1e-12)
        calls()
        (x_bar,) = run(transposed)(ct, *args[1:])
        assert calls() == (backward if mesh.size > 1 else {})
        np.testing.assert_allclose(np.sum(whole(x_bar) * args[0]), np.sum(ct * whole(y)), rtol=1e-12)
        np.testing.assert_allclose(whole(run(back)(*args)[0]), whole(y), rtol=1e-12)
