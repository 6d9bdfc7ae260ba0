"""What explains failures: errors, source locations, tracebacks, checks of types."""
