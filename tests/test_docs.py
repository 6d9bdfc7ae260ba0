"""The examples in the docstrings of `collectives`: they take the two ranks of its module docstring for granted."""

import doctest

import numpy as np

import collectives
import spmd
from collectives import ops

NAMES = {
    "np": np,
    "spmd": spmd,
    "P": spmd.P,
    "mesh": spmd.make_mesh((2,), ("i",), backend="simulated"),
}


def test_examples_of_collectives():
    results = doctest.testmod(ops, extraglobs=NAMES)
    assert results.failed == 0
    assert results.attempted >= 2 * len(collectives.__all__)
