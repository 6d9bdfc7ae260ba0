"""Programs for the compiler: functions, their arguments, and what their source must have.

`PROGRAMS` run, as they are written and compiled, and their results are compared; `PLANS` have large arguments, of which
there are only types, and the operations that each is compiled to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy

import minidiff as md
import minidiff.numpy as np
from minidiff import nn

RNG = numpy.random.default_rng(0)
X, B, SQUARE = RNG.normal(size=(12, 30)), RNG.normal(size=30), RNG.normal(size=(2, 4, 4))
BIAS = numpy.linspace(-1.0, 1.0, 30)
Y, XS = numpy.array([1.0, 0.5]), numpy.linspace(-1.0, 1.0, 40)
ROWS = numpy.array([3, 1])


class Program(NamedTuple):
    f: Callable
    args: tuple
    shows: str = ""  # what its source has
    differentiable: bool = True


# ---------------------------------------------------------------- elements and rows


@md.custom_jvp
def scaled(x):
    return 2.0 * np.tanh(x)


@scaled.defjvp
def _scaled_tangent(primals, tangents):
    (x,), (t,) = primals, tangents
    y = np.tanh(x)
    return 2.0 * y, 2.0 * (1 - y * y) * t


@md.custom_vjp
def clipped(x):
    return np.exp(-x * x)


clipped.defvjp(
    lambda x: (clipped(x), x),
    lambda x, ct: (np.clip(ct, -1.0, 1.0) * -2.0 * x * np.exp(-x * x),),
)

ACTIVATIONS = ("relu", "gelu", "silu", "mish", "elu", "celu", "selu", "softplus", "log_sigmoid", "sigmoid")
ACTIVATIONS += ("leaky_relu", "relu6", "hard_sigmoid", "hard_silu", "hard_tanh", "soft_sign", "squareplus", "glu")

#: Functions of the elements of an array: each is one loop, as is its gradient.
ELEMENTWISE: dict[str, Callable] = {
    **{name: getattr(nn, name) for name in (*ACTIVATIONS, "erf", "erfc")},
    "gelu (erf)": lambda x: nn.gelu(x, approximate=False),
    "relu(2x+1)*3": lambda x: nn.relu(2 * x + 1) * 3,
    "custom_jvp": lambda x: scaled(x) + 1.0,
    "custom_vjp": lambda x: clipped(x) + 1.0,
    "a jitted function": lambda x: md.jit(nn.silu)(x) * 2.0,
}

#: Functions of the rows of a matrix: each is one loop, as is its gradient.
ALONG_ROWS: dict[str, Callable] = {
    "softmax": nn.softmax,
    "log_softmax": nn.log_softmax,
    "logsumexp": lambda x: nn.logsumexp(x, axis=-1, keepdims=True),
    "cross_entropy": lambda x: nn.logsumexp(x, axis=-1, keepdims=True) - x[:, 3:4],
    "layer_norm": lambda x: nn.layer_norm(x, np.arange(x.shape[-1], dtype=x.dtype), 1.0),
    "rms_norm": nn.rms_norm,
    "standardize": lambda x: nn.standardize(np.tanh(x)),
    "var": lambda x: x / np.var(x, axis=-1, keepdims=True),
    "range": lambda x: (x - np.min(x, -1, keepdims=True)) / np.ptp(x, -1, keepdims=True),
    "two softmaxes": lambda x: nn.softmax(nn.softmax(x) * 3.0),
}

#: Functions of a matrix whose results are split; of `SPLIT`, loops need only the parts.
SPLIT: dict[str, Callable] = {
    "glu, biased": lambda x: nn.glu(np.tanh(x * bias(x)) + 1.0),
    "glu of rows": lambda x: nn.glu(x * bias(x) + bias(x.T)[:, None], axis=0),
    "a whole constant": lambda x: nn.glu(x * whole(x) + whole(x)[:1] * bias(x.T)[:, None]),
    "five gates": lambda x: functools.reduce(np.multiply, np.split(x * x + bias(x), 5, axis=-1)),
    "one part": lambda x: np.exp(np.split(np.exp(-x * x) + 1.0, 2, axis=-1)[1]),
    "parts that are booleans": lambda x: np.where(
        *np.split((x + bias(x) > 0) == (x > 1.0), 2, axis=1), x[:, : x.shape[1] // 2]
    ),
}
STORED: dict[str, Callable] = {
    "a part that is a result": lambda x: (lambda a, b: (a, np.exp(b)))(*np.split(np.exp(-x * x) + 1.0, 2, axis=-1)),
    "a whole that is a result": lambda x: (lambda y: (nn.glu(y), y))(np.exp(-x * x) + 1.0),
    "unequal parts": lambda x: (lambda a, b: (np.exp(a), np.exp(b)))(*np.split(np.exp(-x * x) + 1.0, [10], axis=-1)),
    "a product of parts": lambda x: (lambda a, b: (a @ b.T, np.exp(a)))(*np.split(np.exp(-x * x) + 1.0, 2, axis=-1)),
    "parts of a norm": lambda x: nn.glu(nn.layer_norm(x * bias(x))),
}


def bias(x):
    return numpy.linspace(-1.0, 1.0, x.shape[-1])


def whole(x):
    return numpy.cos(numpy.arange(float(x.size))).reshape(x.shape)


# ---------------------------------------------------------------- what is read where it is, sums, and broadcasts


def around(u):
    return np.roll(u, 1, 0) + np.roll(u, -1, 0) + np.roll(u, 1, 1) + np.roll(u, -1, 1) - 4 * u


READS: dict[str, Callable] = {
    "around": around,
    "inside": lambda u: u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1],
    "in zeros": lambda u: np.pad(u, 1) * np.pad(u, ((2, 0), (0, 2))) + 1,
    "joined": lambda u: np.concatenate([u[:, -1:], u[:, :-1]], 1) * u - np.concatenate([u, 2 * u])[: -len(u)],
    "a slice": lambda x: np.tanh(x[1:, 2:]) * x[:-1, :-2],
    "joined, then a function": lambda x: np.tanh(np.concatenate([x, 2 * x])) + 1.0,
}
BROADCASTS: dict[str, Callable] = {
    "transposed": lambda x, b: np.tanh(x.T) * x.T + 1.0,
    "a row for all": lambda x, b: np.tanh(x + b) * x,
    "a number": lambda x, b: np.exp(-x * x) * x[0, 0] + x[0, 1],
    "the same result twice": lambda x, b: (x * 2 + 1, x * 2 + 1, x + 0),
    "many results": lambda x, b: [*(z := [x * b + k for k in range(34)]), z[-1].sum()],
    "booleans": lambda x, b: (np.tanh(x) > b) & (x < 0.5),
    "a sum with a number": lambda x, b: np.sum(np.sin(x) * np.sum(b)),
    "a sum of each column": lambda x, b: np.sum(np.tanh(x) * b, axis=0),
    "sums and elements": lambda x, b: (np.sum(np.tanh(x), 1), np.sum(np.tanh(x), 0), np.tanh(x) * 2.0),
    "sums over all axes": lambda x, b: [
        (z := x.reshape(4, 3, 30) * b + 1),
        *(z.sum(axis) for axis in (0, 1, 2, (0, 1), (1, 2), None)),
        z.mean(0),
        z.sum((1, 2), keepdims=True),
    ],
    "a gradient": md.grad(lambda x, b: np.sum(np.tanh(x * b) ** 2), (0, 1)),
    "steps with a matrix between": lambda x, b: np.maximum((x * 2 + b) @ (x - 1).T * 3 - 1, 0),
    "a maximum that two need": lambda x, b: (
        (y := x - (m := np.max(x, -1, keepdims=True))) @ (b * np.sum(m)),
        np.exp(y) / np.sum(y, -1, keepdims=True),
    ),
    "of complex numbers": lambda x, b: (x + 1j * b).real * 2 + (x * 1j + b).imag,
}


# ---------------------------------------------------------------- updates


UPDATES: dict[str, Callable] = {
    "set a row": lambda y, v: np.at(y)[3].set(v),
    "add to a slice": lambda y, v: np.at(y)[1:10:2, ::-1].add(v),
    "add to rows": lambda y, v: np.at(y)[ROWS].add(v),
    "add to rows that repeat": lambda y, v: np.at(y)[numpy.array([1, 1, 2])].add(v),
    "update a slice": lambda y, v: md.dynamic_update_slice(y, np.stack([v, v]), (5, 0)),
}


def part_at(y, k):
    return md.dynamic_slice_in_dim(y, k, 3)


#: Updates of what is needed elsewhere: it must not be written into.
NEEDED: dict[str, Callable] = {
    "the user's array": lambda y: np.at(y)[3].set(1.0),
    "a result": lambda y: (z := y * 2, np.at(z)[3].set(1.0)),
    "a view of a result": lambda y: ((z := y * 2)[3:5], np.at(z)[3].set(1.0)),
    "read later": lambda y: (np.at(z := y * 2)[3].set(1.0), z.sum()),
    "read while it is written": lambda y: np.at(z := y * 2)[1:4].set(z[2:5]),
    "read while it is added to": lambda y: np.at(z := y * 2)[1:4].add(z[2:5]),
    "broadcast": lambda y: np.at(np.broadcast_to(y[0], y.shape))[3].set(1.0),
    "parts that overlap": lambda y: part_at(y, k := np.argmax(y[0]) % 5) * part_at(y, k + 1),
    "only named": lambda y: (z := np.sin(y)) + 0.0 * (md.checkpoint_name(z, "a") * np.exp(z + 1.0)),
    "returned as they are": lambda y: (y, y.T, BIAS, BIAS[::-1], np.sin(y), np.sin(y)),
    "stopped": lambda y: md.stop_gradient(z := np.sin(y)) * np.exp(z + 1.0),
    "added and returned": lambda y: (y + (z := md.vjp(lambda x: x[2:5], y)[1](y[:3])[0]), z * 2),
}


# ---------------------------------------------------------------- loops


def write(i, y):
    return np.at(y)[i].set(y[i] * 2 + 1)


def pendulum(y, h=0.05):
    """A step of the classical Runge-Kutta method for a pendulum."""
    f = lambda y: np.stack([y[1], -np.sin(y[0])])  # noqa: E731
    k1 = f(y)
    k2 = f(y + h / 2 * k1)
    k3 = f(y + h / 2 * k2)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(y + h * k3))


def trajectory(y):
    return md.scan(lambda y, _: (pendulum(y), y), y, length=40)


def double(x):
    return x * 2.0


#: Loops over an array, a few of whose rows are written.
LOOPS: dict[str, Callable] = {
    "for": lambda y: md.fori_loop(0, 5, write, y),
    "for, without steps": lambda y: md.fori_loop(0, 0, write, y),
    "scan": lambda y: md.scan(lambda y, i: (write(i, y), y[i].sum()), y, numpy.arange(5)),
    "scan that keeps the carries": lambda y: md.scan(lambda y, i: (write(i, y), y), y, numpy.arange(5)),
    "scan that keeps the next": lambda y: md.scan(lambda y, i: ((z := write(i, y)), z), y, numpy.arange(5)),
    "two that change places": lambda y: md.fori_loop(0, 5, lambda i, s: (s[1], write(i, s[0])), (y, y + 1)),
    "one array twice": lambda y: md.fori_loop(0, 5, lambda i, s: (write(i, s[0]), write(i, s[1])), (y, y)),
    "one value as two carries": lambda y: md.fori_loop(0, 3, lambda i, s: ((c := write(i, s[0]) + s[1]), c), (y, y)),
    "one that stays": lambda y: md.fori_loop(0, 5, lambda i, s: (write(i, s[0]), s[1]), (y, y)),
    "a constant": lambda y: md.fori_loop(0, 5, lambda i, z: np.at(z)[i].set(y[0] + z[0]), y),
    "a loop in a loop": lambda y: md.fori_loop(
        0, 5, lambda i, z: md.fori_loop(0, 2, lambda j, w: np.at(w)[i, j].add(1.0), z), y
    ),
    "a view as the next": lambda y: md.fori_loop(0, 5, lambda i, z: np.at(z * 1)[i].set(0.0)[::-1], y),
    "operations": lambda y: md.fori_loop(0, 5, lambda i, z: np.sin(z) * 0.5 + z, y),
    "stencils": lambda u: md.scan(lambda u, _: (u + 0.1 * around(u), np.sum(u)), u, None, 5),
    "a choice": lambda x: md.cond(x.sum() > 0, lambda x: np.sin(x) * 2, lambda x: x * x, x),
    "choices in a loop": lambda x: md.scan(
        lambda c, e: (md.cond(e > 1, np.sin, lambda c: c * c, c), e), x, numpy.arange(4.0)
    ),
    "a switch": lambda x: md.switch(1, [double, np.sin], x),
    "a checkpoint": lambda x: md.checkpoint(lambda y: np.sin(np.cos(y)))(x),
    "a recurrence": lambda x: md.scan(lambda c, r: (np.tanh(c + r), c.sum()), x[0], x, reverse=True),
    "a recurrent network": lambda x: md.scan(lambda h, r: (np.tanh(r @ x.T + h), None), x[:, 0], x)[0],
}
WHILE: dict[str, Callable] = {
    "while": lambda y: md.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, write(s[0], s[1])), (0, y))[1],
    "doubling": lambda x: md.while_loop(lambda c: np.max(c) < 50, lambda c: 2 * c + 1, x),
    "stencils until": lambda u: md.while_loop(lambda u: np.max(u) > 1, lambda u: u + 0.1 * around(u), u),
}
#: Loops over small arrays, which are one kernel each.
SMALL: dict[str, Callable] = {
    "a trajectory": lambda x: trajectory(x[:2]),
    "a batch of trajectories": lambda x: md.vmap(trajectory)(x[:6].reshape(3, 2)),
    "a reverse loop": lambda x: md.scan(lambda c, x: (np.sin(c + x), (c, c > 0.5)), 0.5, x, reverse=True),
    "integers": lambda x: md.scan(lambda c, x: ((c * 3) & 7, c), np.int64(1), x),
    "float32": lambda x: md.scan(lambda c, x: (np.tanh(c + x), c), np.float32(0.5), x.astype("f4")),
    "flags": lambda x: md.scan(lambda c, x: (c ^ (x > 0), c), np.array([True, False]), x),
    "matrices": lambda x: md.scan(lambda c, x: (np.diag(c @ c.T) * x + c.mT, c[::-1].sum(0)), np.eye(3) / 2, x),
    "constants": lambda x: md.scan(lambda c, x: (XS[:3] * x - c, np.concatenate([c, XS[:1]])), XS[1:4], x),
    "fori_loop": lambda x: md.fori_loop(3, 40, lambda i, c: c + np.sqrt(i * 1.0) + x[3], 0.0),
    "while_loop": lambda x: md.while_loop(
        lambda c: c[0] < 9, lambda c: (c[0] + abs(x[0]) / 7, np.cos(c[1] + c[0]) * 2), (x[2], x[5])
    ),
    "no step": lambda x: md.while_loop(lambda c: np.sum(c) < -9, lambda c: np.sin(np.cos(c) * c + c), x[:3]),
}


# ---------------------------------------------------------------- at once


def branches(x, y):
    for _ in range(3):
        x, y = np.tanh(x @ x), np.tanh(y @ y)
    return x + y


AT_ONCE: dict[str, Callable] = {
    "branches": branches,
    "branches of a backward pass": md.grad(lambda x, y: np.sum(branches(x, y)), argnums=(0, 1)),
    "a layer's two cotangents": md.grad(lambda x, y: np.sum(np.sin(np.tanh(x @ y) @ y)), argnums=(0, 1)),
    "products in a loop": lambda x, y: md.scan(
        lambda c, _: ((c[0] @ c[0] / 4, np.sin(c[1] @ c[1])), None), (x, y), length=3
    )[0],
    "transforms": lambda x, y: (
        np.fft.ifft(np.fft.fft(x)).real * np.sort(y),
        np.linalg.eigh(x + x.T)[0],
        np.linalg.svd(y)[1],
    ),
    "shared products": lambda x, y: ((x @ y) @ (y @ x), x @ x),
    "many at once": lambda x, y: sum(np.sum(x @ (y + k)) for k in range(5)),
}

#: They have no derivative, or take long to be differentiated.
NOT_ONCE_MORE = ("booleans", "many results", "integers", "float32", "flags", "while_loop", "no step")
NOT_ONCE_MORE += ("branches of a backward pass", "a layer's two cotangents", "transforms")

PROGRAMS: dict[str, Program] = {
    **{name: Program(f, (X,)) for name, f in {**ELEMENTWISE, **ALONG_ROWS, **SPLIT, **STORED}.items()},
    **{name: Program(f, (X,), "fused(") for name, f in READS.items()},
    **{name: Program(f, (X, B), "fused(", name not in NOT_ONCE_MORE) for name, f in BROADCASTS.items()},
    **{
        name: Program(lambda y, v, f=f: f(np.sort(y), v), (X, B), "_in_place" * (name != "update a slice"))
        for name, f in UPDATES.items()
    },
    **{name: Program(f, (X,)) for name, f in {**NEEDED, **LOOPS}.items()},
    **{name: Program(f, (X,), "_body(", False) for name, f in WHILE.items()},
    **{name: Program(f, (XS,), "", name not in NOT_ONCE_MORE) for name, f in SMALL.items()},
    **{name: Program(f, (*SQUARE,), "at_once(", name not in NOT_ONCE_MORE) for name, f in AT_ONCE.items()},
}


def gradient_of(f: Callable) -> Callable:
    return lambda x, ct: md.vjp(f, x)[1](ct)[0]
