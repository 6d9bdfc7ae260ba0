"""python -m spmd: report the environment; with run script.py, run a script.

A script runs as one job: an exception on one rank ends all of them.
"""

import argparse
import os
import runpy
import sys

from spmd.environment import environment
from spmd.launch import ends_when_unread, first_rank_speaks, note_exit, the_first_has_spoken


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:
        return run(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m spmd",
        description="Prints versions, the MPI library, ranks, the launcher, and which backend is chosen and why; then "
        "problems, if there are any. Under mpirun, once for all ranks. Exit status 1: ranks cannot work together.",
        epilog="python -m spmd run script.py …, or run -m module …, runs a program: an exception on one rank ends the "
        "job from its first line to its last, also before it imports spmd, and in what it registers with atexit.",
    )
    with ends_when_unread(), first_rank_speaks():
        parser.parse_args(argv)
        found = environment()
        print(found, flush=True)
    if not found.works:
        the_first_has_spoken()
    return int(not found.works)


def run(argv: list[str]) -> int:
    """Run a script, or `-m` a module, with its arguments.

    spmd is imported before it, and so guards the job from the script's first line.
    """
    is_module = argv[:1] == ["-m"]
    program = argv[is_module:]
    if not program:
        with first_rank_speaks():
            print("usage: python -m spmd run script.py [arguments]\n       python -m spmd run -m module [arguments]")
        return 2
    sys.argv[:] = program
    try:
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as error:
        note_exit(error)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
