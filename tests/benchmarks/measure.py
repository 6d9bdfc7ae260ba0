"""Times and memory, always beside a baseline measured in the same process at the same time."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable

Run = Callable[[], object]


def times(runs: dict[str, Run], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds a call of each, `rounds` times in turn; each turn calls for about `seconds`.

    Whatever slows the machine for a while slows all of them: compare them within a round.
    """
    calls = {}
    for name, run in runs.items():
        run()  # what is cached or compiled is so from here on
        calls[name] = max(1, round(seconds / min(_time(run, 1) for _ in range(3))))
    gc.collect()
    gc.freeze()
    actual = {name: [] for name in runs}
    try:
        for _ in range(rounds):
            for name, run in runs.items():
                actual[name].append(_time(run, calls[name]))
    finally:
        gc.unfreeze()
    return actual


def _time(run: Run, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


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
