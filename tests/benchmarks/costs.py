"""The operations of single operations, counted here and by XLA's cost analysis.

It needs JAX: `python -m tests.benchmarks.costs` prints a line for each, and what differs by more than 2%.
"""

from __future__ import annotations

import numpy

import minidiff as md
import minidiff.numpy as np
from spmd.prices.work import work_of_equation

M, N, K = 128, 256, 64

#: A name, a function of a namespace like NumPy's, and the shapes of its operands.
CASES = {
    "matmul": (lambda np, a, b: a @ b, (M, K), (K, N)),
    "batched matmul": (lambda np, a, b: a @ b, (8, M, K), (8, K, N)),
    "einsum": (lambda np, a, b: np.einsum("btf,fhs->bths", a, b), (4, M, K), (K, 8, 16)),
    "attention scores": (lambda np, a, b: np.einsum("bthd,bshd->bhts", a, b), (2, M, 4, K), (2, N, 4, K)),
    "add": (lambda np, a, b: a + b, (M, N), (M, N)),
    "multiply": (lambda np, a, b: a * b, (M, N), (N,)),
    "sum": (lambda np, a: np.sum(a, 0), (M, N)),
    "max": (lambda np, a: np.max(a, 1), (M, N)),
    "where": (lambda np, a, b: np.where(a > b, a, b), (M, N), (M, N)),
    "reshape": (lambda np, a: np.reshape(a, -1), (M, N)),
    "transpose": (lambda np, a: np.transpose(a), (M, N)),
    "concatenate": (lambda np, a, b: np.concatenate([a, b]), (M, N), (K, N)),
}


def here(f, *shapes) -> int:
    tape = md.make_tape(lambda *args: f(np, *args))(*[md.ShapedArray(shape, "float32") for shape in shapes])
    return sum(work_of_equation(eqn).flops for eqn in tape.equations)


def of_xla(f, *shapes) -> float:
    import jax
    import jax.numpy as jnp

    args = [jax.ShapeDtypeStruct(shape, numpy.float32) for shape in shapes]
    actual = jax.jit(lambda *args: f(jnp, *args)).lower(*args).compile().cost_analysis()
    return (actual[0] if isinstance(actual, list) else actual).get("flops", 0.0)


def main() -> None:
    print(f"{'operation':20} {'here':>14} {'XLA':>14}")
    for name, (f, *shapes) in CASES.items():
        ours, theirs = here(f, *shapes), of_xla(f, *shapes)
        mark = "" if abs(ours - theirs) <= 0.02 * max(ours, theirs) else "  differs"
        print(f"{name:20} {ours:14,} {theirs:14,.0f}{mark}")


if __name__ == "__main__":
    main()
