"""The four states of a value along a mesh axis: how operations combine them, and how collectives change them."""

import itertools

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import example, given, settings

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast, pmean, psum, reduced, unreduced
from minidiff.errors import VarianceError
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.samples import check_each, each
from tests.checks.whole import whole as global_value
from tests.programs import state as state_programs
from tests.programs.explicit import replayed
from tests.programs.state import ROWS, array_of, spec_of_states

RANKS = 4
MESH, MESH2 = mesh(RANKS), mesh(2, 2)
BLOCKS = numpy.random.default_rng(0).normal(size=(RANKS, 3, 3))
SAME = numpy.random.default_rng(1).normal(size=(3, 3)) + 4

# ---------------------------------------------------------------- every kind of operation, on all states

#: A state's letter: its name, and the spec that takes it out of a body.
STATES = {"I": "invariant", "V": "varying", "U": "unreduced", "R": "reduced"}
SPECS = {"I": P(), "V": P("i"), "U": P(unreduced={"i"}), "R": P(reduced={"i"})}

MASK = numpy.eye(3, dtype=bool)
OPERATIONS = {
    "nonlinear": [np.tanh, np.max, np.linalg.inv, lambda x: x > 0, lambda x: MASK & x.astype(bool)],
    "linear": [
        np.negative,
        lambda x: np.mean(x, axis=1, keepdims=True),
        lambda x: np.reshape(x, (9, 1)),
        lambda x: x.astype("float32"),
        lambda x: x[numpy.array([0, 0, 2])],
        lambda x: np.cumsum(x, axis=1),
        lambda x: np.real(np.fft.ifft(np.fft.fft(x) * np.fft.fft(numpy.eye(3)))),
    ],
    "sum": [np.add, np.subtract, lambda x, y: np.where(MASK, x, y), lambda x, y: np.stack([x, y], axis=1)],
    "product": [np.multiply, np.matmul, lambda x, y: np.einsum("ij,kj->ik", x, y)],
    "quotient": [np.divide],
    "other": [np.maximum, np.less, lambda x, y: np.where(x > y, x, y)],
}
WITH_NUMBERS = (np.add, np.subtract, np.multiply, np.divide, np.maximum, np.less)


def result_state(kind, states):
    """The rules, a second time: the letter of the result's state, or None for an error. `#` is a Python number."""
    if "U" not in states:
        return next(s for s in "VRI" if s in states)
    parts = [s == "U" for s in states]
    linear = {"linear": True, "sum": all(parts), "product": sum(parts) == 1, "quotient": parts == [True, False]}
    return "U" if linear.get(kind, False) and "V" not in states else None


def cast_to_write(states):
    """Return the cast that `auto_pbroadcast=False` requires where operands disagree; None where they agree."""
    used = set(states) - {"#"}
    if "V" in used and len(used) > 1:
        return "pbroadcast(x, 'i')"
    return "reduced(x, 'i')" if "I" in used and len(used) > 1 else None


def in_state(state, block, same):
    """An operand in a state, made in a body from a rank's block and from what all ranks have."""
    result = {"V": lambda: block, "U": lambda: unreduced(block, "i"), "R": lambda: reduced(same, "i")}
    return 2.0 if state == "#" else result.get(state, lambda: same)()


def run(f, states, seen, **options):
    """`f` of operands in these states, as a function of global values; `seen` gets the type of its result."""

    def body(blocks, sames):
        y = f(*[in_state(s, x, same) for s, x, same in zip(states, blocks[0], sames)])
        seen.append(md.typeof(y))
        return y[None] if seen[-1].variance else y

    state = next((s for s in "VUR" if s in states and (s != "R" or "V" not in states)), "I")
    return spmd.shard_map(body, mesh=MESH, in_specs=(P("i"), P()), out_specs=SPECS[state], **options)


def check_operation(kind, f, states):
    blocks = numpy.stack([numpy.roll(BLOCKS, k) for k in range(len(states))], axis=1)
    sames = numpy.stack([SAME * (k + 1) for k in range(len(states))])
    expected, seen = result_state(kind, states), []
    g, written = (run(f, states, seen, **options) for options in ({}, {"auto_pbroadcast": False}))
    if expected is None:
        for make in (g, md.make_tape(g), written):
            with pytest.raises(VarianceError):
                make(blocks, sames)
        return
    global_values = {"V": blocks, "U": blocks.sum(0), "#": [2.0, 2.0]}
    on_rank = [
        [global_values["V"][r, k] if s == "V" else global_values.get(s, sames)[k] for k, s in enumerate(states)]
        for r in range(RANKS)
    ]
    whole = numpy.asarray([f(*xs) for xs in on_rank] if expected == "V" else f(*on_rank[0]))
    tape = md.make_tape(g)(blocks, sames)
    tape.check()
    rtol = 1e-5 if whole.dtype == "float32" else 1e-9
    for y in (g(blocks, sames), tape(blocks, sames)[0], md.jit(g)(blocks, sames)):
        assert global_value(y).dtype == whole.dtype
        numpy.testing.assert_allclose(global_value(y), whole, rtol, rtol)
    assert {STATES[expected]} == {t.states.along("i") for t in seen}
    if missing := cast_to_write(states):
        with pytest.raises(VarianceError) as error:
            written(blocks, sames)
        assert missing in str(error.value)
    else:
        numpy.testing.assert_allclose(global_value(written(blocks, sames)), whole, rtol, rtol)


@pytest.mark.parametrize("kind", OPERATIONS)
def test_operations_on_states(kind):
    """The type of the result or the error, eagerly and on a tape, and the global value."""
    cases = []
    for k, f in enumerate(OPERATIONS[kind]):
        for states in itertools.product("IVUR#", repeat=1 if kind in ("nonlinear", "linear") else 2):
            if "#" not in states or (f in WITH_NUMBERS and states != ("#", "#")):
                cases.append((f"{k} {''.join(states)}", lambda f=f, states=states: check_operation(kind, f, states)))
    check_each(cases)


# ---------------------------------------------------------------- the table of collectives


def inner(x, y):
    return float(numpy.sum(global_value(x) * global_value(y)))


def check_row(name, axes, beside):
    """<f(x), ct> = <x, f_t(ct)>, of the global values; f_t is one operation, and has the types that it should."""
    collective, (before, after), transpose = ROWS[name]
    specs = [spec_of_states({"i": beside, "j": beside} | dict.fromkeys(axes, s)) for s in (before, after)]
    f = spmd.shard_map(lambda x: collective(x, axes), mesh=MESH2, in_specs=specs[0], out_specs=specs[1])
    x = array_of(specs[0], MESH2, 1, (4, 3))
    y = f(x)
    ct = array_of(specs[1].transposed(), MESH2, 2, y.shape)
    tape = md.make_tape(f)(x)
    f_t = md.transpose(tape)
    f_t.check()
    (x_t,) = f_t(ct)
    numpy.testing.assert_allclose(inner(y, ct), inner(x, x_t))
    assert md.typeof(x_t) == md.typeof(x).cotangent and spmd.spec_of(x_t) == specs[0].transposed()
    (equation,) = f_t.equations
    assert [e.primitive.name for e in equation.params["body"].equations] == [transpose]
    for g in (md.vjp(f, x)[1], md.linear_transpose(f, x), md.jit(lambda ct: md.vjp(f, x)[1](ct))):
        (again,) = g(ct)
        numpy.testing.assert_array_equal(global_value(again), global_value(x_t))
        assert spmd.spec_of(again) == specs[0].transposed()
    assert md.transpose(f_t) == tape
    numpy.testing.assert_allclose(global_value(md.jvp(f, (x,), (x,))[1]), global_value(y))


@pytest.mark.parametrize("name", ROWS)
def test_transposes_by_the_inner_product(name):
    """Along one axis, with any state along the other, and along two axes."""
    cases = [(("i",), s) for s in "IVUR"] + [(("j",), s) for s in "IVUR"] + [(("i", "j"), "I")]
    check_each((f"{axes} {beside}", lambda a=axes, b=beside: check_row(name, a, b)) for axes, beside in cases)


# ---------------------------------------------------------------- random programs

MESHES = [mesh(*sizes) for sizes in ((2,), (4,), (2, 2), (1,))]
NUMBERS = st.integers(0, 60)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=6), st.sampled_from(MESHES))
@example([(0, 7, 2, 2)], MESHES[0])  # without types, the gradient in what is unreduced or reduced
@example([(0, 1, 0, 0)] * 3, MESHES[1])  # the gradient in reduced and unreduced arrays that the loss does not use
def test_random_programs(program, mesh):
    """Values, states, gradients and transposes are those of the global function, compiled and without types too."""
    args, (steps, _) = state_programs.example(mesh), state_programs.decoded(program)
    whole = [global_value(x) for x in args]
    f, every = state_programs.sharded(program, mesh), (0, 1, 2, 3)
    values = state_programs.of_global_values(steps, *whole)
    for actual in (f(*args), md.jit(f)(*args), md.make_tape(f)(*args)(*args)):
        assert_alike(actual, values)

    loss, expected = state_programs.loss_of(program, mesh), state_programs.global_loss(program)
    grads = md.grad(expected, every)(*whole)
    for g in (md.grad(loss, every), md.jit(md.grad(loss, every)), md.grad(md.jit(loss), every)):
        actual = g(*args)
        assert_alike(actual, grads)
        assert [spmd.spec_of(ct) for ct in actual[1:]] == [spmd.spec_of(x).transposed() for x in args[1:]]
    md.make_tape(md.grad(loss, every))(*args).check()
    if "vjp" not in {step.way for step in steps}:  # in a body, without types, it has another meaning
        untyped = md.value_and_grad(state_programs.loss_of(program, mesh, check_rep=False), every)(*args)
        assert_alike([untyped[0], *untyped[1]], [expected(*whole), *grads])
    assert_alike(md.grad(replayed(loss, *args), every)(*args), grads)  # with every cast written out

    linear = md.make_tape(md.linearize(f, *args)[1])(*args)
    again = md.transpose(md.transpose(linear))
    again.check()
    assert_alike(again(*args), linear(*args))


def assert_alike(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        x, y = global_value(x), global_value(y)
        numpy.testing.assert_allclose(x, y.reshape(x.shape), 1e-7, 1e-8)


# ---------------------------------------------------------------- higher-order operations, derivatives in a body

X, W = BLOCKS[:, 0], numpy.array([0.3, -0.7, 1.2])
TOTAL = X.sum(0)


def u(x):
    return unreduced(x, "i")


def r(w):
    return reduced(w, "i")


def loop(init, step):
    return md.scan(lambda c, _: (step(c), None), init, None, 2)[0]


def counting(init, step):
    return md.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, step(c[1])), (0, init))[1]


def over_two(f):
    return md.vmap(f, axis_name="k")


def with_rule(backward):
    """The product of w and x, with a rule for its cotangents."""
    f = md.custom_vjp(lambda w, x: w * x)
    f.defvjp(lambda w, x: (w * x, (w, x)), lambda known, ct: (backward(ct, *known), ct * known[0]))
    return lambda w, x: md.vjp(lambda w: f(w, x), w)[1](x)[0]


@md.custom_jvp
def product(w, x):
    return w * x


product.defjvp(lambda xs, ts: (xs[0] * xs[1], ts[0] * xs[1] + xs[0] * ts[1]))


def loss(w, x):
    return np.sum(np.tanh(w * x))


def mean(x):
    return pmean(pbroadcast(x, "i"), "i")


SLOPE = sum(md.grad(loss)(W, x) for x in X)

#: Name: a body of a rank's x and of w; the state of its result, and the global value.
BODIES = {
    "cond: zeros": (lambda x, w: md.cond(w[0] < 0, lambda: np.zeros(3), lambda: u(x)), "U", TOTAL),
    "cond: reduced and invariant": (lambda x, w: md.cond(w[0] > 0, lambda: w, lambda: r(w)), "R", W),
    "if on reduced": (lambda x, w: u(x) if r(w)[1] < 0 else u(-x), "U", TOTAL),
    "scan to reduced": (lambda x, w: loop(w, lambda c: c * r(w)), "R", W**3),
    "while": (lambda x, w: counting(u(np.zeros(3)), lambda c: c + u(x)), "U", 2 * TOTAL),
    "a rule's unreduced one": (lambda x, w: with_rule(lambda ct, w, x: u(ct * x))(r(w), x), "U", (X * X).sum(0)),
    "a rule's sum": (lambda x, w: with_rule(lambda ct, w, x: psum(ct * x, "i"))(w, x), "I", (X * X).sum(0)),
    "custom_jvp": (lambda x, w: md.vjp(lambda w: product(w, x), r(w))[1](x)[0], "U", (X * X).sum(0)),
    "vmap axis": (lambda x, w: over_two(lambda a: psum(u(a), ("i", "k")))(np.stack([x, x]))[1], "I", 2 * TOTAL),
    "grad of unreduced": (lambda x, w: md.grad(lambda w: u(loss(w, x)))(r(w)), "U", SLOPE),
    "grad in unreduced": (lambda x, w: md.grad(lambda y: np.sum(w * y))(u(x)), "R", W),
    "grad of a mean": (lambda x, w: md.grad(lambda w: mean(loss(w, 2.0)))(r(w)), "U", md.grad(loss)(W, 2.0)),
    "grad of zero": (lambda x, w: md.grad(lambda w: u(np.sum(x)))(r(w)), "U", 0 * W),
    "jacrev of reduced": (lambda x, w: np.diag(md.jacrev(lambda w: np.tanh(w * x))(r(w))), "U", SLOPE),
    "booleans": (lambda x, w: psum(u(x > 0), "i"), "I", (X > 0).sum(0)),
    "complex": (lambda x, w: np.real(np.conj(u(x * 1j)) * (1 + 2j)), "U", 2 * TOTAL),
    "a number": (lambda x, w: u(0.0) + u(x[0]) * w[0], "U", TOTAL[0] * W[0]),
    "mean of parts": (lambda x, w: pmean(u(x), "i"), "I", X.mean(0)),
}


def mapped(body, state):
    g = (lambda x, w: body(x[0], w)[None]) if state == "V" else lambda x, w: body(x[0], w)
    return spmd.shard_map(g, mesh=MESH, in_specs=(P("i"), P()), out_specs=SPECS[state])


@each("name", BODIES)
def test_bodies(name):
    body, state, expected = BODIES[name]
    f = mapped(body, state)
    tape = None if name.startswith("if") else md.make_tape(f)(X, W)
    for y in (f(X, W), *(() if tape is None else (md.jit(f)(X, W), tape(X, W)[0]))):
        numpy.testing.assert_allclose(global_value(y), expected, 1e-10, 1e-12)


def test_nested():
    """Outer states go through inner shard_maps, whose specs name the states along their own axes."""

    def body(x, w):
        parts = spmd.shard_map(lambda x, w: unreduced(x * w, "j"), axis_names={"j"}, **inner)(u(x), w)
        assert str(md.typeof(parts)) == "f64[2,2]{U:i,U:j}"
        total = {"in_specs": P(unreduced={"j"}), "out_specs": P()}
        return psum(spmd.shard_map(lambda y: psum(y, "j"), axis_names={"j"}, **total)(parts), "i")

    inner = {"in_specs": (P(None, "j"), P(reduced={"j"})), "out_specs": P(unreduced={"j"})}
    f = spmd.shard_map(body, mesh=MESH2, axis_names={"i"}, in_specs=(P("i"), P()), out_specs=P())
    g = lambda x, w: (x[:2] + x[2:]).reshape(2, 2, 2).sum(1) * w  # noqa: E731
    x, w = numpy.arange(16.0).reshape(4, 4), numpy.array([1.0, -2.0])
    assert_alike([f(x, w), md.jit(f)(x, w)], [g(x, w)] * 2)
    assert_alike(*[md.grad(lambda x, w, h=h: np.sum(h(x, w) ** 2), (0, 1))(x, w) for h in (f, g)])
    inner["in_specs"] = SPECS["U"], P()
    with pytest.raises(ValueError):
        f(x, w)


# ---------------------------------------------------------------- arrays outside of bodies

PARTS = spmd.from_local(list(X), MESH, SPECS["U"])
COPIES = spmd.distribute(W, MESH, SPECS["R"])
SPLIT = spmd.distribute(numpy.arange(8.0), MESH, P("i"))
EIGHT = spmd.from_local(list(numpy.arange(32.0).reshape(4, 8)), MESH, SPECS["U"])

#: An array, the spec to reshard to, the steps, and the specs that cotangents have and get.
RESHARDS = [
    (EIGHT, P(), "psum over 'i': P(), 96 bytes"),
    (EIGHT, P("i"), "psum_scatter over 'i', scatter_dimension=0: P('i'), 48 bytes"),
    (EIGHT, SPECS["U"], ""),
    (EIGHT, SPECS["R"], "psum over 'i': P(), 96 bytes\n  reduced over 'i': P(reduced={'i'}), 0 bytes"),
    (SPLIT, SPECS["R"], "all_gather over 'i', axis=0, to='reduced': P(reduced={'i'}), 48 bytes"),
    (COPIES, SPECS["R"], ""),
]


def test_reshard():
    """The steps with their bytes, what is counted, and the transpose, whose specs swap unreduced and reduced."""
    for x, spec, steps in RESHARDS:
        shown = spmd.explain_reshard(x, spec)
        assert shown.partition("\n  ")[2] == steps
        sent = dict.fromkeys((line.split()[0] for line in steps.split("\n  ") if " 0 bytes" not in line and line), 1)
        counts = spmd.communication(lambda x, spec=spec: spmd.reshard(x, spec))(x).counts
        assert {k.removesuffix("_reduced"): n for k, n in counts.items()} == sent
        y, pull = md.vjp(lambda x, spec=spec: spmd.reshard(x, spec), x)
        assert spmd.spec_of(y) == spec
        assert_alike([y], [x])
        ct = array_of(spec.transposed(), MESH, 3, x.shape)
        (x_t,) = pull(ct)
        assert spmd.spec_of(x_t) == x.spec.transposed()
        numpy.testing.assert_allclose(inner(y, ct), inner(x, x_t))
    whole = spmd.distribute(W, MESH, SPECS["R"])
    (w_t,) = md.vjp(lambda w: spmd.distribute(w, MESH, SPECS["R"]), W)[1](PARTS)
    assert_alike([whole, w_t], [W, TOTAL])
    assert type(w_t) is numpy.ndarray


#: Name: what is done, the state of the result, and its global value.
OUTSIDE = {
    "U * R": (lambda: PARTS * COPIES, "U", TOTAL * W),
    "zeros_like": (lambda: np.zeros_like(PARTS), "U", 0 * W),
    "vmap": (lambda: md.vmap(lambda y: 3 * y)(PARTS), "U", 3 * TOTAL),
    "R * V": (lambda: COPIES * spmd.distribute(X, MESH, P("i")), "V", X * W),
    "gather": (lambda: spmd.gather(PARTS), "I", TOTAL),
    "booleans": (lambda: spmd.from_local(list(X > 0), MESH, SPECS["U"]), "U", (X > 0).sum(0)),
    "grad of gather": (lambda: md.grad(lambda y: np.sum(spmd.gather(y) ** 2))(PARTS), "R", 2 * TOTAL),
    "grad of U": (lambda: md.grad(lambda y: np.sum(y * W))(PARTS), "R", W),
    "grad in R": (lambda: md.grad(lambda w: spmd.gather(np.sum(w * PARTS)))(COPIES), "U", TOTAL),
    "jacrev": (lambda: md.jacrev(lambda y: 2 * y)(PARTS), "R", 2 * numpy.eye(3)),
    "jacfwd": (lambda: md.jacfwd(np.sin)(COPIES), "R", np.diag(np.cos(W))),
}


@each("name", OUTSIDE)
def test_operations_outside(name):
    make, state, expected = OUTSIDE[name]
    y, spec = make(), SPECS[state]
    assert spmd.spec_of(y) == spec
    assert_alike([y], [numpy.asarray(expected)])
    if isinstance(y, spmd.ShardedArray):
        assert repr(y).endswith(f", {y.spec})")
        assert_alike([spmd.from_local(y.local, MESH, spec)], [y])
