"""Mixtures of experts: those of whole arrays, with the documented communication; gates."""

import minidiff as md
import minidiff.numpy as np
from spmd.parallel import load_balancing_loss, router_z_loss
from spmd.parallel.expert import gate_weights, routed
from tests.checks.samples import each

RNG = np.random.default_rng(2)


@each("k, capacity, random", [(1, 3, False), (2, 3, True), (3, 1, True), (2, 100, False)])
def test_places_are_taken_once_and_given_by_priority(k, capacity, random):
    probabilities = md.nn.softmax(RNG.normal(size=(20, 4)))
    priorities = RNG.random(20) if random else None
    places = routed(probabilities, capacity, k, priorities)
    assert set(np.unique(places)) <= {0.0, 1.0}
    assert np.all(places.sum(axis=0) <= 1)  # one token a place
    saved, ranking = places.sum(axis=2), np.argsort(np.argsort(-probabilities, axis=1), axis=1)
    assert np.all(saved <= (ranking < k))
    before = (lambda t: t) if priorities is None else (lambda t: -priorities[t])
    for i in range(4):
        queue = sorted(np.flatnonzero(ranking[:, i] < k), key=lambda t: (ranking[t, i], before(t)))
        assert set(np.flatnonzero(saved[:, i])) == set(queue[:capacity])


def test_weights_of_a_gate():
    probabilities = md.nn.softmax(RNG.normal(size=(6, 5)))
    top = np.sort(probabilities, axis=1)[:, ::-1]
    np.testing.assert_allclose(gate_weights(probabilities).sum(axis=1), top[:, 0])
    np.testing.assert_allclose(np.sort(gate_weights(probabilities, 2))[:, -2:].sum(axis=1), 1)
    np.testing.assert_allclose(gate_weights(probabilities, 2).max(axis=1), top[:, 0] / top[:, :2].sum(axis=1))
    for k in (1, 2):
        md.testing.check_grads(lambda p, k=k: gate_weights(p, k), (probabilities,), order=2, modes=("fwd", "rev"))


def test_losses_that_keep_experts_busy():
    """Experts that are chosen equally often have the least one, and small logits."""
    logits, even = RNG.normal(size=(32, 4)), np.tile(np.eye(4), (8, 1))
    assert np.isclose(load_balancing_loss(even), 1)
    assert load_balancing_loss(md.nn.softmax(logits + 5 * even[0])) > 1.5
    md.testing.check_grads(router_z_loss, (logits,), order=2, modes=("fwd", "rev"))
