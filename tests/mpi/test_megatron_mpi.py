"""Tensor parallel transformers on MPI ranks."""

import pytest
from mpi4py import MPI

import spmd
from tests import transformers
from tests.transformers import AXIS, CONFIGS

everywhere = pytest.mark.parallel([2, 4, 8])
configs = list(CONFIGS.values()) if MPI.COMM_WORLD.size == 2 else [CONFIGS["grouped queries"]]


def mesh_of_all():
    return spmd.make_mesh((MPI.COMM_WORLD.size,), (AXIS,))


@everywhere
def test_losses_and_gradients_are_those_of_one_device():
    for config in configs:
        transformers.check_numbers(config, mesh_of_all())


@everywhere
def test_communication_is_what_the_documentation_says():
    for config in configs:
        transformers.check_communication(config, mesh_of_all())
    transformers.check_half_layers(mesh_of_all())


@everywhere
def test_f_and_g_by_hand():
    transformers.check_pairs(mesh_of_all())


@everywhere
def test_the_vocabulary_is_split():
    transformers.check_vocabulary(mesh_of_all())


@everywhere
def test_labels_out_of_range():
    transformers.check_labels(mesh_of_all())


@pytest.mark.parallel(4)
def test_examples_split_along_a_second_axis():
    transformers.check_split_batch(spmd.make_mesh((2, -1), ("batch", AXIS)))
