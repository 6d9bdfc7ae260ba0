"""Megatron's tensor parallelism: one all-reduce in each direction for each half layer.

Weights are split over the ranks, but activations are not. In a perceptron, the first product is column parallel, and
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
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import minidiff as md
import spmd
from collectives import psum
from spmd.mesh.specs import P
from spmd.parallel.network import axes_of
from spmd.parallel.transformer import Config, dimensions, next_token_loss, sizes
from spmd.parallel.vocabulary import embed, label_cross_entropy

#: The dimensions of parameters that are split over the ranks.
SPLIT = ("vocabulary", "heads", "kv_heads", "hidden")


def transformer_specs(config: Config, axis: str) -> dict:
    """The tree of parameters, with partition specs as leaves: those of tensor parallelism along `axis`.

    >>> config = Config(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> transformer_specs(config, 'feats')['layers'][0]['mlp']
    {'down': P('feats', None), 'gate': P(None, 'feats'), 'up': P(None, 'feats')}
    """
    return md.tree.map(
        lambda names: P(*[axis if name in SPLIT else None for name in names.split()]), dimensions(config)
    )


def check_divided(what: str, mesh: spmd.Mesh, sizes: dict[str, int], split: dict[str, str]) -> None:
    """Raise ValueError if an axis of the mesh does not divide the size of a dimension that it splits."""
    for name, axis in split.items():
        size, ranks = sizes.get(name, 0), mesh.shape[axis]
        if size % ranks:
            raise ValueError(
                f"{what}: {name}={size} is not a multiple of the {ranks} ranks along {axis!r}, over which it is "
                "split: choose a multiple, or fewer ranks"
            )


def tensor_parallel_options(axis: str) -> dict[str, Callable]:
    """The options of `next_token_loss` for parameters that are split by `transformer_specs(config, axis)`.

    With examples split along a second axis, the loss in the body of a `shard_map` is
    `pmean(next_token_loss(config, params, tokens, labels, **tensor_parallel_options('feats')), 'batch')`.

    >>> sorted(tensor_parallel_options('feats'))
    ['combine', 'embed', 'error']
    """
    return {
        "combine": partial(psum, axis_name=axis),
        "embed": partial(embed, axis=axis),
        "error": partial(label_cross_entropy, axis=axis),
    }


def tensor_parallel_transformer(
    mesh: spmd.Mesh, config: Config, ends: Callable = tensor_parallel_options, **options: Any
) -> Callable:
    """`next_token_loss`, as a function of whole arrays (params, (tokens, labels)).

    Parameters are split along the mesh's axis, tokens and labels [batch, tokens] are not; `ends(axis)` are options of
    `next_token_loss`, `options` those of `shard_map`. With `config.dropout` it is a function of (params, (tokens,
    labels), key), and all ranks drop the same numbers, since the key is the same. Raises ValueError if the ranks do not
    divide the vocabulary, the heads (also of keys and values), or the hidden features.

    >>> from spmd.parallel.transformer import init_transformer
    >>> import minidiff.numpy as np
    >>> mesh = spmd.make_mesh((2,), ('feats',), backend='simulated')
    >>> config = Config(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> params, text = init_transformer(np.random.default_rng(0), config), np.array([[0, 1, 2, 3]])
    >>> gradient = md.grad(tensor_parallel_transformer(mesh, config))
    >>> report = spmd.communication(gradient)(params, (text[:, :-1], text[:, 1:]))
    >>> [sum(r.count for r in report.rows if r.direction == way) for way in ('forward', 'backward')]
    [6, 3]
    """
    (axis,) = axes_of(mesh, "tensor_parallel_transformer", "feats")
    check_divided("tensor_parallel_transformer", mesh, sizes(config), dict.fromkeys(SPLIT, axis))

    def on_each_rank(params, block, key=None):
        return next_token_loss(config, params, *block, key=key, **ends(axis))

    in_specs = (transformer_specs(config, axis), P(), *[P()] * (config.dropout > 0))
    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=in_specs, out_specs=P(), **options)
