"""Transformers whose tokens are split between half layers, on simulated ranks."""

import spmd
from tests.programs.sequence_transformers import check_memory
from tests.programs.transformers import AXIS, WIDE


def mesh_of(ranks):
    return spmd.make_mesh((ranks,), (AXIS,), backend="simulated")


def test_memory():
    check_memory(WIDE, mesh_of(4))
