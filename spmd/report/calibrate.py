"""Measure collectives on the available ranks, and fit a cost model to the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy

from collectives.cost import GATHERS, Cost, price
from spmd.agreement import check_types
from spmd.mesh import Mesh
from spmd.report.forecast import CostModel, Measurement

# ---------------------------------------------------------------- measuring

#: The collectives that are measured, with their parameters (except axes and size) for n ranks.
_PARAMETERS: dict[str, Callable[[int], dict]] = {
    "psum": lambda n: {},
    "all_gather": lambda n: {"axis": 0, "tiled": True},
    "psum_scatter": lambda n: {"axis": 0, "tiled": True},
    "all_to_all": lambda n: {"split_axis": 0, "concat_axis": 0, "tiled": True},
    "ppermute": lambda n: {"perm": tuple((rank, (rank + 1) % n) for rank in range(n))},
}
SIZES = tuple(8 * 8**k for k in range(6))  # bytes, to 256 kB
ITEM = 8  # bytes of a number


def calibrate(
    mesh: Mesh,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    collectives: Sequence[str] = tuple(_PARAMETERS),
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
) -> CostModel:
    """A :class:`CostModel` fitted to measurements on the available ranks.

    Collectives are measured at several sizes, and alpha and beta are fitted. `axis_name` gives the axes that they run
    along, by default all. `sizes` are bytes of the whole (K in `collectives.cost`: the result of an all-gather, the
    operand of the others). Each case runs `repeats` times; its time is that of the slowest rank, and the median over
    the repeats. The fit is robust too: a few outliers hardly change `alpha` and `beta` (`fit_costs`). All ranks must
    call it with the same arguments, and all get the same model; an error on one is an error on all.

    On MPI ranks this measures MPI and the network beneath it. On simulated ranks it measures copies in this process's
    memory, for all ranks one after the other: that is not a network, and `print(model)` says so.

    Raises ValueError if there is only one rank, for a collective that cannot be measured, and for measurements that
    cannot tell steps from bytes.

    >>> from spmd import make_mesh
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> model = calibrate(mesh, sizes=(64, 65536), repeats=3)
    >>> model.source
    'fitted to times on 4 simulated ranks (copies in memory, no network)'
    >>> len(model.measurements), model.alpha >= 0, model.beta >= 0
    (10, True, True)

    Source: the model is that of `collectives.cost`; to measure rounds of calls between barriers, and take medians, is
    usual: W. Gropp, E. Lusk, "Reproducible measurements of MPI performance characteristics", 1999.
    """
    try:
        error, cases = None, _cases(mesh, axis_name, collectives, sizes, repeats)
        plan = [f"{repeats} times", *[f"{c.name} of {c.nbytes} bytes over {c.params['axes']}" for c in cases]]
    except Exception as caught:  # raised after the other ranks are told, so that they do not wait for this one
        error, plan = caught, [f"{type(caught).__name__}: {caught}"]
    check_types("calibrate: all ranks must call it with the same arguments", mesh, [plan])
    if error is not None:
        raise error
    times = numpy.array([[_time(mesh, case) for case in cases] for _ in range(1 + repeats)])
    slowest = _maximum(mesh, times)[1:]  # without the first round, a warm-up
    measurements = tuple(
        Measurement(case.name, case.params["size"], case.nbytes, statistics.median(column.tolist()))
        for case, column in zip(cases, slowest.T)
    )
    what = "MPI ranks" if mesh.backend == "mpi" else "simulated ranks (copies in memory, no network)"
    fitted = fit_costs([(price(*m[:3]), m.seconds) for m in measurements])
    alpha, beta = _maximum(mesh, numpy.array(fitted)).tolist()  # different machines may round differently
    ranks = cases[0].params["size"]
    return CostModel(alpha, beta, measurements=measurements, source=f"fitted to times on {ranks} {what}")


class _Case(NamedTuple):
    name: str
    data: numpy.ndarray
    held: tuple[str, ...]
    params: dict
    nbytes: int


def _cases(mesh: Mesh, axis_name, collectives: Sequence[str], sizes: Sequence[int], repeats: int) -> list[_Case]:
    axes = mesh.axis_names if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    unknown = [a for a in axes if a not in mesh.shape]
    if unknown:
        raise ValueError(f"calibrate: {mesh} has no axis {unknown[0]!r}")
    n = mesh.ranks.size(axes)
    if n == 1:
        raise ValueError(f"calibrate: there is one rank along {axes}; measuring communication needs at least two")
    for name in collectives:
        if name not in _PARAMETERS:
            raise ValueError(f"calibrate: {name!r} is not a collective that is measured: {', '.join(_PARAMETERS)}")
    if repeats < 1 or not sizes or min(sizes) < 1:
        raise ValueError(f"calibrate: takes sizes in bytes and repeats, both at least 1; got {sizes!r}, {repeats!r}")
    held, found = mesh.ranks.ordered(axes), []
    for name in collectives:
        for size in sizes:
            count = _count(name, size, n)
            data = numpy.ones(mesh.ranks.data_shape((count,), held))
            params = {"axes": axes, "size": n, **_PARAMETERS[name](n)}
            found.append(_Case(name, data, held, params, count * ITEM))
    return found


def _count(name: str, size: int, n: int) -> int:
    """How many numbers each rank passes, for a whole of `size` bytes.

    The whole is rounded up to equal parts.
    """
    if name in ("psum", "ppermute"):
        return -(-size // ITEM)
    each = -(-size // (ITEM * n))
    return each if name in GATHERS else each * n


def _time(mesh: Mesh, case: _Case) -> float:
    """Seconds for one call, averaged over a few, equally many on all ranks."""
    calls = 4 if case.nbytes < 65536 else 1
    _maximum(mesh, numpy.zeros(1))  # a barrier, so that all ranks start together
    start = time.perf_counter()
    for _ in range(calls):
        mesh.ranks.collective(case.name, case.data, case.held, False, case.params)
    return (time.perf_counter() - start) / calls


def _maximum(mesh: Mesh, x: numpy.ndarray) -> numpy.ndarray:
    """The elementwise maximum over all ranks, on all ranks."""
    return mesh.ranks.collective("pmax", x, (), False, {"axes": mesh.axis_names, "size": mesh.size})[0]


# ---------------------------------------------------------------- fitting


def fit_costs(measured: Sequence[tuple[Cost, float]]) -> tuple[float, float]:
    """Fit non-negative alpha and beta to times in seconds.

    Raises ValueError if the times do not determine them. The error is the sum of |log(time / model)|: relative, so that
    short messages count as much as long ones, and absolute rather than squared, so that a few outliers count little.
    The candidates are all models that are exact for two of the times, or that have one number only; each is scaled to
    be above the times as often as below.

    >>> times = [(Cost(steps=1, bytes=10), 21.0), (Cost(steps=2, bytes=1), 4.0), (Cost(steps=3, bytes=5), 13.0)]
    >>> [round(x, 6) for x in fit_costs(times)]
    [1.0, 2.0]

    Source: after H. Theil, "A rank-invariant method of linear and polynomial regression analysis", 1950.
    """
    if len({Fraction(cost.bytes) / Fraction(cost.steps) for cost, _ in measured if cost.steps}) < 2:
        raise ValueError(
            "what is measured cannot tell steps from bytes: they are always in the same proportion. Measure messages "
            "of several sizes"
        )
    terms = numpy.array([[cost.steps, cost.bytes] for cost, _ in measured], float)
    times = numpy.array([seconds for _, seconds in measured])
    steps, nbytes = terms.T
    one, other = numpy.triu_indices(len(times), 1)
    distinct = ~numpy.isclose(steps[one] * nbytes[other], steps[other] * nbytes[one], rtol=1e-9, atol=0)
    pairs = numpy.stack([one, other], 1)[distinct]
    tried = numpy.linalg.solve(terms[pairs], times[pairs][..., None])[..., 0]
    tried = numpy.concatenate([tried[(tried >= 0).all(1)], [[1.0, 0.0], [0.0, 1.0]]])
    off = numpy.log(times) - numpy.log(tried @ terms.T)  # for each model, and each time
    scale = numpy.median(off, axis=1, keepdims=True)
    best = abs(off - scale).sum(1).argmin()
    alpha, beta = tried[best] * numpy.exp(scale[best])
    return float(alpha), float(beta)
