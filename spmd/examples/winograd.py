"""Winograd's convolutions with 3 x 3 taps: 16 multiplications for 4 results instead of 36, or 36 for 16 instead of 144.

    mpirun -n 4 python -m spmd.examples.winograd

For tiles of 2 x 2 and of 4 x 4 results, the program prints the multiplications of a tile, for each channel and feature,
as counted on tapes; whether gradients are those of `md.nn.conv`, also with rows of images split over ranks; and errors
in float64, float32 and float16, relative to the largest result.

A polynomial of n = m + 2 coefficients is known from n values. So the product of two, of 3 and m coefficients, takes n
multiplications: evaluate both at n points, multiply, interpolate. As functions of the second one, these are three
linear maps; their transpose convolves n numbers with 3 taps, for m results:

    y = A (G g * B d)      A: m x n, G: n x 3, B: n x n; A and G evaluate, B interpolates; A and B are transposed

In two dimensions, with the maps on both axes, n^2 numbers are multiplied for m^2 results. Sums over channels are taken
before A, in n^2 products of matrices. The more points, the larger the constants, and the errors.

Sources: Winograd, "Arithmetic complexity of computations", 1980; Lavin and Gray, "Fast algorithms for convolutional
neural networks", 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.core.types import Var
from minidiff.nn import conv
from spmd.examples.study import print_calls, run_study
from spmd.mesh.specs import P
from spmd.prices.work import work_of_equation

TAPS, POINTS = 3, (0.0, 1.0, -1.0, 2.0, -2.0)  # the last point is infinity: the leading coefficient


def transforms(m: int) -> tuple[Any, Any, Any]:
    """Return A, G and B for m results of three taps. Factors move from B, which has integers then, to G.

    >>> transforms(2)[2].astype(int).tolist()
    [[-1, 0, 1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]]
    """
    points = POINTS[: m + TAPS - 2]
    factors = numpy.array([*[math.prod(p - q for q in points if q != p) for p in points], 1.0])[:, None]

    def evaluation(count: int) -> Any:
        return numpy.vstack([numpy.vander(points, count, increasing=True), numpy.eye(count)[-1]])

    interpolation = numpy.linalg.inv(evaluation(m + TAPS - 1))
    return evaluation(m).T, evaluation(TAPS) / factors, numpy.round(interpolation.T * factors)


def winograd(x: Any, kernel: Any, m: int, padding: Any = ((1, 1), (1, 1))) -> Any:
    """Convolve images [batch, rows, columns, channels] with a kernel [3, 3, channels, features]."""
    a, g, b = (matrix.astype(x.dtype) for matrix in transforms(m))
    sizes = [n + sum(pad) - 2 for n, pad in zip(x.shape[1:3], padding)]
    ends = [(before, after + -size % m) for (before, after), size in zip(padding, sizes)]
    x = np.pad(x, ((0, 0), *ends, (0, 0)))
    tiles = np.lib.stride_tricks.sliding_window_view(x, (len(b), len(b)), axis=(1, 2))[:, ::m, ::m]
    data = np.einsum("ir,zxycrs,js->ijzxyc", b, tiles, b)
    weights = np.einsum("ir,rscf,js->ijcf", g, kernel, g)
    products = np.einsum("ijzxyc,ijcf->ijzxyf", data, weights)
    results = np.einsum("ri,ijzxyf,sj->zxrysf", a, products, a)
    return results.reshape(len(x), results.shape[1] * m, results.shape[3] * m, -1)[:, : sizes[0], : sizes[1]]


def multiplications(f: Callable, *args: Any) -> tuple[int, int]:
    """Count those of two values on a tape, and those with the constants of transforms, zeros and ones included."""
    products = [e for e in md.make_tape(f)(*args).equations if e.primitive.name == "einsum"]
    transforming = [e for e in products if not all(isinstance(a, Var) for a in e.inputs)]
    all_of_them, others = (sum(work_of_equation(e).flops // 2 for e in each) for each in (products, transforming))
    return all_of_them - others, others


def gradient_of(convolve: Callable) -> Callable:
    """Return the gradient of a function of a convolution's result."""
    return md.grad(lambda x, kernel: np.sum(np.sin(convolve(x, kernel))), argnums=(0, 1))


def show(mesh: spmd.Mesh) -> None:
    """Count multiplications, compare gradients, and measure errors."""
    rng = numpy.random.default_rng(0)
    x = rng.normal(size=(2, 4 * mesh.size, 16, 8))
    kernel = rng.normal(size=(TAPS, TAPS, 8, 32)) / math.sqrt(TAPS**2 * 8)
    expected, wanted = conv(x, kernel), gradient_of(conv)(x, kernel)
    for m in (2, 4):
        convolve, unit = partial(winograd, m=m), expected.size // m**2 * 8
        counts = [multiplications(f, x, kernel) for c in (convolve, conv) for f in (c, gradient_of(c))]
        (forward, constants), (backward, _), (direct, _), (direct_backward, _) = numpy.array(counts) / unit
        print(f"{m} x {m} results: {forward:g} multiplications instead of {direct:g}; {constants:.1f} with constants")
        print(f"  with the gradient: {backward:g} instead of {direct_backward:g}")

        def on_ranks(x: Any, kernel: Any, m: int = m) -> Any:
            around = spmd.halo(x, {1: (1, 1)}, (None, "rows"), "zeros")
            return winograd(around, kernel, m, ((0, 0), (1, 1)))

        split = spmd.shard_map(on_ranks, mesh=mesh, in_specs=(P(None, "rows"), P()), out_specs=P(None, "rows"))
        for title, f in (("one rank", convolve), ("ranks", split)):
            actual = print_calls(f"  gradient, {title}", gradient_of(f), x, kernel)
            same = all(numpy.allclose(spmd.gather(a), w) for a, w in zip(actual, wanted))
            print(f"  the same as the direct one: {'yes' if same else 'NO'}")
    for dtype in ("float64", "float32", "float16"):
        results = [w(x.astype(dtype), kernel.astype(dtype)) for w in (conv, partial(winograd, m=2), convolve)]
        errors = [numpy.max(abs(y.astype(float) - expected)) / numpy.max(abs(expected)) for y in results]
        print("{}: errors {:.0e} (direct), {:.0e} (2 x 2), {:.0e} (4 x 4)".format(dtype, *errors))


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("rows",), argv)


if __name__ == "__main__":
    main()
