"""Sharded arrays on MPI ranks: the same values, specs and communication as on simulated ones."""

import copy
import functools
import pickle

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.compiler.jit import Jitted
from spmd import P
from tests.checks.whole import whole
from tests.programs import sharded_loop as sharded_loop_programs
from tests.programs import vmapped as vmapped_programs

RANKS = MPI.COMM_WORLD.size
SHAPES = {2: [(2,)], 4: [(4,), (2, 2)]}
X = numpy.sin(numpy.arange(24.0 * 24)).reshape(24, 24)
W = numpy.cos(numpy.arange(24.0 * 24)).reshape(24, 24)
everywhere = pytest.mark.parallel([2, 4])


@functools.cache
def mesh_of(shape, backend="mpi"):
    return spmd.make_mesh(shape, ("i", "j", "k")[: len(shape)], backend=backend)


def meshes():
    return [mesh_of(shape) for shape in SHAPES[RANKS]]


def specs_of(mesh):
    one, two = mesh.axis_names[0], mesh.axis_names[-1]
    specs = [P(one), P(None, one), P(two), P(one, two) if one != two else P(), P((two, one)) if one != two else P()]
    return list(dict.fromkeys(specs))


def run_and_count(f, mesh, *args, counted=True):
    """The result of `f`, having checked that it communicated as its report says."""
    mesh.reset_calls()
    out = f(*args)
    if not counted:
        return out
    report = spmd.communication(f, optimized=isinstance(f, Jitted))(*args)
    assert (mesh.calls, sum(mesh.bytes.values())) == (report.counts, report.bytes)
    return out


@everywhere
def test_every_redistribution():
    for mesh in meshes():
        for have in specs_of(mesh):
            x = run_and_count(lambda x, m=mesh, s=have: spmd.distribute(x, m, s), mesh, X)
            for want in specs_of(mesh):
                if not have.axes:
                    continue
                y = run_and_count(lambda x, s=want: spmd.reshard(x, s), mesh, x)
                if want.axes:
                    assert y.spec == want
                    numpy.testing.assert_array_equal(y.local, spmd.distribute(X, mesh, want).local)
                numpy.testing.assert_array_equal(whole(y), X)
                g = run_and_count(md.grad(lambda x, s=want: np.sum(spmd.reshard(x, s) ** 2)), mesh, x)
                assert g.spec == have
                numpy.testing.assert_array_equal(g.gather(), 2 * X)


def _doubled(x):
    """By a `shard_map` of its own, which splits what is split already in another way."""
    mesh = meshes()[-1]
    return spmd.shard_map(
        lambda x: 2 * np.sin(x), mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names)
    )(x)


def _closing_over(x):
    mesh = meshes()[-1]
    axes = P(mesh.axis_names)
    return spmd.shard_map(lambda w: np.sin(w @ x), mesh=mesh, in_specs=axes, out_specs=axes)


PROGRAMS = {
    "layers": lambda x, w: np.mean(np.tanh(np.tanh(x @ w / 24) @ w.T) ** 2),
    "softmax": lambda x, w: -np.mean(md.nn.log_softmax(x @ w, axis=1)[:, 3]),
    "reductions": lambda x, w: np.sum(x.max(axis=0) * w.mean(axis=1) + x.var(axis=1)) + x.sum(axis=0) @ w[0],
    "shapes": lambda x, w: np.sum(np.concatenate([x.T, w]).reshape(4, 12, 24)[1:3] * np.stack([w[:12], x[12:]])),
    "gathered": lambda x, w: np.sum(np.roll(x, 3) * np.linalg.inv(w @ w.T / 24 + 2 * np.eye(24))),
    "a loop": lambda x, w: np.sum(md.scan(lambda c, r: (np.tanh(c + r @ w), c.sum()), np.zeros(24), x[:4])[0]),
    "computed again": lambda x, w: np.sum(md.checkpoint(lambda x: np.tanh(np.sum(x @ w, axis=0) + x) @ w.T)(2 * x)),
    "vmap": lambda x, w: np.sum(md.vmap(lambda r: np.sin(r @ w) * r.max(), out_axes=1)(x)),
    "of each": lambda x, w: np.sum(md.vmap(md.grad(lambda r, w: np.sum(np.sin(r @ w))), (0, None))(x, w) ** 2),
    "slices": lambda x, w: np.sum(x[5:9] @ w[::-1]) + np.sum(np.sin(x[::2, 10:14] * w[1::2, 3:7])),
    "another dimension": lambda x, w: np.sum(np.sort(x, axis=0) * np.cumsum(w, axis=1)),
    "a shard_map": lambda x, w: np.sum(_doubled(x * w.sum(axis=1)) @ w),
    "updates": lambda x, w: np.sum(np.at(np.at(x)[1].set(w[0]))[[3, 0]].set(w[1:3]) * np.at(w)[:, 2::5].add(1.0)),
    "look-ups": lambda x, w: np.sum(np.sin(x[[2, -3, 2]])) + np.sum(x[5] * w[1, -1]),
    "closed over": lambda x, w: np.sum(_closing_over(x)(w)),
    "indices": lambda x, w: np.sum(x[np.array([3, 1, 4, 1, 5])] @ w[:, [9, 2, 6]]) + x[0] @ w[:, 0],
}


@everywhere
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_those_of_the_whole(name):
    """Values, gradients with their specs, tangents, compiled ones; and the calls made. Specs take turns."""
    f, both = PROGRAMS[name], md.value_and_grad(PROGRAMS[name], (0, 1))
    value, expected = both(X, W)
    expected = [whole(e) for e in expected]
    loop = name == "a loop"  # what it carries may be laid out in another way before its first step than after it
    for mesh in meshes()[-1:] if name in ("a shard_map", "closed over") else meshes():
        specs, turn = specs_of(mesh), list(PROGRAMS).index(name)
        xs, ws = specs[turn % len(specs)], specs[(2 * turn + 1) % len(specs)]
        x, w = spmd.distribute(X, mesh, xs), spmd.distribute(W, mesh, ws)
        for way in (both, md.jit(both)):
            actual, grads = run_and_count(way, mesh, x, w, counted=not loop or isinstance(way, Jitted))
            numpy.testing.assert_allclose(actual, value, rtol=1e-9)
            for g, e, spec in zip(grads, expected, (xs, ws)):
                assert getattr(g, "spec", P()) == spec or not spec.axes
                numpy.testing.assert_allclose(whole(g), e, rtol=1e-7, atol=1e-9)
        tangent = run_and_count(lambda x, w: md.jvp(f, (x, w), (x, w)), mesh, x, w, counted=not loop)[1]
        numpy.testing.assert_allclose(whole(tangent), sum(np.sum(e * a) for e, a in zip(expected, (X, W))))


@everywhere
def test_what_is_not_here_says_so():
    for mesh in meshes():
        y = spmd.distribute(X, mesh, P(mesh.axis_names))
        mesh.reset_calls()
        shown = repr(y), str(y)
        assert mesh.calls == {}  # printing never communicates
        assert f"; rank {mesh.rank} at mesh coordinates " in shown[0]
        with pytest.raises(ValueError, match=r"has only a block of it.*Call \.gather\(\) on every rank"):
            numpy.asarray(y)
        with pytest.raises(TypeError, match=r"cannot be pickled.*Pickle x\.gather\(\), which every rank must call"):
            pickle.dumps({"w": y})
        assert copy.deepcopy({"w": y})["w"] is y
        assert mesh.calls == {}
        assert y.tolist() == X.tolist()  # all ranks gather
        assert mesh.calls == {"all_gather": 1}


@everywhere
def test_meshes_of_the_same_ranks_are_one():
    """Whatever communicators they work on; those whose ranks are in another order are not."""
    one, again = (spmd.make_mesh((RANKS,), ("i",)) for _ in range(2))
    turned = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
    other = spmd.make_mesh((RANKS,), ("i",), comm=turned)
    assert one.is_like(again) and not one.is_like(other) and not one.is_like(mesh_of((RANKS,), "simulated"))
    x, y, z = (spmd.distribute(X, mesh, P("i")) for mesh in (one, again, other))
    numpy.testing.assert_array_equal(run_and_count(lambda x: x + y, one, x).local, 2 * x.local)
    assert one.calls == {} and again.calls == {}
    numpy.testing.assert_array_equal((x + z).local, 2 * x.local)
    assert other.calls == {"all_gather_invariant": 1}


@everywhere
def test_elements_of_a_batch_are_resharded():
    for mesh in meshes():
        axes = mesh.axis_names
        a = numpy.arange(64.0).reshape(8, 8)
        x = spmd.distribute(a, mesh, P(axes))
        stays = md.vmap(lambda row: spmd.reshard(row, P()))
        split = md.vmap(lambda row, spec=P(axes): spmd.reshard(row, spec))
        for f, spec, calls in ((stays, P(axes), {}), (split, P(None, axes), {"all_to_all": 1})):
            for run in (f, md.jit(f)):
                mesh.reset_calls()
                actual = run(x)
                assert actual.spec == spec
                assert mesh.calls == (calls if mesh.size > 1 else {})
                numpy.testing.assert_array_equal(actual.gather(), a)


@everywhere
def test_dimensions_of_size_0_backwards():
    for mesh in meshes():
        for f in (np.flip, lambda x: x[::-2], md.jit(np.flip), np.sum):
            for spec in specs_of(mesh):
                x = numpy.zeros((0, 8))
                np.testing.assert_array_equal(whole(f(spmd.distribute(x, mesh, spec))), f(x), strict=True)


@everywhere
@pytest.mark.parametrize("program", vmapped_programs.PROGRAMS, ids=lambda f: f.__name__)
def test_loops_and_branches_under_vmap_run_on_each_rank(program):
    for mesh in meshes():
        spec = P(mesh.axis_names if program is vmapped_programs.branches else mesh.axis_names[-1])
        vmapped_programs.check(program, mesh, spec)
        mesh.reset_calls()
        vmapped_programs.check(program, mesh, spec, md.jit)
        calls = {name: n for name, n in mesh.calls.items() if name not in ("all_gather", "all_gather_invariant")}
        assert calls == vmapped_programs.PROGRAMS[program]


@everywhere
@pytest.mark.parametrize("program", sharded_loop_programs.PROGRAMS, ids=lambda f: f.__name__)
def test_the_gradient_of_a_loop_takes_one_sum(program):
    for mesh in meshes():
        sharded_loop_programs.check(program, mesh, P(mesh.axis_names[-1]))
