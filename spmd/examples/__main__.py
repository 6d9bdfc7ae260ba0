"""python -m spmd.examples: list the examples."""

import sys

import spmd.examples
from spmd.mesh.launch import end_when_unread, silence_other_ranks

if __name__ == "__main__":
    with end_when_unread(), silence_other_ranks():
        print(spmd.examples.__doc__)
        if sys.argv[1:] not in ([], ["-h"], ["--help"]):
            sys.exit(f"{sys.argv[1]}: start an example by its own name, python -m spmd.examples.data_parallel")
