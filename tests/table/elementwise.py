"""Rows of `minidiff/ops/elementwise.py` and `minidiff/ops/composed.py`."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

import minidiff.numpy as mnp
from tests.table.rows import Row, complex_, distinct, form, positive, product, random, real, row


def on_both_sides(f: Callable, y: Any) -> list[Row]:
    """An operator with this on its left, and on its right."""
    return [
        form("operator", f"{f.__name__}, {y!r} on the left", lambda x: f(y, x), 1.5),
        form("operator", f"{f.__name__}, {y!r} on the right", lambda x: f(x, y), 1.5),
    ]


def _broadcasting(function: Callable, make: Callable) -> list[Row]:
    shapes = [((3,), (3,)), ((3, 1), (2, 1, 4)), ((), (2, 3)), ((2, 3), ()), ((1, 3), (2, 1)), ((0, 3), (1, 3))]
    rows = [row(function, make(*a), make(*b)) for a, b in shapes]
    for c in (2, np.float32(1.5)):
        rows.append(form("a scalar", f"{function.__name__}, {c!r}", lambda x, c=c: function(x, c), make(2)))
        rows.append(form("a scalar", f"{c!r}, {function.__name__}", lambda x, c=c: function(c, x), make(2)))
    return rows


def augmented(x: Any) -> Any:
    """Operators that write: they bind the name to a new value, and leave the old one alone."""
    y = 1 * x
    y += 1
    y *= x
    y **= 2
    return x + y


def within(*shape: int) -> np.ndarray:
    """Numbers between -1 and 1, where arcsin and its like are defined."""
    return random.uniform(-0.9, 0.9, shape)


def above(*shape: int) -> np.ndarray:
    return 1 + positive(*shape)


def integers(*shape: int) -> np.ndarray:
    return random.integers(1, 20, shape)


ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
BITS = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]

#: Functions of one operand, by what they are defined for; those of the first two lines also for complex numbers.
ENTIRE = [np.negative, np.positive, np.exp, np.exp2, np.expm1, np.sin, np.cos, np.tan, np.sinh, np.cosh, np.tanh]
ENTIRE += [np.square, np.arcsinh, np.arctan, np.sinc, np.real, np.imag, np.conjugate, np.absolute, np.sign, np.copy]
REAL = [np.fabs, np.deg2rad, np.rad2deg, np.radians, np.degrees, np.i0, np.rint, np.floor, np.ceil, np.trunc, np.fix]
REAL += [np.spacing]
POSITIVE = [np.log, np.log2, np.log10, np.log1p, np.sqrt, np.reciprocal]
WITHIN = [np.arcsin, np.arccos, np.arctanh]
#: Of two real operands.
PAIRS = [np.logaddexp, np.logaddexp2, np.arctan2, np.hypot, np.copysign, np.nextafter, np.heaviside, np.float_power]
EXTREMA = [np.maximum, np.minimum, np.fmax, np.fmin]
#: Results of integers or booleans.
PREDICATES = [np.isfinite, np.isinf, np.isnan, np.signbit, np.logical_not, np.isposinf, np.isneginf]
OF_INTEGERS = [np.gcd, np.lcm, np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift]
COMPARED = [np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal]
COMPARED += [np.logical_and, np.logical_or, np.logical_xor]
CLOSE = [np.isclose, np.allclose, np.array_equal, np.array_equiv]
OF_COMPLEX = [np.iscomplex, np.isreal, np.iscomplexobj, np.isrealobj]

DISCRETE = {*PREDICATES, *OF_INTEGERS, *COMPARED, *CLOSE, *OF_COMPLEX, np.invert, np.bitwise_count}
DISCRETE |= {np.can_cast, "comparison", "bits"}

LINEAR = dict.fromkeys([np.add, np.subtract, np.negative, np.positive, np.copy, np.astype])
LINEAR |= dict.fromkeys([np.deg2rad, np.rad2deg, np.radians, np.degrees, np.real, np.imag, np.conjugate])
LINEAR |= {np.where: [(1, 2)], np.divide: [(0,)], np.multiply: [(0,), (1,)], np.ldexp: [(0,)]}

NOT_FINITE = np.array([0.0, np.nan, np.inf, -np.inf, -1.5])
SIDES = (2, np.float64(1.7), positive(2))
YES, NO = np.array([True, False]), np.array([[False], [True]])
KNOTS = np.array([0.0, 0.4, 1.1, 2.0])


#: Numbers on all sides of branch cuts.
QUADRANTS = np.array([[complex(x, y) for x in (-2.7, -0.6, -0.1, 0.1, 0.9, 3.0)] for y in (-2.1, -0.3, 0.2, 1.4)])


def choose(x: Any, y: Any, z: Any) -> Any:
    return np.select([x > 0.5, x > -0.5], [y, z], x)


ROWS = [
    *(r for f in (np.add, np.subtract, np.multiply, np.divide) for r in _broadcasting(f, positive)),
    *(r for f in EXTREMA for r in _broadcasting(f, lambda *shape: 7 * positive(*shape))),
    *_broadcasting(np.power, positive),
    *(row(f, complex_(2, 3), make(3)) for f in (np.add, np.multiply, np.divide) for make in (complex_, positive)),
    *product([np.power], [(complex_(3), complex_(3)), (complex_(3), real(3)), (positive(3), complex_(3))]),
    *(row(np.power, real(3), f=lambda x, n=n: np.power(x, n), n=n) for n in (0, 1, 2, 3, -2, 2.0, 0.0)),
    row(np.power, positive(3), np.array([2, -1, 0])),
    *(row(f, real(2, 3)) for f in ENTIRE + REAL),
    *(row(f, complex_(2, 3)) for f in ENTIRE),
    *product([*POSITIVE, np.cbrt], [positive(2, 3)]),
    *product(POSITIVE, [complex_(2, 3)]),
    *(row(f, make(2, 3)) for f in WITHIN for make in (within, complex_)),
    row(np.arccosh, above(3)),
    *(row(f, QUADRANTS) for f in (np.arccosh, *WITHIN, np.arcsinh, np.arctan, np.sqrt, np.log)),
    *(row(f, 0.7) for f in (*ENTIRE, *REAL, *POSITIVE, *WITHIN, np.cbrt)),
    *(row(f, real(0, 2)) for f in (np.sin, np.sinc, np.i0)),
    *(row(f, 3 * positive(2, 3), make(3)) for f in PAIRS for make in (positive, lambda n: 1 + distinct(n))),
    *(row(f, positive(2), 1.5) for f in PAIRS),
    *(row(f, real(3), f=lambda x, f=f: f(2, x)) for f in (np.logaddexp, np.arctan2, np.hypot, np.float_power)),
    row(np.float_power, complex_(3), real(3)),
    row(np.heaviside, np.array([-1.0, 0.0, 2.0]), f=lambda x: np.heaviside(np.array([-1.0, 0.0, 2.0]), x)),
    *(row(f, real(3), f=lambda x, f=f: f(x, 0.3)) for f in (np.remainder, np.fmod, np.floor_divide)),
    *(row(f, 3 * positive(2, 3), np.array([0.7, 1.3, 9.0])) for f in (np.remainder, np.fmod, np.floor_divide)),
    *(row(f, -3 * positive(2, 3), np.array([0.7, -1.3, 9.0])) for f in (np.remainder, np.fmod)),
    row(np.divmod, 3 * positive(3), np.array([0.7, 1.3, -9.0]), f=lambda x, y: np.stack(np.divmod(x, y))),
    *(row(f, 5 * real(3), f=lambda x, f=f: np.stack(f(x))) for f in (np.modf, np.frexp)),
    row(np.ldexp, real(2, 3), np.array([1, -2, 3])),
    row(np.ldexp, real(2), f=lambda x: np.ldexp(x, 3)),
    *(row(f, real(2, 3), np.array([[0.0], [np.inf]])) for f in COMPARED),
    *(row(f, real(3), 0.1) for f in COMPARED),
    *(row(f, NOT_FINITE) for f in PREDICATES),
    *(row(f, integers(2, 3), integers(3)) for f in OF_INTEGERS),
    *(row(f, integers(2, 3), 2) for f in OF_INTEGERS),
    row(np.invert, integers(2, 3)),
    row(np.bitwise_count, integers(2, 3), f=lambda x: np.bitwise_count(x).astype(int)),
    form("dtype=", "add", lambda x: np.add(x, 1, dtype=complex), real(3)),
    form("dtype=", "of integers", lambda x, n: x * np.exp(n, dtype=np.float64), real(3), integers(3) // 5),
    row(np.where, real(2, 3) > 0, real(2, 3), real(3)),
    row(np.where, np.array([True, False]), real(3, 1), real()),
    row(np.where, np.array(True), real(2), real(2)),
    row(np.where, np.array([True, False]), complex_(2), real(2)),
    row("where a scalar", real(3), f=lambda x: np.where(x > 0, x, 0.5)),
    row("where a scalar", real(3), f=lambda x: np.where(x > 0, 2, np.where(x > -1, x, x[0]))),
    # compositions
    *(row(np.angle, make(3), deg=d) for make in (complex_, real) for d in (False, True)),
    *(row(f, 40 * real(2, 3), decimals=n) for f in (np.round, np.around) for n in (0, 2, -1)),
    row(np.round, complex_(3), decimals=1),
    *(row(np.round, 7 * integers(3), f=lambda x, n=n: 1.0 * np.round(x, n), n=n) for n in (0, 1, -1)),
    *(row(np.clip, distinct(2, 3), **limits) for limits in ({"a_min": 0.5, "a_max": None}, {"a_min": 0, "a_max": 1})),
    row(np.clip, distinct(2, 3), 0.4 + distinct(3), 1.21),
    row(np.clip, distinct(3), f=lambda x: np.clip(np.arange(3.0), x, [5.0, 1.1, 1.0])),
    *(row(np.nan_to_num, NOT_FINITE, **k) for k in ({}, {"nan": 1.0, "posinf": 2.0, "neginf": -3.0})),
    *(row(np.nan_to_num, x) for x in (real(2, 3), complex_(3))),
    row(np.nan_to_num, integers(2), f=lambda x: 1.0 * np.nan_to_num(x)),
    row(np.select, real(3), f=lambda x: np.select([x > 0, x > -1], [x, [1.0, 2.0, 3.0]], default=x * x)),
    row(np.select, YES, NO, real(2), real(2, 1), real(), f=lambda a, b, x, y, z: np.select([a, b], [x, y], z)),
    row(np.piecewise, real(2, 3), f=lambda x: np.piecewise(x, [x < 0, x > 0.5], [lambda x: x * x, 3.0, np.exp])),
    row(np.piecewise, real(4), f=lambda x: np.piecewise(x, x > 0, [lambda x, k: np.log(k * x), np.multiply], 2.0)),
    row(np.piecewise, 0.7, f=lambda x: np.piecewise(x, [x > 0, x > 1], [np.log, 1.0])),
    *(row(np.interp, 2 * within(2, 3), KNOTS, real(4), **k) for k in ({}, {"left": -1.0, "right": 2.0})),
    row(np.interp, 0.7, KNOTS, complex_(4)),
    row(np.interp, positive(3), KNOTS, np.array([1, 5, 2, 3])),
    row(np.interp, 2 * within(2, 3), KNOTS, np.array([5, 3, 4, 1], np.uint8)),
    row(np.interp, positive(3), np.array([0.4]), real(1)),
    row(np.interp, 9 * within(3), real(4), f=lambda x, fp: np.interp(x, KNOTS[::-1], fp, period=2.5)),
    form("defaults", "interp", lambda y: mnp.interp([-1.0, 0.2, 3.0], KNOTS, KNOTS, left=y, right=2 * y), real()),
    form("defaults", "select", lambda y: mnp.select([KNOTS > 1], [KNOTS], y), real(4)),
    *(row(np.unwrap, 9 * real(3, 4), **k) for k in ({}, {"axis": 0, "period": 2.0}, {"discont": 5.0})),
    *(row(f, *args) for f in CLOSE for args in ((KNOTS, KNOTS + 1e-9), (KNOTS, KNOTS), (real(2, 3), 0.5))),
    row(np.isclose, NOT_FINITE, NOT_FINITE, equal_nan=True),
    row(np.isclose, NOT_FINITE, NOT_FINITE[::-1].copy(), atol=1.0),
    *(row(np.array_equal, NOT_FINITE, NOT_FINITE, equal_nan=e) for e in (True, False)),
    *(row(f, real(3), real(2)) for f in (np.array_equal, np.array_equiv)),
    *(row(f, x) for f in OF_COMPLEX for x in (real(2), np.array([1j, 2.0 + 0j]))),
    *(row(np.astype, real(2, 3), f=lambda x, d=d: np.astype(x, d), d=d) for d in (float, complex)),
    row(np.astype, complex_(3), f=lambda x: np.astype(x, complex)),
    row(np.real_if_close, real(2)),
    row(np.can_cast, real(2), f=lambda x: np.can_cast(x, np.float32)),
    # operators and methods
    *(r for f in ARITHMETIC for y in SIDES for r in on_both_sides(f, y)),
    form("operator", "divmod", lambda x: np.stack([*divmod(x, 2), *divmod(0.3, x)]), positive(3)),
    *(form("operator", f.__name__, f, real(2, 3)) for f in (operator.neg, operator.pos, abs)),
    *(form("operator", f"** {n}", lambda x, n=n: x**n, positive(3)) for n in (2, 3, -1, 0, 0.5, 1.0, 2.0, -2)),
    *(form("operator", f"** {n}, complex", lambda x, n=n: x**n, complex_(3)) for n in (2, 3, -1, 0.5)),
    *(form("comparison", f.__name__, f, real(3), np.array([0.0, 1.0, -1.0])) for f in COMPARISONS),
    *(form("bits", f.__name__, lambda x, f=f: f(x, 3) + f(np.array([0, 0, 1]), x), integers(3)) for f in BITS),
    form("bits", "of booleans", lambda x: ~(x > 0) & (x < 1) | (x > 5) ^ (x > -1), real(5)),
    form("bits", "invert", operator.invert, integers(3)),
    *(form("method", m, operator.methodcaller(m), complex_(3)) for m in ("conj", "conjugate", "copy")),
    *(form("method", m, operator.attrgetter(m), x) for m in ("real", "imag") for x in (complex_(3), real(3))),
    form("method", "clip", lambda x: x.clip(0.5, 1.2) + x.clip(min=0.7) + x.clip(max=x[1]), distinct(3)),
    form("method", "round", lambda x: x.round() + x.round(1), real(3)),
    form("method", "astype", lambda x: x.astype(complex, copy=False), real(3)),
    form("in place", "+= *= **=", lambda x: augmented(x), real(3)),
]
