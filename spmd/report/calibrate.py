"""Measuring collectives on the ranks at hand, and fitting a model of their cost to that."""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy

from collectives.cost import GATHERS, Cost, price
from spmd.mesh import Mesh
from spmd.report.forecast import CostModel, Measurement

# ---------------------------------------------------------------- measuring

#: What is measured: collectives, with their parameters (where they do not follow from the ranks).
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
    """A :class:`CostModel` of the ranks at hand: collectives are measured at several sizes, and two numbers fitted.

    `axis_name` are the axes that they run along, by default all. `sizes` are bytes of the whole (K in
    `collectives.cost`: what an all-gather returns, what the others take). Each is run `repeats` times; what counts is
    the slowest rank, and of the repeats the median. Of these, too, a few odd ones do not move `alpha` and `beta` much
    (`fit_costs`). All ranks call it, with the same arguments, and all get the same model; a mistake on one is an error
    on all.

    On MPI ranks this measures MPI and what is beneath it. On simulated ranks it measures copies in this process's
    memory, of all ranks one after the other: that is no network, and `print(model)` says so.

    Raises ValueError where there is one rank only, for a collective that cannot be measured, and for measurements that
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
    error, cases = None, []
    try:
        cases = _cases(mesh, axis_name, collectives, sizes, repeats)
    except Exception as caught:  # the others are told, before they wait for this rank
        error = caught
    _agree(mesh, error, [(case.name, case.nbytes, case.params["axes"]) for case in cases], repeats)
    times = numpy.array([[_time(mesh, case) for case in cases] for _ in range(1 + repeats)])
    slowest = _maximum(mesh, times)[1:]  # the first round is to warm up
    measurements = tuple(
        Measurement(case.name, case.params["size"], case.nbytes, statistics.median(column.tolist()))
        for case, column in zip(cases, slowest.T)
    )
    what = "MPI ranks" if mesh.backend == "mpi" else "simulated ranks (copies in memory, no network)"
    fitted = fit_costs([(price(*m[:3]), m.seconds) for m in measurements])
    alpha, beta = _maximum(mesh, numpy.array(fitted)).tolist()  # machines that differ may round differently
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
        raise ValueError(f"calibrate: there is one rank along {axes}; what it takes to communicate needs two")
    for name in collectives:
        if name not in _PARAMETERS:
            raise ValueError(f"calibrate: {name!r} is not among what is measured: {', '.join(_PARAMETERS)}")
    if repeats < 1 or not sizes or min(sizes) < 1:
        raise ValueError(f"calibrate: takes sizes in bytes and repeats, both at least 1; got {sizes!r}, {repeats!r}")
    held, found = mesh.ranks.ordered(axes), []
    for name in collectives:
        for size in sizes:
            count = _count(name, size, n)
            data = numpy.ones(mesh.ranks.data_shape((count,), held))
            params = {"axes": axes, "size": n, **_PARAMETERS[name](n)}
            found.append(_Case(name, data, held, params, count * ITEM))
    _check_distinct([price(case.name, n, case.nbytes) for case in found])
    return found


def _count(name: str, size: int, n: int) -> int:
    """How many numbers each rank hands over, so that the whole has this size: filled up to equal parts."""
    if name in ("psum", "ppermute"):
        return -(-size // ITEM)
    each = -(-size // (ITEM * n))
    return each if name in GATHERS else each * n


def _time(mesh: Mesh, case: _Case) -> float:
    """Seconds for one call, of a few that are made one after the other: the same number on all ranks."""
    calls = 4 if case.nbytes < 65536 else 1
    _maximum(mesh, numpy.zeros(1))  # all begin together
    start = time.perf_counter()
    for _ in range(calls):
        mesh.ranks.collective(case.name, case.data, case.held, False, case.params)
    return (time.perf_counter() - start) / calls


def _maximum(mesh: Mesh, x: numpy.ndarray) -> numpy.ndarray:
    """The largest that any rank has, on all ranks."""
    return mesh.ranks.collective("pmax", x, (), False, {"axes": mesh.axis_names, "size": mesh.size})[0]


def _agree(mesh: Mesh, error: Exception | None, plan: list, repeats: int) -> None:
    """Raise, on all ranks, where one has an error, or is about to measure something else than the rest."""
    number = float(zlib.crc32(repr((plan, repeats)).encode()))
    failed = float(mesh.rank + 1 if error is not None else 0)
    who, most, least = _maximum(mesh, numpy.array([failed, number, -number])).tolist()
    if error is not None:
        raise error
    if who:
        raise RuntimeError(f"calibrate: failed on rank {int(who) - 1}, and so on all")
    if most != -least:
        raise ValueError(
            "calibrate: all ranks must call it with the same arguments, but they are to measure different things; this "
            f"one {plan}, {repeats} times"
        )


# ---------------------------------------------------------------- fitting


def fit_costs(measured: Sequence[tuple[Cost, float]]) -> tuple[float, float]:
    """Alpha and beta, neither negative, that times in seconds speak for. ValueError where they could be anything.

    What counts is by how many times the model is off, above or below, so that short messages count as much as long
    ones; and the sum of that, not of its squares, so that a few odd times count little. Tried are all the models that
    are right about two of the times, or that have one number only; each is scaled so as to be above as often as below.

    >>> times = [(Cost(steps=1, bytes=10), 21.0), (Cost(steps=2, bytes=1), 4.0), (Cost(steps=3, bytes=5), 13.0)]
    >>> [round(x, 6) for x in fit_costs(times)]
    [1.0, 2.0]

    Source: after H. Theil, "A rank-invariant method of linear and polynomial regression analysis", 1950.
    """
    _check_distinct([cost for cost, _ in measured])
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


def _check_distinct(costs: Sequence[Cost]) -> None:
    """ValueError where steps and bytes always are in the same proportion."""
    shares = {Fraction(cost.bytes) / Fraction(cost.steps) for cost in costs if cost.steps}
    if len(shares) < 2:
        raise ValueError(
            "what is measured cannot tell steps from bytes: they are always in the same proportion. Measure messages "
            "of several sizes"
        )
