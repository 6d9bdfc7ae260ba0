"""Properties of functions of arrays: loops, numbers of few bits and of Python, lists, and arrays that change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.compiler import kernels as compiled
from minidiff.compiler import threads as pieces
from spmd import P
from tests.fuzz.properties.agree import agree


def held(f: Callable, recorded: Callable, x: numpy.ndarray, change: Callable) -> None:
    """Recorded functions that close over arrays give the same once these have changed; results stay as they were."""
    g, before = recorded(f, x), x.copy()
    expected, result = md.tree.map(numpy.array, g(x)), g(x)
    agree(result, expected, rtol=0, atol=0)
    change()
    agree((g(x), result, x), (expected, expected, before), rtol=0, atol=0)


# ---------------------------------------------------------------- 16 bits


def exact_in_16_bits(f: Callable, ranks: int, dtype: Any, scale: float, seed: int) -> None:
    """Sums over ranks are those in float32, rounded once."""
    x = (numpy.random.default_rng(seed).integers(-8, 64, (ranks, ranks)) * scale).astype(dtype)
    mesh = spmd.make_mesh((ranks,), ("i",), backend="simulated")
    g = spmd.shard_map(lambda x: f(x[0]), mesh=mesh, in_specs=P("i"), out_specs=P(), check_rep=False)
    expected = numpy.asarray(g(x.astype(numpy.float32))).astype(dtype)
    agree((g(x), md.jit(g)(x)), (expected, expected), rtol=0, atol=0)


def rounded_once(f: Callable, bounds: tuple, shape: tuple, dtype: Any, seed: int, route: Callable, run: Callable):
    """Sums of 16-bit floats, and their derivatives, are sums in float64 that are rounded once."""
    eps = 2.0**-10 if dtype == numpy.float16 else 2.0**-7
    x = numpy.random.default_rng(seed).uniform(*bounds, shape).astype(dtype)
    expected, pullback = md.vjp(f, x.astype(numpy.float64))
    ct = numpy.random.default_rng(1).uniform(0.5, 1, expected.shape).astype(dtype)
    scale = max(1e-3, numpy.max(abs(expected)))
    slope = pullback(ct.astype(numpy.float64))[0]
    with numpy.errstate(over="ignore"):
        agree(route(f, x), expected.astype(dtype), rtol=eps, atol=eps * scale / 64)
        # Differences of rounded cotangents may cancel, as in softmax where one entry has all the weight.
        scale = max(1e-3, numpy.max(abs(slope)), numpy.max(abs(ct)) * numpy.max(abs(expected)) / 4)
        actual = run(lambda x: md.vjp(f, x)[1](ct)[0])(x)
        agree(actual, slope.astype(dtype), rtol=4 * eps, atol=4 * eps * scale)


# ---------------------------------------------------------------- compiled loops


def as_loops(seed: int, shape: tuple, dtype: str, layout: Callable) -> numpy.ndarray:
    """Return an argument of loops: floats, or numbers of any dtype."""
    x = numpy.random.default_rng(seed).normal(size=shape) * 2
    return layout(numpy.asarray((x if dtype == "float" else x * 3).astype(dtype)))


def kernels(f: Callable, arrays: Sequence[numpy.ndarray], exact: bool, threads: int, work: int) -> None:
    """Compiled loops give what NumPy gives: of a function, its derivatives, loops of these, and in a body."""

    def total(*xs: Any) -> Any:
        return sum(np.sum(np.sin(y * 1.0)) for y in md.tree.leaves(f(*xs)))

    def descend(x: Any, rest: Sequence) -> Any:
        return x - 0.1 * md.grad(total)(x, *rest)

    def blocks(*xs: Any) -> list:
        return [np.asarray(y)[None] for y in md.tree.leaves(f(*[x[0] for x in xs]))]

    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    mapped = spmd.shard_map(blocks, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    programs = [f, lambda *xs: mapped(*[np.stack([x, x[()]]) for x in xs])]
    if not exact:
        programs += [
            md.value_and_grad(total, list(range(len(arrays)))),
            md.grad(lambda x, *rest: np.sum(np.sin(md.grad(total)(x, *rest)))),
            lambda x, *rest: md.scan(lambda c, _: (descend(c, rest), np.sum(c)), x, None, 2),
        ]
    for g in programs:
        limits = mock.patch.multiple(compiled, MIN_ELEMENTS=1, MIN_WORK=1, MIN_COLUMNS=1)
        with limits, mock.patch.object(pieces, "PIECE_WORK", work):
            actual = md.jit(g, threads=threads)(*arrays)
        agree(actual, md.jit(g, kernels=False)(*arrays), **({"rtol": 0} if exact else {"atol": 1e-11}))


# ---------------------------------------------------------------- numbers of Python, and lists


def python_loop(step: Callable, init: tuple, xs: Iterable) -> list[tuple]:
    """Return the carries of a loop, of which Python numbers have one kind in all steps: a float, if one of them is."""
    kinds = [type(v) for v in init]

    def of_one_kind(carry: tuple) -> tuple:
        for i, v in enumerate(carry):
            if type(v) is float:
                kinds[i] = float
        return tuple([kind(v) if type(v) in (int, float) else v for kind, v in zip(kinds, carry)])

    while True:
        before = list(kinds)
        carries = [of_one_kind(init)]
        for x in xs:
            carries.append(of_one_kind(step(*carries[-1], x)))
        if kinds == before:
            return carries


def carries(f: Callable, init: tuple, xs: numpy.ndarray, loop: Callable) -> None:
    """Loops whose carries begin as Python numbers give what a Python loop gives: values and dtypes."""
    expected = python_loop(f, init, xs)
    dtypes = [[numpy.asarray(v).dtype for v in c] for c in expected]
    try:
        actual = loop(lambda carry, x: (f(*carry, x), None), init, xs)
    except TypeError as error:  # of a carry whose dtype changes for ever, or from a float to an array of integers
        assert "must keep the types" in str(error), error
        narrower = any(a.kind > b.kind for step in dtypes for a, b in zip(step, dtypes[0]))
        assert dtypes[-1] != dtypes[-2] or narrower, error
    else:
        if dtypes[-1] == dtypes[-2] == dtypes[-3]:
            agree(actual, expected[-1], rtol=1e-5, atol=1e-5)


def lists(f: Callable, x: numpy.ndarray, gradient: Callable) -> None:
    """Operations on lists and tuples have the gradients of those on arrays."""
    of_lists, of_arrays = (lambda x, as_=as_: np.sum(f(x, as_) * 1.0) for as_ in (lambda y: y, np.array))
    agree(gradient(of_lists, x), md.grad(of_arrays)(x))
