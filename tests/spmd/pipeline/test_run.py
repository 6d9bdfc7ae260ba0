"""Pipelines that follow a schedule: loss and gradients of the whole network, as few activations as it says."""

import functools
import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
from spmd import P
from spmd.examples.scheduled_network import blocked_layers, scheduled_value_and_grad
from spmd.pipeline import scheduled
from spmd.pipeline.tables import allocate
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs import networks
from tests.programs.branch import error, pipeline_batch, pipeline_params, pipeline_whole

STAGES = (P(), P(None, "stages"), P())  # of parameters: the first layer, those of all stages, the last


def stages(count):
    return mesh(count, names=("stages",))


def run_stages(schedule, layers, recompute, params, *batch, key=None):
    """Return the loss and the gradients of a pipeline, whose stages are ranks."""
    keys = () if key is None else (key,)

    def body(params, inputs, targets, *keys):
        return scheduled(schedule, layers, params, inputs, targets, "stages", recompute, *keys)

    specs = (STAGES, *[P()] * (len(batch) + len(keys)))
    return mapped(body, stages(schedule.stages), specs, (P(), STAGES))(params, *batch, *keys)


@each("p, M", [(2, 1), (2, 4), (4, 2)])
@each("name", ["gpipe", "one_f_one_b"])
def test_a_stage_stashes_as_many_activations_as_its_schedule(name, p, M):
    """But for the first, which has its microbatches. Arrays for more are nowhere in the program."""
    schedule = networks.SCHEDULES[name](p, M)
    _, slots = allocate(schedule)
    assert slots[0] == (0, 1, 0, 0)
    assert [slot.activations for slot in slots[1:]] == schedule.stashed[1:]
    assert all(slot.cotangents <= 1 for slot in slots)
    _, slots = allocate(schedule, recompute=False)
    assert [slot.residuals for slot in slots] == schedule.stashed
    assert [slot.losses for slot in slots] == [0] * (p - 1) + schedule.stashed[-1:]
    params, batch = networks.example(sizes=(8, 5, *[5] * p, 6), examples=3 * M)
    tape = str(md.make_tape(scheduled_value_and_grad(stages(p), schedule))(blocked_layers(params, schedule), batch))
    assert f"f64[{max(schedule.stashed[1:])},3,5]" in tape
    assert not any(f"f64[{n},3,5]" in tape for n in range(max(schedule.stashed[1:]) + 1, 20))


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


def test_parameters_are_not_stashed():
    """Without recomputation a stage stashes what each layer's derivative needs of a microbatch, and nothing else."""
    schedule = networks.SCHEDULES["one_f_one_b"](2, 4)
    layers = (
        lambda w, x: x @ w,
        lambda blocks, x: md.scan(lambda x, w: (np.tanh(x @ w), None), x, blocks)[0],
        lambda w, x, y: np.mean((x @ w - y) ** 2),
    )
    run = functools.partial(run_stages, schedule, layers, False)
    params = np.ones((7, 5)), np.ones((1, 6, 5, 5)), np.ones((5, 2))
    tape = str(md.make_tape(run)(params, np.ones((4, 11, 7)), np.ones((4, 11, 2))))
    assert "f64[2,3,11,5]" in tape  # slots, layers, examples, features: of the products and of tanh
    assert "f64[2,3,5,5]" not in tape


def test_a_key_for_each_block_and_microbatch():
    """The same numbers are dropped when a backward pass recomputes, and when it does not."""
    schedule = networks.SCHEDULES["interleaved"](2, 4)
    layers = (
        lambda w, x, key: md.nn.dropout(key, x * w, 0.5),
        lambda w, x, key: md.nn.dropout(key, x * w, 0.5),
        lambda w, x, y: np.mean((x * w - y) ** 2),
    )

    args = (1.0, np.array([[2.0, 3.0], [4.0, 5.0]]), 1.0), np.ones((4, 32)), np.zeros((4, 32))
    loss, gradients = run_stages(schedule, layers, True, *args, key=md.random.key(0))
    assert_trees_close((loss, gradients), run_stages(schedule, layers, False, *args, key=md.random.key(0)))
    exact, factors = 0.0, [1.0, 2.0, 3.0, 4.0, 5.0]
    key = lambda m, block: md.random.fold_in(md.random.key(0), m * 4 + block)  # noqa: E731
    for m in range(4):
        x = np.ones(32)
        for block, factor in zip([0, 0, 1, 2, 3], factors):
            x = md.nn.dropout(key(m, block), x * factor, 0.5)
        exact += np.mean(x**2) / 4
    assert np.isclose(float(loss), exact)
