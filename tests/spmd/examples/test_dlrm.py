"""Recommendation models: `tests/programs/recommendation.py` compares those on ranks with the whole one."""

import numpy as np

from spmd.examples.dlrm import lookup
from tests.programs.recommendation import example


def test_a_lookup_is_a_row_of_each_table():
    params, (_, indices, _) = example()
    rows = [[table[i] for table, i in zip(params["tables"], row, strict=True)] for row in indices]
    np.testing.assert_array_equal(lookup(params["tables"], indices), rows)
