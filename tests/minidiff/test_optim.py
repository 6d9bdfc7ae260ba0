"""Optimizers against the formulas of their papers, in NumPy; schedules, clipping, dtypes, errors."""

import numpy
import pytest

import minidiff as md
from minidiff import optim

RNG = numpy.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(3, 2)), "b": [RNG.normal(size=2), RNG.normal(size=())[()]]}
GRADIENTS = [md.tree.map(lambda p: RNG.normal(size=p.shape)[()], PARAMS) for _ in range(5)]


def trained(optimizer, params=PARAMS, gradients=GRADIENTS, compiled=False):
    """The parameters and the state after a step for each of the gradients."""
    update = md.jit(optimizer.update) if compiled else optimizer.update
    state = optimizer.init(params)
    for g in gradients:
        updates, state = update(g, state, params)
        params = optim.apply_updates(params, updates)
    if compiled:
        assert len(update.programs) == 1
    return params, state


def assert_trees_equal(actual, expected, rtol=1e-13):
    assert md.tree.structure(actual) == md.tree.structure(expected)
    for x, y in zip(md.tree.leaves(actual), md.tree.leaves(expected)):
        numpy.testing.assert_allclose(x, y, rtol=rtol)


# ---------------------------------------------------------------- formulas: p and its gradients, by hand


def sgd(p, gs, rate=0.1):
    for g in gs:
        p = p - rate * g
    return p


def momentum(p, gs, rate=0.1, nesterov=False):
    v = 0
    for g in gs:
        v = 0.9 * v + g
        p = p - rate * (0.9 * v + g if nesterov else v)
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


def adam_by_cosine(p, gs):
    return adam(p, gs, rates=[0.1 * (1 + numpy.cos(numpy.pi * t / 4)) / 2 for t in range(5)])


CASES = {
    "sgd": (optim.sgd(0.1), sgd),
    "momentum": (optim.sgd(0.1, momentum=0.9), momentum),
    "nesterov": (optim.sgd(0.1, 0.9, nesterov=True), lambda p, gs: momentum(p, gs, nesterov=True)),
    "adam": (optim.adam(0.1), adam),
    "adam of other settings": (optim.adam(0.1, 0.5, 0.7, 0.3), lambda p, gs: adam(p, gs, 0.5, 0.7, 0.3)),
    "adam by a schedule": (optim.adam(optim.cosine_decay_schedule(0.1, 4)), adam_by_cosine),
    "adamw": (optim.adamw(0.1, weight_decay=0.2), lambda p, gs: adam(p, gs, decay=0.2)),
    "lion": (optim.lion(0.1), lion),
    "lion with decay": (optim.lion(0.1, 0.5, 0.7, weight_decay=0.2), lambda p, gs: lion(p, gs, 0.5, 0.7, 0.2)),
    "adagrad": (optim.adagrad(0.1), adagrad),
    "adagrad from 1": (optim.adagrad(0.1, 1.0, 0.2), lambda p, gs: adagrad(p, gs, 1.0, 0.2)),
}
each_optimizer = pytest.mark.parametrize("optimizer, formula", CASES.values(), ids=CASES)
OPTIMIZERS = [optimizer for optimizer, _ in CASES.values()]
each = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=CASES)


@each_optimizer
def test_formulas(optimizer, formula):
    expected = md.tree.map(lambda p, *gs: formula(p, gs), PARAMS, *GRADIENTS)
    assert_trees_equal(trained(optimizer)[0], expected)


@each
def test_compiled_once_for_all_steps(optimizer):
    clipped = optim.chain(optim.clip_by_global_norm(1.0), optimizer)
    assert_trees_equal(trained(clipped, compiled=True), trained(clipped), rtol=1e-11)


@each
@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("wide", [False, True])
def test_dtypes_of_parameters_are_kept(optimizer, dtype, wide):
    """By wide gradients and rates, too: they compute in their dtype, but the state and the parameters stay."""
    optimizer = optim.chain(optim.clip_by_global_norm(numpy.float64(1.0)), optimizer)
    params = md.tree.map(lambda p: p.astype(dtype), PARAMS)
    gradients = GRADIENTS if wide else [md.tree.map(lambda p: p.astype(dtype), g) for g in GRADIENTS]
    for compiled in (False, True):
        params, state = trained(optimizer, params, gradients, compiled)
        found = {x.dtype for x in md.tree.leaves((params, state))} - {numpy.dtype("int64")}
        assert found == {numpy.dtype(dtype)}
        updates, _ = optimizer.update(gradients[0], state, params)
        if not wide:
            assert {x.dtype for x in md.tree.leaves(updates)} == {numpy.dtype(dtype)}


@pytest.mark.parametrize(
    "rate", [0.1, numpy.float64(0.1), numpy.array(0.1), lambda step: numpy.float64(0.1) / (1 + step)]
)
def test_settings_of_double_precision_keep_single_precision(rate):
    w, one = numpy.ones(3, "f4"), numpy.float64(0.1)
    for optimizer in (optim.sgd(rate, one), optim.adamw(rate, one, one, one, one), optim.adagrad(rate, one, one)):
        found = md.tree.leaves(optimizer.update(w, optimizer.init(w), w))
        assert {x.dtype for x in found} - {numpy.dtype("int64")} == {w.dtype}


def test_masks_and_prefixes_of_them():
    zeros = md.tree.map(numpy.zeros_like, PARAMS)
    masks = [
        {"w": True, "b": False},
        {"w": True, "b": [False, False]},
        lambda ps: md.tree.map(lambda p: p.ndim > 1, ps),
    ]
    for mask in masks:
        (params, _) = trained(optim.adamw(0.1, weight_decay=0.5, mask=mask), gradients=[zeros])
        assert_trees_equal(params, {"w": 0.95 * PARAMS["w"], "b": PARAMS["b"]})


def test_a_step_has_derivatives_by_its_settings():
    """Rates may be traced: one step of x**2 from 3 leads to 3 - 6 rate, whose square has slope -12 (3 - 6 rate)."""

    def after_a_step(rate):
        optimizer = optim.sgd(rate)
        updates, _ = optimizer.update(6.0, optimizer.init(3.0))
        return optim.apply_updates(3.0, updates) ** 2

    for f in (after_a_step, md.jit(after_a_step)):
        assert md.grad(f)(0.1) == pytest.approx(-12 * (3 - 0.6))


def test_adagrad_from_0_does_not_divide_by_0():
    optimizer = optim.adagrad(0.1, initial_accumulator_value=0.0, eps=0.0)
    update, _ = optimizer.update(numpy.array([0.0, 2.0]), optimizer.init(numpy.ones(2)))
    numpy.testing.assert_array_equal(update, [0.0, -0.1])


def test_complex_parameters_descend_by_conjugated_gradients():
    def loss(z):
        return (z.real**2 + z.imag**2).sum()

    for optimizer in (optim.sgd(0.1, 0.5), optim.adam(0.05), optim.adagrad(0.5)):
        z = numpy.array([1 + 2j, -0.5j])
        state = optimizer.init(z)
        for _ in range(300):
            updates, state = optimizer.update(md.grad(loss)(z).conj(), state)
            z = optim.apply_updates(z, updates)
        assert loss(z) < 1e-4 and z.dtype == complex


# ---------------------------------------------------------------- clipping


def test_clipping():
    gradients = {"a": numpy.array([3.0, 0.0]), "b": [4.0, numpy.zeros(0)], "c": numpy.array([12j])}
    assert optim.global_norm(gradients) == 13.0
    assert optim.global_norm({}) == 0.0
    for most, scale in ((6.5, 0.5), (13.0, 1.0), (100.0, 1.0)):
        clip = optim.clip_by_global_norm(most)
        assert_trees_equal(clip.update(gradients, ())[0], md.tree.map(lambda g, s=scale: s * g, gradients))
    zeros = md.tree.map(lambda g: 0 * g, gradients)
    assert_trees_equal(optim.clip_by_global_norm(1.0).update(zeros, ())[0], zeros)


def test_norms_in_half_precision_do_not_overflow():
    g = numpy.full(4, 300.0, "f2")
    assert optim.global_norm(g) == 600.0
    (clipped, _) = optim.clip_by_global_norm(6.0).update(g, ())
    assert clipped.dtype == g.dtype and numpy.allclose(clipped, 3.0, rtol=1e-3)


# ---------------------------------------------------------------- schedules

SCHEDULES = {
    "constant": (optim.constant_schedule(0.3), {0: 0.3, 100: 0.3}),
    "linear": (optim.linear_schedule(1.0, 0.2, 4), {0: 1.0, 1: 0.8, 4: 0.2, 5: 0.2, 100: 0.2}),
    "linear, one step": (optim.linear_schedule(0.0, 1.0, 1), {0: 0.0, 1: 1.0, 2: 1.0}),
    "cosine": (optim.cosine_decay_schedule(2.0, 4), {0: 2.0, 1: 1 + 0.5**0.5, 2: 1.0, 4: 0.0, 5: 0.0}),
    "cosine to alpha": (optim.cosine_decay_schedule(2.0, 4, alpha=0.5), {0: 2.0, 2: 1.5, 4: 1.0, 9: 1.0}),
    "warm-up": (
        optim.warmup_cosine_decay_schedule(0.1, 0.5, 2, 6, end_value=0.1),
        {0: 0.1, 1: 0.3, 2: 0.5, 4: 0.3, 6: 0.1, 7: 0.1},
    ),
    "no warm-up": (optim.warmup_cosine_decay_schedule(0.1, 0.5, 0, 2), {0: 0.5, 1: 0.25, 2: 0.0, 3: 0.0}),
    "a peak of 0": (optim.warmup_cosine_decay_schedule(0.2, 0.0, 2, 4, end_value=0.2), {1: 0.1, 2: 0.0, 3: 0.1}),
}


@pytest.mark.parametrize("schedule, expected", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules(schedule, expected):
    compiled = md.jit(lambda step: schedule(step))
    for step, rate in expected.items():
        for found in (schedule(step), schedule(numpy.int32(step)), compiled(step)):
            numpy.testing.assert_allclose(found, rate, atol=1e-15)


# ---------------------------------------------------------------- errors

W = numpy.ones(3)
ERRORS = {
    "learning_rate must be at least 0, got -0.1": lambda: optim.adam(-0.1),
    "learning_rate must be at least 0, got -1.0": lambda: optim.sgd(numpy.array(-1.0)),
    "learning_rate must be at least 0, got nan": lambda: optim.lion(numpy.nan),
    "learning_rate must be a number, or a function from the step to the rate, got str: '0.1'": lambda: optim.sgd("0.1"),
    r"b1 must be in \[0, 1\), got 1.0": lambda: optim.adam(0.1, b1=1.0),
    r"b2 must be in \[0, 1\), got -0.1": lambda: optim.lion(0.1, b2=-0.1),
    "b2 must be a number, got NoneType": lambda: optim.adamw(0.1, b2=None),
    r"momentum must be in \[0, 1\), got 1": lambda: optim.sgd(0.1, momentum=1),
    "eps must be at least 0": lambda: optim.adagrad(0.1, eps=-1e-8),
    "weight_decay must be at least 0": lambda: optim.adamw(0.1, weight_decay=-1.0),
    "max_norm must be positive, got 0": lambda: optim.clip_by_global_norm(0.0),
    "max_norm must be at least 0, got -1": lambda: optim.clip_by_global_norm(-1),
    "transition_steps must be at least 1, got 0": lambda: optim.linear_schedule(1.0, 0.0, 0),
    "decay_steps must be at least 6, got 5": lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5),
    r"chain: expected gradient transformations such as adam\(0.1\), got function": lambda: optim.chain(optim.adam),
    r"update: weight decay needs params: write update\(gradients, state, params\)": lambda: optim.adamw(0.1).update(
        W, optim.adamw(0.1).init(W)
    ),
    r"mask is 'w', which is neither": lambda: trained(optim.adamw(0.1, mask="w"), W, [W]),
    r"mask has the keys \['v'\] for values with the keys \['w'\]": lambda: trained(
        optim.adamw(0.1, mask={"v": True}), {"w": W}, [{"w": W}]
    ),
    r"update: state has the structure \*, but a chain of 2": lambda: optim.adam(0.1).update(W, W),
    r"apply_updates: updates have the structure \{'v': \*\}, but the parameters \{'w'": lambda: optim.apply_updates(
        {"w": W}, {"v": W}
    ),
    r"apply_updates: updates\['w'\] has the type f64\[1\], but its parameter f64\[3\]": lambda: optim.apply_updates(
        {"w": W}, {"w": numpy.ones(1)}
    ),
    r"init: params\['n'\]\[0\] is i64\[\], which has no gradient: write": lambda: optim.sgd(0.1).init({"n": [3]}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        ERRORS[message]()


@each
def test_gradients_are_a_tree_like_the_parameters(optimizer):
    for gradients, message in (
        ({"w": W, "c": W}, r"update: gradients have the structure \{'c': \*, 'w': \*\}, but .*grad\(loss\)\(params\)"),
        ({"w": W, "b": numpy.ones((3, 1))}, r"update: gradients\['b'\] has the type f64\[3,1\], but .*f64\[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            trained(optimizer, {"w": W, "b": W}, [gradients])
