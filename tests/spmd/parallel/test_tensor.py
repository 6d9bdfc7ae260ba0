"""Tensor and sequence parallel transformers on simulated ranks; their rows are in `tests/checks/ranks.py`."""

import minidiff as md
from spmd.parallel import tensor_parallel_transformer
from tests.checks.meshes import mesh
from tests.programs import sequence_transformers, transformers
from tests.programs.transformers import AXIS, WIDE


def test_derivatives_are_those_of_finite_differences():
    params, batch = transformers.example(WIDE, examples=1, tokens=3)
    loss = tensor_parallel_transformer(mesh(2, names=(AXIS,)), WIDE)
    md.testing.check_grads(lambda params: loss(params, batch), (params,), order=1)


def test_split_tokens_save_memory():
    sequence_transformers.check_memory(mesh(4, names=(AXIS,)), WIDE)
