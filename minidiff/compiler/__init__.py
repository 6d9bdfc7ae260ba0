"""The compiler of `jit`: simplify tapes, group operations, generate source."""
