"""Random indices in all of NumPy's forms, for the property tests of indexing and of updates."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

small = st.integers(-3, 3)
slices = st.builds(slice, st.none() | small, st.none() | small, st.none() | small.filter(bool))


@st.composite
def indices(draw: Any) -> tuple[np.ndarray, Any]:
    """An array and an index of it, which mostly fits."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    common = draw(st.sampled_from([(), (1,), (3,), (2, 1), (2, 3), (0,)]))
    entries: list = []
    axis = 0
    while axis < len(shape) and draw(st.integers(0, 5)):
        n = shape[axis]
        kind = draw(st.sampled_from(["slice", "slice", "int", "array", "array", "mask", "None", "bool"]))
        if kind == "slice" or (n == 0 and kind in ("int", "array")):
            entries.append(draw(slices))
        elif kind == "int":
            i = draw(st.integers(-n, n - 1))
            entries.append(draw(st.sampled_from([i, np.int64(i), np.int8(i), np.array(i)])))
        elif kind == "array":
            local = tuple(draw(st.sampled_from([1, m])) for m in common[draw(st.integers(0, len(common))) :])
            size = int(np.prod(local))
            i = np.reshape(draw(st.lists(st.integers(-n, n - 1), min_size=size, max_size=size)), local).astype(int)
            entries.append(draw(st.sampled_from([i, i, i.astype(np.int16), i.tolist() if i.size else i])))
        elif kind == "mask":
            ndim = draw(st.integers(1, len(shape) - axis))
            size = int(np.prod(shape[axis : axis + ndim]))
            mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
            entries.append(mask.reshape(shape[axis : axis + ndim]))
            axis += ndim - 1
        else:
            entries.append(None if kind == "None" else draw(st.sampled_from([True, False, np.True_, np.array(True)])))
            continue
        axis += 1
    if draw(st.booleans()):
        # An ellipsis in place of some entries, or of none.
        at = draw(st.integers(0, len(entries)))
        dropped = draw(st.integers(0, 1))
        entries[at : at + dropped] = [...]
    x = np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)
    index = entries[0] if len(entries) == 1 and draw(st.booleans()) else tuple(entries)
    return x, index
