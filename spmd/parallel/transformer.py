"""A decoder-only transformer, as plain functions on a tree of parameters.

A block has two half layers, attention and a multilayer perceptron. Each reads the residual stream x through a norm and
adds its result to it. The functions take `gather` and `combine`, which open and close a half layer; on one device they
do nothing. If each rank computes a term of a half layer's result, `combine` is the sum over ranks; such a parallelism
also passes its own `embed` and `error`. `dimensions` names the dimensions of each parameter: initialization gives each
name a size, and a parallelism says which names it splits. There are no biases.

Source: Vaswani et al., "Attention is all you need"; Zhang and Sennrich, "Root mean square layer normalization";
Shazeer, "GLU variants improve transformer"; Ainslie et al., "GQA: Training generalized multi-query transformer models
from multi-head checkpoints"; Srivastava et al., "Dropout: A simple way to prevent neural networks from overfitting".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
from minidiff.nn import dot_product_attention, dropout, gelu, layer_norm, rms_norm, silu
from minidiff.precision import cast_for
from spmd.parallel.causal_attention import causal, causal_attention
from spmd.parallel.vocabulary import embed, label_cross_entropy


@dataclass(frozen=True)
class Config:
    """Sizes and options of a transformer.

    Each of the `kv_heads` heads of keys and values (by default `heads`) serves heads / kv_heads heads of queries.
    Options are layer norm in place of RMS norm, SwiGLU or GELU, a head that is the embedding's transpose (`tied`), the
    rate of `dropout` of the half layers' results, and `causal=False`: an encoder, whose tokens attend to all others.
    Raises ValueError for sizes that do not fit: rotary positions turn the features of a head in pairs.

    >>> config = Config(vocabulary=8, features=16, heads=4, layers=2, hidden=32, kv_heads=2)
    >>> sizes(config)["size"]  # of a head
    4
    """

    vocabulary: int
    features: int
    heads: int
    layers: int
    hidden: int
    kv_heads: int | None = None
    layer_norm: bool = False
    swiglu: bool = True
    tied: bool = False
    dropout: float = 0.0
    causal: bool = True

    def __post_init__(self) -> None:
        if self.features % (2 * self.heads) or self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{self}: features must be a multiple of 2 * heads, and heads of kv_heads")


def dimensions(config: Config) -> dict:
    """The tree of parameters, with the names of its dimensions as leaves.

    >>> dimensions(Config(vocabulary=8, features=4, heads=2, layers=1, hidden=6, tied=True))['layers'][0]['mlp']
    {'up': 'features hidden', 'down': 'hidden features', 'gate': 'features hidden'}
    """
    pair = "features kv_heads size"
    attention = {"query": "features heads size", "key": pair, "value": pair, "out": "heads size features"}
    mlp = {"up": "features hidden", "down": "hidden features", **({"gate": "features hidden"} if config.swiglu else {})}
    layer = {"attention_norm": "features", "attention": attention, "mlp_norm": "features", "mlp": mlp}
    head = {} if config.tied else {"head": "features vocabulary"}
    return {"embedding": "vocabulary features", "layers": [layer] * config.layers, "norm": "features", **head}


def sizes(config: Config) -> dict[str, int]:
    """The size of each dimension that `dimensions` names."""
    return {**vars(config), "kv_heads": config.kv_heads or config.heads, "size": config.features // config.heads}


def init_transformer(rng: Any, config: Config) -> dict:
    """Random weights of standard deviation 1 / sqrt(features), and scales of 1.

    >>> init_transformer(np.random.default_rng(0), Config(vocabulary=8, features=4, heads=2, layers=1, hidden=6)).keys()
    dict_keys(['embedding', 'head', 'layers', 'norm'])
    """

    def initial(names: str) -> Any:
        shape = [sizes(config)[name] for name in names.split()]
        return rng.normal(size=shape) / np.sqrt(config.features) if len(shape) > 1 else np.ones(shape)

    return md.tree.map(initial, dimensions(config))


def normalize(config: Config, scale: Any, x: Any) -> Any:
    """RMS norm over the features; layer norm is the same of centered features: [..., features] -> same."""
    norm = layer_norm if config.layer_norm else rms_norm
    return cast_for("compute", norm(x, scale))


def mlp(params: dict, x: Any) -> Any:
    """SwiGLU if there is a gate, else GELU: [..., features] -> same."""
    up = x @ params["up"]
    return (silu(x @ params["gate"]) * up if "gate" in params else gelu(up)) @ params["down"]


def block(
    config: Config,
    params: dict,
    x: Any,
    combine: Callable = lambda x: x,
    gather: Callable = lambda x: x,
    key: Any = None,
    dropout: Callable = dropout,
) -> Any:
    """Attention, then the perceptron, each added to the residual stream: [batch, tokens, features] -> same.

    With a key, `dropout(key, result, config.dropout)` is added, for a key of each half layer.
    """
    attend = causal if config.causal else dot_product_attention
    halves: dict[str, Callable] = {"attention": partial(causal_attention, attend=attend), "mlp": mlp}
    for i, (name, half) in enumerate(halves.items()):
        y = combine(half(params[name], gather(normalize(config, params[f"{name}_norm"], x))))
        x = x + (y if key is None else dropout(md.random.fold_in(key, i), y, config.dropout))
    return x


def transformer(
    config: Config, params: dict, tokens: Any, embed: Callable = embed, key: Any = None, **ends: Callable
) -> Any:
    """The logits of each next token: [batch, tokens] -> [batch, tokens, vocabulary].

    `embed(table, tokens)` looks up rows; `ends` are those of `block`. Without a key (of `minidiff.random`), nothing is
    dropped, as in evaluation. Raises IndexError for other tokens.

    >>> config = Config(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> transformer(config, init_transformer(np.random.default_rng(0), config), np.array([[0, 1, 2]])).shape
    (1, 3, 8)
    """
    x = cast_for("residual", embed(params["embedding"], tokens))
    for i, layer in enumerate(params["layers"]):
        x = block(config, layer, x, key=None if key is None else md.random.fold_in(key, i), **ends)
    x = ends.get("gather", lambda x: x)(normalize(config, params["norm"], x))
    return x @ (params["embedding"].T if config.tied else params["head"])


def next_token_loss(
    config: Config, params: dict, tokens: Any, labels: Any, error: Callable = label_cross_entropy, **options: Any
) -> Any:
    """The mean of `error(logits, labels)` over all tokens: [batch, tokens], [batch, tokens] -> [].

    The label of a token is the next one. `options` are those of `transformer`. Raises IndexError for tokens and labels
    that are not in the vocabulary. With zero weights, all tokens are equally probable:

    >>> config, text = Config(vocabulary=8, features=4, heads=2, layers=0, hidden=6), np.array([[0, 1, 2, 3]])
    >>> params = md.tree.map(np.zeros_like, init_transformer(np.random.default_rng(0), config))
    >>> round(float(next_token_loss(config, params, text[:, :-1], text[:, 1:]) / np.log(2)), 6)
    3.0
    """
    return np.mean(error(transformer(config, params, tokens, **options), labels))
