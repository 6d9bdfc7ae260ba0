"""Optimizers: chains of transformations."""

from __future__ import annotations

from typing import Any

from minidiff.core.tracer import Value
from minidiff.optim.transformations import (
    GradientTransformation,
    Rate,
    add_decayed_weights,
    chain,
    check_numbers,
    is_zero,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_rss,
    trace,
)


def sgd(
    learning_rate: Rate, momentum: Value | None = None, nesterov: bool = False, accumulator_dtype: Any = None
) -> GradientTransformation:
    """Stochastic gradient descent, with momentum if it is neither None nor 0.

    >>> optimizer = sgd(0.1, momentum=0.9)
    >>> state = optimizer.init(1.0)
    >>> update, state = optimizer.update(2.0, state)
    >>> float(update)
    -0.2
    >>> round(float(optimizer.update(2.0, state)[0]), 12)  # -0.1 * (0.9 * 2 + 2)
    -0.38
    """
    if momentum is not None:
        check_numbers(momentum=momentum, below=1)
    sums = () if momentum is None or is_zero(momentum) else (trace(momentum, nesterov, accumulator_dtype),)
    return chain(*sums, scale_by_learning_rate(learning_rate))


def adam(
    learning_rate: Rate,
    b1: Value = 0.9,
    b2: Value = 0.999,
    eps: Value = 1e-8,
    eps_root: Value = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam (Kingma and Ba, 2015), or NAdam (Dozat, 2016) with `nesterov`.

    >>> optimizer = adam(0.1)
    >>> round(float(optimizer.update(5.0, optimizer.init(1.0))[0]), 6)  # the first step is about the rate
    -0.1

    Source: Kingma and Ba, "Adam: A method for stochastic optimization".
    """
    scale = scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return chain(scale, scale_by_learning_rate(learning_rate))


def adamw(
    learning_rate: Rate,
    b1: Value = 0.9,
    b2: Value = 0.999,
    eps: Value = 1e-8,
    eps_root: Value = 0.0,
    mu_dtype: Any = None,
    weight_decay: Rate = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    Only parameters where `mask` is True decay, as in `add_decayed_weights`. The update needs the parameters.

    >>> optimizer = adamw(0.1, weight_decay=0.5, mask={'w': True, 'b': False})
    >>> params, gradients = {'w': 1.0, 'b': 1.0}, {'w': 0.0, 'b': 0.0}
    >>> updates, state = optimizer.update(gradients, optimizer.init(params), params)
    >>> float(updates['w']), float(updates['b'])
    (-0.05, -0.0)

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization".
    """
    scale = scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return chain(scale, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))


def lion(
    learning_rate: Rate,
    b1: Value = 0.9,
    b2: Value = 0.99,
    mu_dtype: Any = None,
    weight_decay: Rate = 1e-3,
    mask: Any = None,
) -> GradientTransformation:
    """Lion: the sign of an average of the gradients, with decoupled weight decay (Chen et al., 2023).

    The weights decay as in `adamw`. The update needs the parameters, unless `weight_decay` is 0.

    >>> import numpy
    >>> optimizer = lion(0.1, weight_decay=0.0)
    >>> optimizer.update(numpy.array([5.0, -0.5]), optimizer.init(numpy.zeros(2)))[0]
    array([-0.1,  0.1])

    Source: Chen et al., "Symbolic discovery of optimization algorithms".
    """
    decay = () if is_zero(weight_decay) else (add_decayed_weights(weight_decay, mask),)
    return chain(scale_by_lion(b1, b2, mu_dtype), *decay, scale_by_learning_rate(learning_rate))


def adagrad(learning_rate: Rate, initial_accumulator_value: Value = 0.1, eps: Value = 1e-7) -> GradientTransformation:
    """AdaGrad (Duchi, Hazan and Singer, 2011).

    >>> optimizer = adagrad(0.1, initial_accumulator_value=0.0, eps=0.0)
    >>> float(optimizer.update(5.0, optimizer.init(1.0))[0])
    -0.1

    Source: Duchi et al., "Adaptive subgradient methods for online learning and stochastic optimization".
    """
    return chain(scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(learning_rate))
