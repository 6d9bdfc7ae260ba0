"""The compiler of `jit`: tapes are simplified, their operations grouped, and written out as NumPy source."""
