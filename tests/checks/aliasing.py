"""Checks of which memory results share with arguments."""

import itertools
from typing import Any

import numpy as np

import minidiff as md


def arrays(x: Any) -> list[np.ndarray]:
    return [leaf for leaf in md.tree.leaves(x) if isinstance(leaf, np.ndarray)]


def check_apart(results: Any, *others: Any) -> None:
    """Results can be written into, and share memory neither with each other nor with anything else."""
    results, others = arrays(results), arrays(others)
    assert all(x.flags.writeable for x in results)
    assert not any(np.shares_memory(x, y) for x, y in itertools.combinations(results, 2))
    assert not any(np.shares_memory(x, y) for x, y in itertools.product(results, others))


def check_as_numpys(results: Any, expected: Any, args: Any) -> None:
    """Results share memory with arguments, and are read-only, only where NumPy's own are."""
    for x, e in zip(md.tree.leaves(results), md.tree.leaves(expected), strict=True):
        if isinstance(x, np.ndarray):
            assert x.flags.writeable or not e.flags.writeable
            for a in arrays(args):
                assert not np.shares_memory(x, a) or (isinstance(e, np.ndarray) and np.shares_memory(e, a))
