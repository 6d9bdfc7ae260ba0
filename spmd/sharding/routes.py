"""Routes: the collectives between two shardings of an array.

A sharding gives for each dimension the mesh axes that it is split along, the last running fastest. Each step from one
sharding to another is one collective, the first of these that applies:

=========== ====================================================== ==========================
step        what it does to the sharding                           bytes that a rank receives
=========== ====================================================== ==========================
pscatter    an axis that the target adds splits a dimension        none
all_to_all  axes that split another dimension there move to it     (n - 1) / n of a block
all_gather  axes that the target lacks, or has elsewhere, leave    (n - 1) blocks
=========== ====================================================== ==========================

Before these, unreduced axes are summed: by a `psum_scatter` where the target splits a dimension along them, else by a
`psum`. After them, a cast makes axes reduced. This never moves more bytes than gathering the whole array and slicing
it. All ranks find the same steps without communicating, since these depend only on the two shardings and the mesh.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import collectives
from minidiff.core.states import REDUCED
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray
from minidiff.errors import VarianceError, show_axes
from minidiff.ops.base import run_in_float32
from spmd.mesh.specs import PartitionSpec, part_count

Dims = tuple[tuple[str, ...], ...]  # for each dimension, the axes it is split along


class RouteStep(NamedTuple):
    """One collective: the sharding `after` it, and the `bytes` each rank receives."""

    collective: str
    axes: tuple[str, ...]
    options: dict[str, Any]
    after: Dims
    bytes: int

    def __call__(self, x: Value) -> Value:
        return getattr(collectives, self.collective)(x, self.axes, **self.options)

    def __str__(self) -> str:
        over = " and ".join(map(repr, self.axes))
        shown = "".join(f", {k}={v!r}" for k, v in self.options.items() if k != "tiled")
        return f"{self.collective} over {over}{shown}"

    def spec(self, before: PartitionSpec) -> PartitionSpec:
        """The spec after the step."""
        reduced = self.axes if REDUCED in (self.collective, self.options.get("to")) else ()
        return PartitionSpec.of_dims(self.after, before.unreduced.difference(self.axes), before.reduced.union(reduced))


Route = tuple[RouteStep, ...]  # from one sharding to another


def follow(route: Route, x: Value, varying: frozenset = frozenset()) -> Value:
    """Apply the steps to a block, in the body of a `shard_map`.

    If the result is used with values that vary along the axes `varying`, gathers over these use `all_gather`, whose
    result varies too, and whose transpose is a `psum_scatter` (JEP 17111, on `all_gather`).
    """
    sums = [step for step in route if step.collective in ("psum", "psum_scatter")]
    if len(sums) > 1:  # they come first
        route = route[len(sums) :]
        x = run_in_float32(lambda x: functools.reduce(lambda x, step: step(x), sums, x), x)
    for k, step in enumerate(route):
        rest = frozenset(a for later in route[k + 1 :] for a in later.axes)
        fused = step.collective == "all_gather_invariant" and varying.difference(rest).issuperset(step.axes)
        x = (step._replace(collective="all_gather") if fused else step)(x)
    return x


# ---------------------------------------------------------------- the steps


def route(have: Dims, want: Dims, nbytes: int, sizes: dict[str, int]) -> Route:
    """The steps between two shardings of an array of `nbytes` bytes."""
    steps = []
    # Axes of one rank split nothing: those that are wanted no more are gathered at once, at no cost.
    at, target = ([tuple(a for a in axes if sizes[a] > 1) for axes in dims] for dims in (have, want))
    wanted = _axes(want)
    alone = tuple(a for a in _axes(have) if sizes[a] == 1 and a not in wanted)
    if alone:
        steps.append(RouteStep("all_gather_invariant", alone, {"axis": 0, "tiled": True}, tuple(at), 0))
    while at != target:
        axes, source, to = _next_move(at, target, sizes)
        n, block = part_count(axes, sizes), nbytes // part_count(_axes(at), sizes)
        if source is not None:
            at[source] = at[source][: -len(axes)]
        if to is not None:
            at[to] = (*at[to], *axes)
        if source is None:
            steps.append(RouteStep("pscatter", axes, {"axis": to, "tiled": True}, tuple(at), 0))
        elif to is None:
            options = {"axis": source, "tiled": True}
            steps.append(RouteStep("all_gather_invariant", axes, options, tuple(at), (n - 1) * block))
        else:
            options = {"split_axis": to, "concat_axis": source, "tiled": True}
            steps.append(RouteStep("all_to_all", axes, options, tuple(at), block * (n - 1) // n))
    return tuple(steps)


def _next_move(
    at: Sequence[tuple[str, ...]], want: Sequence[tuple[str, ...]], sizes: dict[str, int]
) -> tuple[tuple[str, ...], int | None, int | None]:
    """The axes that move next, the dimension that they leave, and the one that they split; None for no dimension."""
    used, wanted = _axes(at), _axes(want)
    # For each dimension, the axes that are not in place, and those that it lacks.
    leaving = [tuple(a for k, a in enumerate(h) if h[: k + 1] != w[: k + 1]) for h, w in zip(at, want)]
    lacking = [w[len(h) - len(out) :] for h, w, out in zip(at, want, leaving)]
    ready = [(d, axes) for d, axes in enumerate(lacking) if not leaving[d]]
    for d, axes in ready:
        if unused := tuple(itertools.takewhile(lambda a: a not in used, axes)):
            return unused, None, d
    for d, axes in ready:
        for e, out in enumerate(leaving):
            for k in range(len(out)):
                if out[k:] == axes[: len(out) - k]:
                    return out[k:], e, d
    for e, out in enumerate(leaving):
        if unwanted := tuple(itertools.takewhile(lambda a: a not in wanted, reversed(out)))[::-1]:
            return unwanted, e, None
    in_the_way = [e for e, out in enumerate(leaving) if out]
    e = min(in_the_way, key=lambda e: (not lacking[e], part_count(leaving[e], sizes)))
    return leaving[e], e, None


def _axes(sharding: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(a for axes in sharding for a in axes)


# ---------------------------------------------------------------- unreduced and reduced axes


def route_of_specs(t: ShapedArray, have: PartitionSpec, want: PartitionSpec, sizes: dict[str, int]) -> Route:
    """The steps between two specs of an array of type `t`.

    Raises VarianceError if `want` drops an axis along which the array is reduced: its cotangent is unreduced there.
    """
    if lost := have.reduced - want.reduced:
        raise VarianceError(
            f"reshard of {t} from {have} to {want}: it is reduced along {show_axes(lost)}, so that its cotangent is "
            f"unreduced there, and must stay so: write {want.with_states(want.unreduced, want.reduced | lost)}, or "
            "reshard the array that it came from"
        )
    sums, at = _sums(have, want, t, sizes)
    steps = [*sums, *route(at, want.dims(t.ndim), t.nbytes, sizes)]
    new = tuple(a for a in sizes if a in want.reduced - have.reduced)
    for k, step in enumerate(steps):  # a gather to a reduced result transposes to a psum_scatter
        if step.collective == "all_gather_invariant" and new and set(step.axes) <= set(new):
            steps[k] = step._replace(collective="all_gather", options={**step.options, "to": REDUCED})
            new = tuple(a for a in new if a not in step.axes)
    if new:
        steps.append(RouteStep("reduced", new, {}, want.dims(t.ndim), 0))
    return tuple(steps)


def _sums(
    have: PartitionSpec, want: PartitionSpec, t: ShapedArray, sizes: dict[str, int]
) -> tuple[list[RouteStep], Dims]:
    """The steps that sum along axes that are not to stay unreduced, and how the dimensions are split after them."""
    at, target = list(have.dims(t.ndim)), want.dims(t.ndim)
    steps, rest = [], [a for a in sizes if a in have.unreduced - want.unreduced]
    for a in tuple(rest):
        for d, axes in enumerate(target):
            if axes[: len(at[d]) + 1] == (*at[d], a):
                block = t.nbytes // part_count(_axes(at), sizes)
                at[d] = (*at[d], a)
                options = {"scatter_dimension": d, "tiled": True}
                steps.append(RouteStep("psum_scatter", (a,), options, tuple(at), block * (sizes[a] - 1) // sizes[a]))
                rest.remove(a)
    if rest:
        n, block = part_count(rest, sizes), t.nbytes // part_count(_axes(at), sizes)
        steps.append(RouteStep("psum", tuple(rest), {}, tuple(at), 2 * block * (n - 1) // n))
    return steps, tuple(at)
