"""Measure collectives on the available ranks, and fit cost models to the times.

Gamma, the seconds that summing a byte takes, is measured by adding arrays. A fit of the two others, alpha and beta, has
to allow for four things:

- A library chooses the algorithm by size: times are compared with the fastest one (`collectives.cost.fastest`).
- A call costs more than its messages (Python, copies into buffers, sums): each collective has its own factor.
- Other programs disturb: the median of several repeats counts.
- A program sends new data, not the data of the call before: arrays take turns.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy

from collectives.cost import BY_NAME, Cost, fastest, price
from collectives.reductions import pmax_p
from spmd.checks.agreement import make_and_compare
from spmd.checks.ranges import COUNT
from spmd.mesh.mesh import Mesh
from spmd.prices.forecast import FASTEST, CostModel, Measurement

# ---------------------------------------------------------------- measuring

#: The collectives that are measured, with their parameters (except axes and size) for n ranks.
_PARAMETERS: dict[str, Callable[[int], dict]] = {
    "psum": lambda n: {},
    "all_gather": lambda n: {"axis": 0, "tiled": True},
    "psum_scatter": lambda n: {"axis": 0, "tiled": True},
    "all_to_all": lambda n: {"split_axis": 0, "concat_axis": 0, "tiled": True},
    "ppermute": lambda n: {"perm": tuple((rank, (rank + 1) % n) for rank in range(n))},
}
SIZES = tuple(16 * 4**k for k in range(9))  # bytes, to 1 MB
ITEM = 8  # bytes of a number
TURNS = 4  # arrays that take turns


def calibrate(
    mesh: Mesh,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    collectives: Sequence[str] = tuple(_PARAMETERS),
    sizes: Sequence[int] = SIZES,
    repeats: int = 20,
) -> CostModel:
    """Fit a `CostModel` to measurements on the available ranks.

    Each axis of several ranks is measured alone and gets its own alpha and beta, since messages within a machine are
    faster than between machines. (An axis of one rank gets the largest.) The model prices a collective by its fastest
    algorithm, times a factor. A few outliers hardly change the fit (`fit_costs`); `model.residual` is its error. All
    ranks must call it with the same arguments, and all get the same model; an error on one is an error on all.

    Args:
        mesh: the mesh on whose ranks collectives are measured.
        axis_name: one axis, or several to measure together; alpha and beta are then numbers, as they are if only one
            axis has several ranks.
        collectives: names of collectives.
        sizes: bytes of the global array (K in `collectives.cost`: the result of an all-gather, the operand of others).
        repeats: the number of runs of each case; the median of their times on the slowest rank counts.

    On MPI ranks this measures MPI and the network. On simulated ranks it measures copies in this process's memory, for
    all ranks one after the other; `print(model)` says so. Raises ValueError if there is only one rank, for a collective
    that cannot be measured, and for measurements that cannot tell steps from bytes.

    >>> from spmd import make_mesh
    >>> mesh = make_mesh((2, 2), ('data', 'feats'), backend='simulated')
    >>> model = calibrate(mesh, sizes=(64, 65536), repeats=3)
    >>> model.source
    'fitted to times on 2 and 2 simulated ranks (copies in memory, no network)'
    >>> len(model.measurements), [*model.alpha], min(model.beta.values()) >= 0
    (20, ['data', 'feats'], True)

    Source: W. Gropp, E. Lusk, "Reproducible measurements of MPI performance characteristics", 1999 (rounds of calls
    after barriers, and data that are not in the cache from the call before).
    """

    def plan() -> tuple[list[list[_Case]], list[str]]:
        several: list[Any] = [a for a in mesh.axis_names if mesh.shape[a] > 1] or [mesh.axis_names]
        groups = [_cases(mesh, a, collectives, sizes, repeats) for a in (several if axis_name is None else [axis_name])]
        lines = [f"{c.name} of {c.nbytes} bytes over {c.params['axes']}" for cases in groups for c in cases]
        return groups, [f"{repeats} times", *lines]

    groups = make_and_compare("calibrate: all ranks must call it with the same arguments", mesh, plan)
    measured = [_measure(mesh, cases, repeats) for cases in groups]
    gamma = float(maximum(mesh, numpy.array([_seconds_a_byte_summed(max(sizes), repeats)]))[0])
    fits = maximum(mesh, numpy.array([_fit(each, gamma) for each in measured])).T.tolist()  # machines round differently
    alpha, beta = fits[0][0], fits[1][0]
    if len(groups) > 1:
        names = [m[0].axes[0] for m in measured]
        alpha, beta = (dict.fromkeys(mesh.axis_names, max(x)) | dict(zip(names, x)) for x in fits)
    kind = "MPI ranks" if mesh.backend == "mpi" else "simulated ranks (copies in memory, no network)"
    source = f"fitted to times on {' and '.join(str(m[0].ranks) for m in measured)} {kind}"
    every = tuple(itertools.chain(*measured))
    model = CostModel(alpha, beta, gamma, algorithms=FASTEST, measurements=every, source=source)
    off = [statistics.median(1 / model.ratio(m) for m in every if m.collective == name) for name in collectives]
    return replace(model, factors=dict(zip(collectives, maximum(mesh, numpy.array(off)).tolist())))


class _Case(NamedTuple):
    name: str
    data: numpy.ndarray
    varying: tuple[str, ...]
    params: dict
    nbytes: int


def _cases(mesh: Mesh, axis_name, collectives: Sequence[str], sizes: Sequence[int], repeats: int) -> list[_Case]:
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    unknown = [a for a in axes if a not in mesh.shape]
    if unknown:
        raise ValueError(f"calibrate: {mesh} has no axis {unknown[0]!r}")
    n = mesh.ranks.size(axes)
    if n == 1:
        raise ValueError(f"calibrate: there is one rank along {axes}; measuring communication needs at least two")
    if wrong := [name for name in collectives if name not in _PARAMETERS]:
        raise ValueError(f"calibrate: {wrong[0]!r} is not among the measured collectives: {', '.join(_PARAMETERS)}")
    if not sizes or not all(map(COUNT.contains, (repeats, *sizes))):
        raise ValueError(f"calibrate: sizes in bytes and repeats must be at least 1; got {sizes!r}, {repeats!r}")
    varying, cases = mesh.ranks.sort_axes(axes), []
    for name, size in itertools.product(collectives, sizes):
        count = _count(name, size, n)
        data = numpy.ones((TURNS, *mesh.ranks.data_shape((count,), varying)))
        cases.append(_Case(name, data, varying, {"axes": axes, "size": n, **_PARAMETERS[name](n)}, count * ITEM))
    return cases


def _count(name: str, size: int, n: int) -> int:
    """Return the count of numbers that each rank passes, for `size` bytes in all, rounded up to equal parts."""
    if name in ("psum", "ppermute"):
        return -(-size // ITEM)
    each = -(-size // (ITEM * n))
    return each if BY_NAME[name].growth > 0 else each * n


def _measure(mesh: Mesh, cases: Sequence[_Case], repeats: int) -> list[Measurement]:
    """Measure each case on the slowest rank: the median over repeats, which are rounds of all cases."""
    times = maximum(mesh, numpy.array([[_time(mesh, case) for case in cases] for _ in range(repeats)]))
    typical = numpy.median(times, axis=0).tolist()
    return [Measurement(c.name, c.params["size"], c.nbytes, t, c.params["axes"]) for c, t in zip(cases, typical)]


def _time(mesh: Mesh, case: _Case) -> float:
    """Return the seconds of one call, averaged over a few, equally many on all ranks."""
    arrays = itertools.cycle(case.data)

    def call() -> None:
        mesh.ranks.collective(BY_NAME[case.name], next(arrays), case.varying, case.params, counted=False)

    call()  # not timed: the caches still have the data of another case
    maximum(mesh, numpy.zeros(1))  # a barrier, so that all ranks start together
    return seconds_of(call, 4 if case.nbytes < 65536 else 1)


def seconds_of(call: Callable[[], Any], calls: int = 1) -> float:
    """Return the seconds of one call, averaged over a few."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _seconds_a_byte_summed(nbytes: int, repeats: int) -> float:
    """Return the seconds a byte of adding an array of so many bytes to another: the least of several times."""
    total, x = numpy.zeros(max(nbytes // ITEM, 1)), numpy.ones(max(nbytes // ITEM, 1))
    return min(seconds_of(lambda: numpy.add(total, x, out=total), 4) for _ in range(repeats)) / total.nbytes


def maximum(mesh: Mesh, x: numpy.ndarray) -> numpy.ndarray:
    """Return the elementwise maximum over all ranks, on all ranks."""
    return mesh.ranks.collective(pmax_p, x, (), {"axes": mesh.axis_names, "size": mesh.size}, counted=False)[0]


# ---------------------------------------------------------------- fitting


def _fit(measured: Sequence[Measurement], gamma: float) -> tuple[float, float]:
    """Fit alpha and beta, each collective by its fastest algorithm; these depend on alpha and beta, so iterate."""
    costs, names = [price(*m[:3]) for m in measured], [m.collective for m in measured]
    for _ in range(5):
        alpha, beta = fit_costs([(cost, m.seconds) for cost, m in zip(costs, measured)], names, gamma)
        costs = [price(*m[:3], fastest(*m[:3], alpha, beta, gamma)) for m in measured]
    return alpha, beta


def fit_costs(
    measured: Sequence[tuple[Cost, float]], groups: Sequence[str] | None = None, gamma: float = 0.0
) -> tuple[float, float]:
    """Fit non-negative alpha and beta to times in seconds, where summing a byte takes `gamma` seconds.

    `groups` has a name for each time: times of one name may be off by a common factor. By default all are one group.
    Raises ValueError if the times do not determine alpha and beta.

    The error is the sum of |log(time / model)|: relative, so that short messages count as much as long ones, and not
    squared, so that outliers count little. The candidates are all models that are exact for two times of a group, or
    that have one number only; each is scaled to be above the times as often as below.

    >>> times = [(Cost(steps=1, bytes=10), 21.0), (Cost(steps=2, bytes=1), 4.0), (Cost(steps=3, bytes=5), 13.0)]
    >>> [round(x, 6) for x in fit_costs(times)]
    [1.0, 2.0]

    Source: after H. Theil, "A rank-invariant method of linear and polynomial regression analysis", 1950.
    """
    terms = numpy.array([[cost.steps, cost.bytes] for cost, _ in measured], float)
    summing = gamma * numpy.array([float(cost.reduced) for cost, _ in measured])
    times = numpy.array([seconds for _, seconds in measured])
    group = numpy.unique(groups or [""] * len(times), return_inverse=True)[1]
    steps, nbytes = terms.T
    one, other = numpy.triu_indices(len(times), 1)
    distinct = ~numpy.isclose(steps[one] * nbytes[other], steps[other] * nbytes[one], rtol=1e-9, atol=0)
    pairs = numpy.stack([one, other], 1)[distinct & (group[one] == group[other])]
    if not len(pairs):
        raise ValueError(
            "the measurements cannot tell steps from bytes: their ratio is always the same. Measure messages "
            "of several sizes"
        )
    tried = numpy.linalg.solve(terms[pairs], (times - summing)[pairs][..., None])[..., 0]
    tried = numpy.concatenate([tried[(tried >= 0).all(1)], [[1.0, 0.0], [0.0, 1.0]]])
    off = numpy.log(times) - numpy.log(tried @ terms.T + summing)  # for each model, and each time
    scale = numpy.median(off, axis=1)
    for k in range(group.max() + 1):
        off[:, group == k] -= numpy.median(off[:, group == k], axis=1, keepdims=True)
    best = abs(off).sum(1).argmin()
    alpha, beta = tried[best] * numpy.exp(scale[best])
    return float(alpha), float(beta)
