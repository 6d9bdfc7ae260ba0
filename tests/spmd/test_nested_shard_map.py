"""shard_map inside the body of another, over other axes of the same mesh."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pbroadcast, psum
from spmd import P
from tests.checks.samples import each
from tests.programs.nested import NESTED, NESTED_ARGS, check_nested, one_by_one, summed, two_levels
from tests.programs.on_blocks import STEPS, Program, assert_trees_close, example

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
CUBE = spmd.make_mesh((2, 1, 3), ("i", "j", "k"), backend="simulated")


def columns(f, **options):
    """Inside: along j."""
    return spmd.shard_map(f, **{"in_specs": P("j"), "out_specs": P("j"), **options})


def rows(f, **options):
    """Outside: along i."""
    return spmd.shard_map(f, **{"mesh": MESH, "in_specs": P("i"), "out_specs": P("i"), "axis_names": {"i"}, **options})


# ---------------------------------------------------------------- one by one is all at once


@st.composite
def levels(draw):
    """A mesh, and some of its axes in some order, cut into levels."""
    mesh = draw(st.sampled_from([MESH, CUBE]))
    axes = draw(st.permutations(mesh.axis_names))[: draw(st.integers(2, 3))]
    cuts = sorted(draw(st.sets(st.integers(1, len(axes) - 1), min_size=1)))
    return mesh, [tuple(axes[a:b]) for a, b in zip([0, *cuts], [*cuts, len(axes)])]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3).map(Program), levels(), st.booleans())
def test_one_axis_after_the_other(program, placement, closed_over):
    mesh, levels = placement
    axes = tuple(a for level in levels for a in level)
    size = math.prod(mesh.shape[a] for a in axes)
    args = example(program, rows=size, seed=len(program.steps))
    expected = md.value_and_grad(program.whole(size), (0, 1))(*args)
    expected_tangents = md.jvp(program.whole(size), args, args)
    for typed in (True, False):
        flat = program.sharded(mesh, axes, closed_over, check_rep=typed)
        nested = program.sharded(mesh, axes, closed_over, one_by_one(*levels), check_rep=typed)
        gradient = md.value_and_grad(nested, (0, 1))
        assert_trees_close(gradient(*args), expected)
        assert_trees_close(md.jvp(nested, args, args), expected_tangents)
        tape = md.make_tape(gradient)(*args)
        tape.check()
        assert_trees_close(tape(*md.tree.leaves(args)), md.tree.leaves(expected))
        if typed:  # as many sums as all at once (without types, each body has its own); gathers come on top
            assert without_gathers(spmd.communication(tape).counts) == without_gathers(communication_of(flat, args))


def communication_of(f, args):
    return spmd.communication(md.value_and_grad(f, (0, 1)))(*args).counts


def without_gathers(counts):
    return {name: n for name, n in counts.items() if name != "all_gather_invariant"}


# ---------------------------------------------------------------- programs made for it


@each("typed", [True, False])
@each("name", NESTED)
def test_programs(name, typed):
    check_nested(name, MESH, typed)


@pytest.mark.parametrize("name", ["chained", "within"])  # the branches of the other depend on what is vectorized
def test_vectorized(name):
    on_blocks, whole = NESTED[name]
    f, (w, x) = two_levels(on_blocks, MESH), NESTED_ARGS
    many = np.stack([x, x + 0.5, 0.3 * x])
    gradient = md.grad(summed(f), (0, 1))
    expected = md.vmap(md.grad(summed(whole), (0, 1)), (None, 0))(w, many)
    assert_trees_close(md.vmap(gradient, (None, 0))(w, many), expected)
    total = lambda w, many: md.vmap(summed(f), (None, 0))(w, many).sum()  # noqa: E731
    assert_trees_close(md.grad(total, 1)(w, many), expected[1])


# ---------------------------------------------------------------- what holds in the bodies


def test_types_in_both_bodies():
    seen = []

    def inside(x, y, z):
        seen.append([str(md.typeof(v)) for v in (x, y, z, x * y, psum(x * y, "j"), psum(x * y, "i"), axis_index("j"))])
        return x * y, psum(x * y, "j"), z

    def outside(x, y):
        out = columns(inside, in_specs=(P(None, "j"), P("j"), P()), out_specs=(P(None, "j"), P(), P()))(x, y, x.sum())
        seen.append([str(md.typeof(v)) for v in (x, y, *out)])
        return out

    f = rows(outside, in_specs=(P("i"), P()), out_specs=(P("i"), P("i"), P("i")))
    with pytest.raises(ValueError, match=r"has 1 entry, but the result.* has 0 dimensions"):
        f(np.ones((4, 4)), np.ones(4))
    inner = ["f64[2,2]{i,j}", "f64[2]{j}", "f64[]{i}", "f64[2,2]{i,j}", "f64[2,2]{i}", "f64[2,2]{j}", "i64[]{j}"]
    outer = ["f64[2,4]{i}", "f64[4]", "f64[2,4]{i}", "f64[2,2]{i}", "f64[]{i}"]
    assert seen == [inner, outer]
    seen.clear()
    f = rows(lambda x, y: outside(x, y)[:2], in_specs=(P("i"), P()), out_specs=(P("i"), P("i")))
    md.make_tape(f)(np.ones((4, 4)), np.ones(4)).check()
    assert seen == [inner, outer]


def test_an_outer_one_over_some_axes_leaves_the_others_alone():
    f = rows(lambda x: (x * psum(x, "i"), psum(x.sum(), "i")), out_specs=(P("i"), P()))
    x = np.arange(4.0)
    y, total = f(x)
    np.testing.assert_array_equal(y.gather(), x * (x + x[[2, 3, 0, 1]]))
    assert (y.spec, total) == (P("i"), 6.0)
    for use in (lambda x: psum(x, "j"), lambda x: x * axis_index("j")):
        with pytest.raises(md.UnboundAxisError, match=r"no axis 'j' here; the axes .* \('i',\)"):
            rows(use)(x)


def test_the_mesh_may_be_named_or_left_out():
    f = lambda x: x * axis_index("j") + 10.0 * axis_index("i")  # noqa: E731
    for inner in (columns(f), columns(f, mesh=MESH), columns(f, axis_names={"j"}), columns(f, axis_names=("j",))):
        np.testing.assert_array_equal(rows(inner)(np.ones(4)).gather(), [0, 1, 10, 11])


def test_a_residual_stays_split():
    """Residuals of an inner body are never gathered."""
    f = rows(lambda x: psum(columns(lambda y: np.sin(np.sin(y)))(x), "i").sum(), out_specs=P())
    pullback = md.vjp(f, np.arange(4.0))[1]
    tape = md.make_tape(md.grad(f))(np.arange(4.0))
    assert "P(('i', 'j'))" in str(tape)
    assert spmd.communication(md.grad(f))(np.arange(4.0)).counts == {"psum": 1, "all_gather_invariant": 2}
    np.testing.assert_allclose(np.asarray(pullback(1.0)[0]), np.cos(np.sin(np.arange(4.0))) * np.cos(np.arange(4.0)))


def test_successive_ones_pass_their_blocks_on():
    """Compiled, a gather and a slice between two inner bodies cancel."""
    g = lambda y: spmd.shard_map(lambda y: psum(np.sin(y).sum(), ("i", "j")), in_specs=P("j"), out_specs=P())(y)  # noqa: E731
    f = rows(lambda x: g(columns(np.sin)(x)), out_specs=P())
    assert spmd.communication(f)(np.arange(4.0)).counts == {"all_gather_invariant": 1, "psum": 1}
    assert spmd.communication(f, optimized=True)(np.arange(4.0)).counts == {"psum": 1}


def test_in_the_rule_of_a_custom_derivative():
    """The rule runs in the backward pass, where the outer one's function does not."""
    twice = md.custom_vjp(lambda x: 2.0 * x)
    twice.defvjp(lambda x: (2.0 * x, None), lambda _, ct: (columns(lambda c: 2.0 * c, axis_names={"j"})(ct),))
    gradient = md.grad(lambda x: np.sum(rows(twice)(x) ** 2))
    for f in (gradient, md.jit(gradient)):
        np.testing.assert_array_equal(np.asarray(f(np.arange(4.0))), 8 * np.arange(4.0))


def test_printing_and_branching(capsys):
    def body(x):
        y = columns(lambda y: 2 * y)(x)
        print(y)
        z = columns(lambda y: psum(y.sum(), ("i", "j")), out_specs=P())(y)
        return y * 10 if z > 0 else y

    np.testing.assert_array_equal(rows(body)(np.arange(4.0)).gather(), 20 * np.arange(4.0))
    assert "On rank 3 at mesh coordinates (i, j) = (1, 1):\n[4. 6.]" in capsys.readouterr().out


def test_an_inner_one_is_collectives_on_the_tape():
    tape = str(md.make_tape(rows(columns(np.sin)))(np.ones(4)))
    assert tape.count("shard_map(") == 1
    assert "= pscatter(c, 'j', axis=0, tiled=True)" in tape
    assert "= all_gather_invariant(e, 'j', axis=0, tiled=True)" in tape


# ---------------------------------------------------------------- errors

OTHER = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")

ERRORS = {
    "rows(columns(abs, in_specs=P('i'), axis_names={'i', 'j'}))": (
        r"in_specs = P\('i'\) names the axis 'i', but this shard_map maps over {'j'}: the outer one maps over 'i'"
    ),
    "rows(columns(abs), axis_names=())": (
        r"in_specs = P\('j'\) names the axis 'j', but this shard_map maps over {}: the outer one maps over 'j'"
    ),
    "rows(columns(abs, mesh=OTHER))": r"use the same mesh, Mesh\(i: 2, j: 2; .*make one mesh with the axes of both",
    "rows(columns(abs, in_specs=P('i')))": (
        r"in_specs = P\('i'\) names the axis 'i', but this .* maps over {'j'}: the outer one maps over 'i'.*leave"
    ),
    "rows(abs, out_specs=(P('j'),))": (
        r"out_specs\[0\] = P\('j'\) names the axis 'j', but this .* maps over {'i'}: add 'j' to axis_names"
    ),
    "rows(abs, axis_names={'k'})": r"axis_names names 'k', but .* \('i', 'j'\)",
    "rows(columns(abs, axis_names={'k'}))": r"axis_names names 'k', but .* \('i', 'j'\)",
    "rows(columns(abs), check_rep=False)": "write check_rep=False here",
    "rows(abs, mesh=None)": "mesh is missing; only inside the body of another",
    "rows(abs, axis_names='i')": "axis_names must be a set of names, {'i'}",
    "rows(columns(abs, out_specs=P()))": (
        r"the result has type f64\[1\]\{i,j\}.*along 'j', but its out_specs entry P\(\) does not name 'j'"
    ),
    "rows(columns(lambda x: psum(x.sum(), 'j'), out_specs=P()), out_specs=P())": (
        r"the result has type f64\[\]\{i\}.*along 'i', but its out_specs entry P\(\)"
    ),
    "rows(columns(lambda x: x if x.sum() > 0 else -x))": "varies along 'i', 'j': the ranks would take different",
}


@each("staged", [False, True], ids=["", "staged"])
@each("program", ERRORS)
def test_errors(program, staged):
    if staged and "if x.sum()" in program:  # it has a value to look at when it runs alone
        return
    with pytest.raises((ValueError, TypeError), match=ERRORS[program]):
        (md.make_tape if staged else lambda f: f)(eval(program, globals()))(np.ones(4))


def test_leaked_values_are_named():
    saved = []
    rows(columns(lambda x: saved.append(x) or x))(np.ones(4))
    rows(lambda x: saved.append(columns(abs)(x)) or x)(np.ones(4))
    for x in saved:
        with pytest.raises(md.LeakedTracerError, match="was used outside the transformation it belongs to"):
            rows(lambda y, x=x: columns(lambda z: z * x)(y))(np.ones(4))


def test_explicit_pbroadcasts_along_both():
    def inside(y, w):
        return psum(y * pbroadcast(w, ("i", "j")), ("i", "j"))

    f = lambda w: rows(  # noqa: E731
        lambda x: columns(lambda y: inside(y, w), out_specs=P())(x).sum(), out_specs=P()
    )(np.arange(4.0))
    assert (f(2.0), md.grad(f)(2.0), communication(md.grad(f))) == (12.0, 6.0, {"psum": 2})


def communication(f):
    return spmd.communication(f)(2.0).counts
