"""Activations, losses and normalizations, compiled, and their gradients: `python -m tests.benchmarks.activations`.

Each function runs on a long array and on a batch of rows, in float32 and float64, beside JAX's `jit` if it is
installed. A gradient is that of `sum(f(x) * weights)`. Functions along an axis run on rows of 1,024. The last lines are
a step of a transformer block.

    python -m tests.benchmarks.activations [--only NAME …] [--dtypes float32 …] [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy

from . import measure
from .libraries import Library, minidiff, of_jax

# ---------------------------------------------------------------- functions


def layer_norm(lib: Library, x):
    """`nn.layer_norm` without factors: JAX has it as `standardize`."""
    centered = x - lib.np.mean(x, axis=-1, keepdims=True)
    return centered / lib.np.sqrt(lib.np.mean(centered * centered, axis=-1, keepdims=True) + 1e-6)


def rms_norm(lib: Library, x):
    return x / lib.np.sqrt(lib.np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def cross_entropy(lib: Library, x):
    """The cross entropy of each row with the class in the middle."""
    return lib.nn.logsumexp(x, axis=-1) - x[..., x.shape[-1] // 2]


#: Functions of an array's elements.
ELEMENTWISE: dict[str, Callable] = {
    "relu(2x+1)*3": lambda lib, x: lib.nn.relu(2 * x + 1) * 3,
    **{
        name: lambda lib, x, name=name: getattr(lib.nn, name)(x)
        for name in ("relu", "gelu", "silu", "mish", "elu", "celu", "selu", "softplus", "log_sigmoid", "sigmoid",
                     "leaky_relu", "relu6", "hard_sigmoid", "hard_silu", "hard_tanh", "soft_sign", "squareplus", "glu")
    },
    "gelu (erf)": lambda lib, x: lib.nn.gelu(x, approximate=False),
    "tanh": lambda lib, x: lib.np.tanh(x),
}  # fmt: skip
#: Functions of the rows of a matrix.
ROWS: dict[str, Callable] = {
    "softmax": lambda lib, x: lib.nn.softmax(x, axis=-1),
    "log_softmax": lambda lib, x: lib.nn.log_softmax(x, axis=-1),
    "logsumexp": lambda lib, x: lib.nn.logsumexp(x, axis=-1),
    "cross_entropy": cross_entropy,
    "layer_norm": lambda lib, x: lib.nn.layer_norm(x) if hasattr(lib.nn, "layer_norm") else layer_norm(lib, x),
    "rms_norm": lambda lib, x: lib.nn.rms_norm(x) if hasattr(lib.nn, "rms_norm") else rms_norm(lib, x),
}
FUNCTIONS = {**ELEMENTWISE, **ROWS}


def shapes(name: str) -> list[tuple[int, ...]]:
    return [(512, 1024) if name in ROWS else (2**19,), (64, 1024)]


def programs(name: str, lib: Library) -> dict[str, Callable]:
    """The function and its gradient, compiled, by kind."""
    f = FUNCTIONS[name]
    return {
        "forward": lib.jit(lambda x, weights: f(lib, x)),
        "gradient": lib.jit(lambda x, weights: lib.value_and_grad(lambda x: lib.np.sum(f(lib, x) * weights))(x)[1]),
    }


def arguments(name: str, shape: tuple[int, ...], dtype: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """An array, and weights of the function's result."""
    rng = numpy.random.default_rng(0)
    x = rng.normal(0, 2, shape).astype(dtype)
    out = {"glu": (*shape[:-1], shape[-1] // 2), "logsumexp": shape[:-1], "cross_entropy": shape[:-1]}.get(name, shape)
    return x, rng.normal(size=out).astype(dtype)


# ---------------------------------------------------------------- a transformer block


BATCH, TOKENS, WIDTH, HEADS = 8, 128, 256, 4


def block_loss(lib: Library, params, x):
    """The mean of squares of a block: attention and two layers with gelu, each of normalized rows."""

    def norm(x, scale):
        return layer_norm(lib, x) * scale

    def heads(x):
        return x.reshape(BATCH, TOKENS, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)

    first, qkv, out, second, up, down = params
    q, k, v = (heads(norm(x, first) @ w) for w in qkv)
    weights = lib.nn.softmax(q @ k.transpose(0, 1, 3, 2) / (WIDTH // HEADS) ** 0.5, axis=-1)
    x = x + (weights @ v).transpose(0, 2, 1, 3).reshape(BATCH, TOKENS, WIDTH) @ out
    x = x + lib.nn.gelu(norm(x, second) @ up) @ down
    return lib.np.mean(x * x)


def block(lib: Library) -> tuple[Callable, tuple]:
    """A step of gradient descent of a block, and its arguments."""
    rng = numpy.random.default_rng(0)
    draw = lambda *shape: lib.array(rng.normal(0, WIDTH**-0.5, shape).astype("f4"))  # noqa: E731
    ones = lib.array(numpy.ones(WIDTH, "f4"))
    qkv = [draw(WIDTH, WIDTH) for _ in range(3)]
    params = [ones, qkv, draw(WIDTH, WIDTH), ones, draw(WIDTH, 4 * WIDTH), draw(4 * WIDTH, WIDTH)]
    x = lib.array(rng.normal(size=(BATCH, TOKENS, WIDTH)).astype("f4"))

    def step(params, x):
        loss, grads = lib.value_and_grad(lambda params: block_loss(lib, params, x))(params)
        down = lambda p, g: [down(*pair) for pair in zip(p, g)] if isinstance(p, list) else p - 0.01 * g  # noqa: E731
        return loss, down(params, grads)

    return lib.jit(step), (params, x)


# ---------------------------------------------------------------- the table


def rows(only: Sequence[str], dtypes: Sequence[str]) -> Iterator[tuple[str, dict[str, Callable], int]]:
    known = {"minidiff": minidiff()} | ({"JAX": theirs} if (theirs := of_jax()) else {})
    for name in [name for name in only if name in FUNCTIONS]:
        compiled = {library: programs(name, lib) for library, lib in known.items()}
        for dtype, shape, kind in itertools.product(dtypes, shapes(name), ("forward", "gradient")):
            plain, runs = arguments(name, shape, dtype), {}
            for library, lib in known.items():
                args = [lib.array(x) for x in plain]
                runs[library] = lambda f=compiled[library][kind], args=args: f(*args)
            title, eps = f"{name}, {kind}, {dtype}{list(shape)}", 200 * numpy.finfo(dtype).eps
            measure.check(title, runs, rtol=0, atol=eps * max(1.0, float(numpy.max(numpy.abs(runs["minidiff"]())))))
            yield title, runs, 1
    if "block" in only:
        steps = {library: block(lib) for library, lib in known.items()}
        runs = {library: lambda f=f, args=args: f(*args) for library, (f, args) in steps.items()}
        yield "a step of a transformer block, float32", runs, 1


def main(argv: list[str] | None = None) -> list[dict]:
    options = measure.options(
        __doc__, argv, only=(*FUNCTIONS, "block"), dtypes=("float32", "float64"), rounds=9, seconds=0.01, json=""
    )
    print(f"{measure.machine()}, one thread{'' if of_jax() else '; JAX is missing'}")
    return measure.compared(rows(options.only, options.dtypes), options)


if __name__ == "__main__":
    main()
