"""Loops over sharded arrays whose steps leave blocks where they are: values and gradients, and sums after the loop."""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from tests.checks.whole import whole

STEPS = 5
X, W, WS = (
    numpy.sin(numpy.arange(12.0)).reshape(4, 3),
    numpy.cos(numpy.arange(9.0)).reshape(3, 3),
    numpy.sin(numpy.arange(15.0)).reshape(STEPS, 3),
)


def closed_over(x, w, ws):
    return np.sum(md.fori_loop(0, STEPS, lambda k, x: np.tanh(x @ w), x) ** 2)


def passed_on(x, w, ws):
    return np.sum(md.fori_loop(0, STEPS, lambda k, c: (np.tanh(c[0] @ c[1]), c[1]), (x, w))[0] ** 2)


def sliced(x, w, ws):
    return np.sum(md.fori_loop(0, STEPS, lambda k, x: np.tanh(x * ws[k]), x) ** 2)


def used_twice(x, w, ws):
    return np.sum(md.fori_loop(0, STEPS, lambda k, x: np.tanh(x @ w) @ w * k, x))


def operand_of_cond(x, w, ws):
    def step(x, v):
        return md.cond(v[0] > 0, lambda x, w: np.tanh(x @ w), lambda x, w: x + w[0], x, w), None

    return np.sum(md.scan(step, x, ws)[0] ** 2)


def operand_of_switch(x, w, ws):
    branches = [lambda x, w: x @ w, lambda x, w: np.sin(x) * w[1], lambda x, w: x]
    return np.sum(md.fori_loop(0, STEPS, lambda k, x: md.switch(k % 3, branches, x, w), x) ** 2)


def recurrent(x, w, ws):
    """An RNN over split rows, from the last element to the first."""

    def step(h, v):
        h = np.tanh(h @ w + v)
        return h, np.sum(h, axis=1)

    h, ys = md.scan(step, x, ws, reverse=True)
    return np.sum(h**2) + np.sum(ys)


def recurrent_from_zeros(x, w, ws):
    """An RNN over split rows, whose first state is whole."""
    h, _ = md.scan(lambda h, u: (np.tanh(h @ w + u[:, None]), None), np.zeros((4, 3)), x.T)
    return np.sum(h**2)


def loop_in_a_loop(x, w, ws):
    step = lambda x, v: (md.fori_loop(0, 2, lambda k, y: np.tanh(y @ w) * v, x), x[:, 0])  # noqa: E731
    return np.sum(md.scan(step, x, ws)[0] ** 2)


def complex_numbers(x, w, ws):
    return np.sum(np.abs(md.fori_loop(0, STEPS, lambda k, z: z * (w[0] + 0.5j), x + 0j)) ** 2)


def checkpointed(x, w, ws):
    step = md.checkpoint(lambda x, w: np.tanh(x @ w))
    return np.sum(md.scan(lambda x, v: (step(x, w) * v, None), x, ws)[0] ** 2)


def python_loop(x, w, ws):
    v = np.sin(w)
    for row in ws:
        x = np.tanh(x @ v + row)
    return np.sum(x**2)


PROGRAMS = (
    *(closed_over, passed_on, sliced, used_twice, operand_of_cond, operand_of_switch, recurrent, loop_in_a_loop),
    *(recurrent_from_zeros, complex_numbers, checkpointed, python_loop),
)


def check(f, mesh, spec):
    """The gradient equals that of plain arrays; it takes one sum; op by op, after those of the loss."""
    gradient = md.grad(f, argnums=(0, 1, 2))
    expected, x = gradient(X, W, WS), spmd.distribute(X, mesh, spec)
    mesh.reset_calls()
    got = md.jit(gradient)(x, W, WS)
    assert {name: n for name, n in mesh.calls.items() if n} == {"psum": 1}
    assert got[0].spec == spec
    for actual, value in zip(got, expected):
        numpy.testing.assert_allclose(whole(actual), value, rtol=1e-9, atol=1e-12)
    numpy.testing.assert_allclose(whole(md.jit(f)(x, W, WS)), f(X, W, WS), rtol=1e-9)
    mesh.reset_calls()
    f(x, W, WS)
    sums_of_loss = mesh.calls["psum"]
    mesh.reset_calls()
    got = gradient(x, W, WS)
    counts = {name: n for name, n in mesh.calls.items() if n}
    assert counts == {"psum": sums_of_loss + 1} == spmd.communication(gradient)(x, W, WS).counts
    for actual, value in zip(got, expected):
        numpy.testing.assert_allclose(whole(actual), value, rtol=1e-9, atol=1e-12)


def with_sums(x, w, ws):
    """Every step sums over rows, too."""
    return np.sum(md.fori_loop(0, STEPS, lambda k, x: x @ w - np.mean(x, axis=0), x) ** 2)
