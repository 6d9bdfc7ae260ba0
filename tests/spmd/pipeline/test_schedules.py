"""Pipeline schedules: their figures, what is refused, and how they are drawn."""

import itertools

import pytest

from spmd import show_schedule
from spmd.pipeline import Schedule, Step, gpipe, interleaved, one_f_one_b, scheduled_orders

SIZES = [*itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 8, 11))]


@pytest.mark.parametrize("p, M", SIZES)
def test_gpipe_and_1f1b_have_the_figures_of_the_papers(p, M):
    """Microbatches enter one after the other in GPipe, every second tick in 1F1B; backward passes mirror that."""
    all_forward, alternating = gpipe(p, M), one_f_one_b(p, M)
    for schedule, stashed in ((all_forward, [M] * p), (alternating, [min(M, p - i) for i in range(p)])):
        assert (schedule.stages, schedule.microbatches, schedule.chunks) == (p, M, 1)
        assert schedule.ticks == 2 * (M + p - 1)
        assert schedule.bubble == pytest.approx((p - 1) / (M + p - 1))
        assert schedule.stashed == stashed
    for i, m in itertools.product(range(p), range(M)):
        assert all_forward.tick(i, Step("forward", m)) == i + m
        assert all_forward.tick(i, Step("backward", m)) == 2 * (M + p - 1) - 1 - (i + m)
        assert alternating.tick(i, Step("forward", m)) == i + 2 * m
        assert alternating.tick(i, Step("backward", m)) == 2 * p - 1 - i + 2 * m


@pytest.mark.parametrize("p, M, v", [(p, g * p, v) for p, g, v in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 3))])
def test_interleaved_schedules_have_the_figures_of_the_paper(p, M, v):
    schedule = interleaved(p, M, v)
    assert (schedule.stages, schedule.microbatches, schedule.chunks) == (p, M, v)
    assert schedule.ticks == 2 * (M * v + p - 1)
    assert schedule.bubble == pytest.approx((p - 1) / (M * v + p - 1))
    assert schedule.stashed == [min(M * v, 2 * (p - i) - 1 + (v - 1) * p) for i in range(p)]


# ---------------------------------------------------------------- what is refused

F0, F1, B0, B1 = Step("forward", 0), Step("forward", 1), Step("backward", 0), Step("backward", 1)
INVALID = {
    "stage 1, tick 0: the forward of microbatch 0 needs the forward of microbatch 0 on stage 0, which is at tick 0": (
        (F0, None, B0),
        (F0, B0, None),
    ),
    "stage 0, tick 2: the backward of microbatch 0 needs the backward of microbatch 0 on stage 1, which is at tick 2": (
        (F0, None, B0),
        (None, F0, B0),
    ),
    "stage 0, tick 0: the backward of microbatch 0 needs the forward of microbatch 0 on stage 0, which is at tick 1": (
        (B0, F0),
    ),
    "stage 0 lacks the backward of microbatch 1": ((F0, B0, F1),),
    "stage 1 lacks the forward of microbatch 0": ((F0, B0), (None, B0)),
    "stage 0, tick 1: the forward of microbatch 0 is already at tick 0": ((F0, F0, B0),),
    r"stage 0, tick 1: Step\(direction='up', microbatch=0, chunk=0\) is neither": ((F0, Step("up", 0)),),
    r"stage 0, tick 1: Step\(direction='forward', microbatch=-1, chunk=0\) is neither": (
        (F0, Step("forward", -1), B0),
    ),
    r"the same number of ticks for each stage; not \[3, 2\]": ((F0, None, B0), (None, F0)),
    r"a schedule needs steps.*not \[\]": (),
}


@pytest.mark.parametrize("message", INVALID)
def test_an_invalid_table_is_refused(message):
    with pytest.raises(ValueError, match=message):
        Schedule(INVALID[message])


def test_a_table_of_other_things_is_refused():
    with pytest.raises(TypeError, match="stage 0, tick 1: an entry must be a Step or None, not 'B0'"):
        Schedule(((F0, "B0"),))


def test_orders_that_deadlock_are_refused():
    message = (
        "deadlock at tick 3: stage 0's backward of microbatch 1 waits for the backward of microbatch 1 on stage 1; "
        "stage 1's forward of microbatch 1 waits for the forward of microbatch 1 on stage 0"
    )
    with pytest.raises(ValueError, match=message):
        scheduled_orders([[F0, B1, F1, B0], [F0, B0, F1, B1]])


def test_misfits():
    with pytest.raises(ValueError, match=r"6 microbatches cannot be split into groups of 4.*choose a multiple of 4"):
        interleaved(4, 6, 2)
    with pytest.raises(ValueError, match="gpipe: microbatches must be at least 1, got 0"):
        gpipe(2, 0)
    with pytest.raises(ValueError, match="interleaved: chunks must be at least 1, got 0"):
        interleaved(2, 2, 0)


# ---------------------------------------------------------------- pictures


def test_the_text_has_every_entry():
    """Read back, it is the table."""
    for schedule in (gpipe(3, 4), one_f_one_b(4, 12), interleaved(2, 4, 2)):
        _, *rows, _ = str(show_schedule(schedule)).splitlines()
        for row, line in zip(schedule.table, rows, strict=True):
            cells = [
                s and f"{s.direction[0].upper()}{s.microbatch}{'ab'[s.chunk] * (schedule.chunks > 1)}" for s in row
            ]
            assert line.split()[2:] == [cell or "." for cell in cells]


def test_the_plot_has_every_step():
    pytest.importorskip("matplotlib").use("agg")
    schedule = interleaved(2, 4, 2)
    ax = show_schedule(schedule).plot()
    drawn = sorted((round(y), int(x), int(t.get_text())) for t in ax.texts for x, y in [t.get_position()])
    assert drawn == sorted((stage, tick, step.microbatch) for stage, tick, step in schedule.steps)
