"""Optimizers, with the API of `optax`: gradient transformations that compose.

A `GradientTransformation` is a pair of functions: `init(params)` makes the state, and `update(gradients, state,
params)` returns the updates and the new state. `apply_updates` adds the updates to the parameters. `chain` composes
transformations, and an optimizer is a chain: Adam is `chain(scale_by_adam(), scale_by_learning_rate(rate))`. A learning
rate is a number, or a schedule: a function from the number of the step, which starts at 0, to the rate.

Parameters are trees of floating-point arrays. States are named tuples of trees like the parameters, and of the number
of steps. Both can be saved, and passed to `jit` and `shard_map`. States and new parameters keep the parameters' dtypes,
whatever the dtype of a rate, unless `mu_dtype` or `accumulator_dtype` is given. Parameters of functions have optax's
names, order and defaults. Conjugate the gradients of complex parameters: `md.tree.map(np.conj, gradients)`.

If a gradient is None, its update is None, and so is its state from then on. A parameter that is None stays None. But
`apply_updates` raises an error for an array whose update is None, since the array would never change.

Everything but the norm of the gradients is elementwise. So the state of a sharded array has the sharding of the array,
and its update communicates nothing.

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

import functools
from typing import TYPE_CHECKING

import numpy  # noqa: F401  (examples in docstrings use it)

from minidiff import tree  # noqa: F401
from minidiff.diagnostics.other_libraries import module_getattr
from minidiff.diagnostics.tracebacks import hide_frames_of
from minidiff.optim.losses import (
    huber_loss,
    l2_loss,
    sigmoid_binary_cross_entropy,
    softmax_cross_entropy,
    softmax_cross_entropy_with_integer_labels,
    squared_error,
)  # fmt: skip
from minidiff.optim.schedules import (
    constant_schedule,
    cosine_decay_schedule,
    cosine_onecycle_schedule,
    exponential_decay,
    join_schedules,
    linear_onecycle_schedule,
    linear_schedule,
    piecewise_constant_schedule,
    polynomial_schedule,
    warmup_cosine_decay_schedule,
)  # fmt: skip
from minidiff.optim.transformations import (
    GradientTransformation,
    adagrad,
    adam,
    adamw,
    add_decayed_weights,
    apply_updates,
    chain,
    clip,
    clip_by_global_norm,
    global_norm,
    lion,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_rms,
    scale_by_rss,
    sgd,
    trace,
)  # fmt: skip
from minidiff.optim.wrappers import MultiSteps, inject_hyperparams, partition

__all__ = [
    "GradientTransformation", "MultiSteps", "adagrad", "adam", "adamw", "add_decayed_weights", "apply_updates",
    "chain", "clip", "clip_by_global_norm", "constant_schedule", "cosine_decay_schedule", "cosine_onecycle_schedule",
    "exponential_decay", "global_norm", "huber_loss", "inject_hyperparams", "join_schedules", "l2_loss",
    "linear_onecycle_schedule", "linear_schedule", "lion", "partition", "piecewise_constant_schedule",
    "polynomial_schedule", "scale", "scale_by_adam", "scale_by_learning_rate",
    "scale_by_lion", "scale_by_rms", "scale_by_rss", "sgd", "sigmoid_binary_cross_entropy", "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels", "squared_error", "trace", "warmup_cosine_decay_schedule",
]  # fmt: skip
__dir__ = functools.partial(sorted, __all__)

hide_frames_of(globals(), __all__)

if not TYPE_CHECKING:  # a type checker would infer from it that every name exists
    __getattr__ = module_getattr(__name__)
