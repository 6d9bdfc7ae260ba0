"""Schedules: functions from the step number to a rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy

from minidiff.core.tracer import Value
from minidiff.ops.elementwise import where
from minidiff.optim.transformations import Schedule, check_numbers, is_zero

__all__ = [
    "constant_schedule", "cosine_decay_schedule", "cosine_onecycle_schedule", "exponential_decay", "join_schedules",
    "linear_onecycle_schedule", "linear_schedule", "piecewise_constant_schedule", "polynomial_schedule",
    "warmup_cosine_decay_schedule",
]  # fmt: skip


def constant_schedule(value: Value) -> Schedule:
    """Keep the same rate at each step.

    Args:
        value: the rate.

    Returns:
        A function from the step number to the rate.

    >>> constant_schedule(0.1)(1000)
    0.1
    """
    return lambda step: value


def polynomial_schedule(
    init_value: Value, end_value: Value, power: Value, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """Follow a polynomial from `init_value` to `end_value`, beginning at step `transition_begin`.

    Args:
        init_value: the first rate.
        end_value: the last rate.
        power: the exponent of the remaining fraction, which falls from 1 to 0.
        transition_steps: the number of steps from the first value to the last, at least 1.
        transition_begin: the step at which it begins.

    Returns:
        A function from the step number to the rate.

    >>> [float(polynomial_schedule(1.0, 0.0, 2, 4)(step)) for step in (0, 1, 2, 4, 9)]
    [1.0, 0.5625, 0.25, 0.0, 0.0]
    """
    check_numbers(transition_steps=transition_steps, least=1)
    check_numbers(transition_begin=transition_begin)

    def schedule(step: Value) -> Value:
        remaining = 1 - numpy.clip(step - transition_begin, 0, transition_steps) / transition_steps
        return (init_value - end_value) * remaining**power + end_value

    return schedule


def linear_schedule(init_value: Value, end_value: Value, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """Follow a line from `init_value` to `end_value`, beginning at step `transition_begin`.

    Args:
        init_value: the first rate.
        end_value: the last rate.
        transition_steps: the number of steps from the first value to the last, at least 1.
        transition_begin: the step at which it begins.

    Returns:
        A function from the step number to the rate.

    >>> [float(linear_schedule(1.0, 0.0, 4)(step)) for step in (-1, 0, 1, 4, 9)]
    [1.0, 1.0, 0.75, 0.0, 0.0]
    """
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def exponential_decay(
    init_value: Value,
    transition_steps: int,
    decay_rate: Value,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: Value | None = None,
) -> Schedule:
    """Multiply by `decay_rate` every `transition_steps` steps: gradually, or with `staircase` at their end.

    Args:
        init_value: the first rate.
        transition_steps: the number of steps of one decay, at least 1.
        decay_rate: a positive factor.
        transition_begin: the step at which it begins.
        staircase: whether the rate changes only at the end of each decay.
        end_value: the limit of the rate; None for no limit.

    Returns:
        A function from the step number to the rate.

    >>> [float(exponential_decay(1.0, 2, 0.25, end_value=0.1)(step)) for step in (0, 1, 2, 9)]
    [1.0, 0.5, 0.25, 0.1]
    """
    check_numbers(transition_steps=transition_steps, least=1)
    check_numbers(decay_rate=decay_rate, least=math.ulp(0.0))
    check_numbers(transition_begin=transition_begin)

    def schedule(step: Value) -> Value:
        passed = numpy.maximum(step - transition_begin, 0) / transition_steps
        value = init_value * decay_rate ** (numpy.floor(passed) if staircase else passed)
        if end_value is None:
            return value
        return where(decay_rate < 1, numpy.maximum(value, end_value), numpy.minimum(value, end_value))

    return schedule


def _piecewise(bend: Callable[[Value], Value], init_value: Value, scales: dict[int, Value]) -> Schedule:
    """Multiply by `scales[step]` up to each of these steps; `bend` maps shares of the steps to shares of the change."""
    check_numbers(**{f"boundaries_and_scales[{step}]": by for step, by in scales.items()})

    def schedule(step: Value) -> Value:
        value, begin, first = init_value + 0.0 * step, 0, init_value
        for end, by in sorted(scales.items()):
            share = bend(numpy.clip((step - begin) / max(end - begin, 1), 0, 1))
            value = where(step >= begin, first + (by - 1) * first * share, value)
            begin, first = end, by * first
        return where(step >= begin, first, value)

    return schedule


def piecewise_constant_schedule(init_value: Value, boundaries_and_scales: dict[int, Value] | None = None) -> Schedule:
    """Multiply by `boundaries_and_scales[step]` from each of these steps on.

    Args:
        init_value: the first rate.
        boundaries_and_scales: the factor from each of these steps on.

    Returns:
        A function from the step number to the rate.

    >>> [float(piecewise_constant_schedule(1.0, {2: 0.5, 4: 0.5})(step)) for step in (0, 1, 2, 4)]
    [1.0, 1.0, 0.5, 0.25]
    """
    return _piecewise(lambda share: 0 * share, init_value, boundaries_and_scales or {})


def linear_onecycle_schedule(
    transition_steps: int,
    peak_value: Value,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Rise along a line by `div_factor` to the peak, fall back, then fall by `final_div_factor`.

    Args:
        transition_steps: the number of steps of the whole cycle, at least 1.
        peak_value: the largest rate.
        pct_start: the share of the steps after which the rise ends.
        pct_final: the fraction at which the first fall ends.
        div_factor: the peak, divided by the first rate.
        final_div_factor: the first rate, divided by the last.

    Returns:
        A function from the step number to the rate.

    >>> schedule = linear_onecycle_schedule(10, 1.0, 0.2, 0.8, 4.0, 10.0)
    >>> [round(float(schedule(step)), 4) for step in (0, 2, 5, 8, 10)]
    [0.25, 1.0, 0.625, 0.25, 0.025]

    Source: Smith and Topin, "Super-convergence: very fast training of neural networks using large learning rates".
    """
    check_numbers(transition_steps=transition_steps, least=1)
    rise, fall = (int(share * transition_steps) for share in (pct_start, pct_final))
    scales = {rise: div_factor, fall: 1 / div_factor, transition_steps: 1 / final_div_factor}
    return _piecewise(lambda share: share, peak_value / div_factor, scales)


def cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: Value,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Rise by `div_factor` to the peak, and fall by both factors, along half cosines; see the linear one.

    Args:
        transition_steps: the number of steps of the whole cycle, at least 1.
        peak_value: the largest rate.
        pct_start: the share of the steps after which the rise ends.
        div_factor: the peak, divided by the first rate.
        final_div_factor: the first rate, divided by the last.

    Returns:
        A function from the step number to the rate.

    >>> [round(float(cosine_onecycle_schedule(10, 1.0, 0.2, 4.0, 10.0)(step)), 4) for step in (0, 1, 2, 6, 10)]
    [0.25, 0.625, 1.0, 0.5125, 0.025]
    """
    check_numbers(transition_steps=transition_steps, least=1)
    scales = {int(pct_start * transition_steps): div_factor, transition_steps: 1 / (div_factor * final_div_factor)}
    return _piecewise(lambda share: (1 - numpy.cos(math.pi * share)) / 2, peak_value / div_factor, scales)


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Follow one schedule after another; each begins with its own step 0 at its boundary.

    Args:
        schedules: schedules, each of which begins at its step 0.
        boundaries: the steps at which all but the first begin.

    Returns:
        A function from the step number to the rate.

    >>> joined = join_schedules([linear_schedule(0.0, 1.0, 2), constant_schedule(1.0)], [2])
    >>> [float(joined(step)) for step in (0, 1, 2, 9)]
    [0.0, 0.5, 1.0, 1.0]
    """

    def schedule(step: Value) -> Value:
        value = schedules[0](step)
        for begin, following in zip(boundaries, schedules[1:]):
            value = where(step < begin, value, following(step - begin))
        return value

    return schedule


def cosine_decay_schedule(init_value: Value, decay_steps: int, alpha: Value = 0.0, exponent: Value = 1.0) -> Schedule:
    """Follow half a cosine from `init_value` to `alpha * init_value`, then stay constant.

    Args:
        init_value: the first rate.
        decay_steps: the number of steps, at least 1.
        alpha: the last rate, divided by the first.
        exponent: the power of the cosine, which is scaled to fall from 1 to 0.

    Returns:
        A function from the step number to the rate.

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
    """Warm up linearly to `peak_value`, then decay along a cosine to `end_value`.

    Args:
        init_value: the first rate.
        peak_value: the largest rate; after a peak of 0 the rate stays 0.
        warmup_steps: the number of steps to the peak.
        decay_steps: the total number of steps, including the warm-up.
        end_value: the last rate.
        exponent: the power of the cosine, as in `cosine_decay_schedule`.

    Returns:
        A function from the step number to the rate.

    >>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=2, decay_steps=6)
    >>> [round(float(schedule(step)), 12) for step in (0, 1, 2, 4, 6, 9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    check_numbers(warmup_steps=warmup_steps)
    check_numbers(decay_steps=decay_steps, least=warmup_steps + 1)
    warmup = linear_schedule(init_value, peak_value, max(warmup_steps, 1))
    alpha = 0.0 if is_zero(peak_value) else end_value / peak_value
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return join_schedules([warmup, decay], [warmup_steps])
