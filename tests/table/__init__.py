"""Every operation with arguments to check it at: one table, in one file a family.

A family lists its `ROWS`; its functions that are `DISCRETE` (their results are integers or booleans, and carry no
derivative); and those that are `LINEAR`, with the groups of arguments in which they are so jointly (None: in all).
`CONCRETE` are functions that need the values of their arguments, and have no place on a tape: they are tested apart.
"""

import importlib

#: In the order of the guide's table.
NAMES = (
    *("elementwise", "nn", "of_scipy", "reduction", "sorting", "shape", "rearranging", "indexing", "updates", "slices"),
    *("linalg", "decomposition", "fft", "creation", "polynomial", "covariance", "ufunc_methods", "replaced"),
)
# They draw their numbers one after the other, in the order in which they are imported.
_MODULES = {name: importlib.import_module(f"tests.table.{name}") for name in sorted(NAMES)}
FAMILIES = [_MODULES[name] for name in NAMES]

TABLE = [row for family in FAMILIES for row in family.ROWS]
DISCRETE = {function for family in FAMILIES for function in getattr(family, "DISCRETE", ())}
LINEAR = {function: groups for f in FAMILIES for function, groups in getattr(f, "LINEAR", {}).items()}
CONCRETE = {function for family in FAMILIES for function in getattr(family, "CONCRETE", ())}
