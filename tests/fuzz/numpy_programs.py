"""Random programs of NumPy: NumPy takes their lines, the library records them, and no processor decides on values."""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from typing import Any

import numpy

import minidiff as md
from minidiff.numpy.functions import full_name
from tests.fuzz.inputs import DTYPES, LAYOUTS, Input, constant
from tests.fuzz.programs import MAX_RESULTS, Drawing, Program, evaluated
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


# ---------------------------------------------------------------- drawing


class Lines(Drawing):
    """Random lines of NumPy, of values that the program has."""

    def __init__(self, rng: random.Random):
        super().__init__(rng)
        self.values: dict[str, Any] = {}  # those that lines are tried with
        self.last: Any = None  # the value that axes and shapes are drawn for: the first one of the line
        n = [self.rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 3, 4]) for _ in range(2)]
        self.shapes = [(), (n[0],), (n[1],), (*n,), (*n[::-1],), (1, n[0]), (n[0], 1), (2, *n), (n[0], n[0]), (1,)]

    def line(self) -> str:
        """A line of NumPy."""
        self.last = None
        return self.call() if self.rng.random() < 0.3 else self.fill("{step}")

    def call(self) -> str:
        """A call that the table has, of values; where it takes arrays of integers, often with those."""
        row = self.rng.choice(CALLS)
        args = [
            constant(x) if numpy.asarray(x).dtype.kind not in "fc" and self.rng.random() < 0.7 else self.x()
            for x in row.args
        ]
        options = [f"{k}={constant(v)}" for k, v in row.f.keywords.items()]
        return f"{full_name(row.function)}({', '.join(args + options)})"

    def argument(self, before: list[str]) -> Input:
        if self.rng.random() < 0.15:
            return Input(shape=self.rng.choice([float, float, int, complex]))
        if before and self.rng.random() < 0.05:
            return Input(text=self.rng.choice(before) + self.rng.choice(["", "[...]", ".T"]))
        layout, shape = self.rng.choice(["C", "C", *LAYOUTS]), self.shape()
        return Input(self.dtype(), shape, layout if shape or layout in ("C", "unaligned", "big-endian") else "C")

    def x(self) -> str:
        name = self.rng.choice([*self.values, *list(self.values)[-3:]])  # rather one of the last
        if self.last is None:
            self.last = numpy.asarray(self.values[name])
        return name

    y = x

    def unary(self) -> str:
        return self.rng.choice(UNARY)

    def binary(self) -> str:
        return self.rng.choice(["add", "subtract", "multiply", "divide", *BINARY])

    def reducible(self) -> str:
        wrong = ("power", "float_power", "ldexp", "arctan2")  # in NumPy itself, which reads what it has written over
        return self.rng.choice([name for name in BINARY if name not in wrong])

    def typed(self) -> str:
        return f"np.{self.dtype().replace('bool', 'bool_')}({self.rng.choice(['0', '1', '2', '3', '100'])})"

    def dtype(self) -> str:
        """Half of all values have one of three; where all had any, most would be float64 after a few lines."""
        return self.rng.choice(DTYPES if self.rng.random() < 0.6 else ["float32", "float64", "complex128"])

    def axis(self) -> int:
        return self.rng.randrange(-self.last.ndim, self.last.ndim) if self.last.ndim else 0

    def axes(self) -> Any:
        return self.rng.choice([None, self.axis(), self.axis(), (self.axis(),), tuple({self.axis(), self.axis()}), ()])

    def shape(self) -> tuple:
        return self.rng.choice(self.shapes)

    def new_shape(self) -> tuple:
        n = self.last.size
        return self.rng.choice([(-1,), (n,), (1, n), (n, 1), self.last.shape[::-1], (2, n // 2), (n // 2, 2), ()])


def drawn_arrays(seed: str, rng: random.Random) -> Program:
    """A program that runs in plain NumPy, and can be recorded."""
    draw, inputs, lines = Lines(rng), {}, {}
    for name in "abc"[: draw.rng.choice([1, 1, 2, 2, 3])]:
        inputs[name] = draw.argument([k for k, kind in inputs.items() if kind.dtype])
    program = Program(inputs, tuple(inputs), {}, (), seed)
    draw.values = dict(zip(inputs, evaluated(program.arguments())))
    wanted, names = draw.rng.randint(1, 12), "abcdefghijklmnopqrstuvwxyz"
    for _ in range(5 * wanted):
        if len(lines) == wanted:
            break
        name, line = names[len(draw.values)], draw.line()
        value = tried(line, draw.values)
        if value is not None:
            lines[name], draw.values[name] = line, value
    count = min(draw.rng.randrange(MAX_RESULTS), len(draw.values))
    results = {list(draw.values)[-1], *draw.rng.sample(list(draw.values), count)}
    results = tuple(sorted(results & {*lines} or results))
    return dataclasses.replace(program, lines=lines, results=results)
