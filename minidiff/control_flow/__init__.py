"""Control flow: `cond`, `switch`, `scan`, `while_loop`, as in `jax.lax`.

On concrete values, each runs like the Python statement it is named after: `cond` runs one branch, `scan` is a `for`
loop. Derivatives and everything else follow from the operations that run. On abstract values (under `make_tape`), each
is an operation whose parameters are tapes:

=========== =================================================================================================
evaluate    run the tapes
jvp         apply jvp to the tapes; a fixpoint finds which carries have tangents
linearize   run the known part now, save (`scan`: stack) its residuals, and record the linear part
transpose   transpose the linear tapes; a `scan` runs in reverse and sums the cotangents of its constants
batch       vectorize the tapes; a batched predicate runs all branches and selects elementwise
=========== =================================================================================================

Tapes are closed: values that a function closes over are its first operands.

============ ==================================================================================================
`cond`       `cond` and `switch`: the operation, the common type of the branches' results, the public functions
`loops`      `scan`, likewise
`while_loop` likewise; and `fori_loop`, which is a `scan` if its bounds are known
`schedules`  lists of actions: which states of a `scan` its backward pass stores, and which steps it takes again
`over_axis`  `map`, which is a `scan`, and `associative_scan`, which is not a loop
`bodies`     shared by all: the rules, which change the bodies; operations whose body runs inline
`carries`    shared by all: whether a value is known, the types of carries
`divergent`  shared by `cond` and `while_loop`: branches and steps that only some ranks run
`dead_code`  dependencies between equations, and dead-code elimination
============ ==================================================================================================
"""
