"""Parameter servers: synchronous training is data parallelism; others are as stale, and wait as long, as they say."""

import math

import pytest

import minidiff.numpy as np
from spmd.examples.parameter_server import simulate_parameter_server
from tests.programs import server as programs
from tests.programs.on_blocks import assert_trees_close

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


def test_a_straggler_slows_those_who_wait_for_it():
    """Ten times slower: synchronous training takes ten times as long, asynchronous training loses one worker."""
    seconds = {"even": [1.0] * 4, "straggler": [1.0] * 3 + [10.0]}
    actual = {(name, bound): train(seconds[name], 40, bound) for name in seconds for bound in (0, math.inf)}
    updates = {key: len(trained.updates) for key, trained in actual.items()}
    assert updates == {("even", 0): 40, ("straggler", 0): 4, ("even", math.inf): 160, ("straggler", math.inf): 124}
    batch = programs.whole_batch(programs.example(4)[1])
    loss = {key: programs.loss(trained.params, batch) for key, trained in actual.items()}
    assert loss["straggler", 0] > 1.7 * loss["even", 0]
    assert loss["straggler", math.inf] < 1.1 * loss["even", math.inf]
    assert actual["straggler", 0].waited == [36.0, 36.0, 36.0, 0.0]


@pytest.mark.parametrize("workers", [1, 4])
def test_staleness_limits_the_step(workers):
    """On a parabola, a * curvature < 2 sin(pi / (4 s + 2)), of staleness s: a smaller step converges, a larger not."""
    limit = workers * 2 * math.sin(math.pi / (4 * workers - 2))
    for share, converges in ((0.95, True), (1.05, False)):
        parabola = lambda w, curvature: curvature * w**2 / 2  # noqa: E731
        trained = simulate_parameter_server(
            parabola, 1.0, [[1.0]] * workers, share * limit, [1] * workers, 200, math.inf
        )
        assert (abs(trained.params) < 0.1) == converges
