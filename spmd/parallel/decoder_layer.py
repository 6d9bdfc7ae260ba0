"""A layer of a decoder that is split along every axis of a mesh: what one rank computes of it.

The layer is that of `transformer.py`. A rank has some heads and hidden features; a `psum` along "feats" closes each
half layer. A rank's tokens attend to those of all ranks along "tokens". Experts are split along "experts".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import all_gather, axis_size, psum
from minidiff.nn import softmax
from minidiff.precision import cast_for
from spmd.parallel.causal_attention import causal, causal_attention
from spmd.parallel.decoder_params import DecoderConfig
from spmd.parallel.expert import mixture_of_experts
from spmd.parallel.gates import load_balancing_loss
from spmd.parallel.sequence import ring_attention, zigzag_positions
from spmd.parallel.transformer import mlp, normalize


def gather_features(params: Any, names: Any) -> Any:
    """Gather the features of parameters: an `all_gather` along the shards for each leaf."""
    return md.tree.map(
        lambda names, leaf: all_gather(leaf, "shards", axis=names.split().index("features"), tiled=True), names, params
    )


def perceptron(config: DecoderConfig, params: dict, x: Any) -> tuple[Any, Any]:
    """A rank's term of the half layer's result, [batch, tokens, features], and the balancing loss, [batch]."""
    if not config.experts:
        return mlp(params, x), None
    tokens = x.reshape(-1, config.features)
    made = mixture_of_experts(mlp, params["experts"], params["router"], tokens, len(tokens), "experts", config.chosen)
    probabilities = softmax(cast_for("router", x) @ cast_for("router", params["router"]))
    balance = md.vmap(partial(load_balancing_loss, axis="tokens"))(probabilities)
    return made.reshape(x.shape), config.balance * balance


def layer(config: DecoderConfig, params: dict, carried: tuple, positions: Any, attend: Callable) -> tuple:
    """Both half layers: (x, balancing loss so far) -> same."""
    x, balance = carried
    attended = causal_attention(params["attention"], normalize(config, params["attention_norm"], x), positions, attend)
    x = x + psum(attended, "feats")
    made, more = perceptron(config, params["mlp"], normalize(config, params["mlp_norm"], x))
    return x + psum(made, "feats"), None if more is None else balance + more


def logits(config: DecoderConfig, params: dict, x: Any) -> Any:
    """The logits of a rank's shard of the vocabulary: [..., features] -> [..., vocabulary / ranks]."""
    return normalize(config, params["norm"], x) @ (params["embedding"].T if config.tied else params["head"])


def attention_along_tokens(tokens: int) -> tuple[Any, Callable]:
    """The positions of a rank's tokens, and the function by which they attend to the tokens of all ranks."""
    if axis_size("tokens") == 1:
        return np.arange(tokens), causal
    ring = partial(ring_attention, axis="tokens", causal=True)
    return zigzag_positions(tokens, "tokens"), md.vmap(ring)
