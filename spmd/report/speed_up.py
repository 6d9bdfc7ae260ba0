"""Speed-up and parallel efficiency, measured and predicted side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from spmd.arrays.reshard import gather
from spmd.checks.agreement import make_and_compare
from spmd.checks.ranges import COUNT, FACTOR, check_ranges, several
from spmd.mesh.mesh import Mesh
from spmd.prices.calibrate import maximum, seconds_of
from spmd.prices.compiled_tape import meshes_of, tape_of
from spmd.prices.forecast import CostModel, Forecast
from spmd.show.table import Table, show_number, show_seconds


class TimedRun(NamedTuple):
    """The time T_n of a program on n ranks, its speed-up T_1 / T_n, and its parallel efficiency T_1 / (n T_n)."""

    seconds: float
    speed_up: float
    efficiency: float


@dataclass(frozen=True, repr=False)
class SpeedUp(Table):
    """Runs of a program by the number of ranks, `measured` and `predicted`: a table to print."""

    measured: dict[int, TimedRun]
    predicted: dict[int, TimedRun]
    notes: tuple[str, ...] = ()

    def _table(self):
        header = ["ranks", *("time", "predicted"), *("speed-up", "predicted"), *("efficiency", "predicted")]
        shows = show_seconds, "{:.2f}".format, "{:.0%}".format
        lines = []
        for n, predicted in self.predicted.items():
            pairs = zip(self.measured.get(n, (None,) * len(shows)), predicted)
            cells = ["-" if x is None else show(x) for show, pair in zip(shows, pairs) for x in pair]
            lines.append([show_number(n), *cells])
        return header, lines, None


def speed_up(
    f: Callable,
    mesh: Mesh,
    model: CostModel,
    one: Callable | float,
    *,
    ranks: Sequence[int] = (),
    axis: str | None = None,
    repeats: int = 5,
) -> Callable[..., SpeedUp]:
    """Compare times on n ranks, measured and predicted: `speed_up(f, mesh, model, one)(*args) -> SpeedUp`.

    The prediction is T_n = T_1 / n, as if the computation were split evenly, plus the communication that the model
    predicts for the tape of `f`. The measured T_n is longer if ranks repeat work, or wait for each other. The table has
    the speed-up T_1 / T_n, and the parallel efficiency T_1 / (n T_n), which is 100% if n ranks are n times as fast as
    one. On simulated ranks, which share one process, T_n is predicted only. All ranks must call it with the same
    arguments; a mistake on one is an error on all.

    Args:
        f: a program on `mesh`, on whose ranks T_n is measured.
        mesh: a mesh.
        model: the network, which prices communication.
        one: a function that computes the same on one rank, from the same arguments (sharded ones are global there), or
            its time T_1 in seconds. It is measured on the first rank, while the others wait.
        ranks: further numbers of ranks to predict T_n for, with arguments of the same size (strong scaling).
        axis: the axis along which the mesh grows; required if it has several.
        repeats: the number of times that each time is measured; the least counts.

    Raises:
        ValueError: if `f` has no `shard_map` and no sharded array on the mesh, and for `repeats` below 1.

    >>> import numpy as np
    >>> import spmd
    >>> from collectives import psum
    >>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
    >>> P, model = spmd.P, spmd.CostModel(alpha=1e-5, beta=1e-9)
    >>> loss = spmd.shard_map(lambda x: psum((x * x).sum(), 'i'), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> spmd.speed_up(loss, mesh, model, one=1e-3, ranks=(16, 64))(np.ones(64))
    ranks     time  predicted  speed-up  predicted  efficiency  predicted
    -----  -------  ---------  --------  ---------  ----------  ---------
        1  1.00 ms    1.00 ms      1.00       1.00        100%       100%
        4        -     310 µs         -       3.23           -        81%
       16        -     363 µs         -       2.76           -        17%
       64        -    1.28 ms         -       0.78           -         1%
    strong scaling: whole arrays stay as large as on the tape, which is for 4 ranks
    """

    def plan(args: tuple) -> tuple[Forecast, list[str]]:
        if not COUNT.contains(repeats) or not (callable(one) or FACTOR.contains(one)):
            raise ValueError(
                f"speed_up: `one` is a function or its seconds, repeats at least 1; got {one!r}, {repeats!r}"
            )
        check_ranges("speed_up", {"ranks": several(COUNT)}, {"ranks": ranks})
        tape = tape_of(f)(*args)
        if not any(mesh.is_like(other) for other in meshes_of(tape)):
            raise ValueError(f"speed_up: the function has no shard_map and no sharded array on {mesh}")
        numbers = sorted({mesh.size, *ranks} - {1})
        forecast = model.predict(tape, ranks=numbers if len(numbers) > 1 else None, axis=axis, scaling="strong")
        time = "a function" if callable(one) else f"{one} s"
        types = [str(v.type) for v in tape.inputs]
        return forecast, [f"{model!r}, one={time}, {repeats} times, on {numbers} ranks", *types]

    def run(*args: Any) -> SpeedUp:
        forecast = make_and_compare(
            "speed_up: all ranks must call it with the same arguments", mesh, lambda: plan(args)
        )
        alone: Any = _time_on_one_rank(one, args, mesh, repeats) if callable(one) else one
        measured, predicted = {1: alone}, {1: alone}
        if mesh.backend == "mpi" and mesh.size > 1:
            times = maximum(mesh, numpy.array(_times(lambda: f(*args), repeats, mesh.ranks.barrier)))
            measured[mesh.size] = float(times.min())
        predicted |= {n: alone / n + seconds for n, seconds in forecast.seconds.items() if n > 1}
        runs, forecasts = (
            {n: TimedRun(t, alone / t, alone / (n * t)) for n, t in times.items()} for times in (measured, predicted)
        )
        return SpeedUp(runs, forecasts, forecast.notes)

    return run


def _time_on_one_rank(f: Callable, args: tuple, mesh: Mesh, repeats: int) -> float:
    """Return the least time of `f` for whole arguments, on the first rank, while the others wait."""
    whole = gather(args)

    def measure() -> tuple[float, list]:
        return 0.0 if mesh.rank else min(_times(lambda: f(*whole), repeats)), []

    seconds = make_and_compare("speed_up: the function of one rank failed", mesh, measure)
    return float(maximum(mesh, numpy.array([seconds]))[0])


def _times(call: Callable[[], Any], repeats: int, start: Callable[[], Any] = lambda: None) -> list[float]:
    """Return the seconds of each call, after `start()`; a first call is not timed, because it may compile."""
    call()
    times = []
    for _ in range(repeats):
        start()
        times.append(seconds_of(call))
    return times
