"""Residual and pyramid experts (PR-MoE): a dense layer beside the experts, and more experts in the last layers.

    mpirun -n 4 python -m spmd.examples.pyramid_experts

The program prints the collectives of each layer, the loss and gradients beside those of one rank, and the parameters of
published networks, in billions, counted from types.

An expert *corrects* a dense layer that each token goes through (residual), so one expert per token is enough where two
were used. Experts help more in the last layers, so these have twice as many (pyramid). A layer of E experts is split
over E ranks at most: along 'experts' alone, while 'data' splits tokens and each group has copies (first layer), or
along both axes (last layer). A gradient is summed over the ranks that have copies:

==========  ============  ======================
layer       all_to_all    gradients of experts
==========  ============  ======================
first       experts       psum over data
last        data,experts  no psum
==========  ============  ======================

Source: Rajbhandari et al., "DeepSpeed-MoE: Advancing mixture-of-experts inference and training to power next-generation
AI scale", section 4.1 and table 3, which has networks of 13 and 52 billion parameters, and 4 and 31 as pyramids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P
from spmd.parallel import feed_forward, mixture_of_experts

AXES = ("data", "experts")
SHAPES = [lambda d, h: (d, h), lambda d, h: (h,), lambda d, h: (h, d), lambda d, h: (d,)]


def residual_experts(params: Any, x: Any, capacity: int, axis: Any) -> Any:
    """Add a dense layer and each token's expert to x, in a body: [tokens / ranks, d] -> [tokens / ranks, d].

    `params` has the trees 'dense', 'router' [d, experts] and 'experts', leaves [experts / ranks, …]. `axis` is an axis
    of the mesh, or a tuple of axes.
    """
    correction = mixture_of_experts(feed_forward, params["experts"], params["router"], x, capacity, axis)
    return x + feed_forward(params["dense"], x) + correction


def types_of(d: int, experts: Sequence[int]) -> list[dict[str, Any]]:
    """Return the types of the layers with these numbers of experts, each of 4 * d hidden features."""

    def expert(*stacked: int) -> list[Any]:
        return [md.ShapedArray((*stacked, *shape(d, 4 * d)), "float64") for shape in SHAPES]

    return [{"dense": expert(), "router": md.ShapedArray((d, n), "float64"), "experts": expert(n)} for n in experts]


def billions(d: int, experts: Sequence[int], residual: bool) -> float:
    """Count the parameters of a decoder of 24 layers, of which every second one has experts, in billions."""
    others = 24 * 4 * d * d + 12 * 8 * d * d + 51200 * d  # attention, dense layers, words
    layers = [{**layer, "dense": ()} if not residual else layer for layer in types_of(d, experts)]
    return (others + sum(t.size for t in md.tree.leaves(layers))) / 1e9


def show(mesh: spmd.Mesh) -> None:
    """Print what two layers communicate and compute, and the sizes of published networks."""
    rng, d, tokens = numpy.random.default_rng(0), 4, 8 * mesh.size
    axes, counts = ("experts", AXES), (mesh.shape["experts"], mesh.size)
    params = [md.tree.map(lambda t: rng.normal(size=t.shape) / 3, layer) for layer in types_of(d, counts)]
    x, specs = rng.normal(size=(tokens, d)), [{"dense": P(), "router": P(), "experts": P(axis)} for axis in axes]
    alone = spmd.make_mesh((1, 1), AXES, backend="simulated")

    def program(mesh: spmd.Mesh, layers: Sequence[int]) -> Any:
        def body(params: Any, x: Any) -> Any:
            for layer in layers:
                x = residual_experts(params[layer], x, tokens, axes[layer])  # room for any choice
            return pmean(np.mean(x**2), AXES)

        return spmd.shard_map(body, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=P())

    for name, layer in (("first", 0), ("last", 1)):
        print_calls(f"{name} layer, {counts[layer]} experts", md.grad(program(mesh, [layer])), params, x)
    (value, actual), (expected, whole) = (md.value_and_grad(program(m, [0, 1]))(params, x) for m in (mesh, alone))
    pairs = zip(md.tree.leaves(actual), md.tree.leaves(whole))
    same = all(numpy.allclose(spmd.gather(a), spmd.gather(b)) for a, b in pairs)
    print(f"the same gradients: {'yes' if same else 'NO'}; loss: {numbers([value, expected])} (one rank)")
    for title, d, each in (("350M", 1024, (32, 64)), ("1.3B", 2048, (64, 128))):
        standard, pyramid = billions(d, [128] * 12, False), billions(d, [each[0]] * 10 + [each[1]] * 2, True)
        print(f"{title}, 128 experts a layer: {standard:.1f} billion parameters; as a pyramid: {pyramid:.1f}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, AXES, argv)


if __name__ == "__main__":
    main()
