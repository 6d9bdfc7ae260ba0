"""Tensor parallel transformers on simulated ranks."""

from dataclasses import replace

import pytest

import minidiff as md
import spmd
from spmd.parallel import tensor_parallel_transformer
from tests import transformers
from tests.transformers import AXIS, CONFIGS, WIDE

CASES = [(name, ranks) for ranks in (2, 4) for name in CONFIGS]


def mesh_of(ranks):
    return spmd.make_mesh((ranks,), (AXIS,), backend="simulated")


@pytest.mark.parametrize("name, ranks", [*CASES, ("tied", 1)])
def test_losses_and_gradients_are_those_of_one_device(name, ranks):
    transformers.check_numbers(CONFIGS[name], mesh_of(ranks))


@pytest.mark.parametrize("name, ranks", CASES)
def test_communication_is_what_the_documentation_says(name, ranks):
    transformers.check_communication(CONFIGS[name], mesh_of(ranks))


def test_a_half_layer_sums_once_each_way():
    transformers.check_half_layers(mesh_of(4))


def test_examples_split_along_a_second_axis():
    transformers.check_split_batch(spmd.make_mesh((2, 2), ("batch", AXIS), backend="simulated"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_vocabulary_is_split(ranks):
    transformers.check_vocabulary(mesh_of(ranks))


@pytest.mark.parametrize("ranks", [1, 2])
def test_labels_out_of_range(ranks):
    transformers.check_labels(mesh_of(ranks))


@pytest.mark.filterwarnings("ignore:.*, one after another")  # it looks at each rank's
@pytest.mark.parametrize("ranks", [2, 4])
def test_f_and_g_by_hand(ranks):
    transformers.check_pairs(mesh_of(ranks))


def test_derivatives_are_those_of_finite_differences():
    params, batch = transformers.example(WIDE, examples=1, tokens=3)
    loss = tensor_parallel_transformer(mesh_of(2), WIDE)
    md.testing.check_grads(lambda params: loss(params, batch), (params,), order=1)


@pytest.mark.parametrize("name, size", [("vocabulary", 6), ("heads", 2), ("kv_heads", 2), ("hidden", 10)])
def test_ranks_that_do_not_divide(name, size):
    with pytest.raises(ValueError, match=rf"{name}={size} is not a multiple of the 4 ranks along 'feats'"):
        tensor_parallel_transformer(mesh_of(4), replace(WIDE, **{name: size}))


def test_a_mesh_of_other_axes():
    with pytest.raises(ValueError, match=r"tensor_parallel_transformer takes a mesh with one axis, for feats"):
        tensor_parallel_transformer(spmd.make_mesh((2, 2), ("i", "j"), backend="simulated"), WIDE)
