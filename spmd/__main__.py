"""python -m spmd: report the environment; with run script.py, run a script.

A script runs as one job: an exception on one rank ends all of them.
"""

import argparse
import importlib.util
import os
import runpy
import sys

import minidiff
from minidiff.errors.tracebacks import shorten
from spmd.mesh.launch import end_when_unread, note_exit, silence_other_ranks, wait_for_first_rank
from spmd.report.environment import environment


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:
        return run(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m spmd",
        description="Prints versions, the MPI library, ranks, the launcher, and which backend is chosen and why; then "
        "problems, if there are any. Under mpirun, once for all ranks. Exit status 1: ranks cannot work together.",
        epilog="python -m spmd run script.py …, or run -m module …, runs a program: an exception on one rank ends the "
        "job from its first line to its last, also before it imports spmd, and in what it registers with atexit. "
        "python -m spmd.examples lists the examples.",
    )
    parser.add_argument("--version", action="version", version=f"minidiff {minidiff.__version__}")
    with end_when_unread(), silence_other_ranks():
        parser.parse_args(argv)
        report = environment()
        print(report, flush=True)
    if not report.works:
        wait_for_first_rank()
    return int(not report.works)


def run(argv: list[str]) -> int:
    """Run a script, or `-m` a module, with its arguments.

    spmd is imported before it, and so guards the job from the script's first line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m spmd run",
        usage="%(prog)s script.py [arguments]\n       %(prog)s -m module [arguments]",
        description="Runs a program as one job: an exception on one rank ends all of them.",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module, by its name")
    parser.add_argument("program", help="a script, or with -m a module")
    count = next((n for n, argument in enumerate(argv, 1) if not argument.startswith("-")), len(argv))
    options = argv[:count]  # the others are the program's
    try:
        with silence_other_ranks():
            call = parser.parse_args(options)
            sys.path[0] = os.getcwd() if call.is_module else os.path.dirname(os.path.abspath(call.program))
            if not _is_there(call.program, call.is_module):
                kind = "module" if call.is_module else "script"
                parser.error(f"there is no {kind} {call.program!r} in {os.getcwd()}")
    except SystemExit as error:
        if error.code:
            wait_for_first_rank()
        raise
    sys.argv[:] = [call.program, *argv[count:]]
    try:
        if call.is_module:
            runpy.run_module(call.program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(call.program, run_name="__main__")
    except SystemExit as error:
        note_exit(error)
        raise
    except Exception as error:
        shorten(error)  # the frames above the program's, which no function of the library has left
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _is_there(program: str, is_module: bool) -> bool:
    """Return whether a script, or a module, can be found."""
    try:
        return importlib.util.find_spec(program) is not None if is_module else os.path.exists(program)
    except ModuleNotFoundError:  # a package of its name
        return False


if __name__ == "__main__":
    sys.exit(main())
