"""Random programs under every transformation (`checks.py`), and of every route (`routes.md`), made small if wrong.

A program is Python source, one call a line, and so are its arguments: a failure prints as a script. Programs of NumPy
run in plain NumPy, and are compared with themselves under `jvp`, `vjp`, `jit`, `vmap`, `checkpoint` and on tapes:
values, dtypes, shapes, who shares memory with whom, and what is held while inputs and results change.

    python -m tests.fuzz.arrays --minutes 20 --seed 0
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import sys
import time
from collections import Counter

from tests.fuzz.findings import ARRAYS, failures, program_of
from tests.fuzz.numpy_programs import REFUSED
from tests.fuzz.programs import HERE
from tests.fuzz.shrinking import kind_of, shrunk


def resident_memory() -> int:
    """Return the memory of this process now, in MiB."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


#: Of programs of NumPy, before each route has its turn: then they take about the same time.
PROGRAMS_A_ROUTE = 10
#: The programs after which all modules are imported, and caches filled: the memory grows little from then on.
PROGRAMS_TO_WARM_UP = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--programs", type=int, default=10**9, help="how many at most")
    parser.add_argument("--shown", type=int, default=3, help="how many failures of one kind are made small and printed")
    parser.add_argument("--routes", nargs="*", default=[ARRAYS, *HERE])
    options = parser.parse_args()
    end, counts, kinds, start = time.monotonic() + 60 * options.minutes, Counter(), Counter(), resident_memory()
    for k in range(options.programs):
        if time.monotonic() > end:
            break
        start = resident_memory() if k == PROGRAMS_TO_WARM_UP else start
        for name in options.routes:
            if name != ARRAYS and k % PROGRAMS_A_ROUTE and ARRAYS in options.routes:
                continue
            counts["programs", name] += 1
            if actual := failures(program_of(name, f"{options.seed}/{k}"), counts, name):
                kind = f"{name}, {kind_of(actual[0].error)}"
                kinds[kind] += 1
                if kinds[kind] <= options.shown:
                    print(f"# wrong in: {', '.join(f.name for f in actual)}\n{shrunk(actual[0], failures)}", flush=True)
    for key, n in sorted(counts.items()):
        print(f"{n:8} {', '.join(key)}")
    for text, n in REFUSED.most_common():
        print(f"{n:8} refused: {text}")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
    print(f"resident memory in MiB: {start} at first, {resident_memory()} at the end, {most} at most")
    print(f"{sum(kinds.values())} programs with findings, seed {options.seed}: {dict(kinds)}")
    sys.exit(bool(kinds))


if __name__ == "__main__":
    main()
