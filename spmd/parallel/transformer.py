"""A decoder-only transformer, as plain functions on a tree of parameters.

A block has two half layers, attention and a multilayer perceptron. Each reads the residual stream x through a norm and
adds its result to it. The functions take `gather` and `combine`, which open and close a half layer; on one device they
do nothing. If each rank computes a term of a half layer's result, `combine` is the sum over ranks; such a parallelism
also passes its own `embed` and `error`. `dimensions` names the dimensions of each parameter: initialization gives each
name a size, and a parallelism says which names it splits. There are no biases.

Source: Vaswani et al., "Attention is all you need"; Zhang and Sennrich, "Root mean square layer normalization";
Shazeer, "GLU variants improve transformer"; Ainslie et al., "GQA: Training generalized multi-query transformer models
from multi-head checkpoints"; Srivastava et al., "Dropout: A simple way to prevent neural networks from overfitting"; Su
et al., "RoFormer: Enhanced transformer with rotary position embedding".

**The two ends of a language model** are the look-up of tokens, and the cross entropy of integer labels. With `axis`,
the vocabulary is split along that axis of the mesh: rank r has rows r*V/p to (r+1)*V/p of the embedding, and the logits
of these tokens. A rank looks up its own tokens, and gets zeros for the others. Neither rows nor logits are gathered.
With p ranks, N tokens, F features and a vocabulary of V, forward:

===================  ==========  =====  ==============  ==================================
function             collective  count  elements        instead of a gather of
===================  ==========  =====  ==============  ==================================
embed                psum        1      N*F             V/p*F (the table)
label_cross_entropy  pmax, psum  1, 2   N each          N*V/p (the logits)
===================  ==========  =====  ==============  ==================================

The backward pass communicates nothing: the transpose of a `psum` is a `pbroadcast`, and the maximum is a constant.

Where the ranks do not divide the vocabulary, `pad_vocabulary` adds rows of zeros. `vocabulary=` leaves them out: they
are no tokens, and their logits count as -inf.

A token or label out of range raises IndexError if all ranks know its value. On tapes, and where ranks along another
axis have different numbers, its row and its cross entropy are NaN.

Source: Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism",
section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import axis_index, axis_size, psum
from minidiff.errors import TracerError, VarianceError
from minidiff.nn import dot_product_attention, dropout, gelu, layer_norm, rms_norm, silu
from minidiff.precision import cast_for
from spmd.parallel.network import shifted_logits


def embed(table: Any, tokens: Any, axis: str | None = None, vocabulary: int | None = None) -> Any:
    """Return the tokens' rows of the table: [vocabulary / ranks, features], [...] -> [..., features].

    Args:
        table: the embedding of the tokens, of which a rank has rows.
        tokens: integers, the same on all ranks along `axis`.
        axis: the axis of the mesh along which the vocabulary is split, if it is.
        vocabulary: the number of tokens, if the vocabulary is padded.

    Raises:
        IndexError: for a token that is not in the vocabulary.
        TypeError: if tokens are not integers.

    >>> embed(np.arange(6.0).reshape(3, 2), np.array([2, 0]))
    array([[4., 5.],
           [0., 1.]])
    """
    vocabulary = _vocabulary(len(table), axis) if vocabulary is None else vocabulary
    _check("token", tokens, vocabulary)
    row, here, elsewhere = _local(tokens, len(table), table.dtype, axis, vocabulary)
    rows = np.where(here[..., None], table[row], elsewhere[..., None])
    return rows if axis is None else psum(rows, axis)


def label_cross_entropy(logits: Any, labels: Any, axis: str | None = None, vocabulary: int | None = None) -> Any:
    """Return -log of the label's probability: [..., vocabulary / ranks], [...] -> [...].

    Args:
        logits: those of a rank's part of the vocabulary.
        labels: integers, the same on all ranks along `axis`.
        axis: the axis of the mesh along which the vocabulary is split, if it is.
        vocabulary: the number of tokens, if the vocabulary is padded.

    Raises:
        IndexError: for a label that is not in the vocabulary.
        TypeError: if labels are not integers.
        ValueError: if there is not one for each row of logits.

    >>> label_cross_entropy(np.zeros((2, 4)), np.array([3, 1])) / np.log(2)
    array([2., 2.])
    """
    (*shape, columns) = logits.shape
    padded = _vocabulary(columns, axis)
    vocabulary = padded if vocabulary is None else vocabulary
    _check("label", labels, vocabulary)
    if np.shape(labels) != tuple(shape):
        raise ValueError(f"labels of logits {logits.shape} have the shape {tuple(shape)}, got {np.shape(labels)}")
    logits = md.precision.widen(logits)
    if vocabulary < padded:
        logits = np.where(np.arange(columns) < vocabulary - _first(columns, axis), logits, -np.inf)
    logits, log_total = shifted_logits(logits, axis)
    column, here, elsewhere = _local(labels, columns, logits.dtype, axis, vocabulary)
    chosen = np.where(here, np.take_along_axis(logits, column[..., None], axis=-1)[..., 0], elsewhere)
    return log_total - (chosen if axis is None else psum(chosen, axis))


def _first(rows: int, axis: str | None) -> Any:
    """Return the number of a rank's first row."""
    return 0 if axis is None else axis_index(axis) * rows


def _vocabulary(rows: int, axis: str | None) -> int:
    return rows if axis is None else rows * axis_size(axis)


def _local(numbers: Any, rows: int, dtype: Any, axis: str | None, vocabulary: int) -> tuple[Any, Any, Any]:
    """Return numbers minus this rank's first, whether it has them, and what to add if not: -0.0; NaN if none does."""
    local = numbers if axis is None else numbers - _first(rows, axis)
    here, known = (local >= 0) & (local < min(rows, vocabulary)), (numbers >= 0) & (numbers < vocabulary)
    return np.where(here, local, 0), here, np.where(known, -0.0, np.nan).astype(dtype)


def _check(kind: str, numbers: Any, vocabulary: int) -> None:
    """Raise IndexError for a number out of range, if there is a value to check; TypeError if it is not an integer."""
    if md.typeof(numbers).dtype.kind not in "iu":
        raise TypeError(f"{kind}s are integers from 0 to {vocabulary - 1}, got {md.typeof(numbers)}")
    try:
        extremes = int(np.min(numbers)), int(np.max(numbers))
    except (TracerError, VarianceError):
        return
    for number in extremes:
        if not 0 <= number < vocabulary:
            raise IndexError(f"{kind} {number} is not in the vocabulary of {vocabulary}: from 0 to {vocabulary - 1}")


# ---------------------------------------------------------------- attention


#: The attention of the first tokens.
causal = partial(dot_product_attention, is_causal=True)


def rotary(x: Any, positions: Any, base: float = 10000.0, scale: float = 1.0) -> Any:
    """Rotate pairs of features by angles that grow with the position: [..., tokens, heads, size] -> the same shape.

    The product of a query and a key then depends only on the difference of their positions. These are [tokens], or
    [batch, tokens]. Angles grow more slowly with a larger base, and are divided by the scale: `spmd.examples.positions`
    uses both for texts that are longer than those seen in training.
    """
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * (base ** (-np.arange(half) / half) / scale)
    a, b, cos, sin = x[..., :half], x[..., half:], *(f(angles).astype(x.dtype) for f in (np.cos, np.sin))
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def causal_attention(params: dict, x: Any, positions: Any = None, attend: Callable = causal) -> Any:
    """Let each token attend to itself and those before it: [batch, tokens, features] -> the same shape.

    Tokens that are not the first of a text need `positions` [tokens], and an `attend(query, key, value)` for these.
    """
    positions = np.arange(x.shape[-2]) if positions is None else positions
    query, key, value = (np.einsum("btf,fhs->bths", x, params[name]) for name in ("query", "key", "value"))
    attended = attend(rotary(query, positions), rotary(key, positions), value)
    return np.einsum("bths,hsf->btf", attended, params["out"])


# ---------------------------------------------------------------- the transformer


@dataclass(frozen=True)
class Config:
    """Sizes and options of a transformer.

    Each of the `kv_heads` heads of keys and values (by default `heads`) serves heads / kv_heads heads of queries.
    Options are layer norm in place of RMS norm, SwiGLU or GELU, a head that is the embedding's transpose (`tied`), the
    rate of `dropout` of the half layers' results, and `causal=False`: an encoder, whose tokens attend to all others.
    Raises ValueError for sizes that do not match: rotary positions turn the features of a head in pairs.

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
    """Return the tree of parameters, with the names of its dimensions as leaves.

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
    """Return the size of each dimension that `dimensions` names."""
    return {**vars(config), "kv_heads": config.kv_heads or config.heads, "size": config.features // config.heads}


def init_transformer(rng: Any, config: Config) -> dict:
    """Return random weights of standard deviation 1 / sqrt(features), and scales of 1.

    Args:
        rng: a generator of NumPy's, which draws them.
        config: the sizes of the transformer.

    >>> init_transformer(np.random.default_rng(0), Config(vocabulary=8, features=4, heads=2, layers=1, hidden=6)).keys()
    dict_keys(['embedding', 'head', 'layers', 'norm'])
    """

    def initial(names: str) -> Any:
        shape = [sizes(config)[name] for name in names.split()]
        return rng.normal(size=shape) / np.sqrt(config.features) if len(shape) > 1 else np.ones(shape)

    return md.tree.map(initial, dimensions(config))


def normalize(config: Config, scale: Any, x: Any) -> Any:
    """Apply RMS norm over the features, which are centered for layer norm: [..., features] -> the same shape."""
    norm = layer_norm if config.layer_norm else rms_norm
    return cast_for("compute", norm(x, scale))


def mlp(params: dict, x: Any) -> Any:
    """Apply SwiGLU if there is a gate, else GELU: [..., features] -> the same shape."""
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
    """Add attention, then the perceptron, to the residual stream: [batch, tokens, features] -> the same shape.

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
    """Return the logits of each next token: [batch, tokens] -> [batch, tokens, vocabulary].

    Args:
        config: the sizes of the transformer.
        params: those of `init_transformer`.
        tokens: integers, [batch, tokens].
        embed: `embed(table, tokens)` looks up rows.
        key: a key of `minidiff.random` for dropout. Without one nothing is dropped, as in evaluation.
        ends: `gather`, `combine` and `dropout`, which open and close half layers, as in `tensor_parallel_options`.

    Raises:
        IndexError: for tokens that are not in the vocabulary.

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
    """Return the mean of `error(logits, labels)` over all tokens: [batch, tokens], [batch, tokens] -> [].

    With zero weights, all tokens are equally probable, as in the example.

    Args:
        config: the sizes of the transformer.
        params: those of `init_transformer`.
        tokens: integers, [batch, tokens].
        labels: integers, [batch, tokens]; the label of a token is the next one.
        error: `error(logits, labels)` is the error of each token.
        options: options of `transformer`.

    Raises:
        IndexError: for tokens and labels that are not in the vocabulary.

    >>> config, text = Config(vocabulary=8, features=4, heads=2, layers=0, hidden=6), np.array([[0, 1, 2, 3]])
    >>> params = md.tree.map(np.zeros_like, init_transformer(np.random.default_rng(0), config))
    >>> round(float(next_token_loss(config, params, text[:, :-1], text[:, 1:]) / np.log(2)), 6)
    3.0
    """
    return np.mean(error(transformer(config, params, tokens, **options), labels))
