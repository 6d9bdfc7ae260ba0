"""Gradient transformations, and optimizers, which are chains of them."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.compiler.jit import jit
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof
from minidiff.errors.location import current_location, warn_at
from minidiff.ops.base import convert
from minidiff.ops.elementwise import where
from minidiff.values.dtypes import check_real_float, finfo, is_differentiable, result_type

__all__ = [
    "GradientTransformation", "adagrad", "adam", "adamw", "add_decayed_weights", "apply_updates", "chain", "clip",
    "clip_by_global_norm", "global_norm", "lion", "scale", "scale_by_adam", "scale_by_learning_rate", "scale_by_lion",
    "scale_by_rms", "scale_by_rss", "sgd", "trace",
]  # fmt: skip

Schedule = Callable[[Value], Value]
Rate = Value | Schedule


class GradientTransformation(NamedTuple):
    """A pair of functions, `init` and `update`, that transforms gradients.

    Only weight decay needs `params`. An update may take more keyword arguments.

    Args:
        init: a function from the parameters to the initial state.
        update: a function of (gradients, state, params=None) that returns the pair of the updates and the new state.

    >>> def clipped(gradients, state, params=None):
    ...     return tree.map(lambda g: numpy.clip(g, -1, 1), gradients), state
    >>> clip = GradientTransformation(init=lambda params: (), update=clipped)
    >>> clip.update(numpy.array([0.5, -7.0]), clip.init(numpy.zeros(2)))
    (array([ 0.5, -1. ]), ())
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Compose transformations, from first to last.

    Keyword arguments of `update` are passed to the transformations whose updates take them, as in optax.

    Args:
        transformations: gradient transformations, such as `adam(0.1)`.

    Returns:
        A `GradientTransformation`, whose state is the tuple of their states.

    Raises:
        TypeError: for an argument that is not a `GradientTransformation`.
        ValueError: from `update`, for a state with a different structure.

    >>> optimizer = chain(clip_by_global_norm(1.0), scale_by_learning_rate(0.1))
    >>> optimizer.update(numpy.array([3.0, 4.0]), optimizer.init(numpy.zeros(2)))[0]
    array([-0.06, -0.08])
    """
    for t in transformations:
        if not isinstance(t, GradientTransformation):
            raise TypeError(
                f"chain: expected gradient transformations such as adam(0.1), got {type(t).__name__}: {t!r}"
            )
    updates = [accept_extra_args(t.update) for t in transformations]

    def init(params: Any) -> Any:
        return tuple(t.init(params) for t in transformations)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if not isinstance(state, (tuple, list)) or len(state) != len(transformations):
            raise ValueError(
                f"update: state has the structure {tree.structure(state)}, but a chain of {len(transformations)} needs "
                "a tuple of as many states: pass the state that init(params) or the last update returned"
            )
        states = []
        for one, s in zip(updates, state):
            gradients, s = one(gradients, s, params, **extra)
            states.append(s)
        return gradients, tuple(states)

    return GradientTransformation(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
    """Add the updates to the parameters, and keep the parameters' dtypes.

    Args:
        params: a tree of floating-point arrays.
        updates: a tree like `params`.

    Returns:
        A tree like `params`, with its dtypes.

    Raises:
        TypeError: for parameters that are not floating-point.
        ValueError: for updates with a different structure or shape.

    >>> w = numpy.ones(2, numpy.float32)
    >>> apply_updates({'w': w}, {'w': numpy.array([0.5, 1.0])})
    {'w': array([1.5, 2. ], dtype=float32)}
    """
    numbers_ = _floating("apply_updates", params)
    updates = _without(numbers_, updates)
    _check_like("apply_updates: updates", updates, numbers_, "the parameters")
    updated = tree.map(lambda p, u: convert(p + u, typeof(p).dtype), numbers_, updates)
    return tree.map(lambda p, x: p if x is None else x, params, updated)


# ---------------------------------------------------------------- optimizers


def sgd(
    learning_rate: Rate, momentum: Value | None = None, nesterov: bool = False, accumulator_dtype: Any = None
) -> GradientTransformation:
    """Return stochastic gradient descent, with momentum if it is neither None nor 0.

    Args:
        learning_rate: a number, or a schedule: a function of the step number, which starts at 0.
        momentum: the decay of a sum of the gradients, in [0, 1); None or 0 for none.
        nesterov: whether updates look one step ahead, as in `trace`.
        accumulator_dtype: the dtype of the sums; None for that of the parameters.

    Returns:
        A `GradientTransformation`.

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
    """Return Adam (Kingma and Ba, 2015), or NAdam (Dozat, 2016) with `nesterov`.

    Args:
        learning_rate: a number, or a schedule: a function of the step number, which starts at 0.
        b1: the decay of the average of the gradients, in [0, 1).
        b2: the decay of the average of their squares, in [0, 1).
        eps: a number added to the denominator.
        eps_root: a number added inside the square root in the denominator.
        mu_dtype: the dtype in which the average of the gradients is stored; None for that of the parameters.
        nesterov: whether the average of the gradients is one step ahead.

    Returns:
        A `GradientTransformation`.

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
    """Return Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    The update needs the parameters.

    Args:
        learning_rate: a number, or a schedule: a function of the step number, which starts at 0.
        b1: the decay of the average of the gradients, in [0, 1).
        b2: the decay of the average of their squares, in [0, 1).
        eps: a number added to the denominator.
        eps_root: a number added inside the square root in the denominator.
        mu_dtype: the dtype in which the average of the gradients is stored; None for that of the parameters.
        weight_decay: a number, or a schedule.
        mask: the parameters that decay, as in `add_decayed_weights`.
        nesterov: whether the average of the gradients is one step ahead.

    Returns:
        A `GradientTransformation`.

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
    """Return Lion: the sign of an average of the gradients, with decoupled weight decay (Chen et al., 2023).

    The update needs the parameters, unless `weight_decay` is 0.

    Args:
        learning_rate: a number, or a schedule: a function of the step number, which starts at 0.
        b1: the weight of the average in the update, in [0, 1).
        b2: the decay of the average that is stored, in [0, 1).
        mu_dtype: the dtype in which the average of the gradients is stored; None for that of the parameters.
        weight_decay: a number, or a schedule.
        mask: the parameters that decay, as in `add_decayed_weights`.

    Returns:
        A `GradientTransformation`.

    >>> optimizer = lion(0.1, weight_decay=0.0)
    >>> optimizer.update(numpy.array([5.0, -0.5]), optimizer.init(numpy.zeros(2)))[0]
    array([-0.1,  0.1])

    Source: Chen et al., "Symbolic discovery of optimization algorithms".
    """
    decay = () if is_zero(weight_decay) else (add_decayed_weights(weight_decay, mask),)
    return chain(scale_by_lion(b1, b2, mu_dtype), *decay, scale_by_learning_rate(learning_rate))


def adagrad(learning_rate: Rate, initial_accumulator_value: Value = 0.1, eps: Value = 1e-7) -> GradientTransformation:
    """Return AdaGrad (Duchi, Hazan and Singer, 2011).

    Args:
        learning_rate: a number, or a schedule: a function of the step number, which starts at 0.
        initial_accumulator_value: the first value of the sums of squares.
        eps: a number added inside the square root in the denominator.

    Returns:
        A `GradientTransformation`.

    >>> optimizer = adagrad(0.1, initial_accumulator_value=0.0, eps=0.0)
    >>> float(optimizer.update(5.0, optimizer.init(1.0))[0])
    -0.1

    Source: Duchi et al., "Adaptive subgradient methods for online learning and stochastic optimization".
    """
    return chain(scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(learning_rate))


# ---------------------------------------------------------------- transformations


class TraceState(NamedTuple):
    """State of `trace`: a decaying sum of the gradients."""

    trace: Any


class AdamState(NamedTuple):
    """State of `scale_by_adam`: the number of steps, averages of the gradients and of their squares."""

    count: Value
    mu: Any
    nu: Any


class LionState(NamedTuple):
    """State of `scale_by_lion`: an average of the gradients."""

    mu: Any


class RmsState(NamedTuple):
    """State of `scale_by_rms`: the number of steps, and an average of the squares of the gradients."""

    count: Value
    nu: Any


class RssState(NamedTuple):
    """State of `scale_by_rss`: the sum of the squares of all gradients."""

    sum_of_squares: Any


class ScheduleState(NamedTuple):
    """State of a learning rate or a weight decay that is a schedule: the number of steps."""

    count: Value


#: The number of steps at the start: a NumPy scalar, since that is what `jit` returns, and compiles for once.
FIRST_STEP = numpy.int64(0)


def scale_by_learning_rate(learning_rate: Rate, *, flip_sign: bool = True) -> GradientTransformation:
    """Multiply by minus the learning rate, a number or a schedule.

    Args:
        learning_rate: a number, or a schedule: a function of the step number, which starts at 0.
        flip_sign: whether to multiply by minus the rate.

    Returns:
        A `GradientTransformation`.

    >>> descent = scale_by_learning_rate(lambda step: 1 / (1 + step))
    >>> state = descent.init(0.0)
    >>> for _ in range(3):
    ...     update, state = descent.update(6.0, state)
    ...     print(update)
    -6.0
    -3.0
    -2.0
    """
    check_numbers(learning_rate=learning_rate)

    def init(params: Any) -> Any:
        _floating("init", params)
        return ScheduleState(FIRST_STEP) if callable(learning_rate) else ()

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is not None:
            check_state(gradients, params, whose="the parameters")
        rate, state = _at_step(learning_rate, state)
        return tree.map(lambda g: convert(-rate if flip_sign else rate, typeof(g).dtype) * g, gradients), state

    return GradientTransformation(init, update)


def _of_each(f: Callable[[Value], Value]) -> GradientTransformation:
    """Apply a function to each gradient, and keep the dtypes."""

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return tree.map(lambda g: convert(f(g), typeof(g).dtype), gradients), state

    return GradientTransformation(lambda params: (), update)


def scale(step_size: Value) -> GradientTransformation:
    """Multiply by a number, which may be negative.

    Args:
        step_size: the number, which may be negative.

    Returns:
        A `GradientTransformation`.

    >>> float(scale(-0.1).update(2.0, ())[0])
    -0.2
    """
    return _of_each(lambda g: convert(step_size, typeof(g).dtype) * g)


def trace(decay: Value, nesterov: bool = False, accumulator_dtype: Any = None) -> GradientTransformation:
    """Replace gradients by their decaying sum: `sum = decay * sum + gradient`.

    Args:
        decay: the decay of the sum.
        nesterov: whether the update is `decay * sum + gradient`, with the new sum.
        accumulator_dtype: the dtype of the sums; None for that of the parameters.

    Returns:
        A `GradientTransformation`.

    >>> momentum = trace(0.5)
    >>> update, state = momentum.update(1.0, momentum.init(0.0))
    >>> float(momentum.update(1.0, state)[0])
    1.5
    """
    check_numbers(decay=decay)

    def added(g: Value, t: Value) -> Value:
        return convert(g + decay * t, typeof(t).dtype)

    def update(gradients: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        sums = tree.map(added, gradients, check_state(gradients, state.trace, accumulator_dtype))
        return tree.map(added, gradients, sums) if nesterov else sums, TraceState(_narrow(sums, accumulator_dtype))

    return GradientTransformation(lambda params: TraceState(full_like(params, 0, accumulator_dtype)), update)


def scale_by_adam(
    b1: Value = 0.9,
    b2: Value = 0.999,
    eps: Value = 1e-8,
    eps_root: Value = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Divide the mean of the gradients by the root of the mean of their squares.

    Both are decaying averages with bias correction: they are divided by the sum of their weights.

    Args:
        b1: the decay of the average of the gradients, in [0, 1).
        b2: the decay of the average of their squares, in [0, 1).
        eps: a number added to the denominator.
        eps_root: a number added inside the square root in the denominator.
        mu_dtype: the dtype in which the average of the gradients is stored; None for that of the parameters.
        nesterov: whether the average of the gradients is one step ahead.

    Returns:
        A `GradientTransformation`.

    >>> scale = scale_by_adam()
    >>> round(float(scale.update(-5.0, scale.init(1.0))[0]), 6)
    -1.0
    """
    check_numbers(b1=b1, b2=b2, below=1)
    check_numbers(eps=eps, eps_root=eps_root)

    def init(params: Any) -> AdamState:
        _check_eps(params, "eps", eps)
        _check_eps(params, "eps_root", eps_root, in_root=True)
        return AdamState(FIRST_STEP, full_like(params, 0, mu_dtype), full_like(params, 0))

    def update(gradients: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        mu = _average(b1, check_state(gradients, state.mu, mu_dtype), gradients)
        nu = _average(b2, check_state(gradients, state.nu), tree.map(_square, gradients))
        count = state.count + 1

        def corrected(x: Value, b: Value, steps: Value = count) -> Value:
            return x / convert(1 - b**steps, typeof(x).dtype)

        def scaled(g: Value, m: Value, v: Value) -> Value:
            mean, v = corrected(m, b1, count + 1 if nesterov else count), corrected(v, b2)
            if nesterov:
                mean = convert(b1 * mean + (1 - b1) * corrected(g, b1), typeof(m).dtype)
            v = v if is_zero(eps_root) else v + convert(eps_root, typeof(v).dtype)
            return mean / (numpy.sqrt(v) + convert(eps, typeof(v).dtype))

        return tree.map(scaled, gradients, mu, nu), AdamState(count, _narrow(mu, mu_dtype), nu)

    return GradientTransformation(init, update)


#: The update that `scale_by_lion` makes of an average, by mode.
_SIGNS: dict[str, Callable[[Value, Value], Value]] = {
    "hard": lambda x, beta: numpy.sign(x),
    "smooth": lambda x, beta: numpy.tanh(convert(beta, typeof(x).dtype) * x),
    "refined": lambda x, beta: where(abs(x) < 1, x, numpy.sign(x)),
}


def scale_by_lion(
    b1: Value = 0.9, b2: Value = 0.99, mu_dtype: Any = None, *, mode: str = "hard", smooth_beta: Value = 1.0
) -> GradientTransformation:
    """Take the sign of an average of the gradient and those before it.

    The gradient has weight `1 - b1` in the update, and `1 - b2` in the average that is stored.

    Args:
        b1: the weight of the average in the update, in [0, 1).
        b2: the decay of the average that is stored, in [0, 1).
        mu_dtype: the dtype in which the average of the gradients is stored; None for that of the parameters.
        mode: 'hard' for the sign, 'smooth' for `tanh(smooth_beta * average)`, 'refined' for the average itself between
            -1 and 1.
        smooth_beta: the slope of the mode 'smooth'.

    Returns:
        A `GradientTransformation`.

    Raises:
        ValueError: for an unknown mode.

    >>> scale = scale_by_lion()
    >>> float(scale.update(-5.0, scale.init(1.0))[0])
    -1.0
    """
    check_numbers(b1=b1, b2=b2, below=1)
    check_numbers(smooth_beta=smooth_beta)
    if mode not in _SIGNS:
        raise ValueError(f"mode must be one of {', '.join(map(repr, _SIGNS))}, got {mode!r}")

    def update(gradients: Any, state: LionState, params: Any = None) -> tuple[Any, LionState]:
        mu = check_state(gradients, state.mu, mu_dtype)
        signs = tree.map(lambda x: _SIGNS[mode](x, smooth_beta), _average(b1, mu, gradients))
        return signs, LionState(_narrow(_average(b2, mu, gradients), mu_dtype))

    return GradientTransformation(lambda params: LionState(full_like(params, 0, mu_dtype)), update)


def scale_by_rms(
    decay: Value = 0.9,
    eps: Value = 1e-8,
    initial_scale: Value = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> GradientTransformation:
    """Divide by the root of a decaying average of the squares of the gradients, as RMSProp does.

    Args:
        decay: the decay of the average, in [0, 1).
        eps: a number that is added to the average, or to its root.
        initial_scale: the first value of the average.
        eps_in_sqrt: whether `eps` is added to the average, below the root.
        bias_correction: whether the average is divided by the sum of its weights.

    Returns:
        A `GradientTransformation`.

    >>> scaled = scale_by_rms(decay=0.75, eps=0.0)
    >>> float(scaled.update(3.0, scaled.init(1.0))[0])  # 3 / sqrt(0.25 * 3**2)
    2.0

    Source: Tieleman and Hinton, "RMSProp: Divide the gradient by a running average of its recent magnitude".
    """
    check_numbers(decay=decay, below=1)
    check_numbers(eps=eps, initial_scale=initial_scale)

    def init(params: Any) -> RmsState:
        _check_eps(params, "eps", eps, eps_in_sqrt)
        return RmsState(FIRST_STEP, full_like(params, initial_scale))

    def update(gradients: Any, state: RmsState, params: Any = None) -> tuple[Any, RmsState]:
        nu = _average(decay, check_state(gradients, state.nu), tree.map(_square, gradients))
        weights = 1 - decay ** (state.count + 1) if bias_correction else 1

        def scaled(g: Value, v: Value) -> Value:
            v, small = v / convert(weights, typeof(v).dtype), convert(eps, typeof(v).dtype)
            return g / (numpy.sqrt(v + small) if eps_in_sqrt else numpy.sqrt(v) + small)

        return tree.map(scaled, gradients, nu), RmsState(state.count + 1, nu)

    return GradientTransformation(init, update)


def scale_by_rss(initial_accumulator_value: Value = 0.1, eps: Value = 1e-7) -> GradientTransformation:
    """Divide by the root of the sum of the squares of all gradients.

    Args:
        initial_accumulator_value: the first value of the sums of squares.
        eps: a number added to the sums.

    Returns:
        A `GradientTransformation`.

    >>> scale = scale_by_rss(initial_accumulator_value=0.0, eps=0.0)
    >>> update, state = scale.update(3.0, scale.init(1.0))
    >>> round(float(scale.update(4.0, state)[0]), 12)  # 4 / sqrt(3**2 + 4**2)
    0.8
    """
    check_numbers(initial_accumulator_value=initial_accumulator_value, eps=eps)

    def update(gradients: Any, state: RssState, params: Any = None) -> tuple[Any, RssState]:
        sums = check_state(gradients, state.sum_of_squares)
        sums = tree.map(lambda s, g: convert(s + _square(g), typeof(s).dtype), sums, gradients)

        def scaled(g: Value, s: Value) -> Value:
            return g / numpy.sqrt(where(s > 0, s + convert(eps, typeof(s).dtype), 1))  # 0 where all gradients were 0

        return tree.map(scaled, gradients, sums), RssState(sums)

    def init(params: Any) -> RssState:
        _check_eps(params, "eps", eps, in_root=True)
        return RssState(full_like(params, initial_accumulator_value))

    return GradientTransformation(init, update)


def add_decayed_weights(weight_decay: Rate = 0.0, mask: Any = None) -> GradientTransformation:
    """Add `weight_decay` times the parameters, where `mask` is True.

    Args:
        weight_decay: a number, or a schedule.
        mask: a tree of booleans, a prefix of one, or a function from the parameters to such a tree; None is True.

    Returns:
        A `GradientTransformation`.

    Raises:
        ValueError: from `update`, without the parameters.

    >>> decay = add_decayed_weights(0.1)
    >>> float(decay.update(1.0, decay.init(5.0), 5.0)[0])
    1.5
    """
    check_numbers(weight_decay=weight_decay)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("update: weight decay needs params: write update(gradients, state, params)")
        params = check_state(gradients, params, whose="the parameters")
        chosen = True if mask is None else mask(params) if callable(mask) else mask
        decays = iter(tree.broadcast_prefix(chosen, params, _is_bool, "mask"))
        rate, state = _at_step(weight_decay, state)

        def decayed(g: Value, p: Value) -> Value:
            return g + convert(rate, typeof(g).dtype) * p if next(decays) else g

        return tree.map(decayed, gradients, params), state

    return GradientTransformation(lambda params: ScheduleState(FIRST_STEP) if callable(weight_decay) else (), update)


# ---------------------------------------------------------------- clipping


@jit  # so that a step that is not compiled fuses its sums over ranks, too
def _norm(values: Any) -> Value:
    # At least in float32, since squares in half precision overflow.
    wide = [convert(x, numpy.result_type(typeof(x).dtype, numpy.float32)) for x in tree.leaves(values)]
    squares = [_square(x) for x in wide]
    dtype = numpy.result_type(numpy.float32, *[typeof(x).dtype for x in squares])  # one for all: such psums are fused
    return numpy.sqrt(sum(numpy.sum(x, dtype=dtype) for x in squares))


def global_norm(updates: Any) -> Value:
    """Return the Euclidean norm of all numbers in a tree.

    The norm of sharded arrays takes one psum of a number for each leaf; those of leaves that are sharded along the same
    mesh axes are fused into one call. In the body of a `shard_map`, as for every function there, the norm is that of
    this rank's values. If the arrays are sharded along an axis, a `psum` of its square over that axis is the square of
    their norm.

    Args:
        updates: a tree of arrays.

    Returns:
        A number of at least float32.

    >>> float(global_norm({'w': numpy.array([3.0, 0.0]), 'b': 4.0}))
    5.0
    """
    return _norm(updates)


def clip(max_delta: Value) -> GradientTransformation:
    """Clip each number to [-max_delta, max_delta].

    Args:
        max_delta: a number, at least 0.

    Returns:
        A `GradientTransformation`.

    >>> clip(1.0).update(numpy.array([0.5, -7.0]), ())[0]
    array([ 0.5, -1. ])
    """
    check_numbers(max_delta=max_delta)
    return _of_each(lambda g: numpy.clip(g, -max_delta, max_delta))


def clip_by_global_norm(max_norm: Value) -> GradientTransformation:
    """Scale all gradients by one number, to a global norm of at most `max_norm`.

    It communicates as `global_norm` does, and needs the gradients of the whole arrays, outside of a `shard_map`.

    Args:
        max_norm: a positive number.

    Returns:
        A `GradientTransformation`.

    Raises:
        ValueError: for a norm that is not positive.

    >>> clip = clip_by_global_norm(1.0)
    >>> clip.update(numpy.array([3.0, 4.0]), clip.init(numpy.zeros(2)))[0]
    array([0.6, 0.8])

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks".
    """
    check_numbers(max_norm=max_norm)
    if is_zero(max_norm):
        raise ValueError("max_norm must be positive, got 0: a learning rate of 0 makes updates of 0")

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        scale = max_norm / numpy.maximum(global_norm(gradients), max_norm)  # exactly 1 for small gradients
        return tree.map(lambda g: convert(scale, typeof(g).dtype) * g, gradients), state

    return GradientTransformation(lambda params: (), update)


# ---------------------------------------------------------------- helpers


def accept_extra_args(update: Callable) -> Callable:
    """Return the update of a transformation, ignoring keyword arguments that it does not take."""
    parameters = [*inspect.signature(update).parameters.values()]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return update
    names = {p.name for p in parameters[3:]}

    def of_any(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return update(gradients, state, params, **{name: extra[name] for name in names & {*extra}})

    return of_any


def _at_step(rate: Rate, state: Any) -> tuple[Value, Any]:
    """Return the value of a number or a schedule at this step, and the state of the next one."""
    return (rate(state.count), ScheduleState(state.count + 1)) if callable(rate) else (rate, state)


def full_like(params: Any, value: Value, dtype: Any = None) -> Any:
    """Return a state with the parameters' sharding and types, also on a tape, unlike `numpy.full_like`."""
    params = _floating("init", params)
    return _narrow(tree.map(lambda p: convert(where(False, p, value), typeof(p).dtype), params), dtype)


def _narrow(state: Any, dtype: Any) -> Any:
    """Convert a state to the dtype in which it is kept, if one is given; complex numbers stay complex."""
    if dtype is None:
        return state
    real = check_real_float("mu_dtype and accumulator_dtype must be dtypes", dtype)
    return tree.map(lambda x: convert(x, result_type(real, *[1j] * numpy.iscomplexobj(x))), state)


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool) or (isinstance(x, (numpy.bool_, numpy.ndarray)) and (x.shape, x.dtype) == ((), bool))


def _average(decay: Value, means: Any, values: Any) -> Any:
    return tree.map(lambda m, x: convert(decay * m + (1 - decay) * x, typeof(m).dtype), means, values)


def _square(x: Value) -> Value:
    """Return the square of the absolute value."""
    return numpy.real(x) ** 2 + numpy.imag(x) ** 2 if typeof(x).dtype.kind == "c" else x * x


# ---------------------------------------------------------------- errors


def is_zero(x: Any) -> bool:
    return isinstance(x, numbers.Real) and x == 0


def check_numbers(least: Any = 0, below: Any = math.inf, **numbers_by_name: Any) -> None:
    """Raise for numbers that are not in [least, below). Traced values pass, and so do schedules of rates."""
    for name, x in numbers_by_name.items():
        scheduled = name in ("learning_rate", "weight_decay")
        if isinstance(x, numpy.ndarray) and x.ndim == 0:
            x = x.item()
        if not isinstance(x, (numbers.Real, Tracer)) and not (scheduled and callable(x)):
            expected = "a number, or a function from the step to the rate" if scheduled else "a number"
            raise TypeError(f"{name} must be {expected}, got {type(x).__name__}: {x!r:.60}")
        if isinstance(x, numbers.Real) and not least <= x < below:
            bounds = f"at least {least}" if below == math.inf else f"in [{least}, {below})"
            raise ValueError(f"{name} must be {bounds}, got {x!r}")


def _check_eps(params: Any, name: str, eps: Value, in_root: bool = False) -> None:
    """Warn of a small number, added to a denominator or inside its root, that is 0 in the dtype of a parameter."""
    for path, p in tree.flatten_with_paths(_floating("init", params), "params")[0]:
        dtype = typeof(p).dtype
        if dtype.itemsize == 2 and isinstance(eps, numbers.Real) and float(eps) > 0 == dtype.type(eps):
            least = float(finfo(dtype).smallest_subnormal)
            message = (
                f"init: {name}={eps} is 0 in the dtype of {path}, {typeof(p)}, so updates may be divided by 0: write "
                f"{name}={2 * least if in_root else math.sqrt(least):.0e}, or keep float32 copies of the parameters by "
                "md.precision.with_masters(optimizer)"
            )
            return warn_at(current_location(), message, RuntimeWarning)


def _floating(caller: str, params: Any) -> Any:
    """Return parameters with None in place of other leaves than floating-point numbers; TypeError if there are none."""
    leaves, structure = tree.flatten(tree.with_settings((params,)))
    floating = [is_differentiable(typeof(p).dtype) for p in leaves]
    if False in floating and True not in floating:
        path, p = tree.paths(structure, "")[0].removeprefix("[0]"), leaves[0]
        raise TypeError(
            f"{caller}: params{path} is {typeof(p)}, which has no gradient: write params{path}.astype(float)"
        )
    (params,) = tree.unflatten(structure.of_derivatives, [p if f else None for p, f in zip(leaves, floating)])
    return params


def check_state(gradients: Any, like: Any, dtype: Any = None, whose: str = "the parameters given to init") -> Any:
    """Check gradients against their state or parameters, and return these; widen a state stored in `dtype`."""
    like = _without(gradients, like)
    _check_like("update: gradients", gradients, like, whose)
    if dtype is None:
        return like
    return tree.map(lambda g, s: convert(s, result_type(typeof(g).dtype, typeof(s).dtype)), gradients, like)


def _without(missing: Any, values: Any) -> Any:
    """Replace values by None where `missing` has None, unless the trees differ in other ways."""
    try:
        return tree.map(lambda m, x: None if m is None else x, missing, values, is_leaf=lambda m: m is None)
    except ValueError:
        return values


def _check_like(name: str, values: Any, like: Any, whose: str) -> None:
    """Raise ValueError unless two trees have the same structure, and arrays of the same shapes."""
    (leaves, structure), (likes, expected) = tree.flatten(values), tree.flatten(like)
    if structure != expected:
        raise ValueError(
            f"{name} have the structure {structure}, but {whose} have {expected}: pass a tree of the same structure, "
            "such as md.grad(loss)(params)"
        )
    for n, (x, y) in enumerate(zip(map(typeof, leaves), map(typeof, likes))):
        if x.shape != y.shape:
            path = tree.paths(structure, name)[n]
            raise ValueError(f"{path} has the type {x}, but its parameter has {y}: they must have the same shape")
