"""Checks of an algorithm against the collective that it implements, on any mesh: simulated, or of MPI ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy
from numpy.testing import assert_allclose, assert_array_equal

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import algorithms, axis_index, psum
from spmd import P
from tests.checks.collective_cases import random
from tests.checks.meshes import mesh as grid
from tests.checks.properties import shows
from tests.checks.whole import whole


class Case(NamedTuple):
    """An algorithm and the collective that it is compared with, as functions of a block of this shape and axes."""

    ours: Callable
    theirs: Callable
    shape: tuple[int, ...]


def _all_reduces(n):
    return [((2 * n,), {}), ((2, 5), {}), ((), {}), ((3,), {}), ((0, 2), {}), ((2, n, 3), {})]


def _rooted_all_reduces(n):
    return [(shape, {"root": root}) for (shape, _), root in zip(_all_reduces(n), [n - 1, 0, n // 2] * 2)]


def _gathers(n):
    places = [((2, 3), {"axis": 1}), ((2, 3), {"axis": -1, "tiled": True}), ((), {}), ((5,), {"tiled": True})]
    return [*places, ((0, 2), {}), ((3, 1, 2), {"axis": -3}), ((1,), {})]


def _scatters(n):
    places = [((2, n, 3), {"scatter_dimension": 1}), ((3 * n, 2), {"tiled": True}), ((n,), {})]
    return [*places, ((2, 3 * n), {"scatter_dimension": -1, "tiled": True}), ((n, 0), {})]


def _exchanges(n):
    places = [((2, n, 3), (1, 2), {}), ((2 * n, 3), (0, 1), {"tiled": True}), ((n,), (0, 0), {})]
    places += [((3, 2 * n), (-1, 0), {"tiled": True}), ((2, n, 3), (1, 0), {})]
    return [(shape, {"split_axis": split, "concat_axis": concat, **more}) for shape, (split, concat), more in places]


def _rooted(n):
    return [(shape, {"root": root}) for shape, root in [((2, 3), n // 2), ((), 0), ((4,), n - 1), ((0,), 0)]]


def _scans(n):
    options = [{"reverse": reverse, "exclusive": exclusive} for reverse in (False, True) for exclusive in (False, True)]
    return list(zip([(2, 3), (), (0, 2), (4,)], options))


def _rooted_gathers(n):
    return [(shape, {**options, "root": root}) for (shape, options), root in zip(_gathers(n), [n - 1, 0, n // 2] * 3)]


def _rooted_scatters(n):
    return [
        (shape, {**{k.replace("scatter_dimension", "axis"): v for k, v in options.items()}, "root": root})
        for (shape, options), root in zip(_scatters(n), [n - 1, 0, n // 2] * 3)
    ]


def always(n):
    return True


def powers_of_two(n):
    return n & (n - 1) == 0


#: For each algorithm: what it is compared with, on which operands, and over which numbers of ranks it runs.
ALGORITHMS: dict[str, tuple[Callable, Callable, Callable]] = {
    "bidirectional_ring_all_gather": (collectives.all_gather, _gathers, always),
    "bidirectional_ring_all_reduce": (psum, _all_reduces, always),
    "bidirectional_ring_reduce_scatter": (collectives.psum_scatter, _scatters, always),
    "binomial_tree_broadcast": (collectives.broadcast_varying, _rooted, always),
    "binomial_tree_gather": (collectives.gather, _rooted_gathers, always),
    "binomial_tree_reduce": (collectives.reduce, _rooted, always),
    "binomial_tree_scatter": (collectives.scatter, _rooted_scatters, always),
    "bruck_all_gather": (collectives.all_gather, _gathers, always),
    "halving_doubling_all_reduce": (psum, _all_reduces, always),
    "pairwise_all_to_all": (collectives.all_to_all, _exchanges, always),
    "parameter_server_all_reduce": (psum, _rooted_all_reduces, always),
    "recursive_doubling_all_gather": (collectives.all_gather, _gathers, powers_of_two),
    "recursive_doubling_all_reduce": (psum, _all_reduces, always),
    "recursive_doubling_scan": (collectives.pscan, _scans, always),
    "recursive_halving_reduce_scatter": (collectives.psum_scatter, _scatters, powers_of_two),
    "ring_all_gather": (collectives.all_gather, _gathers, always),
    "ring_all_reduce": (psum, _all_reduces, always),
    "ring_reduce_scatter": (collectives.psum_scatter, _scatters, always),
    "tree_all_reduce": (psum, _rooted_all_reduces, always),
}


def runs_on(name: str, n: int) -> bool:
    return ALGORITHMS[name][2](n)


def cases(name: str, n: int) -> list[Case]:
    """An algorithm on operands of several shapes, with several options; none where it does not run on n ranks."""
    theirs, operands, runs = ALGORITHMS[name]
    findings = []
    for shape, options in operands(n) if runs(n) else []:
        known = {k: v for k, v in options.items() if k != "root" or theirs is not psum}
        ours = functools.partial(getattr(algorithms, name), **options)
        findings.append(Case(ours, functools.partial(theirs, **known), shape))
    return findings


def mapped(mesh, f, axes, **options) -> Callable:
    """`f` of each rank's entry of a stack of blocks; the results are stacked likewise."""
    spec = P(mesh.axis_names)
    return spmd.shard_map(lambda b: f(b[0], axes)[None], mesh=mesh, in_specs=spec, out_specs=spec, **options)


@shows("reference", "types")
def check_value(mesh, case: Case, axes="i", dtype="float64", **options) -> None:
    x = random((mesh.size, *case.shape), dtype)
    ours, theirs = (whole(mapped(mesh, f, axes, **options)(x)) for f in (case.ours, case.theirs))
    assert ours.dtype == theirs.dtype
    if ours.dtype.kind in "fc":  # sums are added up in another order
        assert_allclose(ours, theirs, rtol=1e-5 if ours.dtype.itemsize == 4 else 1e-12)
    else:
        assert_array_equal(ours, theirs)


@shows("types")
def check_types(mesh, case: Case) -> None:
    """The shape and the dtype of the collective's result; and what comes of messages varies."""

    def body(x, f):
        findings.append(md.typeof(f(x, "i")))
        return 0.0

    findings: list = []
    for f in (case.ours, case.theirs):
        inside = functools.partial(body, f=f)
        spmd.shard_map(inside, mesh=mesh, in_specs=P(), out_specs=P())(numpy.ones(case.shape))
    ours, theirs = findings
    assert ours == md.ShapedArray(theirs.shape, theirs.dtype, mesh.axis_names)


@shows("derivatives")
def check_derivatives(mesh, case: Case, axes="i") -> None:
    """The gradient, and how it changes (forward over reverse), of a function that is not linear: the collective's."""
    x = random((mesh.size, *case.shape), "float64")
    v = random((mesh.size, *case.shape), "float64", seed=1)

    def loss(f):
        def body(b, axes):
            out = f(np.sin(b), axes)
            return np.sum(np.cos(out) * (1 + axis_index(axes)) * np.exp(out))

        out_specs = P(mesh.axis_names)
        total = spmd.shard_map(lambda b: body(b[0], axes)[None], mesh=mesh, in_specs=out_specs, out_specs=out_specs)
        return lambda x: np.sum(total(x) * numpy.arange(1, mesh.size + 1))

    results = [md.jvp(md.grad(loss(f)), (x,), (v,)) for f in (case.ours, case.theirs)]
    for ours, theirs in zip(*results):
        assert_allclose(whole(ours), whole(theirs), rtol=1e-10, atol=1e-12)


@shows("reference", "derivatives", "types")
def check_algorithm(mesh, name: str) -> None:
    """An algorithm in all its cases; of four ranks also along one axis of a grid, and along both in the other order."""
    for k, case in enumerate(cases(name, mesh.size)):
        check_value(mesh, case)
        if k == 0:
            check_derivatives(mesh, case)
    for axes, size in (("y", 2), (("y", "x"), 4)) if mesh.size == 4 else ():
        check_value(grid(2, 2, names="xy", backend=mesh.backend), cases(name, size)[0], axes)


# ---------------------------------------------------------------- what they send

ITEM = 8  # bytes of a number


def whole_and_block(name, n):
    """An operand that can be cut as the algorithm likes, and the size of the whole."""
    if "gather" in name:
        return (6, 2), n * 12 * ITEM
    return (2 * n * math.lcm(*range(1, 9)), 1), 2 * n * math.lcm(*range(1, 9)) * ITEM


def call(name):
    f = functools.partial(getattr(algorithms, name), axis_name="i")
    if name == "pairwise_all_to_all":
        return functools.partial(f, split_axis=0, concat_axis=0, tiled=True)
    return functools.partial(f, tiled=True) if name.endswith("scatter") else f
