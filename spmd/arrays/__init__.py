"""Sharded arrays: how operations act on their shards, and how an array is sharded in another way."""
