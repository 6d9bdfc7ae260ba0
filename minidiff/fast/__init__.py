"""What is here for speed alone: everything works without it."""
