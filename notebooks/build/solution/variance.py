"""Step 6: the variance in types, three more collectives, and the pbroadcasts that make
operands agree.
"""

from functools import partial

import numpy as np

from .forward import jvp_rules, linear
from .ranks import (
    all_gather,
    alone,
    collectives,
    longer,
    psum,
    psum_scatter,
    run_all_gather,
    shorter,
)
from .reverse import transpose_rules
from .tracer import Operation, Tracer, casts, typeof

# the same value on every rank, as one that may vary
pbroadcast = Operation("pbroadcast", alone, lambda x, axis: x)
# as all_gather, with another type
all_gather_invariant = Operation("all_gather_invariant", alone, longer)
# each rank's block of a value that all ranks have
pscatter = Operation("pscatter", alone, shorter)

collectives[all_gather_invariant] = run_all_gather
# HOLE 6.1 [2 points]
# Nothing moves in the other two. Put functions from `blocks` to a list of blocks into
# `collectives` for them.
collectives[pbroadcast] = lambda blocks: blocks
collectives[pscatter] = lambda blocks: [
    np.split(x, len(blocks))[rank] for rank, x in enumerate(blocks)
]
# END

#: What a collective takes along its axis, varying (True) or invariant (False); what it
#: returns; its transpose.
table = {
    # HOLE 6.2 [4 points]
    # One line for each of the six: psum, pbroadcast, all_gather, psum_scatter,
    # all_gather_invariant, pscatter.
    psum: (True, False, pbroadcast),
    pbroadcast: (False, True, psum),
    all_gather: (True, True, psum_scatter),
    psum_scatter: (True, True, all_gather),
    all_gather_invariant: (True, False, pscatter),
    pscatter: (False, True, all_gather_invariant),
    # END
}


def collective_variance(op, varying, axis):
    """The variance of a collective's result, from that of its operand."""
    takes, returns, _ = table[op]
    # HOLE 6.3 [2 points]
    # `varying` is a set of axes. If `axis in varying` is not what the collective takes,
    # raise a TypeError that names the operation and the axis. Return the set with the
    # axis in it, or without it.
    if (axis in varying) != takes:
        actual, wanted = (
            ("varying", "invariant") if axis in varying else ("invariant", "varying")
        )
        raise TypeError(
            f"{op} takes a value that is {wanted} along {axis!r}, and this one is "
            f"{actual}"
        )
    return varying | {axis} if returns else varying - {axis}
    # END


for op, (_, _, back) in table.items():
    jvp_rules[op] = partial(linear, op)
    op.varying = partial(collective_variance, op)
    transpose_rules[op] = lambda ct, x, axis, back=back: [back(ct, axis=axis)]


def same_variance(op, args, params):
    """Insert pbroadcasts where a tracer is invariant, and another operand or the
    collective wants it to be varying.
    """
    wanted = frozenset().union(*(typeof(x).varying for x in args))
    if op in table and table[op][0]:
        wanted |= {params["axis"]}
    return [vary(x, wanted) for x in args]


def vary(x, axes):
    """A tracer as one that varies along these axes, too, by pbroadcast. A constant is
    as it is.
    """
    if not isinstance(x, Tracer):
        return x
    # HOLE 6.4 [3 points]
    # A value that is used twice must get only one pbroadcast, since each one's
    # transpose is an all-reduce. So keep the result in `x.varied`, a dictionary that
    # belongs to x, by its axis.
    for axis in sorted(axes - x.type.varying):
        if axis not in x.varied:
            x.varied[axis] = pbroadcast(x, axis=axis)
        x = x.varied[axis]
    return x
    # END


# before same_shape: the psum that it transposes to is of the smaller value
casts.insert(0, same_variance)
