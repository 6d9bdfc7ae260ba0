"""Optimizers, with the API of `optax`: gradient transformations that compose.

A `GradientTransformation` is a pair of functions: `init(params)` makes the state, and `update(gradients, state,
params)` returns the updates and the new state. `apply_updates` adds the updates to the parameters. `chain` composes
transformations, and an optimizer is a chain: Adam is `chain(scale_by_adam(), scale_by_learning_rate(rate))`. A learning
rate is a number, or a schedule: a function from the number of the step, which starts at 0, to the rate.

Parameters are trees of floating-point arrays, and so are states: named tuples of trees like the parameters, and of the
number of steps. They can be saved, and passed to `jit` and `shard_map`. States and new parameters keep the parameters'
dtypes, whatever the dtype of a rate. Parameters of functions have optax's names and defaults, and where optax has
further ones in between, they are given by name. Conjugate the gradients of complex parameters:
`md.tree.map(np.conj, gradients)`.

Everything but the norm of the gradients is elementwise. So the state of a sharded array is sharded as the array is, and
its update communicates nothing.

>>> import minidiff as md
>>> optimizer = chain(clip_by_global_norm(1.0), adam(0.1))
>>> params = {'w': numpy.array([3.0, -4.0])}
>>> state = optimizer.init(params)
>>> loss = lambda params: (params['w'] ** 2).sum()
>>> for _ in range(200):
...     updates, state = optimizer.update(md.grad(loss)(params), state, params)
...     params = apply_updates(params, updates)
>>> bool(loss(params) < 1e-3)
True
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.compiler.jit import jit
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof
from minidiff.diagnostics.other_libraries import attributes
from minidiff.diagnostics.tracebacks import hide_frames_of
from minidiff.inputs.dtypes import is_differentiable
from minidiff.ops.base import convert
from minidiff.ops.elementwise import where

__all__ = [
    *("GradientTransformation", "adagrad", "adam", "adamw", "add_decayed_weights", "apply_updates", "chain"),
    *("clip_by_global_norm", "constant_schedule", "cosine_decay_schedule", "global_norm", "linear_schedule", "lion"),
    *("scale_by_adam", "scale_by_learning_rate", "scale_by_lion", "scale_by_rss", "sgd", "trace"),
    "warmup_cosine_decay_schedule",
]
__dir__ = functools.partial(sorted, __all__)

Schedule = Callable[[Value], Value]
Rate = Value | Schedule


class GradientTransformation(NamedTuple):
    """A pair of functions, `init` and `update`, that transforms gradients.

    `init(params)` returns the initial state, and `update(gradients, state, params=None)` returns the pair of the
    updates and the new state. Only weight decay needs `params`.

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

    The state is the tuple of their states.

    >>> optimizer = chain(clip_by_global_norm(1.0), sgd(0.1))
    >>> optimizer.update(numpy.array([3.0, 4.0]), optimizer.init(numpy.zeros(2)))[0]
    array([-0.06, -0.08])
    """
    for t in transformations:
        if not isinstance(t, GradientTransformation):
            raise TypeError(
                f"chain: expected gradient transformations such as adam(0.1), got {type(t).__name__}: {t!r}"
            )

    def init(params: Any) -> Any:
        return tuple(t.init(params) for t in transformations)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not isinstance(state, (tuple, list)) or len(state) != len(transformations):
            raise ValueError(
                f"update: state has the structure {tree.structure(state)}, but a chain of {len(transformations)} has a "
                "tuple of as many states: pass the state that init(params) or the last update returned"
            )
        states = []
        for t, s in zip(transformations, state):
            gradients, s = t.update(gradients, s, params)
            states.append(s)
        return gradients, tuple(states)

    return GradientTransformation(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
    """Add the updates to the parameters, and keep the parameters' dtypes.

    >>> w = numpy.ones(2, numpy.float32)
    >>> apply_updates({'w': w}, {'w': numpy.array([0.5, 1.0])})
    {'w': array([1.5, 2. ], dtype=float32)}
    """
    _check_floating("apply_updates", params)
    _check_like("apply_updates: updates", updates, params, "the parameters")
    return tree.map(lambda p, u: convert(p + u, typeof(p).dtype), params, updates)


# ---------------------------------------------------------------- optimizers


def sgd(learning_rate: Rate, momentum: Value | None = None, nesterov: bool = False) -> GradientTransformation:
    """Stochastic gradient descent, with momentum if it is neither None nor 0.

    >>> optimizer = sgd(0.1, momentum=0.9)
    >>> state = optimizer.init(1.0)
    >>> update, state = optimizer.update(2.0, state)
    >>> float(update)
    -0.2
    >>> round(float(optimizer.update(2.0, state)[0]), 12)  # -0.1 * (0.9 * 2 + 2)
    -0.38
    """
    rate = scale_by_learning_rate(learning_rate)
    return chain(rate) if momentum is None or _is_zero(momentum) else chain(trace(momentum, nesterov), rate)


def adam(learning_rate: Rate, b1: Value = 0.9, b2: Value = 0.999, eps: Value = 1e-8) -> GradientTransformation:
    """Adam (Kingma and Ba, 2015).

    >>> optimizer = adam(0.1)
    >>> round(float(optimizer.update(5.0, optimizer.init(1.0))[0]), 6)  # the first step is about the rate
    -0.1
    """
    return chain(scale_by_adam(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adamw(
    learning_rate: Rate,
    b1: Value = 0.9,
    b2: Value = 0.999,
    eps: Value = 1e-8,
    *,
    weight_decay: Value = 1e-4,
    mask: Any = None,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    Only the parameters decay where `mask` is True, as for `add_decayed_weights`. The update needs the parameters.

    >>> optimizer = adamw(0.1, weight_decay=0.5, mask={'w': True, 'b': False})
    >>> params, gradients = {'w': 1.0, 'b': 1.0}, {'w': 0.0, 'b': 0.0}
    >>> updates, state = optimizer.update(gradients, optimizer.init(params), params)
    >>> float(updates['w']), float(updates['b'])
    (-0.05, -0.0)
    """
    decay = add_decayed_weights(weight_decay, mask)
    return chain(scale_by_adam(b1, b2, eps), decay, scale_by_learning_rate(learning_rate))


def lion(
    learning_rate: Rate, b1: Value = 0.9, b2: Value = 0.99, *, weight_decay: Value = 1e-3
) -> GradientTransformation:
    """Lion: the sign of an average of the gradients, with decoupled weight decay (Chen et al., 2023).

    The update needs the parameters, unless `weight_decay` is 0.

    >>> optimizer = lion(0.1, weight_decay=0.0)
    >>> optimizer.update(numpy.array([5.0, -0.5]), optimizer.init(numpy.zeros(2)))[0]
    array([-0.1,  0.1])
    """
    rate = scale_by_learning_rate(learning_rate)
    decay = () if _is_zero(weight_decay) else (add_decayed_weights(weight_decay),)
    return chain(scale_by_lion(b1, b2), *decay, rate)


def adagrad(learning_rate: Rate, initial_accumulator_value: Value = 0.1, eps: Value = 1e-7) -> GradientTransformation:
    """AdaGrad (Duchi, Hazan and Singer, 2011).

    >>> optimizer = adagrad(0.1, initial_accumulator_value=0.0, eps=0.0)
    >>> float(optimizer.update(5.0, optimizer.init(1.0))[0])
    -0.1
    """
    return chain(scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(learning_rate))


# ---------------------------------------------------------------- transformations


class TraceState(NamedTuple):
    """The state of `trace`: a decaying sum of the gradients."""

    trace: Any


class AdamState(NamedTuple):
    """The state of `scale_by_adam`: steps, and averages of gradients and squares."""

    count: Value
    mu: Any
    nu: Any


class LionState(NamedTuple):
    """The state of `scale_by_lion`: the average of the gradients."""

    mu: Any


class RssState(NamedTuple):
    """The state of `scale_by_rss`: the sum of the squares of the gradients."""

    sum_of_squares: Any


class ScheduleState(NamedTuple):
    """The state of `scale_by_learning_rate`: the number of steps."""

    count: Value


#: The number of steps at the start: a NumPy scalar, since that is what `jit` returns, and compiles for once.
_FIRST_STEP = numpy.int64(0)


def scale_by_learning_rate(learning_rate: Rate) -> GradientTransformation:
    """Multiply by minus the learning rate, a number or a schedule.

    >>> descent = scale_by_learning_rate(lambda step: 1 / (1 + step))
    >>> state = descent.init(0.0)
    >>> for _ in range(3):
    ...     update, state = descent.update(6.0, state)
    ...     print(update)
    -6.0
    -3.0
    -2.0
    """
    schedule = learning_rate if callable(learning_rate) else None
    if schedule is None:
        _check_number("learning_rate", learning_rate)

    def scaled(gradients: Any, rate: Value) -> Any:
        return tree.map(lambda g: convert(-rate, typeof(g).dtype) * g, gradients)

    def init(params: Any) -> Any:
        _check_floating("init", params)
        return () if schedule is None else ScheduleState(_FIRST_STEP)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is not None:
            _check_like("update: gradients", gradients, params, "the parameters")
        if schedule is None:
            return scaled(gradients, learning_rate), state
        return scaled(gradients, schedule(state.count)), ScheduleState(state.count + 1)

    return GradientTransformation(init, update)


def trace(decay: Value, nesterov: bool = False) -> GradientTransformation:
    """Replace gradients by their decaying sum: `sum = decay * sum + gradient`.

    With `nesterov`, the update is `decay * sum + gradient`, of the new sum.

    >>> momentum = trace(0.5)
    >>> update, state = momentum.update(1.0, momentum.init(0.0))
    >>> float(momentum.update(1.0, state)[0])
    1.5
    """
    _check_number("momentum", decay, below=1)

    def added(g: Value, t: Value) -> Value:
        return convert(g + decay * t, typeof(t).dtype)

    def update(gradients: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        _check_like("update: gradients", gradients, state.trace)
        sums = tree.map(added, gradients, state.trace)
        return tree.map(added, gradients, sums) if nesterov else sums, TraceState(sums)

    return GradientTransformation(lambda params: TraceState(_zeros_like(params)), update)


def scale_by_adam(b1: Value = 0.9, b2: Value = 0.999, eps: Value = 1e-8) -> GradientTransformation:
    """Divide the mean of the gradients by the root of the mean of their squares.

    Both are decaying averages, divided by the sum of their weights.

    >>> scale = scale_by_adam()
    >>> round(float(scale.update(-5.0, scale.init(1.0))[0]), 6)
    -1.0
    """
    _check_number("b1", b1, below=1)
    _check_number("b2", b2, below=1)
    _check_number("eps", eps)

    def init(params: Any) -> AdamState:
        return AdamState(_FIRST_STEP, _zeros_like(params), _zeros_like(params))

    def update(gradients: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        _check_like("update: gradients", gradients, state.mu)
        count = state.count + 1
        mu = _average(b1, state.mu, gradients)
        nu = _average(b2, state.nu, tree.map(_squared, gradients))

        def scaled(m: Value, v: Value) -> Value:
            m, v = (x / convert(1 - b**count, typeof(x).dtype) for x, b in ((m, b1), (v, b2)))
            return m / (numpy.sqrt(v) + convert(eps, typeof(v).dtype))

        return tree.map(scaled, mu, nu), AdamState(count, mu, nu)

    return GradientTransformation(init, update)


def scale_by_lion(b1: Value = 0.9, b2: Value = 0.99) -> GradientTransformation:
    """Take the sign of an average of the gradient and those before it.

    The gradient has weight `1 - b1` in the update, and `1 - b2` in the average that is kept.

    >>> scale = scale_by_lion()
    >>> float(scale.update(-5.0, scale.init(1.0))[0])
    -1.0
    """
    _check_number("b1", b1, below=1)
    _check_number("b2", b2, below=1)

    def update(gradients: Any, state: LionState, params: Any = None) -> tuple[Any, LionState]:
        _check_like("update: gradients", gradients, state.mu)
        signs = tree.map(numpy.sign, _average(b1, state.mu, gradients))
        return signs, LionState(_average(b2, state.mu, gradients))

    return GradientTransformation(lambda params: LionState(_zeros_like(params)), update)


def scale_by_rss(initial_accumulator_value: Value = 0.1, eps: Value = 1e-7) -> GradientTransformation:
    """Divide by the root of the sum of the squares of all gradients.

    >>> scale = scale_by_rss(initial_accumulator_value=0.0, eps=0.0)
    >>> update, state = scale.update(3.0, scale.init(1.0))
    >>> round(float(scale.update(4.0, state)[0]), 12)  # 4 / sqrt(3**2 + 4**2)
    0.8
    """
    _check_number("initial_accumulator_value", initial_accumulator_value)
    _check_number("eps", eps)

    def init(params: Any) -> RssState:
        return RssState(
            tree.map(lambda z: z + convert(initial_accumulator_value, typeof(z).dtype), _zeros_like(params))
        )

    def update(gradients: Any, state: RssState, params: Any = None) -> tuple[Any, RssState]:
        _check_like("update: gradients", gradients, state.sum_of_squares)
        sums = tree.map(lambda s, g: convert(s + _squared(g), typeof(s).dtype), state.sum_of_squares, gradients)

        def scaled(g: Value, s: Value) -> Value:
            return g / numpy.sqrt(where(s > 0, s + convert(eps, typeof(s).dtype), 1))  # 0 where all gradients were 0

        return tree.map(scaled, gradients, sums), RssState(sums)

    return GradientTransformation(init, update)


def add_decayed_weights(weight_decay: Value = 0.0, mask: Any = None) -> GradientTransformation:
    """Add `weight_decay` times the parameters, where `mask` is True.

    `mask` is a tree of booleans, a prefix of one, or a function from the parameters to such a tree. None means True.

    >>> decay = add_decayed_weights(0.1)
    >>> float(decay.update(1.0, decay.init(5.0), 5.0)[0])
    1.5
    """
    _check_number("weight_decay", weight_decay)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("update: weight decay needs params: write update(gradients, state, params)")
        _check_like("update: gradients", gradients, params, "the parameters")
        chosen = True if mask is None else mask(params) if callable(mask) else mask
        decays = iter(tree.broadcast_prefix(chosen, params, lambda x: isinstance(x, (bool, numpy.bool_)), "mask"))

        def decayed(g: Value, p: Value) -> Value:
            return g + convert(weight_decay, typeof(g).dtype) * p if next(decays) else g

        return tree.map(decayed, gradients, params), state

    return GradientTransformation(lambda params: (), update)


# ---------------------------------------------------------------- clipping


@jit  # so that a step that is not compiled fuses its sums over ranks, too
def _norm(values: Any) -> Value:
    # At least in float32, since squares in half precision overflow.
    wide = [convert(x, numpy.result_type(typeof(x).dtype, numpy.float32)) for x in tree.leaves(values)]
    squares = [_squared(x) for x in wide]
    dtype = numpy.result_type(numpy.float32, *[typeof(x).dtype for x in squares])  # one for all: such psums are fused
    return numpy.sqrt(sum(numpy.sum(x, dtype=dtype) for x in squares))


def global_norm(updates: Any) -> Value:
    """The Euclidean norm of all numbers in a tree.

    The norm of sharded arrays communicates one psum of a number for each leaf, fused into one call for all the leaves
    that are sharded along the same mesh axes. Leaves that are sharded along other axes need another psum. In the body
    of a `shard_map`, the norm is that of this rank's values, as with every function there: a `psum` of its square is
    the square of the norm of arrays that are sharded along that axis.

    >>> float(global_norm({'w': numpy.array([3.0, 0.0]), 'b': 4.0}))
    5.0
    """
    return _norm(updates)


def clip_by_global_norm(max_norm: Value) -> GradientTransformation:
    """Scale all gradients by one number, to a global norm of at most `max_norm`.

    It communicates what `global_norm` does, and needs the gradients of the whole arrays, outside of a `shard_map`.

    >>> clip = clip_by_global_norm(1.0)
    >>> clip.update(numpy.array([3.0, 4.0]), clip.init(numpy.zeros(2)))[0]
    array([0.6, 0.8])
    """
    _check_number("max_norm", max_norm)
    if _is_zero(max_norm):
        raise ValueError("max_norm must be positive, got 0: a learning rate of 0 makes updates of 0")

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        scale = max_norm / numpy.maximum(global_norm(gradients), max_norm)  # exactly 1 for small gradients
        return tree.map(lambda g: convert(scale, typeof(g).dtype) * g, gradients), state

    return GradientTransformation(lambda params: (), update)


# ---------------------------------------------------------------- schedules


def constant_schedule(value: Value) -> Schedule:
    """The same rate at each step.

    >>> constant_schedule(0.1)(1000)
    0.1
    """
    return lambda step: value


def linear_schedule(init_value: Value, end_value: Value, transition_steps: int) -> Schedule:
    """From `init_value` to `end_value` in a line, then constant.

    >>> [float(linear_schedule(1.0, 0.0, 4)(step)) for step in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    _check_number("transition_steps", transition_steps, least=1)

    def schedule(step: Value) -> Value:
        rest = 1 - numpy.minimum(step, transition_steps) / transition_steps
        return (init_value - end_value) * rest + end_value

    return schedule


def cosine_decay_schedule(init_value: Value, decay_steps: int, alpha: Value = 0.0) -> Schedule:
    """From `init_value` to `alpha * init_value` by half a cosine, then constant.

    >>> [round(float(cosine_decay_schedule(1.0, 4)(step)), 12) for step in (0, 2, 4, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """
    _check_number("decay_steps", decay_steps, least=1)

    def schedule(step: Value) -> Value:
        cosine = 0.5 * (1 + numpy.cos(math.pi * (numpy.minimum(step, decay_steps) / decay_steps)))
        return init_value * ((1 - alpha) * cosine + alpha)

    return schedule


def warmup_cosine_decay_schedule(
    init_value: Value, peak_value: Value, warmup_steps: int, decay_steps: int, end_value: Value = 0.0
) -> Schedule:
    """Linear warm-up to `peak_value`, then cosine decay to `end_value`.

    `decay_steps` is the number of all steps, those of the warm-up included.

    >>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=2, decay_steps=6)
    >>> [round(float(schedule(step)), 12) for step in (0, 1, 2, 4, 6, 9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    _check_number("warmup_steps", warmup_steps)
    _check_number("decay_steps", decay_steps, least=warmup_steps + 1)
    warmup = linear_schedule(init_value, peak_value, max(warmup_steps, 1))
    # The decay is that from 1 to 0: `alpha = end_value / peak_value` would not do for a peak of 0.
    decay = cosine_decay_schedule(1.0, decay_steps - warmup_steps)

    def schedule(step: Value) -> Value:
        decayed = (peak_value - end_value) * decay(step - warmup_steps) + end_value
        return where(step < warmup_steps, warmup(step), decayed)

    return schedule


# ---------------------------------------------------------------- helpers


def _zeros_like(params: Any) -> Any:
    """Zeros that have the parameters' dtypes, sharding and types: unlike `numpy.zeros_like`, also on a tape."""
    _check_floating("init", params)
    return tree.map(lambda p: where(False, p, 0), params)


def _average(decay: Value, means: Any, values: Any) -> Any:
    return tree.map(lambda m, x: convert(decay * m + (1 - decay) * x, typeof(m).dtype), means, values)


def _squared(x: Value) -> Value:
    """The square of the absolute value."""
    if typeof(x).dtype.kind != "c":
        return x * x
    return numpy.real(x) ** 2 + numpy.imag(x) ** 2


# ---------------------------------------------------------------- errors


def _is_zero(x: Any) -> bool:
    return isinstance(x, numbers.Real) and x == 0


def _check_number(name: str, x: Any, least: Any = 0, below: Any = math.inf) -> None:
    """Raise for a number that is not in [least, below). A traced value may be any number."""
    if isinstance(x, numpy.ndarray) and x.ndim == 0:
        x = x.item()
    if not isinstance(x, (numbers.Real, Tracer)):
        what = "a number, or a function from the step to the rate" if name == "learning_rate" else "a number"
        raise TypeError(f"{name} must be {what}, got {type(x).__name__}: {x!r:.60}")
    if isinstance(x, numbers.Real) and not least <= x < below:
        bounds = f"at least {least}" if below == math.inf else f"in [{least}, {below})"
        raise ValueError(f"{name} must be {bounds}, got {x!r}")


def _check_floating(caller: str, params: Any) -> None:
    for path, p in tree.flatten_with_paths(params, "params")[0]:
        if not is_differentiable(typeof(p).dtype):
            raise TypeError(
                f"{caller}: {path} is {typeof(p)}, which has no gradient: write {path}.astype(float), or "
                "keep it in another tree"
            )


def _check_like(what: str, values: Any, like: Any, whose: str = "the parameters that init was given") -> None:
    """Raise ValueError unless two trees have the same structure, and arrays of the same shapes."""
    (leaves, structure), (others, expected) = tree.flatten(values), tree.flatten(like)
    if structure != expected:
        raise ValueError(
            f"{what} have the structure {structure}, but {whose} {expected}: pass a tree like theirs, such as that of "
            "md.grad(loss)(params)"
        )
    for n, (x, y) in enumerate(zip(map(typeof, leaves), map(typeof, others))):
        if x.shape != y.shape:
            path = tree.paths(structure, what)[n]
            raise ValueError(f"{path} has the type {x}, but its parameter {y}: they must have the same shape")


hide_frames_of(globals(), __all__)

if not TYPE_CHECKING:  # a type checker would infer from it that every name exists
    __getattr__ = attributes(__name__)
