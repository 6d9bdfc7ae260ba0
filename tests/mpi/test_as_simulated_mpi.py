"""Programs on MPI ranks: the numbers, types and specs of simulated ranks, by the same calls of the same bytes.

A program is a function of a mesh. What it computes is right on simulated ranks, where it is tested with whole arrays.
"""

import itertools

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, broadcast, pmax, pscatter, psum
from collectives.ops import shift
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.checks.whole import whole
from tests.programs import control, state, vmapped
from tests.programs import key as key_programs
from tests.programs.rank import random_program

RANKS = MPI.COMM_WORLD.size
few = pytest.mark.parallel([2, 4])
LINE, PLANE = (RANKS,), (max(RANKS // 2, 1), min(RANKS, 2))
SQUARE = {4: (2, 2), 8: (2, 2, 2)}.get(RANKS, LINE)


def outcome(program, on):
    """Whole results of a program, their specs, and the calls that it makes."""
    on.reset_calls()
    leaves = md.tree.leaves(program(on))
    calls = dict(on.calls), dict(on.bytes)
    return [(whole(x), spmd.spec_of(x)) for x in leaves], calls


def check_alike(program, *shape, counted=True, **tolerance):
    """Compare a program on MPI ranks with simulated ones, which count what all ranks call."""
    (results, calls), (expected, simulated) = (outcome(program, mesh(*shape, backend=b)) for b in ("mpi", "simulated"))
    for (x, spec), (y, spec_of_y) in zip(results, expected, strict=True):
        assert (x.dtype, x.shape, spec) == (y.dtype, y.shape, spec_of_y)
        numpy.testing.assert_allclose(x, y, **{"rtol": 1e-9, "atol": 1e-9, **tolerance})
    assert calls == simulated or not counted


def all_ways(f, *args):
    """Values, tangents and gradients of a function, eagerly and compiled."""

    def loss(*xs):
        return sum(np.sum(x * x) for x in md.tree.leaves(f(*xs)))

    gradient = md.grad(loss, tuple(range(len(args))))
    return [*(g(*args) for g in (f, md.jit(f), gradient, md.jit(gradient))), md.jvp(f, args, args)]


# ---------------------------------------------------------------- random programs


@pytest.mark.parallel([1, 2, 3, 4, 8])
@each("seed, instructions", [(340, "further"), (1661, "further"), (2, "control")])  # on 2 ranks, most that there are
def test_random_programs_of_all_collectives(seed, instructions):
    program = random_program(seed, SQUARE, **{instructions: True})
    args, shape = program.example(seed), program.shape.values()
    check_alike(lambda on: all_ways(program.on_ranks(on, check_rep=seed % 2 == 0), *args), *shape)


@few
@each("seed", range(4))
def test_random_programs_of_states(seed):
    program = numpy.random.default_rng(seed).integers(0, 60, (4, 4)).tolist()

    def run(on):
        args, loss = state.example(on), state.loss_of(program, on)
        return state.sharded(program, on)(*args), md.jit(md.grad(loss, (0, 1, 2, 3)))(*args)

    check_alike(run, RANKS)


# ---------------------------------------------------------------- bodies

F4, ROWS = np.arange(8, dtype="f4"), np.sin(np.arange(48.0)).reshape(8, 6)


def of_other_variance(x):
    """The plan of a call is cached, and executes others of its name, shape and dtype."""
    return [psum(v, "i") for v in (x, psum(x, "j"), x)]


def until_all_know(x):
    """Double a block in a loop of Python, of which all ranks take as many steps."""
    steps = 0
    while psum((x * x).sum(), "i") < 1000:
        x, steps = 2 * x, steps + 1
    return x / 2**steps if pmax(axis_index("i"), "i") == RANKS - 1 else -x


def carries(x):
    """They begin as Python numbers, and take float32 from what they meet, in whichever step."""
    step = lambda c, x: ((c[0] + x, c[1] + psum(c[0], "i"), c[2] * 0.5), c[2] * x)  # noqa: E731
    (a, b, c), rows = md.scan(step, (0.0, 0, 1.0), x)
    return a.reshape(1), b, c, rows


def in_a_choice(groups):
    among = lambda x: psum(x, "j", axis_index_groups=groups)  # noqa: E731
    return lambda x: md.cond(axis_index("i") > 0, among, lambda x: -x, x)


#: A body, its in_specs and out_specs, and its arguments: on a line, or on a plane where axes "j" are named.
BODIES = {
    "numbers promote": (lambda s, x: psum(x, "i") * s, (P(), P("i")), P(), (0.1, F4)),
    "a slice of a sum": (lambda x: pscatter(psum(x, "i"), "i", axis=1, tiled=True), P("i"), P("i"), (np.ones((8, 8)),)),
    "a broadcast beside its operand": (lambda x: (broadcast(x, "i") + x, 2 * x), P("i"), (P("i"), P("i")), (ROWS,)),
    "a long loop": (
        lambda x: np.sin(md.scan(lambda c, _: (c + shift(c, "i", 1) / 2, None), x, None, length=20)[0]),
        P("i"), P("i"), (ROWS,),
    ),
    "sums at the boundary": (np.sin, P("i"), P(sum="i"), (ROWS,)),
    "carries of numbers": (carries, P("i"), (P("i"), P(), P(), P("i")), (F4,)),
    "a loop of Python": (until_all_know, P("i"), P("i"), (ROWS,)),
    "a choice": (lambda x: md.cond(axis_index("i") > 0, np.sin, lambda x: x, x), P("i"), P("i"), (ROWS,)),
    "a choice on a plane, alone": (in_a_choice([[0], [1]]), P(("i", "j")), P(("i", "j")), (ROWS,)),
    "a choice on a plane, in a group": (in_a_choice([[1, 0]]), P(("i", "j")), P(("i", "j")), (ROWS,)),
    "sets of axes on a plane": (
        lambda x: [psum(x, {"i", "j"}), psum(x, md.typeof(x).variance)], P(("i", "j")), P(), (ROWS,),
    ),
    "other variance on a plane": (of_other_variance, P("i", "j"), [P(None, "j"), P(), P(None, "j")], (ROWS,)),
}  # fmt: skip


@few
@each("name", BODIES)
def test_bodies(name):
    body, *specs, args = BODIES[name]
    f = lambda on: mapped(body, on, *specs)  # noqa: E731
    run = (lambda on: f(on)(*args)) if name == "a loop of Python" else (lambda on: all_ways(f(on), *args))
    check_alike(run, *(PLANE if "plane" in name else LINE), counted="choice" not in name, rtol=1e-6)


@few
@each("name", ["split batches", "a choice in a batch", "a view that then varies"])
def test_axes_that_are_not_mapped_over(name):
    def run(on):
        x, w = np.sin(np.arange(64.0)).reshape(4, 4, 4), np.cos(np.arange(16.0)).reshape(4, 4)
        if name == "split batches":
            f = mapped(lambda x, w: psum(np.sin(x) @ w, "i"), on, (P("i"), P()), P(), axis_names={"i"})
            return md.vmap(f, (0, None), spmd_axis_name="j")(spmd.distribute(x, on, P("j", "i")), w)
        if name == "a choice in a batch":
            f = mapped(lambda x: md.cond(np.sum(x) > 0, np.sin, lambda x: x, x), on, P(), P())
            return md.vmap(f, spmd_axis_name="j")(w)
        body = lambda w: psum(np.sum(w.reshape(-1) + axis_index("i")), "i")  # noqa: E731
        return mapped(body, on, P(), P(), axis_names={"i"})(spmd.distribute(w, on, P(None, "j")))

    check_alike(run, *PLANE)


@pytest.mark.parallel(4)
def test_blocks_tiled_and_transposed():
    """Cut up as one spec says and put together as another."""
    specs = [P("i", "j"), P("j", "i"), P(("i", "j")), P(None, ("j", "i")), P("i"), P(None, "j"), P()]
    for ins, outs in itertools.product(specs, specs):
        if ins.axes <= outs.axes:
            check_alike(lambda on, i=ins, o=outs: mapped(lambda x: x + 1, on, i, o)(np.arange(48).reshape(4, 12)), 2, 2)


@pytest.mark.parallel(4)
@each("program", [control.ranks_scan, control.ranks_while])
def test_control_flow(program):
    check_alike(lambda on: md.jit(control.on_ranks(program, md, on))(*control.ARGS), 2, 2)


# ---------------------------------------------------------------- sharded arrays

X, W = numpy.sin(numpy.arange(576.0)).reshape(24, 24), numpy.cos(numpy.arange(576.0)).reshape(24, 24)
SPECS = [P("i"), P(None, "i"), P("j"), P("i", "j"), P(("j", "i"))]

ARRAYS = {
    "softmax": lambda x, w: -np.mean(md.nn.log_softmax(x @ w, axis=1)[:, 3]),
    "reductions": lambda x, w: np.sum(x.max(axis=0) * w.mean(axis=1) + x.var(axis=1)) + x.sum(axis=0) @ w[0],
    "shapes": lambda x, w: np.sum(np.concatenate([x.T, w]).reshape(4, 12, 24)[1:3] * np.stack([w[:12], x[12:]])),
    "gathered": lambda x, w: np.sum(np.roll(x, 3) * np.linalg.inv(w @ w.T / 24 + 2 * np.eye(24))),
    "computed again": lambda x, w: np.sum(md.checkpoint(lambda x: np.tanh(np.sum(x @ w, axis=0) + x) @ w.T)(2 * x)),
    "vmap": lambda x, w: np.sum(md.vmap(lambda r: np.sin(r @ w) * r.max(), out_axes=1)(x)),
    "slices": lambda x, w: np.sum(x[5:9] @ w[::-1]) + np.sum(np.sin(x[::2, 10:14] * w[1::2, 3:7])),
    "updates": lambda x, w: np.sum(np.at(np.at(x)[1].set(w[0]))[[3, 0]].set(w[1:3]) * np.at(w)[:, 2::5].add(1.0)),
    "indices": lambda x, w: np.sum(x[np.array([3, 1, 4, 1, 5])] @ w[:, [9, 2, 6]]) + x[5] @ w[:, -1],
    "whole blocks": lambda x, w: [spmd.reshard(x, P()), md.vmap(lambda row: spmd.reshard(row, P("i")))(w)],
}


@few
@each("turn, name", enumerate(ARRAYS))
def test_sharded_arrays(turn, name):
    """Specs take turns."""
    f = ARRAYS[name]
    loss = md.grad(lambda *args: sum(np.sum(y * y) for y in md.tree.leaves(f(*args))), (0, 1))

    def run(on):
        args = spmd.distribute(X, on, SPECS[turn % 5]), spmd.distribute(W, on, SPECS[(2 * turn + 1) % 5])
        return f(*args), md.jit(loss)(*args)

    check_alike(run, *PLANE)


@few
def test_every_redistribution():
    for have, want in itertools.product(SPECS, [*SPECS, P()]):

        def run(on, have=have, want=want):
            x = spmd.distribute(X, on, have)
            return spmd.reshard(x, want), md.grad(lambda x: np.sum(spmd.reshard(x, want) ** 2))(x)

        check_alike(run, *PLANE)


@few
@each("program", [vmapped.loops_of_their_own_length, vmapped.branches, vmapped.gradient_of_each])
def test_loops_and_branches_under_vmap(program):
    spec = P(("i", "j")) if program is vmapped.branches else P("j")
    check_alike(lambda on: md.jit(lambda: program(**vmapped.arguments(on, spec)))(), *PLANE)


@pytest.mark.parallel(2)
def test_keys_that_are_used_twice():
    run = key_programs.transformations("mpi")["jit of shard_map"]
    once = lambda x, k: x * md.random.normal(k)  # noqa: E731
    assert not key_programs.reuses(run, once, 1.0, md.random.key(0))
    assert key_programs.reuses(run, lambda x, k: once(x, k) + md.random.normal(k), 1.0, md.random.key(0))
