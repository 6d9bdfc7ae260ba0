"""RWKV: a language model that trains in parallel, along tokens on ranks, and writes as a recurrence.

    mpirun -n 4 python -m spmd.examples.rwkv

Time mixing is a mean of the values up to a token, with weights that decay. Channel mixing is a perceptron with a gate.
Both mix a token with the one before it. In parallel, the sums over tokens are a `prefix_scan`. One token after the
other, they are a state, which has the same size for texts of any length.

The program trains on a text that is split over ranks, and prints the losses and the collectives of a step. Then it
writes, by the recurrence and by the parallel form.

Source: Peng et al., "RWKV: Reinventing RNNs for the transformer era", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.nn import layer_norm, log_softmax, relu, sigmoid
from spmd.examples.recurrence import prefix_scan
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P

TEXT, FEATURES, LAYERS, STEPS = "abracadabra. ", 16, 2, 20
LETTERS = sorted({*TEXT})
LOWEST = -1e30  # the exponent of an empty sum


def init(seed: int = 0) -> dict:
    rng = numpy.random.default_rng(seed)
    matrix = lambda rows, columns: rng.normal(size=(rows, columns)) / rows**0.5  # noqa: E731
    mixed = lambda columns: (rng.random(FEATURES), matrix(FEATURES, columns))  # noqa: E731
    layers = [
        {
            "decay": rng.normal(size=FEATURES),
            "bonus": rng.normal(size=FEATURES),
            "time": [mixed(FEATURES) for _ in range(3)],  # key, value, gate
            "out": matrix(FEATURES, FEATURES),
            "channel": [mixed(4 * FEATURES), mixed(FEATURES)],  # key, gate
            "value": matrix(4 * FEATURES, FEATURES),
        }
        for _ in range(LAYERS)
    ]
    return {"embedding": matrix(len(LETTERS), FEATURES), "layers": layers, "head": matrix(FEATURES, len(LETTERS))}


def join(a: tuple, b: tuple, w: Any) -> tuple:
    """Combine sums of earlier tokens and of later ones: (tokens, largest exponent, numerator, denominator)."""
    (steps, top, num, den), (more, top_b, num_b, den_b) = a, b
    top = top - more * w
    largest = np.maximum(top, top_b)
    p, q = np.exp(top - largest), np.exp(top_b - largest)
    return steps + more, largest, p * num + q * num_b, p * den + q * den_b


def project(x: Any, last: Any, pairs: list) -> list:
    """Multiply each token, mixed with the one before it, by each matrix."""
    return [(x * mix + last * (1 - mix)) @ matrix for mix, matrix in pairs]


def time_mixing(p: dict, x: Any, last: Any, sums_before: Any) -> Any:
    """Return what a layer adds to tokens, given the function that returns the sums before each token."""
    k, v, r = project(x, last, p["time"])
    ones = np.ones_like(k)
    before = sums_before((ones, k, v, ones), np.exp(p["decay"]))
    _, _, num, den = join(before, (0 * ones, p["bonus"] + k, v, ones), np.exp(p["decay"]))
    return (sigmoid(r) * num / den) @ p["out"]


def channel_mixing(p: dict, x: Any, last: Any) -> Any:
    k, r = project(x, last, p["channel"])
    return sigmoid(r) * (relu(k) ** 2 @ p["value"])


def parallel(params: dict, tokens: Any, axis: str | None = None) -> Any:
    """Return the logits after each token, [tokens / ranks] -> [tokens / ranks, letters]."""

    def before(x: Any) -> Any:
        """Return the row before each row; before the first of all there are zeros."""
        return spmd.halo(x, {0: (1, 0)}, (axis,), "zeros")[:-1]

    def sums_before(elems: tuple, w: Any) -> tuple:
        steps, top, num, den = map(before, prefix_scan(partial(join, w=w), elems, axis))
        return steps, np.where(steps > 0, top, LOWEST), num, den

    x = layer_norm(params["embedding"][tokens])
    for p in params["layers"]:
        y = layer_norm(x)
        x = x + time_mixing(p, y, before(y), sums_before)
        y = layer_norm(x)
        x = x + channel_mixing(p, y, before(y))
    return layer_norm(x) @ params["head"]


def empty_state() -> list:
    """Return the state before the first token: of each layer, the two last rows and the sums."""
    zeros = np.zeros(FEATURES)
    return [(zeros, zeros, (zeros, zeros + LOWEST, zeros, zeros)) for _ in range(LAYERS)]


def recurrent(params: dict, state: list, token: Any) -> tuple[Any, list]:
    """Return the logits after one more token, and the new state."""
    x, states = layer_norm(params["embedding"][token]), []
    for p, (last, last_of_channel, sums) in zip(params["layers"], state):
        y = layer_norm(x)
        k, v, _ = project(y, last, p["time"])
        x = x + time_mixing(p, y, last, lambda elems, w, sums=sums: sums)
        z = layer_norm(x)
        x = x + channel_mixing(p, z, last_of_channel)
        ones = np.ones_like(k)
        states.append((y, z, join(sums, (ones, k, v, ones), np.exp(p["decay"]))))
    return layer_norm(x) @ params["head"], states


def loss(params: dict, tokens: Any, labels: Any, axis: str | None = None) -> Any:
    """Return the mean loss of predicting the next token; each rank has its own tokens."""
    scores = log_softmax(parallel(params, tokens, axis))
    total = -np.sum(np.take_along_axis(scores, labels[:, None], axis=1))
    count = len(tokens)
    return psum(total, axis) / psum(count, axis) if axis else total / count


def train(f: Any, params: dict, tokens: Any, labels: Any) -> tuple[list, dict]:
    optimizer = md.optim.adam(0.03)
    state, losses = optimizer.init(params), []
    step = md.jit(md.value_and_grad(f))
    for _ in range(STEPS):
        value, gradient = step(params, tokens, labels)
        updates, state = optimizer.update(gradient, state, params)
        params = md.optim.apply_updates(params, updates)
        losses.append(float(value))
    return losses, params


def write(params: dict, prompt: Any, count: int) -> tuple[list, list]:
    """Return the most probable continuation, by the recurrence and by the parallel form."""
    state, text = empty_state(), list(prompt)
    for n in range(len(prompt) + count - 1):
        scores, state = recurrent(params, state, text[n])
        if n + 1 == len(text):
            text.append(int(np.argmax(scores)))
    again = list(prompt)
    for _ in range(count):
        again.append(int(np.argmax(parallel(params, np.array(again))[-1])))
    return text, again


def show(mesh: spmd.Mesh) -> None:
    """Train on ranks, compare with one rank, and write."""
    text = numpy.array([LETTERS.index(c) for c in TEXT * 2 * mesh.size])[: 16 * mesh.size + 1]
    tokens, labels, split = text[:-1], text[1:], P("tokens")
    on_ranks = spmd.shard_map(partial(loss, axis="tokens"), mesh=mesh, in_specs=(P(), split, split), out_specs=P())
    params = init()
    print_calls("a step", md.value_and_grad(on_ranks), params, tokens, labels)
    losses, trained = train(on_ranks, params, tokens, labels)
    pairs = [[f(p, tokens, labels) for f in (on_ranks, loss)] for p in (params, trained)]
    same = all(numpy.allclose(*pair) for pair in pairs)
    print(f"losses: {numbers(losses[::10])}; the same as on one rank: {'yes' if same else 'NO'}")
    written, again = write(trained, tokens[:4], 20)
    print(f"written: {''.join(LETTERS[n] for n in written)}; in parallel: {'the same' if written == again else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("tokens",), argv)


if __name__ == "__main__":
    main()
