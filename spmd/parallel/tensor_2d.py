"""2D tensor parallelism: activations and weights are split over both axes of a square grid of ranks.

Tensor parallelism along one axis (`tensor.py`) splits weights by features, but sums and holds whole activations. On a
q×q grid a layer's input [n, k] and weights [k, m] are both split as ``P('rows', 'columns')``, examples by rows and
features by columns, and their product is that of `summa.py` or `cannon.py`; so is its result, which is the next layer's
input. Biases [m] are split by columns. A rank holds 1/q² of all activations and weights.

The gradient of `tensor_parallel_2d` with `summa` communicates, along the axes that are here called rows and cols:

=========  =================  =========  ========  =====================
direction  collective         axes       count     numbers per rank
=========  =================  =========  ========  =====================
forward    broadcast_varying  cols       q*L       N*inputs/q
forward    broadcast_varying  rows       q*L       weights/q
forward    psum               cols       1         N/q
forward    psum               rows       1         1
backward   reduce             cols       q*(L-1)   N*(inputs-first)/q
backward   reduce             rows       q*L       weights/q
backward   psum               rows       1         outputs/q
=========  =================  =========  ========  =====================

There are L layers and N examples; inputs and outputs are the sums of the layers' sizes, first is the number of the
network's features, and weights the number of elements of all weights. (The gradient with respect to the network's
inputs is not taken.) The products keep the blocks they received for the backward pass, q times a rank's own;
`md.checkpoint` of a layer broadcasts them again instead.

Tesseract's 2.5D: with a third axis in front, of `depth` ranks, each of that many grids has examples of its own, split
as ``P(('depth', 'rows'), 'columns')``, and all weights. Products stay within a grid, whose q is smaller for as many
ranks; a `psum` along depth sums the gradients, 1/q² of the weights each.

Sources: Xu and You, "An efficient 2D method for training super-large deep learning models" (Optimus, 2021); Wang et
al., "Tesseract: parallelize the tensor parallelism efficiently" (2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import spmd
from collectives import pbroadcast, pmean
from spmd.mesh.specs import P
from spmd.parallel.grid import Axes
from spmd.parallel.network import Layer, axes_of, loss, predict, squared_error
from spmd.parallel.summa import summa


def dense_2d(x: Any, W: Any, b: Any, axes: Axes = ("rows", "columns"), product: Callable = summa) -> Any:
    """One layer on a q×q grid: [n/q, k/q], [k/q, m/q], [m/q] -> [n/q, m/q].

    x, W and the result are split over both axes, b over the second: a `psum` along the first sums its gradient.
    `product(x, W, axes)` is `summa` or `cannon`.

    >>> import minidiff.numpy as np
    >>> mesh, spec = spmd.make_mesh((2, 2), ('rows', 'columns'), backend='simulated'), P('rows', 'columns')
    >>> layer = spmd.shard_map(dense_2d, mesh, in_specs=(spec, spec, P('columns')), out_specs=spec)
    >>> layer(np.eye(2), np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([10.0, 20.0]))
    ShardedArray([[11., 22.],
                  [13., 24.]], P('rows', 'columns'))
    """
    return product(x, W, axes) + b


def mlp_2d(params: Sequence[Layer], x: Any, axes: Axes = ("rows", "columns"), product: Callable = summa) -> Any:
    """`predict` with `dense_2d` as its layer, on a q×q grid: [n/q, k/q] -> [n/q, m/q].

    >>> import minidiff.numpy as np
    >>> mesh, spec = spmd.make_mesh((2, 2), ('rows', 'columns'), backend='simulated'), P('rows', 'columns')
    >>> mlp = spmd.shard_map(mlp_2d, mesh, in_specs=([(spec, P('columns'))] * 2, spec), out_specs=spec)
    >>> mlp([(np.eye(4), np.zeros(4)), (np.ones((4, 2)), np.zeros(2))], np.array([[1.0, 2, 3, 4], [-1, -2, -3, 4]]))
    ShardedArray([[10., 10.],
                  [ 4.,  4.]], P('rows', 'columns'))
    """
    return predict(params, x, functools.partial(dense_2d, axes=axes, product=product))


def tensor_parallel_2d(
    mesh: spmd.Mesh, error: Callable = squared_error, product: Callable = summa, **options: Any
) -> Callable:
    """The loss, as a function of (params, (inputs, targets)).

    The mesh has two axes of one size q. Weights, inputs and targets are split along both, biases along the second.
    A third axis in front is Tesseract's depth, which splits examples too.
    `error(predictions, targets, axis)` is the error of each example, whose features are split along the axis; `product`
    is `summa` or `cannon`; `options` are those of `shard_map`. Raises ValueError if the mesh is not square, or if q
    does not divide the examples or a layer's features.

    >>> import minidiff as md, minidiff.numpy as np
    >>> from spmd.parallel.network import init_params
    >>> mesh = spmd.make_mesh((2, 2), ('rows', 'columns'), backend='simulated')
    >>> params, batch = init_params(np.random.default_rng(0), (8, 4)), (np.ones((16, 8)), np.zeros((16, 4)))
    >>> gradients = md.grad(tensor_parallel_2d(mesh))(params, batch)
    >>> [[g.spec for g in layer] for layer in gradients]
    [[P('rows', 'columns'), P('columns')]]
    """
    depth = mesh.axis_names[:-2][:1]
    names = ("depth", "rows", "columns") if depth else ("rows", "columns")
    rows, columns = axes = axes_of(mesh, "tensor_parallel_2d", *names)[-2:]

    def on_each_rank(params, block):
        forward = functools.partial(mlp_2d, axes=axes, product=product)
        params = pbroadcast(params, depth)  # once, so that one psum sums what the grids' layers add to a gradient
        return pmean(loss(params, block, lambda y, targets: error(y, targets, columns), forward), (*depth, rows))

    def mapped(params, batch):
        specs = [(P(rows, columns), P(columns)) for _ in params], P((*depth, rows), columns)
        return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=specs, out_specs=P(), **options)(params, batch)

    return mapped


def mlp_bytes(q: int, examples: int, features: int, hidden: int, itemsize: int = 8) -> dict[str, dict[str, int]]:
    """What a rank passes to collectives, and holds, for two layers: 1D against 2D tensor parallelism on q² ranks.

    The layers go from `features` to `hidden` and back; gradients are those of the input and of all parameters. In 1D
    they are a `column_parallel` and a `row_parallel` layer, in 2D `mlp_2d` with `summa`. The result has, for each, the
    bytes that one rank passes to collectives in both passes, and the bytes of its shards of the weights and of the
    layers' inputs and outputs. With N examples, d features and h hidden ones:

    ==  =========  ====================  ========  =============
    ..  forward    backward              weights   activations
    ==  =========  ====================  ========  =============
    1D  N*d        N*d                   2dh/q²    2N*d + N*h/q²
    2D  N(d+h)/q   forward + (d+h)/q     2dh/q²    2N*d/q² +
        + 2dh/q                                    N*h/q²
    ==  =========  ====================  ========  =============

    So 1D sends the same for any number of ranks, and holds whole activations; 2D sends 1/q of a larger number. With h =
    4d it sends less if q > 5 + 8d/N. (An all-reduce of s bytes counts as s, as in reports; a ring sends 2s.) Raises
    ValueError unless q > 1, q divides examples and features, and q² divides hidden.

    >>> for q in (2, 4, 8, 16, 32):
    ...     one, two = mlp_bytes(q, 8192, 1024, 4096).values()
    ...     print(q * q, *(f"{n[key] / 2**20:.1f}" for n in (one, two) for key in ("forward", "activations")))
    4 64.0 192.0 192.0 96.0
    16 64.0 144.0 96.0 24.0
    64 64.0 132.0 48.0 6.0
    256 64.0 129.0 24.0 1.5
    1024 64.0 128.2 12.0 0.4
    """
    n, d, h, ranks = examples, features, hidden, q * q
    if q < 2 or any(x % q for x in (n, d)) or h % ranks:
        raise ValueError(
            f"mlp_bytes: a grid of q={q} by q ranks needs q > 1, multiples of q as examples={n} and features={d}, "
            f"and a multiple of q*q as hidden={h}"
        )
    weights, sent = 2 * d * h // ranks, (n * (d + h) + 2 * d * h) // q
    flat = n * d, n * d, weights, 2 * n * d + n * h // ranks
    square = sent, sent + (d + h) // q, weights, n * (2 * d + h) // ranks
    keys = ("forward", "backward", "weights", "activations")
    return {name: {key: itemsize * x for key, x in zip(keys, row)} for name, row in (("1D", flat), ("2D", square))}
