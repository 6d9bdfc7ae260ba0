"""Times and memory, always beside a baseline measured in the same process at the same time; and what drivers share."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy

import minidiff as md

Run = Callable[[], object]


def time_of(run: Run, calls: int) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def times(
    runs: dict[str, Run], rounds: int, seconds: float, clock: Callable[[Run, int], float] = time_of
) -> dict[str, list[float]]:
    """Seconds a call of each, `rounds` times in turn; each turn calls for about `seconds`, or once if that is zero.

    Whatever slows the machine for a while slows all of them: compare them within a round.
    """
    calls = {}
    for name, run in runs.items():
        run()  # what is cached or compiled is so from here on
        calls[name] = max(1, round(seconds / min(clock(run, 1) for _ in range(3)))) if seconds else 1
    was_frozen = gc.get_freeze_count() > 0  # by pytest, which needs it until its end
    gc.collect()
    gc.freeze()
    actual = {name: [] for name in runs}
    try:
        for _ in range(rounds):
            for name, run in runs.items():
                actual[name].append(clock(run, calls[name]))
    finally:
        if not was_frozen:
            gc.unfreeze()
    return actual


def ratio(actual: dict[str, list[float]], name: str, baseline: str) -> float:
    """The median over rounds of how many times as long `name` takes as `baseline`."""
    return statistics.median(a / b for a, b in zip(actual[name], actual[baseline]))


def spread(actual: dict[str, list[float]], name: str, baseline: str) -> list[float]:
    """The quartiles of that ratio over rounds: half of the rounds are between them."""
    ratios = sorted(a / b for a, b in zip(actual[name], actual[baseline]))
    return [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]]


def peak_memory(run: Run) -> int:
    """Bytes that a call holds at most beyond what was held before, as NumPy and Python count them."""
    run()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def import_times(modules: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds that `import module` takes in a new process, each in turn."""
    program = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    actual = {m: [] for m in modules}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for turn in range(rounds + 1):
        for m in modules:
            seconds = subprocess.check_output([sys.executable, "-c", program.format(m)], env=environment)
            if turn:  # in the first one, modules may have to be compiled
                actual[m].append(float(seconds))
    return actual


# ---------------------------------------------------------------- what drivers share

HELP = {
    "rounds": "how often each is measured, in turn",
    "seconds": "how long each measurement takes",
    "only": "parts of the rows' names",
    "json": "write the numbers to this file",
    "quick": "tiny sizes: only shows that all agree",
}


def options(doc: str, arguments: Sequence[str] | None, **defaults: Any) -> argparse.Namespace:
    """Options by their defaults: a bool is a switch, a tuple takes several words. `doc` describes them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true", help=HELP.get(name))
            continue
        several, one = isinstance(default, tuple), default[:1] if isinstance(default, tuple) else (default,)
        kind = type(one[0]) if one else str
        parser.add_argument(
            f"--{name}", type=kind, default=default, nargs="+" if several else None, help=HELP.get(name)
        )
    return parser.parse_args(arguments)


def chosen(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """The names that contain one of these parts; all if there are none."""
    return [name for name in names if not only or any(part in name for part in only)]


def beside(actual: dict[str, list[float]], name: str, baseline: str) -> str:
    """The ratio with its quartiles, as text."""
    low, high = spread(actual, name, baseline)
    return f"{ratio(actual, name, baseline):.3g} ({low:.3g} to {high:.3g})"


def save(path: str, numbers: Any) -> None:
    """Write the numbers as JSON, if there is a path."""
    if path:
        with open(path, "w") as file:
            json.dump(numbers, file, indent=1)


def compared(
    rows: Iterable[tuple[str, dict[str, Run], int]],
    asked: argparse.Namespace,
    clock: Callable[[Run, int], float] = time_of,
) -> list[dict]:
    """Time the programs of each row in turn, and print a line: the first one's microseconds, and its ratios to others.

    A row has a name, programs by name, and the steps that a call of them takes.
    """
    results = []
    for name, runs, steps in rows:
        actual = times(runs, asked.rounds, asked.seconds, clock)
        first, *others = runs
        ratios = "".join(f"; {beside(actual, first, other)} × {other}" for other in others)
        print(f"{name:52}{1e6 * statistics.median(actual[first]) / steps:12.2f} µs{ratios}", flush=True)
        results.append({"name": name, "steps": steps, "seconds": actual})
    save(asked.json, results)
    return results


def check(name: str, runs: dict[str, Run], **tolerances: float) -> None:
    """Raise AssertionError unless all programs of a row give what the first one gives."""
    expected, *others = (md.tree.leaves(run()) for run in runs.values())
    for other in others:
        for one, two in zip(expected, other, strict=True):
            numpy.testing.assert_allclose(numpy.asarray(two), one, **tolerances, err_msg=name)


def machine() -> str:
    """The processor and the versions, for the first line of a table."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        name = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    return f"{name}, Python {platform.python_version()}, NumPy {numpy.__version__}"
