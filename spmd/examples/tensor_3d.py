"""3D tensor parallelism: activations and weights are split over all axes of a q×q×q cube of ranks.

    mpirun -n 8 python -m spmd.examples.tensor_3d

The program prints the loss of a network on a cube of ranks, that on one rank, and the collectives of its gradient.

A product A @ B has rows, columns and terms, and each is split along an axis of the cube: i, j and k. The rank at
(i, j, k) multiplies block (i, k) of A by block (k, j) of B. It holds less, since ranks that need the same block hold a
part of its rows each: A [n, k] is split as ``P((i, j), k)``, B [k, m] as ``P((k, i), j)`` and the product [n, m] as
``P((i, k), j)``. So it is the next layer's input with j and k exchanged, and layers exchange them in turn. On blocks of
a, b and c bytes, 1/q³ of A, B and their product:

==========  =========  ============  ====  =======
product     pass       collective    axis  bytes
==========  =========  ============  ====  =======
product_3d  forward    all_gather    j     a
product_3d  forward    all_gather    i     b
product_3d  forward    psum_scatter  k     q*c
product_3d  backward   all_gather    k     c
product_3d  backward   psum_scatter  j     q*a
product_3d  backward   psum_scatter  i     q*b
==========  =========  ============  ====  =======

By rings, a pass sends (q-1)(a + b + c): the longest matrices over p**(2/3) ranks' parts, against p**(1/2) in 2D. The
bytes that are held do not grow with the number of ranks, but for what a product gathers.

Sources: Agarwal et al., "A three-dimensional approach to parallel matrix multiplication" (1995); Bian et al.,
"Maximizing parallelism in distributed training for huge neural networks" (2021), which balances the blocks in this way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import spmd
from collectives import all_gather, pmean, psum_scatter
from minidiff.core.tracer import Value
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P
from spmd.parallel.matmul import matrices
from spmd.parallel.network import Layer, axes_of, init_params, loss, predict, squared_error

Axes = tuple[str, str, str]  # of rows, columns and terms


def product_3d(a: Value, b: Value, axes: Axes = ("i", "j", "k")) -> Value:
    """``A @ B`` on a cube: [n/q², k/q], [k/q², m/q] -> [n/q², m/q].

    The axes may have different sizes, if they divide the dimensions. Raises ValueError if the blocks do not fit.

    >>> import numpy as np
    >>> mesh = spmd.make_mesh((2, 2, 2), ('i', 'j', 'k'), backend='simulated')
    >>> specs = {'in_specs': (P(('i', 'j'), 'k'), P(('k', 'i'), 'j')), 'out_specs': P(('i', 'k'), 'j')}
    >>> a, b = np.arange(16.0).reshape(4, 4), np.arange(8.0).reshape(4, 2)
    >>> bool((spmd.shard_map(product_3d, mesh, **specs)(a, b).gather() == a @ b).all())
    True
    """
    rows, columns, terms = axes
    matrices("product_3d", a, b)
    a, b = all_gather(a, columns, tiled=True), all_gather(b, rows, tiled=True)
    return psum_scatter(a @ b, terms, tiled=True)


def tensor_parallel_3d(mesh: spmd.Mesh, error: Callable = squared_error, **options: Any) -> Callable:
    """The loss, as a function of (params, (inputs, targets)).

    The mesh has three axes, for rows, columns and terms of the first product. A layer is a `product_3d`, and a bias
    that is split along the columns' axis; the next one has axes ``(axes[0], axes[2], axes[1])``. `error` and `options`
    are those of `tensor_parallel_2d`. Raises ValueError for other meshes, and for dimensions that the axes do not
    divide.

    >>> import minidiff.numpy as np
    >>> mesh = spmd.make_mesh((2, 2, 2), ('i', 'j', 'k'), backend='simulated')
    >>> params, batch = init_params(np.random.default_rng(0), (8, 4, 4)), (np.ones((16, 8)), np.zeros((16, 4)))
    >>> [[g.spec for g in layer] for layer in md.grad(tensor_parallel_3d(mesh))(params, batch)]
    [[P(('k', 'i'), 'j'), P('j')], [P(('j', 'i'), 'k'), P('k')]]
    """
    i, j, k = axes_of(mesh, "tensor_parallel_3d", "rows", "columns", "terms")
    in_turn = (i, j, k), (i, k, j)

    def forward(params: Sequence[Layer], x: Any) -> Any:
        axes = itertools.cycle(in_turn)
        return predict(params, x, lambda x, W, b: product_3d(x, W, next(axes)) + b)

    def mapped(params, batch):
        _, columns, terms = in_turn[(len(params) - 1) % 2]

        def on_each_rank(params, block):
            return pmean(loss(params, block, lambda y, targets: error(y, targets, columns), forward), (i, terms))

        layers = [(P((c, a), b), P(b)) for (a, b, c), _ in zip(itertools.cycle(in_turn), params)]
        specs = layers, (P((i, j), k), P((i, terms), columns))
        return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=specs, out_specs=P(), **options)(params, batch)

    return mapped


# ---------------------------------------------------------------- the program


def show(mesh: spmd.Mesh) -> None:
    """Print the loss on a cube, the loss on one rank, and the collectives of a gradient."""
    rng, n = numpy.random.default_rng(0), 4 * mesh.size
    params, batch = init_params(rng, (n, n, n)), (rng.normal(size=(n, n)), rng.normal(size=(n, n)))
    step = md.value_and_grad(tensor_parallel_3d(mesh))
    value = print_calls("gradient", step, params, batch)[0]
    print(f"loss: {numbers([value, loss(params, batch)])} (one rank)")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("i", "j", "k"), argv, ranks=8)


if __name__ == "__main__":
    main()
