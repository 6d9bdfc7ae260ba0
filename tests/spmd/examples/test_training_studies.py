"""`loss_spikes`, `curriculum` and `saturation`: scores, schedules and responses, computed in another way."""

from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import median_abs_deviation

from spmd.examples.curriculum import length_at
from spmd.examples.loss_spikes import robust_z, train
from spmd.examples.saturation import saturate


def test_scores_are_those_of_scipy():
    history = np.random.default_rng(0).lognormal(size=31)
    for value in (0.1, 1.0, 50.0):
        expected = (value - np.median(history)) / median_abs_deviation(history, scale="normal")
        assert abs(robust_z(value, history) - expected) < 1e-3 * abs(expected)


def step(state, batch):
    """Add a batch to the state; the loss is the batch, if the state has the right one before it."""
    return batch, (*state, batch)


@pytest.mark.parametrize("spikes", [[], [20], [19, 20, 21], [20, 24], [16, 39], [20, 30]])
def test_responses_leave_no_trace_of_what_they_drop(spikes):
    batches = list(np.random.default_rng(0).normal(1, 0.1, size=40))
    for i in spikes:
        batches[i] += 100
    assert train(step, (), batches).state == tuple(batches)
    for response in ("skip", "resume"):
        run = train(step, (), batches, response)
        assert [i for i, _ in run.flagged] == spikes
        expected = [b for i, b in enumerate(batches) if i not in run.dropped]
        assert run.state == tuple(expected) and run.losses == expected
        assert run.dropped == spikes if response == "skip" else {*spikes} <= {*run.dropped}
        if response == "resume" and len(spikes) == 1:  # back by 5 to 9 steps, to a multiple of 5
            (i,) = spikes
            assert run.dropped == list(range((i - 5) // 5 * 5, i + 1))


def test_a_loss_that_is_not_finite_is_a_spike():
    batches = list(np.random.default_rng(0).normal(1, 0.1, size=40))
    batches[20] = float("nan")
    assert train(step, (), batches, "skip").dropped == [20]


@pytest.mark.parametrize(("first", "last", "steps", "multiple"), [(8, 32, 24, 8), (8, 100, 30, 4), (1, 7, 3, 1)])
def test_lengths_grow_in_proportion(first, last, steps, multiple):
    for t in range(2 * steps):
        exact = first + Fraction((last - first) * min(t, steps), steps)
        assert length_at(t, first, last, steps, multiple) == exact // multiple * multiple
    assert length_at(steps, first, last, steps, multiple, root=2) == last // multiple * multiple
    assert length_at(steps // 3, first, last, steps, 1, root=2) >= length_at(steps // 3, first, last, steps, 1)


def test_saturated_numbers_are_float16s_largest():
    x = np.array([1e6, -1e6, np.inf, np.nan, 3.0, -65504.0])
    largest = float(np.finfo(np.float16).max)
    np.testing.assert_array_equal(saturate(x), [largest, -largest, largest, largest, 3.0, -largest])
