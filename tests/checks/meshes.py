"""Meshes that tests share, and functions mapped over them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import spmd


@functools.cache
def mesh(*sizes: int, names: Sequence[str] = "ijk", backend: str = "simulated") -> spmd.Mesh:
    """Return a mesh with axes 'i', 'j' and 'k', or others, once in a session: an MPI has only so many communicators.

    >>> mesh(2, 3)
    Mesh(i: 2, j: 3; 6 ranks, simulated)
    """
    return spmd.make_mesh(sizes, tuple(names)[: len(sizes)], backend=backend)


def mapped(f: Callable, over: spmd.Mesh, in_specs: Any, out_specs: Any, **options: Any) -> Callable:
    """Return `shard_map` of a function, with the arguments in the order in which tests write them."""
    return spmd.shard_map(f, mesh=over, in_specs=in_specs, out_specs=out_specs, **options)
