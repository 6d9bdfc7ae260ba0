"""pbroadcasts moved up linear parts: what loops sum once, that all is as before, and where nothing is moved."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, all_gather_invariant, axis_index, broadcast, pbroadcast, pmean, ppermute, psum
from collectives.boundary import summed_backward_pass
from collectives.ops import pbroadcast_p
from minidiff.ops.elementwise import add
from minidiff.tape import Equation, Tape, Var
from spmd import P
from tests.programs import assert_trees_close, run_and_count

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


def shared_carry(mean, x, w, ws):
    step = lambda c, v: ((np.sin(c[0]) * v, c[1] * c[0] + x), c[0])  # noqa: E731
    (c, x), ys = md.scan(step, (w, x), ws)
    return x * c + np.sum(ys, axis=0)


def carries_that_change_places(mean, x, w, ws):
    """What is asked of one carry in one line is asked of the other one in another line."""
    a, b = md.scan(lambda c, v: ((np.sin(c[1]), np.cos(c[0])), None), (w, ws[0]), ws)[0]
    y = x * a
    return y + x * b


def loop_in_a_loop(mean, x, w, ws):
    def step(x, v):
        return md.fori_loop(0, 2, lambda k, x: np.tanh(x * v + np.sin(w * (k + 1))), x), None

    return md.scan(step, x, ws)[0]


def choice_in_a_loop(mean, x, w, ws):
    def step(x, v):
        return md.cond(v[0] > 0, lambda x: np.tanh(x * v) * w, lambda x: x + np.sin(v), x), None

    return md.scan(step, x, ws)[0]


def checkpointed(mean, x, w, ws):
    return md.scan(lambda x, v: (md.checkpoint(lambda x: np.tanh(x * v) + np.cos(w))(x), None), x, ws)[0]


def checkpointed_layers(mean, x, w, ws):
    layer = md.checkpoint(lambda x, v: np.tanh(x * np.sin(v)) * np.sin(w))
    for v in ws:
        x = layer(x, v)
    return x


def array_checkpointed(mean, x, w, ws):
    """What is computed once more takes an array that is on its tape, and that is to be lifted."""
    scale = np.array([0.5, 1.0, 2.0])
    return md.checkpoint(lambda x, w, ws: np.tanh(x * (np.sin(w) * scale)) + scale * ws[0])(x, w, ws)


def choice_checkpointed(mean, x, w, ws):
    def step(x, v):
        return md.cond(v[0] > 0, lambda x: np.tanh(x * v) * w, lambda x: x + np.sin(v), x)

    return md.checkpoint(lambda x, ws: step(step(x, ws[0] * w), ws[1]))(x, ws)


def straight(mean, x, w, ws):
    return x * np.sin(w) + np.tanh(x * np.cos(w)) * ws[0] + x * np.sum(ws, axis=0)


def centred(mean, x, w, ws):
    """In each step a sum, of which the next one depends: that is what cannot be done at once."""
    return md.scan(lambda x, v: (np.tanh((x - mean(x)) * v) + w, None), x, ws)[0]


#: How often ranks sum in a gradient: the loss once, and then; the numbers of all parameters in one call.
SUMS = {
    layers: 2,
    computed_in_a_step: 2,
    shared_carry: 2,
    loop_in_a_loop: 2,
    choice_in_a_loop: 2,
    checkpointed: 2,
    checkpointed_layers: 2,
    array_checkpointed: 2,
    choice_checkpointed: 2,
    straight: 2,
    centred: 1 + 5 + 5 + 1,
}


@pytest.mark.parametrize("f", SUMS, ids=lambda f: f.__name__)
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
        spmd.communication(spmd.rewritten(md.grad(loss, (1, 2)), without=("fuse psums", "join shard maps"))(X, W, WS))
        for loss in (on_ranks(), on_ranks(check_rep=False))
    ]
    assert alone[0].counts["psum"] <= alone[1].counts["psum"] and alone[0].bytes <= alone[1].bytes


@pytest.mark.parametrize("f", SUMS, ids=lambda f: f.__name__)
def test_gradients_that_are_taken_in_the_body(f):
    """They communicate as those that are taken around it."""
    on_ranks, whole = averaged(f)
    inside = on_ranks(lambda loss: md.value_and_grad(loss, (0, 1, 2)), (P(), (P(IJ), P(), P())))
    expected = md.value_and_grad(whole, (0, 1, 2))(X, W, WS)
    assert_trees_close(run_and_count(inside, MESH, X, W, WS), expected)
    assert MESH.calls == {"psum": SUMS[f]}
    tape = md.make_tape(inside)(X, W, WS)
    tape.check()
    assert_trees_close(tape(X, W, WS), md.tree.leaves(expected))


def test_carries_that_change_places():
    on_ranks, whole = averaged(carries_that_change_places)
    assert_trees_close(md.grad(on_ranks(), (0, 1, 2))(X, W, WS), md.grad(whole, (0, 1, 2))(X, W, WS))


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


def body_of_gradient(body, *args, in_specs=(P(IJ), P()), **options):
    f = spmd.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=P(), **options)
    return str(md.make_tape(md.grad(f, 1))(*args))


def test_what_is_small_is_lifted_where_it_is_small():
    """One sum of a number instead of one of a large array: that takes less."""
    large = np.ones(100_000)
    found = body_of_gradient(lambda x, w: psum(np.sum(x) * np.sum(w), IJ), X, large)
    assert f"f64[{large.size}]{{i,j}}" not in found
    small = body_of_gradient(lambda x, w: psum(np.sum(x) * np.sum(w), IJ), X, W)
    assert "f64[3]{i,j}" not in small  # one sum, either way


def test_what_is_explicit_stays():
    def body(x, w):
        return psum(np.sum(x * pbroadcast(np.sin(w), IJ) + x * pbroadcast(np.cos(w), IJ)), IJ)

    assert body_of_gradient(body, X, W, auto_pbroadcast=False).count("psum") == 3
    assert body_of_gradient(body, X, W).count("psum") == 2


def test_past_collectives_along_other_axes():
    """One lift for both uses of what a ppermute gives; past an all_gather_invariant along these axes, an all_gather;
    past a broadcast, a broadcast_varying."""

    def moved(x, c):
        y = ppermute(x, "i", perm=[(0, 1), (1, 0)])
        return psum(np.sum(np.sin(y) * axis_index("j")) + np.sum(pbroadcast(np.cos(y), "j") * c), IJ)

    def gathered(x, c):
        whole = np.sin(all_gather_invariant(x, "i", tiled=True))
        return psum(np.sum(whole * axis_index("i")), "i") + psum(np.sum(x * c), IJ)

    def sent(x, c):
        return psum(np.sum(np.sin(broadcast(x, "i", root=1)) * axis_index("i") * c), "i")

    x, c = rng.normal(size=(4, 3)), rng.normal(size=3)
    for body, expected in [
        (moved, {"psum": 2, "ppermute": 2}),
        (gathered, {"all_gather_invariant": 1, "psum_scatter": 1}),
        (sent, {"broadcast": 1, "reduce": 1, "psum": 1}),
    ]:
        f, old = (
            spmd.shard_map(body, mesh=MESH, in_specs=(P("i"), P()), out_specs=P(), check_rep=typed)
            for typed in (True, False)
        )
        assert_trees_close(md.grad(f)(x, c), md.grad(old)(x, c))
        counts = spmd.communication(md.grad(f))(x, c).counts
        assert {name: counts.get(name, 0) for name in expected} == expected, counts


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, md.checkpoint, lambda f: md.checkpoint(md.checkpoint(f))])
def test_past_what_is_gathered_along_several_axes(wrap, twice, tiled):
    """What is lifted along one of them is gathered varying along that, and the same along the other; also where it is
    computed once more, and the input is wanted lifted and not."""

    def layer(w):
        whole = all_gather_invariant(w, IJ, tiled=tiled).reshape(4, *w.shape)
        part = whole[0] * np.cos(whole[1]) * axis_index("j")
        return part + np.sin(w) if twice else part

    mesh = spmd.make_mesh((2, 2, 2), ("k", "i", "j"), backend="simulated")
    axes = mesh.axis_names

    def body(w, x):
        return pmean(np.mean((x * wrap(layer)(w)) ** 2), axes)

    w, x = rng.normal(size=3), rng.normal(size=(8, 3))
    on_ranks = functools.partial(spmd.shard_map, body, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P())
    typed, old = md.grad(on_ranks()), md.grad(on_ranks(check_rep=False))
    mesh.reset_calls()
    assert_trees_close(typed(w, x), old(w, x))
    md.make_tape(typed)(w, x).check()
    fewer, more = (spmd.communication(f)(w, x).counts for f in (typed, old))
    assert fewer["psum"] <= more["psum"] and sum(fewer.values()) <= sum(more.values())
    assert fewer["psum_scatter"] == 1  # as transposes of the gathers, whatever they make of the blocks


def test_weights_that_are_gathered_along_one_axis_are_summed_along_the_other_in_parts():
    """Fully sharded in groups of ranks, the same in each: one sum of all shards at the end, not one of each weight."""

    def body(ws, x):
        for w in ws:
            x = np.tanh(x @ all_gather(w, "i", tiled=True))
        return pmean(np.mean(x**2), IJ)

    ws, x = list(rng.normal(size=(4, 6, 6)) / 3), rng.normal(size=(8, 6))
    gradient = md.grad(spmd.shard_map(body, mesh=MESH, in_specs=(P("i"), P(IJ)), out_specs=P()))
    whole = md.grad(lambda ws: np.mean(functools.reduce(lambda x, w: np.tanh(x @ w), ws, x) ** 2))
    assert_trees_close(run_and_count(gradient, MESH, ws, x), whole(ws))
    assert MESH.calls == {"all_gather": 4, "psum": 2, "psum_scatter": 4}
    back = [row for row in spmd.communication(gradient)(ws, x).rows if row.direction == "backward"]
    assert {row.collective: row.bytes for row in back} == {"psum_scatter": 4 * 36 * 8, "psum": 4 * 18 * 8}


def test_along_one_axis_after_the_other():
    def body(x, w):
        return psum(psum(np.sum(x * np.sin(w), axis=0), "i") @ np.cos(w), "j")

    f = spmd.shard_map(body, mesh=MESH, in_specs=(P(IJ), P()), out_specs=P())
    assert_trees_close(
        md.grad(f, (0, 1))(X, W), md.grad(lambda x, w: np.sum(x * np.sin(w), 0) @ np.cos(w), (0, 1))(X, W)
    )
    md.make_tape(md.grad(f, (0, 1)))(X, W).check()


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


def test_zeros_that_are_lifted_are_no_inputs():
    """A transpose may write zeros down, and lift them: they wait for no sum."""

    def twice_lifted(ct):
        v, w = (Var(md.ShapedArray((2,), float)) for _ in range(2))
        lifted = [Var(ct.type) for _ in range(4)]
        along_i = {"axes": ("i",), "size": 2}
        equations = [Equation(pbroadcast_p, [x], along_i, [y]) for x, y in zip([np.zeros(2), v, w], lifted)]
        equations.append(Equation(add.primitive, lifted[:2], {}, lifted[3:]))
        tape = Tape([v, w], equations, [lifted[3], lifted[2]])
        return summed_backward_pass(tape, [True, True], [None, None], [ct, 2 * ct])

    mapped = spmd.shard_map(twice_lifted, mesh=MESH, in_specs=P("i"), out_specs=P())
    MESH.reset_calls()
    assert_trees_close(mapped(np.arange(4.0)), [np.array([2.0, 4.0]), np.array([4.0, 8.0])])
    assert MESH.calls == {"psum": 1}


def test_layers_that_are_split():
    """Each sum waits for the one before, so none can be saved."""
    params = [tuple(rng.normal(size=shape) / 3 for shape in [(4, 6), (6, 4), (4,)]) for _ in range(3)]
    x = rng.normal(size=(8, 4))

    def network(total, x, params):
        for v, w, b in params:
            x = x + total(np.tanh(x @ v) @ w) + b
        return np.mean(x**2)

    split = (P("i"), [(P(None, "j"), P("j"), P())] * len(params))
    on_ranks = lambda x, params: pmean(network(lambda y: psum(y, "j"), x, params), "i")  # noqa: E731
    gradient = md.grad(spmd.shard_map(on_ranks, mesh=MESH, in_specs=split, out_specs=P()), 1)
    expected = md.grad(lambda params: network(lambda y: y, x, params))(params)
    MESH.reset_calls()
    assert_trees_close(gradient(x, params), expected)
    # The loss, a sum for each layer there and, but for the first one, back; and those of weights and of what is whole.
    assert MESH.calls == {"psum": 1 + len(params) + (len(params) - 1) + 1}
