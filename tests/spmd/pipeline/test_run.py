"""Pipelines that follow a schedule: loss and gradients of the whole network; `stashes.md` shows what stages stash."""

import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
from spmd import P
from spmd.pipeline import scheduled
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs import networks
from tests.programs.branch import error, pipeline_batch, pipeline_params, pipeline_whole

STAGES = (P(), P(None, "stages"), P())  # of parameters: the first layer, those of all stages, the last


def run_stages(schedule, layers, recompute, params, *batch):
    """Return the loss and the gradients of a pipeline, whose stages are ranks."""

    def body(params, inputs, targets):
        return scheduled(schedule, layers, params, inputs, targets, "stages", recompute)

    over = mesh(schedule.stages, names=("stages",))
    return mapped(body, over, (STAGES, P(), P()), (P(), STAGES))(params, *batch)


@each("recompute", [True, False])
@each("name, p, M", [("gpipe", 2, 3), ("one_f_one_b", 4, 3), ("interleaved", 2, 4)])
def test_the_first_stage_embeds_and_the_last_classifies(name, p, M, recompute):
    """With functions of the user's, and tokens, which have no gradient."""
    schedule = networks.SCHEDULES[name](p, M)
    params, batch = pipeline_params(p * schedule.chunks), pipeline_batch(M)
    layers = (
        lambda table, tokens: table[tokens],
        lambda layer, x: np.tanh(x @ layer[0]),
        lambda head, x, labels: error(x, labels, head),
    )
    blocks = params["layers"].reshape(schedule.chunks, p, *params["layers"].shape[1:])
    params_of_stages = params["embedding"], blocks, params["head"]
    value, (embedding, layers, head) = run_stages(schedule, layers, recompute, params_of_stages, *batch)
    gradients = {"embedding": embedding, "layers": layers.reshape(params["layers"].shape), "head": head}
    assert_trees_close((value, gradients), md.value_and_grad(pipeline_whole)(params, *batch))


@pytest.mark.parametrize("name", networks.PARTIAL_LAYERS)
def test_layers_that_are_not_finite_everywhere(name):
    """No stage computes on anything but microbatches."""
    layer = networks.PARTIAL_LAYERS[name]
    ends = (
        lambda a, x: a * x,
        lambda p, x: layer(p[0] if p.shape else p, x),
        lambda b, x, y: np.mean(y * (b * x) ** 3),
    )
    for which, p, M, recompute in (("gpipe", 2, 3, True), ("interleaved", 2, 4, False)):
        schedule = networks.SCHEDULES[which](p, M)
        blocks = p * schedule.chunks
        params = np.linspace(0.5, 1, blocks) * (-1) ** (np.arange(blocks) * (name == "of alternating sign"))
        batch = np.random.default_rng(0).uniform(1, 2, size=(2, M, 3, 2))

        def whole(params, inputs, targets):
            a, blocks, b = params
            x = a * inputs
            for p in blocks.reshape(-1):
                x = layer(p, x)
            return ends[2](b, x, targets)

        args = (1.5, params.reshape(schedule.chunks, p), 0.7), *batch
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            actual = md.tree.map(np.asarray, run_stages(schedule, ends, recompute, *args))
            assert_trees_close(actual, md.value_and_grad(whole)(*args))
