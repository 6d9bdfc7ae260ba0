"""What keeps ranks together: the mismatch check, the deadlock watchdog, and errors of ranks in notebooks."""
