"""Mutants: small faults put into the packages one at a time, and the tests that notice each. See README.md."""
