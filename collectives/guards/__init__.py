"""Guards for SPMD programs: the mismatch check, the deadlock watchdog, errors in notebooks."""
