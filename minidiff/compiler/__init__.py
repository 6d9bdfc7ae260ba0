"""The compiler of `jit`: simplify tapes, group operations, and generate NumPy source."""
