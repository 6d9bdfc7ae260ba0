"""Optimizers against the formulas of their papers, in NumPy; schedules, clipping, dtypes, errors."""

import inspect
import warnings

import ml_dtypes
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
    "lion": (optim.lion(0.1), lambda p, gs: lion(p, gs, decay=1e-3)),
    "lion without decay": (optim.lion(0.1, weight_decay=0.0), lion),
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


#: Of an epsilon that float16 rounds to 0, which is tested below.
expected_warning = pytest.mark.filterwarnings("ignore:init. eps=1e-08 is 0 in the dtype")


@each
@expected_warning
@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("wide", [False, True])
def test_dtypes_of_parameters_are_kept(optimizer, dtype, wide):
    """By wide gradients and rates, too: they compute in their dtype, but the state and the parameters stay."""
    optimizer = optim.chain(optim.clip_by_global_norm(numpy.float64(1.0)), optimizer)
    params = md.tree.map(lambda p: p.astype(dtype), PARAMS)
    gradients = GRADIENTS if wide else [md.tree.map(lambda p: p.astype(dtype), g) for g in GRADIENTS]
    for compiled in (False, True):
        params, state = trained(optimizer, params, gradients, compiled)
        result = {x.dtype for x in md.tree.leaves((params, state))} - {numpy.dtype("int64")}
        assert result == {numpy.dtype(dtype)}
        updates, _ = optimizer.update(gradients[0], state, params)
        if not wide:
            assert {x.dtype for x in md.tree.leaves(updates)} == {numpy.dtype(dtype)}


@pytest.mark.parametrize(
    "rate", [0.1, numpy.float64(0.1), numpy.array(0.1), lambda step: numpy.float64(0.1) / (1 + step)]
)
def test_settings_of_double_precision_keep_single_precision(rate):
    w, one = numpy.ones(3, "f4"), numpy.float64(0.1)
    for optimizer in (
        optim.sgd(rate, one),
        optim.adamw(rate, one, one, one, weight_decay=one),
        optim.adagrad(rate, one, one),
    ):
        result = md.tree.leaves(optimizer.update(w, optimizer.init(w), w))
        assert {x.dtype for x in result} - {numpy.dtype("int64")} == {w.dtype}


#: Optimizers, and what optax 0.2.8 makes of the parameters `THERE` in three steps, in double precision.
OPTAX = {
    "eps_root": (optim.adam(0.1, eps_root=0.5), [0.8714973731815, -1.859694170889, 0.2587427989099, 0.1102423204957]),
    "nesterov": (optim.adam(0.1, nesterov=True), [0.7600271116946, -1.822773548543, 0.2298496425742, 0.09843971086295]),
    "mu_dtype": (
        optim.adam(0.1, b1=0.8, mu_dtype="float32"),
        [0.8064791867916, -1.827657661362, 0.2566995359795, 0.1097311058324],
    ),
    "adamw": (
        optim.adamw(0.1, 0.9, 0.99, 1e-8, 0.1, "float32", 0.2, {"w": True, "b": False}, nesterov=True),
        [0.7291009173134, -1.72065486824, 0.2097305095617, 0.1004728632403],
    ),
    "a schedule of decay": (
        optim.adamw(0.1, weight_decay=lambda step: 0.25 * step),
        [0.7412582195463, -1.677968436142, 0.222470150072, 0.08951099116882],
    ),
    "accumulator_dtype": (
        optim.sgd(0.1, 0.9, False, "float32"),
        [0.7120000034571, -1.778000011444, -0.4929999494553, -0.1144999861717],
    ),
    "accumulator_dtype, nesterov": (
        optim.sgd(0.1, 0.9, True, accumulator_dtype="float32"),
        [0.5158000031114, -1.7402000103, -0.7836999545097, -0.1905499875546],
    ),
    "lion": (optim.lion(0.1, 0.9, 0.99, "float32", 0.2, {"w": False, "b": True}), [0.9, -2.1, 0.2, 0.137258]),
    "smooth": (
        optim.scale_by_lion(0.7, 0.8, "float32", mode="smooth", smooth_beta=2.0),
        [2.12733799008, -2.769566289104, 3.052883922508, 1.282003320853],
    ),
    "refined": (optim.scale_by_lion(0.7, 0.8, mode="refined"), [1.766, -2.418, 2.566, 0.9515]),
    "scale": (optim.scale(-0.5), [-0.125, -1.7, -1.45, -0.3125]),
    "clip": (optim.chain(optim.clip(0.75), optim.scale(-1.0)), [0.0, -1.65, -0.9, 0.125]),
    "rms": (optim.scale_by_rms(0.8, 1e-3, 0.1), [3.767133610535, -3.005412899467, 3.367678276977, 1.476190390055]),
    "rms, outside of the root": (
        optim.scale_by_rms(0.8, 1e-3, 0.1, False),
        [3.766564214397, -3.005011362583, 3.36634550981, 1.475583175585],
    ),
    "rms, bias correction": (
        optim.scale_by_rms(0.8, 1e-3, 0.0, False, True),
        [2.866494979079, -2.305650262499, 1.907064397768, 0.701458789523],
    ),
    "two steps": (
        optim.MultiSteps(optim.adam(0.1), 2).gradient_transformation(),
        [0.900000008, -1.900000002222, 0.4000000005, 0.150000002],
    ),
    "more and more steps, sums": (
        optim.MultiSteps(optim.sgd(0.1, 0.9), lambda update: 1 + update, use_grad_mean=False),
        [0.73, -1.85, -0.16, -0.0425],
    ),
    "injected": (
        optim.inject_hyperparams(optim.adamw)(optim.exponential_decay(0.1, 2, 0.5), b1=0.8, weight_decay=0.1),
        [0.8282355065762, -1.810058674689, 0.3013958055058, 0.1212979835086],
    ),
    "partition": (
        optim.partition({"a": optim.adam(0.1), 0: optim.sgd(0.5)}, {"w": "a", "b": 0}),
        [0.8063015345292, -1.815130193687, 0.2476148303624, -0.3125],
    ),
    "flip_sign": (optim.scale_by_learning_rate(0.1, flip_sign=False), [1.225, -2.06, 0.89, 0.3625]),
}
THERE = {"w": numpy.array([1.0, -2.0, 0.5]), "b": numpy.float64(0.25)}
GRADIENTS_THERE = [
    {"w": numpy.array(w), "b": numpy.float64(b)}
    for w, b in (([0.5, -1.0, 3.0], 2.0), ([-0.25, 0.1, 1.0], -1.0), ([2.0, 0.3, -0.1], 0.125))
]


@pytest.mark.parametrize("optimizer, expected", OPTAX.values(), ids=OPTAX)
@pytest.mark.parametrize("compiled", [False, True])
def test_numbers_of_optax(optimizer, expected, compiled):
    params, _ = trained(optimizer, THERE, GRADIENTS_THERE, compiled)
    numpy.testing.assert_allclose([*params["w"], params["b"]], expected, rtol=3e-7)


@expected_warning
@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("compiled", [False, True])
def test_states_may_have_a_dtype_of_their_own(dtype, compiled):
    """Narrower than the gradients, or wider: the step is computed in the wider of the two."""
    nadam, momentum = optim.adamw(0.1, mu_dtype=dtype, nesterov=True), optim.sgd(0.1, 0.9, True, dtype)
    for optimizer, saved in ((nadam, "mu"), (optim.lion(0.1, mu_dtype=dtype), "mu"), (momentum, "trace")):
        for inputs in ("f4", "f2"):
            params, gradients = md.tree.map(lambda p, d=inputs: p.astype(d), (THERE, GRADIENTS_THERE))
            updated, states = trained(optimizer, params, gradients, compiled)
            assert {x.dtype for x in md.tree.leaves(getattr(states[0], saved))} == {numpy.dtype(dtype)}
            updates, _ = optimizer.update(gradients[0], optimizer.init(params), params)
            assert {x.dtype for x in md.tree.leaves(updates)} == {numpy.result_type(dtype, inputs)}
            assert {x.dtype for x in md.tree.leaves(updated)} == {numpy.dtype(inputs)}
        assert getattr(optimizer.init(numpy.array([1 + 2j]))[0], saved).dtype == "c8"


def test_further_arguments_reach_the_transformations_that_take_them():
    seen = []

    def some(gradients, state, params=None, *, value):
        seen.append(("some", value))
        return gradients / value, state

    def every(gradients, state, params=None, **extra):
        seen.append(("every", sorted(extra)))
        return gradients, state

    some, every = (optim.GradientTransformation(lambda params: (), update) for update in (some, every))
    optimizer = optim.chain(optim.chain(some, optim.sgd(0.1)), every, optim.adam(0.1))
    state = optimizer.init(1.0)
    assert float(optimizer.update(3.0, state, 1.0, value=2.0, more=3.0)[0]) == pytest.approx(0.1)
    assert seen == [("some", 2.0), ("every", ["more", "value"])]
    tx = optim.chain(optim.sgd(0.1))
    for update in (tx.update, md.jit(tx.update)):
        numpy.testing.assert_allclose(update(THERE, tx.init(THERE), THERE, value=1.0)[0]["b"], -0.025)
    assert float(md.jit(optim.chain(some).update)(3.0, ((),), value=2.0)[0]) == 1.5
    with pytest.raises(TypeError, match="value"):
        optimizer.update(3.0, state, 1.0)


def test_steps_are_left_out():
    """Those whose gradients are not finite: the next ones take their place."""
    finite = md.precision.all_finite
    steps = optim.MultiSteps(optim.sgd(1.0), 2, should_skip_update_fn=lambda g, *_: (~finite(g), finite(g)))
    for update in (steps.update, md.jit(steps.update)):
        state, seen = steps.init(W), []
        for g in (1.0, numpy.inf, 3.0, numpy.nan, 5.0):
            with numpy.errstate(invalid="ignore"):
                updates, state = update(g * W, state, W)
            seen.append((float(updates[0]), bool(steps.has_updated(state)), bool(state.skip_state)))
        assert seen == [
            *((0.0, False, True), (0.0, False, False), (-2.0, True, True), (0.0, True, False), (0.0, False, True)),
        ]


def test_sums_of_gradients_are_kept_in_float32():
    steps = optim.MultiSteps(optim.sgd(1.0), 4, use_grad_mean=False)
    state, one = steps.init(numpy.ones(1, "f2")), numpy.array([1.0], "f2")
    for g in (2048 * one, one, one, one):
        updates, state = steps.update(g, state)
        assert (updates.dtype, state.acc_grads.dtype) == ("f2", "f4")
    assert updates[0] == -numpy.float16(2051)  # in float16, 2048 + 1 is 2048
    assert optim.MultiSteps(optim.sgd(1.0), 4, accumulator_dtype="f8").init(one).acc_grads.dtype == "f8"
    assert steps.init(W).acc_grads.dtype == float


def test_settings_in_the_state():
    optimizer = optim.inject_hyperparams(optim.adamw, static_args="b2")(
        optim.linear_schedule(1.0, 0.0, 4), mask=None, nesterov=True
    )
    params = {"w": numpy.ones(3, "f4")}
    state = optimizer.init(params)
    assert {*state.hyperparams} == {"learning_rate", "b1", "eps", "eps_root", "weight_decay"}
    assert {x.dtype for x in state.hyperparams.values()} == {numpy.dtype("f4")}
    update = md.jit(optimizer.update)
    for rate in (1.0, 0.75, 0.5):
        _, state = update(params, state, params)
        assert state.hyperparams["learning_rate"] == rate
    clip = optim.inject_hyperparams(optim.clip_by_global_norm)(1.0)
    state = clip.init(W)
    for norm in (0.5, 1.5):
        state.hyperparams["max_norm"] = numpy.float64(norm)
        updates, state = md.jit(clip.update)(W, state)
        assert optim.global_norm(updates) == pytest.approx(norm)
    narrow = optim.inject_hyperparams(optim.sgd, hyperparam_dtype="f2")(0.1)
    assert narrow.init(W).hyperparams["learning_rate"].dtype == "f2"


def test_partitions():
    def by_rank(params):
        return md.tree.map(lambda p: "matrix" if p.ndim > 1 else "others", params)

    transforms = {"matrix": optim.lion(0.1), "others": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))}
    result, _ = trained(optim.partition(transforms, by_rank), compiled=True)
    matrix, _ = trained(transforms["matrix"], {"w": PARAMS["w"]}, [{"w": g["w"]} for g in GRADIENTS])
    others, _ = trained(transforms["others"], {"b": PARAMS["b"]}, [{"b": g["b"]} for g in GRADIENTS])
    assert_trees_equal(result, {**matrix, **others}, rtol=1e-11)
    prefix, _ = trained(optim.partition(transforms, {"w": "matrix", "b": "others"}))
    assert_trees_equal(prefix, result, rtol=1e-11)
    seen = []
    local = optim.GradientTransformation(lambda p: (), lambda g, s, p=None, *, value: (seen.append(value), (g, s))[1])
    optimizer = optim.partition({0: local, 1: optim.sgd(0.1)}, [0, 1])
    optimizer.update([W, W], optimizer.init([W, W]), value=3.0, more=1)
    assert seen == [3.0]


SMALL = r"init: eps=1e-08 is 0 in the dtype of params\['w'\], f16\[3\], so updates .*: write eps={}, or keep"


def test_an_epsilon_that_is_0_in_a_dtype_warns_with_one_that_is_not():
    params, g = {"w": W.astype("f2")}, {"w": numpy.full(3, 1e-5, "f2")}
    for make, number in ((optim.adam, "2e-04"), (optim.adamw, "2e-04")):
        with pytest.warns(RuntimeWarning, match=SMALL.format(number)) as result:
            optimizer = make(0.1)
            state = optimizer.init(params)
        assert result[0].filename == __file__
        with numpy.errstate(all="ignore"):
            assert numpy.isinf(optimizer.update(g, state, params)[0]["w"]).all()
        safe = make(0.1, eps=float(number))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            updates, _ = safe.update(g, safe.init(params), params)
        assert (abs(updates["w"]) < 0.1).all()
    with pytest.warns(RuntimeWarning, match=SMALL.format("1e-07")):
        optim.scale_by_rms(eps_in_sqrt=True).init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        md.precision.with_masters(optim.adam(0.1)).init(params)
        optim.adam(0.1).init({"w": W.astype("f4")})
        optim.adam(0.1).init({"w": W.astype(ml_dtypes.bfloat16)})
        optim.adagrad(0.1).init(params)


@each
def test_none_has_no_update(optimizer):
    """In place of a gradient, or of a parameter; but an array that gets no update is a mistake."""
    whole, none = trained(optimizer, {"w": W}, [{"w": 2 * W}] * 2), {"w": W, "b": None}
    params, _ = trained(optimizer, none, [{"w": 2 * W, "b": None}] * 2)
    assert_trees_equal(params, {**whole[0], "b": None})
    state, params = optimizer.init({"w": W, "b": W}), {"w": W, "b": W}
    for _ in range(2):
        updates, state = optimizer.update({"w": 2 * W, "b": None}, state, params)
        assert updates["b"] is None
        params = {**params, **optim.apply_updates({"w": params["w"]}, {"w": updates["w"]})}
    assert_trees_equal(params, {**whole[0], "b": W})
    assert_trees_equal(optim.apply_updates(none, {"w": W, "b": W}), {"w": 2 * W, "b": None})
    assert optim.apply_updates(None, W) is None
    with pytest.raises(ValueError, match=r"updates have the structure \{'b': None, 'w': \*\}, but the parameters"):
        optim.apply_updates(params, updates)
    with pytest.raises(ValueError, match=r"update: gradients have the structure \{'b': \*, 'w': \*\}, but"):
        optimizer.update({"w": W, "b": W}, optimizer.init(none), none)


def test_masks_and_prefixes_of_them():
    zeros = md.tree.map(numpy.zeros_like, PARAMS)
    masks = [
        {"w": True, "b": False},
        {"w": True, "b": [False, False]},
        {"w": numpy.array(True), "b": [numpy.array(False), numpy.bool_(False)]},
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
    "linear": (optim.linear_schedule(1.0, 0.2, 4), {-2: 1.0, 0: 1.0, 1: 0.8, 4: 0.2, 5: 0.2, 100: 0.2}),
    "linear, one step": (optim.linear_schedule(0.0, 1.0, 1), {0: 0.0, 1: 1.0, 2: 1.0}),
    "cosine": (optim.cosine_decay_schedule(2.0, 4), {0: 2.0, 1: 1 + 0.5**0.5, 2: 1.0, 4: 0.0, 5: 0.0}),
    "cosine to alpha": (optim.cosine_decay_schedule(2.0, 4, alpha=0.5), {0: 2.0, 2: 1.5, 4: 1.0, 9: 1.0}),
    "warm-up": (
        optim.warmup_cosine_decay_schedule(0.1, 0.5, 2, 6, end_value=0.1),
        {-1: 0.1, 0: 0.1, 1: 0.3, 2: 0.5, 4: 0.3, 6: 0.1, 7: 0.1},
    ),
    "no warm-up": (optim.warmup_cosine_decay_schedule(0.1, 0.5, 0, 2), {0: 0.5, 1: 0.25, 2: 0.0, 3: 0.0}),
    "a peak of 0": (optim.warmup_cosine_decay_schedule(0.2, 0.0, 2, 4, end_value=0.2), {1: 0.1, 2: 0.0, 3: 0.0}),
    # optax's numbers
    "linear, later": (optim.linear_schedule(1.0, 0.2, 4, 3), {-1: 1.0, 2: 1.0, 3: 1.0, 4: 0.8, 5: 0.6, 7: 0.2, 8: 0.2}),
    "cosine to a power": (
        optim.cosine_decay_schedule(2.0, 4, 0.1, 2.0),
        {0: 2.0, 1: 1.5113961030679, 2: 0.65, 3: 0.2386038969321, 4: 0.2, 5: 0.2},
    ),
    "warm-up to a power": (
        optim.warmup_cosine_decay_schedule(0.2, 0.7, 2, 6, 0.1, 2.0),
        {-1: 0.2, 0: 0.2, 1: 0.45, 2: 0.7, 3: 0.537132034356, 4: 0.25, 5: 0.112867965644, 6: 0.1, 7: 0.1},
    ),
    "polynomial": (
        optim.polynomial_schedule(1.0, 0.2, 1.5, 4, 1),
        {0: 1.0, 1: 1.0, 2: 0.7196152422707, 3: 0.4828427124746, 4: 0.3, 6: 0.2, 12: 0.2},
    ),
    "exponential": (
        optim.exponential_decay(2.0, 3, 0.5, 1, end_value=0.6),
        {0: 2.0, 1: 2.0, 2: 1.587401051968, 3: 1.259921049895, 4: 1.0, 6: 0.6299605249474, 8: 0.6, 12: 0.6},
    ),
    "exponential, stairs": (
        optim.exponential_decay(2.0, 3, 1.5, 1, True, 4.0),
        {0: 2.0, 1: 2.0, 3: 2.0, 4: 3.0, 6: 3.0, 8: 4.0, 12: 4.0},
    ),
    "pieces, constant": (
        optim.piecewise_constant_schedule(2.0, {2: 0.5, 5: 3.0}),
        {0: 2.0, 1: 2.0, 2: 1.0, 4: 1.0, 5: 3.0, 12: 3.0},
    ),
    "no pieces": (optim.piecewise_constant_schedule(2.0), {0: 2.0, 7: 2.0}),
    "one cycle, linear": (
        optim.linear_onecycle_schedule(9, 0.5),
        {0: 0.02, 1: 0.26, 2: 0.5, 3: 0.404, 4: 0.308, 6: 0.116, 8: 0.010001, 9: 2e-06, 12: 2e-06},
    ),
    "one cycle, cosine": (
        optim.cosine_onecycle_schedule(9, 0.5, 0.4, 10.0, 100.0),
        {0: 0.05, 1: 0.1625, 2: 0.3875, 3: 0.5, 4: 0.4665398445952, 6: 0.25025, 8: 0.03396015540484, 9: 5e-4, 12: 5e-4},
    ),
    "joined": (
        optim.join_schedules([optim.linear_schedule(0.0, 1.0, 2), optim.polynomial_schedule(1.0, 0.0, 2, 4)], [3]),
        {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.0, 4: 0.5625, 6: 0.0625, 8: 0.0},
    ),
    "no peak": (optim.warmup_cosine_decay_schedule(0.0, 0.0, 2, 6, 0.1), {0: 0.0, 1: 0.0, 4: 0.0, 6: 0.0}),
}


@pytest.mark.parametrize("schedule, expected", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules(schedule, expected):
    compiled = md.jit(lambda step: schedule(step))
    for step, rate in expected.items():
        for result in (schedule(step), schedule(numpy.int32(step)), compiled(step)):
            numpy.testing.assert_allclose(result, rate, atol=1e-15)


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
    "decay must be at least 0, got -1": lambda: optim.trace(-1.0),
    "max_delta must be at least 0": lambda: optim.clip(-1.0),
    r"decay must be in \[0, 1\), got 1.0": lambda: optim.scale_by_rms(1.0),
    "decay_rate must be at least 5e-324, got 0.0": lambda: optim.exponential_decay(1.0, 2, 0.0),
    r"boundaries_and_scales\[3\] must be at least 0, got -1": lambda: optim.piecewise_constant_schedule(1.0, {3: -1.0}),
    "transition_steps must be at least 1": lambda: optim.cosine_onecycle_schedule(0, 1.0),
    r"static_args are \['rate'\], but the parameters are \['step_size'\]": lambda: optim.inject_hyperparams(
        optim.scale, "rate"
    ),
    r"partition: the labels are \['b', 'a'\], but transforms has \['a'\]": lambda: optim.partition(
        {"a": optim.sgd(0.1)}, {"w": "a", "v": "b"}
    ).init({"w": W, "v": W}),
    r"momentum must be in \[0, 1\), got 1": lambda: optim.sgd(0.1, momentum=1),
    "eps must be at least 0": lambda: optim.adagrad(0.1, eps=-1e-8),
    "weight_decay must be at least 0": lambda: optim.adamw(0.1, weight_decay=-1.0),
    "max_norm must be positive, got 0": lambda: optim.clip_by_global_norm(0.0),
    "max_norm must be at least 0, got -1": lambda: optim.clip_by_global_norm(-1),
    "eps_root must be at least 0, got -1": lambda: optim.adam(0.1, eps_root=-1),
    "weight_decay must be a number, or a function from the step to the rate, got str": lambda: optim.lion(
        0.1, weight_decay="0.1"
    ),
    "mode must be one of 'hard', 'smooth', 'refined', got 'soft'": lambda: optim.scale_by_lion(mode="soft"),
    "mu_dtype and accumulator_dtype must be dtypes of real floating-point numbers, got i32": lambda: optim.adam(
        0.1, mu_dtype="int32"
    ).init(W),
    "transition_begin must be at least 0, got -1": lambda: optim.linear_schedule(1.0, 0.0, 4, -1),
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
    r"apply_updates: updates have the structure \{'v': \*\}, but the parameters have \{'w'": lambda: (
        optim.apply_updates({"w": W}, {"v": W})
    ),
    r"apply_updates: updates\['w'\] has the type f64\[1\], but its parameter has f64\[3\]": lambda: optim.apply_updates(
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


# ---------------------------------------------------------------- signatures

ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0, "mu_dtype": None}

#: optax's: the parameters that have a default, and the defaults.
DEFAULTS = {
    "GradientTransformation": {},
    # optax's accumulator_dtype is float32; here None stands for the parameters' dtype, but at least float32
    "MultiSteps": {"use_grad_mean": True, "should_skip_update_fn": None, "accumulator_dtype": None},
    "adagrad": {"initial_accumulator_value": 0.1, "eps": 1e-7},
    "adam": {**ADAM, "nesterov": False},
    "adamw": {**ADAM, "weight_decay": 1e-4, "mask": None, "nesterov": False},
    "add_decayed_weights": {"weight_decay": 0.0, "mask": None},
    "apply_updates": {},
    "chain": {},
    "clip": {},
    "clip_by_global_norm": {},
    "constant_schedule": {},
    "cosine_decay_schedule": {"alpha": 0.0, "exponent": 1.0},
    "cosine_onecycle_schedule": {"pct_start": 0.3, "div_factor": 25.0, "final_div_factor": 1e4},
    "exponential_decay": {"transition_begin": 0, "staircase": False, "end_value": None},
    "global_norm": {},
    "huber_loss": {"targets": None, "delta": 1.0},
    "inject_hyperparams": {"static_args": (), "hyperparam_dtype": None},
    "join_schedules": {},
    "l2_loss": {"targets": None},
    "linear_onecycle_schedule": {"pct_start": 0.3, "pct_final": 0.85, "div_factor": 25.0, "final_div_factor": 1e4},
    "linear_schedule": {"transition_begin": 0},
    "lion": {"b1": 0.9, "b2": 0.99, "mu_dtype": None, "weight_decay": 1e-3, "mask": None},
    "partition": {},
    "piecewise_constant_schedule": {"boundaries_and_scales": None},
    "polynomial_schedule": {"transition_begin": 0},
    "scale": {},
    "scale_by_adam": {**ADAM, "nesterov": False},
    "scale_by_learning_rate": {"flip_sign": True},
    "scale_by_lion": {"b1": 0.9, "b2": 0.99, "mu_dtype": None, "mode": "hard", "smooth_beta": 1.0},
    "scale_by_rms": {
        **{"decay": 0.9, "eps": 1e-8, "initial_scale": 0.0, "eps_in_sqrt": True, "bias_correction": False},
    },
    "scale_by_rss": {"initial_accumulator_value": 0.1, "eps": 1e-7},
    "sgd": {"momentum": None, "nesterov": False, "accumulator_dtype": None},
    "sigmoid_binary_cross_entropy": {},
    "softmax_cross_entropy": {"axis": -1, "where": None},
    "softmax_cross_entropy_with_integer_labels": {"axis": -1, "where": None},
    "squared_error": {"targets": None},
    "trace": {"nesterov": False, "accumulator_dtype": None},
    "warmup_cosine_decay_schedule": {"end_value": 0.0, "exponent": 1.0},
}


def test_defaults_are_those_of_optax():
    """`python -m tests.benchmarks.optax_signatures` compares them with those of the installed one."""
    assert {*DEFAULTS} == {*optim.__all__}
    for name, defaults in DEFAULTS.items():
        parameters = inspect.signature(getattr(optim, name)).parameters.values()
        result = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert [*result.items()] == [*defaults.items()], name  # in the same order
    for call in (
        lambda: optim.adam(0.1, 0.9, 0.999, 1e-8, 0.0, None, True),
        lambda: optim.scale_by_learning_rate(0.1, False),
    ):
        with pytest.raises(TypeError, match="positional"):
            call()


def test_no_momentum_is_none_or_0():
    for momentum in (None, 0, 0.0):
        assert_trees_equal(trained(optim.sgd(0.1, momentum)), trained(optim.sgd(0.1)))


# ---------------------------------------------------------------- losses

LABELS, LOGITS = numpy.array([2, 0, 1]), RNG.normal(size=(3, 4))

#: (loss, predictions, targets, by hand)
LOSSES = [
    (optim.squared_error, LOGITS, LOGITS + 1, lambda x, y: (x - y) ** 2),
    (optim.l2_loss, LOGITS, LOGITS + 3, lambda x, y: (x - y) ** 2 / 2),
    (
        optim.huber_loss,
        3 * LOGITS,
        LOGITS,
        lambda x, y: numpy.where(abs(x - y) < 1, (x - y) ** 2 / 2, abs(x - y) - 0.5),
    ),
    (optim.sigmoid_binary_cross_entropy, LOGITS, LOGITS % 1, lambda x, y: -(y * nlog(x) + (1 - y) * nlog(-x))),
    (optim.softmax_cross_entropy, LOGITS, numpy.eye(4)[LABELS], lambda x, y: -(y * log_probabilities(x)).sum(-1)),
    (
        optim.softmax_cross_entropy_with_integer_labels,
        LOGITS,
        LABELS,
        lambda x, y: -log_probabilities(x)[numpy.arange(3), y],
    ),
]


def nlog(x):
    return -numpy.log(1 + numpy.exp(-x))


def log_probabilities(x):
    return numpy.log(numpy.exp(x) / numpy.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("loss, x, y, by_hand", LOSSES, ids=lambda x: getattr(x, "__name__", ""))
def test_losses_are_their_formulas(loss, x, y, by_hand):
    numpy.testing.assert_allclose(loss(x, y), by_hand(x, y), rtol=1e-12)
    numpy.testing.assert_allclose(md.jit(loss)(x, y), by_hand(x, y), rtol=1e-12)
    md.testing.check_grads(lambda x: loss(x, y), (x,), order=2)


def test_losses_of_large_numbers_are_finite():
    x = numpy.array([1e4, -1e4, 0.0])
    assert optim.softmax_cross_entropy(x, numpy.eye(3)[0]) == 0
    assert optim.softmax_cross_entropy(numpy.array([0.0, -numpy.inf]), numpy.array([1.0, 0.0])) == 0
    assert optim.sigmoid_binary_cross_entropy(x, numpy.array([1.0, 0.0, 1.0])).tolist()[:2] == [0, 0]
    for loss in (optim.sigmoid_binary_cross_entropy, optim.huber_loss):
        gradient = md.grad(lambda x, loss=loss: numpy.sum(loss(x, numpy.array([1.0, 0.0, 1.0]))))(x)
        assert numpy.isfinite(gradient).all()


def test_softmax_cross_entropy_in_labels_of_0():
    logits, labels = numpy.array([0.5, -1.0, 2.0]), numpy.array([1.0, 0.0, 0.0])
    for g in (md.grad(optim.softmax_cross_entropy, 1), md.jit(md.grad(optim.softmax_cross_entropy, 1))):
        numpy.testing.assert_allclose(g(logits, labels), numpy.log(numpy.exp(logits).sum()) - logits, rtol=1e-14)
