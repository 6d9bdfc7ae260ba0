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
from tests.collectives.passes import test_hoist_pbroadcasts as hoisting
from tests.programs import control, linear, partial_sum, state, vmapped
from tests.programs import key as key_programs
from tests.programs import sharded_loop as loops
from tests.programs.explicit import replayed
from tests.programs.masked import BODIES as MASKED
from tests.programs.masked import check_in_body, check_on_ranks
from tests.programs.neighbors import PROGRAMS as NEIGHBORS
from tests.programs.neighbors import check as check_neighbors
from tests.programs.nested import one_by_one
from tests.programs.on_blocks import LOOPS, STEPS, Program, example
from tests.programs.rank import random_program

RANKS = MPI.COMM_WORLD.size
few = pytest.mark.parallel([2, 4])
everywhere = pytest.mark.parallel([1, 2, 3, 4, 8])
SQUARE = {4: (2, 2), 8: (2, 2, 2)}.get(RANKS, (RANKS,))
COLUMNS = (max(RANKS // 2, 1), min(RANKS, 2))  # a mesh of two axes


def outcome(program, on):
    """Whole results of a program, their specs, and the calls that it makes."""
    on.reset_calls()
    leaves = md.tree.leaves(program(on))
    calls = dict(on.calls), dict(on.bytes)
    return [(whole(x), spmd.spec_of(x)) for x in leaves], calls


def check_alike(program, *shape, counted=True, **tolerance):
    """Compare a program on MPI ranks with simulated ones, which count what all ranks call. Return what it calls."""
    (results, calls), (expected, simulated) = (outcome(program, mesh(*shape, backend=b)) for b in ("mpi", "simulated"))
    for (x, spec), (y, spec_of_y) in zip(results, expected, strict=True):
        assert (x.dtype, x.shape, spec) == (y.dtype, y.shape, spec_of_y)
        numpy.testing.assert_allclose(x, y, **{"rtol": 1e-9, "atol": 1e-9, **tolerance})
    assert calls == simulated or not counted
    return calls[0]


def all_ways(f, *args, argnums=None, second=False):
    """Values, tangents and gradients of a function, eagerly and compiled; and how gradients change."""
    argnums = tuple(range(len(args))) if argnums is None else argnums

    def loss(*xs):
        return sum(np.sum(x * x) for x in md.tree.leaves(f(*xs)))

    gradient = md.grad(loss, argnums)
    results = [g(*args) for g in (f, md.jit(f), gradient, md.jit(gradient))]
    tangents = md.jvp(f, args, args), md.jvp(gradient, args, args)[1] if second else ()
    return [*results, *tangents]


# ---------------------------------------------------------------- programs of collectives

NAMES = sorted(STEPS)
#: Each step, after another one.
PAIRS = [Program([name, NAMES[(5 * k + 1) % len(NAMES)]]) for k, name in enumerate(NAMES)]


@everywhere
def test_steps():
    """Along the axes in both orders, one shard_map of all, or one in another; with types and without."""
    for k, program in enumerate(PAIRS):
        args = example(program, rows=RANKS, seed=k)
        for typed, levels in itertools.product((True, False), (False, True) if len(SQUARE) > 1 else (False,)):

            def run(on, program=program, k=k, typed=typed, levels=levels, args=args):
                axes = on.axis_names[:: 1 if k % 3 else -1]
                wrap = one_by_one(*[(a,) for a in axes]) if levels else spmd.shard_map
                loss = program.sharded(on, axes, k % 2 == 0, wrap, check_rep=typed)
                return md.value_and_grad(loss, (0, 1))(*args), md.jvp(loss, args, args)

            if RANKS < 8 or (k % 4 == 0 and typed != levels):
                check_alike(run, *SQUARE)


@everywhere
def test_second_derivatives():
    program = Program(["a parameter twice", "add the column sums", "gather, and sum back"])
    args = example(program, rows=RANKS, seed=0)
    check_alike(lambda on: all_ways(program.sharded(on, on.axis_names, True), *args, second=True), *SQUARE)


@everywhere
@each("seed", [0, 1, 2])
def test_random_programs_of_all_collectives(seed):
    program = random_program(seed, SQUARE, further=True)
    args, shape = program.example(seed), program.shape.values()
    for typed in (True, False):
        run = lambda on, typed=typed: all_ways(program.on_ranks(on, check_rep=typed), *args)  # noqa: E731
        check_alike(run, *shape, rtol=1e-7)


@few
@each("seed", range(12))
def test_transposes_of_random_linear_programs(seed):
    choices, args = numpy.random.default_rng(seed).integers(0, 100, size=60).tolist(), linear.example(seed)

    def run(on):
        transposed = md.transpose(md.make_tape(linear.program(choices, [on]))(*args), (0, 1))
        return transposed(
            *[np.cos(np.arange(float(t.size))).reshape(t.shape) for t in transposed.in_types[:-1]], args[2]
        )

    check_alike(run, *SQUARE)


@few
def test_programs_whose_pbroadcasts_are_written():
    for k, name in enumerate(sorted(set(STEPS) - LOOPS)):  # loops take what carries start as, pbroadcast or not
        program = Program([name, "scale by a parameter"])
        leaves, structure = md.tree.flatten(example(program, rows=RANKS, seed=k))

        def run(on, program=program, structure=structure, leaves=leaves):
            f = program.sharded(on, ("i",))
            written = replayed(lambda *leaves: f(*md.tree.unflatten(structure, leaves)), *leaves)
            return md.value_and_grad(written, tuple(range(len(leaves))))(*leaves)

        check_alike(run, RANKS)


@pytest.mark.parallel(4)
@each("typed", [True, False])
@each("name", partial_sum.PROGRAMS)
def test_partial_sums(name, typed):
    def run(on):
        f = partial_sum.sharded(name, on, check_rep=typed)
        return all_ways(f, partial_sum.X, partial_sum.W, second=True)

    check_alike(run, 2, 2)


@pytest.mark.parallel(4)
@each("name", hoisting.SUMS)
def test_gradients_whose_pbroadcasts_are_hoisted(name):
    """Taken around a body or in it, they make the same calls."""
    f, count = hoisting.SUMS[name]
    args, (on_ranks, _) = (hoisting.X, hoisting.W, hoisting.WS), hoisting.averaged(f)
    around = lambda on: md.grad(on_ranks(mesh=on), (0, 1, 2))  # noqa: E731
    specs = P(("i", "j")), P(), P()
    inside = lambda on: on_ranks(lambda loss: md.grad(loss, (0, 1, 2)), specs, mesh=on)  # noqa: E731
    for gradient in (around, inside):
        assert check_alike(lambda on, g=gradient: g(on)(*args), 2, 2) == {"psum": count}
        check_alike(lambda on, g=gradient: md.jit(g(on))(*args), 2, 2)


# ---------------------------------------------------------------- control flow


@pytest.mark.parallel(4)
@each("typed", [True, False])
@each("name", control.RANKS)
def test_control_flow(name, typed):
    def run(on):
        f = control.on_ranks(control.RANKS[name], md, on, check_rep=typed)
        if name == "while_loop":
            return md.jit(f)(*control.ARGS), md.jvp(f, control.ARGS, control.ARGS)
        return all_ways(f, *control.ARGS)

    check_alike(run, 2, 2)


@pytest.mark.parallel(4)
@each("sign", [1.0, -1.0])
def test_types_do_not_depend_on_values(sign):
    def run(on, out_specs=P(("i", "j"))):
        body = lambda x, w: control.branch_by_values(psum(x.sum(), ("i", "j")), x, w)  # noqa: E731
        return all_ways(mapped(body, on, (P(("i", "j")), P()), out_specs), sign * np.arange(1.0, 9.0), np.ones(2))

    check_alike(run, 2, 2)
    with pytest.raises(md.VarianceError):
        run(mesh(2, 2, backend="mpi"), P())


@pytest.mark.parallel(4)
@pytest.mark.filterwarnings("ignore:.*the gradient of the sum of the results")  # which is what is tested
@each("turns", [(0, 1, 2), (1, 0, 1)], ["straight", "turning"])
def test_derivatives_in_steps_are_of_the_types_that_stay(turns):
    """All ranks run the first step again, or none."""

    def run(on):
        body = lambda w, x: control.stepwise_gradients(md.scan, md.grad, w, psum(x, "j"), turns)  # noqa: E731
        out_specs = (P(("i", "j")),) * 3, P(None, ("i", "j"))
        return mapped(body, on, (P(), P(("i", "j"))), out_specs)(np.array([0.5, -0.3]), np.arange(8.0) / 3)

    check_alike(run, 2, 2)


@pytest.mark.parallel(2)
@each("name", control.BODIES)
def test_backward_rules_in_bodies(name):
    def run(on):
        loss = control.loss_in_body(control.modulated_by_rules(), control.BODIES[name][0], on)
        gradient = md.grad(loss, (0, 1))
        args = np.array([0.5, -0.3]), np.arange(1.0, 5.0) / 3
        return gradient(*args), md.jit(gradient)(*args), md.grad(md.jit(loss), (0, 1))(*args)

    check_alike(run, 2, 1)


# ---------------------------------------------------------------- states


@few
@each("beside", "IVUR")
@each("name", state.ROWS)
def test_collectives_of_states_and_their_transposes(name, beside):
    collective, (before, after), _ = state.ROWS[name]
    specs = [state.spec_of_states({"i": beside, "j": s}) for s in (before, after)]

    def run(on):
        f = mapped(lambda x: collective(x, "j"), on, *specs)
        x = state.array_of(specs[0], on, 1, (2 * RANKS, 3))
        ct = state.array_of(specs[1].transposed(), on, 2, f(x).shape)
        return f(x), md.linear_transpose(f, x)(ct)

    check_alike(run, RANKS // 2, 2)


@few
@each("seed", range(8))
def test_random_programs_of_states(seed):
    program = numpy.random.default_rng(seed).integers(0, 60, (4, 4)).tolist()

    def run(on):
        args, loss = state.example(on), state.loss_of(program, on)
        return state.sharded(program, on)(*args), md.jit(md.grad(loss, (0, 1, 2, 3)))(*args)

    check_alike(run, RANKS)


@few
def test_states_outside_of_bodies():
    spec = P(unreduced={"i"})

    def run(on):
        u = state.array_of(spec, on, 0, (RANKS,))
        total = mapped(lambda x: psum(3 * x, "i"), on, spec, P())
        return [u + u, spmd.reshard(u, P()), spmd.reshard(u, P("i")), *md.value_and_grad(lambda u: total(u)[0])(u)]

    assert check_alike(run, RANKS) == {"psum": 2, "psum_scatter": 1}


# ---------------------------------------------------------------- bodies

F4, ROWS = np.arange(8, dtype="f4"), np.sin(np.arange(48.0)).reshape(8, 6)
RULE = md.custom_vjp(lambda x: np.sin(x) * x)
RULE.defvjp(lambda x: md.vjp(lambda x: np.sin(x) * x, x), lambda pullback, ct: pullback(ct))


def of_other_variance(x):
    """The plan of a call is cached, and executes others of its name, shape and dtype."""
    return [psum(v, "i") for v in (x, psum(x, "j"), x)]


def until_all_know(x):
    steps = 0
    while psum(x.sum(), "i") < 1000:
        x, steps = 2 * x, steps + 1
    return x / 2**steps if pmax(axis_index("i"), "i") == x.shape[0] else -x


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
    "blocks and a sum": (lambda x: np.sin(x) + psum(x, "i"), P("i"), P("i"), (ROWS,)),
    "numbers promote": (lambda s, x: psum(x, "i") * s, (P(), P("i")), P(), (0.1, F4)),
    "numbers promote, of the whole": (lambda s, x: (x[:2] + x[2:4]) * s, (P(), P()), P(), (0.1, F4)),
    "a slice of a sum": (lambda x: pscatter(psum(x, "i"), "i", axis=1, tiled=True), P("i"), P("i"), (np.ones((8, 8)),)),
    "a broadcast beside its operand": (lambda x: (broadcast(x, "i") + x, 2 * x), P("i"), (P("i"), P("i")), (ROWS,)),
    "two messages": (lambda x: shift(x, "i", 1) * np.cos(x) - shift(x + 1, "i", 1), P("i"), P("i"), (ROWS,)),
    "a long loop": (
        lambda x: np.sin(md.scan(lambda c, _: (c + shift(c, "i", 1) / 2, None), x, None, length=20)[0]),
        P("i"), P("i"), (ROWS,),
    ),
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
    body, in_specs, out_specs, args = BODIES[name]
    shape = COLUMNS if "plane" in name else (RANKS,)
    check_alike(
        lambda on: all_ways(mapped(body, on, in_specs, out_specs), *args),
        *shape,
        counted="choice" not in name,
        rtol=1e-6,
    )


@few
def test_conditions_of_python_and_carries_of_numbers():
    check_alike(lambda on: mapped(until_all_know, on, P("i"), P("i"))(np.ones(8)), RANKS)
    check_alike(lambda on: mapped(carries, on, P("i"), (P("i"), P(), P(), P("i")))(F4), RANKS)


@few
def test_a_rule_keeps_a_pullback():
    def run(on):
        gradient = md.grad(mapped(lambda w, x: psum(RULE(w * x).sum(), "i"), on, (P(), P("i")), P()), (0, 1))
        return gradient(0.5, ROWS), md.jit(gradient)(0.5, ROWS)

    check_alike(run, RANKS)


@few
def test_pullbacks_leave_bodies():
    def run(on):
        make = mapped(lambda w, x: md.vjp(lambda y: np.sin(y) * y, w * x)[1], on, (P(), P("i")), P("i"))
        apply = mapped(lambda pullback, ct: pullback(ct)[0], on, P("i"), P("i"))
        return [wrap(apply)(wrap(make)(0.5, ROWS), ROWS) for wrap in (lambda f: f, md.jit)]

    check_alike(run, RANKS)


@pytest.mark.parallel(4)
def test_blocks_tiled_and_transposed():
    """Cut up as one spec says and put together as another."""
    specs = [P("i", "j"), P("j", "i"), P(("i", "j")), P(None, ("j", "i")), P("i"), P(None, "j"), P()]
    for ins, outs in itertools.product(specs, specs):
        if ins.axes <= outs.axes:
            check_alike(lambda on, i=ins, o=outs: mapped(lambda x: x + 1, on, i, o)(np.arange(48).reshape(4, 12)), 2, 2)


@few
@each("name", ["split batches", "a choice in a batch", "a view that then varies"])
def test_axes_that_are_not_mapped_over(name):
    def run(on):
        x, w = np.sin(np.arange(64.0)).reshape(4, 4, 4), np.cos(np.arange(16.0)).reshape(4, 4)
        if name == "split batches":
            f = mapped(lambda x, w: psum(np.sin(x) @ w, "i"), on, (P("i"), P()), P(), axis_names={"i"})
            return all_ways(md.vmap(f, (0, None), spmd_axis_name="j"), spmd.distribute(x, on, P("j", "i")), w)
        if name == "a choice in a batch":
            f = mapped(lambda x: md.cond(np.sum(x) > 0, np.sin, lambda x: x, x), on, P(), P())
            return all_ways(md.vmap(f, spmd_axis_name="j"), w)
        body = lambda w: psum(np.sum(w.reshape(-1) + axis_index("i")), "i")  # noqa: E731
        return mapped(body, on, P(), P(), axis_names={"i"})(spmd.distribute(w, on, P(None, "j")))

    check_alike(run, *COLUMNS)


# ---------------------------------------------------------------- sharded arrays

X, W = numpy.sin(numpy.arange(576.0)).reshape(24, 24), numpy.cos(numpy.arange(576.0)).reshape(24, 24)
MESHES = [(RANKS,), COLUMNS][: 1 if RANKS < 4 else 2]


def specs_of(shape):
    return [P("i"), P(None, "i"), *([P("j"), P("i", "j"), P(("j", "i"))] if len(shape) > 1 else [P()])]


ARRAYS = {
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
    "updates": lambda x, w: np.sum(np.at(np.at(x)[1].set(w[0]))[[3, 0]].set(w[1:3]) * np.at(w)[:, 2::5].add(1.0)),
    "look-ups": lambda x, w: np.sum(np.sin(x[[2, -3, 2]])) + np.sum(x[5] * w[1, -1]),
    "indices": lambda x, w: np.sum(x[np.array([3, 1, 4, 1, 5])] @ w[:, [9, 2, 6]]) + x[0] @ w[:, 0],
    "of size 0": lambda x, w: np.sum(np.flip(x[:0])) + np.sum(x[:0][::-2]) + np.sum(w),
    "whole blocks": lambda x, w: [spmd.reshard(x, P()), md.vmap(lambda row: spmd.reshard(row, P("i")))(w)],
}


@few
@pytest.mark.parametrize("name", ARRAYS)
def test_sharded_arrays(name):
    """Specs take turns."""
    for shape in MESHES:
        specs, turn = specs_of(shape), list(ARRAYS).index(name)
        xs, ws = specs[turn % len(specs)], specs[(2 * turn + 1) % len(specs)]
        run = lambda on, xs=xs, ws=ws: all_ways(  # noqa: E731
            ARRAYS[name], spmd.distribute(X, on, xs), spmd.distribute(W, on, ws)
        )
        check_alike(run, *shape, rtol=1e-7)


@few
def test_every_redistribution():
    for shape in MESHES:
        for have, want in itertools.product(specs_of(shape), repeat=2):

            def run(on, have=have, want=want):
                x = spmd.distribute(X, on, have)
                return spmd.reshard(x, want), md.grad(lambda x: np.sum(spmd.reshard(x, want) ** 2))(x)

            if have.axes:
                check_alike(run, *shape)


@few
@each("program", vmapped.PROGRAMS)
def test_loops_and_branches_under_vmap(program):
    for shape in MESHES:
        axes = "ij"[: len(shape)]
        spec = P(tuple(axes) if program is vmapped.branches else axes[-1])
        for run in (lambda f: f, md.jit):
            check_alike(lambda on, s=spec, r=run: r(lambda: program(**vmapped.arguments(on, s)))(), *shape)


@few
@each("program", loops.PROGRAMS)
def test_the_gradient_of_a_loop_takes_one_sum(program):
    for shape in MESHES:
        loops.check(program, mesh(*shape, backend="mpi"), P("ij"[len(shape) - 1]))


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.filterwarnings("ignore:invalid value|Mean of empty|Degrees of freedom")
def test_masks_and_slices_that_no_mesh_divides():
    line = mesh(RANKS, backend="mpi")
    for program in NEIGHBORS.values():
        check_neighbors(program, line)
    for name in ("mean, axis=0", "var, axis=None", "softmax of columns", "cross entropy of labels", "batch_norm"):
        check_on_ranks(name, line, "rows")
    for name in MASKED:
        check_in_body(*MASKED[name], P(), line, "rows")


@few
@each("name", ["shard_map", "grad of shard_map", "jit of shard_map"])
def test_keys_that_are_used_twice(name):
    key_programs.check("mpi", name)
