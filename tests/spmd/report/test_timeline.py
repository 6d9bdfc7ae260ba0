"""Timelines: lanes of computation and communication, by a cost model, and measured."""

import itertools
import json
import re
from collections import Counter

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import ppermute, psum
from spmd import P
from spmd.parallel import zero
from spmd.prices.tape_cost import Operation
from spmd.report.communication import CALL
from spmd.report.timeline import COMPUTE, NETWORK, PREDICTED, WAITING, Lanes
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

MESH = mesh(2)
MODEL = spmd.CostModel(alpha=1e-5, beta=1e-8)
WEIGHTS, X = [np.ones((32, 32))] * 4, np.ones((64, 32))
LAYER = 8 * 32 * 32  # bytes


def network(weights, x):
    for w in weights:
        x = np.tanh(x @ w)
    return (x * x).mean()


def gradient(bucket_bytes):
    loss = sharded(lambda weights, x: psum(network(weights, x), "i"))
    return spmd.rewritten(md.grad(loss), bucket_bytes=bucket_bytes)(WEIGHTS, X)


def stage_1(bucket_bytes):
    init, step = zero(network, md.optim.sgd(0.1), MESH, stage=1, bucket_bytes=bucket_bytes)
    return spmd.rewritten(step, bucket_bytes=bucket_bytes)(*init(WEIGHTS), X)


@each("program", [gradient, stage_1])
@each("layers", [1, 4])
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


def test_a_loop_takes_the_time_of_its_steps():
    w = np.ones((8, 8))
    program = lambda x: md.scan(lambda x, _: (x @ w, None), x, None, length=5)[0]  # noqa: E731
    lanes = spmd.timeline(program, MODEL, flops_per_second=1024)(np.ones((8, 8)))
    assert [(x.name, x.lane) for x in lanes.operations] == [("scan", COMPUTE)] and lanes.seconds == 5.0


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
    f = mapped(lambda x: psum(np.sum(x @ x), "i"), MESH, P("i"), P())
    x = md.ShapedArray((2048, 1024), "float32")
    lanes, step = spmd.timeline(f, spmd.machines.A100)(x), spmd.predict(f, spmd.machines.A100)(x)
    assert lanes.seconds == pytest.approx(step.seconds) and {o.lane for o in lanes.operations} == {0, 1}


# ---------------------------------------------------------------- measured

SMALL, ROWS = [np.ones((8, 8))] * 3, np.ones((8, 8))


def summed(weights, x):
    return psum(network(weights, x), "i")


def shift(weights, x):
    x = ppermute(x, "i", [(0, 1), (1, 0)])
    return psum((x @ weights[0]).sum(), "i")


def loop(weights, x):
    step = lambda carry, _: (np.tanh(carry @ weights[0]), None)  # noqa: E731
    x, _ = md.scan(step, x, length=12)  # too long to be unrolled, so the body's operations run one by one
    return psum(np.sin(x).sum(), "i")


def sharded(body):
    return mapped(body, MESH, (P(), P("i")), P())


def measured(f, *args, **kwargs):
    return spmd.timeline(f, measured=True, **kwargs)(*args)


@each("body", [summed, shift, loop])
def test_steps_follow_each_other_and_none_is_missing(body):
    f = md.value_and_grad(sharded(body))
    lanes = measured(f, SMALL, ROWS)
    assert lanes.names == ("rank 0 compute", "rank 0 network")
    computed, sent = ([x for x in lanes.operations if x.lane == lane] for lane in (0, 1))
    assert all(x.start <= x.end for x in lanes.operations) and min(x.start for x in lanes.operations) == 0.0
    assert all(x.end <= y.start for x, y in itertools.pairwise(computed))
    starts = [x for x in computed if x.name.endswith("_start")]  # each is one step until its wait
    assert {x.start for x in starts} <= {x.start for x in sent} and bool(starts) == (body is shift)
    if not starts:
        assert lanes.busy(0) + lanes.busy(1) == pytest.approx(lanes.seconds)  # no time without a step
        assert lanes.idle(0) == pytest.approx(lanes.busy(1))
    assert Counter(x.name for x in sent) == spmd.communication(f, optimized=True)(SMALL, ROWS).counts
    names = {x.name for x in lanes.operations}
    assert WAITING not in names and not any(name.endswith("_wait") for name in names)
    if body is loop:
        assert sum(x.name == "tanh" for x in lanes.operations) >= 12


def test_the_steps_are_the_lines_of_the_source():
    f = lambda x: np.sin(np.cumsum(x) * 2.0)  # noqa: E731
    names = [x.name for x in measured(f, ROWS).operations]
    assert names == [CALL, *[str(eqn.primitive) for eqn in md.jit(f).program(ROWS).tape.equations]]


def test_seconds_of_lines_and_of_the_report():
    f = md.grad(sharded(summed))
    lanes = measured(f, SMALL, ROWS)
    times = lanes.lines.seconds
    assert sum(sum(kinds.values()) for kinds in times.values()) == pytest.approx(lanes.seconds)
    assert {line.text for line in times if line} >= {"x = np.tanh(x @ w)", 'return psum(network(weights, x), "i")'}
    assert "x = np.tanh(x @ w)" in str(lanes.lines)
    report = spmd.communication(f, measured=True)(SMALL, ROWS)
    assert report.rows and all(row.seconds > 0 for row in report.rows)
    headers = [str(r).splitlines()[0] for r in (report, spmd.communication(f)(SMALL, ROWS))]
    assert ["measured" in header for header in headers] == [True, False]


def test_a_prediction_stands_above():
    model = spmd.CostModel(alpha=1e-5, beta=1e-8)
    both = measured(sharded(summed), SMALL, ROWS, model=model)
    assert [name.startswith(PREDICTED) for name in both.names] == [True, True, False, False]
    alone = spmd.timeline(sharded(summed), model)(SMALL, ROWS)
    assert both.operations[: len(alone.operations)] == alone.operations
    assert {x.lane for x in both.operations} == {0, 1, 2, 3}
    assert both.lines.seconds.keys() == measured(sharded(summed), SMALL, ROWS).lines.seconds.keys()


def test_trace_events(tmp_path):
    lanes = measured(sharded(summed), SMALL, ROWS)
    lanes.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {(0, 0): "compute", (0, 1): "network"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(lanes.operations)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * lanes.seconds)
    assert any("np.tanh" in e["args"]["line"] for e in spans)


# ---------------------------------------------------------------- lanes


def test_a_second_of_a_lane_counts_once():
    sums = [Operation("psum", 1, *times) for times in ((0.0, 6.0), (1.0, 5.0), (4.0, 8.0))]
    lanes = Lanes((*sums, Operation("f", 0, 0.0, 8.0)), ("compute", "network"))
    assert (lanes.busy(1), lanes.idle(1)) == (8.0, 0.0)
    assert lanes.lines.seconds == {None: {"compute": 8.0, "network": 8.0}}
    assert len(json.loads(json.dumps(lanes.trace_events()))) == 4 + 4


def test_a_short_step_is_readable():
    lanes = spmd.timeline(md.jit(md.grad(sharded(summed))), spmd.CostModel(1e-4, 1e-8))(
        [np.ones((16, 16))] * 3, np.ones((8, 16))
    )
    compute, network, total = str(lanes).splitlines()
    assert re.search(r"\[\d+", compute) and "[[" not in compute and "psum" in network  # operations are counted
    assert total.endswith("µs in all")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    ax = lanes.plot()
    ax.figure.canvas.draw()
    assert ax.get_xlabel() == "microseconds"
    assert max(float(label.get_text().replace(",", "")) for label in ax.get_xticklabels()) > 100
