"""The values of programs: NumPy arrays, their dtypes and memory, 16-bit floats, and settings that are not arrays."""

#: The version of the packages; `setup.cfg` reads it here, where nothing is imported.
VERSION = "0.1.0"
