"""The values of programs: NumPy arrays, their dtypes and memory, 16-bit floats, and settings that are not arrays."""
