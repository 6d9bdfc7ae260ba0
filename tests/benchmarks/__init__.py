"""Times of this library beside others', and its collectives and types beside JAX's: on one thread, if nobody says more.

It is said here, before NumPy is imported.
"""

import os

for _name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM"):
    os.environ.setdefault(f"{_name}_NUM_THREADS", "1")
