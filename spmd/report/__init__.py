"""Reports of communication and its time, and pictures of sharded arrays."""
