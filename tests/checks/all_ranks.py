"""The mesh of all MPI ranks, values that are alike on them, and errors that all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

import spmd
from tests.checks.meshes import mesh


def line() -> spmd.Mesh:
    return mesh(MPI.COMM_WORLD.size, backend="mpi")


def check_alike(x: Any) -> None:
    """All ranks have one value."""
    everywhere = MPI.COMM_WORLD.allgather(x)
    assert all(y == everywhere[0] for y in everywhere)


def all_raise(do: Callable[[], object], match: str = "", error: type[Exception] = ValueError) -> str:
    """All ranks raise one error. Return its text."""
    with pytest.raises(error, match=match) as raised:
        do()
    check_alike(str(raised.value))
    return str(raised.value)
