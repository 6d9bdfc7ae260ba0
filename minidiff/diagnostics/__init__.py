"""Explanations of failures: errors, source locations, tracebacks, names of other libraries."""
