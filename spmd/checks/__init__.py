"""Checks that ranks agree."""
