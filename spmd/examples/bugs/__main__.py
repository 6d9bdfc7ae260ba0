"""python -m spmd.examples.bugs NAME: run a program, and print what the ranks print once."""

import pathlib
import runpy
import sys

import spmd.examples.bugs
from spmd.mesh.launch import end_when_unread, silence_other_ranks

NAMES = sorted(p.stem for p in pathlib.Path(__file__).parent.glob("[a-z]*.py"))

if __name__ == "__main__":
    with end_when_unread(), silence_other_ranks():
        if sys.argv[1:] and sys.argv[1] in NAMES:
            runpy.run_module(f"spmd.examples.bugs.{sys.argv[1]}", run_name="__main__")
        else:
            print(spmd.examples.bugs.__doc__)
            if sys.argv[1:] not in ([], ["-h"], ["--help"]):
                sys.exit(f"{sys.argv[1]}: there is no such program")
