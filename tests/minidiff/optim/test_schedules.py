"""Schedules: their values at steps, in and out of compiled functions."""

import numpy

import minidiff as md
from minidiff import optim
from tests.checks.samples import each
from tests.minidiff.optim import OPTAX

SCHEDULES = {
    "constant": optim.constant_schedule(0.3),
    "linear": optim.linear_schedule(1.0, 0.2, 4),
    "linear, one step": optim.linear_schedule(0.0, 1.0, 1),
    "linear, later": optim.linear_schedule(1.0, 0.2, 4, 3),
    "cosine": optim.cosine_decay_schedule(2.0, 4),
    "cosine to alpha": optim.cosine_decay_schedule(2.0, 4, alpha=0.5),
    "cosine to a power": optim.cosine_decay_schedule(2.0, 4, 0.1, 2.0),
    "warm-up": optim.warmup_cosine_decay_schedule(0.1, 0.5, 2, 6, end_value=0.1),
    "no warm-up": optim.warmup_cosine_decay_schedule(0.1, 0.5, 0, 2),
    "a peak of 0": optim.warmup_cosine_decay_schedule(0.2, 0.0, 2, 4, end_value=0.2),
    "no peak": optim.warmup_cosine_decay_schedule(0.0, 0.0, 2, 6, 0.1),
    "warm-up to a power": optim.warmup_cosine_decay_schedule(0.2, 0.7, 2, 6, 0.1, 2.0),
    "polynomial": optim.polynomial_schedule(1.0, 0.2, 1.5, 4, 1),
    "exponential": optim.exponential_decay(2.0, 3, 0.5, 1, end_value=0.6),
    "exponential, stairs": optim.exponential_decay(2.0, 3, 1.5, 1, True, 4.0),
    "pieces, constant": optim.piecewise_constant_schedule(2.0, {2: 0.5, 5: 3.0}),
    "no pieces": optim.piecewise_constant_schedule(2.0),
    "one cycle, linear": optim.linear_onecycle_schedule(9, 0.5),
    "one cycle, cosine": optim.cosine_onecycle_schedule(9, 0.5, 0.4, 10.0, 100.0),
    "joined": optim.join_schedules(
        [optim.linear_schedule(0.0, 1.0, 2), optim.polynomial_schedule(1.0, 0.0, 2, 4)], [3]
    ),
}


@each("name", SCHEDULES)
def test_schedules(name):
    schedule = SCHEDULES[name]
    compiled = md.jit(lambda step: schedule(step))
    for step, rate in (pair.split("=") for pair in OPTAX[name]):
        for result in (schedule(int(step)), schedule(numpy.int32(step)), compiled(int(step))):
            numpy.testing.assert_allclose(result, float(rate), rtol=1e-7, atol=1e-15)
