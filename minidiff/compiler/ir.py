"""LLVM's intermediate representation (IR), written by Python's operators.

A `Value` stands for one element of an array. An operator on values writes an instruction, and returns the value that
names its result. So a function of numbers, such as `exp` in `mathematics.py`, writes the code that computes it.

>>> code = Code()
>>> x = Value(code, "%x", numpy.dtype(float))
>>> y = select(x < 0.0, -x, x * x + 1.0)
>>> print(code)
%v1 = fcmp olt double %x, 0x0000000000000000
%v2 = fneg double %x
%v3 = fmul double %x, %x
%v4 = fadd double %v3, 0x3FF0000000000000
%v5 = select i1 %v1, double %v2, double %v4
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, Union

import numpy

#: An operand of a value's operator: a value, or a number, which takes the value's dtype.
Number = Union["Value", float, int, bool]

_TYPES = {"float64": "double", "float32": "float", "bool": "i1"}


@functools.cache
def type_of(dtype: numpy.dtype) -> str:
    """Return LLVM's type of an element of an array, once loaded: `double`, `float`, `i64`, …, and `i1` for bool."""
    return _TYPES.get(dtype.name) or f"i{8 * dtype.itemsize}"


class Code:
    """Instructions, in order; one that was written before is not written again."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: dict[str, str] = {}
        self.declarations = {"declare i32 @fetestexcept(i32)", "declare i32 @feclearexcept(i32)"}
        #: Conditions: where one is true, NumPy may warn; where one of the second kind is, the result is not to be used.
        self.warnings: list[Value] = []
        self.exceptions: list[Value] = []

    def write(self, instruction: str) -> str:
        """Write an instruction without side effects, and return the name of its result."""
        name = self.known.get(instruction)
        if name is None:
            self.known[instruction] = name = f"%v{len(self.lines) + 1}"
            self.lines.append(f"{name} = {instruction}")
        return name

    def call(self, intrinsic: str, *operands: Value) -> Value:
        """Call an intrinsic of LLVM on floating-point numbers, whose type the result has, such as `sqrt`."""
        dtype = operands[0].dtype
        type_, name = type_of(dtype), f"@llvm.{intrinsic}.f{8 * dtype.itemsize}"
        self.declarations.add(f"declare {type_} {name}({', '.join([type_] * len(operands))})")
        return Value(self, self.write(f"call {type_} {name}({', '.join(map(str, operands))})"), dtype)

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _operator(real: str, signed: str = "", other: str = "") -> Callable[[Value, Number], Value]:
    """Return an operator of values, by its instructions for each kind of dtype."""

    def write(x: Value, y: Number) -> Value:
        return x.binary({"f": real, "i": signed or real}.get(x.dtype.kind, other or signed or real), y)

    return write


class Value:
    """The result of an instruction, an argument, or a constant: its text in the IR, and its dtype."""

    __slots__ = ("code", "text", "dtype")

    def __init__(self, code: Code | None, text: str, dtype: numpy.dtype):
        self.code: Any = code  # None of a constant that no instruction takes
        self.text, self.dtype = text, dtype

    def __str__(self) -> str:
        return f"{type_of(self.dtype)} {self.text}"

    @property
    def is_number(self) -> bool:
        """Whether this is a constant that is not NaN."""
        return self.text[0] != "%" and not self.text.upper().startswith(("0X7FF8", "0XFFF8"))

    def constant(self, number: Any, dtype: numpy.dtype | None = None) -> Value:
        """Return a number as a value, by default of this value's dtype."""
        return constant(self.code, number, self.dtype if dtype is None else dtype)

    def operand(self, x: Number) -> Value:
        """Return a value unchanged, or a number as a value of this dtype."""
        return x if isinstance(x, Value) else self.constant(x)

    def binary(self, operation: str, y: Number) -> Value:
        """Write an operation on this and another value, of one dtype; a comparison gives a bool."""
        y = self.operand(y)
        if self.dtype != y.dtype:
            raise TypeError(f"{operation} of {self.dtype} and {y.dtype}: convert one first")
        dtype = numpy.dtype(bool) if "cmp" in operation else self.dtype
        return Value(self.code, self.code.write(f"{operation} {self}, {y.text}"), dtype)

    # The instructions for floating-point numbers, for signed integers, and for others, if they differ.
    __add__ = _operator("fadd", "add")
    __sub__ = _operator("fsub", "sub")
    __mul__ = _operator("fmul", "mul")
    __truediv__ = _operator("fdiv")
    __and__ = _operator("and")
    __or__ = _operator("or")
    __xor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr", "ashr", "lshr")
    __lt__ = _operator("fcmp olt", "icmp slt", "icmp ult")
    __le__ = _operator("fcmp ole", "icmp sle", "icmp ule")
    __gt__ = _operator("fcmp ogt", "icmp sgt", "icmp ugt")
    __ge__ = _operator("fcmp oge", "icmp sge", "icmp uge")
    __eq__ = _operator("fcmp oeq", "icmp eq")  # type: ignore[assignment]
    __ne__ = _operator("fcmp une", "icmp ne")  # type: ignore[assignment]

    def __radd__(self, x: Number) -> Value:
        return self.operand(x) + self

    def __rsub__(self, x: Number) -> Value:
        return self.operand(x) - self

    def __rmul__(self, x: Number) -> Value:
        return self.operand(x) * self

    def __rtruediv__(self, x: Number) -> Value:
        return self.operand(x) / self

    def __neg__(self) -> Value:
        if self.dtype.kind != "f":
            return 0 - self
        return Value(self.code, self.code.write(f"fneg {self}"), self.dtype)

    def __abs__(self) -> Value:
        if self.dtype.kind == "f":
            return self.code.call("fabs", self)
        return select(self < 0, -self, self) if self.dtype.kind == "i" else self

    def __invert__(self) -> Value:
        return self ^ (-1 if self.dtype.kind != "b" else True)

    __hash__ = None  # type: ignore[assignment]


def constant(code: Code | None, number: Any, dtype: numpy.dtype) -> Value:
    """Return a number as a value: floating-point numbers are written as their bits, in double precision."""
    if dtype.kind == "f":
        (bits,) = struct.unpack("<Q", struct.pack("<d", dtype.type(number)))
        return Value(code, f"0x{bits:016X}", dtype)
    if dtype.kind == "b":
        return Value(code, "true" if number else "false", dtype)
    return Value(code, str(int(number)), dtype)


def select(condition: Value, x: Number, y: Number) -> Value:
    """x where the condition is true, else y; both are computed."""
    value = x if isinstance(x, Value) else y
    if not isinstance(value, Value):
        raise TypeError("select of two Python numbers: make one a value with `constant`")
    x, y = value.operand(x), value.operand(y)
    return Value(value.code, value.code.write(f"select {condition}, {x}, {y}"), value.dtype)


def bits(x: Value) -> Value:
    """Return the bits of a floating-point number, as a signed integer of equal size."""
    return _cast("bitcast", x, numpy.dtype(f"i{x.dtype.itemsize}"))


def from_bits(n: Value) -> Value:
    """Return the floating-point number with these bits: the inverse of `bits`."""
    return _cast("bitcast", n, numpy.dtype(f"f{n.dtype.itemsize}"))


def convert(x: Value, dtype: numpy.dtype) -> Value:
    """Return a value converted to another dtype, as by `astype`; not from floating-point numbers to integers."""
    old, new = x.dtype.kind, dtype.kind
    if x.dtype == dtype:
        return x
    if new == "b":
        return x != 0
    if old == "f" and new == "f":
        return _cast("fpext" if dtype.itemsize > x.dtype.itemsize else "fptrunc", x, dtype)
    if new == "f":
        return _cast("sitofp" if old == "i" else "uitofp", x, dtype)
    if old == "b" or dtype.itemsize > x.dtype.itemsize:
        return _cast("sext" if old == "i" else "zext", x, dtype)
    if dtype.itemsize < x.dtype.itemsize:
        return _cast("trunc", x, dtype)
    return Value(x.code, x.text, dtype)  # signed and unsigned integers of one size are one type


def _cast(name: str, x: Value, dtype: numpy.dtype) -> Value:
    return Value(x.code, x.code.write(f"{name} {x} to {type_of(dtype)}"), dtype)


def _intrinsic(name: str) -> Callable[..., Value]:
    """Return a function of LLVM on floating-point numbers, of which the first is a value."""
    return lambda x, *operands: x.code.call(name, x, *map(x.operand, operands))


#: The square root, correctly rounded; the magnitude of x with the sign of y.
sqrt, copysign = _intrinsic("sqrt"), _intrinsic("copysign")
#: The integer below, above, toward 0, and the nearest one, of two the even one.
floor, ceil, trunc, rint = map(_intrinsic, ("floor", "ceil", "trunc", "rint"))
#: x * y + z, rounded once; or once or twice, whichever the processor does faster.
fma, muladd = _intrinsic("fma"), _intrinsic("fmuladd")


def polynomial(x: Value, *coefficients: float) -> Value:
    """c0 + c1 x + c2 x² + …, by pairs: (c0 + c1 x) + x² (c2 + c3 x) + …, and pairs of these, in powers of x².

    By Horner's rule (`horner`), each step would wait for the one before; but it rounds less.
    """
    terms: list[Number] = list(coefficients)
    while len(terms) > 1:
        pairs = [muladd(x, high, low) for low, high in zip(terms[::2], terms[1::2])]
        terms = [*pairs, *terms[2 * len(pairs) :]]
        x = x * x
    return x.operand(terms[0])


def horner(x: Value, *coefficients: float) -> Value:
    """c0 + x (c1 + x (c2 + …)), as accurate as it can be."""
    total: Number = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        total = muladd(x, total, c)
    return x.operand(total)


def warn_where(condition: Value) -> None:
    """Let NumPy compute the group again, and warn, if the condition is true for an element."""
    condition.code.warnings.append(condition)


def leave_to_numpy(condition: Value) -> None:
    """Let NumPy compute the group again, since the result is not right, if the condition is true for an element."""
    condition.code.exceptions.append(condition)
