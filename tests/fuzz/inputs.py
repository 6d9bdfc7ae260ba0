"""Arguments of random programs, as source: numbers of all dtypes in all layouts of memory, or any text."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
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
REALS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 3e38, 1e-45, 65504.0, numpy.inf, -numpy.inf, numpy.nan]


def constant(x: Any) -> str:
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
    """The kind of an argument without its values: an array, a Python number (no dtype), or any text."""

    dtype: str = ""
    shape: tuple = ()
    layout: str = "C"
    text: str = ""

    def source(self, rng: random.Random) -> str:
        """An argument like this, with values of its own."""
        if self.text:
            return self.text
        if not self.dtype:
            numbers = {float: f"{rng.uniform(-2, 2):.3}", int: str(rng.randint(-3, 9))}
            return numbers.get(self.shape, f"complex({rng.uniform(-2, 2):.3}, {rng.uniform(-2, 2):.3})")
        return self.laid_out(self.values(rng))

    def values(self, rng: random.Random) -> numpy.ndarray:
        dtype, count, wild = numpy.dtype(self.dtype), int(numpy.prod(self.shape)), rng.random() < 0.15
        if dtype.kind in "iu":
            info = numpy.iinfo(dtype)
            pool = [info.min, info.max, 0, 1] if wild else [v for v in range(-3, 8) if v >= info.min]
        elif dtype.kind == "b":
            pool = [False, True]
        else:
            pool = (
                REALS
                if wild
                else [lambda: rng.uniform(-2, 2), lambda: rng.randint(-16, 16) / 8, lambda: rng.randint(-2, 3)]
            )
        pick = lambda: v() if callable(v := rng.choice(pool)) else v  # noqa: E731
        numbers = [complex(pick(), pick()) if dtype.kind == "c" else pick() for _ in range(count)]
        with numpy.errstate(all="ignore"):
            return numpy.array(numbers, dtype).reshape(self.shape)

    def laid_out(self, x: numpy.ndarray) -> str:
        if self.layout == "stride 0" and not x.size:
            return literal(x)
        return LAYOUTS[self.layout].format(x=literal(x), shape=x.shape, dtype=self.dtype)
