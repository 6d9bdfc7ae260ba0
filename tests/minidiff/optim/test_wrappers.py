"""Transformations around optimizers, by optax's numbers; `wrappers.md` shows their steps."""

import minidiff as md
from minidiff import optim
from tests.checks.samples import each
from tests.minidiff.optim import GRADIENTS, PARAMS, assert_trees_equal, check_optax, trained

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


def test_parts_are_trained_as_if_alone():
    transforms = {"matrix": optim.lion(0.1), "others": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))}
    matrix, _ = trained(transforms["matrix"], {"w": PARAMS["w"]}, [{"w": g["w"]} for g in GRADIENTS])
    others, _ = trained(transforms["others"], {"b": PARAMS["b"]}, [{"b": g["b"]} for g in GRADIENTS])
    by_rank = lambda params: md.tree.map(lambda p: "matrix" if p.ndim > 1 else "others", params)  # noqa: E731
    for labels in (by_rank, {"w": "matrix", "b": "others"}):
        result, _ = trained(optim.partition(transforms, labels), compiled=True)
        assert_trees_equal(result, {**matrix, **others}, rtol=1e-11)
