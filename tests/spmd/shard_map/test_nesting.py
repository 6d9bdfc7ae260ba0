"""shard_map inside the body of another, over other axes of the same mesh."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_kinds, check_values
from tests.checks.results import assert_trees_close
from tests.programs.nested import NESTED, NESTED_ARGS, one_by_one, two_levels
from tests.programs.rank import random_program

PLANE = mesh(2, 2)
X = np.arange(4.0)


def columns(f, **options):
    """Inside: along j."""
    return spmd.shard_map(f, **{"in_specs": P("j"), "out_specs": P("j"), **options})


def rows(f, out_specs=P("i")):
    """Outside: along i."""
    return mapped(f, PLANE, P("i"), out_specs, axis_names={"i"})


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


@pytest.mark.parametrize("options", [{}, {"mesh": PLANE}, {"axis_names": {"j"}}, {"axis_names": ("j",)}])
def test_the_mesh_may_be_named_or_left_out(options):
    inner = columns(lambda x: x * axis_index("j") + 10.0 * axis_index("i"), **options)
    np.testing.assert_array_equal(rows(inner)(np.ones(4)), [0, 1, 10, 11])


def test_a_residual_stays_split():
    f = rows(lambda x: psum(columns(lambda y: np.sin(np.sin(y)))(x), "i").sum(), P())
    check_values(md.grad(f), (X,), lambda x: np.cos(np.sin(x)) * np.cos(x))
    assert "P(('i', 'j'))" in str(md.make_tape(md.grad(f))(X))
    assert spmd.communication(md.grad(f))(X).counts == {"psum": 1, "all_gather_invariant": 2}


def test_an_inner_one_is_collectives_on_the_tape_of_which_successive_ones_need_none():
    (equation,) = md.make_tape(rows(columns(np.sin)))(X).equations
    names = [e.primitive.name for e in equation.params["body"].equations]
    assert names == ["pscatter", "sin", "all_gather_invariant"]
    total = lambda y: psum(np.sin(y).sum(), ("i", "j"))  # noqa: E731
    f = rows(lambda x: columns(total, out_specs=P())(columns(np.sin)(x)), P())
    assert spmd.communication(f)(X).counts == {"all_gather_invariant": 1, "psum": 1}
    assert spmd.communication(f, optimized=True)(X).counts == {"psum": 1}


def test_in_the_rule_of_a_custom_derivative():
    """The rule runs in the backward pass, where the outer one's function does not."""
    twice = md.custom_vjp(lambda x: 2.0 * x)
    twice.defvjp(lambda x: (2.0 * x, None), lambda _, ct: (columns(lambda c: 2.0 * c, axis_names={"j"})(ct),))
    check_values(md.grad(lambda x: np.sum(rows(twice)(x) ** 2)), (X,), lambda x: 8 * x)
