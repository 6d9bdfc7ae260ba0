"""Tapes and derivatives to look at: drawn as graphs, and as tables of values."""
