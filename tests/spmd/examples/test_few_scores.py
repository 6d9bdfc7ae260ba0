"""`sparse_attention` and `summed_attention`: against matrices of all pairs of tokens, by loops."""

import math
from functools import partial

import numpy as np
import pytest

import minidiff as md
import spmd
from spmd import P
from spmd.examples import sparse_attention, summed_attention

RNG = np.random.default_rng(2)
Q, K, V = RNG.normal(size=(3, 12, 2, 4))
MESH = spmd.make_mesh((3,), ("tokens",), backend="simulated")


def on_ranks(f):
    split = P("tokens")
    return spmd.shard_map(partial(f, axis="tokens"), mesh=MESH, in_specs=(split,) * 3, out_specs=split)


def efficient_by_pairs(q, k, v):
    result = np.zeros_like(v)
    for h in range(q.shape[1]):
        features = np.exp(q[:, h]) / np.exp(q[:, h]).sum(1, keepdims=True)
        tokens = np.exp(k[:, h]) / np.exp(k[:, h]).sum(0)
        weights = np.array([[a @ b for b in tokens] for a in features])
        np.testing.assert_allclose(weights.sum(1), 1)
        result[:, h] = weights @ v[:, h]
    return result


def hydra_by_pairs(q, k, v):
    result = np.zeros_like(v)
    for d in range(q.shape[1]):
        for i, a in enumerate(q):
            for j, b in enumerate(k):
                result[i, d] += a[d] / math.hypot(*a) * b[d] / math.hypot(*b) * v[j, d]
    return result


@pytest.mark.parametrize("ranks", [False, True])
def test_sums_over_keys_are_those_over_all_pairs(ranks):
    run = on_ranks if ranks else lambda f: f
    flat = [x.reshape(12, 8) for x in (Q, K, V)]
    for f, by_pairs, args in (
        (summed_attention.efficient_attention, efficient_by_pairs, (Q, K, V)),
        (summed_attention.hydra_attention, hydra_by_pairs, flat),
    ):
        np.testing.assert_allclose(spmd.gather(run(f)(*args)), by_pairs(*args), rtol=1e-10, atol=1e-12)
    large = run(summed_attention.efficient_attention)(Q, K + 1000, V)  # whose exponentials would overflow
    np.testing.assert_allclose(spmd.gather(large), efficient_by_pairs(Q, K, V), rtol=1e-9)


def test_a_head_of_small_size_cannot_have_all_weights():
    """Scores lose the singular values beyond the rank."""
    weights = md.nn.softmax(2 * RNG.normal(size=(8, 8)))
    scores = np.log(weights) - np.log(weights).mean(1, keepdims=True)
    for size in (2, 7):
        near = np.log(summed_attention.nearest_weights(weights, size))
        rest = np.linalg.svd(scores)[1][size:]
        assert np.isclose(np.sum((near - near.mean(1, keepdims=True) - scores) ** 2), np.sum(rest**2))


def hashed_by_pairs(key, qk, v, rounds):
    """Attend by a mask of all pairs for each round, and weigh rounds by the sums of their weights."""
    n, numerator, denominator = len(qk), np.zeros_like(v), np.zeros(len(qk))
    for r in range(rounds):
        buckets = sparse_attention.bucket_of(md.random.fold_in(key, r), qk)
        place = {i: rank for rank, i in enumerate(sorted(range(n), key=lambda i: (buckets[i], i)))}
        for i in range(n):
            weights = np.zeros(n)
            for j in range(n):
                apart = (place[i] // sparse_attention.CHUNK - place[j] // sparse_attention.CHUNK) % (
                    n // sparse_attention.CHUNK
                )
                if i != j and buckets[i] == buckets[j] and apart in (0, 1):
                    weights[j] = math.exp(qk[i] @ qk[j] / math.hypot(*qk[j]) / math.sqrt(len(qk[j])))
            numerator[i] += weights @ v
            denominator[i] += weights.sum()
    return numerator / denominator[:, None], denominator


def test_hashing_is_attention_with_a_mask_for_each_round():
    rng, key = np.random.default_rng(0), md.random.key(3)
    qk = 3 * rng.normal(size=(4, 8))[rng.integers(4, size=48)] + rng.normal(size=(48, 8))
    v = rng.normal(size=(48, 8))
    expected, weights = hashed_by_pairs(key, qk, v, 3)
    assert weights.min() > 0  # each token has another one in its bucket
    np.testing.assert_allclose(sparse_attention.hashed_attention(key, qk, v, 3), expected, rtol=1e-10)
    f = spmd.shard_map(
        partial(sparse_attention.hashed_attention, rounds=1, axis="tokens"), mesh=MESH, in_specs=P(), out_specs=P()
    )
    np.testing.assert_allclose(spmd.gather(f(key, qk, v)), expected, rtol=1e-10)


def test_bigbird_has_few_blocks_and_any_two_tokens_are_two_steps_apart():
    for count in (8, 16, 64):
        blocks = sparse_attention.bigbird_blocks(count)
        assert blocks.sum() <= (2 + 2 + 3) * count
        assert (blocks.astype(int) @ blocks).min() > 0
