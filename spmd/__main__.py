"""python -m spmd: what this program finds where it runs, and what is off about it."""

import argparse
import sys

from spmd.environment import environment
from spmd.launch import first_rank_speaks, the_first_has_spoken


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m spmd",
        description="Prints versions, the MPI library, ranks, the launcher, and which backend is chosen and why; then "
        "what is off, if something is. Under mpirun, once for all ranks. Exit status 1: ranks cannot work together.",
    )
    with first_rank_speaks():
        parser.parse_args(argv)
        found = environment()
        print(found, flush=True)
    if not found.works:
        the_first_has_spoken()
    return int(not found.works)


if __name__ == "__main__":
    sys.exit(main())
