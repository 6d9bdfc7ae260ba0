"""shard_map: an operation whose parameter is a body, and the interpreter that runs it."""
