"""Forecasts of communication time at any number of ranks, by alpha and beta.

The model is that of `collectives.cost`: a step takes `alpha` seconds, and `beta` seconds for each byte of its longest
message. Measure the two numbers with `spmd.calibrate`, or give them; give them for each mesh axis, if networks between
machines are slower than memory within one. The model only covers what is communicated: not congestion, nor overlap with
computation. `spmd.speed_up` adds the computation.

>>> from collectives import psum
>>> import numpy as np
>>> from minidiff import grad
>>> from spmd import P, make_mesh, shard_map
>>> mesh = make_mesh((4,), ('i',), backend='simulated')
>>> loss = shard_map(lambda w, x: psum((w * x).sum(), 'i'), mesh=mesh, in_specs=(P(), P('i')), out_specs=P())
>>> model = CostModel(alpha=1e-6, beta=1e-9)
>>> print(model.predict(grad(loss), ranks=(8, 64, 512, 4096))(np.ones(1000), np.ones((4, 1000))))
ranks   steps   bytes     psum     time  latency
-----  ------  ------  -------  -------  -------
    8      28  14,014  42.0 µs  42.0 µs      67%
   64     252  15,766   268 µs   268 µs      94%
  512   2,044  15,985  2.06 ms  2.06 ms      99%
4,096  16,380  16,012  16.4 ms  16.4 ms     100%
weak scaling: every rank's blocks stay as large as on the tape, which is for 4 ranks
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from collectives.cost import ALGORITHMS, Cost, Number, fastest, price
from collectives.exact import EXACT, WINDOW_BYTES
from minidiff.core.tape import Tape
from spmd.checks.ranges import COUNT, FACTOR, NBYTES, SECONDS, TEXT, Allowed, by_name, check_ranges, several
from spmd.mesh.mesh import Mesh
from spmd.prices.compiled_tape import apply_to_tape, meshes_of
from spmd.prices.messages import Row, price_tape
from spmd.prices.tape_cost import OperationCosts
from spmd.prices.work import Work
from spmd.show import Curve, Table, logarithmic_curves, show_number, show_seconds

# ---------------------------------------------------------------- the model


class Measurement(NamedTuple):
    """The measured time of a collective over `ranks` ranks along `axes`, each of which passed `nbytes` bytes."""

    collective: str
    ranks: int
    nbytes: int
    seconds: float
    axes: tuple[str, ...] = ()


class Residual(NamedTuple):
    """The relative error of a model, |model / measured - 1|: the median and the worst over its measurements."""

    median: float
    worst: float


FASTEST = "fastest"  # as `algorithms` of a model
_TIMES = "alpha", "beta", "gamma"


def _is_measurement(m: Any) -> bool:
    return isinstance(m, Measurement) and all(r.contains(x) for r, x in zip((COUNT, NBYTES, FACTOR), m[1:]))


_RANGES = {
    **{"factors": by_name(FACTOR), "source": TEXT},
    "measurements": Allowed("a Measurement", "one with ranks and seconds above 0", _is_measurement, tuple),
}
_CALL_RANGES = {"ranks": COUNT, "nbytes": NBYTES}


@dataclass(frozen=True)
class CostModel:
    """A model of communication time, made by `calibrate` or by hand.

    A collective over several axes takes the largest `alpha` and `beta` of theirs, since each step waits for its slowest
    message.

    Attributes:
        alpha: seconds of a step: a number, or a dict with a number for each mesh axis.
        beta: seconds of a byte: a number, or a dict with a number for each mesh axis.
        gamma: seconds of summing a byte.
        algorithms: by collective, the algorithm that prices it, by default that of `collectives.cost.PRICED_AS`; or
            "fastest", for the one that takes least time, for each collective and size.
        factors: by collective, a factor that multiplies its times.
        measurements: the times that the numbers were fitted to.
        source: the place where they were measured.

    Raises:
        ValueError: for a negative number, and for an unknown name.

    >>> model = CostModel(alpha=1e-6, beta=1e-9)
    >>> model
    CostModel(alpha=1e-06, beta=1e-09)
    >>> print(model)
    1.00 µs a step, 1.00 ns a byte (1 GB/s)
    >>> model.seconds("psum", ranks=8, nbytes=1000)
    1.575e-05
    >>> CostModel(1e-6, 1e-9, algorithms="fastest").seconds("psum", ranks=8, nbytes=1000)
    6e-06
    >>> model = CostModel(alpha={'machines': 2e-5, 'feats': 1e-6}, beta={'machines': 1e-9, 'feats': 1e-10})
    >>> print(model)
    axis       a step   a byte  bandwidth
    --------  -------  -------  ---------
    machines  20.0 µs  1.00 ns     1 GB/s
    feats     1.00 µs   0.1 ns    10 GB/s
    >>> [round(model.seconds("psum", 4, 10**6, axes), 6) for axes in (('feats',), ('machines', 'feats'))]
    [0.000156, 0.00162]
    """

    alpha: float | Mapping[str, float] = field(hash=False)
    beta: float | Mapping[str, float] = field(hash=False)
    gamma: float = 0.0
    algorithms: Mapping[str, str] | str = field(default_factory=dict, hash=False)
    factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    measurements: tuple[Measurement, ...] = ()
    source: str = ""

    def __post_init__(self):
        for name in ("alpha", "beta", "gamma", "algorithms", "factors"):
            if isinstance(getattr(self, name), Mapping):  # a copy, so that later changes do not matter
                object.__setattr__(self, name, dict(getattr(self, name)))
        times = {name: by_name(SECONDS) if isinstance(getattr(self, name), dict) else SECONDS for name in _TIMES}
        names = {"algorithms": by_name(TEXT)} if isinstance(self.algorithms, dict) else {}
        check_ranges("CostModel", {**times, **names, **_RANGES}, vars(self))
        for name in _TIMES:
            numbers = getattr(self, name)
            if isinstance(numbers, dict) and (not numbers or {*numbers} != {*self.axes}):
                raise ValueError(f"CostModel: {name} must have axes, and those of alpha; got {numbers!r}")
        if not isinstance(self.algorithms, dict) and self.algorithms != FASTEST:
            raise ValueError(f"CostModel: algorithms must be a dict, or {FASTEST!r}; got {self.algorithms!r}")
        named = {} if self.algorithms == FASTEST else self.algorithms
        for collective in {**self.factors, **named}:
            price(collective, 2, 0, named.get(collective))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that have an alpha and a beta of their own; none if both are numbers for all axes."""
        return next((tuple(x) for x in (self.alpha, self.beta) if isinstance(x, dict)), ())

    def __repr__(self) -> str:
        fields = [(name, getattr(self, name)) for name in ("alpha", "beta", "gamma", "algorithms", "factors")]
        shown = [f"{name}={_round_digits(x)}" for name, x in fields if x or name in ("alpha", "beta")]
        return f"CostModel({', '.join(shown)})"

    def __str__(self) -> str:
        numbers = [(axis, *self.along((axis,))) for axis in self.axes]
        lines = [[axis, show_seconds(alpha), show_seconds(beta), _rate(beta)] for axis, alpha, beta in numbers]
        alpha, beta = self.along()
        text = f"{show_seconds(alpha)} a step, {show_seconds(beta)} a byte" + (f" ({_rate(beta)})" if beta else "")
        text = str(Table(["axis", "a step", "a byte", "bandwidth"], lines)) if lines else text
        text += ("\n" if lines else ", ") + f"{show_seconds(self.gamma)} a byte summed" if self.gamma else ""
        return "\n".join([text, *self._quality()])

    def _quality(self) -> list[str]:
        """Return lines with the error of the fit, for each collective and in all."""
        if not self.measurements:
            return []
        lines = []
        for name in dict.fromkeys(m.collective for m in self.measurements):
            off = self._residual([m for m in self.measurements if m.collective == name])
            lines.append([name, f"{self.factors.get(name, 1.0):.2f}", f"{off.median:.0%}", f"{off.worst:.0%}"])
        off = self.residual
        return [
            str(Table(["collective", "factor", "residual", "worst"], lines)),
            f"{self.source}; residual {off.median:.0%} (median of {len(self.measurements)}), at worst {off.worst:.0%}",
        ]

    def along(self, axes: Sequence[str] = ()) -> tuple[float, float]:
        """Return the alpha and beta of a collective over `axes`: the largest of theirs; by default, of all axes."""
        unknown = [a for a in axes if self.axes and a not in self.axes]
        if unknown:
            known = ", ".join(map(repr, self.axes))
            raise ValueError(f"CostModel: alpha and beta have no axis {unknown[0]!r}, only {known}: add it to both")
        alpha, beta = (max(x[a] for a in axes or x) if isinstance(x, Mapping) else x for x in (self.alpha, self.beta))
        return alpha, beta

    def seconds(self, collective: str, ranks: int, nbytes: Number, axes: Sequence[str] = ()) -> float:
        """Return the seconds of a collective over `ranks` ranks along `axes`, if each rank passes `nbytes` bytes."""
        cost = self.cost(collective, ranks, nbytes, axes)
        return self.factors.get(collective, 1.0) * self.of(cost, axes)

    def cost(self, collective: str, ranks: int, nbytes: Number, axes: Sequence[str] = ()) -> Cost:
        """Return the steps and bytes of a collective, by the model's algorithm for it."""
        check_ranges("CostModel", _CALL_RANGES, {"ranks": ranks, "nbytes": nbytes})
        if isinstance(self.algorithms, str):  # FASTEST
            return price(collective, ranks, nbytes, fastest(collective, ranks, nbytes, *self.along(axes), self.gamma))
        return price(collective, ranks, nbytes, self.algorithms.get(collective))

    def of(self, cost: Cost, axes: Sequence[str] = ()) -> float:
        """Return the time of a cost along `axes`, in seconds."""
        return cost.seconds(*self.along(axes), self.gamma)

    def ratio(self, measurement: Measurement) -> float:
        """Return the model's time divided by the measured time."""
        return self.seconds(*measurement[:3], measurement.axes) / measurement.seconds

    @property
    def residual(self) -> Residual:
        """The relative error of the model. Raises ValueError if there are no measurements."""
        if self.measurements:
            return self._residual(self.measurements)
        raise ValueError("residual: the model was not fitted to measurements; calibrate(mesh) fits one")

    def _residual(self, measurements: Sequence[Measurement]) -> Residual:
        off = [abs(self.ratio(m) - 1) for m in measurements]
        return Residual(statistics.median(off), max(off))

    def costs(self, flops_per_second: float) -> OperationCosts:
        """Return the cost model of a computer with this network that does so many operations a second."""

        def compute(work: Work, dtype: Any) -> float:
            return (work.flops or work.bytes // 16) / flops_per_second  # a number is read and written

        return OperationCosts(compute, lambda *call: (self.seconds(*call), "network"))

    @property
    def fit(self) -> Fit:
        """The measurements and the model's times: a table to print."""
        return Fit(self)

    def predict(
        self,
        f: Callable | Tape,
        *,
        ranks: Iterable[int] | None = None,
        axis: str | None = None,
        scaling: str = "weak",
        optimized: bool = False,
    ) -> Any:
        """Forecast the communication time: `model.predict(f)(*args) -> Forecast`.

        Nothing runs: the forecast reads the tape of `f` for arguments of these types.

        Args:
            f: a function, or a tape; for a tape, the forecast itself is returned.
            ranks: sizes of the mesh; by default that of the tape.
            axis: the axis along which the mesh grows; required if it has several.
            scaling: the growth of arrays with the mesh. With "weak", each rank's blocks keep their size: gathered and
                scattered arrays grow with the ranks. With "strong", global arrays keep their size: blocks that are
                gathered, exchanged or sent along `axis` shrink. In both, arrays that are summed or broadcast keep their
                size, and so does all communication along other axes. For a program that scales differently, make a tape
                on a mesh of each size, and add the forecasts.
            optimized: read the tape that `jit(f)` compiles.

        Raises:
            ValueError: if the mesh cannot have so many ranks, or if it is not clear how the program grows.
        """
        ranks = None if ranks is None else [*ranks]
        check_ranges("predict", {"ranks": several(COUNT)}, {"ranks": ranks or ()})
        if scaling not in _SCALING:
            raise ValueError(f"predict: scaling must be 'weak' or 'strong', got {scaling!r}")
        return apply_to_tape(lambda tape: _forecast(self, tape, ranks, axis, scaling), f, optimized)

    def compare(self, algorithms: Iterable[str], nbytes: Number, ranks: Iterable[int]) -> AlgorithmTimes:
        """Compare the times of algorithms on `nbytes` bytes, for each number of ranks: a table to print.

        >>> names = ["ring_all_reduce", "recursive_doubling_all_reduce", "parameter_server_all_reduce"]
        >>> print(CostModel(alpha=1e-6, beta=1e-9).compare(names, nbytes=2e4, ranks=(4, 16, 64)))
        ranks  ring_all_reduce  recursive_doubling_all_reduce  parameter_server_all_reduce
        -----  ---------------  -----------------------------  ---------------------------
            4          36.0 µs                        42.0 µs                       126 µs
           16          67.5 µs                        84.0 µs                       630 µs
           64           165 µs                         126 µs                      2.65 ms
        """
        ranks, names = tuple(ranks), tuple(algorithms)
        check_ranges("compare", {"ranks": several(COUNT), "nbytes": NBYTES}, {"ranks": ranks, "nbytes": nbytes})
        if unknown := [name for name in names if name not in ALGORITHMS]:
            raise ValueError(f"compare: unknown algorithm {unknown[0]!r}; choose from: {', '.join(ALGORITHMS)}")
        return AlgorithmTimes(
            ranks, {name: tuple(self.of(ALGORITHMS[name](n, nbytes)) for n in ranks) for name in names}
        )


@dataclass(frozen=True, repr=False)
class Fit(Table):
    """Measured times and the model's. Printing it gives a table."""

    model: CostModel

    def _table(self):
        header = ["collective", "axes", "ranks", "bytes per rank", "measured", "model", "model / measured"]
        lines = []
        for m in self.model.measurements:
            ratio = self.model.ratio(m)
            cells = [show_seconds(m.seconds), show_seconds(ratio * m.seconds), f"{ratio:.2f}"]
            lines.append([m.collective, ", ".join(m.axes), *map(show_number, m[1:3]), *cells])
        return header, lines, None

    def _remarks(self):
        return self.model._quality()[1:]

    def plot(self, ax: Any = None) -> Any:
        """Draw times over bytes, measured (dots) and by the model (lines). Returns the axes; needs matplotlib."""
        curves = []
        for k, (name, axes) in enumerate(dict.fromkeys((m.collective, m.axes) for m in self.model.measurements)):
            points = [m for m in self.model.measurements if (m.collective, m.axes) == (name, axes)]
            sizes, seconds = [m.nbytes for m in points], [m.seconds for m in points]
            label, color = f"{name} along {', '.join(axes)}" if self.model.axes else name, f"C{k % 10}"
            curves.append(Curve(label, sizes, seconds, "o", color))
            curves.append(Curve("", sizes, [self.model.ratio(m) * m.seconds for m in points], "-", color))
        return logarithmic_curves(ax, curves, "bytes per rank")


# ---------------------------------------------------------------- forecasts


TOTAL = "time"


class CollectiveForecast(NamedTuple):
    """The cost and time of all `count` calls of a collective on `ranks` ranks; `latency` is the time of its steps."""

    ranks: int
    collective: str
    axes: tuple[str, ...]
    count: int
    cost: Cost
    seconds: float
    latency: float


@dataclass(frozen=True, repr=False)
class Forecast(Table):
    """A program's communication time by the model: a table to print, and to draw by `plot()`.

    `predictions` has the time of each collective for each number of `ranks`; `seconds` and `costs` are dicts of the
    totals, by the number of ranks. `notes` has the assumptions made. Forecasts can be added. In the table, bytes are
    those that take time (the longest message of each step), and latency is the fraction of the time spent on steps.
    Adding raises ValueError for forecasts by different models, or for the same number of ranks.

    >>> import numpy as np, spmd
    >>> from collectives import psum
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> f = spmd.shard_map(lambda x: psum(x.sum(), 'i'), mesh=mesh, in_specs=spmd.P('i'), out_specs=spmd.P())
    >>> forecast = CostModel(alpha=1e-6, beta=1e-9).predict(f, ranks=(2, 4))(np.ones(4))
    >>> forecast.ranks, [cost.steps for cost in forecast.costs.values()], list(forecast.collectives)
    ((2, 4), [2, 6], ['psum'])
    """

    model: CostModel
    ranks: tuple[int, ...]
    predictions: tuple[CollectiveForecast, ...]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> dict[int, float]:
        return {n: math.fsum(p.seconds for p in self.predictions if p.ranks == n) for n in self.ranks}

    @property
    def costs(self) -> dict[int, Cost]:
        return {n: sum((p.cost for p in self.predictions if p.ranks == n), Cost()) for n in self.ranks}

    @property
    def collectives(self) -> dict[str, tuple[float, ...]]:
        """The total time of each collective, for each number of ranks."""
        totals: dict[str, dict[int, float]] = {}
        for p in self.predictions:
            times = totals.setdefault(p.collective, dict.fromkeys(self.ranks, 0.0))
            times[p.ranks] += p.seconds
        return {name: tuple(times.values()) for name, times in totals.items()}

    def __add__(self, other: Forecast) -> Forecast:
        """Merge the forecasts of a program that was recorded on meshes of several sizes."""
        if self.model != other.model:
            raise ValueError("forecasts of different models cannot be added")
        if common := sorted({*self.ranks} & {*other.ranks}):
            raise ValueError(f"only forecasts for the same numbers of ranks can be added; both are for {common}")
        ranks, notes = sorted({*self.ranks, *other.ranks}), dict.fromkeys([*self.notes, *other.notes])
        return Forecast(self.model, tuple(ranks), (*self.predictions, *other.predictions), tuple(notes))

    def _table(self):
        costs, seconds, each = self.costs, self.seconds, self.collectives
        header = ["ranks", "steps", "bytes", *each, TOTAL, "latency"]
        lines = []
        for k, n in enumerate(self.ranks):
            steps = math.fsum(p.latency for p in self.predictions if p.ranks == n)
            latency = f"{steps / seconds[n]:.0%}" if seconds[n] else "-"
            numbers = map(show_number, (n, costs[n].steps, costs[n].bytes))
            times = [show_seconds(times[k]) for times in each.values()]
            lines.append([*numbers, *times, show_seconds(seconds[n]), latency])
        return header, lines, None

    def plot(self, ax: Any = None) -> Any:
        """Draw times over ranks, on logarithmic axes. Returns the axes; needs matplotlib."""
        each = self.collectives
        lines = {**each, TOTAL: tuple(self.seconds.values())} if len(each) > 1 else each
        return AlgorithmTimes(self.ranks, lines).plot(ax)


@dataclass(frozen=True, repr=False)
class AlgorithmTimes(Table):
    """The times of algorithms, `seconds`, for each number of ranks: a table to print."""

    ranks: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]

    def _table(self):
        header = ["ranks", *self.seconds]
        times = [[show_seconds(s) for s in row] for row in zip(*self.seconds.values())]
        return header, [[show_number(n), *row] for n, row in zip(self.ranks, times)], None

    def plot(self, ax: Any = None) -> Any:
        """Draw times over ranks, on logarithmic axes. Returns the axes; needs matplotlib."""
        curves = [
            Curve(name, self.ranks, seconds, "o--" if name == TOTAL else "o-", f"C{k % 10}")
            for k, (name, seconds) in enumerate(self.seconds.items())
        ]
        return logarithmic_curves(ax, curves, "ranks", self.ranks)


#: By scaling: the collectives whose bytes per rank grow with the number of ranks along the axis, and the power of it.
_SCALING: dict[str, dict[str, int]] = {
    "weak": {"psum_scatter": 1, "scatter": 1},
    "strong": dict.fromkeys(
        ["all_gather", "all_gather_invariant", "gather", "all_to_all", "ragged_all_to_all", "ppermute"], -1
    ),
}
_SCALING_NOTES = {
    "weak": "weak scaling: every rank's blocks stay as large as on the tape, which is for {} ranks",
    "strong": "strong scaling: whole arrays stay as large as on the tape, which is for {} ranks",
}
AS_MANY = "there are as many ppermutes as on the tape: a program with one for each rank is taped at each size"


def _forecast(model: CostModel, tape: Tape, ranks: Iterable[int] | None, axis: str | None, scaling: str) -> Forecast:
    report = price_tape(tape)
    meshes = {tuple(mesh.shape.items()): mesh for mesh in meshes_of(tape)}
    if len(meshes) > 1 and ranks is not None:
        raise ValueError(
            f"predict: the program runs on several meshes ({', '.join(map(str, meshes.values()))}): which one "
            "grows is not clear. Make its tape at each size, and add the forecasts"
        )
    sizes = [mesh.size for mesh in meshes.values()] or [1]
    size, notes = max(sizes), list(report.notes)
    numbers = [size] if ranks is None else [*ranks]
    if ranks is not None and report.rows:
        axis = _growing_axis(*meshes.values(), axis, numbers)
        notes.append(_SCALING_NOTES[scaling].format(size))
        if any(row.collective == "ppermute" and axis in row.axes for row in report.rows) and numbers != [size]:
            notes.append(AS_MANY)
    predictions = [_prediction(model, row, n, Fraction(n, size), axis, scaling) for n in numbers for row in report.rows]
    return Forecast(model, tuple(numbers), tuple(predictions), tuple(notes))


def _growing_axis(mesh: Mesh, axis: str | None, ranks: Sequence[int]) -> str:
    """Return the axis along which a mesh grows. Raises ValueError if it cannot have so many ranks."""
    if axis is None and len(mesh.axis_names) > 1:
        raise ValueError(f"predict: {mesh} has several axes: say which one grows, axis={mesh.axis_names[0]!r}")
    axis = axis or mesh.axis_names[0]
    if axis not in mesh.axis_names:
        raise ValueError(f"predict: {mesh} has no axis {axis!r}")
    multiple = mesh.size // mesh.shape[axis]
    if wrong := [n for n in ranks if n % multiple]:
        raise ValueError(
            f"predict: {mesh} cannot have {wrong[0]} ranks by growing along {axis!r}: take a multiple of {multiple}"
        )
    return axis


def _prediction(
    model: CostModel, row: Row, ranks: int, ratio: Fraction, axis: str | None, scaling: str
) -> CollectiveForecast:
    """Predict a row of a report, at `ratio` times as many ranks along `axis`.

    All calls of the row are priced as the average one: exact, if they are alike or the algorithm is given.
    """
    ratio = ratio if axis in row.axes else Fraction(1)
    name, size = row.collective.removeprefix(EXACT), int(row.ranks * ratio)
    nbytes = Fraction(row.bytes, row.count) * ratio ** _SCALING[scaling].get(name, 0)
    cost = model.cost(name, size, nbytes, row.axes)
    if name != row.collective:  # ranks agree on a window first
        cost += model.cost("pmax", size, WINDOW_BYTES, row.axes)
    cost, factor = row.count * cost, model.factors.get(name, 1.0)
    seconds, latency = factor * model.of(cost, row.axes), factor * model.of(Cost(cost.steps), row.axes)
    return CollectiveForecast(ranks, row.collective, row.axes, row.count, cost, seconds, latency)


# ---------------------------------------------------------------- showing


def _rate(beta: float) -> str:
    return f"{1e-9 / beta:.3g} GB/s" if beta else ""


def _round_digits(x: Any) -> str:
    if isinstance(x, dict):
        return f"{{{', '.join(f'{name!r}: {_round_digits(each)}' for name, each in x.items())}}}"
    return repr(x) if isinstance(x, str) else f"{x:.4g}"
