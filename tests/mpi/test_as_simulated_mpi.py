"""Programs on MPI ranks: the numbers, specs, calls and errors of simulated ranks, or of whole arrays."""

import functools
import itertools
import math

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast, pmean, psum
from spmd import P
from tests.checks.samples import each
from tests.checks.whole import whole
from tests.collectives.passes import test_hoist_pbroadcasts as hoisting
from tests.minidiff.test_debug_print import body as printing
from tests.minidiff.test_debug_print import printed
from tests.programs import control as control_programs
from tests.programs import key as key_programs
from tests.programs import linear as linear_programs
from tests.programs import state as state_programs
from tests.programs.control import BODIES, Unrolled
from tests.programs.explicit import replayed, without_one
from tests.programs.nested import one_by_one
from tests.programs.on_blocks import LOOPS, STEPS, Program, assert_trees_close, example, run_and_count
from tests.programs.rank import random_program
from tests.programs.tutorial_collectives import EXAMPLES, text_of

RANKS = MPI.COMM_WORLD.size
few = pytest.mark.parallel([2, 4])
everywhere = pytest.mark.parallel([1, 2, 3, 4, 8])


@functools.cache
def mesh_of(*shape, backend="mpi", names="ijk"):
    return spmd.make_mesh(shape, tuple(names[: len(shape)]), backend=backend)


# ---------------------------------------------------------------- programs of collectives

NAMES = sorted(STEPS)
#: Each step, after another one.
PAIRS = [Program([name, NAMES[(5 * k + 1) % len(NAMES)]]) for k, name in enumerate(NAMES)]


def check_program(program, mesh, axes, closed_over=True, shard_map=spmd.shard_map, **options):
    """Values, gradients and tangents are those of whole arrays, by the calls that the report says."""
    size = math.prod(mesh.shape[a] for a in axes)
    args, of_whole = example(program, rows=size, seed=len(program.steps[0])), program.whole(size)
    loss = program.sharded(mesh, axes, closed_over, shard_map, **options)
    gradient, expected = (md.value_and_grad(f, (0, 1)) for f in (loss, of_whole))
    assert_trees_close(run_and_count(gradient, mesh, *args), expected(*args))
    tangents = run_and_count(lambda *xs: md.jvp(loss, xs, xs), mesh, *args)
    assert_trees_close(tangents, md.jvp(of_whole, args, args))


SQUARES = {1: (1,), 2: (2,), 3: (3,), 4: (2, 2), 8: (2, 2, 2)}


@everywhere
def test_programs_equal_the_function_of_whole_arrays():
    mesh = mesh_of(*SQUARES[RANKS])
    for k, program in enumerate(PAIRS):
        for typed in (True, False) if RANKS < 8 else (True,):
            check_program(program, mesh, mesh.axis_names[::-1], k % 2 == 0, check_rep=typed)


@pytest.mark.parallel(4)
def test_one_shard_map_in_another():
    for k, program in enumerate(PAIRS):
        axes = ("i", "j") if k % 3 else ("j", "i")
        for typed in (True, False):
            check_program(program, mesh_of(2, 2), axes, k % 2 == 0, one_by_one(*[(a,) for a in axes]), check_rep=typed)


@pytest.mark.parallel(8)
def test_three_levels():
    program = Program(["add the column sums", "gather, and sum back", "shift"])
    check_program(program, mesh_of(2, 2, 2), ("k", "i", "j"), True, one_by_one(("k",), ("i",), ("j",)))


@everywhere
def test_second_derivatives():
    mesh = mesh_of(*SQUARES[RANKS])
    program = Program(["a parameter twice", "add the column sums", "gather, and sum back"])
    args = example(program, rows=RANKS, seed=0)

    def along_gradient(loss):
        return lambda x, params: md.jvp(md.grad(loss, (0, 1)), (x, params), args)[1]

    sharded = along_gradient(program.sharded(mesh, mesh.axis_names, closed_over=True))
    assert_trees_close(run_and_count(sharded, mesh, *args), along_gradient(program.whole(RANKS))(*args))


@everywhere
@each("seed", [0, 1, 2])
def test_random_programs_of_all_collectives(seed):
    program = random_program(seed, SQUARES[RANKS], further=True)
    mesh, args = mesh_of(*program.shape.values()), program.example(seed)
    numbers = tuple(range(len(args)))
    expected = md.value_and_grad(program.on_lists(), numbers)(*args)
    for options in ({}, {"check_rep": False}):
        outcome = md.value_and_grad(program.on_ranks(mesh, **options), numbers)
        for f in (outcome, md.jit(outcome)):
            assert_trees_close(md.tree.map(whole, f(*args)), expected, rtol=1e-7, atol=1e-9)


@few
@each("seed", range(12))
def test_random_linear_programs(seed):
    """The inner-product identity, the communication that the tape tells, and the numbers of simulated ranks."""
    shape = SQUARES[RANKS]
    choices = numpy.random.default_rng(seed).integers(0, 100, size=60).tolist()
    args = linear_programs.example(seed)
    outcome, transposed, cts = check_linear(linear_programs.program(choices, [mesh_of(*shape)]), args, args[2:])
    mesh_of(*shape).reset_calls()
    transposed(*cts, args[2])
    reported = spmd.communication(lambda *xs: transposed(*xs))(*transposed.in_types).counts
    assert mesh_of(*shape).calls == reported
    elsewhere = linear_programs.program(choices, [mesh_of(*shape, backend="simulated")])
    simulated = md.transpose(md.make_tape(elsewhere)(*args), (0, 1))
    for x, y in zip(outcome, simulated(*cts, args[2])):
        numpy.testing.assert_allclose(x, whole(y), rtol=1e-9, atol=1e-9)


def check_linear(f, args, others):
    """<f(x), ct> = <x, f_t(ct)>, and the transpose of the transpose is f. Returns the transpose, and what it gives."""
    tape, linear = md.make_tape(f)(*args), range(len(args) - len(others))
    transposed = md.transpose(tape, tuple(linear))
    cts = [np.cos(np.arange(float(t.size))).reshape(t.shape) for t in tape.out_types]
    outs, outcome = ([whole(y) for y in g] for g in (tape(*args), transposed(*cts, *others)))
    assert_trees_close([whole(y) for y in md.transpose(transposed, range(len(cts)))(*args)], outs)
    left, right = (sum(np.sum(x * y) for x, y in zip(xs, ys)) for xs, ys in ((outs, cts), (outcome, args)))
    numpy.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)
    return outcome, transposed, cts


@pytest.mark.parallel(4)
def test_several_shard_maps():
    for f in linear_programs.several(mesh_of(4), mesh_of(2, 2)).values():
        check_linear(f, (np.sin(np.arange(16.0)),), ())


@pytest.mark.parallel(4)
@each("f", hoisting.SUMS)
def test_gradients_whose_pbroadcasts_are_hoisted(f):
    """Taken around a body or in it, they make the same calls."""
    args, mesh = (hoisting.X, hoisting.W, hoisting.WS), mesh_of(2, 2)
    on_ranks, of_whole = hoisting.averaged(f)
    around = md.grad(on_ranks(mesh=mesh), (0, 1, 2))
    inside = on_ranks(lambda loss: md.grad(loss, (0, 1, 2)), (P(("i", "j")), P(), P()), mesh=mesh)
    for gradient in (around, inside):
        outcome = run_and_count(gradient, mesh, *args)
        assert mesh.calls == {"psum": hoisting.SUMS[f]}
        mesh.reset_calls()
        gradient(*args)
        assert mesh.calls == {"psum": hoisting.SUMS[f]}
        for result in (outcome, md.jit(gradient)(*args)):
            assert_trees_close(result, md.grad(of_whole, (0, 1, 2))(*args))


# ---------------------------------------------------------------- control flow


def loss_of(f):
    return lambda *args: sum((x * x).sum() for x in f(*args))


@pytest.mark.parallel(4)
@each("check_rep", [True, False])
@each("name", control_programs.RANKS)
def test_control_flow(name, check_rep):
    args, program = control_programs.ARGS, control_programs.RANKS[name]
    f = control_programs.on_ranks(program, md, mesh_of(2, 2), check_rep=check_rep)
    meaning = control_programs.on_ranks(program, Unrolled, mesh_of(2, 2, backend="simulated"), check_rep=check_rep)
    assert_trees_close(md.jit(f)(*args), md.tree.leaves(meaning(*args)))
    for run in (f, md.make_tape(f)(*args)):
        assert_trees_close(md.jvp(run, args, args), md.tree.leaves(md.jvp(meaning, args, args)))
        if name != "while_loop":
            gradient = md.value_and_grad(loss_of(run), (0, 1))
            expected = md.tree.leaves(md.value_and_grad(loss_of(meaning), (0, 1))(*args))
            for g in (gradient, md.jit(gradient), md.make_tape(gradient)(*args)):
                assert_trees_close(md.tree.leaves(g(*args)), expected)


@pytest.mark.parallel(4)
@each("sign", [1.0, -1.0])
@each("run", [lambda f: f, md.jit], ["run", "compiled"])
def test_types_do_not_depend_on_values(run, sign):
    """Whichever branch is run, the result may differ from rank to rank: the same error, and the same gradient."""
    args = sign * np.arange(1.0, 9.0), np.ones(2)

    def mapped(backend, out_specs):
        body = lambda x, w: control_programs.branch_by_values(psum(x.sum(), ("i", "j")), x, w)  # noqa: E731
        return spmd.shard_map(body, mesh_of(2, 2, backend=backend), (P(("i", "j")), P()), out_specs)

    with pytest.raises(md.VarianceError, match=r"the result\[0\] has type f64\[2\]\{i,j\}.*does not name 'i'"):
        run(mapped("mpi", P()))(*args)
    outcome, expected = (md.value_and_grad(loss_of(mapped(on, P(("i", "j"))))) for on in ("mpi", "simulated"))
    assert_trees_close(run(outcome)(*args), expected(*args))


@pytest.mark.parallel(4)
@pytest.mark.filterwarnings("ignore:.*the gradient of the sum of the results")  # which is what is tested
@each("turns", [(0, 1, 2), (1, 0, 1)], ["straight", "turning"])
def test_derivatives_in_steps_are_of_the_types_that_stay(turns):
    """All ranks run the first step again, or none."""

    def mapped(backend):
        def body(w, x):
            return control_programs.stepwise_gradients(md.scan, md.grad, w, psum(x, "j"), turns)

        out_specs = (P(("i", "j")),) * 3, P(None, ("i", "j"))
        return spmd.shard_map(body, mesh_of(2, 2, backend=backend), (P(), P(("i", "j"))), out_specs)

    args = np.array([0.5, -0.3]), np.arange(8.0) / 3
    expected = md.tree.leaves(mapped("simulated")(*args))
    for f in (mapped("mpi"), md.make_tape(mapped("mpi"))(*args)):
        assert_trees_close(md.tree.leaves(f(*args)), expected)


@pytest.mark.parallel(2)
@each("name", BODIES)
def test_backward_rules_in_bodies(name):
    """In reverse mode all ranks run the rules in the body, and take the sums that these ask for."""
    in_body, meaning = BODIES[name]
    args, simulated = (np.array([0.5, -0.3]), np.arange(1.0, 5.0) / 3), mesh_of(2, 1, backend="simulated")
    of_meaning = control_programs.loss_in_body(control_programs.modulated, meaning, simulated)
    expected = md.tree.leaves(md.grad(of_meaning, (0, 1))(*args))
    loss = control_programs.loss_in_body(control_programs.modulated_by_rules(), in_body, mesh_of(2, 1))
    gradient = md.grad(loss, (0, 1))
    for run in (gradient, md.jit(gradient), md.grad(md.jit(loss), (0, 1)), md.make_tape(gradient)(*args)):
        assert_trees_close(run(*args), expected)


# ---------------------------------------------------------------- states

MOVES = ("psum", "psum_scatter", "all_gather_reduced")


def check_as_simulated(f, arguments, shape=(RANKS,)):
    """Compare the list that `f(mesh, *arguments(mesh))` returns, and what each rank called. Return that."""
    results = []
    for mesh in (mesh_of(*shape), mesh_of(*shape, backend="simulated")):
        args = arguments(mesh)
        mesh.reset_calls()
        results.append((f(mesh, *args), dict(mesh.calls), dict(mesh.bytes)))
    (outcome, *calls), (expected, *simulated) = results
    for x, y in zip(outcome, expected, strict=True):
        numpy.testing.assert_allclose(whole(x), whole(y), 1e-9, 1e-12)
        assert spmd.spec_of(x) == spmd.spec_of(y)
    assert calls == simulated
    return calls[0]


@few
@each("beside", "IVUR")
@each("name", state_programs.ROWS)
def test_collectives_of_states_and_their_transposes(name, beside):
    """Along one axis of two: the operation and its transpose call what the table says, once."""
    collective, (before, after), transpose = state_programs.ROWS[name]
    specs = [state_programs.spec_of_states({"i": beside, "j": s}) for s in (before, after)]

    def mapped(mesh):
        return spmd.shard_map(lambda x: collective(x, "j"), mesh=mesh, in_specs=specs[0], out_specs=specs[1])

    def arguments(mesh):
        x = state_programs.array_of(specs[0], mesh, 1, (2 * RANKS, 3))
        return x, state_programs.array_of(specs[1].transposed(), mesh, 2, mapped(mesh)(x).shape)

    shape = (RANKS // 2, 2)
    called = check_as_simulated(lambda mesh, x, ct: [mapped(mesh)(x)], arguments, shape)
    pulled = check_as_simulated(lambda mesh, x, ct: md.linear_transpose(mapped(mesh), x)(ct), arguments, shape)
    operation = {"all_gather": "all_gather_reduced", "psum of varying": "psum"}.get(name, name)
    assert (called, pulled) == tuple({k: 1} if k in MOVES else {} for k in (operation, transpose))


@few
@each("seed", range(8))
def test_random_programs_of_states(seed):
    program = numpy.random.default_rng(seed).integers(0, 60, (4, 4)).tolist()
    check_as_simulated(lambda mesh, *args: state_programs.sharded(program, mesh)(*args), state_programs.example)

    def gradients(mesh, *args):
        return md.jit(md.grad(state_programs.loss_of(program, mesh), (0, 1, 2, 3)))(*args)

    check_as_simulated(gradients, state_programs.example)


@few
def test_states_outside_of_bodies():
    """A reshard takes the sum once; each rank has its part; and what needs the sum says so on every rank."""
    spec = P(unreduced={"i"})

    def run(mesh, u):
        total = spmd.shard_map(lambda x: psum(3 * x, "i"), mesh=mesh, in_specs=spec, out_specs=P())
        return [u + u, spmd.reshard(u, P()), spmd.reshard(u, P("i")), *md.value_and_grad(lambda u: total(u)[0])(u)]

    parts = functools.partial(state_programs.array_of, spec)
    assert check_as_simulated(run, lambda mesh: [parts(mesh, 0, (RANKS,))]) == {"psum": 2, "psum_scatter": 1}
    u = parts(mesh_of(RANKS), 0, (RANKS,))
    with pytest.raises(md.VarianceError, match=r"tanh of .*hold partial sums"):
        np.tanh(u)
    with pytest.raises(ValueError, match=r"Call \.gather"):
        numpy.asarray(u)


# ---------------------------------------------------------------- explicit bodies


@few
def test_programs_whose_pbroadcasts_are_written():
    """Values, gradients, and the error where one pbroadcast is left out: on every rank alike."""
    mesh = mesh_of(RANKS)
    for k, name in enumerate(sorted(set(STEPS) - LOOPS)):  # loops take what carries start as, pbroadcast or not
        program = Program([name, "scale by a parameter"])
        leaves, structure = md.tree.flatten(example(program, rows=RANKS, seed=k))
        sharded = program.sharded(mesh, ("i",))

        def automatic(*leaves, sharded=sharded, structure=structure):
            return sharded(*md.tree.unflatten(structure, leaves))

        written = replayed(automatic, *leaves)
        gradients = [md.value_and_grad(f, tuple(range(len(leaves)))) for f in (written, automatic)]
        actual, expected = (run_and_count(g, mesh, *leaves) for g in gradients)
        assert_trees_close(actual, md.tree.map(whole, expected))
        for wrong in without_one(automatic, *leaves):
            with pytest.raises(md.VarianceError, match=r"pbroadcast|axis_size|remove these axes"):
                wrong(*leaves)


ERRORS = {
    r"multiply: operands f64\[2\]\{i\} and f64\[2\] disagree": lambda x, w: psum(x * w, "i"),
    r"psum over 'i' takes a value that varies there": lambda x, w: psum(w, "i"),
    r"x\[0\]: pmean over 'i' takes a value that varies .* it is already the mean": lambda x, w: pmean((w, x), "i")[0],
    r"where: operands bool\[2\] and f64\[2\]\{i\} .* for the first": lambda x, w: md.nn.logsumexp(x, b=w),
    r"update: operands f64\[2\] and f64\[\]\{i\} .* for the first": lambda x, w: w.at[0].set(x[0]),
    r"pbroadcast over 'i' takes a value that is the same": lambda x, w: pmean(pbroadcast(x, "i"), "i"),
}


@few
@each("message", ERRORS)
def test_errors_before_anything_is_sent(message):
    mesh = mesh_of(RANKS)
    options = {"mesh": mesh, "in_specs": (P("i"), P()), "out_specs": P(), "auto_pbroadcast": False}
    mesh.reset_calls()
    with pytest.raises(md.VarianceError, match=message):
        spmd.shard_map(ERRORS[message], **options)(np.ones(2 * RANKS), np.ones(2))
    assert mesh.calls == {}


@few
@each("times", [1, 2])
def test_what_is_written_is_what_communicates(times):
    """Check the sums of w and of all pbroadcast values, in one call."""
    mesh = mesh_of(RANKS)
    x, w = np.arange(2.0 * RANKS), np.array([0.5, -0.5])

    def body(x, w):
        v = pbroadcast(w, "i")
        return np.sum(x * v + np.sin(x) * (v if times == 1 else pbroadcast(w, "i")))

    specs = {"in_specs": (P("i"), P()), "out_specs": P(sum="i"), "auto_pbroadcast": False}
    f = spmd.shard_map(body, mesh=mesh, **specs)
    of_whole = lambda x, w: np.sum((x + np.sin(x)) * np.concatenate([w] * RANKS))  # noqa: E731
    outcome = run_and_count(md.value_and_grad(f, (0, 1)), mesh, x, w)
    assert_trees_close(outcome, md.value_and_grad(of_whole, (0, 1))(x, w))
    report = spmd.communication(md.grad(f, 1))(x, w)
    assert (report.counts, report.bytes) == ({"psum": 2}, 8 + times * w.nbytes)


# ---------------------------------------------------------------- what is printed


@pytest.mark.parallel(4)
@each("name", EXAMPLES)
def test_the_tutorials_collectives(name, capsys):
    """Each rank prints its own block, and has the tutorial's numbers."""
    example = EXAMPLES[name]
    mesh = example.mesh(backend="mpi")
    y = example.mapped(mesh, lambda when, block: print(f"{when}:\n", block))(example.x)
    before, after = (text_of(example, blocks, [mesh.rank]) for blocks in (example.before, example.after))
    assert capsys.readouterr().out == f"BEFORE:\n {before}\nAFTER:\n {after}\n"
    numpy.testing.assert_array_equal(whole(y), example.result)


SPECS = [P("i", "j"), P("j", "i"), P(("i", "j")), P(None, ("j", "i")), P("i"), P(None, "j"), P()]


@pytest.mark.parallel(4)
def test_blocks_tiled_and_transposed():
    """Cut up as one spec says and put together as another."""
    x = np.arange(48).reshape(4, 12)
    for in_spec, out_spec in itertools.product(SPECS, SPECS):
        if in_spec.axes <= out_spec.axes:
            real, simulated = (
                spmd.shard_map(lambda x: x + 1, mesh_of(2, 2, backend=on), in_specs=in_spec, out_specs=out_spec)(x)
                for on in ("mpi", "simulated")
            )
            numpy.testing.assert_array_equal(whole(real), numpy.asarray(simulated), strict=True)


@pytest.mark.parallel(2)
def test_each_rank_prints_what_a_simulated_one_prints():
    rank, x = MPI.COMM_WORLD.rank, np.arange(4.0)
    f, simulated = (spmd.shard_map(printing, mesh_of(2, backend=on), (P(), P("i")), P()) for on in ("mpi", "simulated"))
    name = f"rank {rank} at mesh coordinates (i,) = ({rank},): "
    expected = [line for line in printed(simulated, 0.5, x) if line.startswith(name)]
    assert expected[0] == f"{name}x = {x[2 * rank : 2 * rank + 2]}" and len(expected) == 4
    for use in (f, md.jit(f), md.grad(f), md.jit(md.grad(f))):
        assert printed(use, 0.5, x) == expected


# ---------------------------------------------------------------- random keys


@few
@pytest.mark.parametrize("name", ["shard_map", "grad of shard_map", "jit of shard_map"])
def test_keys_that_are_used_twice(name):
    key_programs.check("mpi", name)
