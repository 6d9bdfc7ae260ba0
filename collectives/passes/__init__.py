"""Compiler passes for collectives: fewer of them, earlier, and while ranks compute."""
