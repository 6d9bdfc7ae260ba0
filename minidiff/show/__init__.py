"""Visualise tapes and derivatives: as graphs, and as tables of values."""
