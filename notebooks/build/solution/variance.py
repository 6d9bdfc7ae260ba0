"""Step 6: the variance in types, three more collectives, and the pbroadcasts that make operands agree."""

import numpy as np

from .forward import jvp_rules, linear
from .ranks import (
    all_gather_p,
    alone,
    collectives,
    longer,
    psum_p,
    psum_scatter_p,
    run_all_gather,
    same,
    shorter,
    sizes,
)
from .reverse import transpose_rules
from .tape import variance_rules
from .tracer import Operation, Tracer, casts, typeof

pbroadcast_p = Operation("pbroadcast", alone, same)
all_gather_invariant_p = Operation("all_gather_invariant", alone, longer)
pscatter_p = Operation("pscatter", alone, shorter)


def pbroadcast(x, axis):
    """The same value on every rank, as one that may vary. Nothing moves."""
    return pbroadcast_p(x, axis=axis)


def all_gather_invariant(x, axis):
    """As all_gather, and the type says that all ranks have the same."""
    return all_gather_invariant_p(x, axis=axis, size=sizes[axis])


def pscatter(x, axis):
    """Each rank's block of a value that all ranks have. Nothing moves."""
    return pscatter_p(x, axis=axis, size=sizes[axis])


# How simulated ranks run them.
collectives.update(
    {
        all_gather_invariant_p: run_all_gather,  # it is all_gather with another type
        # HOLE 6.1 [2 points]
        # Nothing moves in the other two. One line each for pbroadcast_p and pscatter_p, as functions of `blocks` and
        # the params that return a list of blocks.
        pbroadcast_p: lambda blocks, axis: blocks,
        pscatter_p: lambda blocks, axis, size: [np.split(x, size)[rank] for rank, x in enumerate(blocks)],
        # END
    }
)

#: What a collective takes along its axis, and what it returns: a varying value (True), or an invariant one (False).
variances = {
    # HOLE 6.2 [2 points]
    # One line for each of the six: psum_p, pbroadcast_p, all_gather_p, psum_scatter_p,
    # all_gather_invariant_p, pscatter_p.
    psum_p: (True, False),
    pbroadcast_p: (False, True),
    all_gather_p: (True, True),
    psum_scatter_p: (True, True),
    all_gather_invariant_p: (True, False),
    pscatter_p: (False, True),
    # END
}


def collective_rule(op):
    """The variance of a collective's result, from that of its operand."""

    def rule(varying, axis, size=None):
        takes, returns = variances[op]
        # HOLE 6.3 [2 points]
        # `varying` is a set of axes. If `axis in varying` is not what the collective takes, raise a TypeError
        # that names the operation and the axis. Return the set with the axis in it, or without it.
        if (axis in varying) != takes:
            found, wanted = ("varying", "invariant") if axis in varying else ("invariant", "varying")
            raise TypeError(f"{op} takes a value that is {wanted} along {axis!r}, and this one is {found}")
        return varying | {axis} if returns else varying - {axis}
        # END

    return rule


def same_variance(op, args, params):
    """Insert pbroadcasts where a tracer is invariant, and another operand or the collective wants it to be varying."""
    wanted = frozenset().union(*(typeof(x).varying for x in args))
    if op in variances and variances[op][0]:
        wanted |= {params["axis"]}
    return [vary(x, wanted) if isinstance(x, Tracer) else x for x in args]


def vary(x, axes):
    """A value that varies along these axes, too: pbroadcast along those that it does not vary along yet."""
    # HOLE 6.4 [3 points]
    # A value that is used twice must get only one pbroadcast, since each one's transpose is an all-reduce. So
    # keep the result in `casts_of(x)`, a dictionary that belongs to x, by its axis.
    for axis in sorted(axes - typeof(x).varying):
        if axis not in casts_of(x):
            casts_of(x)[axis] = pbroadcast(x, axis)
        x = casts_of(x)[axis]
    return x
    # END


def casts_of(x):
    """The pbroadcasts of a tracer so far: axis -> result."""
    return vars(x).setdefault("casts", {})


casts.insert(0, same_variance)  # before same_shape: the psum that it transposes to is of the smaller value

transpose_rules.update(
    {
        # HOLE 6.5 [3 points]
        # One line for each of the six: rule(ct, x, **params) returns a list of one cotangent. Use the
        # operations, which end with _p: they take the params as they are.
        psum_p: lambda ct, x, **params: [pbroadcast_p(ct, **params)],
        pbroadcast_p: lambda ct, x, **params: [psum_p(ct, **params)],
        all_gather_p: lambda ct, x, **params: [psum_scatter_p(ct, **params)],
        psum_scatter_p: lambda ct, x, **params: [all_gather_p(ct, **params)],
        all_gather_invariant_p: lambda ct, x, **params: [pscatter_p(ct, **params)],
        pscatter_p: lambda ct, x, **params: [all_gather_invariant_p(ct, **params)],
        # END
    }
)
for op in variances:
    jvp_rules[op] = linear(op)
    variance_rules[op] = collective_rule(op)
