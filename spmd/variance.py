"""What `shard_map` asks of the types of its results."""

from __future__ import annotations

from minidiff.core import Value, VarianceError, enter, lift_to, typeof
from spmd.partition import PartitionSpec, check_rank


def settle_result(x: Value, spec: PartitionSpec, path: str, axes: tuple[str, ...], typed: bool) -> Value:
    """A body's result, checked against its spec, and lifted along the axes that the spec names.

    `axes` are those that the body maps over; along those of a body around it, a result may differ anyway. Raises
    VarianceError where it may differ along one of `axes` that `spec` does not name.
    """
    x = enter(x)
    t = typeof(x)
    check_rank(spec, t.shape, "out_specs", path)
    if not typed:
        return x
    for axis in sorted(t.variance.intersection(axes) - spec.axes):
        raise VarianceError(
            f"{path} has type {t}: it may differ from rank to rank along {axis!r}, but its out_specs entry {spec} does "
            f"not name {axis!r}, and so promises that it is the same. Three ways out: map it, by naming {axis!r} in "
            f"out_specs; reduce it, with psum, pmean, pmax or pmin over {axis!r}; or collect it, with "
            f"all_gather_invariant over {axis!r}"
        )
    return lift_to(x, spec.axes)
