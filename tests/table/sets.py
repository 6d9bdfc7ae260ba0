"""The set operations of `minidiff/ops/sorting.py`: their results' shapes depend on values, so they have no rows."""

import numpy as np

DISCRETE: set = set()

LINEAR: dict = {}

CONCRETE = {np.union1d, np.intersect1d, np.setdiff1d, np.setxor1d}
CONCRETE |= {np.unique_values, np.unique_counts, np.unique_inverse, np.unique_all}

ROWS: list = []
