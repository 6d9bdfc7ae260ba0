"""Measure collectives on the available ranks, and fit cost models to the times; measure the machine of the ranks.

Gamma, the seconds that summing a byte takes, is measured by adding arrays. A fit of the two others, alpha and beta, has
to allow for four things:

- A library chooses the algorithm by size: times are compared with the fastest one (`collectives.cost.fastest`).
- A call costs more than its messages (Python, copies into buffers, sums): each collective has its own factor.
- Other programs disturb: the median of several repeats counts.
- A program sends new data, not the data of the call before: arrays take turns.

`this_machine` also measures products, functions, memory and caches.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy

import minidiff.numpy as np
from collectives.cost import BY_NAME, Cost, fastest, price
from collectives.ops import pmax_p
from minidiff import jit, make_tape, nn
from minidiff.compiler import native
from minidiff.compiler.mathematics import FUNCTIONS
from spmd.checks.agreement import make_and_compare
from spmd.checks.ranges import COUNT, check_ranges
from spmd.mesh.mesh import Mesh
from spmd.prices.forecast import FASTEST, CostModel, Measurement
from spmd.prices.machine import Efficiency, Link, Machine
from spmd.prices.work import ProductSize, Work, work_of_equation

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
        raise ValueError(f"calibrate: {wrong[0]!r} is not a collective that is measured: {', '.join(_PARAMETERS)}")
    if not sizes or not all(map(COUNT.contains, (repeats, *sizes))):
        raise ValueError(f"calibrate: takes sizes in bytes and repeats, both at least 1; got {sizes!r}, {repeats!r}")
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
    return each if BY_NAME[name].grows > 0 else each * n


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
            "the measurements cannot tell steps from bytes: they are always in the same proportion. Measure messages "
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


# ---------------------------------------------------------------- the machine

_LASTING = 0.002  # seconds of a repeat
_MATRIX_SIZES = (16, 32, 64, 128, 256, 512)  # of matrices that are multiplied
_MESSAGE_SIZES = tuple(1024 * 4**k for k in range(7))  # bytes
_OPERAND_SETS = 2  # sets of operands and results, which take turns
_TERMS = 16  # of a polynomial
_SIDE = 512  # of the matrix of which functions are taken: it is larger than a processor's own cache
_ARRAY_LENGTHS = tuple(1 << k for k in (12, 15, 17, 18, 19, 20, 22))  # of arrays that are added
_FUNCTIONS: tuple[Callable, ...] = (
    *(np.exp, np.exp2, np.expm1, np.log, np.log1p, np.log2, np.log10, np.sqrt, np.cbrt, np.sin, np.cos, np.tan),
    *(np.sinh, np.cosh, np.tanh, np.arcsin, np.arccos, np.arctan, np.sum, np.max, np.absolute, np.square),
    *(nn.erf, nn.sigmoid, nn.silu, nn.relu, nn.gelu, functools.partial(nn.gelu, approximate=False)),
    *(nn.softmax, nn.log_softmax, nn.logsumexp),
    *(lambda x, f=f: f(x, x) for f in (np.divide, np.power, np.arctan2, np.hypot, np.maximum, np.logaddexp)),
)


def this_machine(mesh: Mesh, *, repeats: int = 20) -> Machine:
    """Measure the machine that this runs on, on all ranks of a mesh at the same time.

    Products of matrices of several sizes give the peak and the efficiency, a sum of long arrays the bandwidth of
    memory, shorter ones that of caches: each of other arrays than the one before, as those of a program are. A compiled
    polynomial gives the operations of a fused loop, and that of one number what starting an operation takes. Functions
    (exp, tanh, softmax, ...) are measured by themselves and, if compiled loops have them, in a loop. What arithmetic
    takes is the rest after moving the bytes, since one thread waits for memory. Each time is that of the slowest rank,
    since ranks wait for each other. The link is a `spmd.calibrate` of the mesh. All ranks must call it, and all get the
    same machine.

    Args:
        mesh: the mesh on whose ranks it is measured. A mesh of one rank has a link that is never used.
        repeats: each time is measured over 2 * `repeats` milliseconds, so that ranks that share a processor take turns.

    >>> import spmd
    >>> machine = this_machine(spmd.make_mesh((2,), ('i',), backend='simulated'), repeats=1)
    >>> machine.name, sorted(machine.flops), machine.links[0].name
    ('this machine', ['float32', 'float64'], 'messages')
    """

    check_ranges("this_machine", {"repeats": COUNT}, {"repeats": repeats})

    def measure(call: Callable[[], Any]) -> float:
        call()  # compiles
        calls = max(1, int(repeats * _LASTING / max(seconds_of(call), 1e-9)))
        maximum(mesh, numpy.zeros(1))  # all ranks begin together
        return float(maximum(mesh, numpy.array([seconds_of(call, calls)]))[0])

    launch = measure(functools.partial(jit(_polynomial), numpy.ones(1))) / (2 * _TERMS)
    sums = [measure(_in_turns(numpy.add, (n,))) for n in _ARRAY_LENGTHS]
    bandwidths = [24 * n / max(t - launch, t / 2) for n, t in zip(_ARRAY_LENGTHS, sums)]
    nearest = [24 * math.sqrt(n * longer) for n, longer in itertools.pairwise(_ARRAY_LENGTHS)]
    several = mesh.size > 1
    model = calibrate(mesh, mesh.axis_names, sizes=_MESSAGE_SIZES, repeats=repeats) if several else CostModel(0.0, 0.0)
    machine = Machine(
        "this machine",
        flops={},
        elementwise=math.inf,
        bandwidth=bandwidths[-1],
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / mesh.size,
        launch=launch,
        links=(Link("messages", math.inf, model, model.source),),
        caches=tuple(zip(nearest, bandwidths)),
        hides_memory=False,
        overlap=False,
        fuses=frozenset() if native.is_available() else None,
        sources={"flops": f"measured on {mesh.size} {mesh.backend} ranks at the same time"},
    )

    def arithmetic(call: Callable[[], Any], nbytes: int) -> float:
        """Return the seconds of a call without those of launching it and of moving so many bytes."""
        seconds = measure(call)
        return max(seconds - machine.seconds(Work(0, nbytes), None), seconds / 2)

    rates = {
        dtype: [2 * n**3 / arithmetic(_in_turns(numpy.matmul, (n, n), dtype), 3 * size * n**2) for n in _MATRIX_SIZES]
        for dtype, size in (("float32", 4), ("float64", 8))
    }
    return machine.replace(
        flops={dtype: max(speeds) for dtype, speeds in rates.items()},
        efficiency=_efficiency(rates["float64"]),
        **_elementwise(arithmetic),
    )


def _in_turns(function: Callable, shape: tuple[int, ...], dtype: str = "float64") -> Callable[[], Any]:
    """Return a call of a function on two arrays that writes to a third, on other arrays than the time before."""
    arrays = itertools.cycle([[*each] for each in numpy.ones((_OPERAND_SETS, 3, *shape), dtype)])
    return lambda: function(*next(arrays))


def _polynomial(x: Any) -> Any:
    return functools.reduce(lambda y, _: y * x + 1.0, range(_TERMS), x)


def _elementwise(arithmetic: Callable[[Callable, int], float]) -> dict[str, Any]:
    """Measure the speed of a loop, and each function in its operations: alone and, if loops have it, in a loop."""
    x = numpy.linspace(0.1, 0.9, _SIDE**2).reshape(_SIDE, _SIDE)
    elementwise = 2 * _TERMS * x.size / arithmetic(functools.partial(jit(_polynomial), x), 2 * x.nbytes)

    def in_loop(function: Callable) -> float:
        return arithmetic(functools.partial(jit(lambda x: (function(x) * x + 1.0) * x), x), 2 * x.nbytes)

    alone: dict[str, float] = {}
    in_loops: dict[str, float] = {}
    square = in_loop(np.square)
    for function in _FUNCTIONS:
        (eqn,) = make_tape(function)(x).equations
        name, work = eqn.primitive.name, work_of_equation(eqn)
        seconds = arithmetic(functools.partial(jit(function), x), work.bytes)
        alone[name] = max(elementwise * seconds / work.flops, 1.0)
        if name in FUNCTIONS:
            in_loops[name] = max(elementwise * (in_loop(function) - square) / work.flops, 1.0)
    return {"elementwise": elementwise, "steps": alone, "steps_in_loops": in_loops}


def _efficiency(rates: Sequence[float]) -> Efficiency:
    """Return the curve nearest to the rates of products of `_MATRIX_SIZES`, by the sum of |log|."""

    def off(curve: Efficiency) -> float:
        return sum(
            abs(math.log(curve.of(ProductSize(1, n, n, n)) * max(rates) / r)) for n, r in zip(_MATRIX_SIZES, rates)
        )

    return min((Efficiency(1.0, half, power) for half in range(0, 200, 4) for power in (0.5, 1.0, 1.5, 2.0)), key=off)
