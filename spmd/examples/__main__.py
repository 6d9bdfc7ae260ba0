"""python -m spmd.examples: list the examples."""

import sys

import spmd.examples
from spmd.mesh.launch import ends_when_unread, first_rank_speaks

if __name__ == "__main__":
    with ends_when_unread(), first_rank_speaks():
        print(spmd.examples.__doc__)
        if sys.argv[1:] not in ([], ["-h"], ["--help"]):
            sys.exit(f"{sys.argv[1]}: start an example by its own name, python -m spmd.examples.data_parallel")
