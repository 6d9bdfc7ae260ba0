"""Guards for SPMD programs: mismatched calls, deadlocks, notebook errors."""
