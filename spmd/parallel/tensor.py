"""Tensor parallelism: features and weights are split over the ranks.

All ranks see all examples. There are three kinds of layer, for bodies of `shard_map`. With p ranks along the axis:

======================= ============== ================== ============== ================ =====================
layer                   x              W, b               result         forward          backward
======================= ============== ================== ============== ================ =====================
column_parallel         [n, k]         [k, m/p], [m/p]    [n, m/p]       nothing          psum of x's cotangent
row_parallel            [n, k/p]       [k/p, m], [m]      [n, m]         psum             nothing
row_parallel, scattered [n, k/p]       [k/p, m], [m/p]    [n, m/p]       psum_scatter     all_gather
======================= ============== ================== ============== ================ =====================

The first two form a pair: a column-parallel layer, an activation, a row-parallel layer, with one all-reduce in each
direction. The third may follow itself: its operand and its result are split along the same axis.

Source: shard_map tutorial, "8-way tensor parallelism (TP)"; Shoeybi et al., "Megatron-LM: Training multi-billion
parameter language models using model parallelism".

**FSDP and tensor parallelism** on a mesh of two axes (`fully_sharded_tensor_parallel`): examples and parameters are
split along the batch axis, features along the other. Each rank has a shard of the weights' rows for its features. It
gathers these rows along the batch axis, multiplies, and sums and scatters the products along the feature axis.

Source: shard_map tutorial, "FSDP + TP, with shard_map at the top level".

**Megatron's tensor parallelism** takes one all-reduce in each direction for each half layer of a transformer. Weights
are split over the ranks, but activations are not. In a perceptron, the first product is column parallel, and
the second is row parallel. Each rank has some heads of attention, and some tokens of the vocabulary. The functions of
`transformer.py` compute with split weights as with whole ones. A rank's result is one term of the whole result, and a
`psum` closes each half layer. With L layers, N tokens in all and F features, the gradient of the loss communicates:

=========  ==========  =======  ===================  ================================================
direction  collective  count    numbers per rank     of
=========  ==========  =======  ===================  ================================================
forward    psum        2*L+3    (2*L+1)*N*F+2*N      half layers, embedding; two of the cross entropy
forward    pmax        1        N                    the cross entropy
backward   psum        2*L+1    (2*L+1)*N*F          half layers, head
=========  ==========  =======  ===================  ================================================

Gradients of parameters need no sum: gradients of split weights are split in the same way, and the scales of the norms
multiply the same values on all ranks.

**f and g.** Megatron marks the two ends of a half layer with a conjugate pair of functions: f is the identity forward
and an all-reduce backward, and g is the opposite. With types you get both. f is the `pbroadcast` that is inserted where
x, the same on all ranks, is multiplied by split weights: one for query, key and value together. g is `psum`, whose
transpose is a `pbroadcast`. If you write f and g by hand, each as a `custom_vjp`, the pair is right in only one of
three settings. A perceptron g(gelu(f(x) @ A) @ B) on p ranks has the gradients in x, A and B, relative to the right
ones:

========  ======  =======  ============================  =============================
f         g       typed    check_rep=False, grad inside  check_rep=False, grad outside
========  ======  =======  ============================  =============================
inserted  psum    1 1 1    term p p                      1 1 1
custom    custom  p 1 1    1 1 1                         1 1/p 1/p
custom    psum    p 1 1    p p p                         p 1 1
inserted  custom  1 1 1    term 1 1                      1/p 1/p 1/p
========  ======  =======  ============================  =============================

- With types, inside the body or outside: the result of a custom f is still the same on all ranks, so a `pbroadcast` is
  inserted after it. The cotangent of that result is already a sum, and f then sums p equal numbers.
- Without types nothing is inserted, and `psum` is its own transpose. Inside the body that is wrong, since each rank
  begins with the whole cotangent, 1. There f and g are needed ("term": a rank has only its own term of the sum). This
  is Megatron's setting, where each process differentiates its own loss.
- Outside, `shard_map` divides the cotangent of an unmapped result by p, and sums those of unmapped arguments. Then g
  must sum, and f must not.

Source: Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism",
section 3; JEP 17111, "Efficient transposition of replication-inducing collectives".

**Megatron's sequence parallelism** splits tokens, too, between tensor-parallel half layers. Tensor parallelism keeps
the residual stream and the norms whole on every rank. Here each of p ranks has 1/p of the tokens there, and keeps 1/p
of the residuals. An all-gather opens each half layer, and a reduce-scatter closes it. They are each other's transposes,
and each is half of the all-reduce that they replace. With L layers, N tokens in all and F features, the gradient of the
loss communicates:

=========  ====================  =====  ================  ================================================
direction  collective            count  numbers per rank  of
=========  ====================  =====  ================  ================================================
forward    all_gather            2*L+1  (2*L+1)*N*F/p     half layers, head
forward    psum_scatter          2*L    2*L*N*F           half layers
forward    psum                  3      N*F+2*N           embedding; two of the cross entropy
forward    pmax                  1      N                 the cross entropy
backward   all_gather            2*L    2*L*N*F/p         half layers
backward   psum_scatter          2*L+1  (2*L+1)*N*F       half layers, head
backward   all_gather_invariant  1      N*F/p             embedding: the transpose of its local slice
backward   psum                  1      (2*L+1)*F         scales of the norms, applied to different tokens
=========  ====================  =====  ================  ================================================

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", section 4.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, axis_size, pmean, pscatter, psum, psum_scatter
from minidiff.nn import dropout
from spmd.mesh.specs import P
from spmd.parallel.data import gathering, gathering_again
from spmd.parallel.network import axes_of, dense, loss, predict, squared_error
from spmd.parallel.transformer import Config, dimensions, embed, label_cross_entropy, next_token_loss, sizes


def column_parallel(x: Any, W: Any, b: Any) -> Any:
    """Apply a layer whose W is split by columns over ranks: [n, k], [k, m / ranks], [m / ranks] -> [n, m / ranks].

    The forward pass communicates nothing. In the backward pass one `psum` sums the ranks' cotangents of x: it is the
    transpose of the `pbroadcast` that is inserted where x is multiplied by W.

    Args:
        x: the operand, the same on all ranks, [n, k].
        W: this rank's columns of the weights, [k, m / ranks].
        b: its biases, [m / ranks].

    >>> import numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> specs = (P(), P(None, 'i'), P('i'))
    >>> layer = spmd.shard_map(column_parallel, mesh, in_specs=specs, out_specs=P(None, 'i'))
    >>> args = np.ones((3, 4)), np.ones((4, 6)), np.zeros(6)
    >>> layer(*args).shape, spmd.communication(layer)(*args).counts
    ((3, 6), {})
    """
    return dense(x, W, b)


def row_parallel(x: Any, W: Any, b: Any, axis: str, scattered: bool = False) -> Any:
    """Apply a layer whose W is split by rows over ranks: [n, k / ranks], [k / ranks, m], [m] -> [n, m].

    The forward pass takes one `psum` of [n, m], the backward pass nothing. A scattered result is split along its
    features, [n, m / ranks], and so is b, [m / ranks]: the forward pass then takes one `psum_scatter` of [n, m], the
    backward pass one `all_gather` of [n, m / ranks].

    Args:
        x: the operand, [n, k / ranks].
        W: this rank's rows of the weights, [k / ranks, m].
        b: the biases, [m]; or if the result is scattered this rank's, [m / ranks].
        axis: the axis of the mesh along which features are split.
        scattered: whether each rank gets its part of the result, not all of it.

    Raises:
        ValueError: if the result is scattered, and the ranks do not divide m.

    >>> import numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> args = np.ones((3, 4)), np.ones((4, 6)), np.zeros(6)
    >>> def layer(scattered):
    ...     specs = (P(None, 'i'), P('i'), P('i' if scattered else None))
    ...     out_specs = P(None, 'i' if scattered else None)
    ...     body = partial(row_parallel, axis='i', scattered=scattered)
    ...     return spmd.shard_map(body, mesh, in_specs=specs, out_specs=out_specs)
    >>> [spmd.communication(layer(scattered))(*args).counts for scattered in (False, True)]
    [{'psum': 1}, {'psum_scatter': 1}]
    """
    if scattered:
        return psum_scatter(x @ W, axis, scatter_dimension=1, tiled=True) + b
    return psum(x @ W, axis) + b


def tensor_parallel(mesh: spmd.Mesh, error: Callable = squared_error, **options: Any) -> Callable:
    """Return the loss, as a function of (params, (inputs, targets)).

    Parameters are split by their first dimension, inputs and targets by their second, along the mesh's axis.

    Args:
        mesh: a mesh of one axis.
        error: `error(predictions, targets, axis)` is the error of each example, whose features are split along the
            axis.
        options: options of `shard_map`.

    Raises:
        ValueError: if the ranks do not divide the features of a layer.

    >>> import minidiff as md, minidiff.numpy as np
    >>> from spmd.parallel.network import init_params
    >>> mesh = spmd.make_mesh((4,), ('feats',), backend='simulated')
    >>> params = init_params(np.random.default_rng(0), (8, 4, 4))
    >>> batch = np.ones((16, 8)), np.zeros((16, 4))
    >>> spmd.communication(md.grad(tensor_parallel(mesh)))(params, batch).counts
    {'psum_scatter': 2, 'psum': 1, 'all_gather': 2}
    """
    (axis,) = axes_of(mesh, "tensor_parallel", "feats")
    forward = functools.partial(predict, dense=functools.partial(row_parallel, axis=axis, scattered=True))

    def on_each_rank(params, block):
        return loss(params, block, lambda y, targets: error(y, targets, axis), forward)

    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=(P(axis), P(None, axis)), out_specs=P(), **options)


# ---------------------------------------------------------------- with fully sharded parameters


def fully_sharded_tensor_parallel(
    mesh: spmd.Mesh, error: Callable = squared_error, checkpoint: Callable = gathering_again, **options: Any
) -> Callable:
    """Return the loss, as a function of (params, (inputs, targets)).

    Parameters are split by their first dimension over both axes, `P((features, batch))`; inputs and targets `P(batch,
    features)`.

    Args:
        mesh: a mesh of two axes, for the batch and for features.
        error: `error(predictions, targets, axis)` is the error of each example, whose features are split along the
            axis.
        checkpoint: decides what the backward pass keeps; with `lambda f: f`, everything.
        options: options of `shard_map`.

    Raises:
        ValueError: if the number of ranks does not divide the dimensions that they split.

    >>> import minidiff as md, minidiff.numpy as np
    >>> from spmd.parallel.network import init_params
    >>> mesh = spmd.make_mesh((2, 2), ('batch', 'feats'), backend='simulated')
    >>> params = init_params(np.random.default_rng(0), (8, 4, 4))
    >>> batch = np.ones((16, 8)), np.zeros((16, 4))
    >>> report = spmd.communication(md.grad(fully_sharded_tensor_parallel(mesh)))(params, batch)
    >>> report.counts
    {'all_gather': 7, 'psum_scatter': 6, 'psum': 2}
    """
    batch_axis, features = axes_of(mesh, "fully_sharded_tensor_parallel", "batch", "feats")
    layer = gathering(functools.partial(row_parallel, axis=features, scattered=True), batch_axis)
    forward = checkpoint(functools.partial(predict, dense=layer))

    def on_each_rank(params, block):
        return pmean(loss(params, block, lambda y, targets: error(y, targets, features), forward), batch_axis)

    specs = (P((features, batch_axis)), P(batch_axis, features))
    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=specs, out_specs=P(), **options)


# ---------------------------------------------------------------- a transformer


#: The dimensions of parameters that are split over the ranks.
SPLIT = ("vocabulary", "heads", "kv_heads", "hidden")


def transformer_specs(config: Config, axis: str) -> dict:
    """Return the tree of parameters, with partition specs as leaves: those of tensor parallelism.

    Args:
        config: the sizes of the transformer.
        axis: the axis of the mesh along which heads, hidden features and the vocabulary are split.

    >>> config = Config(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> transformer_specs(config, 'feats')['layers'][0]['mlp']
    {'down': P('feats', None), 'gate': P(None, 'feats'), 'up': P(None, 'feats')}
    """
    return md.tree.map(
        lambda names: P(*[axis if name in SPLIT else None for name in names.split()]), dimensions(config)
    )


def check_divided(function: str, mesh: spmd.Mesh, sizes: dict[str, int], split: dict[str, str]) -> None:
    """Raise ValueError if an axis of the mesh does not divide the size of a dimension that it splits."""
    for name, axis in split.items():
        size, ranks = sizes.get(name, 0), mesh.shape[axis]
        if size % ranks:
            raise ValueError(
                f"{function}: {name}={size} is not a multiple of the {ranks} ranks along {axis!r}, over which it is "
                "split: choose a multiple, or fewer ranks"
            )


def pad_vocabulary(params: dict, ranks: int) -> dict:
    """Return whole parameters of a transformer, with the vocabulary padded with zeros to a multiple of the ranks.

    Args:
        params: those of `init_transformer` or `init_decoder`.
        ranks: the number of ranks over which the vocabulary is split.

    >>> pad_vocabulary({"embedding": np.ones((5, 2)), "head": np.ones((2, 5))}, ranks=4)["head"].shape
    (2, 8)
    """

    def pad(x: Any, axis: int) -> Any:
        missing = -x.shape[axis] % ranks
        return np.pad(x, [(0, missing if d == axis else 0) for d in range(2)]) if missing else x

    axes = {"embedding": 0, "head": 1}  # of the vocabulary
    return {name: pad(x, axes[name]) if name in axes else x for name, x in params.items()}


def tensor_parallel_options(axis: str, sequence_parallel: bool = False, vocabulary: int | None = None) -> dict:
    """Return the options of `next_token_loss` for parameters that are split by `transformer_specs(config, axis)`.

    With examples split along a second axis, the loss in the body of a `shard_map` is
    `pmean(next_token_loss(config, params, tokens, labels, **tensor_parallel_options('feats')), 'batch')`.

    Args:
        axis: the axis of the mesh along which features are split.
        sequence_parallel: whether tokens are split along it, too, between half layers.
        vocabulary: the number of tokens, if `pad_vocabulary` has padded the vocabulary.

    >>> sorted(tensor_parallel_options('feats'))
    ['combine', 'embed', 'error']
    >>> sorted(tensor_parallel_options('feats', sequence_parallel=True))
    ['combine', 'dropout', 'embed', 'error', 'gather']
    """
    look_up, error = (partial(f, axis=axis, vocabulary=vocabulary) for f in (embed, label_cross_entropy))
    if not sequence_parallel:
        return {"combine": partial(psum, axis_name=axis), "embed": look_up, "error": error}

    def embed_and_split(table: Any, tokens: Any) -> Any:
        return pscatter(look_up(table, tokens), axis, axis=1, tiled=True)

    def dropout_of_tokens(key: Any, x: Any, rate: float) -> Any:
        batch, tokens, features = x.shape
        block = spmd.local_block((batch, tokens * axis_size(axis), features), P(None, axis))
        return dropout(key, x, rate, block)

    return {
        "dropout": dropout_of_tokens,
        "embed": embed_and_split,
        "error": error,
        "gather": partial(all_gather, axis_name=axis, axis=1, tiled=True),
        "combine": partial(psum_scatter, axis_name=axis, scatter_dimension=1, tiled=True),
    }


def tensor_parallel_transformer(
    mesh: spmd.Mesh, config: Config, sequence_parallel: bool = False, **options: Any
) -> Callable:
    """Return `next_token_loss` as a function of whole arrays, (params, (tokens, labels)).

    Parameters are split along the mesh's axis, tokens and labels [batch, tokens] are not. A vocabulary that the ranks
    do not divide is padded at each call; `pad_vocabulary` does so once. With `config.dropout` it is a function of
    (params, (tokens, labels), key), and all ranks drop the same numbers as one device, since the key is the same.

    Args:
        mesh: a mesh of one axis.
        config: the sizes of the transformer.
        sequence_parallel: whether a rank holds the residual stream only for its tokens.
        options: options of `shard_map`.

    Raises:
        ValueError: if the ranks do not divide the heads (also of keys and values), the hidden features, or with
            `sequence_parallel` the tokens of an example.

    >>> from spmd.parallel.transformer import init_transformer
    >>> import minidiff.numpy as np
    >>> mesh = spmd.make_mesh((2,), ('feats',), backend='simulated')
    >>> config = Config(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> params, text = init_transformer(np.random.default_rng(0), config), np.array([[0, 1, 2, 3, 4]])
    >>> for split in (False, True):
    ...     report = spmd.communication(tensor_parallel_transformer(mesh, config, split))
    ...     print(report(params, (text[:, :-1], text[:, 1:])).counts)
    {'psum': 5, 'pmax': 1}
    {'psum': 3, 'all_gather': 3, 'psum_scatter': 2, 'pmax': 1}
    """
    (axis,) = axes_of(mesh, "tensor_parallel_transformer", "feats")
    check_divided("tensor_parallel_transformer", mesh, sizes(config), dict.fromkeys(SPLIT[1:], axis))
    ends = tensor_parallel_options(axis, sequence_parallel, config.vocabulary)

    def on_each_rank(params, block, key=None):
        return next_token_loss(config, params, *block, key=key, **ends)

    in_specs = (transformer_specs(config, axis), P(), *[P()] * (config.dropout > 0))
    mapped = spmd.shard_map(on_each_rank, mesh=mesh, in_specs=in_specs, out_specs=P(), **options)
    padded = lambda params, *args: mapped(pad_vocabulary(params, mesh.size), *args)  # noqa: E731
    return padded if config.vocabulary % mesh.size else mapped
