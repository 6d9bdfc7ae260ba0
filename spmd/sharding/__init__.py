"""Sharded arrays: the sharded array, routes between specs, and how operations keep arrays split."""
