"""Text from a decoder, many tokens of the prompts at once and then token by token, on one rank or many.

A new token attends to the keys and values of the tokens before it, which are kept in the KV cache, [layers, batch,
context, kv_heads, size] each. So a new token costs one pass for itself, not for all tokens before it. The tokens of the
prompts take one pass together (prefill). When the cache is full, a new token replaces the oldest: each attends to at
most `context` tokens. Attention depends only on differences of rotary positions, so positions may grow without bound.

On a mesh, the cache is split along "data" by examples and along "feats" by heads, as the parameters are: each token
then takes the all-reduces of a forward pass, of one token's features.

Source: Shazeer, "Fast transformer decoding: One write-head is all you need" (what is kept); Holtzman et al., "The
curious case of neural text degeneration" (top-p sampling); Beltagy et al., "Longformer" (a sliding window).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.nn import dot_product_attention, softmax
from spmd.mesh.specs import P
from spmd.parallel.decoder import EXAMPLES, DecoderConfig, check_decoder, decoder_mesh, decoder_specs, layer, logits
from spmd.parallel.tensor import pad_vocabulary
from spmd.parallel.transformer import embed, sizes


def empty_cache(config: DecoderConfig, batch: int, context: int, dtype: Any = float) -> tuple[Any, Any]:
    """Return empty keys and values: [layers, batch, context, kv_heads, size] each.

    Args:
        config: the sizes of the decoder.
        batch: the number of texts.
        context: the number of tokens that there is room for.
        dtype: the dtype of keys and values.

    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=3, hidden=6)
    >>> [x.shape for x in empty_cache(config, batch=1, context=16)]
    [(3, 1, 16, 2, 2), (3, 1, 16, 2, 2)]
    """
    size = sizes(config)
    shape = config.layers, batch, context, size["kv_heads"], size["size"]
    return np.zeros(shape, dtype), np.zeros(shape, dtype)


def decode_step(config: DecoderConfig, mesh: spmd.Mesh | None = None) -> Callable:
    """Return a function of (params, cache, position, tokens) to (logits, the new cache).

    `tokens` are one for each example, [batch], or several, [batch, count], which all fit in the cache; `position`, a
    number or [batch], counts the tokens before them. The logits [batch, …, vocabulary] are those of each token's next;
    a padded vocabulary has more.

    Args:
        config: the sizes of the decoder.
        mesh: a mesh that splits examples ("data") and features ("feats") alone; by default one rank.

    Raises:
        ValueError: for another mesh, and for more tokens than fit in the cache.

    >>> from spmd.parallel.decoder import init_decoder
    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> params, cache = init_decoder(md.random.key(0), config), empty_cache(config, batch=1, context=4)
    >>> prefilled, cache = decode_step(config)(params, cache, 0, np.array([[3, 1]]))
    >>> logits, cache = decode_step(config)(params, cache, 2, np.array([5]))
    >>> prefilled.shape, logits.shape
    ((1, 2, 8), (1, 8))
    """
    mesh = decoder_mesh(backend="simulated") if mesh is None else mesh
    check_decoder(mesh, config)
    config = replace(config, capacity_factor=None)  # a text does not depend on those beside it
    if used := [axis for axis in mesh.axis_names if axis not in ("data", "feats") and mesh.shape[axis] > 1]:
        raise ValueError(f"decode_step: {mesh} splits {used[0]!r}: a cache is split only along 'data' and 'feats'")

    def body(params, cache, position, tokens):
        context, (batch, count) = cache[0].shape[2], tokens.shape
        positions = position[:, None] + np.arange(count)
        places, seen = positions % context, np.arange(context) <= positions[:, None, :, None]

        def apply(carried, of_layer):
            params, *layer_cache = of_layer
            updated = []

            def attend(query, key, value):
                at = np.arange(batch)[:, None], places
                updated[:] = [np.at(old)[at].set(new) for old, new in zip(layer_cache, (key, value))]
                return dot_product_attention(query, *updated, mask=seen)

            carried = layer(config, params, carried, positions, attend)
            return carried, tuple(updated)

        x = embed(params["embedding"], tokens, "feats", config.vocabulary)
        balance = np.zeros_like(x[:, 0, 0]) if config.experts else None
        (x, _), cache = md.scan(apply, (x, balance), (params["layers"], *cache))
        return logits(config, params, x), cache

    cache = P(None, EXAMPLES, None, "feats")
    specs = (decoder_specs(config), cache, P(EXAMPLES), P(EXAMPLES)), (P(EXAMPLES, None, "feats"), cache)
    mapped = spmd.shard_map(body, mesh=mesh, in_specs=specs[0], out_specs=specs[1])

    def step(params, cache, position, tokens):
        several, context = np.ndim(tokens) > 1, cache[0].shape[2]
        if several and not 0 < np.shape(tokens)[1] <= context:
            raise ValueError(f"decode_step: {np.shape(tokens)[1]} tokens of each example, but a cache of {context}")
        params = pad_vocabulary(params, mesh.shape["feats"])
        position = np.broadcast_to(position, np.shape(tokens)[:1])
        logits_of_tokens, cache = mapped(params, cache, position, tokens if several else tokens[:, None])
        return logits_of_tokens if several else logits_of_tokens[:, 0], cache

    return step


def generate(
    config: DecoderConfig,
    params: dict,
    prompt: Any,
    count: int,
    context: int,
    key: Any,
    temperature: float = 1.0,
    top_k: int | None = None,
    vocabulary: int | None = None,
    top_p: float | None = None,
    mesh: spmd.Mesh | None = None,
    top_p_first: bool = False,
) -> numpy.ndarray:
    """Return tokens that follow a prompt: [tokens] -> [count], integers; of n prompts, [n, count].

    Each token is drawn by `draw` from the logits of `decode_step`.

    Args:
        config: the sizes of the decoder.
        params: those of `init_decoder`; on a mesh split as `decoder_specs` says, or whole.
        prompt: integers, or several prompts, which may have different lengths.
        count: the number of tokens.
        context: the number of tokens to which a token attends at most.
        key: a key of `minidiff.random`; several prompts have a part each of its `split`.
        temperature: that of `draw`; at 0 each token is the most probable one.
        top_k: the number of the most probable tokens to draw from; by default all.
        vocabulary: draw tokens below this number; by default all.
        top_p: draw from the fewest tokens that have this probability together.
        mesh: that of `decode_step`. All ranks get the tokens.
        top_p_first: that of `draw`: choose the tokens for `top_p` before the temperature changes their probabilities.

    Raises:
        ValueError: for an empty prompt, and what `draw` and `decode_step` raise.

    >>> from spmd.parallel.decoder import init_decoder
    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> params = init_decoder(md.random.key(0), config)
    >>> generate(config, params, np.array([3, 1]), 5, context=4, key=md.random.key(1), top_k=3).shape
    (5,)
    >>> generate(config, params, [[3, 1, 4], [1]], 5, context=4, key=md.random.key(1), top_p=0.9).shape
    (2, 5)
    """
    several = len(prompt) > 0 and numpy.ndim(prompt[0]) > 0
    prompts = list(map(numpy.asarray, prompt if several else [prompt]))
    if 0 in map(len, prompts):
        raise ValueError("generate: the prompt is empty: pass at least one token")
    keys = md.random.split(key, len(prompts)) if several else key[None]
    choose = md.jit(md.vmap(lambda key, n, row: _draw_next(key, n, row, temperature, top_k, top_p, top_p_first)))
    texts = [list(each) for each in prompts]  # with what has been drawn
    first = min(max(map(len, prompts)), context)
    tokens = numpy.array([[*text[:first], *[0] * (first - len(text))] for text in texts])  # what is beyond is not seen
    done = numpy.array([min(len(text), first) for text in texts])  # of each, the tokens that are in the cache
    cache = empty_cache(config, len(prompts), context, params["embedding"].dtype)
    step = md.jit(decode_step(config, mesh))
    scores, cache = step(params, cache, numpy.zeros(len(texts), int), tokens)
    rows = spmd.gather(scores)[numpy.arange(len(texts)), done - 1]
    while True:
        drawn = choose(keys, done - 1, rows[:, : config.vocabulary if vocabulary is None else vocabulary])
        for text, n, token in zip(texts, done, drawn):
            if n == len(text):
                text.append(int(token))
        if all(len(text) >= len(each) + count for text, each in zip(texts, prompts)):
            break
        tokens = numpy.array([text[n] for text, n in zip(texts, done)])
        scores, cache = step(params, cache, done, tokens)
        rows, done = spmd.gather(scores), done + 1
    continuations = numpy.array([text[len(each) : len(each) + count] for text, each in zip(texts, prompts)], int)
    return continuations if several else continuations[0]


def _draw_next(key: Any, n: Any, logits: Any, *options: Any) -> Any:
    return draw(md.random.fold_in(key, n), logits, *options)


def draw(
    key: Any,
    logits: Any,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    top_p_first: bool = False,
) -> Any:
    """Draw a token by its logits: [vocabulary] -> [].

    It has its probability at that `temperature`; at 0 it is the most probable one. It is one of the `top_k` most
    probable, and of the fewest that have together the probability `top_p`. By default that is the probability at the
    temperature, so a high temperature lets in more tokens; with `top_p_first` it is that of the logits, and the
    temperature matters only among the tokens that are chosen. Raises ValueError for a negative temperature, a top_k
    below 1, and a top_p that is not above 0 and at most 1.

    >>> int(draw(md.random.key(0), np.array([0.0, 3.0, 2.0]), temperature=0.0))
    1
    """
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature={temperature}, top_k={top_k}: they must be at least 0, and at least 1 or None")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: it must be above 0 and at most 1, or None")
    if temperature == 0:
        return np.argmax(logits)
    if top_k is not None and top_k < len(logits):
        logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
    if not top_p_first:
        logits = logits / temperature
    if top_p is not None:
        ordered = np.sort(logits)[::-1]
        shares = softmax(ordered)
        likely = np.cumsum(shares) - shares < top_p  # while those that are more probable do not suffice
        logits = np.where(logits >= np.min(np.where(likely, ordered, np.inf)), logits, -np.inf)
    return md.random.categorical(key, logits / temperature if top_p_first else logits)
