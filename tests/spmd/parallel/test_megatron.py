"""Tensor parallel transformers on simulated ranks."""

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
