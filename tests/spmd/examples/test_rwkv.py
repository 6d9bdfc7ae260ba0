"""RWKV: the parallel form and the recurrence against the loop that its authors published."""

import numpy as np

import minidiff as md
from spmd.examples import rwkv


def norm(x):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def time_mixing(p, x, last_x, last_num, last_den):
    """The published loop, in sums of exponentials, which overflow for large keys."""
    (mix_k, Wk), (mix_v, Wv), (mix_r, Wr) = p["time"]
    k = (x * mix_k + last_x * (1 - mix_k)) @ Wk
    v = (x * mix_v + last_x * (1 - mix_v)) @ Wv
    r = (x * mix_r + last_x * (1 - mix_r)) @ Wr
    wkv = (last_num + np.exp(p["bonus"] + k) * v) / (last_den + np.exp(p["bonus"] + k))
    num = np.exp(-np.exp(p["decay"])) * last_num + np.exp(k) * v
    den = np.exp(-np.exp(p["decay"])) * last_den + np.exp(k)
    return (sigmoid(r) * wkv) @ p["out"], (x, num, den)


def channel_mixing(p, x, last_x):
    (mix_k, Wk), (mix_r, Wr) = p["channel"]
    k = (x * mix_k + last_x * (1 - mix_k)) @ Wk
    r = (x * mix_r + last_x * (1 - mix_r)) @ Wr
    return sigmoid(r) * (np.maximum(k, 0) ** 2 @ p["value"]), x


def by_loop(params, tokens):
    states = [[(np.zeros(rwkv.FEATURES),) * 3, np.zeros(rwkv.FEATURES)] for _ in params["layers"]]
    result = []
    for token in tokens:
        x = norm(params["embedding"][token])
        for p, state in zip(params["layers"], states):
            added, state[0] = time_mixing(p, norm(x), *state[0])
            x = x + added
            added, state[1] = channel_mixing(p, norm(x), state[1])
            x = x + added
        result.append(norm(x) @ params["head"])
    return np.stack(result)


TOKENS = np.random.default_rng(1).integers(len(rwkv.LETTERS), size=12)


def test_both_forms_have_the_logits_of_the_published_loop():
    params, expected = rwkv.init(3), by_loop(rwkv.init(3), TOKENS)
    np.testing.assert_allclose(rwkv.parallel(params, TOKENS), expected, rtol=1e-10)
    state, rows = rwkv.empty_state(), []
    for token in TOKENS:
        scores, state = rwkv.recurrent(params, state, token)
        rows.append(scores)
    np.testing.assert_allclose(rows, expected, rtol=1e-10)
    assert sum(leaf.size for leaf in md.tree.leaves(state)) == rwkv.LAYERS * 6 * rwkv.FEATURES


def test_large_keys_do_not_overflow():
    params = rwkv.init()
    for p in params["layers"]:
        p["time"][0] = (p["time"][0][0], 500 * p["time"][0][1])
    logits = rwkv.parallel(params, TOKENS)
    assert np.isfinite(logits).all()
    with np.errstate(over="ignore", invalid="ignore"):
        assert not np.isfinite(by_loop(params, TOKENS)).all()
