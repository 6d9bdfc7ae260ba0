"""Lines of NumPy that a program may have: NumPy takes them, the library records them, and no processor decides."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy

import minidiff as md
from minidiff.numpy.functions import full_name
from tests.fuzz.inputs import DTYPES
from tests.table import TABLE, decomposition, linalg, polynomial

UFUNCS = {r.function for r in TABLE if isinstance(r.function, numpy.ufunc) and r.function is not numpy.spacing}
UNARY = sorted(f.__name__ for f in UFUNCS if (f.nin, f.nout) == (1, 1))
BINARY = sorted(f.__name__ for f in UFUNCS if (f.nin, f.nout) == (2, 1))
#: Whose results are only determined up to signs, phases or order, or are not numbers.
UNDETERMINED = {r.function for r in decomposition.ROWS} | {numpy.empty_like, numpy.einsum_path, numpy.nextafter}
UNDETERMINED |= {numpy.partition, numpy.argpartition, numpy.argsort}
UNDETERMINED |= {r.function for r in polynomial.ROWS}  # their shapes follow from values: leading zeros are cut off
#: It copies what is not contiguous, and gives a view of what is: traced values have no layout in memory.
UNDETERMINED |= {numpy.ravel}
UNDETERMINED |= {numpy.interp}  # of points that are not in order, which it does not check
#: NumPy computes these otherwise, where ends are not finite, or too few points are there for a variance.
UNDETERMINED |= {
    numpy.quantile,
    numpy.percentile,
    numpy.nanquantile,
    numpy.nanpercentile,
    numpy.linspace,
    numpy.logspace,
    numpy.geomspace,
    numpy.cov,
    numpy.corrcoef,
}
UNDETERMINED |= {r.function for r in linalg.ROWS if "linalg" in full_name(r.function) if callable(r.function)}
#: Calls of NumPy's functions with the options that the table checks them with.
CALLS = [
    r
    for r in TABLE
    if callable(r.function)
    and r.f.func is r.function
    and r.function not in UNDETERMINED
    and getattr(numpy, r.function.__name__, None) is r.function
]

#: Lines whose zeros have one sign or the other, as it begins with a zero or with the first product.
SUM_OF_PRODUCTS = re.compile(r"@|(dot|einsum|inner|convolve|correlate)\(")
MAX_SIZE = 100

#: What lines were not taken for, though NumPy takes them: the library refuses them by an error.
REFUSED: Counter = Counter()


def _depends_on_more(line: str, used: dict[str, Any], out: Any, plain: bool) -> bool:
    """Whether the value of a line, or its type, depends on the processor, or on the kinds of its numbers."""
    saved = numpy.asarray(out)
    if plain and line.startswith("np.") and isinstance(out, _NUMBERS) and not isinstance(out, numpy.generic):
        return True  # np.isreal(2) is True, not np.True_
    if re.search(r"\dj\b|complex\(", line) and any(type(v) is numpy.float64 for v in used.values()):
        return True  # to Python's complex numbers NumPy's float64 is a float: what comes out promotes weakly
    if "**" in line and any(numpy.ndim(v) == 0 and numpy.asarray(v).dtype == bool for v in used.values()):
        return True  # NumPy's squares of booleans are int64, but int8 of 0-d arrays of them
    if saved.dtype.kind in "iu" and re.search(r"(round|around)\(.*-1\)", line):
        return True  # rounded up to tens, the greatest integers overflow, and processors differ about what that is
    if re.search(r"(dot|inner)\(", line) and any(numpy.ndim(v) == 0 for v in used.values()):
        return True  # a scale of zero makes zeros of NaNs, in BLAS
    if saved.dtype.kind in "iu" and ".mean(" in line and any(not numpy.size(v) for v in used.values()):
        return True  # the mean of nothing is NaN, and processors differ about what integer that is
    # Processors differ about what integers large numbers are.
    return saved.dtype.kind in "iu" and not all(
        _are_integers(numpy.asarray(v)) for v in (*used.values(), *_floats(line))
    )


def tried(line: str, values: dict[str, Any]) -> Any:
    """The value of a line; None where NumPy raises or the library refuses it, or where it depends on the machine."""
    used = {name: v for name, v in values.items() if re.search(rf"\b{name}\b", line)}
    sizes = [numpy.abs(numpy.asarray(v, complex)).max() if numpy.size(v) else numpy.inf for v in used.values()]
    if "wrap" in line and max(sizes, default=0) > 1000:
        return None  # NumPy's take adds or subtracts the size until an index fits: without an end where that is 0
    plain = used and all(isinstance(v, _NUMBERS) and not isinstance(v, numpy.generic) for v in used.values())
    if plain and "**" in line:
        # Of Python's numbers, values decide on the type: 2 ** -1 is a float, (-0.5) ** 0.5 is complex. And 3 ** 2**40
        # would fill the memory, for hours, as Python's integers have no end.
        return None
    try:
        f = eval(f"lambda {', '.join(used)}: {line}", {"np": md.numpy, "inf": numpy.inf, "nan": numpy.nan})
        out = f(*used.values())
    except Exception:
        return None
    if not isinstance(out, (numpy.ndarray, numpy.generic, *(_NUMBERS if plain else ()))):
        return None
    saved = numpy.asarray(out)
    if saved.dtype.name not in DTYPES or saved.size > MAX_SIZE or saved.ndim > 4:
        return None
    if _depends_on_more(line, used, out, plain):
        return None
    try:
        md.make_tape(f)(*used.values())
    except (TypeError, ValueError, IndexError) as error:
        # An index out of bounds is refused also where there is nothing to be taken.
        unknown = isinstance(error, IndexError) and "out of bounds for a" not in str(error)
        if not unknown and not isinstance(error, numpy.exceptions.AxisError):
            REFUSED[re.sub(r"\[.*?\]|\(.*?\)|\d+", "#", f"{type(error).__name__}: {error}"[:90])] += 1
            return None
    except Exception:
        pass
    return out


_NUMBERS = (bool, int, float, complex)


def _are_integers(x: numpy.ndarray) -> bool:
    return x.dtype.kind not in "fc" or bool(numpy.all(numpy.abs(x) < 100))


def _floats(line: str) -> list[float]:
    return [float(v) for v in re.findall(r"\b(?:inf|nan|1e\d+)\b", line)]


def raises_python_numbers(inputs: dict[str, Any], lines: dict[str, str]) -> bool:
    """Whether a program takes a power of Python's numbers alone: `3 ** 2**40` would fill the memory, for hours."""
    plain = {name for name, kind in inputs.items() if not kind.dtype and not kind.text}
    for name, line in lines.items():
        if "np." not in line and set(re.findall(r"(?<![\w.'])[a-z](?!\w)", line)) <= plain:
            if "**" in line:
                return True
            plain.add(name)
    return False
