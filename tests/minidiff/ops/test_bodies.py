"""Operations on blocks in the bodies of `shard_map` agree with those on each block alone, and their gradients too."""

import numpy as np

import minidiff as md
import minidiff.numpy as mnp
from collectives import axis_index
from minidiff.sparse import Triplets
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_kinds
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

SMALL = np.random.default_rng(1).standard_normal((2, 2)) + 2 * np.eye(2)


def decompositions(x, w):
    x, w = x.reshape(2, 2) + SMALL, w.reshape(2, 2)
    values, v = np.linalg.eigh(x + x.T)
    u, s, vh = np.linalg.svd(w)
    y = np.sin(np.linalg.solve(x, v * values @ u) @ vh + np.einsum("ij,jk,k->ik", x, w, s))
    return y.sum() + np.linalg.norm(w) * np.linalg.det(x)


#: Functions of a block of 4 and of 4 numbers that all ranks have.
BODIES = [
    lambda x, w: np.var(x * w) + np.prod(w) * np.prod(x),
    lambda x, w: np.cumprod(x * w) @ np.cumprod(w),
    lambda x, w: np.sort(x) @ w + np.sort(w) @ x,
    lambda x, w: np.quantile(x * w, [0.2, 0.5]).sum() + np.nanmedian(x + w),
    lambda x, w: w[np.searchsorted(np.sort(x), np.array([0.1, 0.2])) % 4].sum(),
    lambda x, w: np.histogram(x, 3, (-1.0, 1.0), weights=w)[0][1],
    lambda x, w: np.sum(np.where(np.isin(x, w), x, w) * x) + np.sum(np.gradient(x, np.sort(w))),
    decompositions,
    lambda x, w: np.sum(np.sin(Triplets(np.array([0, 2, 0]), np.array([3, 0, 1]), x[:3], (3, 4)) @ w)),
    lambda x, w: np.sum(np.sin(Triplets(np.array([0, 2, 0]), np.array([3, 0, 1]), w[:3], (3, 4)) @ x)),
]


@each("f", BODIES)
def test_bodies(f):
    x, w = np.random.default_rng(0).standard_normal((3, 4)), np.random.default_rng(1).standard_normal(4)
    blocks = mapped(lambda x, w: f(x[0], w)[None], mesh(3), (P("i"), P()), P("i"))
    scale = np.array([1.0, 2.0, -1.0])
    actual = md.value_and_grad(lambda x, w: (scale * blocks(x, w)).sum(), argnums=(0, 1))(x, w)
    expected = md.value_and_grad(lambda x, w: scale @ np.stack([f(r, w) for r in x]), argnums=(0, 1))(x, w)
    assert_trees_close(actual, expected)


def own_columns(x, y):
    """Each rank's own block of columns of x, which all have; and y, with it in the block's place."""

    def body(x, y):
        block = md.dynamic_slice_in_dim(x, 2 * axis_index("i"), 2, 1)
        return block, md.dynamic_update_slice_in_dim(y, np.sin(block), 2 * axis_index("i"), 1)

    return mapped(body, mesh(4), (P(), P("i")), P("i"))(x, y)


def columns_of_arrays(x, y):
    columns = [x[:, 2 * i : 2 * i + 2] for i in range(4)]
    rows = [mnp.at(y[2 * i : 2 * i + 2])[:, 2 * i : 2 * i + 2].set(np.sin(c)) for i, c in enumerate(columns)]
    return np.concatenate(columns), np.concatenate(rows)


def test_each_rank_has_its_own_start():
    x, y = np.random.default_rng(0).standard_normal((2, 2, 8))
    check_kinds(own_columns, (x, np.tile(y, (4, 1))), columns_of_arrays, ("value", "grad", "jvp"))
