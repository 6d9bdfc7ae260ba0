"""Products and layers on a square grid of ranks, beside whole ones: values, gradients, and what they communicate."""

import itertools
import math
from collections import Counter

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast
from spmd import P
from spmd.examples.cannon import cannon, cannon_nt, cannon_tn, summa
from spmd.examples.tensor_2d import tensor_parallel_2d
from spmd.examples.tensor_3d import tensor_parallel_3d
from spmd.parallel import init_params, loss
from tests.checks.documented import check_traffic, communicated, rows, traffic
from tests.checks.meshes import mesh as mesh_of
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close

M, K, N = 2, 3, 4  # the sizes of a block, of each dimension
AXES = ("rows", "cols")
GRID = P(*AXES)
EXAMPLES_SPLIT = P(("batch", "rows"), "cols")  # of several grids, each has its own examples


def grid(line):
    """The length of a side, the number of grids, and their mesh: a square grid, or two along a third axis."""
    copies = 2 if line.size == 8 else 1
    q = math.isqrt(line.size // copies)
    sizes, names = ((q, q), AXES) if copies == 1 else ((copies, q, q), ("batch", *AXES))
    return q, copies, mesh_of(*sizes, names=names, backend=line.backend)


# ---------------------------------------------------------------- products

#: The whole product, and the shapes of the blocks of a, b and the product.
FORMS = {
    "nn": (lambda a, b: a @ b, (M, K), (K, N), (M, N)),
    "nt": (lambda a, b: a @ b.T, (M, K), (N, K), (M, N)),
    "tn": (lambda a, b: a.T @ b, (K, M), (K, N), (M, N)),
}


def summa_nt(a, b, axes):
    return summa(a, b, axes, transposed="b")


def summa_tn(a, b, axes):
    return summa(a, b, axes, transposed="a")


PRODUCTS = dict(zip((summa, summa_nt, summa_tn, cannon, cannon_nt, cannon_tn), [*FORMS] * 2))
#: The product in the docstring's table.
VALUES = {summa: "A @ B", summa_nt: "A @ Bᵀ", summa_tn: "Aᵀ @ B"}


def on_grid(product, mesh, **options):
    return spmd.shard_map(lambda a, b: product(a, b, AXES), mesh, in_specs=(GRID, GRID), out_specs=GRID, **options)


def on_grids(product, mesh):
    """On several grids, each of which has a part of the product's first dimension, and all of b."""
    a = P("rows", ("batch", "cols")) if PRODUCTS[product] == "tn" else EXAMPLES_SPLIT
    body = lambda a, b: product(a, pbroadcast(b, "batch"), AXES)  # noqa: E731
    return spmd.shard_map(body, mesh, in_specs=(a, GRID), out_specs=EXAMPLES_SPLIT)


def operands(form, q, copies=1):
    """a, b and weights for the product: whole matrices."""
    sizes = {M: copies * q * M, K: q * K, N: q * N}
    return [np.random.default_rng(k).normal(size=[sizes[n] for n in block]) for k, block in enumerate(FORMS[form][1:])]


def documented(product, q):
    """Return the table in its module's docstring: {(direction, collective, axes): (count, bytes)}."""
    blocks = {name: m * n for name, (m, n) in zip("abc", FORMS[PRODUCTS[product]][1:])} | {"q": q}
    if product in VALUES:
        table = [cells for value, *cells in rows(summa, 2) if value == VALUES[product]]
    else:
        ((_, _, _, *cells),) = (cells for cells in rows(product) if cells[0] == product.__name__)
        table = [[direction, *cells] for direction in ("forward", "backward")]
    return traffic(table, blocks) if q > 1 else {}


@shows("reference", "derivatives", "counts", "modes")
def check_product(line, product):
    """Values and gradients are those of whole matrices; what is communicated is what the docstring says.

    Several grids also sum the gradient of b, which all have.
    """
    (q, copies, mesh), form = grid(line), PRODUCTS[product]
    a, b, weights = operands(form, q, copies)
    split = on_grid(product, mesh) if copies == 1 else on_grids(product, mesh)
    out, pull = md.vjp(FORMS[form][0], a, b)

    def value_and_gradients(a, b):
        out, pull = md.vjp(split, a, b)
        return out, pull(weights)

    with_axes = 3 if product in VALUES else 2
    sums = {("backward", "psum", "batch")[:with_axes]: (1, b.nbytes // q**2)} if copies > 1 else {}
    expected = documented(product, q) | sums
    actual = check_traffic(value_and_gradients, mesh, expected, a, b, label=lambda label: label[:with_axes])
    assert_trees_close(actual, (out, pull(weights)), rtol=1e-10)


# ---------------------------------------------------------------- networks

SIZES, EXAMPLES = (12, 6, 18, 12), 24


def network(sizes=SIZES, examples=EXAMPLES):
    rng = np.random.default_rng(0)
    return init_params(rng, sizes), (rng.normal(size=(examples, sizes[0])), rng.normal(size=(examples, sizes[-1])))


@shows("reference", "derivatives", "counts", "modes")
def check_network(line, product):
    """Loss and gradients are those of the whole network; with SUMMA, it communicates what the docstring says."""
    (q, copies, mesh), (params, batch) = grid(line), network()
    split = tensor_parallel_2d(mesh, product=product)  # on several grids, each has its own examples
    expected = None
    if product is summa and q > 1:
        names = {"q": q, "L": len(params), "N": EXAMPLES // copies, "inputs": sum(SIZES[:-1])}
        names |= {"outputs": sum(SIZES[1:]), "first": SIZES[0], "weights": sum(W.size for W, _ in params)}
        expected = traffic(rows(tensor_parallel_2d), names)
        if copies > 1:  # each parameter is cast to vary along `batch` first, so the biases' sums are one by one
            biases, weights = names["outputs"] // q, names["weights"] // q**2
            expected["backward", "psum", "rows"] = len(params), 8 * biases
            expected["forward", "psum", "batch", "rows"] = expected.pop(("forward", "psum", "rows"))
            expected["backward", "psum", "batch"] = 1, 8 * (biases + weights)
    actual = check_traffic(md.value_and_grad(split), mesh, expected, params, batch)
    assert_trees_close(actual, md.value_and_grad(loss)(params, batch), rtol=1e-10)


@shows("reference", "derivatives", "counts", "modes")
def check_cube(line):
    """On a cube, too. Each layer gathers its operands, scatters its product, and exchanges two axes with the next."""
    q = round(line.size ** (1 / 3))
    sizes, examples = ((9, 18, 36, 9), 36) if q == 3 else ((8, 16, 4, 8), 16)
    mesh, (params, batch) = mesh_of(q, q, q, backend=line.backend), network(sizes, examples)
    split = tensor_parallel_3d(mesh)
    actual = check_traffic(md.value_and_grad(split), mesh, None, params, batch)
    assert_trees_close(actual, md.value_and_grad(loss)(params, batch), rtol=1e-10)
    if q == 1:
        return
    expected, report = Counter(), spmd.communication(md.grad(split))(params, batch)
    for n, (k, m) in enumerate(itertools.pairwise(sizes)):
        columns, terms = ("j", "k") if n % 2 == 0 else ("k", "j")
        a, b, c = (8 * rows * width // q**3 for rows, width in ((examples, k), (k, m), (examples, m)))
        expected["forward", "all_gather", columns] += a
        expected["forward", "all_gather", "i"] += b
        expected["forward", "psum_scatter", terms] += q * c
        expected["backward", "all_gather", terms] += c
        expected["backward", "psum_scatter", "i"] += q * b
        if n:
            expected["backward", "psum_scatter", columns] += q * a
    assert {label: n for label, (_, n) in communicated(report).items() if "psum" not in label} == expected
