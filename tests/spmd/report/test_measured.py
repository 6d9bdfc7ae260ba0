"""Measured timelines: every step of the program is there, in order, once; the report has its seconds."""

import itertools
import json
from collections import Counter

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import ppermute, psum
from minidiff import scan
from spmd import P
from spmd.report.communication import CALL, Clock
from spmd.report.timeline import PREDICTED, WAITING

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
WEIGHTS, X = [np.ones((8, 8))] * 3, np.ones((8, 8))


def network(weights, x):
    for w in weights:
        x = np.tanh(x @ w)
    return psum(x.sum(), "i")


def shift(weights, x):
    x = ppermute(x, "i", [(0, 1), (1, 0)])
    return psum((x @ weights[0]).sum(), "i")


def loop(weights, x):
    steps = 12  # too long to be unrolled, so the body's operations run one by one
    x, _ = scan(lambda carry, _: (np.tanh(carry @ weights[0]), None), x, None, length=steps)
    return psum(np.sin(x).sum(), "i")


def sharded(body):
    return spmd.shard_map(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P())


def measured(f, *args, **kwargs):
    return spmd.timeline(f, measured=True, **kwargs)(*args)


@pytest.mark.parametrize("body", [network, shift, loop])
def test_steps_follow_each_other_and_none_is_missing(body):
    f = md.value_and_grad(sharded(body))
    lanes = measured(f, WEIGHTS, X)
    assert lanes.names == ("rank 0 compute", "rank 0 network")
    computed = [x for x in lanes.operations if x.lane == 0]
    assert all(x.start <= x.end for x in lanes.operations) and min(x.start for x in lanes.operations) == 0.0
    assert all(x.end <= y.start for x, y in itertools.pairwise(computed))
    if not any(x.name.endswith("_start") for x in computed):
        assert lanes.busy(0) + lanes.busy(1) == pytest.approx(lanes.seconds)  # no time without a step
        assert lanes.idle(0) == pytest.approx(lanes.busy(1))
    sends = Counter(x.name for x in lanes.operations if x.lane == 1)
    assert sends == spmd.communication(f, optimized=True)(WEIGHTS, X).counts
    if body is loop:
        assert sum(x.name == "tanh" for x in lanes.operations) >= 12


def test_the_steps_are_the_lines_of_the_source():
    f = lambda x: np.sin(np.cumsum(x) * 2.0)  # noqa: E731
    names = [x.name for x in measured(f, X).operations]
    assert names == [CALL, *[str(eqn.primitive) for eqn in md.jit(f).program(X).tape.equations]]


def test_a_collective_that_is_started_is_one_step_until_its_wait():
    lanes = measured(md.value_and_grad(sharded(shift)), WEIGHTS, X)
    starts = [x for x in lanes.operations if x.name == "ppermute_start"]
    moved = [x for x in lanes.operations if x.name == "ppermute"]
    assert starts and {x.start for x in starts} <= {x.start for x in moved}
    assert all(x.lane == 0 for x in starts) and all(x.lane == 1 for x in moved)
    assert not any(x.name.endswith("_wait") for x in lanes.operations)


def test_results_are_the_same_and_the_program_is_not():
    f = md.grad(sharded(network))
    with_clock = md.jit(f)
    with Clock().in_programs():
        noted = with_clock(WEIGHTS, X)
    for x, y in zip(noted, md.jit(f)(WEIGHTS, X)):
        np.testing.assert_array_equal(x, y)
    assert "mark(" in with_clock.source(WEIGHTS, X) and "mark(" not in md.jit(f).source(WEIGHTS, X)
    with pytest.raises(TypeError, match="jit takes no clock="):
        md.jit(f, clock=Clock())  # only reports have clocks


def test_seconds_of_lines_and_of_the_report():
    f = md.grad(sharded(network))
    lanes = measured(f, WEIGHTS, X)
    times = lanes.lines.seconds
    assert sum(sum(kinds.values()) for kinds in times.values()) == pytest.approx(lanes.seconds)
    assert {line.text for line in times if line} >= {"x = np.tanh(x @ w)", 'return psum(x.sum(), "i")'}
    assert "x = np.tanh(x @ w)" in str(lanes.lines)
    report = spmd.communication(f, measured=True)(WEIGHTS, X)
    assert report.rows and all(row.seconds > 0 for row in report.rows)
    headers = [str(r).splitlines()[0] for r in (report, spmd.communication(f)(WEIGHTS, X))]
    assert ["measured" in header for header in headers] == [True, False]


def test_a_prediction_stands_above():
    model = spmd.CostModel(alpha=1e-5, beta=1e-8)
    both = measured(sharded(network), WEIGHTS, X, model=model)
    assert [name.startswith(PREDICTED) for name in both.names] == [True, True, False, False]
    alone = spmd.timeline(sharded(network), model)(WEIGHTS, X)
    assert both.operations[: len(alone.operations)] == alone.operations
    assert {x.lane for x in both.operations} == {0, 1, 2, 3}
    assert both.lines.seconds.keys() == measured(sharded(network), WEIGHTS, X).lines.seconds.keys()


def test_trace_events(tmp_path):
    lanes = measured(sharded(network), WEIGHTS, X)
    lanes.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {(0, 0): "compute", (0, 1): "network"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(lanes.operations)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * lanes.seconds)
    assert any("np.tanh" in e["args"]["line"] for e in spans)


def test_a_plot():
    pytest.importorskip("matplotlib")
    lanes = measured(sharded(network), WEIGHTS, X)
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert lanes.plot(ax) is ax
    assert [text.get_text() for text in ax.get_yticklabels()] == list(lanes.names)
    assert WAITING not in {x.name for x in lanes.operations}  # nobody to wait for


def test_programs_without_ranks_are_measured_too():
    lanes = measured(md.grad(lambda x: np.sum(np.sin(x))), X)
    assert lanes.names == ("rank 0 compute", "rank 0 network") and lanes.busy(1) == 0
