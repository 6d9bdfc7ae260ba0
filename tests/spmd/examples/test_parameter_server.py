"""Parameter servers: synchronous training is data parallelism; others are as stale, and wait as long, as they say."""

import math

import pytest

import minidiff.numpy as np
from spmd.examples.parameter_server import simulate_parameter_server
from tests.checks.results import assert_trees_close
from tests.programs import server as programs

RATE = programs.RATE


def train(seconds, until, bound, rate=RATE):
    params, batches = programs.example(len(seconds))
    return simulate_parameter_server(programs.loss, params, batches, rate, seconds, until, bound)


@pytest.mark.parametrize("seconds", [[1.0], [1.0] * 4, [1.0, 2.5, 1.5, 0.5]])
def test_synchronous_training_is_data_parallelism(seconds):
    steps = 5
    trained = train(seconds, steps * max(seconds), bound=0)
    params, losses = programs.data_parallel(len(seconds), steps)
    assert_trees_close(trained.params, params, rtol=1e-12)
    np.testing.assert_allclose(trained.losses, [(max(seconds) * (i + 1), loss) for i, loss in enumerate(losses)])
    assert trained.staleness == {0: steps * len(seconds)}
    np.testing.assert_allclose(trained.waited, steps * (max(seconds) - np.array(seconds)))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_staleness_of_workers_of_equal_speed(workers):
    rounds = 4
    trained = train([1.0] * workers, rounds, math.inf)
    first = dict.fromkeys(range(workers), 1)
    assert trained.staleness == {**first, workers - 1: 1 + (rounds - 1) * workers}
    assert trained.waited == [0.0] * workers


SPEEDS = [np.random.default_rng(0).uniform(0.5, 4, size=5).tolist(), [1.0, 1.0, 1.0, 12.0]]


@pytest.mark.parametrize("seconds", SPEEDS, ids=lambda seconds: f"{max(seconds):.2f}")
def test_staleness_is_bounded_and_waiting_buys_it(seconds):
    """A larger bound is reached, never exceeded, and lets workers compute more gradients."""
    actual = [train(seconds, 40, bound) for bound in (0, 1, 2, 4, math.inf)]
    assert [max(trained.staleness) for trained in actual[:4]] == [0, 1, 2, 4]
    gradients = [sum(trained.staleness.values()) for trained in actual]
    assert gradients == sorted(gradients)
    assert actual[-1].waited == [0.0] * len(seconds) and all(sum(trained.waited) > 0 for trained in actual[:3])
    assert gradients[-1] == sum(math.floor(40 / s) for s in seconds)
    for trained in actual:  # each worker computes or waits, all the time
        done = np.bincount([w for update in trained.updates for w in update.workers], minlength=len(seconds))
        busy = done * np.array(seconds) + trained.waited
        assert np.all(busy <= 40 + 1e-9) and np.all(busy > 40 - 2 * np.array(seconds))
