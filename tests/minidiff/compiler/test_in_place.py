"""Operations that write into an operand which nobody needs any more: the same results, without a copy."""

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import buffers

x = numpy.arange(1200.0).reshape(40, 30)
rows = numpy.array([3, 1])


@pytest.fixture
def every_size(monkeypatch):
    monkeypatch.setattr(buffers, "REUSED_BYTES", 0)


@pytest.mark.parametrize(
    "update",
    [
        lambda y, v: np.at(y)[3].set(v),
        lambda y, v: np.at(y)[3].add(v),
        lambda y, v: np.at(y)[1:30:2, ::-1].add(v),
        lambda y, v: np.at(y)[rows].set(v),
        lambda y, v: np.at(y)[rows].add(v),
        lambda y, v: np.at(y)[numpy.array([1, 1, 2])].add(v),
        lambda y, v: md.dynamic_update_slice(y, np.stack([v, v]), (5, 0)),
        lambda y, v: np.at(y)[rows, rows].add(v[0]),
    ],
)
def test_the_operand_is_written_into(update):
    f = lambda y, v: update(np.sort(y), v)  # noqa: E731
    run, v = md.jit(f), numpy.arange(30.0)
    assert "_in_place" in run.source(x, v)
    numpy.testing.assert_array_equal(run(x, v), f(x, v))


def test_what_is_needed_elsewhere_is_not_written_into(every_size):
    for f in (
        lambda y: np.at(y)[3].set(1.0),  # the user's array
        lambda y: (z := y * 2, np.at(z)[3].set(1.0)),  # a result
        lambda y: ((z := y * 2)[3:5], np.at(z)[3].set(1.0)),  # a view of a result
        lambda y: (np.at(z := y * 2)[3].set(1.0), z.sum()),  # read later
        lambda y: np.at(z := y * 2)[1:4].set(z[2:5]),  # read while it is written
        lambda y: np.at(z := y * 2)[1:4].add(z[2:5]),
        lambda y: np.at(np.broadcast_to(y[0], (40, 30)))[3].set(1.0),
    ):
        inputs = x.copy()
        for actual, expected in zip(md.tree.leaves(md.jit(f)(inputs)), md.tree.leaves(f(x))):
            numpy.testing.assert_array_equal(actual, expected)
        numpy.testing.assert_array_equal(inputs, x)


def loops(n):
    write = lambda i, y: np.at(y)[i].set(y[i] * 2 + 1)  # noqa: E731
    return {
        "for": lambda y: md.fori_loop(0, n, write, y),
        "while": lambda y: md.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, write(s[0], s[1])), (0, y))[1],
        "scan": lambda y: md.scan(lambda y, i: (write(i, y), y[i].sum()), y, numpy.arange(n)),
        "scan that keeps the carries": lambda y: md.scan(lambda y, i: (write(i, y), y), y, numpy.arange(n)),
        "scan that keeps the next": lambda y: md.scan(lambda y, i: ((z := write(i, y)), z), y, numpy.arange(n)),
        "two that change places": lambda y: md.fori_loop(0, n, lambda i, s: (s[1], write(i, s[0])), (y, y + 1)),
        "one array twice": lambda y: md.fori_loop(0, n, lambda i, s: (write(i, s[0]), write(i, s[1])), (y, y)),
        "one that stays": lambda y: md.fori_loop(0, n, lambda i, s: (write(i, s[0]), s[1]), (y, y)),
        "a constant": lambda y: md.fori_loop(0, n, lambda i, z: np.at(z)[i].set(y[0] + z[0]), y),
        "a loop in a loop": lambda y: md.fori_loop(
            0, n, lambda i, z: md.fori_loop(0, 2, lambda j, w: np.at(w)[i, j].add(1.0), z), y
        ),
        "a view as the next": lambda y: md.fori_loop(0, n, lambda i, z: np.at(z * 1)[i].set(0.0)[::-1], y),
        "operations": lambda y: md.fori_loop(0, n, lambda i, z: np.sin(z) * 0.5 + z, y),
    }


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("name", loops(0))
def test_loops(every_size, name, n):
    """Also on an array that is read-only, and one that is a view."""
    f = loops(n)[name]
    frozen = x.copy()
    frozen.flags.writeable = False
    for inputs in (x.copy(), frozen, numpy.asfortranarray(x), x[::-1]):
        before = inputs.copy()
        for actual, expected in zip(md.tree.leaves(md.jit(f)(inputs)), md.tree.leaves(f(before)), strict=True):
            numpy.testing.assert_allclose(actual, expected, rtol=1e-13)
        numpy.testing.assert_array_equal(inputs, before)
    total = lambda y: sum(np.sum(np.sin(z)) for z in md.tree.leaves(f(y)))  # noqa: E731
    if name != "while":
        numpy.testing.assert_allclose(md.jit(md.grad(total))(x / 1200), md.grad(total)(x / 1200), rtol=1e-10)


def test_a_loop_copies_its_first_carry_and_no_other(monkeypatch):
    copies = []
    real = numpy.array
    monkeypatch.setattr(numpy, "array", lambda *args, **kwargs: copies.append(args) or real(*args, **kwargs))
    run = md.jit(loops(30)["for"])
    run(x)
    copies.clear()
    run(x)
    assert sum(type(a[0]) is numpy.ndarray and a[0].shape == x.shape for a in copies) == 1


@st.composite
def programs(draw):
    """Steps that make a value of earlier ones: operations, updates and views."""
    count = draw(st.integers(1, 10))
    names = st.sampled_from(["twice", "set", "add", "add rows", "view", "flip", "sum", "row"])
    return [
        (draw(names), draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 3))) for _ in range(count)
    ]


def run_program(steps, y):
    values = [y]
    for name, a, b, i in steps:
        u, v = values[a % len(values)], values[b % len(values)]
        values.append(
            {
                "twice": lambda u, v, i: u * 2,
                "set": lambda u, v, i: np.at(u)[i].set(v[0]),
                "add": lambda u, v, i: np.at(u)[i:].add(v[: 4 - i]),
                "add rows": lambda u, v, i: np.at(u)[numpy.array([i, 0, i])].add(v[:3]),
                "view": lambda u, v, i: u.reshape(4, 3),
                "flip": lambda u, v, i: u[::-1],
                "sum": lambda u, v, i: u + v,
                "row": lambda u, v, i: np.at(u)[i].set(u[(i + 1) % 4]),
            }[name](u, v, i)
        )
    return values[1::2] + values[-1:]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(programs(), st.booleans())
def test_random_programs(steps, in_loop):
    f = lambda y: run_program(steps, y)  # noqa: E731
    if in_loop:
        f = lambda y: md.fori_loop(0, 3, lambda i, y: run_program(steps, y)[-1] * 0.5, y)  # noqa: E731
    before, buffers.REUSED_BYTES = buffers.REUSED_BYTES, 0
    inputs = numpy.arange(12.0).reshape(4, 3)
    try:
        actual = md.jit(f, kernels=False)(inputs)
    finally:
        buffers.REUSED_BYTES = before
    for a, b in zip(md.tree.leaves(actual), md.tree.leaves(f(numpy.arange(12.0).reshape(4, 3))), strict=True):
        numpy.testing.assert_allclose(a, b, rtol=1e-13)
    numpy.testing.assert_array_equal(inputs, numpy.arange(12.0).reshape(4, 3))


# ---------------------------------------------------------------- donated arguments


def step(state, batch):
    return {k: v - 0.1 * np.sin(v) * batch for k, v in state.items()}


def new_state():
    return {"w": numpy.ones((40, 40)), "b": numpy.zeros((40, 40))}


@pytest.mark.parametrize("how", [{"donate_argnums": 0}, {"donate_argnames": "state"}, {"donate_argnums": (-2,)}])
def test_a_donated_argument_is_written_into(how):
    run = md.jit(lambda state, batch: np.at(state["w"])[0].set(batch), **how)
    state = new_state()
    actual = run(state, 2.0)
    assert numpy.shares_memory(actual, state["w"])
    numpy.testing.assert_array_equal(actual, np.at(new_state()["w"])[0].set(2.0))
    other = run(new_state(), batch=3.0) if how != {"donate_argnums": (-2,)} else run(new_state(), 3.0)
    assert other[0, 0] == 3.0


def test_a_step_of_training_with_donated_parameters():
    run, state = md.jit(step, donate_argnums=0, kernels=False), new_state()
    expected = new_state()
    for k in range(3):
        state, expected = run(state, float(k)), step(expected, float(k))
    for name in expected:
        numpy.testing.assert_allclose(state[name], expected[name])


def test_what_is_not_donated_stays():
    run = md.jit(lambda a, b: (np.at(a)[0].set(1.0), np.at(b)[0].set(1.0)), donate_argnums=0)
    frozen = x.copy()
    frozen.flags.writeable = False
    whole = x.copy()
    for inputs in (frozen, x.copy()[:20], whole):
        other = whole[::2] if inputs is whole else x
        saved, expected = other.copy(), inputs.copy()
        expected[0] = 1.0
        before = inputs.copy()
        actual = run(inputs, other)
        numpy.testing.assert_array_equal(actual[0], expected)
        numpy.testing.assert_array_equal(other, saved)
        if inputs is not whole or numpy.shares_memory(inputs, other):
            numpy.testing.assert_array_equal(inputs, before)


def test_one_array_that_is_donated_and_not():
    a = x.copy()
    actual = md.jit(lambda a, b: np.at(a)[0].set(b[1]), donate_argnums=0)(a, a)
    numpy.testing.assert_array_equal(a, x)
    numpy.testing.assert_array_equal(actual[0], x[1])


def test_errors_of_donation():
    with pytest.raises(ValueError, match="the argument 0 of step is static, so there is no array to donate"):
        md.jit(step, static_argnums=0, donate_argnums=0)
    with pytest.raises(ValueError, match="donate_argnames names 'stat', but the parameters of step are state, batch"):
        md.jit(step, donate_argnames="stat")
    with pytest.raises(TypeError, match="donate_argnums must be an int or a tuple of ints"):
        md.jit(step, donate_argnums="state")
    with pytest.raises(TypeError, match=r"donate_argnums names argument 3 of step, .* passed by name"):
        md.jit(step, donate_argnums=3)(new_state(), batch=1.0)


@pytest.mark.parametrize("scanned", [False, True])
def test_the_gradient_of_a_recurrent_network(scanned):
    def loss(w, xs):
        u, v = w
        step = lambda h, x: (np.tanh(x @ u + h @ v), None)  # noqa: E731
        h = numpy.zeros((16, 32))
        if scanned:
            h, _ = md.scan(step, h, xs)
        else:
            for x in xs:
                h, _ = step(h, x)
        return np.sum(h * h)

    rng = numpy.random.default_rng(1)
    w, xs = tuple(rng.normal(size=(2, 32, 32)) / 4), rng.normal(size=(5, 16, 32))
    for x, y in zip(md.jit(md.grad(loss))(w, xs), md.grad(loss)(w, xs), strict=True):
        numpy.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
    md.testing.check_grads(md.jit(lambda w: loss(w, xs)), (w,), order=1)


def test_results_are_copied_into_donated_arguments_that_are_there_no_more():
    """One result each; the other one has memory of its own."""

    def f(a, b):
        c = b * np.sum(a)
        return b @ c, b.T @ c

    square, donated = x[:30], x[:30].copy()
    whole, actual = f(square, square), md.jit(f, donate_argnums=0)(donated, square)
    assert [numpy.shares_memory(result, donated) for result in actual] == [True, False]
    for a, b in zip(actual, whole):
        numpy.testing.assert_allclose(a, b)


# ---------------------------------------------------------------- values that are used twice


def test_one_value_as_two_carries():
    def step(i, carry):
        a, b = carry
        c = np.at(a)[0].set(1.0 * i) + b
        return c, c

    f = lambda x: md.fori_loop(0, 3, step, (x, x))  # noqa: E731
    numpy.testing.assert_array_equal(md.jit(f)(x), f(x))


def test_zeros_around_values_that_are_added_and_returned():
    def f(x, v):
        (placed,) = md.vjp(lambda x: x[2:5], x)[1](v)
        return x + placed, placed * 2

    numpy.testing.assert_array_equal(md.jit(f)(x, x[:3]), f(x, x[:3]))


def test_a_loop_without_steps_returns_a_copy_of_its_argument():
    result = md.jit(lambda x: md.scan(lambda c, _: (2 * c, None), x, length=0)[0])(x)
    assert not numpy.shares_memory(result, x)
    numpy.testing.assert_array_equal(result, x)
