"""Meshes: their ranks and axes, partition specs, and how programs on ranks are started."""
