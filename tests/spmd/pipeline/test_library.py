"""Pictures of pipeline schedules; `schedules.md` has their figures and texts."""

import pytest

from spmd import show_schedule
from spmd.pipeline import interleaved


def test_the_plot_has_every_step():
    pytest.importorskip("matplotlib").use("agg")
    schedule = interleaved(2, 4, 2)
    ax = show_schedule(schedule).plot()
    drawn = sorted((round(y), int(x), int(t.get_text())) for t in ax.texts for x, y in [t.get_position()])
    assert drawn == sorted((stage, tick, step.microbatch) for stage, tick, step in schedule.steps)
