"""Transformations around optimizers: steps that add up, settings in the state, parts of the parameters."""

import numpy
import pytest

import minidiff as md
from minidiff import optim
from tests.checks.samples import each
from tests.minidiff.optim import GRADIENTS, PARAMS, assert_trees_equal, check_optax, trained

W = numpy.ones(3)

#: By the names of `optax.txt`.
WRAPPED = {
    "two steps": optim.MultiSteps(optim.adam(0.1), 2).gradient_transformation(),
    "more and more steps, sums": optim.MultiSteps(optim.sgd(0.1, 0.9), lambda update: 1 + update, use_grad_mean=False),
    "injected": optim.inject_hyperparams(optim.adamw)(optim.exponential_decay(0.1, 2, 0.5), b1=0.8, weight_decay=0.1),
    "partition": optim.partition({"a": optim.adam(0.1), 0: optim.sgd(0.5)}, {"w": "a", "b": 0}),
}


@each("name", WRAPPED)
def test_numbers_of_optax(name):
    check_optax(name, WRAPPED[name])


@each("jit", [lambda f: f, md.jit], ["eager", "compiled"])
def test_a_step_whose_gradient_is_not_finite_is_left_out(jit):
    finite = md.precision.all_finite
    steps = optim.MultiSteps(optim.sgd(1.0), 2, should_skip_update_fn=lambda g, *_: (~finite(g), finite(g)))
    update, state, seen = jit(steps.update), steps.init(W), []
    for g in (1.0, numpy.inf, 3.0, numpy.nan, 5.0):
        with numpy.errstate(invalid="ignore"):
            updates, state = update(g * W, state, W)
        seen.append((float(updates[0]), bool(steps.has_updated(state)), bool(state.skip_state)))
    none = [(0.0, False, True), (0.0, False, False)]
    assert seen == [*none, (-2.0, True, True), (0.0, True, False), (0.0, False, True)]


def test_sums_of_gradients_are_in_float32():
    steps = optim.MultiSteps(optim.sgd(1.0), 4, use_grad_mean=False)
    state, one = steps.init(numpy.ones(1, "f2")), numpy.array([1.0], "f2")
    for g in (2048 * one, one, one, one):
        updates, state = steps.update(g, state)
        assert (updates.dtype, state.acc_grads.dtype) == ("f2", "f4")
    assert updates[0] == -numpy.float16(2051)  # in float16, 2048 + 1 is 2048
    assert optim.MultiSteps(optim.sgd(1.0), 4, accumulator_dtype="f8").init(one).acc_grads.dtype == "f8"
    assert steps.init(W).acc_grads.dtype == float


def test_settings_are_in_the_state():
    inject = optim.inject_hyperparams(optim.adamw, static_args="b2")
    optimizer = inject(optim.linear_schedule(1.0, 0.0, 4), mask=None, nesterov=True)
    params = {"w": numpy.ones(3, "f4")}
    state, update = optimizer.init(params), md.jit(optimizer.update)
    assert {*state.hyperparams} == {"learning_rate", "b1", "eps", "eps_root", "weight_decay"}
    assert {x.dtype for x in state.hyperparams.values()} == {numpy.dtype("f4")}
    for rate in (1.0, 0.75, 0.5):
        _, state = update(params, state, params)
        assert state.hyperparams["learning_rate"] == rate
    narrow = optim.inject_hyperparams(optim.sgd, hyperparam_dtype="f2")(0.1)
    assert narrow.init(W).hyperparams["learning_rate"].dtype == "f2"


def test_parts_are_trained_as_if_alone():
    transforms = {"matrix": optim.lion(0.1), "others": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))}
    matrix, _ = trained(transforms["matrix"], {"w": PARAMS["w"]}, [{"w": g["w"]} for g in GRADIENTS])
    others, _ = trained(transforms["others"], {"b": PARAMS["b"]}, [{"b": g["b"]} for g in GRADIENTS])
    by_rank = lambda params: md.tree.map(lambda p: "matrix" if p.ndim > 1 else "others", params)  # noqa: E731
    for labels in (by_rank, {"w": "matrix", "b": "others"}):
        result, _ = trained(optim.partition(transforms, labels), compiled=True)
        assert_trees_equal(result, {**matrix, **others}, rtol=1e-11)


def test_further_arguments_reach_the_transformations_that_take_them():
    seen = []

    def some(gradients, state, params=None, *, value):
        seen.append(("some", value))
        return md.tree.map(lambda g: g / value, gradients), state

    def every(gradients, state, params=None, **extra):
        seen.append(("every", sorted(extra)))
        return gradients, state

    some, every = (optim.GradientTransformation(lambda params: (), update) for update in (some, every))
    optimizer = optim.chain(optim.chain(some, optim.sgd(0.1)), every, optim.adam(0.1))
    state = optimizer.init(1.0)
    assert float(optimizer.update(3.0, state, 1.0, value=2.0, more=3.0)[0]) == pytest.approx(0.1)
    assert seen == [("some", 2.0), ("every", ["more", "value"])]
    parts = optim.partition({0: some, 1: optim.sgd(0.1)}, [0, 1])
    parts.update([W, W], parts.init([W, W]), value=3.0, more=1)
    assert seen[2:] == [("some", 3.0)]
    assert float(md.jit(optim.chain(some).update)(3.0, ((),), value=2.0)[0]) == 1.5
    with pytest.raises(TypeError):
        optimizer.update(3.0, state, 1.0)
