"""Check the variance of a `shard_map` body's results against its `out_specs`."""

from __future__ import annotations

from collectives.axes import size_of
from collectives.ops import times
from minidiff.core import Scope, Value, VarianceError, enter, is_scalar_constant, pbroadcast_to, show_axes, typeof
from minidiff.ops.elementwise import convert
from spmd.partition import PartitionSpec, check_ndim


def checked_result(
    x: Value, spec: PartitionSpec, path: str, around: tuple[str, ...], scope: Scope
) -> tuple[Value, PartitionSpec]:
    """Check a body's result against its spec; return it, and the spec.

    Pbroadcasts are inserted into the returned result. The result becomes varying along the axes that the spec splits.
    If it is invariant along an axis in `sum=`, it is multiplied by the axis's size, and the returned spec sums over the
    other axes only. Booleans that are summed are counted, as integers. Enclosing bodies map over the axes `around`.
    Raises VarianceError if the result may vary along any other axis that `spec` does not name; in an explicit scope
    also if it is invariant along one that `spec` names.
    """
    x = enter(x)
    if spec.summed and x.dtype == bool:
        x = convert(x, int)
    t = typeof(x)
    check_ndim(spec, t.shape, "out_specs", path)
    if not scope.typed:
        return x, spec
    named = spec.axes.union(spec.summed)
    missing = [a for a in scope.axes if a in t.variance.difference(named, around)]
    if missing:
        shown, over = " and ".join(map(repr, missing)), show_axes(missing)
        raise VarianceError(
            f"{path} has type {t}: it may differ from rank to rank along {shown}, but its out_specs entry {spec} does "
            f"not name {shown}, and so promises that it is the same. Three ways out: map it, by naming {shown} in "
            f"out_specs; reduce it, with psum, pmean, pmax or pmin over {over}; or collect it, with "
            f"all_gather_invariant over {over}"
        )
    if scope.explicit and not named.issubset(t.variance) and not is_scalar_constant(x):
        axes = show_axes(named - t.variance)
        raise VarianceError(
            f"{path} has type {t}: it is the same on all ranks along {axes}, but its out_specs entry {spec} says that "
            f"it varies there; with auto_pbroadcast=False, return pbroadcast(x, {axes}) instead"
        )
    alike = [a for a in spec.summed if a not in t.variance]
    return pbroadcast_to(times(x, size_of(scope, alike)), spec.axes.union(t.variance)), spec.without_sum(alike)
