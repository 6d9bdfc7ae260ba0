"""Matrix products whose tensor-parallel collectives are taken around a ring, so that they overlap with the product.

With `sequence` of `megatron_3d.py`, an all-gather of tokens opens a half layer and a reduce-scatter closes it, and both
wait for all of a product or make it wait. A product of tokens is as many products as ranks, one for each rank's tokens.
So a rank multiplies its tokens while it sends them on, and then those that have arrived; and it sends terms to the rank
whose tokens they are of, while it computes the terms of others. On n ranks, of b*t/n tokens of f features each:

================  =========  ==================  ===========================================  ==================
function          direction  calls               overlaps with                                elements of a call
================  =========  ==================  ===========================================  ==================
`gather_product`  forward    n - 1 ppermute      the product                                  b*t*f/n
`gather_product`  backward   1 all_gather        the product for the cotangent of tokens      b*t*f
`gather_product`  backward   1 psum_scatter      the product for the gradient of weights      b*t*f
`scatter_product` forward    n - 1 ppermute      the product                                  b*t*f/n
`scatter_product` backward   n - 1 ppermute      the product for the cotangent of tokens      b*t*f/n
================  =========  ==================  ===========================================  ==================

The gradient of weights is one product of all tokens, since each part of it would be as large as all. The collectives
that it leaves time for need no steps.

Sources: Wang et al., "Overlap communication with dependent computation via decomposition in large deep learning models"
(ASPLOS 2023); NVIDIA's Transformer Engine and NeMo, whose option is called `tp_comm_overlap`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import all_gather, axis_index, axis_size, psum_scatter
from collectives.ops import shift


def _arriving(x: Any, axis: str) -> list:
    """Return the blocks of all ranks in the order in which they arrive: this rank's, then that of the rank before."""
    blocks = [x]
    while len(blocks) < axis_size(axis):
        blocks.append(shift(blocks[-1], axis, 1))
    return blocks


def _in_order(arrived: list, axis: str) -> Any:
    """Join blocks of tokens, in the order in which they arrived, to those of ranks 0, 1, ..."""
    stacked, here, n = np.stack(arrived), axis_index(axis), len(arrived)
    return np.concatenate([stacked[(here - rank) % n] for rank in range(n)], axis=1)


@partial(md.custom_vjp, nondiff_argnums=2)
def gather_product(x: Any, w: Any, axis: str) -> Any:
    """Return the product of `all_gather(x, axis, axis=1, tiled=True)` and w, of tokens that go around a ring.

    Args:
        x: this rank's tokens, [batch, tokens / ranks, features].
        w: this rank's columns of the weights, [features, columns], in any number of dimensions.
        axis: the axis along which tokens and columns are split; all values vary along the axes of `x`.

    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('feats',), backend='simulated')
    >>> specs = spmd.P(None, 'feats'), spmd.P(None, 'feats')
    >>> f = spmd.shard_map(partial(gather_product, axis='feats'), mesh, specs, spmd.P(None, None, 'feats'))
    >>> f(np.arange(4.0).reshape(1, 4, 1), np.array([[1.0, 10.0]])).shape
    (1, 4, 2)
    """
    columns = w.reshape(len(w), -1)
    y = _in_order([block @ columns for block in _arriving(x, axis)], axis)
    return y.reshape(*y.shape[:2], *w.shape[1:])


def _gather_forward(x: Any, w: Any, axis: str) -> tuple:
    return gather_product(x, w, axis), (x, w)


def _gather_backward(axis: str, saved: tuple, ct: Any) -> tuple:
    x, w = saved
    ct = ct.reshape(*ct.shape[:2], -1)
    gathered = all_gather(x, axis, axis=1, tiled=True)
    ct_x = psum_scatter(ct @ w.reshape(len(w), -1).T, axis, scatter_dimension=1, tiled=True)
    return ct_x, np.einsum("btf,btk->fk", gathered, ct).reshape(w.shape)


gather_product.defvjp(_gather_forward, _gather_backward)


@partial(md.custom_vjp, nondiff_argnums=2)
def scatter_product(y: Any, w: Any, axis: str) -> Any:
    """Return `psum_scatter(y @ w, axis, scatter_dimension=1, tiled=True)`, by terms that are sent as they are computed.

    Args:
        y: this rank's columns of all tokens, [batch, tokens, columns], in any number of dimensions.
        w: this rank's rows of the weights, [columns, features], in the same ones.
        axis: the axis along which columns are split, and the tokens of the result; all values vary along those of `y`.

    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('feats',), backend='simulated')
    >>> specs = spmd.P(None, None, 'feats'), spmd.P('feats')
    >>> f = spmd.shard_map(partial(scatter_product, axis='feats'), mesh, specs, spmd.P(None, 'feats'))
    >>> f(np.ones((1, 4, 2)), np.array([[1.0], [10.0]])).reshape(4)
    ShardedArray([11., 11., 11., 11.], P('feats'))
    """
    n, here = axis_size(axis), axis_index(axis)
    batch, tokens = y.shape[:2]
    w = w.reshape(-1, w.shape[-1])
    blocks = np.moveaxis(y.reshape(batch, n, tokens // n, -1), 1, 0)
    others = [shift(blocks[(here + step) % n] @ w, axis, step) for step in range(1, n)]
    return sum(others, blocks[here] @ w)  # this rank's tokens last, while the terms of others arrive


def _scatter_forward(y: Any, w: Any, axis: str) -> tuple:
    return scatter_product(y, w, axis), (y, w)


def _scatter_backward(axis: str, saved: tuple, ct: Any) -> tuple:
    y, w = saved
    arriving, transposed = _arriving(ct, axis), w.reshape(-1, w.shape[-1]).T
    ct_y = _in_order([block @ transposed for block in arriving], axis)
    columns = y.reshape(*y.shape[:2], -1)
    return ct_y.reshape(y.shape), np.einsum("btk,btf->kf", columns, _in_order(arriving, axis)).reshape(w.shape)


scatter_product.defvjp(_scatter_forward, _scatter_backward)
