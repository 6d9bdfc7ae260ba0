"""Tensor parallel transformers on simulated ranks."""

from dataclasses import replace

import pytest

import minidiff as md
import spmd
from spmd.parallel import tensor_parallel_transformer
from tests.programs import transformers
from tests.programs.transformers import AXIS, WIDE


def mesh_of(ranks):
    return spmd.make_mesh((ranks,), (AXIS,), backend="simulated")


def test_derivatives_are_those_of_finite_differences():
    params, batch = transformers.example(WIDE, examples=1, tokens=3)
    loss = tensor_parallel_transformer(mesh_of(2), WIDE)
    md.testing.check_grads(lambda params: loss(params, batch), (params,), order=1)


@pytest.mark.parametrize("name, size", [("heads", 2), ("kv_heads", 2), ("hidden", 10)])
def test_ranks_that_do_not_divide(name, size):
    with pytest.raises(ValueError, match=rf"{name}={size} is not a multiple of the 4 ranks along 'feats'"):
        tensor_parallel_transformer(mesh_of(4), replace(WIDE, **{name: size}))


def test_a_mesh_of_other_axes():
    with pytest.raises(ValueError, match=r"tensor_parallel_transformer takes a mesh with one axis, for feats"):
        tensor_parallel_transformer(spmd.make_mesh((2, 2), ("i", "j"), backend="simulated"), WIDE)
