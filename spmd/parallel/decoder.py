"""A transformer on all axes of a mesh at once: `spmd.examples.gpt` trains it.

A mesh has these axes, of size 1 if not used. All meshes compute the same loss, of the whole batch:

=======  =========================  ========================================  ===============================
axis     splits activations by      and parameters by                         parallelism
=======  =========================  ========================================  ===============================
data     examples                                                             data
shards   examples                   features, gathered before use             fully sharded
experts  examples                   experts                                   expert
stages   examples                   layers                                    pipeline
tokens   tokens, in zig-zag order                                             sequence (ring attention)
feats    heads, hidden features     heads, hidden features, vocabulary        tensor
=======  =========================  ========================================  ===============================

The layers are those of `transformer.py`. A rank has some heads and hidden features; a `psum` along feats closes each
half layer. Its tokens attend to those of all ranks along tokens.

Layers are stacked, [layers, …]; a scan applies those of a stage to one microbatch after the other. The sizes of the
axes are d, s, e, g (stages), t and f. A rank has n tokens, in M microbatches of m tokens, and evaluates
R = L/g*(M*g+g-1) layers. F are the features, K those of a rank's keys. Gathered, a rank has `layer` parameters of a
layer in `leaves` arrays, and `ends` of the rest in 3. Loss and gradient, without experts, communicate:

=========  ============  ==========================  =================  ==========================
direction  collective    axes                        count              numbers per rank
=========  ============  ==========================  =================  ==========================
forward    all_gather    shards                      leaves*R+3         (R*layer+ends)/s
forward    psum          feats                       2*R+3              2*R*m*F+n*F+2*n
forward    pmax          feats                       1                  n
forward    ppermute      tokens                      (t-1)*R            2*(t-1)*R*m*K
forward    ppermute      stages                      M*g+g-2+2*(g-1)    (M*g+g-2)*m*F+2*(g-1)*n*F
forward    psum          data,…,tokens               1                  1
backward   all_gather    shards                      leaves*R           R*layer/s
backward   psum_scatter  shards                      leaves*R+3         R*layer+ends
backward   psum          feats                       2*R+1              2*R*m*F+n*F
backward   ppermute      tokens                      (t-1)*R            2*(t-1)*R*m*K
backward   ppermute      stages                      M*g+g-2+2*(g-1)    (M*g+g-2)*m*F+2*(g-1)*n*F
backward   psum          data,experts,stages,tokens  1                  ends/s
backward   psum          data,experts,tokens         1                  L/g*layer/s
=========  ============  ==========================  =================  ==========================

With `experts`, the perceptron of each layer is a mixture of E experts. An expert takes at most C of a rank's m tokens,
by the `capacity_factor`; without one, C is m, and no token is dropped. Each example has its own balancing loss, which
moves through the stages with it, so the sum does not depend on how the B examples of a rank are split. (Which tokens
are dropped does.) A rank has `own` parameters of a layer's experts. These rows then replace those of the same
direction, collective and axes, and join the others:

=========  ============  ==========================  =================  ==========================
direction  collective    axes                        count              numbers per rank
=========  ============  ==========================  =================  ==========================
forward    all_to_all    experts                     2*R                2*R*E*C*F
forward    psum          tokens                      R                  R*2*E*B/M
backward   all_to_all    experts                     2*R                2*R*E*C*F
backward   psum          feats                       3*R+1              R*(m+E*C)*F+R*m*E+n*F
backward   psum          tokens                      1                  1
backward   psum          data,tokens                 1                  L/g*own/s
backward   psum          data,experts,tokens         1                  L/g*(layer-own)/s
=========  ============  ==========================  =================  ==========================

Sources: those of `data.py`, `expert.py`, `pipeline.py`, `attention.py` and `tensor.py`; DeepSeek-AI,
"DeepSeek-V3 technical report", section 2.1.2 (balancing loss of each sequence).

`dimensions` names the dimensions of each parameter, and `SPLIT` the axis along which each name is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, axis_size, pbroadcast, pmean, psum
from minidiff.nn import softmax
from minidiff.precision import Policy, cast_for
from spmd.mesh.specs import P
from spmd.parallel.attention import ring_attention, zigzag, zigzag_positions
from spmd.parallel.data import gathering_again
from spmd.parallel.expert import expert_capacity, load_balancing_loss, mixture_of_experts
from spmd.parallel.pipeline import pipeline
from spmd.parallel.tensor import check_divided, pad_vocabulary
from spmd.parallel.transformer import (
    Config,
    causal,
    causal_attention,
    embed,
    label_cross_entropy,
    mlp,
    normalize,
    sizes,
)
from spmd.parallel.transformer import dimensions as dimensions_of_transformer

AXES = ("data", "shards", "experts", "stages", "tokens", "feats")
EXAMPLES = AXES[:4]  # along which examples are split

#: The axis along which each dimension of a parameter is split.
SPLIT = {"layers": "stages", "features": "shards", "experts": "experts"}
SPLIT |= dict.fromkeys(("vocabulary", "heads", "kv_heads", "hidden"), "feats")


@dataclass(frozen=True)
class DecoderConfig(Config):
    """Sizes of a transformer; the number of experts, and of those `chosen` for a token; their balancing coefficient.

    With a `capacity_factor`, experts have that many times the places that balanced choices fill (`expert_capacity`):
    less is sent, and tokens may be dropped. `generate` drops none.

    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=2, hidden=6, experts=4)
    >>> init_decoder(md.random.key(0), config)["layers"]["mlp"]["experts"]["up"].shape
    (2, 4, 4, 6)
    """

    experts: int = 0
    chosen: int = 2
    balance: float = 0.01
    capacity_factor: float | None = None


def dimensions(config: DecoderConfig) -> dict:
    """Return the tree of parameters, with the names of their dimensions as leaves. Layers are stacked."""
    whole = dimensions_of_transformer(config)
    layer = whole["layers"][0]
    if config.experts:
        experts = md.tree.map(lambda names: f"experts {names}", layer["mlp"])
        layer = {**layer, "mlp": {"router": "features choices", "experts": experts}}
    return {**whole, "layers": md.tree.map(lambda names: f"layers {names}", layer)}


def all_sizes(config: DecoderConfig) -> dict[str, int]:
    """Return the size of each dimension that `dimensions` names."""
    return {**sizes(config), "choices": config.experts}


def decoder_mesh(backend: str | None = None, **sizes: int) -> spmd.Mesh:
    """Make a mesh with all axes of a decoder.

    Args:
        backend: "mpi", "simulated", or None, as for `spmd.make_mesh`.
        sizes: the sizes of axes; those that are not given have size 1.

    Raises:
        ValueError: for an unknown axis.

    >>> decoder_mesh(data=2, feats=2, backend='simulated')
    Mesh(data: 2, shards: 1, experts: 1, stages: 1, tokens: 1, feats: 2; 4 ranks, simulated)
    """
    if unknown := sorted(set(sizes) - set(AXES)):
        raise ValueError(f"there is no axis {unknown[0]!r}: a decoder is split along {', '.join(AXES)}")
    return spmd.make_mesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, backend=backend)


def decoder_specs(config: DecoderConfig) -> dict:
    """Return the tree of parameters, with partition specs as leaves.

    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=2, hidden=6)
    >>> decoder_specs(config)["layers"]["mlp"]["up"]  # [layers, features, hidden]
    P('stages', 'shards', 'feats')
    """
    return md.tree.map(lambda names: P(*map(SPLIT.get, names.split())), dimensions(config))


def init_decoder(key: Any, config: DecoderConfig) -> dict:
    """Return whole random weights, of standard deviation 1 / sqrt(features), and scales of 1.

    On a mesh, use `spmd.initialize`, so that each rank computes only its shards.

    Args:
        key: a key of `minidiff.random`.
        config: the sizes of the decoder.

    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=2, hidden=6)
    >>> init_decoder(md.random.key(0), config)['layers']['mlp']['up'].shape
    (2, 4, 6)
    """
    sizes = all_sizes(config)
    names, structure = md.tree.flatten(dimensions(config))

    def initial(names: str, key: Any) -> Any:
        shape = [sizes[name] for name in names.split()]
        weights = set(names.split()) - {"layers", "features"}
        return md.random.normal(key, shape) / np.sqrt(config.features) if weights else np.ones(shape)

    return md.tree.unflatten(structure, map(initial, names, md.random.split(key, len(names))))


def check_decoder(mesh: spmd.Mesh, config: DecoderConfig) -> None:
    """Raise ValueError for a mesh without the axes, or an axis that does not divide what is split along it."""
    if missing := [axis for axis in AXES if axis not in mesh.axis_names]:
        raise ValueError(f"decoder: {mesh} has no axis {missing[0]!r}: it needs all of {AXES}, of size 1 if unused")
    if config.dropout or not config.causal:
        raise ValueError(f"decoder: it is causal and has no dropout; leave dropout and causal of {config} unchanged")
    check_divided("decoder", mesh, all_sizes(config), {k: axis for k, axis in SPLIT.items() if k != "vocabulary"})


def check_batch(mesh: spmd.Mesh, examples: int, tokens: int, microbatches: int) -> None:
    """Raise ValueError for a batch [examples, tokens] that cannot be split over the mesh."""
    ranks, axes = math.prod(mesh.shape[axis] for axis in EXAMPLES), ", ".join(EXAMPLES)
    if examples % (ranks * microbatches):
        raise ValueError(
            f"decoder: {examples} examples are not a multiple of {ranks * microbatches}, the {ranks} ranks along "
            f"{axes} times {microbatches} microbatches: choose a multiple"
        )
    if tokens % (2 * mesh.shape["tokens"]):
        raise ValueError(
            f"decoder: {tokens} tokens are not a multiple of {2 * mesh.shape['tokens']}, two blocks for each rank "
            "along 'tokens': choose a multiple"
        )


# ---------------------------------------------------------------- a layer, on one rank


def gather_features(params: Any, names: Any, axis: str = "shards") -> Any:
    """Gather the features of parameters: an `all_gather` along the shards for each leaf that has features."""

    def gather(names: str, leaf: Any) -> Any:
        dimensions = names.split()
        return all_gather(leaf, axis, axis=dimensions.index("features"), tiled=True) if "features" in names else leaf

    return md.tree.map(gather, names, params)


def perceptron(config: DecoderConfig, params: dict, x: Any) -> tuple[Any, Any]:
    """Return a rank's term of the half layer's result, [batch, tokens, features], and the balancing loss, [batch]."""
    if not config.experts:
        return mlp(params, x), None
    tokens, k, factor = x.reshape(-1, config.features), config.chosen, config.capacity_factor
    capacity = (
        len(tokens) if factor is None else min(len(tokens), expert_capacity(len(tokens), config.experts, factor, k))
    )
    mixed = mixture_of_experts(mlp, params["experts"], params["router"], tokens, capacity, "experts", k)
    probabilities = softmax(cast_for("router", x) @ cast_for("router", params["router"]))
    balance = md.vmap(partial(load_balancing_loss, axis="tokens"))(probabilities)
    return mixed.reshape(x.shape), config.balance * balance


def layer(config: DecoderConfig, params: dict, carried: tuple, positions: Any, attend: Callable) -> tuple:
    """Apply attention and perceptron to (x, balancing loss so far), and return both."""
    x, balance = carried
    attended = causal_attention(params["attention"], normalize(config, params["attention_norm"], x), positions, attend)
    x = x + psum(attended, "feats")
    result, loss = perceptron(config, params["mlp"], normalize(config, params["mlp_norm"], x))
    return x + psum(result, "feats"), None if loss is None else balance + loss


def logits(config: DecoderConfig, params: dict, x: Any) -> Any:
    """Return the logits of a rank's shard of the vocabulary: [..., features] -> [..., vocabulary / ranks]."""
    return normalize(config, params["norm"], x) @ (params["embedding"].T if config.tied else params["head"])


def attention_along_tokens(tokens: int) -> tuple[Any, Callable]:
    """Return the positions of a rank's tokens, and the function by which they attend to the tokens of all ranks."""
    if axis_size("tokens") == 1:
        return np.arange(tokens), causal
    ring = partial(ring_attention, axis="tokens", causal=True)
    return zigzag_positions(tokens, "tokens"), md.vmap(ring)


# ---------------------------------------------------------------- the loss


def unsplit(spec: P) -> tuple[str, ...]:
    """Return the axes along which activations are split, and a parameter with that spec is not."""
    return tuple(axis for axis in (*EXAMPLES, "tokens") if axis not in spec)


def decoder_loss(
    mesh: spmd.Mesh, config: DecoderConfig, microbatches: int = 1, policy: Policy | None = None, **options: Any
) -> Callable:
    """Return the mean cross entropy of next tokens, as a function of (params, (tokens, labels)).

    Params are those of `init_decoder`, tokens and labels [examples, tokens], all of them whole. A vocabulary that the
    ranks along "feats" do not divide is padded at each call; `pad_vocabulary` does so once.

    Args:
        mesh: a mesh with the axes of `decoder_mesh`.
        config: the sizes of the decoder.
        microbatches: the number of microbatches of each stage.
        policy: a `minidiff.precision.Policy`. Layers then compute in its dtype, routers and the residual stream in
            theirs.
        options: options of `shard_map`.

    Raises:
        ValueError: if an axis of the mesh is missing, or does not divide the dimensions that it splits.

    >>> from spmd.parallel.decoder import decoder_mesh, init_decoder
    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=2, hidden=6)
    >>> params, text = init_decoder(md.random.key(0), config), np.arange(20).reshape(4, 5) % 8
    >>> def loss(**sizes):
    ...     mesh = decoder_mesh(**sizes, backend='simulated')
    ...     return float(decoder_loss(mesh, config)(params, (text[:, :-1], text[:, 1:])))
    >>> bool(np.isclose(loss(), loss(data=2, stages=2, feats=2)))
    True
    """
    check_decoder(mesh, config)

    def on_each_rank(params, batch):
        tokens, labels = batch
        # Once, so that a parameter's gradients are summed once, not for each layer and microbatch.
        params = md.tree.map(lambda leaf, spec: pbroadcast(leaf, unsplit(spec)), params, specs)
        params = params if policy is None else policy.cast_to_compute(params)
        ends = {name: gather_features(leaf, names[name]) for name, leaf in params.items() if name != "layers"}
        positions, attend = attention_along_tokens(tokens.shape[1])

        @gathering_again
        def apply(params, carried):
            return layer(config, gather_features(params, of_one_layer), carried, positions, attend)

        x = cast_for("residual", embed(ends["embedding"], tokens, "feats", config.vocabulary))
        carried = x, cast_for("router", np.zeros_like(x[:, 0, 0])) if config.experts else None
        carried = md.tree.map(lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), carried)
        x, balance = md.tree.map(np.concatenate, pipeline(apply, params["layers"], carried, "stages"))
        error = np.mean(label_cross_entropy(logits(config, ends, x), labels, "feats", config.vocabulary))
        return pmean(error if balance is None else error + np.mean(balance), (*EXAMPLES, "tokens"))

    names = dimensions(config)
    of_one_layer = md.tree.map(lambda names: names.removeprefix("layers "), names["layers"])
    specs = decoder_specs(config)
    in_specs = specs, P(EXAMPLES, "tokens")
    body = on_each_rank if policy is None else policy.in_force()(on_each_rank)
    mapped = spmd.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P(), **options)

    def loss(params, batch):
        examples, tokens = np.shape(batch[0])
        check_batch(mesh, examples, tokens, microbatches)
        params = pad_vocabulary(params, mesh.shape["feats"])
        return mapped(params, tuple(x[:, zigzag(tokens, mesh.shape["tokens"])] for x in batch))

    return loss
