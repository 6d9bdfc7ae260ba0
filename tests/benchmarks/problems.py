"""The problems: each a loss, written once for every library's NumPy-like namespace, and its gradient by hand.

`loss(np, params, data)` is the loss; `by_hand(params, data)` gives its value and a list of gradients, in plain NumPy:
the same operations forward, in the same order, and back by the chain rule, as one writes it who knows the derivatives.
(Those of elementwise problems are written in what numba compiles, too.)
`tuned(params, data)` is that of a network by one who cares for nothing but speed: in place wherever nothing is lost,
and weights' gradients of all time steps in one product. Elsewhere it's the one by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

Arrays = Sequence[Any]


class Unsupported(Exception):
    """A library lacks a function that a problem needs."""


class Problem(NamedTuple):
    name: str
    loss: Callable[[Any, Arrays, Arrays], Any]
    by_hand: Callable[[Arrays, Arrays], tuple[Any, list]]
    params: list
    data: list
    tolerance: float = 1e-10
    tuned: Callable[[Arrays, Arrays], tuple[Any, list]] | None = None


# ---------------------------------------------------------------- one formula of two numbers


def formula(np, params, data):
    x1, x2 = params
    return np.log(x1) + x1 * x2 - np.sin(x2)


def formula_by_hand(params, data):
    x1, x2 = params
    return numpy.log(x1) + x1 * x2 - numpy.sin(x2), [1 / x1 + x2, x1 - numpy.cos(x2)]


# ---------------------------------------------------------------- a chain of elementwise operations


def chain(np, params, data, rounds=10):
    """Ten operations a round: sin, multiply, negative, exp, tanh, add, sqrt, divide, log, cos."""
    (x,) = params
    y = x
    for _ in range(rounds):
        y = np.exp(-(np.sin(y) * x))
        y = np.sqrt(np.tanh(y) + x)
        y = np.cos(np.log(y / x))
    return np.sum(y)


def chain_by_hand(params, data, rounds=10):
    (x,) = params
    y, saved = x, []
    for _ in range(rounds):
        s = numpy.sin(y)
        e = numpy.exp(-(s * x))
        t = numpy.tanh(e)
        r = numpy.sqrt(t + x)
        d = r / x
        v = numpy.log(d)
        saved.append((y, s, e, t, r, d, v))
        y = numpy.cos(v)
    dx, dy = numpy.zeros_like(x), numpy.ones_like(x)
    for y_in, s, e, t, r, d, v in saved[::-1]:
        dd = -dy * numpy.sin(v) / d
        dr = dd / x
        dq = dr * 0.5 / r
        dm = -(dq * (1 - t * t) * e)
        dx = dx - dr * d + dq + dm * s
        dy = dm * x * numpy.cos(y_in)
    return y.sum(), [dx + dy]


# ---------------------------------------------------------------- a classifier


def mlp(np, params, data):
    """Layers of tanh, then softmax cross-entropy."""
    h, labels = data
    *hidden, (w, b) = zip(params[::2], params[1::2])
    for v, c in hidden:
        h = np.tanh(h @ v + c)
    logits = h @ w + b
    scores = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    return -np.sum(labels * scores) / labels.shape[0]


def mlp_by_hand(params, data):
    h, labels = data
    *hidden, (w, b) = zip(params[::2], params[1::2])
    saved = [h]
    for v, c in hidden:
        h = numpy.tanh(h @ v + c)
        saved.append(h)
    logits = h @ w + b
    e = numpy.exp(logits)
    total = numpy.sum(e, axis=1, keepdims=True)
    loss = -numpy.sum(labels * (logits - numpy.log(total))) / labels.shape[0]
    g = (e / total - labels) / labels.shape[0]
    grads = [numpy.sum(g, axis=0), h.T @ g]
    for i in reversed(range(len(hidden))):
        g = g @ w.T * (1 - h * h)
        (w, _), h = hidden[i], saved[i]
        grads += [numpy.sum(g, axis=0), h.T @ g]
    return loss, grads[::-1]


def mlp_tuned(params, data):
    h, labels = data
    weights, biases = params[::2], params[1::2]
    saved = [h]
    for w, b in zip(weights[:-1], biases[:-1]):
        h = h @ w
        h += b
        numpy.tanh(h, out=h)
        saved.append(h)
    logits = h @ weights[-1]
    logits += biases[-1]
    g = numpy.exp(logits)
    total = g.sum(axis=1, keepdims=True)
    logits -= numpy.log(total)
    loss = -numpy.vdot(labels, logits) / len(labels)
    g /= total
    g -= labels
    g /= len(labels)
    grads = []
    for i in reversed(range(len(weights))):
        h = saved.pop()
        grads += [g.sum(axis=0), h.T @ g]
        if i:
            g = g @ weights[i].T
            h *= h  # no one needs the layer's values any more
            numpy.subtract(1.0, h, out=h)
            g *= h
    return loss, grads[::-1]


# ---------------------------------------------------------------- a recurrent network


def rnn(np, params, data):
    """h = tanh(x[t] @ u + h @ w + b) step after step, and the squared error of what is read off the last h."""
    u, w, b, v = params
    x, h, y = data
    for t in range(x.shape[0]):
        h = np.tanh(x[t] @ u + h @ w + b)
    error = h @ v - y
    return np.sum(error * error) / y.shape[0]


def rnn_by_hand(params, data):
    u, w, b, v = params
    x, h, y = data
    hs = [h]
    for t in range(x.shape[0]):
        h = numpy.tanh(x[t] @ u + h @ w + b)
        hs.append(h)
    error = h @ v - y
    loss = numpy.sum(error * error) / y.shape[0]
    de = 2 * error / y.shape[0]
    dv = h.T @ de
    g = de @ v.T
    du, dw, db = numpy.zeros_like(u), numpy.zeros_like(w), numpy.zeros_like(b)
    for t in reversed(range(x.shape[0])):
        z = g * (1 - hs[t + 1] * hs[t + 1])
        du += x[t].T @ z
        dw += hs[t].T @ z
        db += numpy.sum(z, axis=0)
        g = z @ w.T
    return loss, [du, dw, db, dv]


def rnn_tuned(params, data):
    u, w, b, v = params
    x, h, y = data
    steps, batch, inputs = x.shape
    hs = numpy.empty((steps + 1, *h.shape))
    hs[0] = h
    zs = (x.reshape(-1, inputs) @ u).reshape(steps, *h.shape)
    zs += b
    for t in range(steps):
        z = zs[t]
        z += hs[t] @ w
        numpy.tanh(z, out=hs[t + 1])
    error = hs[-1] @ v
    error -= y
    loss = numpy.vdot(error, error) / batch
    error *= 2 / batch
    dv = hs[-1].T @ error
    g = error @ v.T
    for t in reversed(range(steps)):
        z = zs[t]
        numpy.multiply(hs[t + 1], hs[t + 1], out=z)
        numpy.subtract(1.0, z, out=z)
        z *= g
        g = z @ w.T
    flat = zs.reshape(steps * batch, -1)
    return loss, [x.reshape(-1, inputs).T @ flat, hs[:-1].reshape(steps * batch, -1).T @ flat, flat.sum(axis=0), dv]


# ---------------------------------------------------------------- a convolution


def convolution(np, params, data):
    """The squared error of a convolution of images with a square kernel, edges padded with zeros."""
    kernel, x = params
    (wanted,) = data
    if np.__name__ not in CONVOLUTIONS:
        raise Unsupported(f"a convolution in {np.__name__}")
    error = CONVOLUTIONS[np.__name__](x, kernel) - wanted
    return np.sum(error * error)


def _by_minidiff(x, kernel):
    import minidiff as md

    return md.nn.conv(x, kernel)


def _by_torch(x, kernel):
    import torch

    out = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), padding="same")
    return out.permute(0, 2, 3, 1)


def _by_jax(x, kernel):
    import jax

    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


#: How a library convolves, by the name of its NumPy-like namespace. Others have no time in this row.
CONVOLUTIONS = {"minidiff.numpy": _by_minidiff, "torch": _by_torch, "jax.numpy": _by_jax}


def convolution_by_hand(params, data):
    """The windows are copied into the rows of one matrix (im2col); back, each tap adds its part to the image."""
    kernel, x = params
    (wanted,) = data
    taps, _, channels, features = kernel.shape
    n, height, width, _ = x.shape
    edge = taps // 2
    padded = numpy.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    windows = numpy.lib.stride_tricks.sliding_window_view(padded, (taps, taps), (1, 2))
    rows = numpy.moveaxis(windows, 3, -1).reshape(-1, taps * taps * channels)
    weights = kernel.reshape(-1, features)
    error = rows @ weights - wanted.reshape(-1, features)
    g = 2 * error
    of_rows = (g @ weights.T).reshape(n, height, width, taps, taps, channels)
    of_x = numpy.zeros_like(padded)
    for i in range(taps):
        for j in range(taps):
            of_x[:, i : i + height, j : j + width] += of_rows[:, :, :, i, j]
    return numpy.sum(error * error), [
        (rows.T @ g).reshape(kernel.shape),
        of_x[:, edge : edge + height, edge : edge + width],
    ]


# ---------------------------------------------------------------- elementwise programs on many numbers


def transcendental(np, params, data, steps=4):
    """x = tanh(1.3 x + 0.1) exp(-x²), four times."""
    (x,) = params
    for _ in range(steps):
        x = np.tanh(1.3 * x + 0.1) * np.exp(-x * x)
    return np.sum(x)


def transcendental_by_hand(params, data, steps=4):
    (x,) = params
    saved = []
    for _ in range(steps):
        t, e = numpy.tanh(1.3 * x + 0.1), numpy.exp(-x * x)
        saved.append((x, t, e))
        x = t * e
    g = numpy.ones_like(x)
    for y, t, e in saved[::-1]:
        g = g * e * ((1 - t * t) * 1.3 - 2 * t * y)
    return x.sum(), [g]


def polynomial(np, params, data, steps=8):
    """x = x (1.5 - x² / 2), eight times."""
    (x,) = params
    for _ in range(steps):
        x = x * (1.5 - 0.5 * x * x)
    return np.sum(x)


def polynomial_by_hand(params, data, steps=8):
    (x,) = params
    saved = []
    for _ in range(steps):
        saved.append(x)
        x = x * (1.5 - 0.5 * x * x)
    g = numpy.ones_like(x)
    for y in saved[::-1]:
        g = g * (1.5 - 1.5 * y * y)
    return x.sum(), [g]


# ---------------------------------------------------------------- a Gaussian process, and the heat equation


def gaussian_process(np, params, data):
    """Minus the log likelihood of values y at points with squared distances d, without its constant."""
    log_scale, log_length, log_noise = params
    d, y, identity = data
    k = np.exp(2 * log_scale) * np.exp(-0.5 * d * np.exp(-2 * log_length)) + np.exp(2 * log_noise) * identity
    return 0.5 * np.sum(y * np.linalg.solve(k, y)) + 0.5 * np.linalg.slogdet(k)[1]


def gaussian_process_by_hand(params, data):
    log_scale, log_length, log_noise = params
    d, y, identity = data
    smooth = numpy.exp(2 * log_scale) * numpy.exp(-0.5 * d * numpy.exp(-2 * log_length))
    noise = numpy.exp(2 * log_noise)
    inverse = numpy.linalg.inv(smooth + noise * identity)
    a = inverse @ y
    loss = 0.5 * numpy.sum(y * a) - 0.5 * numpy.linalg.slogdet(inverse)[1]
    g = 0.5 * (inverse.T - a * a.T)
    weighted = g * smooth
    grads = [2 * weighted.sum(), (weighted * d).sum() * numpy.exp(-2 * log_length), 2 * noise * numpy.trace(g)]
    return loss, [numpy.float64(x) for x in grads]


def heat(np, params, data, steps=4):
    """Steps of the heat equation on a torus, and the squared distance to what is wanted at the end."""
    u, rate = params
    (wanted,) = data
    for _ in range(steps):
        u = u + rate * _laplacian(np, u)
    return np.sum((u - wanted) ** 2)


def _laplacian(np, u):
    return np.roll(u, 1, 0) + np.roll(u, -1, 0) + np.roll(u, 1, 1) + np.roll(u, -1, 1) - 4 * u


def heat_by_hand(params, data, steps=4):
    u, rate = params
    (wanted,) = data
    saved = []
    for _ in range(steps):
        saved.append(_laplacian(numpy, u))
        u = u + rate * saved[-1]
    error = u - wanted
    g, slope = 2 * error, 0.0
    for change in reversed(saved):
        slope += numpy.sum(g * change)
        g = g + rate * _laplacian(numpy, g)
    return numpy.sum(error * error), [g, slope]


# ---------------------------------------------------------------- sizes


def problems(quick: bool = False) -> list[Problem]:
    """All problems; with `quick`, so small that they only show that all agree."""
    rng = numpy.random.default_rng(0)
    x = rng.uniform(0.5, 1.5, 10 if quick else 1000)
    return [
        Problem("formula", formula, formula_by_hand, [2.0, 5.0], []),
        Problem("elementwise", chain, chain_by_hand, [x], []),
        *_networks(rng, quick),
        *_of_images(rng, quick),
        *_of_many_numbers(rng, quick),
    ]


def _networks(rng: numpy.random.Generator, quick: bool) -> Iterator[Problem]:
    sizes = [6, 4, 4, 3] if quick else [784, 128, 128, 128, 128, 128, 8]
    steps, inputs, hidden, outputs = (3, 2, 4, 2) if quick else (50, 64, 128, 8)
    batch = 5 if quick else 32
    layers = [(rng.normal(size=(m, n)) / m**0.5, 0.1 * rng.normal(size=n)) for m, n in itertools.pairwise(sizes)]
    labels = numpy.eye(sizes[-1])[rng.integers(sizes[-1], size=batch)]
    data = [rng.normal(size=(batch, sizes[0])), labels]
    yield Problem("MLP", mlp, mlp_by_hand, [p for layer in layers for p in layer], data, tuned=mlp_tuned)
    recurrent = [(inputs, hidden), (hidden, hidden), (hidden,), (hidden, outputs)]
    params = [rng.normal(size=shape) / hidden**0.5 for shape in recurrent]
    data = [rng.normal(size=(steps, batch, inputs)), numpy.zeros((batch, hidden)), rng.normal(size=(batch, outputs))]
    yield Problem("RNN", rnn, rnn_by_hand, params, data, tuned=rnn_tuned)


def _of_images(rng: numpy.random.Generator, quick: bool) -> Iterator[Problem]:
    """Images, their side, channels and features: the last two are layers of residual networks."""
    for name, size, dtype, tolerance in (
        ("convolution", (8, 32, 16, 32), "f8", 1e-10),
        ("convolution, 56 × 56 × 64, float32", (4, 56, 64, 64), "f4", 1e-3),
        ("convolution, 7 × 7 × 512, float32", (4, 7, 512, 512), "f4", 1e-3),
    ):
        batch, side, channels, features = (2, 5, 2, 3) if quick else size
        kernel = (rng.normal(size=(3, 3, channels, features)) / (9 * channels) ** 0.5).astype(dtype)
        x, wanted = (rng.normal(size=(batch, side, side, n)).astype(dtype) for n in (channels, features))
        yield Problem(name, convolution, convolution_by_hand, [kernel, x], [wanted], tolerance)


def _of_many_numbers(rng: numpy.random.Generator, quick: bool) -> Iterator[Problem]:
    n, points, side = (50, 6, 8) if quick else (1_000_000, 500, 512)
    x = numpy.linspace(-1, 1, n)
    for f, by_hand in ((transcendental, transcendental_by_hand), (polynomial, polynomial_by_hand)):
        yield Problem(f.__name__, f, by_hand, [x], [])
        yield Problem(f"{f.__name__}, float32", f, by_hand, [x.astype("f4")], [], 1e-3)
    place = rng.uniform(-3, 3, points)
    data = [(place[:, None] - place) ** 2, numpy.sin(place)[:, None], numpy.eye(points)]
    process = [numpy.float64(v) for v in (0.1, -0.2, -1.0)]
    yield Problem("Gaussian process", gaussian_process, gaussian_process_by_hand, process, data, 1e-6)
    u, wanted = rng.normal(size=(2, side, side))
    yield Problem("heat", heat, heat_by_hand, [u, numpy.float64(0.1)], [wanted])
