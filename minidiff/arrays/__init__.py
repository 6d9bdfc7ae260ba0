"""NumPy arrays as values of programs: which dtypes they have, 16-bit floats, and which arrays share memory."""
