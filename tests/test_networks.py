"""Networks under several parallelisms: losses and gradients of the unsharded one, collectives where they belong."""

import numpy as np
import pytest

import minidiff as md
import spmd
from minidiff.nn import relu
from spmd.parallel import column_parallel, gathering, row_parallel, tensor_parallel_dense
from spmd.parallel import loss as whole_loss
from spmd.parallel.pipeline import pipeline
from tests import networks
from tests.programs import assert_trees_close

CASES = [(name, shape) for ranks in networks.SHAPES for name, shape in networks.cases(ranks)]


@pytest.mark.parametrize("name, shape", CASES)
def test_losses_and_gradients_are_those_of_the_whole_network(name, shape):
    networks.check_numbers(name, shape, "simulated")


@pytest.mark.parametrize("name, shape", CASES)
def test_collectives_are_where_the_documentation_says(name, shape):
    networks.check_communication(name, shape, "simulated")
