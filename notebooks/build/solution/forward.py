"""Step 3: forward mode."""

from .operations import add, broadcast_to, cos, matmul, multiply, positive, sin, sum, transpose
from .tape import as_list
from .tracer import Tracer, current, typeof, using


class Dual(Tracer):
    """A primal and a tangent: a value, and its derivative in one direction."""

    def __init__(self, interpreter, primal, tangent):
        super().__init__(interpreter, typeof(primal))
        self.primal, self.tangent = primal, tangent


class JVP:
    """The interpreter that pushes tangents through operations. A tangent of zero is None."""

    def __init__(self, below):
        self.below = below

    def join(self, primal, tangent):
        return primal if tangent is None else Dual(self, primal, tangent)

    def split(self, xs):
        """Primals and tangents of some values; those that are not this interpreter's own are constants."""
        # HOLE 3.1 [2 points]
        # Return two lists. A value is this interpreter's own if it is a Dual whose `interpreter` is `self`.
        own = [isinstance(x, Dual) and x.interpreter is self for x in xs]
        primals = [x.primal if yes else x for x, yes in zip(xs, own)]
        tangents = [x.tangent if yes else None for x, yes in zip(xs, own)]
        return primals, tangents
        # END

    def process(self, op, args, params):
        primals, tangents = self.split(args)
        if all(t is None for t in tangents):
            return self.below.process(op, args, params)
        # HOLE 3.2 [2 points]
        # `jvp_rules[op](primals, tangents, **params)` returns the result and its tangent. Call it while the
        # interpreter below is current, and join the two. If `op.many`, both are lists: then join each pair.
        with using(self.below):
            out, tangent = jvp_rules[op](primals, tangents, **params)
        return list(map(self.join, out, tangent)) if op.many else self.join(out, tangent)
        # END


def jvp(f, primals, tangents):
    """The results of `f`, and their derivatives in the direction of the tangents: two lists."""
    forward = JVP(current())
    duals = [forward.join(x, t) for x, t in zip(primals, tangents)]
    with using(forward):
        results = as_list(f(*duals))
    return forward.split(results)


def plus(x, y):
    """The sum of two tangents, or cotangents, of which either may be zero (None)."""
    return y if x is None else x if y is None else add(x, y)


def linear(op):
    """The rule of an operation that is linear in its only operand: the tangent goes through the same operation."""

    def rule(primals, tangents, **params):
        # HOLE 3.3 [1 point]
        # Return the result and its tangent.
        return op(*primals, **params), op(*tangents, **params)
        # END

    return rule


def product(op):
    """The rule of an operation that is linear in each of two operands, if the other one stays as it is."""

    def rule(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        # HOLE 3.4 [2 points]
        # The product rule. A tangent that is None adds no term; `plus` knows that.
        left = None if dx is None else op(dx, y)
        right = None if dy is None else op(x, dy)
        return op(x, y), plus(left, right)
        # END

    return rule


def chain(op, derivative):
    """The rule of an elementwise function of one operand, whose derivative at x is derivative(x)."""
    return lambda primals, tangents: (op(*primals), multiply(*tangents, derivative(*primals)))


def add_rule(primals, tangents):
    """A sum is linear in its two operands together."""
    return add(*primals), plus(*tangents)


jvp_rules = {
    add: add_rule,
    # HOLE 3.5 [2 points]
    # One line for each of multiply, matmul, sum, broadcast_to, transpose, sin and cos: `linear`, `product` or
    # `chain`.
    multiply: product(multiply),
    matmul: product(matmul),
    sum: linear(sum),
    broadcast_to: linear(broadcast_to),
    transpose: linear(transpose),
    sin: chain(sin, cos),
    cos: chain(cos, lambda x: -1.0 * sin(x)),
    # END
    positive: lambda primals, tangents: (positive(*primals), None),  # a step: its derivative is zero
}
