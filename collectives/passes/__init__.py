"""Compiler passes for collectives: fuse, delay, hoist and overlap them."""
