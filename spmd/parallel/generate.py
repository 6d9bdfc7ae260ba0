"""Text from a decoder, token by token, on one rank.

A new token attends to the keys and values of the tokens before it, which are kept in the KV cache, [layers, batch,
context, kv_heads, size] each. So a new token costs one pass for itself, not for all tokens before it. When the cache is
full, a new token replaces the oldest: each attends to at most `context` tokens. Attention depends only on differences
of rotary positions, so positions may grow without bound.

Source: Shazeer, "Fast transformer decoding: One write-head is all you need" (what is kept); Holtzman et al., "The
curious case of neural text degeneration" (sampling); Beltagy et al., "Longformer" (a sliding window of attention).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.nn import dot_product_attention
from spmd.mesh.specs import P
from spmd.parallel.decoder_layer import layer, logits
from spmd.parallel.decoder_params import EXAMPLES, DecoderConfig, decoder_mesh
from spmd.parallel.transformer import sizes
from spmd.parallel.vocabulary import embed


def empty_cache(config: DecoderConfig, batch: int, context: int, dtype: Any = float) -> tuple[Any, Any]:
    """Keys and values of no token yet: [layers, batch, context, kv_heads, size] each.

    There is room for `context` tokens.

    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=3, hidden=6)
    >>> [x.shape for x in empty_cache(config, batch=1, context=16)]
    [(3, 1, 16, 2, 2), (3, 1, 16, 2, 2)]
    """
    size = sizes(config)
    shape = config.layers, batch, context, size["kv_heads"], size["size"]
    return np.zeros(shape, dtype), np.zeros(shape, dtype)


def decode_step(config: DecoderConfig) -> Callable:
    """A function of (params, cache, position, tokens [batch]) to (logits [batch, vocabulary], the new cache).

    `position` is the number of tokens before it.

    >>> from spmd.parallel.decoder_params import init_decoder
    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> params, cache = init_decoder(md.random.key(0), config), empty_cache(config, batch=1, context=4)
    >>> for position, token in enumerate([3, 1]):
    ...     found, cache = decode_step(config)(params, cache, position, np.array([token]))
    >>> found.shape
    (1, 8)
    """

    def body(params, cache, position, tokens):
        context = cache[0].shape[2]

        def apply(carried, of_layer):
            params, *kept = of_layer
            updated = []

            def attend(query, key, value):
                updated[:] = [np.at(old)[:, position % context].set(new[:, 0]) for old, new in zip(kept, (key, value))]
                return dot_product_attention(query, *updated, mask=np.arange(context) <= position)

            carried = layer(config, params, carried, np.reshape(position, 1), attend)
            return carried, tuple(updated)

        x = embed(params["embedding"], tokens, "feats")[:, None]
        balance = np.zeros_like(x[:, 0, 0]) if config.experts else None
        (x, _), cache = md.scan(apply, (x, balance), (params["layers"], *cache))
        return logits(config, params, x[:, 0]), cache

    batch, cache = P(EXAMPLES), P(None, EXAMPLES)  # on one rank; types tell how experts split them
    specs: dict[str, Any] = {"in_specs": (P(), cache, P(), batch), "out_specs": (batch, cache)}
    return spmd.shard_map(body, mesh=decoder_mesh(backend="simulated"), **specs)


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
) -> numpy.ndarray:
    """`count` tokens that follow the prompt: [tokens] -> [count], integers.

    Each is drawn with its probability at that `temperature`, from the `top_k` most probable tokens below `vocabulary`,
    by default from all. At temperature 0 it is the most probable token. `key` is one of `minidiff.random`. Raises
    ValueError for an empty prompt, a negative temperature, and a top_k below 1.

    >>> from spmd.parallel.decoder_params import init_decoder
    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> params = init_decoder(md.random.key(0), config)
    >>> generate(config, params, np.array([3, 1]), 5, context=4, key=md.random.key(1), top_k=3).shape
    (5,)
    """
    if len(prompt) == 0:
        raise ValueError("generate: the prompt is empty: give one token at least")
    cache = empty_cache(config, 1, context, params["embedding"].dtype)
    step = md.jit(decode_step(config))
    found: list[Any] = []
    for position in range(len(prompt) + count - 1):
        token = prompt[position] if position < len(prompt) else found[-1]
        logits, cache = step(params, cache, position, numpy.array([token]))
        if position >= len(prompt) - 1:
            found.append(int(draw(md.random.fold_in(key, position), logits[0, :vocabulary], temperature, top_k)))
    return numpy.array(found, int)


def draw(key: Any, logits: Any, temperature: float, top_k: int | None = None) -> Any:
    """A token drawn by its logits: [vocabulary] -> [].

    >>> int(draw(md.random.key(0), np.array([0.0, 3.0, 2.0]), temperature=0.0))
    1
    """
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature is {temperature} and top_k {top_k}: at least 0, and at least 1 or None")
    if temperature == 0:
        return np.argmax(logits)
    if top_k is not None and top_k < len(logits):
        logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
    return md.random.categorical(key, logits / temperature)
