"""Random NumPy programs of mixed dtypes and layouts, drawn from seeds: lines of source, and so are their arguments.

Lines are calls that `tests/table` checks, or steps of `steps.txt`, with values of the program as operands.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
from minidiff.numpy.functions import full_name
from tests.table import TABLE, decomposition, linalg, polynomial

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
#: Half of all values have one of these; where all had any, most would be float64 after a few steps.
COMMON = ["float32", "float64", "complex128"]
LAYOUTS = {
    "C": "{x}",
    "Fortran": "np.asfortranarray({x})",
    "transposed": "np.ascontiguousarray({x}.T).T",
    "strided": "np.repeat({x}, 2, -1)[..., ::2]",
    "negative strides": "np.flip(np.flip({x}).copy())",
    "read-only": "np.broadcast_to({x}, {shape})",
    "stride 0": "np.broadcast_to({x}[:1], {shape})",
    "unaligned": "np.frombuffer(bytearray(b'0' + {x}.tobytes()), '{dtype}', offset=1).reshape({shape})",
    "big-endian": "{x}.astype(np.dtype('{dtype}').newbyteorder('>'))",
}
NUMBERS = [
    *("True", "False", "0", "1", "2", "3", "(-1)", "7", "255", "(-300)", "(2**40)"),
    *("0.0", "(-0.0)", "1.0", "(-1.0)", "0.5", "2.0", "3.0", "1e-30", "1e30", "1e-300", "1e300", "inf", "nan"),
    *("1j", "(2+0j)", "complex(0.0, -1.0)", "complex(1e30, 1e-30)"),
]
REALS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 3e38, 1e-45, 65504.0, numpy.inf, -numpy.inf, numpy.nan]

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

#: Steps beside calls of the table, of values x, y: what is in braces is drawn anew at each place.
STEPS = pathlib.Path(__file__).with_name("steps.txt").read_text().splitlines()

#: Lines whose zeros have one sign or the other, as it begins with a zero or with the first product.
SUM_OF_PRODUCTS = re.compile(r"@|(dot|einsum|inner|convolve|correlate)\(")
MAX_SIZE, MAX_RESULTS = 100, 3


class Drawing:
    """Random pieces of one program from one seed, with a method for each placeholder of `STEPS`."""

    def __init__(self, seed: str, values: dict[str, Any] | None = None):
        self.rng = random.Random(seed)
        self.values = values or {}
        self.last: Any = None  # the value that axes and shapes are drawn for: the first one of the step
        n = [self.rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 3, 4]) for _ in range(2)]
        self.shapes = [(), (n[0],), (n[1],), (*n,), (*n[::-1],), (1, n[0]), (n[0], 1), (2, *n), (n[0], n[0]), (1,)]

    def step(self) -> str:
        self.last = None
        if self.rng.random() < 0.3:
            return self.call()
        return re.sub(r"\{(\w+)\}", lambda m: str(getattr(self, m[1])()), self.rng.choice(STEPS))

    def call(self) -> str:
        """A call that the table has, of values; where it takes arrays of integers, often with those."""
        row = self.rng.choice(CALLS)
        args = [
            _constant(x) if numpy.asarray(x).dtype.kind not in "fc" and self.rng.random() < 0.7 else self.x()
            for x in row.args
        ]
        options = [f"{k}={_constant(v)}" for k, v in row.f.keywords.items()]
        return f"{full_name(row.function)}({', '.join(args + options)})"

    def one_of(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def x(self) -> str:
        name = self.rng.choice([*self.values, *list(self.values)[-3:]])  # rather one of the last
        if self.last is None:
            self.last = numpy.asarray(self.values[name])
        return name

    y = x

    def unary(self) -> str:
        return self.rng.choice(UNARY)

    def binary(self) -> str:
        return self.one_of("add", "subtract", "multiply", "divide", *BINARY)

    def reducible(self) -> str:
        wrong = ("power", "float_power", "ldexp", "arctan2")  # in NumPy itself, which reads what it has written over
        return self.rng.choice([name for name in BINARY if name not in wrong])

    def operator(self) -> str:
        return self.one_of(*"+-*/+-*/", "//", "%", "**", "<", "==", "&", "|", "^", ">>")

    def number(self) -> str:
        if self.rng.random() < 0.25:
            return f"np.{self.dtype().replace('bool', 'bool_')}({self.one_of('0', '1', '2', '3', '100')})"
        return self.rng.choice(NUMBERS)

    def numbers(self) -> str:
        return "[" + ", ".join(self.number() for _ in range(self.one_of(1, 2, 3))) + "]"

    def dtype(self) -> str:
        return self.rng.choice(DTYPES if self.rng.random() < 0.6 else COMMON)

    def small(self) -> int:
        return self.one_of(0, 1, 1, 2, 2, 3, -1)

    def count(self) -> int:
        return self.one_of(0, 1, 1, 2, 3)

    def bit(self) -> int:
        return self.one_of(0, 1)

    def axis(self) -> int:
        return self.rng.randrange(-self.last.ndim, self.last.ndim) if self.last.ndim else 0

    def axes(self) -> Any:
        return self.one_of(None, self.axis(), self.axis(), (self.axis(),), tuple({self.axis() for _ in "12"}), ())

    def reduction(self) -> str:
        return self.one_of("sum", "sum", "prod", "max", "min", "mean", "var", "std", "any", "all", "ptp")

    def sum(self) -> str:
        return self.one_of("sum", "prod", "mean")

    def scan(self) -> str:
        return self.one_of("cumsum", "cumprod")

    def extreme(self) -> str:
        return self.one_of("max", "min")

    def index(self) -> str:
        return self.one_of("0", "-1", "::-1", "::2", "1:", ":-1", "...", "None", ":0", "[0, 0]", "[-1]", "[[0]]")

    def shape(self) -> tuple:
        return self.rng.choice(self.shapes)

    def new_shape(self) -> tuple:
        n = self.last.size
        return self.one_of((-1,), (n,), (1, n), (n, 1), self.last.shape[::-1], (2, n // 2), (n // 2, 2), ())

    def wide_shape(self) -> tuple:
        return self.one_of(self.last.shape, (2, *self.last.shape), (1, *self.last.shape), self.shape())


def _constant(x: Any) -> str:
    """A constant of the table, as source."""
    if isinstance(x, numpy.ndarray):
        return literal(x)
    if isinstance(x, type):
        return x.__name__
    return repr(x) if not isinstance(x, numpy.generic) else f"np.{x!r}".replace("np.np.", "np.")


def literal(x: numpy.ndarray) -> str:
    """An array as source, bit for bit."""

    def item(v: Any) -> str:
        if isinstance(v, list):
            return f"[{', '.join(map(item, v))}]"
        return f"complex({v.real!r}, {v.imag!r})" if isinstance(v, complex) else repr(v)

    text = f"np.array({item(x.tolist())}, '{x.dtype}')"
    return f"{text}.reshape({x.shape})" if not x.size else text


@dataclasses.dataclass(frozen=True)
class Input:
    """The kind of an argument without its values: an array, a Python number (no dtype), or another argument again."""

    dtype: str = ""
    shape: tuple = ()
    layout: str = "C"
    same_as: str = ""

    @classmethod
    def drawn(cls, draw: Drawing, before: Sequence[str]) -> Input:
        if draw.rng.random() < 0.15:
            return cls(shape=draw.one_of(float, float, int, complex))
        if before and draw.rng.random() < 0.05:
            return cls(same_as=draw.rng.choice(before) + draw.one_of("", "[...]", ".T"))
        layout = draw.one_of("C", "C", *LAYOUTS)
        shape = draw.shape()
        return cls(draw.dtype(), shape, layout if shape or layout in ("C", "unaligned", "big-endian") else "C")

    def source(self, rng: random.Random) -> str:
        """An argument like this, with values of its own."""
        if self.same_as:
            return self.same_as
        if not self.dtype:
            numbers = {float: f"{rng.uniform(-2, 2):.3}", int: str(rng.randint(-3, 9))}
            return numbers.get(self.shape, f"complex({rng.uniform(-2, 2):.3}, {rng.uniform(-2, 2):.3})")
        return self.laid_out(self.values(rng))

    def values(self, rng: random.Random, shape: tuple | None = None) -> numpy.ndarray:
        shape, dtype = self.shape if shape is None else shape, numpy.dtype(self.dtype)
        count, wild = int(numpy.prod(shape)), rng.random() < 0.15
        if dtype.kind in "iu":
            info = numpy.iinfo(dtype)
            pool = [info.min, info.max, 0, 1] if wild else [v for v in range(-3, 8) if v >= info.min]
            numbers = [rng.choice(pool) for _ in range(count)]
        elif dtype.kind == "b":
            numbers = [rng.random() < 0.5 for _ in range(count)]
        else:
            numbers = [self._float(rng, wild) for _ in range(count)]
            if dtype.kind == "c":
                numbers = [complex(v, self._float(rng, wild)) for v in numbers]
        with numpy.errstate(all="ignore"):
            return numpy.array(numbers, dtype).reshape(shape)

    @staticmethod
    def _float(rng: random.Random, wild: bool) -> float:
        return (
            rng.choice(REALS)
            if wild
            else rng.choice([rng.uniform(-2, 2), rng.randint(-16, 16) / 8, rng.randint(-2, 3)])
        )

    def laid_out(self, x: numpy.ndarray) -> str:
        if self.layout == "stride 0" and not x.size:
            return literal(x)
        return LAYOUTS[self.layout].format(x=literal(x), shape=x.shape, dtype=self.dtype)


NAMES = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Program:
    """Arguments, and lines of source: each line is the value of the next letter. It returns the letters `results`."""

    inputs: dict[str, Input]
    lines: dict[str, str]
    results: tuple[str, ...]
    values: str  # the seed of the arguments' values

    def source(self) -> str:
        body = "".join(f"    {name} = {line}\n" for name, line in self.lines.items())
        return f"def f({', '.join(self.inputs)}):\n{body}    return {', '.join(self.results)},\n"

    def function(self, np: Any = md.numpy, noise: Callable | None = None) -> Callable:
        """It as a Python function, of this NumPy; every value passes through `noise`, if that is given."""
        if noise is None:
            return _executed(self.source(), np)
        # Each use of a value has a rounding error of its own: what cancels within one operation does not here.
        used = {name: re.sub(r"(?<![\w.'])([a-z])(?![\w'=])", r"noise(\1)", line) for name, line in self.lines.items()}
        lines = {name: f"noise({line}, {SUM_OF_PRODUCTS.search(line) is not None})" for name, line in used.items()}
        first = {name: f"noise({name})" for name in self.inputs}
        return _executed(dataclasses.replace(self, lines={**first, **lines}).source(), np, noise)

    def dtypes(self) -> set[str]:
        """Those that its source names."""
        return {d for d in DTYPES if re.search(rf"\b{d}\b", self.source())}

    def arguments(self, other: int = 0) -> dict[str, str]:
        """Arguments by name, as source. `other` ones are of the same types, and have other values."""
        return {name: kind.source(random.Random(f"{self.values}/{other}/{name}")) for name, kind in self.inputs.items()}


@functools.lru_cache(maxsize=64)
def _executed(text: str, np: Any, noise: Callable | None = None) -> Callable:
    names = {"np": np, "inf": numpy.inf, "nan": numpy.nan, "noise": noise}
    exec(text, names)
    return names["f"]


def evaluated(sources: dict[str, str]) -> list:
    """Arguments, made from their source."""
    names: dict[str, Any] = {"np": numpy, "inf": numpy.inf, "nan": numpy.nan}
    for name, text in sources.items():
        names[name] = eval(text, names)
    return [names[name] for name in sources]


#: What lines were not taken for, though NumPy takes them: the library refuses them by an error.
REFUSED: Counter = Counter()


def drawn(seed: str) -> Program:
    """A program that runs in plain NumPy, and can be recorded."""
    draw = Drawing(seed)
    inputs: dict[str, Input] = {}
    for name in NAMES[: draw.one_of(1, 1, 2, 2, 3)]:
        inputs[name] = Input.drawn(draw, [k for k, kind in inputs.items() if kind.dtype])
    program = Program(inputs, {}, (), seed)
    draw.values = dict(zip(inputs, evaluated(program.arguments())))
    wanted, lines = draw.rng.randint(1, 12), {}
    for _ in range(5 * wanted):
        if len(lines) == wanted:
            break
        name, line = NAMES[len(inputs) + len(lines)], draw.step()
        value = tried(line, draw.values)
        if value is not None:
            lines[name], draw.values[name] = line, value
    results = {
        list(draw.values)[-1],
        *draw.rng.sample(list(draw.values), min(draw.rng.randrange(MAX_RESULTS), len(draw.values))),
    }
    return Program(inputs, lines, tuple(sorted(results & {*lines} or results)), seed)


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
        f = _executed(f"def f({', '.join(used)}):\n    return {line}\n", md.numpy)
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
