"""Schedules: functions from the number of the step to a rate."""

from __future__ import annotations

import math

import numpy

from minidiff.core.tracer import Value
from minidiff.ops.elementwise import where
from minidiff.optim.transformations import Schedule, check_numbers, is_zero


def constant_schedule(value: Value) -> Schedule:
    """The same rate at each step.

    >>> constant_schedule(0.1)(1000)
    0.1
    """
    return lambda step: value


def linear_schedule(init_value: Value, end_value: Value, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """A line from `init_value` to `end_value`, which begins at step `transition_begin`.

    >>> [float(linear_schedule(1.0, 0.0, 4)(step)) for step in (-1, 0, 1, 4, 9)]
    [1.0, 1.0, 0.75, 0.0, 0.0]
    """
    check_numbers(transition_steps=transition_steps, least=1)
    check_numbers(transition_begin=transition_begin)

    def schedule(step: Value) -> Value:
        rest = 1 - numpy.clip(step - transition_begin, 0, transition_steps) / transition_steps
        return (init_value - end_value) * rest + end_value

    return schedule


def cosine_decay_schedule(init_value: Value, decay_steps: int, alpha: Value = 0.0, exponent: Value = 1.0) -> Schedule:
    """Half a cosine from `init_value` to `alpha * init_value`, then constant.

    The cosine, scaled to fall from 1 to 0, is raised to the power `exponent`.

    >>> [round(float(cosine_decay_schedule(1.0, 4)(step)), 12) for step in (0, 2, 4, 9)]
    [1.0, 0.5, 0.0, 0.0]

    Source: Loshchilov and Hutter, "SGDR: Stochastic gradient descent with warm restarts".
    """
    check_numbers(decay_steps=decay_steps, least=1)

    def schedule(step: Value) -> Value:
        cosine = 0.5 * (1 + numpy.cos(math.pi * (numpy.minimum(step, decay_steps) / decay_steps)))
        return init_value * ((1 - alpha) * cosine**exponent + alpha)

    return schedule


def warmup_cosine_decay_schedule(
    init_value: Value,
    peak_value: Value,
    warmup_steps: int,
    decay_steps: int,
    end_value: Value = 0.0,
    exponent: Value = 1.0,
) -> Schedule:
    """Linear warm-up to `peak_value`, then cosine decay to `end_value`.

    `decay_steps` is the total number of steps, including the warm-up. `exponent` is as in `cosine_decay_schedule`.
    After a peak of 0, the rate stays 0 for any `end_value`.

    >>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=2, decay_steps=6)
    >>> [round(float(schedule(step)), 12) for step in (0, 1, 2, 4, 6, 9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    check_numbers(warmup_steps=warmup_steps)
    check_numbers(decay_steps=decay_steps, least=warmup_steps + 1)
    warmup = linear_schedule(init_value, peak_value, max(warmup_steps, 1))
    alpha = 0.0 if is_zero(peak_value) else end_value / peak_value
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return lambda step: where(step < warmup_steps, warmup(step), decay(step - warmup_steps))
