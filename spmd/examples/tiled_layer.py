"""A layer that is too large for one rank, computed in tiles, one after the other (ZeRO-Infinity).

    mpirun -n 4 python -m spmd.examples.tiled_layer

For 1, 2, 4 and 8 tiles, the program prints the bytes of a rank at the peak of a gradient, from the types alone, and
those of a tile's whole weights; the collectives, and the bytes that a rank sends; and the loss, on ranks and on one
rank that computes the layer at once.

ZeRO-3 splits the weights over the ranks, which gather a layer to use it: all its weights are on each rank for a moment.
If even one layer is too large, tiles of it take turns. The layer is x -> relu(x W1 + b) W2, and each tile has some of
the hidden units: columns of W1 and b, rows of W2. A sum over units is a sum over tiles, so a loop gathers a tile, adds
what it computes, and forgets the tile before the next. The backward pass gathers each tile again, by a checkpoint, and
scatters its gradient. A rank sends as many bytes as without tiles, in more messages. It is model parallelism whose
parts run at different times, instead of on different ranks.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU memory wall for extreme scale deep learning".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, pbroadcast, pmean
from spmd.examples.study import numbers, run_study
from spmd.mesh.specs import P

FEATURES, HIDDEN, EXAMPLES = 32, 1024, 24


def layer(params: Any, x: Any) -> Any:
    """Apply the layer, or a tile of it."""
    w1, b, w2 = params
    return np.maximum(x @ w1 + b, 0) @ w2


def in_tiles(params: Any, tiles: int) -> tuple:
    """Split the hidden units: each array gets a first axis of tiles.

    >>> [x.shape for x in in_tiles((numpy.ones((2, 6)), numpy.ones(6), numpy.ones((6, 2))), tiles=3)]
    [(3, 2, 2), (3, 2), (3, 2, 2)]
    """
    w1, b, w2 = params
    return (
        np.moveaxis(w1.reshape(len(w1), tiles, -1), 1, 0),
        b.reshape(tiles, -1),
        w2.reshape(tiles, -1, w2.shape[-1]),
    )


def tiled_layer(params: Any, x: Any, axis: str) -> Any:
    """Apply the layer tile by tile; a rank has a part of the units of each tile."""

    @md.checkpoint
    def of_tile(tile: Any, x: Any) -> Any:
        w1, b, w2 = tile
        gather = lambda w, dim: all_gather(w, axis, axis=dim, tiled=True)  # noqa: E731
        return layer((gather(w1, 1), gather(b, 0), gather(w2, 0)), x)

    start = pbroadcast(numpy.zeros(x.shape), axis)
    return md.scan(lambda total, tile: (total + of_tile(tile, x), None), start, params)[0]


def show(mesh: spmd.Mesh) -> None:
    """Compute the gradient of one layer in 1, 2, 4 and 8 tiles."""
    rng, size = numpy.random.default_rng(0), mesh.size
    params = tuple(rng.normal(size=s) / FEATURES for s in ((FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, FEATURES)))
    x = rng.normal(size=(EXAMPLES * size, FEATURES))
    expected, gradients = md.value_and_grad(lambda p: np.mean((layer(p, x) - x) ** 2))(params)
    specs = P(None, None, "batch"), P(None, "batch"), P(None, "batch")
    for tiles in (1, 2, 4, 8):
        mapped = spmd.shard_map(
            lambda p, x: pmean(np.mean((tiled_layer(p, x, "batch") - x) ** 2), "batch"),
            mesh=mesh,
            in_specs=(specs, P("batch")),
            out_specs=P(),
        )
        program, args = md.jit(md.value_and_grad(mapped)), (in_tiles(params, tiles), x)
        args = spmd.distribute(args, mesh, (specs, P("batch")))
        peak = spmd.memory(program)(*args).peak.total
        whole = sum(p.nbytes for p in params) // tiles
        print(f"{tiles} tiles: {peak:,} bytes at the peak; the weights of a tile have {whole:,}")
        report = spmd.communication(program)(*args)
        counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
        print(f"gradient: {counts}; {report.bytes:,} bytes are sent")
        value, actual = program(*args)
        same = [np.allclose(spmd.gather(a), g) for a, g in zip(actual, in_tiles(gradients, tiles))]
        print(f"the same gradients: {'yes' if all(same) else 'NO'}; loss: {numbers([value, expected])} (one rank)")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("batch",), argv)


if __name__ == "__main__":
    main()
