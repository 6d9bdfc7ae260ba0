"""The names that programs of states are written over: this project's, or JAX's, with types and counts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.core.states import AxisStates

from .libraries import in_jaxpr, without_dead_code

RANKS = 4
#: Our collectives and JAX's, by what they send.
KINDS = {
    "psum": "all-reduce",
    "pmean": "all-reduce",
    "psum_invariant": "all-reduce",
    "unreduced_psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "psum_scatter": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "ppermute": "ppermute",
    "all_to_all": "all-to-all",
}
Counts = Counter  # of the kinds of collectives


@dataclasses.dataclass
class Names:
    """The names that programs are written over: this project's, or JAX's."""

    np: Any
    collectives: Any  # psum, psum_scatter, all_gather, pcast, ...
    vjp: Callable
    P: Callable
    shard_map: Callable  # (f, in_specs, out_specs)
    put: Callable  # (array, spec) -> the array, with this sharding
    reshard: Callable  # (array, spec)
    states: Callable[[Any], AxisStates]
    counts: Callable[..., list[Counts]]  # of a function and its arguments
    run: Callable[..., Any]

    def __post_init__(self):
        self.seen: dict[str, str] = {}
        self.operations: dict[str, Callable] = {}  # of the page

    def see(self, label: str, x: Any) -> Any:
        """Note the type of an intermediate value."""
        self.seen.setdefault(label, str(self.states(x)))
        return x

    def pcast(self, x: Any, to: str) -> Any:
        return self.collectives.pcast(x, "i", to=to)

    def psum(self, x: Any) -> Any:
        return self.collectives.psum(x, "i")


def our_names() -> Names:
    mesh = spmd.make_mesh((RANKS,), ("i",), backend="simulated")

    def counts(f, *args):
        reports = spmd.communication(f)(*args), spmd.communication(f, optimized=True)(*args)
        return [by_kind(report.counts) for report in reports]

    def states(x):
        t = md.typeof(x)
        return t.sharding[1].states if t.sharding else t.states

    return Names(
        np=np,
        collectives=collectives,
        vjp=md.vjp,
        P=spmd.P,
        shard_map=lambda f, i, o: spmd.shard_map(f, mesh=mesh, in_specs=i, out_specs=o),
        put=lambda x, spec: spmd.distribute(x, mesh, spec),
        reshard=lambda x, spec: spmd.distribute(x, mesh, spec),
        states=states,
        counts=counts,
        run=lambda f, *args: f(*args),
    )


def jax_names() -> Names:
    import jax
    from jax import lax
    from jax.sharding import NamedSharding

    mesh = jax.make_mesh((RANKS,), ("i",))  # whose axis is explicit
    jax.set_mesh(mesh)

    def states(x):
        t = jax.typeof(x)
        outside = t.sharding.spec if t.sharding.mesh.are_all_axes_explicit else jax.P()
        sharded = {a for entry in outside.partitions for a in (entry if isinstance(entry, tuple) else (entry,)) if a}
        return AxisStates.of(
            t.mat.varying | sharded, t.mat.unreduced | outside.unreduced, t.mat.reduced | outside.reduced
        )

    return Names(
        np=jax.numpy,
        collectives=lax,
        vjp=jax.vjp,
        P=jax.P,
        shard_map=lambda f, i, o: jax.shard_map(f, mesh=mesh, in_specs=i, out_specs=o),
        put=lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
        reshard=jax.reshard,
        states=states,
        counts=lambda f, *args: _in_trace(jax.make_jaxpr(f)(*args).jaxpr),
        run=lambda f, *args: jax.jit(f)(*args),
    )


def by_kind(counts: dict[str, int]) -> Counts:
    actual: Counts = Counter()
    for name, count in counts.items():
        actual[KINDS.get(name, name)] += count
    return actual


def _in_trace(jaxpr: Any) -> list[Counts]:
    """The collectives of a jaxpr, and those of it without dead code."""
    return [in_jaxpr(j, _kind) for j in (jaxpr, without_dead_code(jaxpr))]


def _kind(eqn: Any) -> str | None:
    """The collective that an equation is; a reshard may be one."""
    if eqn.primitive.name != "reshard":
        return KINDS.get(eqn.primitive.name)
    (before,), (after,) = ([v.aval.sharding.spec for v in vs] for vs in (eqn.invars, eqn.outvars))
    if before.unreduced - after.unreduced:
        return "reduce-scatter" if any(after.partitions) else "all-reduce"
    return "all-gather" if any(before.partitions) and not any(after.partitions) else None
