"""2D tensor parallelism: activations and weights are split over both axes of a square grid of ranks.

    mpirun -n 4 python -m spmd.examples.tensor_2d

The program prints the loss of a network by SUMMA and by Cannon's algorithm, and the collectives of its gradient.

Tensor parallelism along one axis (`tensor.py`) splits weights by features, but sums and holds whole activations. On a
q×q grid a layer's input [n, k] and weights [k, m] are both split as ``P('rows', 'columns')``, examples by rows and
features by columns, and their product is `summa` or `cannon` of `cannon.py`; so is its result, which is the next
layer's input. Biases [m] are split by columns: a `psum` along the rows sums their gradients. A rank holds 1/q² of all
activations and weights.

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

import numpy

import minidiff as md
import spmd
from collectives import pbroadcast, pmean
from spmd.examples.cannon import cannon, summa
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P
from spmd.parallel.network import axes_of, init_params, loss, predict, squared_error


def tensor_parallel_2d(
    mesh: spmd.Mesh, error: Callable = squared_error, product: Callable = summa, **options: Any
) -> Callable:
    """The loss, as a function of (params, (inputs, targets)).

    The mesh has two axes of one size q. Weights, inputs and targets are split along both, biases along the second.
    A third axis in front is Tesseract's depth, which splits examples too.
    `error(predictions, targets, axis)` is the error of each example, whose features are split along the axis; `product`
    is `summa` or `cannon`; `options` are those of `shard_map`. Raises ValueError if the mesh is not square, or if q
    does not divide the examples or a layer's features.

    >>> import minidiff.numpy as np
    >>> mesh = spmd.make_mesh((2, 2), ('rows', 'columns'), backend='simulated')
    >>> params, batch = init_params(np.random.default_rng(0), (8, 4)), (np.ones((16, 8)), np.zeros((16, 4)))
    >>> gradients = md.grad(tensor_parallel_2d(mesh))(params, batch)
    >>> [[g.spec for g in layer] for layer in gradients]
    [[P('rows', 'columns'), P('columns')]]
    """
    depth = mesh.axis_names[:-2][:1]
    names = ("depth", "rows", "columns") if depth else ("rows", "columns")
    rows, columns = axes = axes_of(mesh, "tensor_parallel_2d", *names)[-2:]

    def dense(x, W, b):
        return product(x, W, axes) + b

    def on_each_rank(params, block):
        forward = functools.partial(predict, dense=dense)
        params = pbroadcast(params, depth)  # once, so that one psum sums what the grids' layers add to a gradient
        return pmean(loss(params, block, lambda y, targets: error(y, targets, columns), forward), (*depth, rows))

    def mapped(params, batch):
        specs = [(P(rows, columns), P(columns)) for _ in params], P((*depth, rows), columns)
        return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=specs, out_specs=P(), **options)(params, batch)

    return mapped


# ---------------------------------------------------------------- the program


def show(mesh: spmd.Mesh) -> None:
    """Print the loss by each product, the loss on one rank, and the collectives of a gradient."""
    rng, n = numpy.random.default_rng(0), 4 * mesh.shape["rows"]
    params, batch = init_params(rng, (n, n, n)), (rng.normal(size=(n, n)), rng.normal(size=(n, n)))
    for product in (summa, cannon):
        step = md.value_and_grad(tensor_parallel_2d(mesh, product=product))
        value = print_calls(product.__name__, step, params, batch)[0]
        print(f"loss: {numbers([value, loss(params, batch)])} (one rank)")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("rows", "columns"), argv)


if __name__ == "__main__":
    main()
