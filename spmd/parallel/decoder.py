"""A transformer on all axes of a mesh at once: `spmd.examples.gpt` trains it.

The names of the parameters' dimensions say what is split. A mesh has these axes, those that are not used of size 1:

=======  =====================  ==========================================  ============================
axis     splits                 and of parameters                           parallelism
=======  =====================  ==========================================  ============================
data     examples               nothing                                     data
shards   examples               features, gathered before use               fully sharded
experts  examples               experts                                     expert
stages   examples               layers                                      pipeline
tokens   tokens, in zig-zag     nothing                                     sequence (ring attention)
feats    heads, hidden          heads, kv_heads, hidden, vocabulary         tensor
=======  =====================  ==========================================  ============================

All combinations compute the same loss, that of the whole batch. Layers are stacked, [layers, …], and a scan runs them:
those of a stage, on one microbatch after the other.

With `experts`, each layer has a mixture of experts for its perceptron, from which no token is dropped. Its balancing
loss is that of each example, so that it does not depend on how examples are split.

Sources: those of `fully_sharded.py`, `expert.py`, `pipeline.py`, `sequence.py`, `megatron.py`; DeepSeek-AI, "DeepSeek-V3
technical report", section 2.1.2 (balancing loss of each sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, axis_size, pmean, psum
from minidiff.nn import dot_product_attention, softmax
from spmd.parallel.expert import mixture_of_experts
from spmd.parallel.fully_sharded import gathering_again
from spmd.parallel.gates import load_balancing_loss
from spmd.parallel.pipeline import pipeline
from spmd.parallel.sequence import ring_attention, zigzag, zigzag_positions
from spmd.parallel.transformer import Config, causal_attention, mlp, normalized, sizes
from spmd.parallel.transformer import dimensions as dimensions_of_transformer
from spmd.parallel.vocabulary import embed, label_cross_entropy
from spmd.partition import P

AXES = ("data", "shards", "experts", "stages", "tokens", "feats")
EXAMPLES = AXES[:4]  # along which examples are split

#: The axis along which each dimension of a parameter is split.
SPLIT = {"layers": "stages", "features": "shards", "experts": "experts"}
SPLIT |= dict.fromkeys(("vocabulary", "heads", "kv_heads", "hidden"), "feats")


@dataclass(frozen=True)
class DecoderConfig(Config):
    """Sizes of a decoder: those of a transformer; how many experts, none by default; how many of them a token takes.

    `balance` is the coefficient of the experts' balancing loss.
    """

    experts: int = 0
    chosen: int = 2
    balance: float = 0.01


def dimensions(config: DecoderConfig) -> dict:
    """The tree of parameters, with the names of their dimensions as leaves. Layers are stacked."""
    whole = dimensions_of_transformer(config)
    layer = dimensions_of_transformer(config)["layers"][0]
    if config.experts:
        experts = md.tree.map(lambda names: f"experts {names}", layer["mlp"])
        layer = {**layer, "mlp": {"router": "features choices", "experts": experts}}
    return {**whole, "layers": md.tree.map(lambda names: f"layers {names}", layer)}


def decoder_specs(config: DecoderConfig) -> dict:
    """The tree of parameters, with partition specs as leaves."""
    return md.tree.map(lambda names: P(*map(SPLIT.get, names.split())), dimensions(config))


def init_decoder(rng: Any, config: DecoderConfig) -> dict:
    """Whole random weights, of standard deviation 1 / sqrt(features), and scales of 1."""
    all_sizes = {**sizes(config), "choices": config.experts}

    def initial(names: str) -> Any:
        shape = [all_sizes[name] for name in names.split()]
        weights = set(names.split()) - {"layers", "features"}
        return rng.normal(size=shape) / np.sqrt(config.features) if weights else np.ones(shape)

    return md.tree.map(initial, dimensions(config))


def gathered(params: Any, names: Any) -> Any:
    """Parameters whose features are whole: an `all_gather` along the shards for each leaf."""
    return md.tree.map(
        lambda names, leaf: all_gather(leaf, "shards", axis=names.split().index("features"), tiled=True), names, params
    )


def perceptron(config: DecoderConfig, params: dict, x: Any) -> tuple[Any, Any]:
    """A rank's term of the half layer's result, [batch, tokens, features], and its balancing loss, [batch]."""
    if not config.experts:
        return mlp(params, x), None
    tokens = x.reshape(-1, config.features)
    made = mixture_of_experts(mlp, params["experts"], params["router"], tokens, len(tokens), "experts", config.chosen)
    balance = md.vmap(partial(load_balancing_loss, axis="tokens"))(softmax(x @ params["router"]))
    return made.reshape(x.shape), config.balance * balance


def layer(config: DecoderConfig, params: dict, carried: tuple, positions: Any, attend: Callable) -> tuple:
    """Both half layers: (x, balancing loss so far) -> same."""
    x, balance = carried
    attended = causal_attention(params["attention"], normalized(config, params["attention_norm"], x), positions, attend)
    x = x + psum(attended, "feats")
    made, more = perceptron(config, params["mlp"], normalized(config, params["mlp_norm"], x))
    return x + psum(made, "feats"), None if more is None else balance + more


def decoder_loss(mesh: spmd.Mesh, config: DecoderConfig, microbatches: int = 1, **options: Any) -> Callable:
    """The mean cross entropy of next tokens, as a function of (params, (tokens, labels)).
    """
    names = dimensions(config)

    def on_each_rank(params, block):
        tokens, labels = block
        ends = {name: gathered(leaf, names[name]) for name, leaf in params.items() if name != "layers"}
        one_rank = axis_size("tokens") == 1
        positions = np.arange(tokens.shape[1]) if one_rank else zigzag_positions(tokens.shape[1], "tokens")
        ring = md.vmap(partial(ring_attention, axis="tokens", causal=True))
        attend = partial(dot_product_attention, is_causal=True) if one_rank else ring
        layer_names = md.tree.map(lambda names: names.removeprefix("layers "), names["layers"])

        @gathering_again
        def apply(params, carried):
            return layer(config, gathered(params, layer_names), carried, positions, attend)

        x = embed(ends["embedding"], tokens, "feats")
        carried = x, np.zeros_like(x[:, 0, 0]) if config.experts else None
        carried = md.tree.map(lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), carried)
        carried = pipeline(apply, params["layers"], carried, "stages")
        x, balance = md.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), carried)
        x = normalized(config, ends["norm"], x)
        logits = x @ (ends["embedding"].T if config.tied else ends["head"])
        error = np.mean(label_cross_entropy(logits, labels, "feats"))
        return pmean(error if balance is None else error + np.mean(balance), (*EXAMPLES, "tokens"))

    split = P(EXAMPLES, "tokens")
    mapped = spmd.shard_map(on_each_rank, mesh=mesh, in_specs=(decoder_specs(config), split), out_specs=P(), **options)

    def loss(params, batch):
        order = zigzag(batch[0].shape[1], mesh.shape["tokens"])
        return mapped(params, tuple(x[:, order] for x in batch))

    return loss
