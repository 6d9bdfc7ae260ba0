"""The MPI backend: this process is one rank, and a value is its local block.

No other package imports mpi4py. `Ranks` are those of a mesh: `MPIRanks`, which call MPI as its standard describes, with
the faster ways of `short_messages.py`.
"""

from collectives.backends.mpi.abort import abort, end, leave
from collectives.backends.mpi.library import library, world
from collectives.backends.mpi.short_messages import ShortMessages as Ranks

__all__ = ["Ranks", "abort", "end", "leave", "library", "world"]
