"""Step 3: forward mode."""

from functools import partial

import numpy as np

from .operations import (
    add,
    broadcast_to,
    cos,
    matmul,
    multiply,
    positive,
    sin,
    sum,
    transpose,
)
from .tape import as_list
from .tracer import Tracer, current, owner, typeof, using


class JVP:
    """The interpreter that pushes tangents through operations: a tracer's content is
    its primal and its tangent.
    """

    def __init__(self, below):
        self.below = below

    def join(self, primal, tangent):
        return (
            primal
            if tangent is None
            else Tracer(self, typeof(primal), (primal, tangent))
        )

    def split(self, xs):
        """Primals and tangents of some values; those that are not this interpreter's
        own are constants.
        """
        # HOLE 3.1 [2 points]
        # Return two lists. A value is this interpreter's own if its `owner` is `self`;
        # its `content` is then a primal and a tangent. Any other value is a primal, and
        # its tangent is zero, which is None.
        pairs = [x.content if owner(x) is self else (x, None) for x in xs]
        return [primal for primal, _ in pairs], [tangent for _, tangent in pairs]
        # END

    def process(self, op, args, params):
        primals, tangents = self.split(args)
        if all(t is None for t in tangents):
            return self.below.process(op, args, params)
        # HOLE 3.2 [2 points]
        # `jvp_rules[op](primals, tangents, **params)` returns the result and its
        # tangent. Call it while the interpreter below is current, and join the two. If
        # `op.many`, both are lists: then join each pair.
        with using(self.below):
            out, tangent = jvp_rules[op](primals, tangents, **params)
        return (
            list(map(self.join, out, tangent)) if op.many else self.join(out, tangent)
        )
        # END


def jvp(f, primals, tangents):
    """The results of `f`, and their derivatives in the direction of the tangents: two
    lists.
    """
    forward = JVP(current())
    with using(forward):
        results = as_list(f(*map(forward.join, primals, tangents)))
    results, tangents = forward.split(results)
    return results, [zeros_if_none(t, x) for t, x in zip(tangents, results)]


def zeros_if_none(t, x):
    """A tangent, or a cotangent, of x as an array, for those who do not know that None
    is zero.
    """
    return np.zeros(typeof(x).shape) if t is None else t


def plus(x, y):
    """The sum of two tangents, or cotangents, of which either may be zero (None)."""
    return y if x is None else x if y is None else add(x, y)


def linear(op, primals, tangents, **params):
    """The rule of an operation that is linear in its only operand: the tangent goes
    through the same operation.
    """
    # HOLE 3.3 [1 point]
    # Return the result and its tangent.
    return op(*primals, **params), op(*tangents, **params)
    # END


def product(op, primals, tangents):
    """The rule of an operation that is linear in each of two operands while the other
    is fixed.
    """
    (x, y), (dx, dy) = primals, tangents
    # HOLE 3.4 [2 points]
    # The product rule. A tangent that is None adds no term; `plus` knows that.
    left = None if dx is None else op(dx, y)
    right = None if dy is None else op(x, dy)
    return op(x, y), plus(left, right)
    # END


def chain(op, derivative, primals, tangents):
    """The rule of an elementwise function of one operand, whose derivative at x is
    derivative(x).
    """
    return op(*primals), multiply(*tangents, derivative(*primals))


# operation -> rule(primals, tangents, **params): the result, and its tangent
jvp_rules = {
    # linear in its two operands together
    add: lambda primals, tangents: (add(*primals), plus(*tangents)),
    # a step: its derivative is zero
    positive: lambda primals, tangents: (positive(*primals), None),
    sum: partial(linear, sum),
    # HOLE 3.5 [2 points]
    # One line for each of broadcast_to, transpose, multiply, matmul, sin and cos:
    # `linear`, `product` or `chain`. Derivatives are written with operations, too,
    # because they are differentiated again: there is no unary minus.
    broadcast_to: partial(linear, broadcast_to),
    transpose: partial(linear, transpose),
    multiply: partial(product, multiply),
    matmul: partial(product, matmul),
    sin: partial(chain, sin, cos),
    cos: partial(chain, cos, lambda x: -1.0 * sin(x)),
    # END
}
