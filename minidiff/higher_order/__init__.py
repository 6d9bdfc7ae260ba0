"""Control flow: `cond`, `switch`, `while_loop`, `scan` and its like, with the names and the meaning of `jax.lax`.

Where values are concrete, each is the Python statement that it is called after: `cond` runs one branch, `scan` is a
`for`. Derivatives and everything else follow from the operations that are run. Where values are only names (under
`make_tape`), each is an operation whose parameters are tapes:

=========== =================================================================================================
evaluate    run the tapes
jvp         the tapes' jvp; which carries move is a fixpoint
linearise   what is known runs now, and keeps (`scan`: stacks) what the linear part needs; that part is recorded
transpose   the linear tapes transposed; a `scan` runs the other way, adding up the cotangents of what it shares
batch       the tapes vectorised; a batched predicate is a choice, element by element, among all branches
=========== =================================================================================================

Tapes are closed: values that a function closes over are operands, put first.

=========== =================================================================================================
`choices`   `cond` and `switch`: the operation, how the types of branches are joined, what users call
`scans`     `scan`, likewise
`loops`     `while_loop`, likewise, and `fori_loop`, which is a `scan` where its bounds are known
`over_axis` `map`, which is a `scan`, and `associative_scan`, which is no loop
`carries`   what loops share: the types of what a step hands to the next, a fixpoint
`values`    what all share: is a value known, may ranks disagree about it, what type does a Python number take?
=========== =================================================================================================
"""

from minidiff.higher_order.cond import Cond, cond, cond_p, switch, switch_p
from minidiff.higher_order.over_axis import associative_scan, map
from minidiff.higher_order.scan import rounds, scan, scan_p
from minidiff.higher_order.while_loop import While, fori_loop, while_loop, while_p

__all__ = [
    "Cond",
    "While",
    "associative_scan",
    "cond",
    "cond_p",
    "fori_loop",
    "map",
    "rounds",
    "scan",
    "scan_p",
    "switch",
    "switch_p",
    "while_loop",
    "while_p",
]
