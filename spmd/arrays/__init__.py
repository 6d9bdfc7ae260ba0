"""Sharded arrays: how operations run on shards, and how to reshard."""
