"""Random NumPy programs of mixed dtypes and layouts: what they are under every transformation, and in plain NumPy.

A program is Python source, one NumPy call a line, and so are its arguments: a failure prints as a script. Each program
is drawn from a seed, runs in plain NumPy, and is compared with itself under `jvp`, `vjp`, `jit`, `vmap`, `checkpoint`
and on tapes: values, dtypes, shapes, who shares memory with whom, and what is held while inputs and results change.

Between these, it runs one program of each route of `tests/fuzz/scripts.py`.

    python -m tests.fuzz.arrays --minutes 20 --seed 0
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib
import random
import re
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy

import minidiff as md
from minidiff.compiler import buffers
from minidiff.compiler.program import optimize
from minidiff.inputs.arguments import WEAK_TYPES
from minidiff.numpy.functions import full_name
from minidiff.values.dtypes import float0, is_differentiable
from tests.fuzz.scripts import fuzz_routes
from tests.table import TABLE, decomposition, linalg, polynomial

# ---------------------------------------------------------------- what programs are made of

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

#: Steps, of values x, y, z; what is in braces is drawn anew at each place, and what does not fit is not taken.
STEPS = """
    np.{unary}({x})
    np.{unary}({x})
    np.{binary}({x}, {y})
    np.{binary}({x}, {y})
    np.{binary}({x}, {number})
    np.{binary}({number}, {x})
    np.{binary}({x}, {y}, dtype='{dtype}')
    {x} {operator} {y}
    {x} {operator} {y}
    {x} {operator} {number}
    {x} {operator} {number}
    {number} {operator} {x}
    {number} {operator} {x}
    -{x}
    +{x}
    abs({x})
    {x} ** {small}
    {x} * {number} * {number}
    {x} * ({number} / {x})
    {x} + (-{y})
    {x} - (-{y})
    {x} + {number} - {number}
    np.{reduction}({x})
    np.{reduction}({x}, axis={axes})
    np.{reduction}({x}, axis={axes}, keepdims=True)
    np.{sum}({x}, axis={axes}, dtype='{dtype}')
    {x}.{sum}({axis})
    np.{scan}({x}, axis={axis})
    np.{scan}({x}, {axis}, '{dtype}')
    np.arg{extreme}({x}, axis={axis})
    np.{reducible}.reduce({x}, {axis})
    np.{reducible}.reduce({x}, {axis}, '{dtype}')
    np.{reducible}.accumulate({x}, {axis})
    np.{reducible}.accumulate({x}, {axis}, '{dtype}')
    np.{binary}.outer({x}, {y})
    {x} @ {y}
    {x}.T @ {y}
    np.dot({x}, {y})
    np.vdot({x}, {y})
    np.outer({x}, {y})
    np.tensordot({x}, {y}, {count})
    np.einsum('ij,jk->ik', {x}, {y})
    np.einsum('ij,kj->i', {x}, {y})
    np.einsum('...i,...i', {x}, {y})
    np.einsum('ii->i', {x})
    np.einsum('ij->ji', {x})
    {x}[{index}]
    {x}[{index}]
    {x}[{index}, {index}]
    np.reshape({x}, {new_shape})
    {x}.reshape(-1)
    np.copy(np.ravel({x}, order='F'))
    np.transpose({x})
    {x}.T
    np.swapaxes({x}, {axis}, {axis})
    np.moveaxis({x}, {axis}, {axis})
    np.expand_dims({x}, {axis})
    np.squeeze({x})
    np.broadcast_to({x}, {wide_shape})
    np.concatenate([{x}, {y}], {axis})
    np.concatenate([{x}, {x}[::-1]])
    np.stack([{x}, {x}, {y}], {axis})
    np.hstack([{x}, {y}])
    np.split({x}, [1], {axis})[{bit}]
    np.tile({x}, {count})
    np.tile({x}, (1, {count}))
    np.repeat({x}, {count}, {axis})
    np.repeat({x}, {count})
    np.flip({x}, {axis})
    np.roll({x}, {small}, {axis})
    np.where({x} > {number}, {x}, {y})
    np.where({x}, {y}, {number})
    np.clip({x}, {number}, {number})
    np.clip({x}, {number}, {y})
    np.maximum({x}, {number})
    np.sort({x}, {axis})
    np.argsort({x}, {axis}, kind='stable')
    np.diff({x}, axis={axis})
    np.diagonal({x})
    np.trace({x})
    np.tril({x}, {bit})
    {x}.astype('{dtype}')
    {x}.astype({x}.dtype)
    {x}.astype('{dtype}', copy=False)
    np.copy({x})
    {x}.copy()
    np.array({x})
    np.array([{x}, {y}])
    np.array([{x}, {number}])
    np.asarray({x})
    np.ascontiguousarray({x})
    {x}.flatten()
    np.ones_like({x})
    np.zeros_like({x}, dtype='{dtype}')
    np.full_like({x}, {number})
    np.full({shape}, {x})
    np.full({shape}, {number}) * {x}
    np.ones({shape}) * {x}
    np.array({numbers}) {operator} {x}
    np.arange({small}) {operator} {x}
    {x}.real
    {x}.imag
    np.conj({x})
    np.round({x}, {small})
    np.modf({x})[{bit}]
    np.frexp({x})[{bit}]
    np.divmod({x}, {y})[{bit}]
    np.nan_to_num({x})
    np.linalg.norm({x})
    np.at({x})[{index}].set({y})
    np.at({x})[{index}].add({number})
    np.pad({x}, {bit})
    np.sum({x}, axis={axis}, where={y} > {number})
""".strip().splitlines()
STEPS = [line.strip() for line in STEPS]

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
        if self.rng.random() < 0.15:
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
        value = _tried(line, draw.values)
        if value is not None:
            lines[name], draw.values[name] = line, value
    results = {
        list(draw.values)[-1],
        *draw.rng.sample(list(draw.values), min(draw.rng.randrange(MAX_RESULTS), len(draw.values))),
    }
    return Program(inputs, lines, tuple(sorted(results & {*lines} or results)), seed)


def _tried(line: str, values: dict[str, Any]) -> Any:
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
    if plain and line.startswith("np.") and isinstance(out, _NUMBERS) and not isinstance(out, numpy.generic):
        return None  # np.isreal(2) is True, not np.True_
    if re.search(r"\dj\b|complex\(", line) and any(type(v) is numpy.float64 for v in used.values()):
        return None  # to Python's complex numbers NumPy's float64 is a float: what comes out promotes weakly
    if "**" in line and any(numpy.ndim(v) == 0 and numpy.asarray(v).dtype == bool for v in used.values()):
        return None  # NumPy's squares of booleans are int64, but int8 of 0-d arrays of them
    if saved.dtype.kind in "iu" and re.search(r"(round|around)\(.*-1\)", line):
        return None  # rounded up to tens, the greatest integers overflow, and processors differ about what that is
    if re.search(r"(dot|inner)\(", line) and any(numpy.ndim(v) == 0 for v in used.values()):
        return None  # a scale of zero makes zeros of NaNs, in BLAS
    if saved.dtype.kind in "iu" and ".mean(" in line and any(not numpy.size(v) for v in used.values()):
        return None  # the mean of nothing is NaN, and processors differ about what integer that is
    if saved.dtype.kind in "iu" and not all(_are_integers(numpy.asarray(v)) for v in (*used.values(), *_floats(line))):
        return None  # processors differ about what integer they are
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


# ---------------------------------------------------------------- comparing


class Finding(AssertionError):
    """A way to run a program gave something else than NumPy."""


#: What tells 0 from other numbers.
CHOICE = re.compile(r"np\.(where|all|any|sign|copysign|heaviside|nonzero|logical_\w+|clip)\(|bool")


def noisy(rng: numpy.random.Generator) -> Callable:
    """Return a function that changes every float by a rounding error or two, and the signs of zeros on request."""

    def noise(x: Any, signs: bool = False) -> Any:
        t = md.typeof(x)
        if t.dtype.kind not in "fc" or not t.size:
            return x
        # A Python number is rounded to the precision of what it meets.
        eps = numpy.finfo(numpy.float32 if type(x) in WEAK_TYPES else t.dtype).eps
        factor = 1 + 2 * eps * rng.choice([-1.0, 0.0, 1.0], t.shape)
        factor = factor.astype(t.dtype)[()]
        x = x * (factor.item() if type(x) in WEAK_TYPES else factor)
        if signs and t.dtype.kind == "c":  # inf - inf is NaN: which products have one depends on how they are computed
            saved = rng.random(t.shape) < rng.choice([0.0, 0.5])
            x = numpy.where(
                numpy.isfinite(x) | saved, x, rng.choice([numpy.nan, 0.5 * numpy.finfo(t.dtype).max])
            ).astype(t.dtype)[()]
        return -(0.0 - x) if signs and rng.random() < 0.5 else x  # its zeros are negative

    return noise


def leaves(x: Any) -> list:
    return md.tree.leaves(x)


def copied(xs: Sequence[Any]) -> list:
    return [numpy.array(x, copy=True) for x in xs]


def same(x: Any, y: Any) -> bool:
    """Bit for bit, but for what NaNs are."""
    x, y = numpy.asarray(x), numpy.asarray(y)
    if x.dtype.kind not in "fc":
        return bool(numpy.array_equal(x, y))
    parts = ((x.real, y.real), (x.imag, y.imag)) if x.dtype.kind == "c" else ((x, y),)
    return all(
        numpy.array_equal(a, b, equal_nan=True) and not numpy.any((numpy.signbit(a) != numpy.signbit(b)) & (a == a))
        for a, b in parts
    )


def compare(
    got: Sequence[Any], expected: Sequence[Any], others: Callable[[], Iterator[list]], finite: bool = False
) -> bool:
    """Raise for other types or values; whether all are the same bit for bit.

    Floats may differ by 32 times what rounding errors in every step make of them, which `others` are examples of.
    With `finite`, only what is finite is compared: in another order, sums and products overflow elsewhere.
    """
    if len(got) != len(expected):
        raise Finding(f"{len(got)} results, not {len(expected)}")
    for i, (x, y) in enumerate(zip(got, expected)):
        a, b = (_native(numpy.asarray(v)) for v in (x, y))
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise Finding(f"result {i} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}")
    if all(same(x, y) for x, y in zip(got, expected)):
        return True
    examples = list(others())
    for i, (x, y) in enumerate(zip(got, expected)):
        x, y, near = numpy.asarray(x), numpy.asarray(y), [numpy.asarray(e[i]) for e in examples]
        if finite and x.dtype.kind in "fc":
            both = numpy.isfinite(x) & numpy.isfinite(y)
            x, y, near = x[both], y[both], [e[both] for e in near]
        if not same(x, y) and not _close(x, y, near):
            raise Finding(f"result {i} is\n{x!r}, not\n{y!r}")
    return False


def _native(x: numpy.ndarray) -> numpy.ndarray:
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _close(x: numpy.ndarray, y: numpy.ndarray, examples: list[numpy.ndarray]) -> bool:
    if any(not same(numpy.isfinite(e), numpy.isfinite(y)) for e in examples):
        return True  # so near to infinity, or to what is undefined
    if x.dtype.kind not in "fc":
        return any(not same(e, y) for e in examples)
    if x.dtype.kind == "c":
        return _close_parts(x, y, examples, numpy.abs)
    return _close_parts(x, y, examples, lambda v: v)


def _close_parts(x: numpy.ndarray, y: numpy.ndarray, examples: list[numpy.ndarray], size: Callable) -> bool:
    wide = numpy.result_type(x.dtype, numpy.longdouble)
    finite, info = numpy.isfinite(y), numpy.finfo(y.dtype)
    if not same(finite, numpy.isfinite(x)):
        return False
    if not same(x[~finite], y[~finite]) and x.dtype.kind != "c":
        return False
    x, y = (numpy.where(finite, v, 0).astype(wide) for v in (x, y))
    spread = numpy.max([abs(numpy.where(finite, e, 0).astype(wide) - y) for e in examples], axis=0)
    allowed = 32 * (spread + abs(y) * info.eps) + 8 * info.smallest_subnormal * (y != 0)
    return bool(numpy.all(abs(x - y) <= allowed))


# ---------------------------------------------------------------- ways to run a program


def tangents(rng: random.Random, xs: Sequence[Any]) -> list:
    """Tangents, or cotangents, of values like these."""
    types = [md.typeof(x) for x in xs]
    numbers = numpy.random.default_rng(rng.randrange(2**32))

    def like(t: Any) -> Any:
        if not is_differentiable(t.dtype):
            return numpy.zeros(t.shape, float0)
        v = numbers.standard_normal(t.shape)
        v = v + 1j * numbers.standard_normal(t.shape) if t.dtype.kind == "c" else v
        return numpy.asarray(v, t.dtype.newbyteorder("="))[()]

    return [like(t) for t in types]


def on_tape(f: Callable, change: Callable = lambda tape: tape) -> Callable:
    tapes: dict[Any, Any] = {}

    def run(*args: Any) -> list:
        key = tuple((md.typeof(x), type(x) if isinstance(x, (bool, int, float, complex)) else None) for x in args)
        if key not in tapes:
            tapes[key] = change(md.make_tape(f)(*args))
            tapes[key].check()
        return tapes[key](*args)

    return run


def of_one(f: Callable) -> Callable:
    """A batch of one, of the arrays."""

    def run(*args: Any) -> list:
        axes = tuple(0 if isinstance(x, numpy.ndarray) else None for x in args)
        batched = [x if a is None else x[None] for x, a in zip(args, axes)]
        return [x[0] for x in md.vmap(f, axes, axis_size=1)(*batched)]

    return run


#: What leaves a function what it is.
WAYS: dict[str, Callable] = {
    "eager": lambda f: f,
    "jvp": lambda f: lambda *args: md.jvp(f, args, tangents(random.Random(0), args))[0],
    "vjp": lambda f: lambda *args: md.vjp(f, *args)[0],
    "tape": on_tape,
    "optimized tape": lambda f: on_tape(f, optimize),
    "jit": md.jit,
    "checkpoint": md.checkpoint,
    "jit of checkpoint": lambda f: md.jit(md.checkpoint(f)),
    "jit of jvp": lambda f: md.jit(lambda *args: md.jvp(f, args, tangents(random.Random(0), args))[0]),
    "jvp of jit": lambda f: WAYS["jvp"](md.jit(f)),
    "linearize": lambda f: lambda *args: md.linearize(f, *args)[0],
    "vmap of one": of_one,
}


class Check:
    """A program, its arguments, and what NumPy makes of them."""

    def __init__(self, program: Program, counts: Counter):
        self.program, self.counts = program, counts
        self.f, self.plain = (
            program.function(),
            program.function(numpy if "np.at(" not in program.source() else md.numpy),
        )
        self.args, self.others = evaluated(program.arguments()), evaluated(program.arguments(1))
        self.before = copied(self.args)
        self.expected = list(self.plain(*self.args))
        self.values = copied(self.expected)
        # Sums of products may add up in another order: inf - inf, or nothing but inf.
        self.finite = SUM_OF_PRODUCTS.search(program.source()) is not None

    def noisy(self, *args: Any, wrap: Callable = lambda f: f) -> Callable[[], Iterator[list]]:
        def examples() -> Iterator[list]:
            for seed in range(12):
                f = self.program.function(md.numpy, noisy(numpy.random.default_rng(seed)))
                yield leaves(wrap(f)(*args))

        return examples

    def all(self) -> Iterator[tuple[str, Callable]]:
        """The checks, by name."""
        for name in WAYS:
            yield name, functools.partial(self.way, name)
        yield "vmap", functools.partial(self.vmap, lambda f: f)
        yield "jit of vmap", functools.partial(self.vmap, lambda f: lambda *a, **k: md.jit(md.vmap(f, *a, **k)))
        yield "derivatives", self.derivatives

    def way(self, name: str) -> None:
        run = WAYS[name](self.f)
        first = leaves(run(*self.args))
        self.count(name, compare(first, self.values, self.noisy(*self.args), self.finite))
        if name == "eager":
            return
        self.apart(first)
        held = copied(first)
        if self.others_fit():
            expected = list(self.plain(*self.others))
            compare(leaves(run(*self.others)), expected, self.noisy(*self.others), self.finite)
        self.unchanged(first, held)
        self.overwrite(first)
        compare(leaves(run(*self.args)), self.values, self.noisy(*self.args), self.finite)

    def count(self, name: str, exact: bool) -> None:
        self.counts[name, "bit for bit" if exact else "rounded"] += 1

    def others_fit(self) -> bool:
        try:
            self.plain(*self.others)
        except Exception:
            return False
        return True

    def apart(self, results: list) -> None:
        """Results share memory with each other, and with arguments, only where NumPy's do."""
        arrays = [*results, *self.args]
        plain = [*self.expected, *self.args]
        for (i, x), (j, y) in itertools.combinations(enumerate(arrays), 2):
            in_order = all(numpy.asarray(plain[k]).flags.c_contiguous for k in (i, j) if k < len(results))
            # NumPy reshapes what has another order into a copy; here it may be in order, and the reshape a view.
            if i < len(results) and in_order and _shared(x, y) and not _may_share(plain[i], plain[j]):
                other = f"result {j}" if j < len(results) else f"argument {j - len(results)}"
                raise Finding(f"aliasing: result {i} shares memory with {other}")
        for i, (x, y) in enumerate(zip(results, self.expected)):
            arrays = isinstance(x, numpy.ndarray) and isinstance(y, numpy.ndarray)
            if arrays and y.flags.writeable and not x.flags.writeable:
                raise Finding(f"aliasing: result {i} is read-only")

    def unchanged(self, results: list, held: list) -> None:
        if not all(map(same, results, held)):
            raise Finding("aliasing: a result has changed since")
        if not all(map(same, self.args, self.before)):
            raise Finding("aliasing: an argument has changed")

    def overwrite(self, results: list) -> None:
        """Write into results that are no views: nobody else is to see it."""
        for x, y in zip(results, self.expected):
            if isinstance(x, numpy.ndarray) and x.flags.writeable and not any(_shared(y, a) for a in self.args):
                x[...] = 77 if x.dtype.kind != "b" else ~x
        if not all(map(same, self.args, self.before)):
            raise Finding("aliasing: an argument changes with a result")

    def vmap(self, wrap: Callable) -> None:
        """A batch is a loop: of arguments, of which some are mapped."""
        rng = random.Random(f"vmap/{self.program.values}")
        kinds = list(self.program.inputs.values())
        arrays = [k for k, kind in enumerate(kinds) if kind.dtype]
        mapped = [k for k in arrays if rng.random() < 0.7] or arrays
        if not mapped:
            return
        sources = dict(self.program.arguments())
        axes: list[int | None] = [None] * len(kinds)
        for k, name in enumerate(sources):
            if k in mapped:
                axes[k] = rng.randint(0, len(kinds[k].shape))
                elements = [kinds[k].values(random.Random(f"{self.program.values}/{e}/{name}")) for e in (0, 1, 2)]
                sources[name] = kinds[k].laid_out(numpy.stack(elements, axes[k]))
        args = evaluated(sources)

        def each(f: Callable) -> list:
            rows = [f(*[x if a is None else numpy.moveaxis(x, a, 0)[e] for x, a in zip(args, axes)]) for e in (0, 1, 2)]
            return [numpy.stack(column) for column in zip(*rows)]

        try:
            expected = each(self.plain)
        except Exception:
            return
        before = copied(args)
        run = md.vmap(self.f, tuple(axes)) if wrap(0) == 0 else wrap(self.f)(tuple(axes))
        got = leaves(run(*args))
        noises = (noisy(numpy.random.default_rng(seed)) for seed in range(12))
        exact = compare(got, expected, lambda: (each(self.program.function(md.numpy, noise)) for noise in noises), True)
        self.count("vmap", exact)
        for (i, x), (j, y) in itertools.combinations(enumerate([*got, *args]), 2):
            plain = [*self.expected, *self.args]
            if i < len(got) and _shared(x, y) and not _may_share(plain[i], plain[j]):
                raise Finding(f"aliasing: results or arguments {i} and {j} share memory")
        if not all(map(same, args, before)):
            raise Finding("aliasing: an argument has changed")

    def derivatives(self) -> None:
        """Forward and reverse mode agree, and are what they are when compiled."""
        floats = [i for i, y in enumerate(self.expected) if numpy.asarray(y).dtype.kind in "fc"]
        active = [i for i, x in enumerate(self.args) if md.typeof(x).dtype.kind in "fc"]
        if not floats or not active:
            return

        def of_active(f: Callable) -> Callable:
            def g(*xs: Any) -> list:
                operands = dict(zip(active, xs))
                out = f(*[operands.get(i, x) for i, x in enumerate(self.args)])
                return [out[i] for i in floats]

            return g

        xs = [self.args[i] for i in active]
        rng = random.Random(f"derivatives/{self.program.values}")
        ts, cts = tangents(rng, xs), tangents(rng, [self.expected[i] for i in floats])

        def both(f: Callable) -> Callable:
            g = of_active(f)
            return lambda *xs: [md.jvp(g, xs, ts)[1], md.vjp(g, *xs)[1](cts)]

        pushed, pulled = both(self.f)(*xs)
        for x, t in zip(xs, pulled):
            if (md.typeof(x).shape, md.typeof(x).dtype.newbyteorder("=")) != (md.typeof(t).shape, md.typeof(t).dtype):
                raise Finding(f"the cotangent of a {md.typeof(x)} is a {md.typeof(t)}")
        others = self.noisy(*xs, wrap=lambda f: lambda *xs: md.jvp(of_active(f), xs, ts)[1])
        self.numerically(of_active(self.f), xs, ts, pushed, others)
        linear = leaves(md.linearize(of_active(self.f), *xs)[1](*ts))
        compare(linear, pushed, others, True)
        self.adjoint(pushed, cts, ts, pulled, lambda seed: both(self.noise(seed))(*xs))
        run = md.jit(both(self.f))
        first = leaves(run(*xs))
        self.count("jit of derivatives", compare(first, [*pushed, *pulled], self.noisy(*xs, wrap=both), finite=True))
        for results in (pulled, first):
            for (i, x), (j, y) in itertools.combinations(enumerate(results), 2):
                if _shared(x, y):
                    raise Finding(f"aliasing: derivatives {i} and {j} share memory")
        held = copied(first)
        compare(leaves(run(*xs)), held, lambda: iter(()))
        self.unchanged(first, held)

    def numerically(self, g: Callable, xs: list, ts: list, pushed: list, others: Callable) -> None:
        """Compare tangents with differences, where all is float64 and smooth: at kinks and jumps these disagree.

        `others()` are tangents with other rounding errors: a tangent that these decide on has no right value.
        """
        dtypes = {numpy.asarray(x).dtype.name for x in [*xs, *pushed]} | self.program.dtypes()
        if not dtypes <= {"float64", "complex128", "bool"}:
            return
        if re.search(r"1e-?\d|2\*\*40", self.program.source()) or any(numpy.any(numpy.abs(x) > 1e3) for x in xs):
            return  # a step is too small to be seen beside these, or leaps over them
        if CHOICE.search(self.program.source()) and any(numpy.any(x == 0) for x in xs):
            return  # where(x, x, 0) has one derivative at 0, and differences beside it another
        values = {}
        for h in (1e-5, 1e-6, 0.0, -1e-6, -1e-5):
            try:
                values[h] = g(*[x + h * t for x, t in zip(xs, ts)])
            except Exception:  # as of an eigenvalue that is not there
                return
        exact = g(*xs)
        for i, t in enumerate(pushed):
            if not numpy.allclose(exact[i], values[0.0][i], equal_nan=True):
                continue  # on a branch cut, where the sign of a zero, that x + 0 t has not, decides
            high, low, here, less, least = (numpy.asarray(values[h][i]) for h in (1e-5, 1e-6, 0.0, -1e-6, -1e-5))
            estimates = [(high - here) / 1e-5, (here - least) / 1e-5, (low - less) / 2e-6, (high - least) / 2e-5]
            size = numpy.max([numpy.abs(e) for e in [*estimates, t]], axis=0) + 1e-3
            spread = numpy.max([numpy.abs(e - estimates[-1]) for e in estimates], axis=0)
            if (spread >= 1e-2 * size).any():
                continue  # a kink, as where equal numbers are sorted; for some of them the differences agree by chance
            smooth = (numpy.abs(here) < 1e4 * size) & (size < 1e3)
            wrong = smooth & ~(numpy.abs(t - estimates[-1]) <= 2 * spread + 1e-3 * size)
            self.counts["differences", "compared"] += int(smooth.sum())
            if wrong.any():  # unless rounding errors decide, as on the standard deviation of equal numbers
                noise = numpy.max([numpy.abs(numpy.asarray(e[i]) - t) for e in others()], axis=0)
                wrong &= ~(numpy.abs(t - estimates[-1]) <= 32 * noise)
            if wrong.any():
                raise Finding(f"tangent {i} is\n{t!r}, but differences are\n{estimates[-1]!r}")

    def noise(self, seed: int) -> Callable:
        return self.program.function(md.numpy, noisy(numpy.random.default_rng(seed)))

    def adjoint(self, pushed: list, cts: list, ts: list, pulled: list, again: Callable) -> None:
        def paired(xs: list, ys: list) -> tuple[float, float]:
            products = [numpy.ravel(numpy.real(_wide(x) * _wide(y))) for x, y in zip(xs, ys)]
            products = numpy.concatenate([numpy.zeros(1), *products])
            return float(products.sum()), float(abs(products).sum())

        def difference(pushed: list, pulled: list) -> tuple[float, float, float]:
            one, size = paired(pushed, cts)
            two, other = paired(pulled, ts)
            return one, two, size + other

        one, two, size = difference(pushed, pulled)
        if not numpy.isfinite(one) or not numpy.isfinite(two) or size > 1e30:
            self.counts["adjoint", "not finite"] += 1
            return
        kinds = {numpy.asarray(x).dtype.name for x in [*ts, *cts, *self.args]} | self.program.dtypes()
        eps, tiny = max((numpy.finfo(d).eps, numpy.finfo(d).tiny) for d in kinds if numpy.dtype(d).kind in "fc")
        self.counts["adjoint", "compared"] += 1
        if abs(one - two) <= 200 * (eps * size + tiny):
            return
        spread = 0.0
        for seed in range(12):
            noise = difference(*again(seed))
            spread = max(spread, abs(noise[0] - one), abs(noise[1] - two))
        if not abs(one - two) <= 200 * (eps * size + tiny + spread):
            raise Finding(f"forward and reverse mode: {one} and {two}")


def _wide(x: Any) -> numpy.ndarray:
    x = numpy.asarray(x)
    return x.astype(complex if x.dtype.kind == "c" else float) if x.dtype.kind in "fc" else numpy.zeros(x.shape)


def _shared(x: Any, y: Any) -> bool:
    return isinstance(x, numpy.ndarray) and isinstance(y, numpy.ndarray) and numpy.shares_memory(x, y)


def _may_share(x: Any, y: Any) -> bool:
    """NumPy's do, or one is a scalar: `+a` of a 0-d array is a scalar there, and here an array without dimensions."""
    return _shared(x, y) or isinstance(x, numpy.generic)


def quietly(f: Callable) -> Callable:
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings(), numpy.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return f(*args, **kwargs)

    return run


# ---------------------------------------------------------------- findings


@dataclasses.dataclass
class Failure:
    program: Program
    name: str
    error: Exception

    def __str__(self) -> str:
        args = [f"{name} = {source}" for name, source in self.program.arguments().items()]
        text = "".join(traceback.format_exception_only(self.error)).strip()
        return "\n".join(
            [
                f"# seed {self.program.values!r}, {self.name}: {text[:600]}".replace("\n", "\n# "),
                "import minidiff as md, minidiff.numpy as np; from numpy import inf, nan",
                *args,
                self.program.source(),
            ]
        )


@quietly
def failures(program: Program, counts: Counter, only: str = "") -> list[Failure]:
    """Yield the failures of a program, in all ways or in one."""
    reused = random.Random(program.values).choice([0, buffers.REUSED_BYTES])  # compiled, arrays of any size are reused
    with mock.patch.object(buffers, "REUSED_BYTES", reused):
        try:
            names = [name for name, _ in Check(program, counts).all()]
        except Exception:
            return []
        return [f for name in names if only in ("", name) if (f := _failure(program, counts, name))]


def _failure(program: Program, counts: Counter, name: str) -> Failure | None:
    try:
        dict(Check(program, counts).all())[name]()
    except Exception as error:
        return Failure(program, name, error)
    counts[name, "checked"] += 1
    return None


def kind_of(error: Exception) -> str:
    """Return the part of an error that a smaller program's error must share."""
    return re.split(r"[ :]", str(error))[0] if isinstance(error, Finding) else type(error).__name__


def shrunk(failure: Failure) -> Failure:
    """A smaller program with a failure of this kind, in the same way."""
    smaller = True
    while smaller:
        smaller = False
        for program in _smaller(failure.program):
            if raises_python_numbers(program):
                continue
            actual = failures(program, Counter(), failure.name)
            if actual and kind_of(actual[0].error) == kind_of(failure.error):
                failure, smaller = actual[0], True
                break
    return failure


def raises_python_numbers(program: Program) -> bool:
    """Whether it takes a power of nothing but Python's numbers: `3 ** 2**40` would fill the memory, for hours."""
    plain = {name for name, kind in program.inputs.items() if not kind.dtype and not kind.same_as}
    for name, line in program.lines.items():
        if "np." not in line and set(re.findall(r"(?<![\w.'])[a-z](?!\w)", line)) <= plain:
            if "**" in line:
                return True
            plain.add(name)
    return False


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with a result, a line, an argument or a layout less."""
    inputs, lines, results = program.inputs, program.lines, program.results
    if len(results) > 1:
        for r in results:
            yield dataclasses.replace(program, results=tuple(x for x in results if x != r))
    names = [*inputs, *lines]
    for r in results:
        for name in reversed(names[: names.index(r)]):
            yield dataclasses.replace(program, results=tuple(name if x == r else x for x in results))
    for name in reversed(lines):
        rest = {k: v for k, v in lines.items() if k != name}
        used = name in results or any(re.search(rf"\b{name}\b", line) for line in rest.values())
        if not used:
            yield dataclasses.replace(program, lines=rest)
            continue
        for other in reversed(names[: names.index(name)]):
            changed = {k: re.sub(rf"\b{name}\b", other, v) for k, v in rest.items()}
            yield dataclasses.replace(program, lines=changed, results=tuple(other if x == name else x for x in results))
    for name, kind in inputs.items():
        rest = {k: v for k, v in inputs.items() if k != name}
        uses = [*results, *lines.values(), *(k.same_as for k in rest.values())]
        if rest and not any(re.search(rf"\b{name}\b", text) for text in uses):
            yield dataclasses.replace(program, inputs=rest)
        if kind.layout != "C":
            yield dataclasses.replace(program, inputs={**inputs, name: dataclasses.replace(kind, layout="C")})


def fuzz(seeds: Iterable[str], counts: Counter) -> Iterator[list[Failure]]:
    """For each program of these seeds in which something is wrong: all that is."""
    for seed in seeds:
        program = quietly(drawn)(seed)
        counts["programs"] += 1
        counts["lines"] += len(program.lines)
        if actual := failures(program, counts):
            yield actual


def resident_memory() -> int:
    """Return the memory of this process now, in MiB."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


def most_memory() -> int:
    """Return the highest memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10


#: Of random programs, before each route has its turn: then they take about the same time.
PROGRAMS_A_ROUTE = 10
#: The programs after which all modules are imported, and caches filled: the memory grows little from then on.
PROGRAMS_TO_WARM_UP = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--programs", type=int, default=10**9, help="how many at most")
    parser.add_argument("--shown", type=int, default=3, help="how many failures of one kind are made small and printed")
    options = parser.parse_args()
    end, counts, kinds = time.monotonic() + 60 * options.minutes, Counter(), Counter()
    numbers = itertools.takewhile(lambda k: time.monotonic() < end, range(options.programs))
    start = resident_memory()
    for k in numbers:
        seed = f"{options.seed}/{k}"
        start = resident_memory() if k == PROGRAMS_TO_WARM_UP else start
        for actual in fuzz([seed], counts):
            kind = kind_of(actual[0].error)
            kinds[kind] += 1
            if kinds[kind] <= options.shown:
                print(f"# wrong in: {', '.join(f.name for f in actual)}\n{shrunk(actual[0])}", flush=True)
        if k % PROGRAMS_A_ROUTE == 0:
            for text in fuzz_routes([seed], counts):
                kind = text[2:].split(",")[0]
                kinds[kind] += 1
                if kinds[kind] <= options.shown:
                    print(text, flush=True)
    for key, n in sorted(counts.items(), key=str):
        print(f"{n:8} {key if isinstance(key, str) else ', '.join(key)}")
    for text, n in REFUSED.most_common():
        print(f"{n:8} refused: {text}")
    print(f"resident memory in MiB: {start} at first, {resident_memory()} at the end, {most_memory()} at most")
    print(f"{sum(kinds.values())} programs with findings, seed {options.seed}: {dict(kinds)}")
    sys.exit(bool(kinds))


if __name__ == "__main__":
    main()
