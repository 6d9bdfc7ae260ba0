"""Networks on MPI ranks: losses and gradients of the unsharded one, and what they communicate."""

import pytest
from mpi4py import MPI

import spmd
from spmd.parallel import attention_by_heads, ring_attention
from tests import networks

everywhere = pytest.mark.parallel([2, 4, 8])


@everywhere
def test_losses_and_gradients_are_those_of_the_whole_network():
    for name, shape in networks.cases(MPI.COMM_WORLD.size):
        networks.check_numbers(name, shape, ways=networks.WAYS if MPI.COMM_WORLD.size == 2 else networks.WAYS[:1])


@everywhere
def test_collectives_are_where_the_documentation_says():
    for name, shape in networks.cases(MPI.COMM_WORLD.size):
        networks.check_communication(name, shape)


@everywhere
def test_attention_and_experts_over_ranks():
    mesh = spmd.make_mesh((-1,), ("ranks",))
    for attend in (attention_by_heads, ring_attention):
        networks.check_attention(attend, mesh)
    for capacity in (1, 24):
        networks.check_experts(capacity, mesh)


@everywhere
def test_a_pipeline_of_layers_that_are_not_finite_everywhere():
    for name in networks.PARTIAL_LAYERS:
        networks.check_partial_layers(name, spmd.make_mesh((-1,), ("stages",)))
