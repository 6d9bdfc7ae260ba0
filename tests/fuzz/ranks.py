"""Random programs on MPI ranks: each is a script that all ranks run, and that raises where a result is wrong.

    python -m tests.fuzz.ranks --minutes 10 --seed 0 --ranks 2 4 [--routes NAME ...]

launches `mpiexec` again and again, with a timeout, and prints the scripts of the programs that fail. Under a launcher,

    mpiexec -n 2 python -m tests.fuzz.ranks --minutes 1 --seed 0

the ranks run programs of `ROUTES` in turn, and the job ends at the first that fails.

A route is a function `route(rng: random.Random) -> str` in a module of `tests/fuzz/routes/`, listed in `ROUTES` below.
It returns the text of a program, indented or not, in which the names of `HEADER` are known: `mesh` has all `SIZE` ranks
along the axis "i", and `rank` is this process's. All ranks get the same text, as their `rng` has the same seed; what
is to differ between ranks, the program computes from `rank`. It raises on at least one rank if something is wrong.
(What should be refused, the program catches itself; all ranks must reach its end.) Many programs share one launch.

A program after which ranks cannot go on is one of a route in `ALONE`: it has a launch of its own. Such a job passes if
all ranks reach its end, or if it ends with one of the texts in `REFUSALS`. A program prints `WRONG` and what is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from spmd.mesh.launch import launcher_size
from tests.checks.launch import launching
from tests.fuzz.routes.agreement import arguments_differ
from tests.fuzz.routes.indices import indices
from tests.fuzz.routes.lengths import lengths_on_ranks
from tests.fuzz.routes.masks import masked_functions, uneven_data
from tests.fuzz.routes.reports import reports
from tests.fuzz.routes.waits import exceptions_in_waits, mixed_collectives

HEADER = """\
import os, signal, sys, time, random
import numpy
import minidiff as md, minidiff.numpy as np, spmd
import collectives
from collectives import *
from collectives.reference import collective_ref
from spmd import P
from tests.fuzz.scripts import agree, not_jitted
SIZE = spmd.mesh.launch.launcher_size() or 1
mesh = spmd.make_mesh((SIZE,), ("i",))
rank = mesh.rank
"""
#: Routes whose programs share a launch.
ROUTES = {
    f.__name__: f
    for f in (mixed_collectives, arguments_differ, reports, lengths_on_ranks, masked_functions, uneven_data, indices)
}
#: Routes whose programs may leave ranks that cannot go on.
ALONE = {f.__name__: f for f in (exceptions_in_waits,)}
#: How a job may end.
REFUSALS = re.compile(
    "this rank makes no further calls|for others that never arrive|ranks do not call the same collective"
    "|ranks compare different values|ranks have different values of args"
)
PATIENCE = 90  # seconds, for a launch and the programs that it runs
PROGRAMS = 40  # in a launch


def script(route: str, seed: str) -> str:
    """A program of a route; the same one for the same seed."""
    text = {**ROUTES, **ALONE}[route](random.Random(f"{route}/{seed}"))
    return HEADER + textwrap.dedent(text).strip() + "\n"


# ---------------------------------------------------------------- on a rank


def run_here(seeds: Iterator[str], routes: Sequence[str], minutes: float) -> None:
    """Run programs on all ranks of this launch until the first that fails, or for some minutes."""
    from mpi4py import MPI

    end, count = time.monotonic() + 60 * minutes, 0
    for seed, route in ((seed, route) for seed in seeds for route in routes):
        if not MPI.COMM_WORLD.bcast(time.monotonic() < end):
            break
        text = script(route, seed)
        try:
            exec(compile(text, "<a route's program>", "exec"), {"__name__": "__program__"})
        except Exception as error:
            print(
                f"WRONG {route}, seed {seed!r}, rank {MPI.COMM_WORLD.rank}: {type(error).__name__}: {error}", flush=True
            )
            raise
        count += 1
    if MPI.COMM_WORLD.rank == 0:
        print(f"{count} programs", flush=True)


# ---------------------------------------------------------------- launches


def launch(ranks: int, *command: str) -> tuple[int | None, str]:
    """The exit code of a launch, None if it had to be killed, and all that it said."""
    with launching(ranks, *command) as job:
        try:
            out, err = job.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGTERM)  # the launcher ends its ranks
            try:
                out, err = job.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                job.kill()
                out, err = job.communicate()
            return None, out + err
    return job.returncode, out + err


def finding(route: str, seed: str, ranks: int) -> str | None:
    """Return the finding of a program of a route in `ALONE`, or None."""
    code, output = launch(ranks, "-c", script(route, seed))
    if code == 0 and "WRONG" not in output:
        return None
    if code is not None and "WRONG" not in output and REFUSALS.search(output):
        return None
    ending = "no end" if code is None else f"exit code {code}"
    shown = output[-3000:].replace("\n", "\n# ")
    return f"# {route}, seed {seed!r}, {ranks} ranks: {ending}\n# {shown}\n{script(route, seed)}"


def findings_together(seeds: Sequence[str], routes: Sequence[str], ranks: int, minutes: float) -> str | None:
    """Return the finding of one of many programs of routes in `ROUTES`, or None."""
    command = ["-m", "tests.fuzz.ranks", "--minutes", str(minutes), "--seeds", *seeds, "--routes", *routes]
    code, output = launch(ranks, *command)
    if code == 0:
        return None
    shown = output[-3000:].replace("\n", "\n# ")
    failed = re.search(r"WRONG (\w+), seed '([^']*)'", output)
    text = script(failed[1], failed[2]) if failed else ""
    return (
        f"# {', '.join(routes)}, {ranks} ranks: {'no end' if code is None else f'exit code {code}'}\n# {shown}\n{text}"
    )


def fuzz_ranks(
    seed: str, ranks: Sequence[int], routes: Sequence[str], minutes: float, counts: Counter, programs: int = 10**9
) -> Iterator[str]:
    """The findings of some minutes, or some programs of each route in `ALONE`."""
    end = time.monotonic() + 60 * minutes
    together = [route for route in routes if route in ROUTES]
    for k in range(programs):
        for size in ranks:
            if time.monotonic() > end:
                return
            if together and k % 10 == 0:
                seeds = [f"{seed}/{k}/{size}/{n}" for n in range(min(PROGRAMS, programs))]
                counts["launches of many", size] += 1
                if text := findings_together(seeds, together, size, PATIENCE / 120):
                    yield text
            for route in routes:
                if route in ALONE and time.monotonic() < end:
                    counts[route, size] += 1
                    if text := finding(route, f"{seed}/{k}", size):
                        yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--seeds", nargs="*", help="those of programs under a launcher")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--routes", nargs="*", default=[*ROUTES, *ALONE])
    options = parser.parse_args()
    if launcher_size() is not None:
        seeds = options.seeds or (f"{options.seed}/{k}" for k in itertools.count())
        run_here(iter(seeds), [r for r in options.routes if r in ROUTES], options.minutes)
        return
    counts: Counter = Counter()
    failures = 0
    for text in fuzz_ranks(options.seed, options.ranks, options.routes, options.minutes, counts):
        failures += 1
        print(text, flush=True)
    for (name, size), n in sorted(counts.items(), key=str):
        print(f"{n:8} {name} on {size} ranks")
    print(f"{failures} findings, seed {options.seed}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
