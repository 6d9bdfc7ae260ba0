"""`md.scipy.sparse.linalg` on ranks: systems in bodies and on sharded arrays, against the same systems of whole arrays.

Programs are triples: a function of a sum over ranks (which is the identity on whole arrays) and of arrays, their specs,
and the specs of the result.
"""

import functools

import numpy as np

import minidiff as md
import spmd
from collectives import psum
from minidiff.scipy.sparse.linalg import cg, gmres
from spmd import P
from tests.checks.of_whole import check_agree, gradient
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close

METHODS = {"cg": cg, "gmres": gmres}
FINE = {"rtol": 1e-12}


def chain(solve, block, k, b):
    """A tridiagonal system, of which each rank has some rows: one vector of all ranks."""

    def product(x):
        p = spmd.halo(x, 1, ("i",), "zeros") if block else np.pad(x, 1)
        return (2 + k) * x - p[2:] - p[:-2]

    return solve(product, b, b + 1, M=lambda x: x / (2 + k), **FINE)[0]


def normal_equations(solve, block, w, b):
    """The rows of a matrix are split, and the vector is the same on all ranks."""
    total = (lambda x: psum(x, "i")) if block else lambda x: x
    return solve(lambda x: total(w.T @ (w @ x)) + x, b[:3], **FINE)[0]


def bordered(solve, block, w, b):
    """A tree: some unknowns are split, some are the same on all ranks."""
    total = (lambda x: psum(x, "i")) if block else lambda x: x
    product = lambda t: {"x": 9 * t["x"] + w @ t["z"], "z": 9 * t["z"] + total(w.T @ t["x"])}  # noqa: E731
    return solve(product, {"x": np.sin(w).sum(1), "z": b[:3]}, **FINE)[0]


def systems_of_their_own(solve, block, k, b):
    """A does not communicate: each rank solves its systems, in as many steps as these take."""
    return md.vmap(lambda k, b: solve(lambda x: k * x + 0.1 * x.sum(), b * np.ones(3), **FINE)[0])(k, b)


#: The program, the specs of its operands and of its result; w is [rows, 3], k and b are [rows].
PROGRAMS = {
    "chain": (chain, (P("i"), P("i")), P("i")),
    "normal_equations": (normal_equations, (P("i"), P()), P()),
    "bordered": (bordered, (P("i"), P()), {"x": P("i"), "z": P()}),
    "systems_of_their_own": (systems_of_their_own, (P("i"), P("i")), P("i")),
}


def operands(name, mesh):
    rows = 2 * mesh.size
    numbers = np.cos(np.arange(3.0 * rows)).reshape(rows, 3)
    first = numbers if name in ("normal_equations", "bordered") else 2 + numbers[:, 0]
    return first, np.sin(np.arange(1.0, 1 + max(rows, 3)))[: max(rows, 3) if first is numbers else rows]


@shows("reference", "derivatives", "modes", "types")
def check_body(mesh, name, method, typed=True):
    """Values, gradients, and second derivatives, eager and compiled."""
    program, in_specs, out_specs = PROGRAMS[name]
    f = functools.partial(program, METHODS[method], False)
    body = functools.partial(program, METHODS[method], True)
    on_ranks = spmd.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=typed)
    args = operands(name, mesh)
    check_agree(on_ranks, f, args, rtol=1e-8, atol=1e-9)
    if name == "chain" and typed:
        second = [gradient(gradient(g))(*args) for g in (on_ranks, f)]
        assert_trees_close(*second, rtol=1e-8, atol=1e-9)


@shows("reference", "derivatives", "modes")
def check_sharded(mesh, method):
    """The same program on arrays that are split over the ranks."""
    f, args = functools.partial(chain, METHODS[method], False), operands("chain", mesh)
    check_agree(f, f, args, [spmd.distribute(x, mesh, P("i")) for x in args], rtol=1e-8, atol=1e-9)


@shows("counts")
def check_sums(mesh):
    """A step of `cg` has two sums over the ranks, in bodies and on sharded arrays, with a preconditioner too."""
    k, b = [spmd.distribute(x, mesh, P("i")) for x in operands("chain", mesh)]

    def solver(block, most):
        solve = lambda *args, rtol, M: cg(*args, maxiter=most, rtol=1e-30, M=M)  # noqa: E731
        f = lambda k, b: chain(solve, block, k, b)  # noqa: E731
        return spmd.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i")) if block else f

    for block in (True, False):
        sums = []
        for most in (1, 3):
            mesh.reset_calls()
            solver(block, most)(k, b)
            sums.append(mesh.calls["psum"])
        assert sums == [2 + 2 * 1, 2 + 2 * 3]  # and at first, the norms of b and of its residual
        rows = [line.split() for line in str(spmd.communication(solver(block, 3))(k, b)).splitlines()]
        assert sum(int(row[2]) for row in rows if row[:1] == ["psum"]) == 4  # the report has one step
        assert "contextlib" not in str(rows)  # but the user's lines
