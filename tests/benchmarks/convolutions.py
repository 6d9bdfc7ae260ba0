"""Convolutions of residual networks and their gradients, compiled: `python -m tests.benchmarks.convolutions`.

Each row has images of one shape, in float32: 3 × 3 taps and as many features as channels, and a depthwise convolution.
A gradient is that of both operands. Beside minidiff are JAX's `jit` and PyTorch, if they are installed, all on one
thread.

    python -m tests.benchmarks.convolutions [--rounds 9] [--seconds 0.1] [--quick]
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable

# One thread for everyone, said before anyone is imported.
for _name in ("OMP", "OPENBLAS", "MKL"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"
os.environ["NPROC"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy  # noqa: E402

from . import measure  # noqa: E402

#: Images, rows and columns of each, channels, and groups of channels.
ROWS = {
    "56 × 56 × 64": (4, 56, 64, 1),
    "28 × 28 × 128": (4, 28, 128, 1),
    "14 × 14 × 256": (4, 14, 256, 1),
    "7 × 7 × 512": (4, 7, 512, 1),
    "56 × 56 × 128, depthwise": (4, 56, 128, 128),
}

Arrays = tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]
#: The convolution of an image and a kernel, and both cotangents for a third array.
Runs = tuple[Callable[[], object], Callable[[], object]]


def by_minidiff(arrays: Arrays, groups: int) -> Runs:
    import minidiff as md

    x, kernel, ct = arrays
    forward = md.jit(lambda x, kernel: md.nn.conv(x, kernel, groups=groups))
    backward = md.jit(lambda x, kernel, ct: md.vjp(forward, x, kernel)[1](ct))
    return lambda: forward(x, kernel), lambda: backward(x, kernel, ct)


def by_jax(arrays: Arrays, groups: int) -> Runs:
    import jax

    layout = ("NHWC", "HWIO", "NHWC")
    x, kernel, ct = map(jax.numpy.asarray, arrays)
    conv = lambda x, kernel: jax.lax.conv_general_dilated(  # noqa: E731
        x, kernel, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=groups
    )
    forward = jax.jit(conv)
    backward = jax.jit(lambda x, kernel, ct: jax.vjp(conv, x, kernel)[1](ct))
    return lambda: jax.block_until_ready(forward(x, kernel)), lambda: jax.block_until_ready(backward(x, kernel, ct))


def by_torch(arrays: Arrays, groups: int) -> Runs:
    """In PyTorch's order of dimensions, NCHW and OIHW, and its results in that of the others."""
    import torch

    torch.set_num_threads(1)
    x, ct = (torch.tensor(a).permute(0, 3, 1, 2).contiguous() for a in (arrays[0], arrays[2]))
    kernel = torch.tensor(arrays[1]).permute(3, 2, 0, 1).contiguous()
    operands = [a.requires_grad_() for a in (x, kernel)]
    conv = lambda: torch.nn.functional.conv2d(*operands, padding="same", groups=groups)  # noqa: E731

    def forward():
        with torch.no_grad():
            return conv().permute(0, 2, 3, 1)

    def backward():
        of_x, of_kernel = torch.autograd.grad(conv(), operands, ct)
        return of_x.permute(0, 2, 3, 1), of_kernel.permute(2, 3, 1, 0)

    return forward, backward


PEERS = {"minidiff": by_minidiff, "JAX": by_jax, "PyTorch": by_torch}


def runs_of(shape: tuple[int, int, int, int]) -> tuple[dict[str, Callable], dict[str, Callable]]:
    """The convolution and its gradient by each peer that is installed."""
    n, size, channels, groups = shape
    rng = numpy.random.default_rng(0)
    x, ct = rng.normal(size=(2, n, size, size, channels)).astype("f")
    kernel = (rng.normal(size=(3, 3, channels // groups, channels)) / 30).astype("f")
    forward, backward = {}, {}
    for name, prepare in PEERS.items():
        try:
            forward[name], backward[name] = prepare((x, kernel, ct), groups)
        except ImportError:
            continue
    return forward, backward


def check(runs: dict[str, Callable]) -> None:
    """Raise AssertionError if a peer's results differ."""
    expected = runs["minidiff"]()
    for name, run in runs.items():
        for a, b in zip(*[r if isinstance(r, (tuple, list)) else [r] for r in (expected, run())], strict=True):
            numpy.testing.assert_allclose(numpy.asarray(b), a, atol=1e-4 * numpy.abs(a).max(), err_msg=name)


def line(name: str, times: dict[str, list[float]]) -> str:
    """A row: the milliseconds here, and the ratio to each peer's, with quartiles."""
    text = f"{name:40} {1e3 * numpy.median(times['minidiff']):8.2f} ms"
    for peer in [p for p in times if p != "minidiff"]:
        low, high = measure.spread(times, "minidiff", peer)
        text += f"   {measure.ratio(times, 'minidiff', peer):.2f} × {peer} ({low:.2f} to {high:.2f})"
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.convolutions", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.1, help="how long each measurement takes")
    parser.add_argument("--quick", action="store_true", help="tiny images: only shows that all agree")
    options = parser.parse_args(arguments)
    print(f"{platform.machine()}, NumPy {numpy.__version__}, one thread")
    for name, (n, size, channels, groups) in ROWS.items():
        shape = (1, size // 7, 8, min(groups, 8)) if options.quick else (n, size, channels, groups)
        for kind, runs in zip(("forward", "gradient"), runs_of(shape)):
            check(runs)
            print(line(f"{name}, {kind}", measure.times(runs, options.rounds, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
