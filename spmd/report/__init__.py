"""What a program communicates and how long that takes; and pictures of sharded arrays."""
