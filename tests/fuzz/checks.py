"""Checks of a random program under every transformation: NumPy's values, dtypes, shapes, and sharing of memory."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

import minidiff as md
from minidiff.compiler.program import optimize
from minidiff.inputs.arguments import WEAK_TYPES
from minidiff.values.dtypes import float0, is_differentiable
from tests.fuzz.programs import SUM_OF_PRODUCTS, Program, evaluated
from tests.fuzz.shrinking import Finding

# ---------------------------------------------------------------- comparing


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
        return [x[0] for x in leaves(md.vmap(f, axes, axis_size=1)(*batched))]

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
        self.expected = leaves(self.plain(*self.args))
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
            expected = leaves(self.plain(*self.others))
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
            rows = [[x if a is None else numpy.moveaxis(x, a, 0)[e] for x, a in zip(args, axes)] for e in (0, 1, 2)]
            return [numpy.stack(column) for column in zip(*[leaves(f(*row)) for row in rows])]

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
                out = leaves(f(*[operands.get(i, x) for i, x in enumerate(self.args)]))
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
