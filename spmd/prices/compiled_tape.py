"""The tape that `jit` compiles, after its rewrites, and the meshes on a tape."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minidiff.compiler.jit import Jitted, Static, jit, records_programs
from minidiff.compiler.simplify import check_options
from minidiff.core.tape import Tape
from minidiff.diagnostics.tracebacks import hide_own_frames_of_lambda
from minidiff.transforms.recording import make_tape
from minidiff.values.settings import override
from spmd.mesh.mesh import Mesh
from spmd.shard_map.operation import shard_map_p


def apply_to_tape(read: Callable[[Tape], Any], f: Callable | Tape, optimized: bool) -> Any:
    """Apply `read` to a tape, or to the tape of a function: return a function of its arguments (see `tape_of`)."""
    if isinstance(f, Tape):
        return read(f)
    return hide_own_frames_of_lambda(lambda *args: read(tape_of(f, optimized)(*args)))


def tape_of(f: Callable, optimized: bool = False) -> Callable[..., Tape]:
    """Return a function that returns the tape of the program that `f` runs.

    That of a jitted function is the one that it compiles, with its options. Any other function runs op by op, and the
    jitted ones that it calls as their programs; or with `optimized`, it is compiled.
    """
    if optimized or is_jitted(f):
        return rewritten(f)

    def record(*args: Any) -> Tape:
        with override(records_programs, True):
            return make_tape(f)(*args)

    return record


def is_jitted(f: Any) -> bool:
    """Return whether `f` is a jitted function, or one with bound arguments: a method, or a `functools.partial`."""
    return isinstance(_split_bound(f)[0], Jitted)


def has_kernels(f: Any) -> bool:
    """Return whether the loops of a program may be compiled to machine code: not those of `jit(f, kernels=False)`."""
    function = _split_bound(f)[0]
    return not isinstance(function, Jitted) or function.options.get("kernels", True)


def as_jitted(f: Callable, without: Sequence[str] = (), **settings: Any) -> tuple[Jitted, tuple, dict]:
    """Return `f` as a jitted function with these options and no donated arguments, and the arguments that it binds."""
    function, first, named = _split_bound(f)
    if not isinstance(function, Jitted):
        return jit(f, without=without, **settings), (), {}
    check_options(without, settings)
    options = {**function.options, **settings, "without": (*function.options["without"], *without)}
    return Jitted(function.f, function.static, options, Static()), first, named


def _split_bound(f: Any) -> tuple[Any, tuple, dict]:
    if isinstance(f, functools.partial):
        return f.func, f.args, f.keywords
    return (f.__func__, (f.__self__,), {}) if isinstance(f, types.MethodType) else (f, (), {})


def without_static(f: Callable, args: Sequence[Any]) -> list[Any]:
    """Drop static arguments, which are not on the tape, from the arguments of a function, or from a list like them."""
    fixed = f.static.among((*args,), {}, f.name) if isinstance(f, Jitted) else {}
    return [x for k, x in enumerate(args) if k not in fixed]


def rewritten(f: Callable, without: Sequence[str] = (), **settings: Any) -> Callable[..., Tape]:
    """Return a function that returns the tape that `jit` compiles for `f`: `rewritten(f)(*args)` is a Tape.

    A jitted function keeps its own options.

    Args:
        f: a function.
        without: names of rewrites to skip; `minidiff.compiler.simplify.rewrites()` has all names.
        settings: options of `jit`. `bucket_bytes` is the most that one all-reduce sums: by default a sixteenth of the
            gradients, from 256 KiB to 25 MiB.

    Raises:
        ValueError: for an unknown rewrite.
        TypeError: for an unknown setting.

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
    jitted, first, named = as_jitted(f, without, **settings)
    return hide_own_frames_of_lambda(lambda *args: jitted.rewritten(*first, *args, **named))


def tapes_in(tape: Tape) -> Iterator[Tape]:
    """Yield a tape, and the bodies of its operations."""
    yield tape
    for eqn in tape.equations:
        for body in eqn.bodies:
            yield from tapes_in(body)


def meshes_of(tape: Tape) -> list[Mesh]:
    """Return the mesh of each shard_map on a tape."""
    return [eqn.params["mesh"] for t in tapes_in(tape) for eqn in t.equations if eqn.primitive is shard_map_p]
