"""shard_map inside the body of another, over other axes of the same mesh; `nesting.md` shows it."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import minidiff as md
import spmd
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.of_whole import check_kinds
from tests.checks.results import assert_trees_close
from tests.programs.nested import NESTED, NESTED_ARGS, one_by_one, two_levels
from tests.programs.rank import random_program

PLANE = mesh(2, 2)


@st.composite
def levels(draw):
    """Axes of a mesh in some order, cut into levels."""
    axes = draw(st.permutations("ijk"))
    cuts = sorted(draw(st.sets(st.integers(1, 2), min_size=1)))
    return [tuple(axes[a:b]) for a, b in zip([0, *cuts], [*cuts, 3])]


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**6), levels())
def test_one_axis_after_the_other_is_all_at_once(seed, levels):
    """With types, by as many sums; gathers come on top."""
    program, over = random_program(seed, (2, 1, 2)), mesh(2, 1, 2)
    in_order = lambda axes: tuple(sorted(axes, key=[a for level in levels for a in level].index)) or None  # noqa: E731
    program = dataclasses.replace(program, specs=[P(*map(in_order, spec.dims(2))) for spec in program.specs])
    args = program.example(seed)
    gradient = lambda f: md.value_and_grad(f, tuple(range(len(args))))  # noqa: E731
    whole, loops = program.on_lists(), one_by_one(*levels)
    for typed in (True, False):
        flat, nested = (program.on_ranks(over, shard_map=f, check_rep=typed) for f in (spmd.shard_map, loops))
        tape = md.make_tape(gradient(nested))(*args)
        tape.check()
        for actual in (md.tree.leaves(gradient(nested)(*args)), tape(*args)):
            assert_trees_close(actual, md.tree.leaves(gradient(whole)(*args)), rtol=1e-7, atol=1e-9)
        assert_trees_close(md.jvp(nested, args, args), md.jvp(whole, args, args), rtol=1e-7, atol=1e-9)
        if typed:
            counts = [spmd.communication(gradient(f))(*args).counts.get("psum", 0) for f in (nested, flat)]
            assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["chained", "within"])  # the branches of the other depend on what is vectorized
def test_batches(name):
    on_blocks, whole = NESTED[name]
    check_kinds(two_levels(on_blocks, PLANE), NESTED_ARGS, whole, ("vmap of grad", "grad of vmap"))
