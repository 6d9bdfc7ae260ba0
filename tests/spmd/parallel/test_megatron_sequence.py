"""Transformers whose tokens are split between half layers, on simulated ranks."""

import pytest

import spmd
from spmd.parallel import tensor_parallel_transformer
from tests.programs.sequence_transformers import check_memory
from tests.programs.transformers import AXIS, WIDE, example


def mesh_of(ranks):
    return spmd.make_mesh((ranks,), (AXIS,), backend="simulated")


def test_memory():
    check_memory(WIDE, mesh_of(4))


def test_tokens_that_ranks_do_not_divide():
    params, batch = example(WIDE, tokens=5)
    with pytest.raises(ValueError, match=r"axis 1 of f64\[4,5,16\] is split over 4 ranks, which do not divide 5"):
        tensor_parallel_transformer(mesh_of(4), WIDE, sequence_parallel=True)(params, batch)
