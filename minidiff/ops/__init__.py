"""The operations, one file per family; each is declared with all its rules."""

from minidiff.ops import (  # noqa: F401 (importing a family declares its operations)
    composed,
    covariance,
    creation,
    decomposition,
    differences,
    discrete,
    elementwise,
    fft,
    indexing,
    linalg,
    operators,
    polynomial,
    rearranging,
    reduction,
    sets,
    shape,
    sorting,
    statistics,
    updates,
)
