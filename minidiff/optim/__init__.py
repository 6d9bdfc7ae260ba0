"""Optimizers, with the API of `optax`: gradient transformations that compose.

A `GradientTransformation` is a pair of functions: `init(params)` makes the state, and `update(gradients, state,
params)` returns the updates and the new state. `apply_updates` adds the updates to the parameters. `chain` composes
transformations, and an optimizer is a chain: Adam is `chain(scale_by_adam(), scale_by_learning_rate(rate))`. A learning
rate is a number, or a schedule: a function of the step number, which starts at 0, to the rate.

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

import numpy  # noqa: F401  (examples in docstrings use it)

from minidiff import tree  # noqa: F401
from minidiff.errors.other_libraries import finish_module
from minidiff.optim import losses, schedules, transformations, wrappers
from minidiff.optim.losses import *  # noqa: F403
from minidiff.optim.schedules import *  # noqa: F403
from minidiff.optim.transformations import *  # noqa: F403
from minidiff.optim.wrappers import *  # noqa: F403

__all__ = []
__all__ += losses.__all__
__all__ += schedules.__all__
__all__ += transformations.__all__
__all__ += wrappers.__all__

finish_module(globals())
