"""`python -m tests.benchmarks [--quick] [--json FILE] [--picture FILE] [--only NAME …] [--peers NAME …]`."""

import os

# One thread for everyone, said before anyone is imported.
for _name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"
os.environ["NPROC"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

from .report import main  # noqa: E402

if __name__ == "__main__":
    main()
