"""pbroadcasts hoisted out of loops and checkpoints: what is summed once, and that gradients stay what they are."""

import functools

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
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close, run_and_count
from tests.checks.samples import each

MESH, IJ = mesh(2, 2), ("i", "j")
rng = np.random.default_rng(0)
X, W, WS = rng.normal(size=(8, 3)), rng.normal(size=3), rng.normal(size=(5, 3)) / 2


def averaged(f):
    """The mean of squares of `f(mean, x, …)`: on ranks that have a part of the rows of x, and of whole arrays."""

    def on_ranks(of=lambda loss: loss, out_specs=P(), mesh=MESH, **options):
        loss = lambda x, *ws: pmean(np.mean(f(lambda y: pmean(np.mean(y, axis=0), IJ), x, *ws) ** 2), IJ)  # noqa: E731
        return lambda x, *ws: mapped(of(loss), mesh, (P(IJ), *[P()] * len(ws)), out_specs, **options)(x, *ws)

    return on_ranks, lambda x, *ws: np.mean(f(lambda y: np.mean(y, axis=0), x, *ws) ** 2)


def in_steps(step):
    """A loop over the rows v of ws, whose step is a function of x, v, w, and the mean over all rows of x."""
    return lambda mean, x, w, ws: md.scan(lambda x, v: (step(x, v, w, mean), None), x, ws)[0]


def shared_carry(mean, x, w, ws):
    step = lambda c, v: ((np.sin(c[0]) * v, c[1] * c[0] + x), c[0])  # noqa: E731
    (c, x), ys = md.scan(step, (w, x), ws)
    return x * c + np.sum(ys, axis=0)


def checkpointed_layers(mean, x, w, ws):
    layer = md.checkpoint(lambda x, v, w: np.tanh(x * v) * w)
    return functools.reduce(lambda x, v: layer(x, v, w), ws, x)


def array_checkpointed(mean, x, w, ws):
    """A value that is recomputed reads an array that is on its tape, and that must vary."""
    scale = np.array([0.5, 1.0, 2.0])
    return md.checkpoint(lambda x, w, ws: np.tanh(x * (np.sin(w) * scale)) + scale * ws[0])(x, w, ws)


def operand_of_a_choice(x, v, w, mean):
    return md.cond(v[0] > 0, lambda x, w: np.tanh(x * v) * w, lambda x, w: x + np.sum(w) * v, x, w)


def operand_of_a_switch(mean, x, w, ws):
    branches = [lambda x, w: np.tanh(x) + w, lambda x, w: x * w[::-1], lambda x, w: np.sin(x)]
    return md.fori_loop(0, 5, lambda k, x: md.switch(k % 3, branches, x, w) * ws[k], x)


def unchanged_carry(mean, x, w, ws):
    step = lambda c, v: ({"x": np.tanh(c["x"] * v) + c["w"], "w": c["w"]}, None)  # noqa: E731
    c, _ = md.scan(step, {"x": x, "w": w}, ws)
    return c["x"] * c["w"]


def sliced_in_a_choice(mean, x, w, ws):
    choose = lambda k: lambda x, n: (md.cond(n > k, lambda x: x * ws[k], lambda x: x + w[n], x), None)  # noqa: E731
    return md.fori_loop(0, 3, lambda k, x: md.scan(choose(k), x, np.arange(3))[0], x)


def looped(x, v, w, mean):
    return md.fori_loop(0, 2, lambda k, x: np.tanh(x * v + w), x)


def recomputed(x, v, w, mean):
    return md.checkpoint(lambda x, v: np.tanh(x * v) + w)(x, v)


#: Programs, and how often ranks sum in a gradient: the loss once, and then the numbers of all parameters in one call.
SUMS = {
    "layers": (in_steps(lambda x, v, w, mean: np.tanh(x * v) + w), 2),
    "loop in a loop": (in_steps(looped), 2),
    "checkpointed": (in_steps(recomputed), 2),
    "checkpointed layers": (checkpointed_layers, 2),
    "operand of a choice": (in_steps(operand_of_a_choice), 2),
    "operand of a switch": (operand_of_a_switch, 2),
    "unchanged carry": (unchanged_carry, 2),
    "sliced": (lambda mean, x, w, ws: md.fori_loop(0, 4, lambda k, x: np.tanh(x * ws[k] + w[k % 3] * ws[k + 1]), x), 2),
    "sliced in a choice": (sliced_in_a_choice, 2),
    # In each step a sum, of which the next one depends: that is what cannot be done at once.
    "centred": (in_steps(lambda x, v, w, mean: np.tanh((x - mean(x)) * v) + w), 1 + 5 + 5 + 1),
}
#: Others, in which what is summed is computed in the loop, or in a body.
COMPUTED = {
    "constants": in_steps(lambda x, v, w, mean: np.tanh(x * v) * np.sin(w) + w * np.sum(np.cos(w))),
    "computed in a step": in_steps(lambda x, v, w, mean: np.tanh(x * np.sin(v * w)) + np.cos(w)),
    "choice in a loop": in_steps(
        lambda x, v, w, mean: md.cond(v[0] > 0, lambda x: np.tanh(x * v) * w, lambda x: x + np.sin(v), x)
    ),
    "shared carry": shared_carry,
    "array checkpointed": array_checkpointed,
}
PROGRAMS = SUMS | {name: (f, None) for name, f in COMPUTED.items()}


@each("name", PROGRAMS)
def test_gradients(name):
    """Taken around a body or in it, they communicate alike; recorded and compiled, they are the same."""
    f, count = PROGRAMS[name]
    on_ranks, whole = averaged(f)
    expected = md.value_and_grad(whole, (0, 1, 2))(X, W, WS)
    around = md.value_and_grad(on_ranks(), (0, 1, 2))
    inside = on_ranks(lambda loss: md.value_and_grad(loss, (0, 1, 2)), (P(), (P(IJ), P(), P())))
    calls = []
    for gradient in (around, inside):
        assert_trees_close(run_and_count(gradient, MESH, X, W, WS), expected)
        calls.append(dict(MESH.calls))
        tape = md.make_tape(gradient)(X, W, WS)
        tape.check()
        assert_trees_close(tape(X, W, WS), md.tree.leaves(expected))
    assert calls[0] == calls[1] and count in (None, calls[0]["psum"])
    assert_trees_close(md.jit(around)(X, W, WS), expected)


def test_long_arrays_are_not_summed_for_a_few_slices():
    """One sum of a table would be longer than those of the rows that the steps take."""
    f = lambda mean, x, w, ws: md.fori_loop(0, 3, lambda k, x: np.tanh(x * ws[k]), x)  # noqa: E731
    report = spmd.communication(md.jit(md.grad(averaged(f)[0](), 2)))(X, W, rng.normal(size=(5000, 3)))
    assert report.counts["psum"] == 3 and report.bytes < 1000


def test_what_is_computed_from_constants_is_summed_after_a_recorded_loop():
    """Once for each `pbroadcast`; once for all of them if the loop runs step by step."""
    gradient = md.grad(averaged(COMPUTED["constants"])[0](), (1, 2))
    assert spmd.communication(gradient)(X, W, WS).counts == {"psum": 1 + 2 + 1}
    MESH.reset_calls()
    gradient(X, W, WS)
    assert MESH.calls == {"psum": 1 + 1}


#: Steps of a loop: of an element v, of a constant w, and of what is computed from constants.
STEPS = {
    "element": lambda x, v, w: np.tanh(x * v),
    "constant": lambda x, v, w: x + w,
    "rearranged": lambda x, v, w: np.tanh(x @ v[:, None] @ w.reshape(1, 3)),
    "computed": lambda x, v, w: x * np.cos(w),
    "loop": lambda x, v, w: md.fori_loop(0, 2, lambda k, x: np.tanh(x * v) + np.sin(w), x),
    "scan": lambda x, v, w: md.scan(lambda x, u: (np.tanh(x * v + u), None), x, np.stack([w, w * w]))[0],
}


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=3))
def test_how_often_ranks_sum_does_not_depend_on_the_number_of_steps(names):
    f = in_steps(lambda x, v, w, mean: functools.reduce(lambda x, name: STEPS[name](x, v, w), names, x))
    on_ranks, whole = averaged(f)
    gradient = md.grad(on_ranks(), (0, 1, 2))
    assert_trees_close(gradient(X, W, WS), md.grad(whole, (0, 1, 2))(X, W, WS), rtol=1e-7)
    few, many = (spmd.communication(gradient)(X, W, ws).counts for ws in (WS[:2], WS))
    assert few == many
    md.make_tape(gradient)(X, W, WS).check()


TS = rng.normal(size=(3, *WS.shape))
#: Derivatives of a loss of x, w and ws, in the body or around it.
DERIVATIVES = {
    "jacrev of grad": lambda loss: lambda x, w, ws: md.jacrev(lambda w: md.grad(loss, 2)(x, w, ws))(w),
    "vmap of grad": lambda loss: lambda x, w, ws: md.vmap(lambda t: md.grad(loss, 2)(x, w, t))(TS),
    "jit of jvp": lambda loss: lambda x, w, ws: md.jit(lambda w: md.jvp(lambda w: loss(x, w, ws), (w,), (w,)))(w),
    "grad of grad": lambda loss: lambda x, w, ws: md.grad(lambda w: np.sum(np.sin(md.grad(loss, 1)(x, w, ws))))(w),
    "scan": lambda loss: lambda x, w, ws: md.scan(lambda w, v: (w - md.grad(loss, 1)(x, w, v[None]), None), w, ws)[0],
}


@each("of", DERIVATIVES)
def test_other_derivatives(of):
    on_ranks, whole = averaged(COMPUTED["computed in a step"])
    expected = DERIVATIVES[of](whole)(X, W, WS)
    assert_trees_close(DERIVATIVES[of](on_ranks())(X, W, WS), expected, rtol=1e-8)
    assert_trees_close(on_ranks(DERIVATIVES[of])(X, W, WS), expected, rtol=1e-8)


def test_what_is_explicit_stays():
    def body(x, w):
        zero = pbroadcast(0.0, IJ)
        return psum(md.scan(lambda c, v: (c + np.sum(x * pbroadcast(np.sin(w), IJ)), None), zero, WS)[0], IJ)

    written, automatic = (
        md.grad(mapped(body, MESH, (P(IJ), P()), P(), auto_pbroadcast=auto), 1) for auto in (False, True)
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
    gradient = md.grad(mapped(body, MESH, (P("i"), P(IJ)), P()))
    whole = md.grad(lambda ws: np.mean(functools.reduce(lambda x, w: np.tanh(x @ w), ws, x) ** 2))
    assert_trees_close(run_and_count(gradient, MESH, ws, x), whole(ws))
    assert MESH.calls == {"all_gather": 4, "psum": 2, "psum_scatter": 4}
    back = [row for row in spmd.communication(gradient)(ws, x).rows if row.direction == "backward"]
    assert {row.collective: row.bytes for row in back} == {"psum_scatter": 4 * 36 * 8, "psum": 4 * 18 * 8}


def test_the_elements_of_an_array_are_summed_as_the_array():
    """Split by a loop of Python, and by unpacking: one sum of the array, not one of each element."""

    def f(mean, x, ws):
        first, *rest = ws
        return functools.reduce(lambda x, v: np.tanh(x * v), ws, x) * first * rest[-1]

    on_ranks, whole = averaged(f)
    assert_trees_close(run_and_count(md.grad(on_ranks(), 1), MESH, X, WS), md.grad(whole, 1)(X, WS))
    assert MESH.calls == {"psum": 2}
    back = [row.bytes for row in spmd.communication(md.grad(on_ranks(), 1))(X, WS).rows if row.direction == "backward"]
    assert back == [WS.nbytes]


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

    MESH.reset_calls()
    assert_trees_close(
        mapped(twice_varying, MESH, P("i"), P())(np.arange(4.0)), [np.array([2.0, 4]), np.array([4.0, 8])]
    )
    assert MESH.calls == {"psum": 1}
