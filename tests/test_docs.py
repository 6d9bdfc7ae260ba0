"""The examples in the docstrings of `collectives`: they take the two ranks of `ops`'s docstring for granted."""

import doctest

import numpy as np

import collectives
import minidiff as md
import spmd
from collectives import ops, reference, rooted

NAMES = {
    "md": md,
    "np": np,
    "spmd": spmd,
    "P": spmd.P,
    "mesh": spmd.make_mesh((2,), ("i",), backend="simulated"),
}


def test_examples_of_collectives():
    results = [doctest.testmod(module, extraglobs=NAMES) for module in (ops, rooted)]
    assert [r.failed for r in results] == [0, 0]
    assert sum(r.attempted for r in results) >= 2 * len(collectives.__all__)


def test_examples_of_references():
    results = doctest.testmod(reference)
    assert results.failed == 0
    assert results.attempted >= len({*reference.REFERENCES.values()})
