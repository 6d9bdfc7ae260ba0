"""A convolution, its bias, a norm and an activation as one product and one loop.

    mpirun -n 4 python -m spmd.examples.fused_convolution

The program prints a layer as it is recorded, and as it is compiled. Then, for each activation of `minidiff.nn`, it
prints the operations on the product's elements; the passes over memory (arrays that are read or written) if each runs
alone, as without `jit`; and the compiled loops with their passes. It does so for a batch norm with fixed statistics,
for one that is folded into the kernel, and for a layer norm, whose loop walks over rows. (Without llvmlite, nothing is
fused.) Last, examples are split over ranks.

The convolution is a product of matrices: the windows of the images, copied (im2col), times the kernel. All that follows
is elementwise, or reduces rows, so it needs the product once, and the loop does not store anything between. A batch
norm with fixed statistics is a factor and an offset for each feature; both fold into the constants of the convolution:

    (conv(x, kernel) + bias - mean) * factor + offset = conv(x, kernel * factor) + ((bias - mean) * factor + offset)

This saves operations, but no pass. `glu` has half as many results; its loop computes both halves from halves, except
after a layer norm, whose rows are whole.

Sources: Chellapilla et al., "High performance convolutional neural networks for document processing", 2006; Jacob et
al., "Quantization and training of neural networks for efficient integer-arithmetic-only inference", 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.core.tape import Equation
from minidiff.core.types import typeof
from minidiff.nn import batch_norm, conv, layer_norm
from spmd.examples.study import run_study
from spmd.mesh.specs import P

ACTIVATIONS = (
    *("celu", "elu", "gelu", "glu", "hard_sigmoid", "hard_silu", "hard_tanh", "leaky_relu", "log_sigmoid", "mish"),
    *("log_softmax", "relu", "relu6", "selu", "sigmoid", "silu", "soft_sign", "softmax", "softplus", "squareplus"),
)


def layer(params: Any, x: Any, activation: Callable) -> Any:
    """Apply a convolution, a batch norm with fixed statistics, and an activation."""
    kernel, bias, scale, offset, statistics = params
    return activation(batch_norm(conv(x, kernel) + bias, scale, offset, statistics)[0])


def fold(params: Any) -> tuple[Any, Any]:
    """Return the kernel and the bias of a convolution that includes the batch norm."""
    kernel, bias, scale, offset, (mean, variance) = params
    factor = scale / np.sqrt(variance + 1e-5)  # as in batch_norm
    return kernel * factor, (bias - mean) * factor + offset


def folded_layer(folded: Any, x: Any, activation: Callable) -> Any:
    """Apply the layer that `fold` makes."""
    kernel, bias = folded
    return activation(conv(x, kernel) + bias)


def row_layer(params: Any, x: Any, activation: Callable) -> Any:
    """Apply a convolution, a layer norm, and an activation."""
    kernel, bias, scale, offset, _ = params
    return activation(layer_norm(conv(x, kernel) + bias, scale, offset))


def count(program: Any, *args: Any) -> tuple[int, float, int, float]:
    """Return operations on the product, and passes if each runs alone; the same of the compiled program's loops."""
    equations = program.program(*args).tape.equations
    product = next(k for k, eqn in enumerate(equations) if eqn.primitive.name == "einsum")
    size = equations[product].outputs[0].type.size

    def passes(eqn: Equation) -> float:
        sizes = [typeof(a).size for a in {id(a): a for a in [*eqn.inputs, *eqn.outputs]}.values()]
        return sum(n for n in sizes if 2 * n >= size) / size  # glu has half as many results

    def totals(equations: Sequence[Equation]) -> tuple[int, float]:
        costs = [passes(eqn) for eqn in equations if passes(eqn) and not eqn.primitive.shares_memory]
        return len(costs), sum(costs)

    loops = equations[product + 1 :]
    alone = [e for eqn in loops for e in (eqn.bodies[0].equations if eqn.bodies else [eqn])]
    return *totals(alone), *totals(loops)


def show(mesh: spmd.Mesh) -> None:
    """Print a layer before and after, count passes for each activation, and compare with ranks."""
    rng = numpy.random.default_rng(0)
    kernel = rng.normal(size=(3, 3, 8, 64)) / numpy.sqrt(72)
    vectors = rng.uniform(0.5, 1.5, size=(5, 64))
    params = md.tree.map(numpy.float32, (kernel, *vectors[:3], tuple(vectors[3:])))
    images = rng.normal(size=(2 * mesh.size, 16, 16, 8)).astype(numpy.float32)
    x, relu = images[:2], partial(layer, activation=md.nn.relu)
    print(md.make_tape(relu)(params, x), md.jit(relu).source(params, x), "", sep="\n\n")
    print("operations, passes alone -> loops, passes      batch norm              folded          layer norm")
    for name in ACTIVATIONS:
        cases, row = ((layer, params), (folded_layer, fold(params)), (row_layer, params)), f"{name:38}"
        for apply, weights in cases:
            counts = count(md.jit(partial(apply, activation=getattr(md.nn, name))), weights, x)
            row += "{:>6} {:4g} -> {} {:<3g}".format(*counts)
        print(row.rstrip())
    for name in ("gelu", "glu"):
        f = partial(folded_layer, activation=getattr(md.nn, name))
        program = md.jit(spmd.shard_map(f, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P("batch")))
        actual, expected = program(fold(params), images), layer(params, images, getattr(md.nn, name))
        same = numpy.allclose(spmd.gather(actual), expected, 1e-4, 1e-5)
        print(f"{name}, folded, on ranks: the same as the layer: {'yes' if same else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("batch",), argv)


if __name__ == "__main__":
    main()
