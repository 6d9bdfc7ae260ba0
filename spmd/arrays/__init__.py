"""Sharded arrays: how operations run on their shards, and how an array is resharded."""
