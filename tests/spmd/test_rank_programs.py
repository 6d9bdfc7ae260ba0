"""Random programs on meshes of one to three axes: with types, without, and as functions of whole arrays."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs.rank import COLLECTIVE, CONTROL, FURTHER, LOCAL, REDUNDANT, random_program

seeds = st.integers(0, 10**6)
CLOSE = {"rtol": 1e-7, "atol": 1e-9}
#: Options of `random_program`, the instructions that they add, and seeds of programs that were wrong.
KINDS = {
    "plain": ((), ()),
    "further": (FURTHER, (610, 2584, 5124)),  # values of the root's that ranks take to be theirs
    "control": (CONTROL, (17354,)),
    "redundant": (REDUNDANT, ()),
}


def program_of(seed, kind):
    return random_program(seed, **({} if kind == "plain" else {kind: True}))


def losses(seed, kind="plain"):
    """A program with types, without, and on lists; and arguments."""
    program = program_of(seed, kind)
    over = mesh(*program.shape.values())
    return program.on_ranks(over), program.on_ranks(over, check_rep=False), program.on_lists(), program.example(seed)


def gradient(loss):
    return lambda *args: md.grad(loss, tuple(range(len(args))))(*args)


def names_of(instructions):
    return {step.name for step in instructions}.union(*[names_of(step.body) for step in instructions])


@each("kind", KINDS)
def test_every_instruction_occurs(kind):
    names = set().union(*[names_of(program_of(seed, kind).instructions) for seed in range(300)])
    assert names == {*LOCAL, *COLLECTIVE, *KINDS[kind][0]}


def check_derivatives(seed, kind):
    """Values, gradients and tangents: run step by step, on tapes, and compiled."""
    typed, untyped, whole, args = losses(seed, kind)
    expected = [whole(*args), gradient(whole)(*args)]
    for loss in (typed, untyped):
        both = lambda *args, f=loss: [f(*args), gradient(f)(*args)]  # noqa: E731
        tapes = md.make_tape(both)(*args), spmd.rewritten(both)(*args)
        assert_trees_close(both(*args), expected, **CLOSE)
        assert_trees_close(md.jvp(loss, args, args), md.jvp(whole, args, args), **CLOSE)
        assert tapes[0] == md.make_tape(both)(*args)
        for tape in tapes:
            tape.check()
            assert_trees_close(tape(*args), md.tree.leaves(expected), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_with_types_and_without_equal_those_of_whole_arrays(kind):
    for seed in KINDS[kind][1]:
        check_derivatives(seed, kind)
    settings(deadline=None, max_examples=25)(given(seeds)(lambda seed: check_derivatives(seed, kind)))()


@settings(deadline=None, max_examples=15)
@given(seeds, st.sampled_from(["plain", "further"]))
def test_a_vmap_around_or_in_the_body_is_a_loop(seed, kind):
    """Values, gradients, and gradients of gradients."""
    program = program_of(seed, kind)
    over = spmd.make_mesh(tuple(program.shape.values()), tuple(program.shape), backend="simulated")
    args = [np.stack(pair) for pair in zip(program.example(seed), program.example(seed + 1))]
    loss = program.on_ranks(over)

    def by_loop(*args):
        return np.stack([loss(*[x[k] for x in args]) for k in range(2)])

    def of(losses):
        squares = lambda *args: np.sum(losses(*args) ** 2)  # noqa: E731
        second = md.grad(lambda *args: sum(np.sum(np.sin(g)) for g in gradient(squares)(*args)))
        return squares(*args), gradient(squares)(*args), second(*args)

    # The loop comes last: what a mesh has cached of batches must not change the types of their elements.
    *results, expected = map(of, (md.vmap(loss), program.on_ranks(over, batched=True), by_loop))
    for result in results:
        assert_trees_close(result, expected, **CLOSE)


@each("seed, kind", [*((seed, "plain") for seed in range(20)), *((seed, "further") for seed in range(4))], str)
def test_second_derivatives(seed, kind):
    typed, _, whole, args = losses(seed, kind)
    second = lambda loss: md.grad(lambda *xs: np.sum(np.sin(md.grad(loss)(*xs))))(*args)  # noqa: E731
    assert_trees_close(second(typed), second(whole), **CLOSE)


@pytest.mark.parametrize("seed", [193, 1024])
def test_types_of_what_is_compiled_for_other_dtypes(seed):
    typed, untyped, _, args = losses(seed, "control")
    args = [x.astype("float32") if k == 0 else x for k, x in enumerate(args)]
    for loss in (typed, untyped):
        tape = spmd.rewritten(gradient(loss))(*args)
        tape.check()
        assert_trees_close(tape(*args), md.tree.leaves(gradient(loss)(*args)), rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- numbers of sums

ALONE = ("fuse psums", "fuse shard maps")  # without these, each psum is for itself


def counts_of(tape):
    return spmd.communication(tape).counts


def check_no_more(smaller, larger):
    """There are no more psums, and no more calls, in one tape than in another one."""
    fewer, counts = counts_of(smaller), counts_of(larger)
    assert fewer.get("psum", 0) <= counts.get("psum", 0)
    assert sum(fewer.values()) <= sum(counts.values())


@settings(deadline=None, max_examples=25)
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
    delayed, before = (
        spmd.rewritten(gradient(typed), without=without)(*args) for without in (ALONE, (*ALONE, "delay psums"))
    )
    assert_trees_close(delayed(*args), before(*args), **CLOSE)
    check_no_more(delayed, before)


@each(
    "seed, kind", [*((seed, "plain") for seed in range(40)), *((seed, "control") for seed in (174, 411, 448, 297))], str
)
def test_types_do_not_cost_an_all_reduce(seed, kind):
    """Each sum alone, and as many as possible in one call; of loops also as they run, of which nobody needs some."""
    *both, _, args = losses(seed, kind)
    for without in (ALONE, ()):
        check_no_more(*[spmd.rewritten(gradient(loss), without=without)(*args) for loss in both])
    if kind == "control":
        check_no_more(*[md.make_tape(gradient(loss))(*args) for loss in both])


@settings(deadline=None, max_examples=30)
@given(seeds)
@example(241)
@example(1644)
@example(2309)
@example(8389)
@example(18500)
def test_what_is_not_compiled_sums_what_it_pbroadcasts(seed):
    """Eager programs run at most one all-reduce in the backward pass for each pbroadcast in the forward pass."""
    typed, _, _, args = losses(seed)
    forward = md.make_tape(typed)(*args)
    there, back = counts_of(forward), counts_of(md.make_tape(gradient(typed))(*args))
    extrema = there.get("pmax", 0) + there.get("pmin", 0)  # whose derivative has two sums of its own
    pbroadcasts = str(forward).count("= pbroadcast(")
    assert back.get("psum", 0) <= there.get("psum", 0) + pbroadcasts + 2 * extrema
