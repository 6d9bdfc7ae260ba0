"""Positions of tokens in attention: each kind against a loop over queries, keys and heads, by its formula."""

import math

import numpy as np
import pytest

from spmd.examples import positions as program


def embedding(kind, params, position, features):
    """Return the row that is added to an embedding at a position, or the sinusoidal one of a distance."""
    if kind == "learned":
        return params["learned"][position]
    if kind == "hierarchical":
        table, alpha = params["table"], 0.4
        first, second = ((table[n] - alpha * table[0]) / (1 - alpha) for n in divmod(position, len(table)))
        return alpha * first + (1 - alpha) * second
    angles = [position / 10000 ** (2 * n / features) for n in range(features // 2)]
    return np.array([f(angle) for angle in angles for f in (math.sin, math.cos)])


def rotated_product(q, k, distance, base, scale):
    """Return the product of a query and a key, as complex numbers, turned by the distance."""
    half = len(q) // 2
    z, w = (x[:half] + 1j * x[half:] for x in (q, k))
    turns = np.exp([1j * distance / scale * base ** (-n / half) for n in range(half)])
    return float(np.sum(z * w.conj() * turns).real)


def score(kind, params, h, q, k, i, j, same):
    """Return the score of one query and one key in head h, before the division by the root of the size."""
    rotations = {"rotary": (1e4, 1.0), "interpolated": (1e4, 4.0), "NTK": (1e4 * 4 ** (8 / 6), 1.0)}
    if kind in rotations:
        return rotated_product(q, k, i - j, *rotations[kind])
    if kind == "ALiBi":
        return q @ k - math.sqrt(8) * 2 ** (-8 * (h + 1) / 2) * abs(i - j)
    if kind in ("Transformer-XL", "XLNet"):
        row = embedding("sinusoidal", params, i - j, 16) @ params["distance"][:, h]
        result = q @ k + q @ row + params["key_bias"][h] @ k + params["distance_bias"][h] @ row
        segment = params["segments"][int(same), h]
        return result + (q + params["segment_bias"][h]) @ segment if kind == "XLNet" else result
    return q @ k


def by_loops(kind, params, x, positions, segments):
    if kind in ("sinusoidal", "learned", "hierarchical"):
        x = np.stack([row + embedding(kind, params, p, len(row)) for row, p in zip(x, positions)])
    result = np.zeros((len(x), 2, 8))
    for h in range(2):
        q, k, v = (x @ params[name][:, h] for name in ("query", "key", "value"))
        for a, i in enumerate(positions):
            scores = [
                score(kind, params, h, q[a], k[b], i, j, segments[a] == segments[b]) for b, j in enumerate(positions)
            ]
            weights = np.exp(np.array(scores) / math.sqrt(8))
            result[a, h] = weights @ v / weights.sum()
    return result


@pytest.mark.parametrize("kind", program.KINDS)
@pytest.mark.parametrize("first", [0, 9])
def test_attention_is_that_of_loops_by_the_formulas(kind, first):
    params, x, segments = program.init(8)
    positions = np.arange(8) + first
    result = program.layer(kind, params, x, positions, segments)
    np.testing.assert_allclose(result, by_loops(kind, params, x, positions, segments), rtol=1e-11)
