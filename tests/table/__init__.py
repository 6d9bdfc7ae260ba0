"""Every operation with arguments to check it at: one table, in one file a family.

A family lists its `ROWS`; its functions that are `DISCRETE` (their results are integers or booleans, and carry no
derivative); and those that are `LINEAR`, with the groups of arguments in which they are so jointly (None: in all).
`CONCRETE` are functions that need the values of their arguments, and have no place on a tape: they are tested apart.
"""

from tests.table import (
    covariance,
    creation,
    decomposition,
    elementwise,
    fft,
    indexing,
    linalg,
    nn,
    of_scipy,
    polynomial,
    rearranging,
    reduction,
    replaced,
    sets,
    shape,
    slices,
    sorting,
    ufunc_methods,
    updates,
)

FAMILIES = (
    elementwise,
    nn,
    of_scipy,
    reduction,
    sorting,
    shape,
    rearranging,
    indexing,
    updates,
    slices,
    linalg,
    decomposition,
    fft,
    creation,
    polynomial,
    covariance,
    sets,
    ufunc_methods,
    replaced,
)

TABLE = [row for family in FAMILIES for row in family.ROWS]
DISCRETE = {function for family in FAMILIES for function in family.DISCRETE}
LINEAR = {function: groups for family in FAMILIES for function, groups in family.LINEAR.items()}
CONCRETE = {function for family in FAMILIES for function in getattr(family, "CONCRETE", ())}
