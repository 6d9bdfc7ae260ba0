"""The network that the other files distribute, and its losses.

It has dense layers with relu between them. `predict` takes the dense layer as an argument: each parallelism passes its
own, and the rest does not change. The errors take the mesh axis along which features are split, if they are.

Source: shard_map tutorial, "Neural networks".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import pmax, psum
from minidiff.nn import relu
from spmd.mesh.mesh import Mesh

Layer = tuple[Any, Any]  # weights [inputs, outputs] and biases [outputs]


def axes_of(mesh: Mesh, loss: str, *names: str) -> tuple[str, ...]:
    """The axes of a mesh, one for each name.

    Raises ValueError if it has more or fewer; the names say their use.
    """
    if len(mesh.axis_names) != len(names):
        example = f"make_mesh({(2,) * len(names)}, {names})"
        axes = f"{len(names)} axes, for {' and '.join(names)}" if len(names) > 1 else f"one axis, for {names[0]}"
        raise ValueError(f"{loss} takes a mesh with {axes}, such as {example}; got {mesh}")
    return mesh.axis_names


def init_params(rng: Any, sizes: Sequence[int]) -> list[Layer]:
    """Random weights and biases of layers from `sizes[0]` to `sizes[-1]` features.

    They are the same on all ranks if `rng` is.

    >>> [(W.shape, b.shape) for W, b in init_params(np.random.default_rng(0), (64, 32, 10))]
    [((64, 32), (32,)), ((32, 10), (10,))]
    """
    if not hasattr(rng, "normal"):
        raise TypeError(f"init_params: rng is {rng!r}; write init_params(np.random.default_rng(0), (64, 32, 10))")
    return [(rng.normal(size=(n, m)) / np.sqrt(n), rng.normal(size=m)) for n, m in pairwise(sizes)]


def dense(x: Any, W: Any, b: Any) -> Any:
    """One layer: [n, inputs], [inputs, outputs], [outputs] -> [n, outputs]."""
    return x @ W + b


def predict(params: Sequence[Layer], inputs: Any, dense: Callable = dense) -> Any:
    """The network's output for each example: [n, features] -> [n, outputs]."""
    *hidden, last = params
    for layer in hidden:
        inputs = relu(dense(inputs, *layer))
    return dense(inputs, *last)


def squared_error(predictions: Any, targets: Any, axis: str | None = None) -> Any:
    """The sum of squared differences: [n, outputs], [n, outputs] -> [n].

    There is one for each example. With `axis`, outputs are split along that axis of the mesh: one `psum`.

    >>> squared_error(np.array([[1.0, 2.0], [3.0, 4.0]]), np.zeros((2, 2)))
    array([ 5., 25.])
    """
    return _over_ranks(np.sum((predictions - targets) ** 2, axis=-1), axis)


def cross_entropy(logits: Any, targets: Any, axis: str | None = None) -> Any:
    """-log of the right class's probability: [n, classes], [n, classes] -> [n].

    There is one for each example. The targets of an example sum to one. With `axis`, classes are split along that axis
    of the mesh: one `pmax`, two `psum`s.

    >>> cross_entropy(np.zeros((1, 4)), np.eye(4)[:1]) / np.log(2)
    array([2.])
    """
    # Subtract the largest logit, so that no exponential overflows: neither result nor derivative depends on it.
    largest = np.max(md.stop_gradient(logits), axis=-1, keepdims=True)
    logits = logits - (largest if axis is None else pmax(largest, axis))
    total = _over_ranks(np.sum(np.exp(logits), axis=-1), axis)
    return np.log(total) - _over_ranks(np.sum(targets * logits, axis=-1), axis)


def _over_ranks(x: Any, axis: str | None) -> Any:
    return x if axis is None else psum(x, axis)


def loss(params: Sequence[Layer], batch: tuple, error: Callable = squared_error) -> Any:
    """The mean error over the examples.

    Every parallelism computes the same value, and the same gradients.
    """
    inputs, targets = batch
    return np.mean(error(predict(params, inputs), targets))
