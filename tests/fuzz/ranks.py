"""Random programs of routes on MPI ranks: each is a script that all ranks run, and that raises where a result is wrong.

    python -m tests.fuzz.ranks --minutes 10 --seed 0 --ranks 2 4 [--routes NAME ...]

launches `mpiexec` again and again, with a timeout, and prints the scripts of the programs that fail, made smaller.
Under a launcher,

    mpiexec -n 2 python -m tests.fuzz.ranks --minutes 1 --seed 0

the ranks run programs of the routes in `ON_RANKS` in turn, and the job ends at the first that fails. All ranks draw the
same programs; what is to differ between ranks, the property's function computes from its rank.

A program after which ranks cannot go on is one of a route in `ALONE`: it has a launch. Such a job passes if all ranks
reach its end, or if it ends with one of the texts in `REFUSALS`; it prints `WRONG` and what is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from spmd.mesh.launch import launcher_size
from tests.checks.launch import launching
from tests.fuzz.programs import ALONE, ON_RANKS, Program, program_of_route
from tests.fuzz.shrinking import Failure, run, shrunk

#: How a job may end.
REFUSALS = re.compile(
    "this rank makes no further calls|for others that never arrive|ranks do not call the same collective"
    "|ranks compare different values|ranks have different values of args"
)
PATIENCE = 90  # seconds, for a launch and the programs that it runs
PROGRAMS = 40  # in a launch


def run_here(seeds: Iterable[str], routes: Sequence[str], minutes: float) -> None:
    """Run programs on all ranks of this launch until the first that fails, or for some minutes."""
    from mpi4py import MPI

    end, count = time.monotonic() + 60 * minutes, 0
    for seed, name in ((seed, name) for seed in seeds for name in routes):
        if not MPI.COMM_WORLD.bcast(time.monotonic() < end):
            break
        try:
            run(program_of_route(name, seed))
        except Exception as error:
            print(f"WRONG {name!r}, seed {seed!r}, rank {MPI.COMM_WORLD.rank}: {error!r}", flush=True)
            raise
        count += 1
    if MPI.COMM_WORLD.rank == 0:
        print(f"{count} programs", flush=True)


class Launched(AssertionError):
    """Output of a launch that ended in an error."""


def launch(ranks: int, *command: str) -> str | None:
    """Return the output of a launch, if it did not end well."""
    with launching(ranks, *command) as job:
        try:
            out, err = job.communicate(timeout=PATIENCE)
            ending = f"exit code {job.returncode}"
        except subprocess.TimeoutExpired:
            ending = "no end"
            job.send_signal(signal.SIGTERM)  # the launcher ends its ranks
            try:
                out, err = job.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                job.kill()
                out, err = job.communicate()
    return None if job.returncode == 0 and ending != "no end" and "WRONG" not in out + err else f"{ending}\n{out}{err}"


def finding(program: Program, counts: Counter, name: str, ranks: int) -> list[Failure]:
    """Return the failure of a program in a launch of its own."""
    counts[name, ranks] += 1
    output = launch(ranks, "-c", program.script())
    if output is None or ("no end" not in output and "WRONG" not in output and REFUSALS.search(output)):
        return []
    return [Failure(program, f"{name}, {ranks} ranks", Launched(output[-3000:]))]


def findings_together(seeds: Sequence[str], routes: Sequence[str], ranks: int, counts: Counter) -> list[Failure]:
    """Return the failure of the first of many programs of routes in `ON_RANKS`."""
    counts["launches of many", ranks] += 1
    options = "--minutes", f"{PATIENCE / 120}", "--seeds", *seeds, "--routes", *routes
    output = launch(ranks, "-m", "tests.fuzz.ranks", *options)
    if output is None:
        return []
    name, seed = re.findall(r"WRONG '([^']+)', seed '([^']*)'", output)[:1] or [(routes[0], seeds[0])]
    return [Failure(program_of_route(name, seed), f"{name}, {ranks} ranks", Launched(output[-3000:]))]


def fuzz_ranks(
    seed: str, ranks: Sequence[int], routes: Sequence[str], minutes: float, counts: Counter, programs: int = 10**9
) -> Iterator[tuple[Failure, int]]:
    """The failures of some minutes, or some programs of each route in `ALONE`, and on how many ranks."""
    end = time.monotonic() + 60 * minutes
    together = [name for name in routes if name in ON_RANKS]
    for k, size in ((k, size) for k in range(programs) for size in ranks):
        if time.monotonic() > end:
            return
        if together and k % 10 == 0:
            seeds = [f"{seed}/{k}/{size}/{n}" for n in range(min(PROGRAMS, programs))]
            yield from ((failure, size) for failure in findings_together(seeds, together, size, counts))
        for name in routes:
            if name in ALONE and time.monotonic() < end:
                yield from ((f, size) for f in finding(program_of_route(name, f"{seed}/{k}"), counts, name, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--seeds", nargs="*", help="those of programs under a launcher")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--routes", nargs="*", default=[*ON_RANKS, *ALONE])
    options = parser.parse_args()
    if launcher_size() is not None:
        seeds = options.seeds or (f"{options.seed}/{k}" for k in itertools.count())
        run_here(seeds, [r for r in options.routes if r in ON_RANKS], options.minutes)
        return
    counts, count = Counter(), 0
    for failure, size in fuzz_ranks(options.seed, options.ranks, options.routes, options.minutes, counts):
        count += 1
        print(shrunk(failure, lambda p, c, _, f=failure, n=size: finding(p, c, f.name.split(",")[0], n)), flush=True)
    for (name, size), n in sorted(counts.items(), key=str):
        print(f"{n:8} {name} on {size} ranks")
    print(f"{count} findings, seed {options.seed}")
    sys.exit(bool(count))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
