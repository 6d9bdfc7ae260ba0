"""Operations at random arguments: values as NumPy's by every route, derivatives by differences, adjoint pullbacks."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.as_numpy import check_as_numpy
from tests.checks.indices import indices

small = st.integers(-3, 3)
X3, X24 = np.arange(1.0, 10.0).reshape(3, 3), np.arange(1.0, 25.0).reshape(2, 3, 4)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def complex_numbers(*shape: int) -> np.ndarray:
    real, imag = numbers(2, *shape)
    return real + 1j * imag


# ---------------------------------------------------------------- indices and updates

UFUNCS = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "power": np.power}
UFUNCS |= {"max": np.maximum, "min": np.minimum}
METHODS = ["set", *UFUNCS]


def update(method: str, index: Any, x: Any, v: Any) -> Any:
    """Return the updated array; plain ones are updated by NumPy, in place on a copy."""
    if not (isinstance(x, np.ndarray) and isinstance(v, (np.ndarray, float))):
        return getattr(mnp.at(x)[index], method)(v)
    x = np.array(x)
    if method == "set":
        x[index] = v
    else:
        UFUNCS[method].at(x, index, v)
    return x


@st.composite
def indexed(draw: Callable) -> tuple:
    x, index = draw(indices())
    return lambda x: x[index], x


@st.composite
def indexed_by_traced(draw: Callable) -> tuple:
    """Return an index whose integers are arguments."""
    x, index = draw(indices())
    entries = index if isinstance(index, tuple) else (index,)
    at = [k for k, i in enumerate(entries) if isinstance(i, (int, np.integer, np.ndarray, list)) and np.size(i)]
    at = [k for k in at if np.asarray(entries[k]).dtype != bool]
    if not at or not fits(x, index):
        return lambda x: x[index], x

    def f(x: Any, *arrays: Any) -> Any:
        replaced = dict(zip(at, arrays))
        return x[tuple(replaced.get(k, i) for k, i in enumerate(entries))]

    return f, x, *[np.asarray(entries[k]) for k in at]


def fits(x: np.ndarray, index: Any) -> bool:
    try:
        x[index]
    except IndexError:
        return False
    return True


@st.composite
def updated(draw: Callable) -> tuple:
    (x, index), method = draw(indices()), draw(st.sampled_from(METHODS))
    v = np.random.default_rng(0).uniform(0.5, 1.5, np.shape(x[index]) if fits(x, index) else ())
    return functools.partial(update, method, index), x, v


def window(shape: tuple, starts: Any, sizes: list) -> tuple:
    """Return NumPy's reference: a negative start counts from the end, and starts are clamped to the array."""
    counted = [i + n if i < 0 else i for i, n in zip(np.asarray(starts), shape)]
    return tuple(slice(i, i + m) for i, m in zip(np.clip(counted, 0, np.subtract(shape, sizes)), sizes))


@st.composite
def sliced(draw: Callable) -> tuple:
    """Return a slice that is read and written, and starts that are traced."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    sizes = [draw(st.integers(0, n)) for n in shape]
    starts = np.array([draw(st.integers(-2 * n, 2 * n)) for n in shape])

    def f(x: Any, v: Any, i: Any) -> Any:
        if not isinstance(i, np.ndarray) or not isinstance(x, np.ndarray):
            return md.dynamic_update_slice(x, v * md.dynamic_slice(x, i, sizes), i)
        written, at = x.copy(), window(x.shape, i, sizes)
        written[at] *= v
        return written

    return f, numbers(*shape), numbers(*sizes), starts


# ---------------------------------------------------------------- rearrangements

MODES: list[tuple[str, dict[str, Any]]] = [
    *(("edge", {}), ("wrap", {}), ("constant", {"constant_values": ((1.0, 2.0),)})),
    *(("linear_ramp", {"end_values": 3.0}), ("median", {}), ("median", {"stat_length": (1, 2)})),
    *((m, {"reflect_type": t}) for m in ("reflect", "symmetric") for t in ("even", "odd")),
    *((m, {"stat_length": n}) for m in ("mean", "maximum", "minimum") for n in (None, 1, ((2, 3),))),
]
width = st.tuples(st.integers(1, 4), st.tuples(st.integers(0, 6), st.integers(0, 6)))
places = small | st.lists(small, max_size=4) | st.builds(slice, *[st.none() | small] * 2)


@st.composite
def padded(draw: Callable) -> tuple:
    shape, widths = zip(*draw(st.lists(width, min_size=1, max_size=2)))
    mode, options = draw(st.sampled_from(MODES))
    return lambda x: np.pad(x, widths, mode, **options), numbers(*shape)


@st.composite
def deleted(draw: Callable) -> tuple:
    at, axis = draw(places), draw(st.sampled_from([None, 0, 1]))
    return lambda x: np.delete(x, at, axis), X3


@st.composite
def inserted(draw: Callable) -> tuple:
    """Return values that are inserted, one for all places or one for each, which do not always fit."""
    at, axis = draw(places), draw(st.sampled_from([None, 0, 1]))
    count = np.size(np.insert(np.arange(3), at, 0)) - 3
    shape = {None: (count,), 0: (count, 3), 1: (3, count)}[axis] if draw(st.booleans()) else ()
    return lambda x, v: np.insert(x, at, v, axis), X3, numbers(*shape)


@st.composite
def rearranged(draw: Callable) -> tuple:
    axes = draw(st.lists(st.integers(-3, 2), min_size=1, max_size=3))
    turns, plane = draw(st.integers(-5, 5)), draw(st.sampled_from([(0, 1), (2, 0), (1, -1)]))
    shifts = draw(small | st.lists(st.integers(-5, 5), min_size=len(axes), max_size=len(axes)))
    counts = draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
    functions = [
        *(lambda x: np.roll(x, shifts, tuple(axes)), lambda x: np.tile(x, counts), lambda x: np.tril(x, turns)),
        *(lambda x: np.repeat(x, counts, axis=1), lambda x: np.rot90(x, turns, plane)),
        lambda x: np.diagonal(x, turns, *plane),
    ]
    return draw(st.sampled_from(functions)), X24


# ---------------------------------------------------------------- products and transforms

SIZES = {"a": 2, "b": 3, "c": 1, "d": 2}


@st.composite
def contracted(draw: Callable) -> tuple:
    """Subscripts, explicit or not, with repeated labels, and shapes where some sizes of 1 are to be repeated."""
    terms = draw(st.lists(st.text("abcd", max_size=3), min_size=1, max_size=4))
    shapes = [[SIZES[i] for i in term] for term in terms]
    for term, shape in zip(terms, shapes):
        for k, i in enumerate(term):
            if term.count(i) == 1 and draw(st.integers(0, 5)) == 0:
                shape[k] = 1
    subscripts, optimize = ",".join(terms), draw(st.sampled_from([True, False, "optimal"]))
    if draw(st.booleans()):
        labels = draw(st.permutations(sorted(set("".join(terms)))))
        subscripts += "->" + "".join(labels[: draw(st.integers(0, len(labels)))])
    return lambda *xs: np.einsum(subscripts, *xs, optimize=optimize), *[numbers(*s) for s in shapes]


@st.composite
def convolved(draw: Callable) -> tuple:
    function, mode = (
        draw(st.sampled_from([np.convolve, np.correlate])),
        draw(st.sampled_from(["full", "same", "valid"])),
    )
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return lambda x, y: function(x, y, mode), numbers(n), np.ones(m) + 1j * np.arange(m)


OF_REALS = [np.fft.rfft, np.fft.ihfft, np.fft.rfftn]
ONE = [np.fft.fft, np.fft.ifft, np.fft.rfft, np.fft.irfft, np.fft.hfft, np.fft.ihfft]
MANY = [np.fft.fftn, np.fft.ifftn, np.fft.rfftn, np.fft.irfftn]


@st.composite
def transformed(draw: Callable) -> tuple:
    norm, n, axis = draw(st.sampled_from([None, "backward", "ortho", "forward"])), draw(st.integers(2, 7)), draw(small)
    if draw(st.booleans()):
        f, length = draw(st.sampled_from(ONE)), draw(st.integers(1, 9) | st.none())
        x = (numbers if f in OF_REALS else complex_numbers)(*((n, 2) if axis < 0 else (2, n)))
        return lambda x: f(x, length, -2 if axis < 0 else 1, norm), x
    f, axes = draw(st.sampled_from(MANY)), draw(st.permutations([0, 1, 2]))[: draw(st.integers(1, 3))]
    s = draw(st.none() | st.lists(st.integers(1, 5) | st.just(-1), min_size=len(axes), max_size=len(axes)))
    return lambda x: f(x, s, axes, norm), (numbers if f in OF_REALS else complex_numbers)(2, 3, 4)


@st.composite
def accumulated(draw: Callable) -> tuple:
    n, function = draw(st.integers(0, 20)), draw(st.sampled_from([np.cumprod, np.cumsum, np.logaddexp.accumulate]))
    return lambda x: function(x, axis=0), numbers(n, 2)


# ---------------------------------------------------------------- the test

CASES = {
    "index": (indexed(), 120),
    "traced index": (indexed_by_traced(), 60),
    "update": (updated(), 120),
    "slice": (sliced(), 60),
    "pad": (padded(), 40),
    "delete": (deleted(), 30),
    "insert": (inserted(), 40),
    "roll, tile, repeat, turn": (rearranged(), 60),
    "einsum": (contracted(), 40),
    "convolve": (convolved(), 40),
    "fft": (transformed(), 80),
    "accumulate": (accumulated(), 20),
}


@pytest.mark.parametrize("name", CASES)
def test_random_arguments(name):
    strategy, count = CASES[name]

    @settings(max_examples=count, deadline=None)
    @given(strategy)
    def check(case):
        f, *xs = case
        try:
            f(*xs)
        except (IndexError, ValueError):
            with pytest.raises((IndexError, ValueError)):
                md.make_tape(f)(*xs)
        else:
            check_as_numpy(f, *xs)

    if name == "index":
        check = example((lambda x: x[..., :, 0, False], np.zeros((0, 1, 0))))(check)
    check()
