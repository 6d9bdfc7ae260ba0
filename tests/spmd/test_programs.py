"""Random programs through shard_map against the same function of whole arrays."""

import math

import hypothesis.strategies as st
from hypothesis import example as known_failure
from hypothesis import given, settings

import minidiff as md
import spmd
from spmd import P
from tests.checks.samples import each
from tests.programs.on_blocks import STEPS, SUMS_IN_STEPS, Program, assert_trees_close, example

MESHES = [
    spmd.make_mesh(shape, names, backend="simulated")
    for shape, names in [
        ((1,), ("i",)),
        ((2,), ("i",)),
        ((3,), ("i",)),
        ((2, 2), ("i", "j")),
        ((1, 3), ("i", "j")),
        ((2, 1, 2), ("i", "j", "k")),
    ]
]
programs = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4).map(Program)


@st.composite
def placements(draw):
    """A mesh, and some of its axes in some order."""
    mesh = draw(st.sampled_from(MESHES))
    axes = draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, max_size=3, unique=True))
    return mesh, tuple(axes)


def check_program(program, mesh, axes, closed_over, seed):
    size = math.prod(mesh.shape[a] for a in axes)
    args = example(program, rows=2 * size, seed=seed)
    whole, sharded = program.whole(size), program.sharded(mesh, axes, closed_over)
    untyped = program.sharded(mesh, axes, closed_over, check_rep=False)
    expected = md.value_and_grad(whole, (0, 1))(*args)
    assert_trees_close(md.value_and_grad(sharded, (0, 1))(*args), expected)
    assert_trees_close(md.value_and_grad(untyped, (0, 1))(*args), expected)
    assert_trees_close(md.jvp(sharded, args, args), md.jvp(whole, args, args))

    if SUMS_IN_STEPS.intersection(program.steps):
        return
    # In all: where types let a gathered value be invariant, a psum takes the place of a psum_scatter.
    counts = [spmd.communication(md.grad(loss, (0, 1)))(*args).counts for loss in (sharded, untyped)]
    assert sum(counts[0].values()) <= sum(counts[1].values())


@settings(deadline=None, max_examples=60)
@given(programs, placements(), st.booleans(), st.integers(0, 9))
@known_failure(Program(["gather invariantly", "gather invariantly"]), (MESHES[0], ("i",)), False, 0)
def test_sharded_equals_whole(program, placement, closed_over, seed):
    check_program(program, *placement, closed_over, seed)


@each("name", STEPS)
@each("closed_over", [False, True])
def test_each_step(name, closed_over):
    check_program(Program([name, "scale by a parameter"]), MESHES[3], ("j", "i"), closed_over, seed=1)


@settings(deadline=None, max_examples=15)
@given(programs, placements(), st.booleans())
def test_second_derivatives(program, placement, closed_over):
    mesh, axes = placement
    size = math.prod(mesh.shape[a] for a in axes)
    args = example(program, rows=size, seed=3)

    def gradient_along(loss):
        return lambda x, params: md.jvp(md.grad(loss, (0, 1)), (x, params), args)[1]

    expected = gradient_along(program.whole(size))(*args)
    assert_trees_close(gradient_along(program.sharded(mesh, axes, closed_over))(*args), expected)
    of_gradient = md.grad(lambda x, params: (md.grad(program.sharded(mesh, axes, closed_over))(x, params) ** 2).sum())
    of_whole = md.grad(lambda x, params: (md.grad(program.whole(size))(x, params) ** 2).sum())
    assert_trees_close(of_gradient(*args), of_whole(*args))


@settings(deadline=None, max_examples=20)
@given(programs, placements(), st.booleans(), st.booleans())
def test_tapes_check_and_run(program, placement, closed_over, typed):
    mesh, axes = placement
    size = math.prod(mesh.shape[a] for a in axes)
    args = example(program, rows=size, seed=4)
    gradient = md.grad(program.sharded(mesh, axes, closed_over, check_rep=typed), (0, 1))
    tape = md.make_tape(gradient)(*args)
    tape.check()
    assert tape == md.make_tape(gradient)(*args)
    assert_trees_close(tape(*md.tree.leaves(args)), md.tree.leaves(gradient(*args)))


@settings(deadline=None, max_examples=15)
@given(programs, placements(), st.booleans())
def test_vectorized(program, placement, closed_over):
    mesh, axes = placement
    size = math.prod(mesh.shape[a] for a in axes)
    (x, params), (y, others) = (example(program, rows=size, seed=s) for s in (5, 6))
    both = md.tree.map(lambda a, b: md.numpy.stack([a, b]), (x, params), (y, others))
    gradient = md.grad(program.sharded(mesh, axes, closed_over), (0, 1))
    expected = md.tree.map(lambda a, b: md.numpy.stack([a, b]), gradient(x, params), gradient(y, others))
    assert_trees_close(md.vmap(gradient)(*both), expected)

    total = md.grad(lambda x, params: md.vmap(program.sharded(mesh, axes, closed_over))(x, params).sum(), (0, 1))
    assert_trees_close(total(*both), expected)


@settings(deadline=None, max_examples=15)
@given(programs, placements(), st.sampled_from([None, "v"]), st.booleans())
def test_vectorized_in_the_body(program, placement, name, closed_over):
    """vmap, and gradients under it, in a body and around one; and the gradients of those."""
    mesh, axes = placement
    size = math.prod(mesh.shape[a] for a in axes)
    (x, params), (y, _) = (example(program, rows=size, seed=s) for s in (7, 8))
    xs = md.numpy.stack([x, y])
    on_blocks, whole = program.on_blocks(mesh, axes), program.whole(size)

    def mapped(f, out_specs):
        in_specs = (P(None, axes), P())
        if not closed_over:
            return spmd.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return lambda xs, params: spmd.shard_map(
            lambda xs: f(xs, params), mesh=mesh, in_specs=in_specs[0], out_specs=out_specs
        )(xs)

    def of_each(f):
        return md.vmap(f, in_axes=(0, None), axis_name=name)

    losses = mapped(of_each(on_blocks), P())
    assert_trees_close(losses(xs, params), of_each(whole)(xs, params))
    total = [lambda *args, f=f: (f(*args) ** 2).sum() for f in (losses, of_each(whole))]
    expected = md.grad(total[1], (0, 1))(xs, params)
    assert_trees_close(md.grad(total[0], (0, 1))(xs, params), expected)

    inside = mapped(of_each(md.grad(on_blocks, (0, 1))), (P(None, axes), P()))
    outside = of_each(md.grad(whole, (0, 1)))
    assert_trees_close(inside(xs, params), outside(xs, params))
    squares = [lambda *args, f=f: sum((g**2).sum() for g in md.tree.leaves(f(*args))) for f in (inside, outside)]
    expected = md.grad(squares[1], (0, 1))(xs, params)
    assert_trees_close(md.grad(squares[0], (0, 1))(xs, params), expected)
    tape = md.make_tape(md.grad(squares[0], (0, 1)))(xs, params)
    tape.check()
    assert_trees_close(tape(*md.tree.leaves((xs, params))), md.tree.leaves(expected))
