"""The network that the other files distribute, and its losses.

It has dense layers with relu between them. `predict` takes the dense layer as an argument, so each parallelism passes
its own. The errors take the mesh axis along which features are split, if they are.

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
    """Return the axes of a mesh, one for each name, which says its use. Raises ValueError for more or fewer."""
    if len(mesh.axis_names) != len(names):
        example = f"make_mesh({(2,) * len(names)}, {names})"
        axes = f"{len(names)} axes, for {' and '.join(names)}" if len(names) > 1 else f"one axis, for {names[0]}"
        raise ValueError(f"{loss} takes a mesh with {axes}, such as {example}; got {mesh}")
    return mesh.axis_names


def init_params(rng: Any, sizes: Sequence[int]) -> list[Layer]:
    """Return random weights and biases of layers from `sizes[0]` to `sizes[-1]` features.

    Args:
        rng: a generator of NumPy's, which draws them.
        sizes: the numbers of features, of inputs, between layers, and of outputs.

    Raises:
        TypeError: for an `rng` that is not a generator of NumPy's.

    >>> [(W.shape, b.shape) for W, b in init_params(np.random.default_rng(0), (64, 32, 10))]
    [((64, 32), (32,)), ((32, 10), (10,))]
    """
    if not hasattr(rng, "normal"):
        raise TypeError(f"init_params: rng is {rng!r}; write init_params(np.random.default_rng(0), (64, 32, 10))")
    return [(rng.normal(size=(n, m)) / np.sqrt(n), rng.normal(size=m)) for n, m in pairwise(sizes)]


def dense(x: Any, W: Any, b: Any) -> Any:
    """Apply one layer: [n, inputs], [inputs, outputs], [outputs] -> [n, outputs].

    >>> dense(np.ones((16, 8)), np.ones((8, 4)), np.zeros(4)).shape
    (16, 4)
    """
    return x @ W + b


def predict(params: Sequence[Layer], inputs: Any, dense: Callable = dense) -> Any:
    """Return the network's output for each example: [n, features] -> [n, outputs].

    Args:
        params: pairs of weights and biases, as `init_params` returns them.
        inputs: the examples, [n, features].
        dense: `dense(x, W, b)` applies one layer.

    >>> predict(init_params(np.random.default_rng(0), (8, 4, 2)), np.ones((16, 8))).shape
    (16, 2)
    """
    *hidden, last = params
    for layer in hidden:
        inputs = relu(dense(inputs, *layer))
    return dense(inputs, *last)


def squared_error(predictions: Any, targets: Any, axis: str | None = None) -> Any:
    """Return the sum of squared differences for each example: [n, outputs], [n, outputs] -> [n].

    Args:
        predictions: the network's outputs, [n, outputs].
        targets: those that are right, [n, outputs].
        axis: the axis of the mesh along which outputs are split, if they are: one `psum`.

    >>> squared_error(np.array([[1.0, 2.0], [3.0, 4.0]]), np.zeros((2, 2)))
    array([ 5., 25.])
    """
    return sum_over((predictions - targets) ** 2, axis)


def cross_entropy(logits: Any, targets: Any, axis: str | None = None) -> Any:
    """Return -log of the right class's probability for each example: [n, classes], [n, classes] -> [n].

    Args:
        logits: the network's outputs, [n, classes].
        targets: probabilities, [n, classes]; those of an example sum to one.
        axis: the axis of the mesh along which classes are split, if they are: one `pmax`, two `psum`s.

    >>> cross_entropy(np.zeros((1, 4)), np.eye(4)[:1]) / np.log(2)
    array([2.])
    """
    logits, log_total = shifted_logits(logits, axis)
    return log_total - sum_over(targets * logits, axis)


def shifted_logits(logits: Any, axis: str | None) -> tuple[Any, Any]:
    """Return the logits minus the largest, and the logarithm of the sum of their exponentials, which does not overflow.

    [..., classes / ranks] -> same, [...]. Neither cross entropy nor its derivative depends on the largest logit.
    """
    largest = np.max(md.stop_gradient(logits), axis=-1, keepdims=True)
    logits = logits - (largest if axis is None else pmax(largest, axis))
    return logits, np.log(sum_over(np.exp(logits), axis))


def sum_over(x: Any, axis: str | None) -> Any:
    """Return the sum over the last dimension, which is split over ranks if `axis` is given."""
    total = np.sum(x, axis=-1)
    return total if axis is None else psum(total, axis)


def loss(params: Sequence[Layer], batch: tuple, error: Callable = squared_error, forward: Callable = predict) -> Any:
    """Return the mean error over the examples: parameters, ([n, features], [n, outputs]) -> [].

    Every parallelism computes the same value, and the same gradients.

    Args:
        params: pairs of weights and biases, as `init_params` returns them.
        batch: inputs and targets.
        error: `error(predictions, targets)` is the error of each example.
        forward: `forward(params, inputs)` applies the network.

    >>> params = init_params(np.random.default_rng(0), (8, 4, 2))
    >>> loss(params, (np.ones((16, 8)), np.zeros((16, 2)))).shape
    ()
    """
    inputs, targets = batch
    return np.mean(error(forward(params, inputs), targets))
