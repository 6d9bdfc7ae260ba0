"""What stands between the user and the engine: arguments, their types and memory, and settings."""
