"""Run the tests in groups: the style, those in one process, and those on MPI ranks.

By default, tests that `tests/slow.txt` lists are left out; with --all they are not; with --slow they are all that runs;
with --quick, a sample is run.

All groups run, whichever fail. A summary at the end says which failed, and how long each took.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

LAUNCHES = ((4, 3, 2, 1), (8,))  # the numbers of ranks that tests ask for, by launches: each on the first of them
#: What `--quick` runs in one process: the core's tests, and some of each other part.
QUICK = (
    *(f"tests/minidiff/test_{name}.py" for name in ("named_vmap", "nesting")),
    *(f"tests/minidiff/api/test_{name}.py" for name in ("derivatives", "recording", "vmap")),
    *(f"tests/minidiff/core/test_{name}.py" for name in ("tape", "tracer")),
    "tests/minidiff/compiler/test_linear_transpose.py",
    "tests/minidiff/compiler/test_jit.py",
    "tests/collectives/test_partial_sums.py",
    "tests/spmd/shard_map/test_shard_map.py",
    "tests/house/test_layers.py",
    "tests/house/test_words.py",
)
QUICK_ON_RANKS = tuple(f"tests/mpi/test_{name}_mpi.py" for name in ("shard_map", "calls", "as_simulated"))
NO_TESTS = 5  # pytest's exit code where its options leave nothing to run


def groups(workers: int, options: Sequence[str], quick: bool = False) -> dict[str, list[str]]:
    """The command of each group, by its name."""
    files, launches, files_on_ranks = (QUICK, [(2,)], QUICK_ON_RANKS) if quick else ((), LAUNCHES, ["tests/mpi"])
    pytest = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "worksteal"]
    return {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "ruff format, cells": ["ruff", "format", "--check", "--config", "notebooks/cells.toml", "notebooks"],
        "one process": [*pytest, "-m", "parallel[1]", *options, *files],
        **{f"{sizes[0]} MPI ranks": on_ranks(sizes, [*options, *files_on_ranks]) for sizes in launches},
    }


def on_ranks(sizes: Sequence[int], options: Sequence[str]) -> list[str]:
    """The command that runs the tests for these numbers of ranks, of which the first is launched."""
    numbers = map(str, sizes)
    return ["mpiexec", "-n", str(sizes[0]), sys.executable, "-m", "tests.run_on_ranks", *numbers, *options]


def outcome(command: list[str], limit: float, no_tests: str) -> str:
    """Run a command for at most `limit` seconds; what became of it, which is "passed" if all is well."""
    with subprocess.Popen(command) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # so that a launcher ends its ranks
            return f"FAILED: did not end in {limit:.0f} s"
        except KeyboardInterrupt:  # of which the terminal has told the process, too
            process.wait()
            raise
    return {0: "passed", NO_TESTS: no_tests}.get(code, f"FAILED: exit code {code}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.run_all",
        usage="%(prog)s [--all | --slow | --quick] [--workers N] [--limit SECONDS] [options of pytest]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="run a sample of the tests, within a minute")
    parser.add_argument("--all", action="store_true", help="run all tests, the slow ones, too")
    parser.add_argument("--slow", action="store_true", help="run the slow tests alone")
    parser.add_argument("--workers", type=int, default=2, help="how many run the tests in one process")
    parser.add_argument("--limit", type=float, default=3600, help="seconds that a group may take")
    ours, options = parser.parse_known_args()
    no_tests = "no such tests" if options or ours.slow else "FAILED: no tests"
    options += ["--slow"] if ours.slow else [] if ours.all else ["--fast"]
    outcomes = {}
    for name, command in groups(ours.workers, options, ours.quick).items():
        print(f"\n{name}: {' '.join(command)}", flush=True)
        start = time.monotonic()
        outcomes[name] = outcome(command, ours.limit, no_tests), time.monotonic() - start
    print()
    for name, (label, seconds) in outcomes.items():
        print(f"{name:12} {seconds:7.1f} s  {label}")
    print(f"{'in all':12} {sum(seconds for _, seconds in outcomes.values()):7.1f} s", flush=True)
    sys.exit(any(label.startswith("FAILED") for label, _ in outcomes.values()))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
