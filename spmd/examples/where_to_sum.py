"""Four programs that say where sums over ranks are taken, by unreduced and reduced values.

    mpirun -n 4 python -m spmd.examples.where_to_sum

Each can also be run with results that are summed at once (`unsummed=False`). Both compute the same, and communicate:

=======================  ==================================  ====================================
program                  with unreduced values               without
=======================  ==================================  ====================================
accumulated_gradient     psum                                psum for each microbatch
two_products             psum                                psum, psum
zero2_step               psum_scatter, all_gather_invariant  psum, all_gather_invariant
=======================  ==================================  ====================================

The fourth, `gradient_at`, places `reduced` at three places of a forward pass: there the backward pass has its psum.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5; Hu et
al., "LoRA: Low-Rank Adaptation of Large Language Models"; JAX, "Autodiff and sharding".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather_invariant, pscatter, psum, psum_scatter, reduced, unreduced
from spmd import P
from spmd.mesh.launch import launcher_size

AXIS = "ranks"


def squared_error(w: Any, batch: tuple) -> Any:
    """The loss of a network with one weight matrix for all of its layers, summed over a batch."""
    inputs, targets = batch
    hidden, _ = md.scan(lambda h, _: (np.tanh(h @ w), None), inputs, length=2)
    return np.sum((hidden - targets) ** 2)


# ---------------------------------------------------------------- gradients of several microbatches


def accumulated_gradient(mesh: spmd.Mesh, loss: Callable = squared_error, unsummed: bool = True) -> Callable:
    """The gradient of `loss(w, batch)`, summed over microbatches and ranks.

    A function of (w, batches): `w` is whole, `batches` a tree of arrays [microbatches, examples, ...], whose examples
    are split. The weight is reduced, so each microbatch's gradient is unreduced: a rank adds up its terms, and one psum
    after the loop sums them over ranks. With `unsummed=False` the weight is invariant, and each microbatch's gradient
    is summed over ranks at once. Both are gradients of a sum over ranks: the loss is unreduced.
    """

    def on_each_rank(w, batches):
        w = reduced(w, AXIS) if unsummed else w
        begin, end = (unreduced, psum) if unsummed else (lambda x, _: x,) * 2

        def add_microbatch(total, batch):
            return total + md.grad(lambda w: unreduced(loss(w, batch), AXIS))(w), None

        zero = np.zeros(w.shape)
        total, _ = md.scan(add_microbatch, begin(zero, AXIS), batches)
        return end(total, AXIS)

    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=(P(), P(None, AXIS)), out_specs=P())


# ---------------------------------------------------------------- two products with split inner dimensions


def two_products(mesh: spmd.Mesh, unsummed: bool = True) -> Callable:
    """`x @ W + x @ A @ B`, as with low-rank adaptation: a function of (x, W, A, B).

    The features of x are split, and with them the rows of W and A. So x @ W and x @ A are sums over ranks. Unreduced
    terms are multiplied by B and added, and one psum sums the result.
    """

    def on_each_rank(x, w, a, b):
        if unsummed:
            return psum(unreduced(x @ w, AXIS) + unreduced(x @ a, AXIS) @ b, AXIS)
        return psum(x @ w, AXIS) + psum(x @ a, AXIS) @ b

    specs = P(None, AXIS), P(AXIS), P(AXIS), P()
    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=specs, out_specs=P())


# ---------------------------------------------------------------- ZeRO, stage 2


def zero2_step(mesh: spmd.Mesh, loss: Callable = squared_error, unsummed: bool = True) -> Callable:
    """A step of gradient descent with momentum, whose gradient and momentum are split: ZeRO, stage 2.

    A function of (w, velocity, batch) to (w, velocity): `w` is whole, `velocity` has its shape and is split along the
    first dimension, the examples of `batch` are split. The gradient is unreduced until a `psum_scatter` gives each rank
    its shard of the sum. With `unsummed=False`, a psum gives every rank the whole sum, of which it takes a slice.
    """

    def on_each_rank(w, velocity, batch):
        gradient = md.grad(lambda w: unreduced(loss(w, batch), AXIS))
        if unsummed:
            shard = psum_scatter(gradient(reduced(w, AXIS)), AXIS, tiled=True)
        else:
            shard = pscatter(gradient(w), AXIS, tiled=True)
        velocity = 0.9 * velocity + shard
        part = pscatter(w, AXIS, tiled=True) - 0.01 * velocity
        return all_gather_invariant(part, AXIS, tiled=True), velocity

    specs = P(), P(AXIS), P(AXIS)
    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=specs, out_specs=(P(), P(AXIS)))


# ---------------------------------------------------------------- where the backward pass sums


def gradient_at(mesh: spmd.Mesh, place: str) -> Callable:
    """The gradient of a loss, as a function of (w, x); x is split, w is whole, and `reduced` at one place.

    The forward pass computes `scale = exp(w)` and `kernel = outer(scale, scale)`, and multiplies x by the kernel.
    `place` names the one that is reduced. The backward pass sums the cotangent of that value:

    =========  =================================  ============================
    place      the psum is                        bytes, for n weights
    =========  =================================  ============================
    "w"        the last operation                 8 n
    "scale"    before the derivative of exp       8 n
    "kernel"   before that of the outer product   8 n n
    =========  =================================  ============================
    """

    def reduced_at(here, x):
        return reduced(x, AXIS) if here == place else x

    def on_each_rank(w, x):
        w = reduced_at("w", w)
        scale = reduced_at("scale", np.exp(w))
        kernel = reduced_at("kernel", np.outer(scale, scale))
        return psum(np.sum(np.tanh(x @ kernel)), AXIS)

    return md.grad(spmd.shard_map(on_each_rank, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P()))


# ---------------------------------------------------------------- what they communicate


def examples(mesh: spmd.Mesh) -> dict[str, tuple[dict[str, Callable], tuple]]:
    """For each program, its versions and its arguments."""
    rng, n = numpy.random.default_rng(0), mesh.size
    w, batch = rng.normal(size=(2 * n, 2 * n)), tuple(rng.normal(size=(2, 4 * n, 2 * n)))
    batches = tuple(rng.normal(size=(2, 3, 4 * n, 2 * n)))
    products = rng.normal(size=(5, n)), rng.normal(size=(n, 3)), rng.normal(size=(n, 2)), rng.normal(size=(2, 3))
    programs: dict[Callable, tuple] = {
        accumulated_gradient: (w, batches),
        two_products: products,
        zero2_step: (w, 0 * w, batch),
    }
    versions = {
        f.__name__: ({"with unreduced values": f(mesh), "without": f(mesh, unsummed=False)}, args)
        for f, args in programs.items()
    }
    places = {f"reduced at {place}": gradient_at(mesh, place) for place in ("w", "scale", "kernel")}
    return {**versions, "gradient_at": (places, (rng.normal(size=3), rng.normal(size=(n, 3))))}


def main() -> None:
    mesh = spmd.make_mesh((launcher_size() or 4,), (AXIS,))
    for name, (versions, args) in examples(mesh).items():
        for version, program in versions.items():
            report = spmd.communication(program)(*args)
            program(*args)
            if mesh.rank == 0:
                print(f"{name}, {version}:\n\n{report}\n")


if __name__ == "__main__":
    main()
