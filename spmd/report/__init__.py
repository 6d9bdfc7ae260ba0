"""Reports of what a program communicates and how long it takes, and pictures of sharded arrays."""
