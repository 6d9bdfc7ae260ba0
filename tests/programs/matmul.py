"""The matrix products of `spmd.parallel.matmul`, whole: what each takes, and what theory says that it communicates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import psum
from spmd import P
from spmd.parallel import matmul
from tests.checks.documented import check_traffic, communicated
from tests.checks.meshes import mapped
from tests.checks.of_whole import check_agree
from tests.checks.properties import shows

M, K, N = 4, 6, 5  # rows of a rank, its part of the contracted dimension, columns


class Product(NamedTuple):
    lhs: P
    rhs: P
    collective: str
    backward: str  # its transpose
    calls: Callable  # of the number of ranks
    operand: Callable  # the size of what one call is handed, of the number of ranks
    directions: int = 0


def _once(n: int) -> int:
    """A call, where there is anyone to call."""
    return int(n > 1)


GATHERED, SCATTERED = (P("i", None), P("i", None)), (P(None, "i"), P("i", None))
PRODUCTS = {
    "matmul_all_gather": Product(*GATHERED, "all_gather", "psum_scatter", _once, lambda n: K * N),
    "matmul_all_gather 1": Product(*GATHERED, *["ppermute"] * 2, lambda n: n - 1, lambda n: K * N, 1),
    "matmul_all_gather 2": Product(*GATHERED, *["ppermute"] * 2, lambda n: 2 * (n - 1), lambda n: K * N // 2, 2),
    "matmul_psum_scatter": Product(*SCATTERED, "psum_scatter", "all_gather", _once, lambda n: n * M * N),
    "matmul_psum_scatter 1": Product(*SCATTERED, *["ppermute"] * 2, lambda n: n - 1, lambda n: M * N, 1),
    "matmul_psum_scatter 2": Product(*SCATTERED, *["ppermute"] * 2, lambda n: 2 * (n - 1), lambda n: M * N // 2, 2),
}


def product_of_blocks(name: str) -> Callable:
    """The product, of a rank's blocks along "i"."""
    return partial(getattr(matmul, name.split()[0]), axis_name="i", directions=PRODUCTS[name].directions)


def sharded(name: str, mesh: spmd.Mesh, **options: bool) -> Callable:
    """The product of whole matrices, by blocks on the ranks of a mesh."""
    product = PRODUCTS[name]
    return mapped(product_of_blocks(name), mesh, (product.lhs, product.rhs), P("i", None), **options)


def sharded_loss(name: str, mesh: spmd.Mesh) -> Callable:
    """The sum of the sines of its elements, all-reduced."""
    product = PRODUCTS[name]

    def body(lhs, rhs):
        return psum(mnp.sin(product_of_blocks(name)(lhs, rhs)).sum(), "i")

    return mapped(body, mesh, (product.lhs, product.rhs), P())


def plain(lhs: Any, rhs: Any) -> Any:
    return lhs @ rhs


def operands(n: int, dtype: str = "f8") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    lhs, rhs = rng.standard_normal((n * M, n * K)), rng.standard_normal((n * K, N))
    if np.dtype(dtype).kind == "c":
        lhs, rhs = lhs * (1 + 2j), rhs * (2 - 1j)
    return lhs.astype(dtype), rhs.astype(dtype)


#: With types, without, and where casts are written.
OPTIONS = {}, {"check_rep": False}, {"auto_pbroadcast": False}


@shows("reference", "derivatives", "modes", "counts")
def check_calls(mesh: spmd.Mesh, name: str) -> None:
    """Values and gradients, compiled too, and the calls and bytes that theory says."""
    theory, args = PRODUCTS[name], operands(mesh.size)
    calls = theory.calls(mesh.size)
    sent = {(theory.collective,): (calls, 8 * calls * theory.operand(mesh.size))} if calls else {}
    check_traffic(sharded(name, mesh), mesh, sent, *args, label=lambda label: label[1:2])
    for options in OPTIONS:
        check_agree(sharded(name, mesh, **options), plain, args)
    both = communicated(spmd.communication(md.grad(sharded_loss(name, mesh), (0, 1)))(*args))
    back = [(collective, count) for (way, collective, _), (count, _) in both.items() if way == "backward"]
    assert back == ([(theory.backward, calls)] if calls else [])
