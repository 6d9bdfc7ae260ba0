"""Text that a decoder generates: with a cache, as without; drawn tokens; beams."""

from functools import partial

import numpy as np
import pytest

import minidiff as md
from spmd.examples.beam_search import beam_search
from spmd.parallel.decoder import DecoderConfig, decoder_loss, decoder_mesh, init_decoder
from spmd.parallel.generate import decode_step, draw, empty_cache, generate
from spmd.parallel.transformer import causal_attention, mlp, normalize


@pytest.mark.parametrize("experts", [0, 4])
def test_cached_logits_are_those_of_the_whole_text(experts):
    """Beyond the context, those of attention to the last tokens alone."""
    config = DecoderConfig(vocabulary=16, features=16, heads=4, layers=2, hidden=8, kv_heads=2, experts=experts)
    params, text = init_decoder(md.random.key(0), config), np.random.default_rng(1).integers(16, size=(2, 12))
    context = 12 if experts else 5
    cache, step = empty_cache(config, 2, context), md.jit(decode_step(config))
    results = []
    for position, tokens in enumerate(text.T):
        logits, cache = step(params, cache, position, tokens)
        results.append(logits)
    if experts:  # the loss of the text up to the last token, by the training program
        loss = decoder_loss(decoder_mesh(backend="simulated"), DecoderConfig(**{**vars(config), "balance": 0.0}))
        logits = np.stack(results, axis=1)[:, :-1]
        shifted = logits - logits.max(axis=-1, keepdims=True)
        errors = np.log(np.exp(shifted).sum(-1)) - np.take_along_axis(shifted, text[:, 1:, None], -1)[..., 0]
        np.testing.assert_allclose(errors[:, :10].mean(), loss(params, (text[:, :10], text[:, 1:11])), rtol=1e-10)
    else:
        np.testing.assert_allclose(np.stack(results, axis=1), sliding(config, params, text, context), rtol=1e-10)


def sliding(config, params, text, context):
    """Logits of the whole text, where a token attends to the last `context` tokens."""
    near = np.subtract.outer(np.arange(text.shape[1]), np.arange(text.shape[1]))
    mask = (near >= 0) & (near < context)

    def attend(query, key, value):
        return md.nn.dot_product_attention(query, key, value, mask=mask)

    x = params["embedding"][text]
    for i in range(config.layers):
        layer = md.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        normed = normalize(config, layer["attention_norm"], x)
        x = x + causal_attention(layer["attention"], normed, attend=attend)
        x = x + mlp(layer["mlp"], normalize(config, layer["mlp_norm"], x))
    return normalize(config, params["norm"], x) @ params["head"]


def test_sampling():
    key, logits = md.random.key(0), np.array([0.0, 1.0, 3.0, 2.0])
    assert draw(key, logits, temperature=0.0) == 2
    drawn = md.vmap(lambda key: draw(key, logits, 0.5, top_k=3))(md.random.split(md.random.clone(key), 2000))
    weights = np.exp(logits / 0.5) * (logits > 0)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 2000, weights / weights.sum(), atol=0.04)
    config = DecoderConfig(vocabulary=16, features=8, heads=2, layers=1, hidden=8)
    params = init_decoder(key, config)
    assert max(generate(config, params, [1], 50, 4, key, temperature=9.0, vocabulary=5)) < 5


def sample_probs(probs, temperature, top_p):
    """Return the probabilities of a published sampler: the most probable tokens first, then the temperature."""
    ordered = np.sort(probs)[::-1]
    cutoff = ordered[np.argmax(np.cumsum(ordered) > top_p)]
    probs = np.where(probs < cutoff, 0, probs) ** (1 / temperature)
    return probs / probs.sum()


@pytest.mark.parametrize("temperature", [0.4, 4.0])
def test_top_p_before_the_temperature_and_after_it(temperature):
    """At a high temperature the tokens that are less probable come in only if it is applied first."""
    shares, top_p = np.array([0.05, 0.5, 0.15, 0.3]), 0.7
    keys = md.random.split(md.random.key(0), 2000)
    hot = shares ** (1 / temperature) / np.sum(shares ** (1 / temperature))
    expected = {True: sample_probs(shares, temperature, top_p), False: sample_probs(hot, 1.0, top_p)}
    assert (np.count_nonzero(expected[True]), np.count_nonzero(expected[False])) == (2, 1 if temperature < 1 else 3)
    for first, probabilities in expected.items():
        drawn = md.vmap(partial(draw, temperature=temperature, top_p=top_p, top_p_first=first), (0, None))(
            keys, np.log(shares)
        )
        np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 2000, probabilities, atol=0.04)


def test_beams_as_many_as_tokens_find_the_most_probable_pair():
    config = DecoderConfig(vocabulary=6, features=8, heads=2, layers=1, hidden=8)
    params = md.tree.map(lambda leaf: 3 * leaf, init_decoder(md.random.key(3), config))
    pairs = np.stack(np.divmod(np.arange(36), 6), axis=1)
    texts = np.concatenate([np.tile([2, 4], (36, 1)), pairs], axis=1)
    logits, _ = decode_step(config)(params, empty_cache(config, 36, 4), 0, texts)
    logs = md.nn.log_softmax(logits)[:, 1:3]
    scores = np.take_along_axis(logs, pairs[..., None], -1)[..., 0].sum(1)
    best = np.argsort(-scores, kind="stable")[:6]
    tokens, results = beam_search(config, params, [2, 4], 2, 4, 6)
    np.testing.assert_allclose(results, scores[best], rtol=1e-10)
    np.testing.assert_array_equal(tokens, pairs[best])
    narrow, _ = beam_search(config, params, [2, 4], 2, 4, 1)
    np.testing.assert_array_equal(narrow[0], generate(config, params, [2, 4], 2, 4, md.random.key(0), 0.0))
