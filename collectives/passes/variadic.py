"""Collectives of several values in one call, into which passes fuse those of one value."""

from __future__ import annotations

import functools

from collectives.collective import Collective
from minidiff.core.tape import Equation
from minidiff.core.types import typeof
from minidiff.errors.location import fuse_locations, split_location
from minidiff.ops.shape import broadcast_to, expand_dims


class Variadic(Collective):
    """A collective on several values in one call; its rules derive from `of`'s.

    The values have the same dtype; along other axes their variances may differ. (This is meant for all-reduces, which
    are elementwise: the shapes of the operands do not matter.)
    """

    multiple_results = True

    def __init__(self, of: Collective):
        super().__init__(of.name, of.takes, of.gives, cost=of.cost, one_result=of.one_result, sums=of.sums)
        self.per_operand = of

    def typecheck(self, types, params):
        if len({t.dtype for t in types}) > 1:
            raise TypeError(f"{self.name} of several values takes one dtype, got {', '.join(map(str, types))}")
        return [t for x in types for t in self.per_operand.typecheck([x], params)]

    def check_fits(self, types, params, scope):
        for x in types:
            self.per_operand.check_fits([x], params, scope)

    def jvp(self, primals, tangents, params):
        active = [i for i, t in enumerate(tangents) if t is not None]
        moved = dict(zip(active, self.bind(*[tangents[i] for i in active], **params)))
        return self.bind(*primals, **params), [moved.get(i) for i in range(len(primals))]

    def transpose(self, cts, operands, params):
        return [None if ct is None else self.per_operand.transpose(ct, [x], params)[0] for ct, x in zip(cts, operands)]

    def without_unused_results(self, eqn, used):
        wanted = [i for i, is_used in enumerate(used) if is_used]
        inputs, outputs = ([atoms[i] for i in wanted] for atoms in (eqn.inputs, eqn.outputs))
        sources = split_location(eqn.source, len(used))
        one = self if len(wanted) > 1 else self.per_operand
        return Equation(one, inputs, eqn.params, outputs, fuse_locations([sources[i] for i in wanted]))

    def batch(self, args, batched, params):
        size = next(x.shape[0] for x, is_batched in zip(args, batched) if is_batched)
        results = self.bind(*args, **params)
        return [
            x if is_batched else broadcast_to(expand_dims(x, 0), (size, *typeof(x).shape))
            for x, is_batched in zip(results, batched)
        ]

    def batch_along(self, batch, args, params):
        return [self.per_operand.batch_along(batch, [x], params) for x in args]


#: `variadic(psum_p)` is `psum` of several values.
variadic = functools.cache(Variadic)
