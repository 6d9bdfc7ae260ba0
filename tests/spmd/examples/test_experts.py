"""`shadowed_experts`, `pyramid_experts` and `node_limited_experts`: rows and bytes, published sizes."""

import itertools

import numpy as np
import pytest

from spmd.examples import shadowed_experts
from spmd.examples.node_limited_experts import limited_weights
from spmd.parallel.expert import gate_weights


@pytest.mark.parametrize("hot", [[], [3], [0, 5]])
def test_rows_of_tokens_whose_experts_are_elsewhere(hot):
    assignment = np.random.default_rng(1).integers(6, size=24)
    home, cold = np.arange(24) // 8, ~np.isin(assignment, hot)
    table = shadowed_experts.rows(assignment, hot, ranks=3, each=2)
    away = cold & (assignment // 2 != home)
    assert table.sum() == 24 and table.sum() - np.trace(table) == away.sum()


@pytest.mark.parametrize("seed", range(4))
def test_the_busiest_experts_first_are_the_best_choice(seed):
    rng = np.random.default_rng(seed)
    assignment = rng.choice(6, size=96, p=rng.dirichlet(np.full(6, 0.3)))
    subsets = itertools.chain.from_iterable(itertools.combinations(range(6), n) for n in range(7))
    seconds = [shadowed_experts.step_seconds(assignment, subset, 3, 2) for subset in subsets]
    hot = shadowed_experts.choose_hot(assignment, 3, 2)
    assert shadowed_experts.step_seconds(assignment, hot, 3, 2) <= min(seconds) * 1.1
    assert min(seconds) < seconds[0] or not hot


def test_limits_of_nodes():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(12), size=50)
    weights = limited_weights(probabilities, nodes=4, k=4, limit=2)
    assert ((weights > 0).sum(axis=1) == 4).all()
    assert ((weights.reshape(50, 4, 3) > 0).any(axis=2).sum(axis=1) <= 2).all()
    for p, w in zip(probabilities, weights):  # each node by its two best experts; then the best within the best two
        scores = [sorted(p[3 * n : 3 * n + 3])[1:] for n in range(4)]
        nodes = sorted(range(4), key=lambda n: sum(scores[n]))[2:]
        best = sorted((e for n in nodes for e in range(3 * n, 3 * n + 3)), key=lambda e: p[e])[-4:]
        np.testing.assert_allclose(w[best], p[best] / p[best].sum())
    np.testing.assert_array_equal(limited_weights(probabilities, 4, 4, 4), gate_weights(probabilities, 4))
