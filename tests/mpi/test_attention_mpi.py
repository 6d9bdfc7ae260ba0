"""Attention of a sequence that is split over MPI ranks."""

import pytest
from mpi4py import MPI

import spmd
from spmd.parallel import attention_by_heads, ring_attention
from tests.attention_programs import check_split


@pytest.mark.parallel([2, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_split_sequences(causal):
    mesh = spmd.make_mesh((MPI.COMM_WORLD.size,), ("tokens",), backend="mpi")
    for attend in (attention_by_heads, ring_attention):
        check_split(mesh, attend, causal, groups=max(4, mesh.size))
