"""Reports on MPI ranks: the same on all of them; what is measured is; a mistake on one rank is an error on all."""

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
from tests.checks.all_ranks import check_alike, line
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.programs import report as programs

WORLD = MPI.COMM_WORLD
RANKS, RANK = WORLD.size, WORLD.rank
few = pytest.mark.parallel([2, 4])
two = pytest.mark.parallel(2)


# ---------------------------------------------------------------- what is counted


@pytest.mark.parallel([2, 3])
def test_reports_count_what_ranks_send():
    programs.check_array_program(line(), "a loop over columns in a loop")
    programs.check_options(line(), "without")
    programs.check_while_loops(line())


# ---------------------------------------------------------------- what is shown, without communication


def program(w, x):
    """The gradient of a loss of rows that are split, by a sum over ranks."""
    body = lambda w, x: psum(np.tanh(x @ w).sum(), "i")  # noqa: E731
    return md.grad(mapped(body, line(), (P(), P("i")), P()))(w, x)


@few
def test_reports_are_alike_and_do_not_communicate():
    x, args = np.arange(8.0 * RANKS).reshape(-1, 4), (np.ones((3, 2)), np.ones((4 * RANKS, 3)))
    split, m = (spmd.distribute(a, line(), P("i")) for a in (x, np.ones((12, 12 * RANKS))))
    line().reset_calls()
    sharding = spmd.visualize_sharding(split)
    (block,) = [block for block, ranks in sharding.ranks.items() if RANK in ranks]
    np.testing.assert_array_equal(split.local, x[2 * block[0] : 2 * block[0] + 2])
    if RANK == 0:  # the others do not take part
        assert "0:2" in str(sharding) and sharding._repr_html_()
    report, comparison = spmd.communication(program)(*args), spmd.compare(program, *args)
    assert [row.direction for row in report.rows] == ["forward", "backward"]
    assert comparison.untyped.counts == {"psum": 3} and comparison.same is None
    assert str(comparison).endswith("\nnot run: that is done on simulated ranks only")
    loop = lambda x: np.sum(md.map(lambda k: m * np.sin(x * k), np.arange(3.0)))  # noqa: E731
    assert spmd.predict(loop, spmd.machines.A100)(m).seconds > 0
    check_alike((str(sharding), str(report), str(comparison), str(spmd.memory(loop)(m))))
    assert line().calls == {}
    program(*args)
    assert line().calls == report.counts


# ---------------------------------------------------------------- calibration


def calibrate(**arguments):
    return spmd.calibrate(line(), **{"sizes": (8, 4096), "repeats": 1, **arguments})


@pytest.mark.parallel(4)
def test_each_axis_has_its_numbers_on_all_ranks():
    on = mesh(2, 2, backend="mpi")
    on.reset_calls()
    model = spmd.calibrate(on, sizes=(8, 4096, 65536), repeats=2)
    assert on.calls == {}  # neither what is measured counts, nor what compares the arguments
    assert {m.collective for m in model.measurements} == set(_PARAMETERS)
    assert [*model.alpha] == [*model.beta] == ["i", "j"]
    assert {(m.axes, m.ranks) for m in model.measurements} == {(("i",), 2), (("j",), 2)}
    assert model.source == "fitted to times on 2 and 2 MPI ranks"
    check_alike((model, model.residual))


#: Arguments of calibrations that one rank alone has: some are wrong, some others than those of the rest.
CALIBRATIONS = [{"collectives": ["pmean"]}, {"sizes": None}, {"axis_name": "k"}, {"repeats": 0}, {"sizes": (8, 800)}]
CALIBRATIONS += [{"repeats": 2}, {"collectives": ["psum"]}]


@pytest.mark.parallel(3)
@each("wrong", CALIBRATIONS)
def test_a_mistake_on_one_rank_is_an_error_on_all(wrong):
    with pytest.raises(ValueError, match="calibrate: all ranks must call it with the same arguments"):
        calibrate(**wrong if RANK == 1 else {})


# ---------------------------------------------------------------- speed-up

MODEL = spmd.CostModel(alpha=1e-5, beta=1e-9)
ARGS = np.ones((16, 8)), np.ones((64, 16))
gradient = md.grad(lambda w, x: np.sum(np.tanh(x @ w)))


def speed_up(one=gradient, f=program, args=ARGS, **settings):
    return spmd.speed_up(f, line(), MODEL, one, repeats=2, **settings)(*args)


@two
def test_measured_and_predicted_on_all_ranks():
    calls = []

    def one(w, x):
        calls.append(type(x).__name__)
        return gradient(w, x)

    actual = speed_up(one, ranks=(64,))
    assert calls == (["ndarray"] * 3 if RANK == 0 else [])
    check_alike(actual)
    assert {*actual.measured} == {1, RANKS} and {*actual.predicted} == {1, RANKS, 64}
    alone, here = actual.measured[1].seconds, actual.measured[RANKS]
    assert (here.speed_up, here.efficiency) == (alone / here.seconds, alone / (RANKS * here.seconds))
    sent = MODEL.predict(program)(*ARGS).seconds[RANKS]
    assert actual.predicted[RANKS].seconds == pytest.approx(alone / RANKS + sent)
    assert speed_up(0.5).measured[1] == (0.5, 1.0, 1.0)
    split = ARGS[0], spmd.distribute(ARGS[1], line(), P("i"))  # whole on one rank
    for f in (program, gradient):
        assert {*speed_up(f=f, args=split).measured} == {1, RANKS}


@two
def test_an_error_on_one_rank_is_an_error_of_speed_up_on_all():
    with pytest.raises(ValueError, match="speed_up: all ranks must call it with the same arguments: "):
        speed_up(**{"ranks": (8,)} if RANK == 1 else {})

    def one(w, x):
        raise KeyError("lost")

    with pytest.raises(ValueError, match="rank 0: KeyError: 'lost'"):
        speed_up(one)


# ---------------------------------------------------------------- measured timelines


@two
def test_a_measured_timeline_by_clocks_that_differ(monkeypatch):
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1e4 * RANK)
    args = np.ones((4, 4)), np.ones((4 * RANKS, 4))
    lanes = spmd.timeline(program, measured=True)(*args)
    check_alike(lanes.operations)
    assert lanes.names == tuple(f"rank {r} {kind}" for r in range(RANKS) for kind in ("compute", "network"))
    assert 0 < lanes.seconds < 1e3  # the clocks are aligned
    assert min(x.start for x in lanes.operations) == 0.0
    names = [[x.name for x in lanes.operations if x.lane == 2 * r] for r in range(RANKS)]
    assert names == [names[0]] * RANKS and "tanh" in names[0]
    sums = [x for x in lanes.operations if x.lane == 1 and x.name == "psum"]
    assert len(sums) == spmd.communication(program, optimized=True)(*args).counts["psum"]
    report = spmd.communication(program, measured=True)(*args)
    check_alike([(row.collective, row.seconds) for row in report.rows])
    assert all(row.seconds > 0 for row in report.rows)


@few
def test_waiting_is_for_the_last_rank():
    lanes = spmd.timeline(mapped(lambda x: psum(x + 1, "i"), line(), P("i"), P()), measured=True)(np.ones(RANKS))
    waits = [x for x in lanes.operations if x.name == WAITING]
    begun = {x.lane: x.start for x in lanes.operations if x.name == "psum"}
    assert len({x.lane for x in waits}) <= RANKS - 1  # not the last one
    assert all(x.end == begun[x.lane] for x in waits)
    if waits:
        last = max(set(begun) - {x.lane for x in waits}, key=begun.get)
        assert all(x.end <= begun[last] for x in waits)
