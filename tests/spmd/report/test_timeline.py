"""Timelines: lanes of computation and communication, by a cost model."""

import itertools

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from spmd.parallel import zero
from spmd.report.timeline import COMPUTE, NETWORK

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
MODEL = spmd.CostModel(alpha=1e-5, beta=1e-8)
WEIGHTS, X = [np.ones((32, 32))] * 4, np.ones((64, 32))
LAYER = 8 * 32 * 32  # bytes


def network(weights, x):
    for w in weights:
        x = np.tanh(x @ w)
    return (x * x).mean()


def gradient(bucket_bytes):
    body = lambda weights, x: psum(network(weights, x), "i")  # noqa: E731
    loss = spmd.shard_map(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P())
    return spmd.rewritten(md.grad(loss), bucket_bytes=bucket_bytes)(WEIGHTS, X)


def stage_1(bucket_bytes):
    init, step = zero(network_on, md.optim.sgd(0.1), MESH, stage=1, bucket_bytes=bucket_bytes)
    return spmd.rewritten(step, bucket_bytes=bucket_bytes)(*init(WEIGHTS), X)


def network_on(weights, x):
    return network(weights, x)


@pytest.mark.parametrize("program", [gradient, stage_1])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_lanes_are_busy_one_operation_at_a_time_and_buckets_are_summed_early(program, layers):
    lanes = spmd.timeline(program(layers * LAYER), MODEL)
    assert sum(x.name == "psum" for x in lanes.operations) >= 4 // layers
    for lane in (COMPUTE, NETWORK):
        local = [x for x in lanes.operations if x.lane == lane]
        assert all(x.end <= y.start + 1e-12 for x, y in itertools.pairwise(local))
    busy = [lanes.busy(lane) for lane in (COMPUTE, NETWORK)]
    assert max(busy) <= lanes.seconds <= sum(busy) * (1 + 1e-12)
    first = min(x.start for x in lanes.operations if x.lane == NETWORK)
    last = max(x.end for x in lanes.operations if x.lane == COMPUTE)
    assert (first < last) == (layers < 4 or program is stage_1)  # which updates after its sum


def test_lines_that_take_most_time_come_first():
    totals = [sum(times.values()) for times in spmd.timeline(gradient(LAYER), MODEL).lines.seconds.values()]
    assert len(totals) > 1 and totals == sorted(totals, reverse=True)


def test_small_buckets_hide_bytes_and_large_ones_latency():
    def seconds(layers, **model):
        return spmd.timeline(gradient(layers * LAYER), spmd.CostModel(**model)).seconds

    assert seconds(1, alpha=0.0, beta=1e-9) < seconds(4, alpha=0.0, beta=1e-9)
    assert seconds(4, alpha=1e-3, beta=0.0) < seconds(1, alpha=1e-3, beta=0.0)


def test_a_loop_takes_the_time_of_its_steps():
    w = np.ones((8, 8))
    program = lambda x: md.scan(lambda x, _: (x @ w, None), x, None, length=5)[0]  # noqa: E731
    lanes = spmd.timeline(program, MODEL, flops_per_second=1024)(np.ones((8, 8)))
    assert [(x.name, x.lane) for x in lanes.operations] == [("scan", COMPUTE)] and lanes.seconds == 5.0


def test_pictures():
    plt = pytest.importorskip("matplotlib.pyplot")
    lanes = spmd.timeline(gradient(LAYER), MODEL)
    figure, ax = plt.subplots()
    assert lanes.plot(ax) is ax and len(ax.patches) >= len(lanes.operations)
    plt.close(figure)


def test_operations_in_the_legend_have_different_colors():
    plt = pytest.importorskip("matplotlib.pyplot")
    functions = np.sin, np.cos, np.tan, np.exp, np.sqrt, np.tanh, np.arctan, np.square, np.log, np.arcsinh, np.floor

    def program(x):  # a product is last, after more operations than there are colors
        for f in functions:
            x = f(x)
        return x @ x

    figure, ax = plt.subplots()
    spmd.timeline(program, MODEL, optimized=False)(np.ones((8, 8))).plot(ax)
    colors = [handle.patches[0].get_facecolor() for handle in ax.get_legend_handles_labels()[0]]
    assert len(colors) == 8 == len({*colors})
    plt.close(figure)


def test_a_machine_is_a_model_too():
    """Its lanes end when its prediction of the step does."""
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    f = spmd.shard_map(lambda x: psum(np.sum(x @ x), "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    x = md.ShapedArray((2048, 1024), "float32")
    lanes, step = spmd.timeline(f, spmd.machines.A100)(x), spmd.predict(f, spmd.machines.A100)(x)
    assert lanes.seconds == pytest.approx(step.seconds) and {o.lane for o in lanes.operations} == {0, 1}
