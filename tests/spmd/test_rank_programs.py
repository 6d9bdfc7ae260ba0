"""Random programs on meshes of one to three axes: with types, without, and as functions of whole arrays."""

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.compiler.program import optimize
from tests.checks.samples import each
from tests.programs.on_blocks import assert_trees_close
from tests.programs.rank import COLLECTIVE, CONTROL, FURTHER, LOCAL, random_program

seeds = st.integers(0, 10**6)
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


def losses(seed, **options):
    """A program with types, without, and on lists; and arguments."""
    program = random_program(seed, **options)
    mesh = spmd.make_mesh(tuple(program.shape.values()), tuple(program.shape), backend="simulated")
    return program.on_ranks(mesh), program.on_ranks(mesh, check_rep=False), program.on_lists(), program.example(seed)


def names_of(instructions):
    return {step.name for step in instructions}.union(*[names_of(step.body) for step in instructions])


def test_every_instruction_occurs():
    for options, seeds, expected in (
        ({}, 200, {*LOCAL, *COLLECTIVE}),
        ({"further": True}, 300, {*LOCAL, *COLLECTIVE, *FURTHER}),
        ({"control": True}, 300, {*LOCAL, *COLLECTIVE, *CONTROL}),
    ):
        assert (
            set().union(*[names_of(random_program(seed, **options).instructions) for seed in range(seeds)]) == expected
        )


@settings(deadline=None, max_examples=150)
@given(seeds)
def test_gradients_with_types_and_without_equal_those_of_whole_arrays(seed):
    check_gradients(*losses(seed))


def check_gradients(typed, untyped, whole, args):
    """Values and gradients are those of lists of blocks, with types and without; returns what they are."""
    numbers = tuple(range(len(args)))
    expected = md.value_and_grad(whole, numbers)(*args)
    for loss in (typed, untyped):
        assert_trees_close(md.value_and_grad(loss, numbers)(*args), expected, **CLOSE)
    return numbers, expected


@settings(deadline=None, max_examples=10)
@given(seeds)
def test_tangents_equal_those_of_whole_arrays(seed):
    typed, untyped, whole, args = losses(seed)
    expected = md.jvp(whole, args, args)
    for loss in (typed, untyped):
        assert_trees_close(md.jvp(loss, args, args), expected, **CLOSE)


@settings(deadline=None, max_examples=20)
@given(seeds, st.booleans())
def test_tapes_check_and_run(seed, control):
    typed, _, _, args = losses(seed, control=control)
    gradient = md.grad(typed, tuple(range(len(args))))
    tape = md.make_tape(gradient)(*args)
    tape.check()
    assert tape == md.make_tape(gradient)(*args)
    assert_trees_close(tape(*args), gradient(*args), **CLOSE)


@settings(deadline=None, max_examples=30)
@given(seeds, st.booleans())
def test_a_vmap_around_or_in_the_body_is_a_loop(seed, further):
    """Values, gradients, and gradients of gradients."""
    program = random_program(seed, further=further)
    mesh = spmd.make_mesh(tuple(program.shape.values()), tuple(program.shape), backend="simulated")
    args = [np.stack(pair) for pair in zip(program.example(seed), program.example(seed + 1))]
    loss, numbers = program.on_ranks(mesh), tuple(range(len(args)))

    def squares(losses):
        return lambda *args: np.sum(losses(*args) ** 2)

    def by_loop(*args):
        return np.stack([loss(*[x[k] for x in args]) for k in range(2)])

    def second(losses):
        return md.grad(lambda *args: sum(np.sum(np.sin(g)) for g in md.grad(squares(losses), numbers)(*args)))

    expected = md.value_and_grad(squares(by_loop), numbers)(*args), second(by_loop)(*args)
    for losses in (md.vmap(loss), program.on_ranks(mesh, batched=True)):
        actual = md.value_and_grad(squares(losses), numbers)(*args), second(losses)(*args)
        assert_trees_close(actual, expected, **CLOSE)


def steps(counts):
    """Return the cost of collectives; an all-reduce is a reduce-scatter and an all-gather."""
    return sum(counts.values()) + counts.get("psum", 0)


ALONE = ("fuse psums", "fuse shard maps")  # without these, each psum is for itself


@settings(deadline=None, max_examples=50)
@given(seeds)
@example(270)  # a psum before two operations that come together again
@example(292)  # over one axis here, over several there
@example(1270)  # before a part is taken
@example(3942)  # whose copies meet others, but not each other
@example(6191)  # along an axis of one rank
@example(8910)  # of which some copies are better not made
@example(1913)  # along axes of which one is of one rank, and along the other alone
def test_delayed_psums_are_never_more(seed):
    """Moved to where several are one, psums give the same results, and there are at most as many."""
    typed, _, _, args = losses(seed)
    gradient = md.grad(typed, tuple(range(len(args))))
    delayed = spmd.rewritten(gradient, without=ALONE)(*args)
    before = spmd.rewritten(gradient, without=(*ALONE, "delay psums"))(*args)
    delayed.check()
    assert_trees_close(delayed(*args), before(*args), **CLOSE)
    fewer, counts = (spmd.communication(tape).counts for tape in (delayed, before))
    assert fewer.get("psum", 0) <= counts.get("psum", 0)
    assert sum(fewer.values()) <= sum(counts.values())


@each("seed", range(60))
def test_types_do_not_cost_an_all_reduce(seed):
    """Count a compiled program's calls: each sum alone, and as many as possible in one call."""
    typed, untyped, _, args = losses(seed)
    tapes = [md.make_tape(md.grad(loss, tuple(range(len(args)))))(*args) for loss in (typed, untyped)]
    for without in (ALONE, ()):
        counts, old = (spmd.communication(optimize(tape, without=without)).counts for tape in tapes)
        assert counts.get("psum", 0) <= old.get("psum", 0)
        assert sum(counts.values()) <= sum(old.values())


def examples(*seeds):
    """The decorator that has a property tried with each of these as well."""
    return lambda test: functools.reduce(lambda test, seed: example(seed)(test), seeds, test)


@settings(deadline=None, max_examples=60)
@given(seeds)
@examples(241, 270, 1270, 1644, 2309, 8389, 18500)
def test_what_is_not_compiled_sums_what_it_pbroadcasts(seed):
    """Eager programs run at most one all-reduce in the backward pass for each pbroadcast in the forward pass."""
    typed, _, _, args = losses(seed)
    forward = md.make_tape(typed)(*args)
    backward = md.make_tape(md.grad(typed, tuple(range(len(args)))))(*args)
    backward.check()
    there, back = (spmd.communication(tape).counts for tape in (forward, backward))
    extrema = there.get("pmax", 0) + there.get("pmin", 0)  # whose derivative has two sums of its own
    pbroadcasts = str(forward).count("= pbroadcast(")
    assert back.get("psum", 0) <= there.get("psum", 0) + pbroadcasts + 2 * extrema


def test_types_save_all_reduces_where_nothing_is_compiled():
    """A single program may cost one more: each pbroadcast is summed where it stands."""
    counts = []
    for seed in range(40):
        *both, _, args = losses(seed)
        reports = [spmd.communication(md.grad(f, tuple(range(len(args)))))(*args) for f in both]
        counts.append([report.counts.get("psum", 0) for report in reports])
    typed, untyped = map(sum, zip(*counts))
    assert typed < 0.55 * untyped


@each("seed, further", [*((seed, False) for seed in range(20)), *((seed, True) for seed in range(8))], str)
def test_second_derivatives(seed, further):
    typed, _, whole, args = losses(seed, further=further)

    def of_gradient(loss):
        return md.grad(lambda *xs: np.sum(np.sin(md.grad(loss)(*xs))))

    assert_trees_close(of_gradient(typed)(*args), of_gradient(whole)(*args), **CLOSE)


# ---------------------------------------------------------------- with a root, of uneven parts, in groups


@settings(deadline=None, max_examples=80, derandomize=True)
@given(seeds)
@examples(610, 2584, 5124)  # values of the root's that ranks take to be their own
def test_gradients_of_further_collectives(seed):
    typed, untyped, whole, args = losses(seed, further=True)
    numbers, expected = check_gradients(typed, untyped, whole, args)
    fewer, old = (spmd.rewritten(md.value_and_grad(f, numbers), without=ALONE)(*args) for f in (typed, untyped))
    fewer.check()
    assert_trees_close(fewer(*args), md.tree.leaves(expected), **CLOSE)
    counts, without_types = (spmd.communication(t).counts for t in (fewer, old))
    assert counts.get("psum", 0) <= without_types.get("psum", 0) or steps(counts) <= steps(without_types)


# ---------------------------------------------------------------- with loops, choices and checkpoints


@settings(deadline=None, max_examples=30)
@given(seeds)
@example(17354)
def test_gradients_of_loops_choices_and_checkpoints(seed):
    """Run step by step, as tapes of loops, and as those are compiled."""
    typed, untyped, whole, args = losses(seed, control=True)
    numbers = tuple(range(len(args)))
    expected = md.value_and_grad(whole, numbers)(*args)
    assert_trees_close(md.value_and_grad(typed, numbers)(*args), expected, **CLOSE)
    for loss in (typed, untyped):
        tape = md.make_tape(md.value_and_grad(loss, numbers))(*args)
        fewer = spmd.rewritten(md.value_and_grad(loss, numbers))(*args)
        tape.check(), fewer.check()
        assert_trees_close(tape(*args), md.tree.leaves(expected), **CLOSE)
        assert_trees_close(fewer(*args), md.tree.leaves(expected), **CLOSE)


@pytest.mark.parametrize("seed", [174, 411, 448, 297])
def test_what_nobody_needs_of_loops_and_choices_is_not_summed(seed):
    """A loop-invariant value is computed once, without running an inner loop for all of its results."""
    typed, untyped, _, args = losses(seed, control=True)
    numbers = tuple(range(len(args)))
    for tape_of in (md.make_tape, spmd.rewritten):
        fewer, old = (spmd.communication(tape_of(md.grad(f, numbers))(*args)).counts for f in (typed, untyped))
        assert fewer.get("psum", 0) <= old.get("psum", 0)
        assert sum(fewer.values()) <= sum(old.values())


@pytest.mark.parametrize("seed", [193, 1024])
def test_types_of_what_is_compiled_for_other_dtypes(seed):
    typed, untyped, _, args = losses(seed, control=True)
    numbers = tuple(range(len(args)))
    args = [x.astype("float32") if k == 0 else x for k, x in enumerate(args)]
    for loss in (typed, untyped):
        tape = spmd.rewritten(md.grad(loss, numbers))(*args)
        tape.check()
        assert_trees_close(tape(*args), md.tree.leaves(md.grad(loss, numbers)(*args)), rtol=1e-3, atol=1e-5)
