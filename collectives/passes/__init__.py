"""Compiler passes for collectives: fuse, delay and hoist them, overlap them with computation."""
