"""The time of a schedule's table: what papers say."""

import pytest

from spmd.pipeline import gpipe, interleaved, one_f_one_b, zero_bubble
from spmd.pipeline.tables import time_schedule
from tests.checks.samples import each


@each("p, M", [(1, 3), (2, 4), (4, 8), (8, 8)])
@each("forward, backward", [(1.0, 2.0), (1.0, 1.0), (0.5, 3.0)])
def test_schedules_take_what_their_papers_say(p, M, forward, backward):
    seconds = lambda stage, step: forward if step.direction == "forward" else backward  # noqa: E731
    for schedule in (gpipe(p, M), one_f_one_b(p, M)):
        assert time_schedule(schedule, seconds).seconds == pytest.approx((M + p - 1) * (forward + backward))
    chunks = lambda stage, step: seconds(stage, step) / 2  # noqa: E731
    timed = time_schedule(interleaved(p, M - M % p or p, 2), chunks)
    assert timed.seconds == pytest.approx(((M - M % p or p) + (p - 1) / 2) * (forward + backward))


@each("p, M", [(2, 4), (4, 8), (8, 20)])
def test_split_backward_passes_leave_a_third_of_the_bubble(p, M):
    """(p - 1) * (F + B - W), where B and W are the parts of a backward pass: Qi et al., section 2."""
    seconds = {"forward": 1.0, "backward": 1.0, "weight": 1.0}
    timed = time_schedule(zero_bubble(p, M), lambda stage, step: seconds[step.direction])
    assert timed.seconds == 3 * M + p - 1
    assert timed.busy(0) == 3 * M
    assert max(zero_bubble(p, M).stashed) == max(one_f_one_b(p, M).stashed) == p


def test_messages_delay_what_waits_for_them():
    schedule = one_f_one_b(4, 1)
    assert time_schedule(schedule, lambda *_: 1.0, send=0.5).seconds == 8 + 6 * 0.5
