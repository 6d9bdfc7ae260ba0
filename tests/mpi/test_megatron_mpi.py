"""The step of tensor, context and data parallelism on MPI ranks: the loss and the gradients of one device."""

import numpy as np
import pytest

import minidiff as md
import spmd
from spmd import P
from spmd.examples.megatron_3d import (
    ALL_AXES,
    MegatronConfig,
    init_megatron,
    loss_and_gradients,
    megatron_specs,
    text_spec,
)
from spmd.pipeline import one_f_one_b
from tests.checks.results import assert_trees_close

CONFIG = MegatronConfig(vocabulary=12, features=24, heads=12, layers=2, hidden=12)
CASES = [((2, 2, 1, 1, 1), {"sharded": True}), ((1, 1, 2, 1, 2), {"sequence": True, "overlap": True})]


def computed(sizes, options, backend):
    """Return the loss and the whole gradients."""
    mesh = spmd.make_mesh(sizes, ALL_AXES, backend=backend)
    params = md.tree.map(lambda x: x.astype("float64") * 10, init_megatron(md.random.key(0), CONFIG))
    text = np.random.default_rng(0).integers(0, 12, (12, 25))
    specs, split = megatron_specs(CONFIG, options.get("sharded", False)), text_spec(mesh)
    body = loss_and_gradients(mesh, CONFIG, one_f_one_b(mesh.shape["stages"], 1), None, **options)
    run = spmd.shard_map(body, mesh, in_specs=(specs, split, split, P()), out_specs=(P(), specs))
    return md.tree.map(spmd.gather, run(params, text[:, :-1], text[:, 1:], None))


@pytest.mark.parallel(4)
@pytest.mark.parametrize("sizes, options", CASES)
def test_losses_and_gradients_of_one_device(sizes, options):
    actual = computed(sizes, options, "mpi")
    assert_trees_close(actual, computed((1, 1, 1, 1, 1), {}, "simulated"))
