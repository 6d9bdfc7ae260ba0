"""Wrappers of transformations: gradient accumulation, settings in the state, a transformation for each group."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof
from minidiff.ops.base import convert
from minidiff.ops.elementwise import where
from minidiff.optim.transformations import FIRST_STEP, GradientTransformation, accept_extra_args, check_state, full_like
from minidiff.values.dtypes import accumulator_dtype as wide
from minidiff.values.dtypes import dtype_of, is_differentiable, result_type

__all__ = ["MultiSteps", "inject_hyperparams", "partition"]


class MultiStepsState(NamedTuple):
    """State of `MultiSteps`: the counts of steps and updates, the optimizer's state, the sums of the gradients."""

    mini_step: Value
    gradient_step: Value
    inner_opt_state: Any
    acc_grads: Any
    skip_state: Any


class InjectHyperparamsState(NamedTuple):
    """State of `inject_hyperparams`: the number of steps, the settings by name, the optimizer's state."""

    count: Value
    hyperparams: dict[str, Value]
    inner_state: Any


class PartitionState(NamedTuple):
    """State of `partition`: that of the transformation of each label."""

    inner_states: dict[Any, Any]


class MultiSteps:
    """Gradient accumulation: one step of an optimizer for several calls, with the mean of their gradients.

    Other steps have updates of 0. In a chain, use `gradient_transformation()`.

    Args:
        opt: the optimizer.
        every_k_schedule: the number of gradients of a step, or a function from the number of updates to that number.
        use_grad_mean: whether the optimizer gets the mean of the gradients; otherwise their sum.
        should_skip_update_fn: a function of (gradients, update, params). It returns whether to skip a step, and
            the new `skip_state` of the state.
        accumulator_dtype: the dtype of the sums; None for that of the parameters, but at least float32.

    >>> from minidiff.optim import sgd
    >>> optimizer = MultiSteps(sgd(0.1), 2)
    >>> state = optimizer.init(1.0)
    >>> for gradient in (2.0, 4.0):
    ...     update, state = optimizer.update(gradient, state)
    ...     print(float(update), bool(optimizer.has_updated(state)))
    0.0 False
    -0.30000000000000004 True
    """

    def __init__(
        self,
        opt: GradientTransformation,
        every_k_schedule: int | Callable[[Value], Value],
        use_grad_mean: bool = True,
        should_skip_update_fn: Callable[[Any, Value, Any], tuple[Value, Any]] | None = None,
        accumulator_dtype: Any = None,
    ):
        self.inner_opt, self._mean, self._dtype = opt, use_grad_mean, accumulator_dtype
        self._steps = every_k_schedule if callable(every_k_schedule) else lambda update: every_k_schedule
        self._skip = should_skip_update_fn or (lambda gradients, update, params: (numpy.False_, ()))

    def init(self, params: Any) -> MultiStepsState:
        """Return the state: no steps, and sums of 0.

        Args:
            params: a tree of floating-point arrays.

        Returns:
            A `MultiStepsState`.
        """
        zeros = full_like(params, 0, self._dtype)
        sums = zeros if self._dtype else tree.map(lambda z: convert(z, wide(typeof(z).dtype)), zeros)
        skip_state = self._skip(zeros, FIRST_STEP, params)[1]
        return MultiStepsState(FIRST_STEP, FIRST_STEP, self.inner_opt.init(params), sums, skip_state)

    def update(
        self, gradients: Any, state: MultiStepsState, params: Any = None, **extra: Any
    ) -> tuple[Any, MultiStepsState]:
        """Add up gradients; return the optimizer's updates after enough of them, otherwise updates of 0.

        Args:
            gradients: a tree like the parameters.
            state: the state that `init` or the last update returned.
            params: the parameters, if the optimizer needs them.
            extra: keyword arguments of the optimizer's update.

        Returns:
            The updates, and the new state.
        """
        steps, done, inner, sums, _ = state
        skip, skip_state = self._skip(gradients, done, params)
        last = steps >= self._steps(done) - 1

        def choose(condition: Value, on_true: Any, on_false: Any) -> Any:
            return tree.map(lambda x, y: convert(where(condition, x, y), typeof(y).dtype), on_true, on_false)

        def added(g: Value, s: Value) -> Value:
            return convert(s + (g - s) / (steps + 1) if self._mean else s + g, typeof(s).dtype)

        total = tree.map(added, gradients, check_state(gradients, sums))
        mean = tree.map(lambda s, g: convert(s, typeof(g).dtype), total, gradients)
        updates, new_inner = accept_extra_args(self.inner_opt.update)(mean, inner, params, **extra)
        zero_updates, zero_sums = (
            tree.map(lambda x: convert(where(False, x, 0), typeof(x).dtype), y) for y in (updates, sums)
        )
        updates, new_inner = choose(last & ~skip, (updates, new_inner), (zero_updates, inner))
        total = choose(skip, sums, choose(last, zero_sums, total))
        steps, done = where(skip, steps, where(last, 0, steps + 1)), done + (last & ~skip)
        return updates, MultiStepsState(steps, done, new_inner, total, skip_state)

    def has_updated(self, state: MultiStepsState) -> Value:
        """Return whether the step that returned this state updated the parameters."""
        return (state.mini_step == 0) & (state.gradient_step > 0)

    def gradient_transformation(self) -> GradientTransformation:
        """Return the pair of `init` and `update`, for a chain."""
        return GradientTransformation(self.init, self.update)


def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: Any = None,
) -> Callable[..., GradientTransformation]:
    """Store the settings of an optimizer in its state, where they can be read and changed between steps.

    Numbers among the arguments, and the values of functions of the step, are `state.hyperparams`.

    Args:
        inner_factory: a function that makes an optimizer, such as `sgd`.
        static_args: the names of arguments that are not stored.
        hyperparam_dtype: the dtype of the settings; None for that of the parameters.

    Returns:
        A function with the arguments of `inner_factory`.

    Raises:
        ValueError: for static arguments that the factory does not have.

    >>> from minidiff.optim import sgd
    >>> optimizer = inject_hyperparams(sgd)(learning_rate=0.1)
    >>> state = optimizer.init(1.0)
    >>> state.hyperparams['learning_rate'] = 0.5
    >>> float(optimizer.update(2.0, state)[0])
    -1.0
    """
    signature = inspect.signature(inner_factory)
    static = {static_args} if isinstance(static_args, str) else {*static_args}
    if not static <= {*signature.parameters}:
        raise ValueError(f"static_args are {sorted(static)}, but the parameters are {[*signature.parameters]}")

    @functools.wraps(inner_factory)
    def make(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        dynamic = {name: x for name, x in bound.arguments.items() if name not in static and not isinstance(x, bool)}
        schedules = {name: x for name, x in dynamic.items() if callable(x)}
        fixed = {name: x for name, x in dynamic.items() if isinstance(x, (numbers.Real, numpy.ndarray, Tracer))}

        def settings(values: Mapping[str, Any], count: Value, like: Any) -> dict[str, Value]:
            dtype = hyperparam_dtype and dtype_of(hyperparam_dtype)
            dtype = dtype or result_type(*[typeof(x).dtype for x in tree.leaves(like)])
            values = {**values, **{name: schedule(count) for name, schedule in schedules.items()}}
            return {name: convert(x, dtype) if is_differentiable(typeof(x).dtype) else x for name, x in values.items()}

        def inner(hyperparams: Mapping[str, Value]) -> GradientTransformation:
            arguments = inspect.BoundArguments(signature, {**bound.arguments, **hyperparams})
            return inner_factory(*arguments.args, **arguments.kwargs)

        def init(params: Any) -> InjectHyperparamsState:
            hyperparams = settings(fixed, FIRST_STEP, params)
            return InjectHyperparamsState(FIRST_STEP, hyperparams, inner(hyperparams).init(params))

        def update(
            gradients: Any, state: InjectHyperparamsState, params: Any = None, **extra: Any
        ) -> tuple[Any, InjectHyperparamsState]:
            hyperparams = settings(state.hyperparams, state.count, gradients if params is None else params)
            updates, new_inner = accept_extra_args(inner(hyperparams).update)(
                gradients, state.inner_state, params, **extra
            )
            return updates, InjectHyperparamsState(state.count + 1, hyperparams, new_inner)

        return GradientTransformation(init, update)

    return make


def partition(transforms: Mapping[Any, GradientTransformation], param_labels: Any) -> GradientTransformation:
    """Apply the transformation that each parameter's label names.

    A transformation sees None for the parameters of others.

    Args:
        transforms: transformations by label.
        param_labels: a tree of labels (strings or integers) like the parameters, a prefix of one, or a function from
            the parameters to such a tree.

    Returns:
        A `GradientTransformation`.

    Raises:
        ValueError: for a label that no transformation has.

    >>> from minidiff.optim import sgd
    >>> optimizer = partition({'slow': sgd(0.1), 'fast': sgd(1.0)}, {'w': 'slow', 'b': 'fast'})
    >>> params = {'w': 1.0, 'b': 1.0}
    >>> updates, state = optimizer.update({'w': 2.0, 'b': 2.0}, optimizer.init(params), params)
    >>> float(updates['w']), float(updates['b'])
    (-0.2, -2.0)
    """
    updates_of = {label: accept_extra_args(t.update) for label, t in transforms.items()}

    def labels_of(values: Any) -> list:
        labels = param_labels(values) if callable(param_labels) else param_labels
        labels = tree.broadcast_prefix(labels, values, lambda x: isinstance(x, (str, int)), "param_labels")
        if not {*labels} <= {*transforms}:
            raise ValueError(
                f"partition: the labels are {[*dict.fromkeys(labels)]}, but transforms has {[*transforms]}"
            )
        return labels

    def only(label: Any, labels: list, values: Any) -> Any:
        each = iter(labels)
        return values if values is None else tree.map(lambda x: x if next(each) == label else None, values)

    def init(params: Any) -> PartitionState:
        labels = labels_of(params)
        return PartitionState({label: t.init(only(label, labels, params)) for label, t in transforms.items()})

    def update(gradients: Any, state: PartitionState, params: Any = None, **extra: Any) -> tuple[Any, PartitionState]:
        labels, updates_by_label, states = labels_of(gradients), {}, {}
        for label, one in updates_of.items():
            group = [only(label, labels, x) for x in (gradients, params)]
            updates, states[label] = one(group[0], state.inner_states[label], group[1], **extra)
            updates_by_label[label] = iter(tree.leaves(updates))
        merged = [next(updates_by_label[label]) for label in labels]
        return tree.unflatten(tree.structure(gradients), merged), PartitionState(states)

    return GradientTransformation(init, update)
