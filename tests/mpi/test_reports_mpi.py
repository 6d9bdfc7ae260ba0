"""Reports on MPI ranks: the same on all of them; what is measured is; a mistake on one rank is an error on all."""

import functools
import time

import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from spmd.prices.calibrate import _PARAMETERS
from spmd.report.timeline import WAITING
from tests.checks.samples import each
from tests.programs import report as programs

WORLD = MPI.COMM_WORLD
RANKS = WORLD.size
few = pytest.mark.parallel([2, 4])


@functools.cache
def line():
    return spmd.make_mesh((RANKS,), ("i",), backend="mpi")


def check_alike(x):
    assert WORLD.allgather(x) == [x] * RANKS


# ---------------------------------------------------------------- what is counted


@pytest.mark.parallel([2, 3])
@each("name", ["a gradient", "a loop over columns in a loop"])
def test_reports_count_what_ranks_send(name):
    programs.check_array_program(line(), name)


@pytest.mark.parallel(2)
def test_reports_of_compiled_programs_count_what_ranks_send():
    for name in programs.OPTIONS:
        programs.check_options(line(), name)
    programs.check_while_loops(line())


@pytest.mark.parallel(2)
@each("name", ["repeated sums, a gradient", "a branch in a step", "beside a short loop"])
def test_steps_of_long_loops_send_what_reports_count(name):
    programs.check_long_loop(line(), name)


@few
def test_a_sharded_array_that_a_loop_closes_over_is_priced():
    m = spmd.distribute(np.ones((12, 12 * RANKS)), line(), P("i"))

    def f(x):
        return np.sum(md.map(lambda k: m * np.sin(x * k), np.arange(3.0)))

    assert spmd.predict(f, spmd.machines.A100)(m).seconds > 0
    check_alike(str(spmd.memory(f)(m)))


@pytest.mark.parallel([2, 3, 4])
def test_reports_of_all_programs_count_what_ranks_send():
    for name in (*programs.OF_A_ROW, *programs.OF_A_MATRIX):
        programs.check_array_program(line(), name)
    for name in programs.OPTIONS:
        programs.check_options(line(), name)
    programs.check_while_loops(line())
    programs.check_random_programs(line(), range(6))
    for name in programs.LONG_LOOPS if RANKS < 4 else ():
        programs.check_long_loop(line(), name)


@few
@each("name", ["a network", "gradients", "a gradient of attention", "other dimensions"])
def test_a_plan_of_specs_communicates_as_it_says(name):
    programs.check_planned(line(), name)


# ---------------------------------------------------------------- what is shown, without communication


@few
def test_a_picture_of_a_sharding():
    whole = np.arange(8.0 * RANKS).reshape(-1, 4)
    x = spmd.distribute(whole, line(), P("i"))
    line().reset_calls()
    sharding = spmd.visualize_sharding(x)
    (block,) = [block for block, ranks in sharding.ranks.items() if WORLD.rank in ranks]
    np.testing.assert_array_equal(x.local, whole[2 * block[0] : 2 * block[0] + 2])
    if WORLD.rank == 0:  # the others do not take part
        assert "0:2" in str(sharding) and sharding._repr_html_()
    assert line().calls == {}
    check_alike(str(sharding))


@few
def test_who_asks_for_communication():
    def body(w, x):
        h = np.tanh(x @ w)
        return psum(h.sum(), "i")

    gradient = md.grad(spmd.shard_map(body, mesh=line(), in_specs=(P(), P("i")), out_specs=P()))
    args = np.ones((3, 2)), np.ones((4 * RANKS, 3))
    line().reset_calls()
    report, comparison = spmd.communication(gradient)(*args), spmd.compare(gradient, *args)
    assert line().calls == {}
    lines = [(row.direction, row.source.text) for row in report.rows]
    assert lines == [("forward", 'return psum(h.sum(), "i")'), ("backward", "h = np.tanh(x @ w)")]
    assert comparison.untyped.counts == {"psum": 3} and comparison.same is None
    assert str(comparison).endswith("\nnot run: that is done on simulated ranks only")
    check_alike((str(report), str(comparison)))
    gradient(*args)
    assert line().calls == report.counts


# ---------------------------------------------------------------- calibration


def calibrate(**arguments):
    return spmd.calibrate(line(), **{"sizes": (8, 4096), "repeats": 1, **arguments})


@pytest.mark.parallel([2, 3])
def test_all_ranks_have_the_same_model():
    line().reset_calls()
    model = calibrate()
    assert {m.collective for m in model.measurements} == set(_PARAMETERS)
    assert model.source == f"fitted to times on {RANKS} MPI ranks"
    check_alike((model.alpha, model.beta, model.measurements))
    assert max(model.alpha, model.beta) > 0
    assert line().calls == {}  # neither what is measured counts, nor what compares the arguments


@pytest.mark.parallel([2, 3])
@each("wrong", [{"collectives": ["pmean"]}, {"sizes": None}, {"axis_name": "k"}, {"repeats": 0}])
def test_a_mistake_on_one_rank_is_an_error_on_all(wrong):
    with pytest.raises(ValueError, match=r"with the same arguments: .*; rank 1: ValueError: calibrate"):
        calibrate(**wrong if WORLD.rank == 1 else {})


@pytest.mark.parallel([2, 3])
@each("other", [{"sizes": (8, 800)}, {"repeats": 2}, {"collectives": ["psum"]}])
def test_ranks_that_measure_different_things(other):
    with pytest.raises(ValueError, match="calibrate: all ranks must call it with the same arguments"):
        calibrate(**other if WORLD.rank == 1 else {})


@pytest.mark.parallel(4)
def test_each_axis_has_its_numbers_on_all_ranks():
    mesh = spmd.make_mesh((2, 2), ("i", "j"), backend="mpi")
    model = spmd.calibrate(mesh, sizes=(8, 4096, 65536), repeats=2)
    assert [*model.alpha] == [*model.beta] == ["i", "j"]
    assert {(m.axes, m.ranks) for m in model.measurements} == {(("i",), 2), (("j",), 2)}
    assert model.source == "fitted to times on 2 and 2 MPI ranks"
    check_alike((model, model.residual))


# ---------------------------------------------------------------- speed-up

MODEL = spmd.CostModel(alpha=1e-5, beta=1e-9)
ARGS = np.ones((16, 8)), np.ones((64, 16))


def loss(w, x):
    return np.sum(np.tanh(x @ w))


def program(w, x):
    body = lambda w, x: psum(loss(w, x), "i")  # noqa: E731
    return md.grad(spmd.shard_map(body, mesh=line(), in_specs=(P(), P("i")), out_specs=P()))(w, x)


gradient = md.grad(loss)


def speed_up(one=gradient, f=program, args=ARGS, **settings):
    return spmd.speed_up(f, line(), MODEL, one, repeats=2, **settings)(*args)


@few
def test_measured_and_predicted_on_all_ranks():
    calls = []

    def one(w, x):
        calls.append(type(x).__name__)
        return gradient(w, x)

    actual = speed_up(one, ranks=(64,))
    assert calls == (["ndarray"] * 3 if WORLD.rank == 0 else [])
    check_alike(actual)
    assert {*actual.measured} == {1, RANKS} and {*actual.predicted} == {1, RANKS, 64}
    alone, here = actual.measured[1].seconds, actual.measured[RANKS]
    assert (here.speed_up, here.efficiency) == (alone / here.seconds, alone / (RANKS * here.seconds))
    sent = MODEL.predict(program)(*ARGS).seconds[RANKS]
    assert actual.predicted[RANKS].seconds == pytest.approx(alone / RANKS + sent)
    assert speed_up(0.5).measured[1] == (0.5, 1.0, 1.0)


@few
@each("f", [program, gradient], ["program", "gradient"])
def test_sharded_arguments_are_whole_on_one_rank(f):
    args = ARGS[0], spmd.distribute(ARGS[1], line(), P("i"))
    assert {*speed_up(f=f, args=args).measured} == {1, RANKS}


@few
@each("wrong", [{"one": 0.0}, {"one": 0.5}, {"ranks": (8,)}, {"args": (1.0, 2.0)}, {"ranks": None}, {"f": gradient}])
def test_a_mistake_on_one_rank_is_an_error_of_speed_up_on_all(wrong):
    with pytest.raises(ValueError, match="speed_up: all ranks must call it with the same arguments: "):
        speed_up(**wrong if WORLD.rank == 1 else {})


@few
def test_an_error_on_the_one_rank_is_an_error_on_all():
    def one(w, x):
        raise KeyError("lost")

    with pytest.raises(ValueError, match=r"the function of one rank failed: .*rank 0: KeyError: 'lost'"):
        speed_up(one)


# ---------------------------------------------------------------- measured timelines


@few
@pytest.mark.parametrize("skew", [0.0, 1e4])
def test_a_measured_timeline_by_clocks_that_differ(skew, monkeypatch):
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + skew * WORLD.rank)

    def body(w, x):
        for _ in range(3):
            x = np.tanh(x @ w)
        return psum(x.sum(), "i")

    gradient = md.value_and_grad(spmd.shard_map(body, mesh=line(), in_specs=(P(), P("i")), out_specs=P()))
    args = np.ones((4, 4)), np.ones((4 * RANKS, 4))
    lanes = spmd.timeline(gradient, measured=True)(*args)
    check_alike(lanes.operations)
    assert lanes.names == tuple(f"rank {r} {kind}" for r in range(RANKS) for kind in ("compute", "network"))
    assert 0 < lanes.seconds < 1e3  # the clocks are aligned
    assert min(x.start for x in lanes.operations) == 0.0
    names = [[x.name for x in lanes.operations if x.lane == 2 * r] for r in range(RANKS)]
    assert names == [names[0]] * RANKS and "tanh" in names[0]
    sums = [[x.start for x in lanes.operations if x.lane == 2 * r + 1 and x.name == "psum"] for r in range(RANKS)]
    counts = spmd.communication(gradient, optimized=True)(*args).counts
    assert len(sums[0]) == counts["psum"]
    report = spmd.communication(gradient, measured=True)(*args)
    check_alike([(row.collective, row.seconds) for row in report.rows])
    assert all(row.seconds > 0 for row in report.rows)


@few
def test_waiting_is_for_the_last_rank():
    def body(x):
        return psum(x + 1, "i")

    sums = spmd.shard_map(body, mesh=line(), in_specs=P("i"), out_specs=P())
    lanes = spmd.timeline(sums, measured=True)(np.ones(RANKS))
    waits = [x for x in lanes.operations if x.name == WAITING]
    begun = {x.lane: x.start for x in lanes.operations if x.name == "psum"}
    assert len({x.lane for x in waits}) <= RANKS - 1  # not the last one
    assert all(x.end == begun[x.lane] for x in waits)
    if waits:
        last = max(set(begun) - {x.lane for x in waits}, key=begun.get)
        assert all(x.end <= begun[last] for x in waits)
