"""The transformations that users call: they check arguments, flatten trees, and run the core."""
