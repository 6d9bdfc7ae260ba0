"""Pipeline schedules: their figures, what is refused, and how they are drawn."""

import itertools

import pytest

from spmd import show_schedule
from spmd.pipeline import Step, gpipe, interleaved, one_f_one_b

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
