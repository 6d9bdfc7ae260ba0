"""The tape that `jit` compiles, after its rewrites, and the meshes on a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minidiff.compiler.simplify import check_options, optimize
from minidiff.core.tape import Tape
from minidiff.diagnostics.tracebacks import hide_own_frames_of_lambda
from minidiff.transforms.recording import make_tape
from spmd.mesh.mesh import Mesh
from spmd.shard_map.operation import shard_map_p


def apply_to_tape(read: Callable[[Tape], Any], f: Callable | Tape, optimized: bool) -> Any:
    """Apply `read` to a tape, or to the tape of a function.

    For a function, return a function of its arguments. With `optimized`, the tape is the one that `jit` compiles.
    """
    if isinstance(f, Tape):
        return read(f)
    tape_of = rewritten(f) if optimized else make_tape(f)
    return hide_own_frames_of_lambda(lambda *args: read(tape_of(*args)))


def rewritten(f: Callable, without: Sequence[str] = (), **settings: Any) -> Callable[..., Tape]:
    """A function that returns the tape that `jit` compiles for `f`.

    So `rewritten(f)(*args)` is a Tape. Rewrites named in `without` are skipped; `bucket_bytes` is the most that one
    all-reduce sums (by default a sixteenth of the gradients, from 256 KiB to 25 MiB).
    `minidiff.compiler.simplify.rewrites()` has all names: an
    unknown rewrite raises ValueError, an unknown setting TypeError.

    >>> import numpy as np
    >>> from collectives import psum
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> f = shard_map(lambda x: (psum(x, 'i'), psum(x * x, 'i')), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> print(rewritten(f)(np.arange(8.0)))
    lambda a:f64[8]:
      b:f64[2], c:f64[2] = shard_map(a, mesh=(i: 4), in_specs=(P('i'),), out_specs=(P(), P()))
        lambda d:f64[2]{i}:
          e:f64[2]{i} = multiply(d, d)
          f:f64[2], g:f64[2] = psum(d, e, 'i')
          return (f, g)
      return (b, c)
    >>> str(rewritten(f, without=("fuse psums",))(np.arange(8.0))).count("psum")
    2
    """
    check_options(without, settings)
    return hide_own_frames_of_lambda(lambda *args: optimize(make_tape(f)(*args), without=without, **settings))


def tapes_in(tape: Tape) -> Iterator[Tape]:
    """Yield a tape, and the bodies of its operations."""
    yield tape
    for eqn in tape.equations:
        for body in eqn.bodies:
            yield from tapes_in(body)


def meshes_of(tape: Tape) -> list[Mesh]:
    """The mesh of each shard_map on a tape."""
    return [eqn.params["mesh"] for t in tapes_in(tape) for eqn in t.equations if eqn.primitive is shard_map_p]
