"""Optimizers against the formulas of their papers and optax's numbers; `optimizers.md` shows masks, clipping, None."""

import inspect

import numpy
import pytest

import minidiff as md
from minidiff import optim
from tests.checks.samples import each
from tests.minidiff.optim import GRADIENTS, GRADIENTS_THERE, PARAMS, THERE, assert_trees_equal, check_optax, trained

# ---------------------------------------------------------------- formulas: p and its gradients, by hand


def momentum(p, gs, decay=0.9, nesterov=False):
    v = 0
    for g in gs:
        v = decay * v + g
        p = p - 0.1 * (decay * v + g if nesterov else v)
    return p


def adam(p, gs, b1=0.9, b2=0.999, eps=1e-8, decay=0.0, rates=(0.1,) * 9):
    """Algorithm 1 of the paper, with the averages as the sums that they are."""
    for t, rate in zip(range(1, len(gs) + 1), rates):
        m = (1 - b1) * sum(b1 ** (t - i) * gs[i - 1] for i in range(1, t + 1)) / (1 - b1**t)
        v = (1 - b2) * sum(b2 ** (t - i) * gs[i - 1] ** 2 for i in range(1, t + 1)) / (1 - b2**t)
        p = p - rate * (m / (v**0.5 + eps) + decay * p)
    return p


def lion(p, gs, b1=0.9, b2=0.99, decay=0.0):
    m = 0
    for g in gs:
        p = p - 0.1 * (numpy.sign(b1 * m + (1 - b1) * g) + decay * p)
        m = b2 * m + (1 - b2) * g
    return p


def adagrad(p, gs, start=0.1, eps=1e-7):
    total = start
    for g in gs:
        total = total + g**2
        p = p - 0.1 * g / (total + eps) ** 0.5
    return p


COSINE = [0.1 * (1 + numpy.cos(numpy.pi * t / 4)) / 2 for t in range(5)]
CASES = {
    **{f"momentum {x}": (optim.sgd(0.1, x), lambda p, gs: momentum(p, gs, 0)) for x in (None, 0, 0.0)},
    "momentum": (optim.sgd(0.1, momentum=0.9), momentum),
    "nesterov": (optim.sgd(0.1, 0.9, nesterov=True), lambda p, gs: momentum(p, gs, nesterov=True)),
    "adam": (optim.adam(0.1), adam),
    "adam of other settings": (optim.adam(0.1, 0.5, 0.7, 0.3), lambda p, gs: adam(p, gs, 0.5, 0.7, 0.3)),
    "adam by a schedule": (optim.adam(optim.cosine_decay_schedule(0.1, 4)), lambda p, gs: adam(p, gs, rates=COSINE)),
    "adamw": (optim.adamw(0.1, weight_decay=0.2), lambda p, gs: adam(p, gs, decay=0.2)),
    "lion": (optim.lion(0.1), lambda p, gs: lion(p, gs, decay=1e-3)),
    "lion without decay": (optim.lion(0.1, weight_decay=0.0), lion),
    "lion with decay": (optim.lion(0.1, 0.5, 0.7, weight_decay=0.2), lambda p, gs: lion(p, gs, 0.5, 0.7, 0.2)),
    "adagrad": (optim.adagrad(0.1), adagrad),
    "adagrad from 1": (optim.adagrad(0.1, 1.0, 0.2), lambda p, gs: adagrad(p, gs, 1.0, 0.2)),
}


@each("optimizer, formula", CASES.values(), CASES)
def test_formulas(optimizer, formula):
    expected = md.tree.map(lambda p, *gs: formula(p, gs), PARAMS, *GRADIENTS)
    assert_trees_equal(trained(optimizer)[0], expected)
    assert_trees_equal(trained(optimizer, compiled=True)[0], expected, rtol=1e-11)


#: By the names of `optax.txt`.
OPTIMIZERS = {
    "eps_root": optim.adam(0.1, eps_root=0.5),
    "nesterov": optim.adam(0.1, nesterov=True),
    "mu_dtype": optim.adam(0.1, b1=0.8, mu_dtype="float32"),
    "adamw": optim.adamw(0.1, 0.9, 0.99, 1e-8, 0.1, "float32", 0.2, {"w": True, "b": False}, nesterov=True),
    "a schedule of decay": optim.adamw(0.1, weight_decay=lambda step: 0.25 * step),
    "accumulator_dtype": optim.sgd(0.1, 0.9, False, "float32"),
    "accumulator_dtype, nesterov": optim.sgd(0.1, 0.9, True, accumulator_dtype="float32"),
    "lion": optim.lion(0.1, 0.9, 0.99, "float32", 0.2, {"w": False, "b": True}),
    "smooth": optim.scale_by_lion(0.7, 0.8, "float32", mode="smooth", smooth_beta=2.0),
    "refined": optim.scale_by_lion(0.7, 0.8, mode="refined"),
    "scale": optim.scale(-0.5),
    "clip": optim.chain(optim.clip(0.75), optim.scale(-1.0)),
    "rms": optim.scale_by_rms(0.8, 1e-3, 0.1),
    "rms, outside of the root": optim.scale_by_rms(0.8, 1e-3, 0.1, False),
    "rms, bias correction": optim.scale_by_rms(0.8, 1e-3, 0.0, False, True),
    "flip_sign": optim.scale_by_learning_rate(0.1, flip_sign=False),
}


@each("name", OPTIMIZERS)
def test_numbers_of_optax(name):
    check_optax(name, OPTIMIZERS[name])


def test_signatures(golden):
    def signature(name):
        parameters = inspect.signature(getattr(optim, name)).parameters.values()
        return str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))

    golden("optim_signatures", "\n".join(name + signature(name) for name in sorted(optim.__all__)))


# ---------------------------------------------------------------- dtypes

#: Of an epsilon that float16 rounds to 0, which is tested below.
expected_warning = pytest.mark.filterwarnings("ignore:init. eps=1e-08 is 0 in the dtype")


def dtypes(values):
    return {x.dtype for x in md.tree.leaves(values)} - {numpy.dtype("int64")}


def cast(values, dtype):
    return md.tree.map(lambda p: p.astype(dtype), values)


@expected_warning
@each("optimizer", [optimizer for optimizer, _ in CASES.values()], CASES)
@each("dtype", ["f4", "f2"])
@each("wide", [False, True])
def test_parameters_and_states_stay_in_their_dtype(optimizer, dtype, wide):
    """By wide gradients and rates, too: they compute in their dtype, but the state and the parameters stay."""
    optimizer = optim.chain(optim.clip_by_global_norm(numpy.float64(1.0)), optimizer)
    params, gradients = cast(PARAMS, dtype), GRADIENTS if wide else cast(GRADIENTS, dtype)
    params, state = trained(optimizer, params, gradients, compiled=True)
    assert dtypes((params, state)) == {numpy.dtype(dtype)}
    assert wide or dtypes(optimizer.update(gradients[0], state, params)[0]) == {numpy.dtype(dtype)}


RATES = [0.1, numpy.float64(0.1), numpy.array(0.1), lambda step: numpy.float64(0.1) / (1 + step)]


@each("rate", RATES)
def test_settings_of_double_precision_leave_single_precision(rate):
    w, one = numpy.ones(3, "f4"), numpy.float64(0.1)
    nadam = optim.adamw(rate, one, one, one, weight_decay=one)
    for optimizer in (optim.sgd(rate, one), nadam, optim.adagrad(rate, one, one)):
        assert dtypes(optimizer.update(w, optimizer.init(w), w)) == {w.dtype}


#: Optimizers whose states have a dtype, and the part of the state that has it.
WITH_DTYPES = {
    "adamw": (lambda dtype: optim.adamw(0.1, mu_dtype=dtype, nesterov=True), "mu"),
    "lion": (lambda dtype: optim.lion(0.1, mu_dtype=dtype), "mu"),
    "sgd": (lambda dtype: optim.sgd(0.1, 0.9, True, dtype), "trace"),
}


@expected_warning
@each("make, saved", WITH_DTYPES.values(), WITH_DTYPES)
@each("dtype", ["f4", "f2"])
@each("inputs", ["f4", "f2"])
def test_states_may_have_a_dtype_of_their_own(make, saved, dtype, inputs):
    """Narrower than the gradients, or wider: the step is computed in the wider of the two."""
    optimizer, (params, gradients) = make(dtype), cast((THERE, GRADIENTS_THERE), inputs)
    updated, states = trained(optimizer, params, gradients, compiled=True)
    assert dtypes(getattr(states[0], saved)) == {numpy.dtype(dtype)} and dtypes(updated) == {numpy.dtype(inputs)}
    updates, _ = optimizer.update(gradients[0], optimizer.init(params), params)
    assert dtypes(updates) == {numpy.result_type(dtype, inputs)}
    assert getattr(optimizer.init(numpy.array([1 + 2j]))[0], saved).dtype == "c8"


def test_an_epsilon_that_is_0_in_a_dtype_is_warned_of_in_the_users_line():
    with pytest.warns(RuntimeWarning) as result:
        optim.adam(0.1).init({"w": numpy.ones(3, "f2")})
    assert result[0].filename == __file__


@each("optimizer", [optim.sgd(0.1, 0.5), optim.adam(0.05), optim.adagrad(0.5)])
def test_complex_parameters_descend_by_conjugated_gradients(optimizer):
    loss = lambda z: (z.real**2 + z.imag**2).sum()  # noqa: E731
    z = numpy.array([1 + 2j, -0.5j])
    state, gradient = optimizer.init(z), md.jit(md.grad(loss))
    for _ in range(150):
        updates, state = optimizer.update(gradient(z).conj(), state)
        z = optim.apply_updates(z, updates)
    assert loss(z) < 1e-4 and z.dtype == complex
