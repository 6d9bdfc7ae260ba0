"""pbroadcasts hoisted out of loops and checkpoints: what is summed once, and that gradients stay what they are."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, pbroadcast, pmean, psum
from collectives.ops import pbroadcast_p
from collectives.passes.gradient_bucket import summed_backward_pass
from minidiff.core.reverse import extract_linear_part
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var
from minidiff.ops.elementwise import add
from spmd import P
from tests.programs.on_blocks import assert_trees_close, run_and_count

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
IJ = ("i", "j")
rng = np.random.default_rng(0)
X, W, WS = rng.normal(size=(8, 3)), rng.normal(size=3), rng.normal(size=(5, 3)) / 2


def averaged(f):
    """The mean of squares of `f(mean, x, …)`: on ranks that have a part of the rows of x, and of whole arrays."""

    def on_ranks(of=lambda loss: loss, out_specs=P(), mesh=MESH, **options):
        loss = lambda x, *ws: pmean(np.mean(f(lambda y: pmean(np.mean(y, axis=0), IJ), x, *ws) ** 2), IJ)  # noqa: E731
        return lambda x, *ws: spmd.shard_map(
            of(loss), mesh=mesh, in_specs=(P(IJ), *[P()] * len(ws)), out_specs=out_specs, **options
        )(x, *ws)

    return on_ranks, lambda x, *ws: np.mean(f(lambda y: np.mean(y, axis=0), x, *ws) ** 2)


def layers(mean, x, w, ws):
    return md.scan(lambda x, v: (np.tanh(x * v) + w, None), x, ws)[0]


def computed_in_a_step(mean, x, w, ws):
    return md.scan(lambda x, v: (np.tanh(x * np.sin(v * w)) + np.cos(w), None), x, ws)[0]


def constants(mean, x, w, ws):
    """In each step, what the loop does not change is computed, and meets what varies."""
    return md.scan(lambda x, v: (np.tanh(x * v) * np.sin(w) + w * np.sum(np.cos(w)), None), x, ws)[0]


def shared_carry(mean, x, w, ws):
    step = lambda c, v: ((np.sin(c[0]) * v, c[1] * c[0] + x), c[0])  # noqa: E731
    (c, x), ys = md.scan(step, (w, x), ws)
    return x * c + np.sum(ys, axis=0)


def loop_in_a_loop(mean, x, w, ws):
    def step(x, v):
        return md.fori_loop(0, 2, lambda k, x: np.tanh(x * v + w), x), None

    return md.scan(step, x, ws)[0]


def choice_in_a_loop(mean, x, w, ws):
    def step(x, v):
        return md.cond(v[0] > 0, lambda x: np.tanh(x * v) * w, lambda x: x + np.sin(v), x), None

    return md.scan(step, x, ws)[0]


def checkpointed(mean, x, w, ws):
    return md.scan(lambda x, v: (md.checkpoint(lambda x, v: np.tanh(x * v) + w)(x, v), None), x, ws)[0]


def checkpointed_layers(mean, x, w, ws):
    layer = md.checkpoint(lambda x, v, w: np.tanh(x * v) * w)
    for v in ws:
        x = layer(x, v, w)
    return x


def array_checkpointed(mean, x, w, ws):
    """A value that is recomputed reads an array that is on its tape, and that must vary."""
    scale = np.array([0.5, 1.0, 2.0])
    return md.checkpoint(lambda x, w, ws: np.tanh(x * (np.sin(w) * scale)) + scale * ws[0])(x, w, ws)


def centred(mean, x, w, ws):
    """In each step a sum, of which the next one depends: that is what cannot be done at once."""
    return md.scan(lambda x, v: (np.tanh((x - mean(x)) * v) + w, None), x, ws)[0]


def operand_of_a_choice(mean, x, w, ws):
    def step(x, v):
        return md.cond(v[0] > 0, lambda x, w: np.tanh(x * v) * w, lambda x, w: x + np.sum(w) * v, x, w), None

    return md.scan(step, x, ws)[0]


def operand_of_a_switch(mean, x, w, ws):
    branches = [lambda x, w: np.tanh(x) + w, lambda x, w: x * w[::-1], lambda x, w: np.sin(x)]
    return md.fori_loop(0, 5, lambda k, x: md.switch(k % 3, branches, x, w) * ws[k], x)


def unchanged_carry(mean, x, w, ws):
    step = lambda c, v: ({"x": np.tanh(c["x"] * v) + c["w"], "w": c["w"]}, None)  # noqa: E731
    c, _ = md.scan(step, {"x": x, "w": w}, ws)
    return c["x"] * c["w"]


def sliced(mean, x, w, ws):
    return md.fori_loop(0, 4, lambda k, x: np.tanh(x * ws[k] + w[k % 3] * ws[k + 1]), x)


def sliced_in_a_choice(mean, x, w, ws):
    def step(k, x):
        return md.scan(
            lambda x, n: (md.cond(n > k, lambda x: x * ws[k], lambda x: x + w[n], x), None), x, np.arange(3)
        )[0]

    return md.fori_loop(0, 3, step, x)


#: How often ranks sum in a gradient: the loss once, and then the numbers of all parameters in one call.
SUMS = {
    layers: 2,
    loop_in_a_loop: 2,
    checkpointed: 2,
    checkpointed_layers: 2,
    operand_of_a_choice: 2,
    operand_of_a_switch: 2,
    unchanged_carry: 2,
    sliced: 2,
    sliced_in_a_choice: 2,
    centred: 1 + 5 + 5 + 1,
}
#: Others, in which what is summed is computed in the loop, or in a body.
PROGRAMS = [*SUMS, constants, computed_in_a_step, shared_carry, choice_in_a_loop, array_checkpointed]


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients(f):
    on_ranks, whole = averaged(f)
    expected = md.value_and_grad(whole, (0, 1, 2))(X, W, WS)
    gradient = md.value_and_grad(on_ranks(), (0, 1, 2))
    assert_trees_close(gradient(X, W, WS), expected)
    assert_trees_close(md.jit(gradient)(X, W, WS), expected)
    tape = md.make_tape(gradient)(X, W, WS)
    tape.check()
    assert_trees_close(tape(X, W, WS), md.tree.leaves(expected))


@pytest.mark.parametrize("f", SUMS, ids=lambda f: f.__name__)
def test_what_ranks_sum(f):
    on_ranks, _ = averaged(f)
    gradient = md.grad(on_ranks(), (0, 1, 2))
    MESH.reset_calls()
    gradient(X, W, WS)
    assert MESH.calls == {"psum": SUMS[f]}
    assert spmd.communication(gradient)(X, W, WS).counts == MESH.calls
    alone = [
        spmd.communication(spmd.rewritten(md.grad(loss, (1, 2)), without=("fuse psums", "fuse shard maps"))(X, W, WS))
        for loss in (on_ranks(), on_ranks(check_rep=False))
    ]
    assert alone[0].counts["psum"] <= alone[1].counts["psum"] and alone[0].bytes <= alone[1].bytes


def test_long_arrays_are_not_summed_for_a_few_slices():
    """One sum of a table would be longer than those of the rows that the steps take."""
    table = rng.normal(size=(5000, 3))
    f = lambda mean, x, w, ws: md.fori_loop(0, 3, lambda k, x: np.tanh(x * ws[k]), x)  # noqa: E731
    report = spmd.communication(md.jit(md.grad(averaged(f)[0](), 2)))(X, W, table)
    assert report.counts["psum"] == 3 and report.bytes < 1000


def test_what_is_computed_from_constants_is_summed_after_a_recorded_loop():
    """Once for each `pbroadcast`; once for all of them if the loop runs step by step."""
    gradient = md.grad(averaged(constants)[0](), (1, 2))
    assert spmd.communication(gradient)(X, W, WS).counts == {"psum": 1 + 2 + 1}
    MESH.reset_calls()
    gradient(X, W, WS)
    assert MESH.calls == {"psum": 1 + 1}


#: Steps of a loop: of an element v, of a constant w, and of what is computed from constants.
STEPS = {
    "element": lambda x, v, w: np.tanh(x * v),
    "constant": lambda x, v, w: x + w,
    "both": lambda x, v, w: np.sin(x + w) * v,
    "rearranged": lambda x, v, w: np.tanh(x @ v[:, None] @ w.reshape(1, 3)),
    "computed": lambda x, v, w: x * np.cos(w),
    "computed from several": lambda x, v, w: np.tanh(x + w * np.sum(np.sin(w))),
    "loop": lambda x, v, w: md.fori_loop(0, 2, lambda k, x: np.tanh(x * v) + np.sin(w), x),
    "scan": lambda x, v, w: md.scan(lambda x, u: (np.tanh(x * v + u), None), x, np.stack([w, w * w]))[0],
    "checkpoint": lambda x, v, w: md.checkpoint(lambda x, v, w: np.tanh(x * w) + v)(x, v, w),
}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=3))
def test_how_often_ranks_sum_does_not_depend_on_the_number_of_steps(names):
    def f(mean, x, w, ws):
        def step(x, v):
            for name in names:
                x = STEPS[name](x, v, w)
            return x, None

        return md.scan(step, x, ws)[0]

    on_ranks, whole = averaged(f)
    gradient = md.grad(on_ranks(), (0, 1, 2))
    assert_trees_close(gradient(X, W, WS), md.grad(whole, (0, 1, 2))(X, W, WS), rtol=1e-7)
    few, many = (spmd.communication(gradient)(X, W, ws).counts for ws in (WS[:2], WS))
    assert few == many
    md.make_tape(gradient)(X, W, WS).check()


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients_that_are_taken_in_the_body(f):
    """They communicate as those that are taken around it."""
    on_ranks, whole = averaged(f)
    inside = on_ranks(lambda loss: md.value_and_grad(loss, (0, 1, 2)), (P(), (P(IJ), P(), P())))
    expected = md.value_and_grad(whole, (0, 1, 2))(X, W, WS)
    MESH.reset_calls()
    assert_trees_close(inside(X, W, WS), expected)
    calls = dict(MESH.calls)
    MESH.reset_calls()
    md.grad(on_ranks(), (0, 1, 2))(X, W, WS)
    assert calls == MESH.calls
    tape = md.make_tape(inside)(X, W, WS)
    tape.check()
    assert_trees_close(tape(X, W, WS), md.tree.leaves(expected))


def test_other_derivatives_that_are_taken_in_the_body():
    on_ranks, whole = averaged(computed_in_a_step)
    ts = rng.normal(size=(3, *WS.shape))
    for of in (
        lambda loss: lambda x, w, ws: md.vjp(lambda w, ws: loss(x, w, ws), w, ws)[1](1.0),
        lambda loss: lambda x, w, ws: md.jacrev(lambda w: md.grad(loss, 2)(x, w, ws))(w),
        lambda loss: lambda x, w, ws: md.vmap(lambda t: md.grad(loss, 2)(x, w, t))(ts),
        lambda loss: lambda x, w, ws: md.jit(lambda w: md.jvp(lambda w: md.grad(loss, 1)(x, w, ws), (w,), (w,)))(w),
        lambda loss: lambda x, w, ws: md.grad(lambda w: np.sum(np.sin(md.grad(loss, 1)(x, w, ws))))(w),
        lambda loss: lambda x, w, ws: md.scan(lambda w, v: (w - md.grad(loss, 1)(x, w, v[None]), None), w, ws)[0],
        lambda loss: lambda x, w, ws: md.checkpoint(lambda w: md.grad(loss, 1)(x, w, ws))(w),
    ):
        assert_trees_close(on_ranks(of)(X, W, WS), of(whole)(X, W, WS), rtol=1e-8)


@pytest.mark.parametrize("f", [layers, computed_in_a_step], ids=lambda f: f.__name__)
def test_the_other_transformations(f):
    on_ranks, whole = averaged(f)
    ts = rng.normal(size=(3, *WS.shape))
    for of in (
        lambda loss: md.jvp(lambda ws: md.grad(loss, 1)(X, W, ws), (WS,), (ts[0],)),
        lambda loss: md.vmap(lambda ws: md.grad(loss, 2)(X, W, ws))(ts),
        lambda loss: md.grad(lambda ws: np.sum(np.sin(md.grad(loss, 2)(X, W, ws))))(WS),
        lambda loss: md.linearize(lambda ws: loss(X, W, ws), WS)[1](ts[0]),
        lambda loss: md.jit(md.grad(lambda ws: np.sum(md.grad(loss, 2)(X, W, ws) ** 2)))(WS),
    ):
        assert_trees_close(of(on_ranks()), of(whole), rtol=1e-8)


def test_what_is_explicit_stays():
    def body(x, w):
        return psum(md.scan(lambda c, v: (c + np.sum(x * pbroadcast(np.sin(w), IJ)), None), zero(), WS)[0], IJ)

    zero = lambda: pbroadcast(0.0, IJ)  # noqa: E731
    written, automatic = (
        md.grad(spmd.shard_map(body, mesh=MESH, in_specs=(P(IJ), P()), out_specs=P(), auto_pbroadcast=auto), 1)
        for auto in (False, True)
    )
    assert_trees_close(written(X, W), automatic(X, W))
    assert spmd.communication(written)(X, W).counts == {"psum": 1 + len(WS)}
    assert spmd.communication(automatic)(X, W).counts == {"psum": 1 + 1}


def test_weights_that_vary_before_they_are_gathered_are_summed_in_parts():
    """Fully sharded in groups of ranks, the same in each: one sum of all shards at the end, not one of each weight."""

    def body(ws, x):
        for w in ws:
            x = np.tanh(x @ all_gather(pbroadcast(w, "j"), "i", tiled=True))
        return pmean(np.mean(x**2), IJ)

    ws, x = list(rng.normal(size=(4, 6, 6)) / 3), rng.normal(size=(8, 6))
    gradient = md.grad(spmd.shard_map(body, mesh=MESH, in_specs=(P("i"), P(IJ)), out_specs=P()))
    whole = md.grad(lambda ws: np.mean(functools.reduce(lambda x, w: np.tanh(x @ w), ws, x) ** 2))
    assert_trees_close(run_and_count(gradient, MESH, ws, x), whole(ws))
    assert MESH.calls == {"all_gather": 4, "psum": 2, "psum_scatter": 4}
    back = [row for row in spmd.communication(gradient)(ws, x).rows if row.direction == "backward"]
    assert {row.collective: row.bytes for row in back} == {"psum_scatter": 4 * 36 * 8, "psum": 4 * 18 * 8}


def test_the_elements_of_an_array_are_summed_as_the_array():
    """Split by a loop of Python, and by unpacking: one sum of the array, not one of each element."""

    def body(x, ws):
        for v in ws:
            x = np.tanh(x * v)
        first, *rest = ws
        return pmean(np.mean((x * first * rest[-1]) ** 2), IJ)

    f = spmd.shard_map(body, mesh=MESH, in_specs=(P(IJ), P()), out_specs=P())
    whole = lambda ws: np.mean((functools.reduce(lambda x, v: np.tanh(x * v), ws, X) * ws[0] * ws[-1]) ** 2)  # noqa: E731
    assert_trees_close(run_and_count(md.grad(f, 1), MESH, X, WS), md.grad(whole)(WS))
    assert MESH.calls == {"psum": 2}
    back = [row.bytes for row in spmd.communication(md.grad(f, 1))(X, WS).rows if row.direction == "backward"]
    assert back == [WS.nbytes]


@settings(deadline=None, max_examples=8)
@given(st.lists(st.sampled_from(list(SUMS)), min_size=2, max_size=2), st.integers(0, 100))
def test_one_after_the_other(fs, seed):
    def f(mean, x, w, ws):
        for g in fs:
            x = g(mean, x, w, ws)
        return x

    on_ranks, whole = averaged(f)
    w, ws = np.random.default_rng(seed).normal(size=3), WS
    assert_trees_close(md.grad(on_ranks(), (0, 1, 2))(X, w, ws), md.grad(whole, (0, 1, 2))(X, w, ws), rtol=1e-7)
    run_and_count(md.grad(on_ranks(), 2), MESH, X, w, ws)


def test_zeros_that_are_pbroadcast_are_no_inputs():
    """A transpose may write zeros down, and pbroadcast them: they wait for no sum."""

    def twice_varying(ct):
        v, w = (Var(md.ShapedArray((2,), float)) for _ in range(2))
        varying = [Var(ct.type) for _ in range(4)]
        along_i = {"axes": ("i",), "size": 2}
        equations = [Equation(pbroadcast_p, [x], along_i, [y]) for x, y in zip([np.zeros(2), v, w], varying)]
        equations.append(Equation(add.primitive, varying[:2], {}, varying[3:]))
        tape = Tape([v, w], equations, [varying[3], varying[2]])
        return summed_backward_pass(extract_linear_part(tape, [True, True], [None, None]), [ct, 2 * ct])

    mapped = spmd.shard_map(twice_varying, mesh=MESH, in_specs=P("i"), out_specs=P())
    MESH.reset_calls()
    assert_trees_close(mapped(np.arange(4.0)), [np.array([2.0, 4.0]), np.array([4.0, 8.0])])
    assert MESH.calls == {"psum": 1}
