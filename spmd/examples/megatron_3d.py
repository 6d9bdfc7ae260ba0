"""Megatron's parallelisms at once, as a training step: tensor, pipeline, context and data parallelism of a decoder.

The step that `scoreboard` and `plan` price at scale, and that ranks can run.

A mesh has the axes data, stages and feats. Heads, hidden features and the vocabulary are split along feats, layers
along stages, in the order of a schedule, and examples along data. With `sequence` the tokens are split along feats
between half layers, as in `tensor.py`; with `overlap` as well, they go around a ring while products are computed
(`ring_products.py`). If the mesh has an axis context, the tokens of each example are split along it, in zigzag order,
and their queries attend to gathered keys (`flash_attention.py`). With `sharded`, the features of parameters are split
along data, as in FSDP: a layer gathers its parameters before use, in both passes. If the mesh has an axis pod, examples
are split along it, too, and parameters are not: gradients are summed along both, and with `sharded` those of a shard
along pod alone (HSDP).

Weights and activations are float16. Gradients are added up over microbatches in float32, and summed over ranks in
float16; Adam updates float32 masters. So a rank holds 18 bytes for each of its parameters: 2 of weights, 4 of
gradients, and 12 of masters and of the two moments.

A layer keeps for its backward pass what Megatron keeps. Norms and GELU keep their argument alone, and recompute the
rest. For s*b tokens of h features, a heads and t ranks along feats, a layer of GPT keeps, in bytes:

====================  =================================  ========================================
recompute             tensor parallel                    with `sequence`
====================  =================================  ========================================
None                  s*b*h*(10 + 24/t + 5*a*s/(h*t))    s*b*h*(34/t + 5*a*s/(h*t))
"selective"           s*b*h*(10 + 24/t)                  s*b*h*34/t
"full"                s*b*h*2                            s*b*h*2/t
====================  =================================  ========================================

"selective" recomputes the core of attention: scores, softmax, dropout and their product with the values; "full" whole
layers. As Megatron's, it computes all of a layer again, also its last product, which no derivative needs. With `flash`,
attention is computed by tiles, and its backward pass computes scores again.

Sources: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM";
Korthikanti et al., "Reducing activation recomputation in large transformer models", sections 4 and 5; Micikevicius et
al., "Mixed precision training".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, axis_size, pbroadcast, pmean, psum
from minidiff.nn import dropout, gelu, relu, silu, softmax
from spmd.examples.flash_attention import flash_attention
from spmd.examples.ring_products import gather_product, scatter_product
from spmd.mesh.specs import P
from spmd.parallel.attention import zigzag, zigzag_positions
from spmd.parallel.data import gathering_again
from spmd.parallel.decoder import gather_features
from spmd.parallel.tensor import check_divided, tensor_parallel_options
from spmd.parallel.transformer import Config, label_cross_entropy, normalize, rotary, sizes
from spmd.pipeline.run import scheduled
from spmd.pipeline.tables import Schedule

AXES = ("data", "stages", "feats")
WITH_CONTEXT = ("data", "stages", "context", "feats")
ALL_AXES = ("pod", *WITH_CONTEXT)
RECOMPUTE = (None, "selective", "full")
SPLIT = dict.fromkeys(("vocabulary", "kv_heads", "hidden"), "feats")
ACTIVATIONS = {"gelu": gelu, "squared relu": lambda x: relu(x) ** 2}
OPENS = {4: "btf,fgrs->btgrs", 3: "btf,fnh->btnh"}  # a half layer of attention, of a perceptron
TILES = 8  # of attention by tiles


@dataclass(frozen=True)
class MegatronConfig(Config):
    """Sizes of a decoder. With learned `positions`, a number of tokens, it has biases, as GPT; else rotary positions.

    Without SwiGLU, its perceptrons have GELU or the `activation` of another name in `ACTIVATIONS`.

    >>> config = MegatronConfig(vocabulary=8, features=8, heads=2, layers=2, hidden=32, positions=4, tied=True)
    >>> parameters(config)
    2392
    """

    positions: int = 0
    activation: str = "gelu"


class Options(NamedTuple):
    """The recomputation of a rank, its attention, and what is split along feats and data."""

    recompute: str | None = "selective"
    sequence: bool = False  # tokens along feats, between half layers
    flash: bool = False  # attention by tiles
    sharded: bool = False  # the features of parameters along data
    overlap: bool = False  # the collectives of `sequence` around a ring, while products are computed


def batch_axes(mesh: spmd.Mesh) -> tuple[str, ...]:
    """Return the axes along which tokens are split: those of examples, and of the tokens of an example."""
    return tuple(axis for axis in ("pod", "data", "context") if axis in mesh.axis_names)


def text_spec(mesh: spmd.Mesh) -> P:
    """Return the spec of tokens and labels, [examples, tokens].

    >>> text_spec(spmd.make_mesh((2, 2, 1, 2, 1), ALL_AXES, backend='simulated'))
    P(('pod', 'data'), 'context')
    """
    *examples, last = batch_axes(mesh)
    return P((*examples,), last) if last == "context" else P((*examples, last))


def dimensions(config: MegatronConfig) -> dict:
    """The tree of parameters, with the names of their dimensions as leaves.

    Query, key and value of a group of heads are one weight, as are a perceptron's gate and its other half.
    """
    gpt = config.positions > 0
    scale = ["features"] * (2 if gpt and config.layer_norm else 1)
    layer = {
        "attention_norm": scale,
        "qkv": ["features kv_heads group size", *["kv_heads group size"] * gpt],
        "out": ["kv_heads served size features", *["features"] * gpt],
        "mlp_norm": scale,
        "up": ["features halves hidden", *["halves hidden"] * gpt],
        "down": ["hidden features", *["features"] * gpt],
    }
    ends = {"embedding": "vocabulary features", **({"positions": "positions features"} if gpt else {})}
    return {**ends, "layers": layer, "norm": scale, **({} if config.tied else {"head": "vocabulary features"})}


def all_sizes(config: MegatronConfig) -> dict[str, int]:
    """The size of each dimension that `dimensions` names."""
    known = sizes(config)
    served = config.heads // known["kv_heads"]
    return {**known, "served": served, "group": served + 2, "halves": 1 + config.swiglu}


def parameters(config: MegatronConfig) -> int:
    """Return the number of parameters of the decoder."""
    names, size = dimensions(config), all_sizes(config)
    count = lambda names: math.prod(size[name] for name in names.split())  # noqa: E731
    layers = sum(map(count, md.tree.leaves(names.pop("layers"))))
    return config.layers * layers + sum(map(count, md.tree.leaves(names)))


def layers_of_block(config: MegatronConfig, blocks: int) -> int:
    """Return the number of layers of a block, with those that are skipped."""
    return -(-config.layers // blocks)


def megatron_specs(config: MegatronConfig, sharded: bool = False) -> dict:
    """The tree of parameters, with partition specs as leaves; layers are [chunks, layers of all stages, …].

    If `sharded`, features are split along data.
    """
    names, axes = dimensions(config), {**SPLIT, "features": "data"} if sharded else SPLIT
    split = lambda names, *leading: P(*leading, *map(axes.get, names.split()))  # noqa: E731
    layers = md.tree.map(lambda names: split(names, None, "stages"), names["layers"])
    return {**md.tree.map(split, {**names, "layers": []}), "layers": layers}


def init_megatron(key: Any, config: MegatronConfig, stages: int = 1, chunks: int = 1) -> dict:
    """Float32 parameters: weights of standard deviation 0.02, scales of 1 and biases of 0.

    Block b of the network is in chunk b // stages, for stage b % stages. If the layers do not make equal blocks, the
    last block ends with layers that are skipped.

    >>> config = MegatronConfig(vocabulary=8, features=4, heads=2, layers=6, hidden=6)
    >>> init_megatron(md.random.key(0), config, stages=2, chunks=3)["layers"]["up"][0].shape  # with SwiGLU's halves
    (3, 2, 4, 2, 6)
    """
    size, names = all_sizes(config), dimensions(config)
    layers = md.tree.map(lambda names: f"chunks each {names}", names["layers"])
    size = {**size, "chunks": chunks, "each": stages * layers_of_block(config, stages * chunks)}
    leaves, structure = md.tree.flatten({**names, "layers": layers})
    ones = {id(leaf) for tree in (names["norm"], layers["attention_norm"], layers["mlp_norm"]) for leaf in tree[:1]}

    def initial(names: str, key: Any) -> Any:
        shape = [size[name] for name in names.split()]
        if id(names) in ones:
            return np.ones(shape, "float32")
        weight = len([name for name in names.split() if name not in ("chunks", "each", "group", "halves", "size")]) > 1
        return md.random.normal(key, shape, "float32") * 0.02 if weight else np.zeros(shape, "float32")

    return md.tree.unflatten(structure, map(initial, leaves, md.random.split(key, len(leaves))))


# ---------------------------------------------------------------- a layer


def norm(config: MegatronConfig, params: Any, x: Any) -> Any:
    """Layer norm or RMS norm: [..., features] -> same. It keeps x for its backward pass."""
    return md.checkpoint(lambda params, x: sum(params[1:], normalize(config, params[0], x)))(params, x)


def with_bias(x: Any, params: Any) -> Any:
    """Add a bias, if there is one."""
    return x + params[1] if params[1:] else x


def attention_core(config: MegatronConfig, qkv: Any, key: Any, positions: Any, flash: str | bool = False) -> Any:
    """Causal attention: [batch, tokens, kv_heads, group, size] -> [batch, tokens, kv_heads, served, size].

    `flash` is whether it is computed by tiles, or the axis along which tokens are split.
    """
    size = qkv.shape[-1]
    query, k, v = qkv[:, :, :, :-2], qkv[:, :, :, -2], qkv[:, :, :, -1]
    if not config.positions:
        turned = [rotary(x.reshape(*x.shape[:2], -1, size), positions) for x in (query, k)]
        query, k = turned[0].reshape(query.shape), turned[1]
    if flash:
        return flash_attention(query, k, v, TILES, None if flash is True else flash)
    scores = np.einsum("btgrd,bsgd->bgrts", query * (1 / math.sqrt(size)), k)
    zero, minus_infinity = np.array([0.0, -np.inf], scores.dtype)
    weights = softmax(scores + np.where(positions[:, None] >= positions, zero, minus_infinity))
    weights = weights if key is None else dropout(key, weights, config.dropout)
    return np.einsum("bgrts,bsgd->btgrd", weights, v)


def activation(config: MegatronConfig, up: Any, params: Any) -> Any:
    """SwiGLU, GELU or another: [..., halves, hidden] -> [..., hidden]. It keeps `up` for its backward pass."""

    def activate(up, bias):
        up = up if bias is None else up + bias
        return silu(up[..., 0, :]) * up[..., 1, :] if config.swiglu else ACTIVATIONS[config.activation](up[..., 0, :])

    return md.checkpoint(activate)(up, params[1] if params[1:] else None)


def layer(config: MegatronConfig, ends: dict, params: dict, x: Any, key: Any, positions: Any) -> Any:
    """A layer of one rank: [batch, tokens, features] -> same, where `ends` open and close half layers.

    The mask is not kept: it takes an argument of what recomputes it, the positions of all tokens.
    """
    opened, core, closed = ends["open"], ends["core"], ends["close"]
    keys = [None if key is None else md.random.fold_in(key, i) for i in range(3)]

    def close(y, params, key):
        y = with_bias(ends["summed"](closed(y, params[0])), params)
        return y if key is None else ends["dropout"](key, y, config.dropout)

    y = opened(norm(config, params["attention_norm"], x), params["qkv"][0])
    y = core(config, with_bias(y, params["qkv"]), keys[0], positions)
    x = x + close(y, params["out"], keys[1])
    y = opened(norm(config, params["mlp_norm"], x), params["up"][0])
    return x + close(activation(config, y, params["up"]), params["down"], keys[2])


@md.custom_vjp
def needed(x: Any) -> Any:
    """`x`, with a derivative that needs it, and is 0 where x is NaN.

    Megatron computes whole layers again, also their last product, which no derivative needs. Here it would be dropped.
    """
    return x


needed.defvjp(lambda x: (x, x), lambda x, ct: (np.where(x == x, ct, np.zeros_like(ct)),))


# ---------------------------------------------------------------- the step


def functions_of_half_layers(options: Options, context: bool) -> dict:
    """Return the functions that open and close half layers, and the one of attention.

    What is gathered is not kept, but gathered again in the backward pass.
    """
    recompute, sequence, flash, _, overlap = options
    core = partial(attention_core, flash="context" if context else flash)
    ends: dict = {"gather": lambda x: x, "dropout": dropout, **tensor_parallel_options("feats", sequence)}
    if overlap:
        halves: list[Callable] = [partial(f, axis="feats") for f in (gather_product, scatter_product)]
    else:
        product = lambda y, w: y @ w if w.ndim == 2 else np.einsum("btgrs,grsf->btf", y, w)  # noqa: E731
        halves = [
            md.checkpoint(lambda x, w: np.einsum(OPENS[w.ndim], ends["gather"](x), w)),
            lambda y, w: ends["combine"](product(y, w)),
        ]
    return {
        **{**ends, "open": halves[0], "close": halves[1]},
        "core": md.checkpoint(core, static_argnums=0) if recompute == "selective" else core,
        "summed": needed if recompute == "full" else lambda y: y,
    }


def network_functions(config: MegatronConfig, schedule: Schedule, options: Options, context: bool) -> tuple:
    """Return the functions that begin the network, apply a block of layers, and end it, as `scheduled` takes them."""
    skipped = config.layers % (schedule.stages * schedule.chunks) > 0
    recompute, sequence, _, sharded, _ = options
    ends, names = functions_of_half_layers(options, context), dimensions(config)
    whole = partial(gather_features, axis="data") if sharded else lambda params, names: params
    remat = md.checkpoint if recompute == "full" else gathering_again if sharded else lambda f: f

    def places(tokens):
        """Return the positions of the tokens of this rank and, with `sequence`, of those next to it along feats."""
        return zigzag_positions(tokens, "context") if context else np.arange(tokens)

    def first(params, tokens, key=None):
        params = whole(params, {name: names[name] for name in params})
        x = ends["embed"](params["embedding"], tokens)
        if "positions" in params:
            learned = params["positions"][: tokens.shape[1] * (axis_size("context") if context else 1)]
            learned = np.take(learned, places(tokens.shape[1]), axis=0) if context else learned
            if sequence:
                learned = np.take(learned, axis_index("feats") * x.shape[1] + np.arange(x.shape[1]), axis=0)
            x = x + learned
        return x if key is None else ends["dropout"](key, x, config.dropout)

    def stage(params, x, key=None):
        each = np.arange(len(md.tree.leaves(params)[0]))
        positions = places(x.shape[1] * (axis_size("feats") if sequence else 1))
        before = axis_index("stages") * len(each)

        def step(x, params, i, positions):
            params = whole(params, names["layers"])
            y = layer(config, ends, params, x, None if key is None else md.random.fold_in(key, i), positions)
            return np.where(before + i < config.layers, y, x) if skipped else y

        step = remat(step)
        return md.scan(lambda x, each: (step(x, *each, positions), None), x, (params, each))[0]

    def last(params, x, labels):
        params = whole(params, {"norm": names["norm"], "head": names.get("head", names["embedding"])})
        x = ends["gather"](norm(config, params["norm"], x))
        return np.mean(label_cross_entropy(x @ params["head"].T, labels, "feats"))

    return first, stage, last


def loss_and_gradients(
    mesh: spmd.Mesh,
    config: MegatronConfig,
    schedule: Schedule,
    recompute: str | None = "selective",
    sequence: bool = False,
    flash: bool = False,
    sharded: bool = False,
    overlap: bool = False,
) -> Callable:
    """Return a function of a rank's blocks in a `shard_map`: (params, tokens, labels, key) -> (loss, gradients).

    Params are those of `init_megatron`, with the specs `megatron_specs(config, sharded)`; tokens and labels [examples,
    tokens] have the spec `text_spec(mesh)`, P("data") by default, so the loss is the mean of the whole batch. On a mesh
    with an axis context, their order is `zigzag`. The key, of `minidiff.random`, is for dropout, or None.

    Args:
        mesh: a mesh with the axes `AXES`, and if need be others of `ALL_AXES`.
        config: the sizes of the decoder.
        schedule: the schedule of the stages.
        recompute: what the backward pass computes again: None, "selective" or "full".
        sequence: whether tokens are split along feats between half layers.
        flash: whether attention is computed by tiles, as it always is along context.
        sharded: whether the features of parameters are split along data, and gathered before use.
        overlap: whether tokens go around a ring while products are computed, with `sequence`.

    Raises:
        ValueError: for an unknown recomputation, for `overlap` without `sequence`, and for a mesh that does not divide
            the decoder.

    >>> from spmd.pipeline import one_f_one_b
    >>> mesh = spmd.make_mesh((2, 2, 2), AXES, backend='simulated')
    >>> config = MegatronConfig(vocabulary=8, features=8, heads=2, layers=4, hidden=8, positions=4, tied=True)
    >>> params, text = init_megatron(md.random.key(0), config), np.arange(40).reshape(8, 5) % 8
    >>> run = loss_and_gradients(mesh, config, one_f_one_b(stages=2, microbatches=2))
    >>> specs = megatron_specs(config)
    >>> run = spmd.shard_map(run, mesh, in_specs=(specs, P('data'), P('data'), P()), out_specs=(P(), specs))
    >>> loss, gradients = run(params, text[:, :-1], text[:, 1:], None)
    >>> round(float(loss), 1), gradients['layers']['qkv'][0].spec
    (2.1, P(None, 'stages', None, 'feats', None, None))
    """
    options, axes = Options(recompute, sequence, flash, sharded, overlap), batch_axes(mesh)
    check(mesh, config, schedule.stages, schedule.chunks, options)
    layers = network_functions(config, schedule, options, "context" in axes)
    specs = megatron_specs(config, sharded)
    copies = math.prod(mesh.shape[axis] for axis in axes)

    def whole(spec: P) -> tuple[str, ...]:
        """Return the axes along which activations are split, and a parameter with this spec is not."""
        return tuple(axis for axis in (*axes, *["feats"] * sequence) if axis not in spec)

    def on_each_rank(params, tokens, labels, key):
        # Once, so that a parameter's gradients are summed once, not for each layer and microbatch.
        params = md.tree.map(lambda leaf, spec: pbroadcast(leaf, whole(spec)), params, specs)
        begin = {name: params[name] for name in ("embedding", "positions") if name in params}
        end = {"norm": params["norm"], "head": params.get("head", params["embedding"])}
        key = key if key is None else md.random.fold_in(key, axis_index(axes))
        batch = (x.reshape(schedule.microbatches, -1, x.shape[1]) for x in (tokens, labels))
        parts = begin, params["layers"], end
        alike = None if sequence else "feats"
        loss, (begin, middle, end) = scheduled(
            schedule, layers, parts, *batch, "stages", recompute=False, key=key, accumulate="float32", alike=alike
        )
        head = end.pop("head")
        begin = {**begin, "embedding": begin["embedding"] + head} if config.tied else {**begin, "head": head}
        gradients = {**begin, **end, "layers": middle}
        gradients = md.tree.map(lambda g, spec: psum(g, whole(spec)) / copies, gradients, specs)
        return pmean(loss, axes), gradients

    return on_each_rank


def megatron_step(
    mesh: spmd.Mesh,
    config: MegatronConfig,
    schedule: Schedule,
    recompute: str | None = "selective",
    sequence: bool = False,
    flash: bool = False,
    sharded: bool = False,
    overlap: bool = False,
    dtype: Any = "float16",
    optimizer: md.optim.GradientTransformation | None = None,
) -> tuple[Callable, Callable]:
    """Make `init(key) -> state` and `step(state, tokens, labels, key) -> (loss, state)`.

    The state holds weights in `dtype`, float32 masters and the optimizer's state (Adam by default). Tokens and labels,
    [examples, tokens], are in order. Other arguments and errors are those of `loss_and_gradients`.

    >>> from spmd.pipeline import one_f_one_b
    >>> mesh = spmd.make_mesh((2, 2, 2), AXES, backend='simulated')
    >>> config = MegatronConfig(vocabulary=8, features=8, heads=2, layers=2, hidden=8, dropout=0.1, positions=4)
    >>> init, step = megatron_step(mesh, config, one_f_one_b(stages=2, microbatches=2), sequence=True)
    >>> state, text = init(md.random.key(0)), np.arange(40).reshape(8, 5) % 8
    >>> loss, state = step(state, text[:, :-1], text[:, 1:], md.random.key(1))
    >>> state['weights']['embedding'].dtype, state['masters']['embedding'].dtype
    (dtype('float16'), dtype('float32'))
    """
    optimizer = md.optim.adam(1e-4) if optimizer is None else optimizer
    value_and_gradients = loss_and_gradients(mesh, config, schedule, recompute, sequence, flash, sharded, overlap)

    def init(key: Any) -> dict:
        masters = init_megatron(key, config, schedule.stages, schedule.chunks)
        return {"weights": _cast(masters, dtype), "masters": masters, "optimizer": optimizer.init(masters)}

    def on_each_rank(state: dict, tokens: Any, labels: Any, key: Any) -> tuple:
        loss, gradients = value_and_gradients(state["weights"], tokens, labels, key)
        updates, moments = optimizer.update(_cast(gradients, "float32"), state["optimizer"], state["masters"])
        masters = md.optim.apply_updates(state["masters"], updates)
        return loss, {"weights": _cast(masters, dtype), "masters": masters, "optimizer": moments}

    specs = state_specs(config, md.eval_shape(init, md.random.key(0)), sharded)
    text = text_spec(mesh)
    mapped = spmd.shard_map(on_each_rank, mesh=mesh, in_specs=(specs, text, text, P()), out_specs=(P(), specs))
    if len(text) == 1:
        return init, mapped

    def step(state: dict, tokens: Any, labels: Any, key: Any) -> tuple:
        order = zigzag(np.shape(tokens)[1], mesh.shape["context"])
        return mapped(state, tokens[:, order], labels[:, order], key)

    return init, step


def state_specs(config: MegatronConfig, state: Any, sharded: bool = False) -> Any:
    """The tree of specs of a training state: those of the parameters for each tree like these, P() for the rest."""
    specs = megatron_specs(config, sharded)
    like = md.tree.structure(specs)
    of_params = lambda tree: md.tree.structure(tree) == like  # noqa: E731
    return md.tree.map(lambda tree: specs if of_params(tree) else P(), state, is_leaf=of_params)


def check(mesh: spmd.Mesh, config: MegatronConfig, stages: int, chunks: int, options: Options) -> None:
    """Raise ValueError for a mesh, stages and chunks, or options that do not fit."""
    names = tuple(mesh.axis_names)
    if names != tuple(axis for axis in ALL_AXES if axis in {*AXES, *names}):
        raise ValueError(f"megatron: the mesh's axes are {AXES}, of {ALL_AXES}, got {names}: write them in this order")
    if options.recompute not in RECOMPUTE:
        raise ValueError(f"megatron: recompute={options.recompute!r}; write {', '.join(map(repr, RECOMPUTE))}")
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"megatron: activation={config.activation!r}; write {', '.join(map(repr, ACTIVATIONS))}")
    if options.overlap and not options.sequence:
        raise ValueError("megatron: overlap=True, and sequence=False: the ring is of tokens; write sequence=True")
    if config.dropout and (options.flash or "context" in mesh.axis_names):
        raise ValueError(f"megatron: attention by tiles has no dropout; got dropout={config.dropout}: write dropout=0")
    check_divided("megatron", mesh, all_sizes(config), {**SPLIT, **({"features": "data"} if options.sharded else {})})
    blocks = stages * chunks
    skipped = layers_of_block(config, blocks) * blocks - config.layers
    if (skipped and chunks > 1) or skipped >= blocks:
        raise ValueError(
            f"megatron: {config.layers} layers cannot be split into {blocks} equal blocks, {stages} stages times "
            f"{chunks} chunks: choose a multiple, or one chunk and at least a layer for each stage"
        )


def _cast(values: Any, dtype: Any) -> Any:
    return md.tree.map(lambda x: x.astype(dtype), values)
