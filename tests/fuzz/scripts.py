"""Random programs that are drawn whole: each is a script that compares what it computes with plain NumPy or a loop.

The routes are named axes of several sizes; functions that are not finite everywhere, in branches, pipelines and
experts; arrays that change after tracing; 16 bits; compiled loops; and indices into sharded arrays. `python -m
tests.fuzz.arrays` runs them beside its other programs.
"""

from __future__ import annotations

import random
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy

from tests.fuzz.routes.edges import edges
from tests.fuzz.routes.indices import indices
from tests.fuzz.routes.lengths import lengths
from tests.fuzz.routes.masks import masked_functions, on_simulated_ranks, uneven_data
from tests.fuzz.routes.numbers import list_operands, python_carries, sums_by_route
from tests.fuzz.routes.odes import odes
from tests.fuzz.routes.reports import reports
from tests.fuzz.routes.ties import ties

HEADER = """\
import numpy
import minidiff as md, minidiff.numpy as np, spmd
from collectives import *
from ml_dtypes import bfloat16
from numpy import float16
from spmd import P
from tests.fuzz.scripts import agree, loop, not_jitted
"""


def agree(actual: object, expected: object, **tolerances: float) -> None:
    """Raise where trees of arrays differ; NaNs and infinities are to be the same."""
    from minidiff import tree

    actual, expected = tree.leaves(actual), tree.leaves(expected)
    assert len(actual) == len(expected), f"{len(actual)} results, not {len(expected)}"
    for x, y in zip(actual, expected):
        x, y = (v.gather() if hasattr(v, "gather") else numpy.asarray(v) for v in (x, y))
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{x.dtype}{x.shape}, not {y.dtype}{y.shape}"
        wide = numpy.float64 if x.dtype.kind in "fV" else x.dtype
        numpy.testing.assert_allclose(x.astype(wide), y.astype(wide), **{"rtol": 1e-9, "atol": 1e-12, **tolerances})


def loop(f: Callable, *batches: numpy.ndarray) -> numpy.ndarray:
    """Return the reference for `vmap`: a loop."""
    return numpy.stack([f(*elements) for elements in zip(*batches)])


def not_jitted(f: Callable) -> Callable:
    return f


# ---------------------------------------------------------------- axes named by a vmap

#: Functions of an element v, and what they make of all of them, in NumPy.
OVER_AN_AXIS = {
    "pmean(v, 'i')": "0 * x + x.mean(0)",
    "v - pmean(v ** 2, 'i')": "x - (x ** 2).mean(0)",
    "psum(v, 'i')": "0 * x + x.sum(0)",
    "v * psum(1.0, 'i')": "x * len(x)",
    "v * axis_size('i')": "x * len(x)",
    "v + axis_index('i') / axis_size('i')": "x + (numpy.arange(len(x)) / len(x)).reshape(-1, *[1] * (x.ndim - 1))",
    "pmax(v, 'i') * v": "x.max(0) * x",
    "pmin(v, 'i') + v": "x.min(0) + x",
    "ppermute(v, 'i', [(j, (j + 1) % axis_size('i')) for j in range(axis_size('i'))])": "numpy.roll(x, 1, 0)",
    "np.cumsum(all_gather(v, 'i'), 0)[-1]": "0 * x + x.sum(0)",
    "v * all_gather(v, 'i').shape[0]": "x * len(x)",
}
#: What leaves the values of a function what they are.
WITHIN = [
    "md.jit({f})",
    "md.jit(md.jit({f}))",
    "md.jit(md.checkpoint({f}))",
    "md.checkpoint(md.jit({f}))",
    "md.jit(lambda v: md.scan(lambda c, _: ({f}(c), None), v, None, length=1)[0])",
    "md.jit(lambda v: md.fori_loop(0, 1, lambda k, c: {f}(c), v))",
    "md.jit(lambda v: md.cond(True, {f}, {f}, v))",
    "md.jit(lambda v: md.vjp({f}, v)[0])",
    "md.jit(lambda v: md.jvp({f}, (v,), (v,))[0])",
    "md.jit(lambda v: md.linearize({f}, v)[0])",
]


def axis_sizes(rng: random.Random) -> str:
    body = rng.choice(list(OVER_AN_AXIS))
    within = rng.choice(WITHIN).format(f="f")
    sizes, shape = [rng.randint(1, 5) for _ in range(4)], rng.choice([(), (), (2,), (2, 3)])
    return f"""
        f = lambda v: {body}
        expected = lambda x: {OVER_AN_AXIS[body]}
        g, gradient = {within}, md.jit(md.grad(lambda v: np.sum(f(v) ** 2)))
        for n in {sizes}:
            x = numpy.random.default_rng(n).normal(size=(n, *{shape}))
            agree(md.vmap(g, axis_name='i')(x), expected(x))
            once = md.vmap(md.grad(lambda v: np.sum(f(v) ** 2)), axis_name='i')(x)
            agree(md.vmap(gradient, axis_name='i')(x), once)
    """


# ---------------------------------------------------------------- functions that are not finite everywhere

#: At zeros they are not finite, or their derivatives; they take positive rows to positive rows.
PARTIAL = [
    "np.sqrt(v)",
    "v ** 0.5",
    "np.log(1 + np.sqrt(v))",
    "3 + np.log(v) / 9",
    "1 / v",
    "v / np.sqrt(np.sum(v * v))",
    "v / np.linalg.norm(v)",
    "np.exp(-1 / v)",
    "v * np.log(v) + 1",
    "np.sqrt(np.sum(v)) + v",
    "np.power(v, -1.5)",
]
WHOLE = ["2 * v", "v * v", "np.sin(v)", "v - 1", "0 * v", "np.ones(2)"]
JIT = ["not_jitted", "md.jit"]


def branches(rng: random.Random) -> str:
    functions = [f"lambda v: {rng.choice(PARTIAL)}", *[f"lambda v: {rng.choice(PARTIAL + WHOLE)}" for _ in range(2)]]
    rng.shuffle(functions)
    if rng.random() < 0.5:  # the first of these is for rows without a zero, or for positive ones
        functions = [f"lambda v: {rng.choice(PARTIAL)}", f"lambda v: {rng.choice(WHOLE)}"]
        f = "lambda k, v: md.cond(k, *functions, v)"
        plain, k = "lambda k, v: functions[0 if k else 1](v)", "numpy.all(x > 0, axis=1)"
    else:
        f = "lambda k, v: md.switch(k, functions, v)"
        plain, k = "lambda k, v: functions[int(k)](v)", str([rng.randrange(3) for _ in range(4)])
    rows = [[rng.choice([0.0, -1.0, 0.5, 2.0]) for _ in range(2)], [0.0, 0.0], [1.0, 4.0], [-1.0, 2.0]]
    rng.shuffle(rows)
    outer, inner = rng.choice(JIT), rng.choice(JIT)
    return f"""
        functions = [{", ".join(functions)}]
        f, plain = {inner}({f}), {plain}
        x = numpy.array({rows})
        k = numpy.array({k})
        ct = numpy.array([3.0, -2.0])
        cts = numpy.broadcast_to(ct, x.shape)
        pulled = lambda f: lambda k, v: md.vjp(lambda v: f(k, v), v)[1](ct)[0]
        pushed = lambda f: lambda k, v: md.jvp(lambda v: f(k, v), (v,), (ct,))[1]
        agree({outer}(md.vmap(f))(k, x), loop(plain, k, x))
        agree({outer}(md.vmap(pushed(f)))(k, x), loop(pushed(plain), k, x))
        agree({outer}(md.vmap(pulled(f)))(k, x), loop(pulled(plain), k, x))
        agree({outer}(lambda x: md.vjp(lambda x: md.vmap(f)(k, x), x)[1](cts)[0])(x), loop(pulled(plain), k, x))
    """


def pipelines(rng: random.Random) -> str:
    ranks = rng.choice([1, 2, 3, 4])
    layer = f"lambda p, v: p * ({rng.choice(PARTIAL)})"
    return f"""
        layer, mesh = {layer}, spmd.make_mesh(({ranks},), ('i',), backend='simulated')
        rng = numpy.random.default_rng({rng.randrange(100)})
        p, x, ct = rng.uniform(0.5, 1, {ranks}), *rng.uniform(1, 2, (2, {ranks * rng.choice([1, 2])}, 2))
        specs = dict(mesh=mesh, in_specs=P('i'), out_specs=P('i'))
        piped = spmd.shard_map(lambda p, x: spmd.parallel.pipeline(layer, p, x, 'i'), **specs)

        def plain(p, x):
            rows = list(x)
            for one in p:
                rows = [layer(one, v) for v in rows]
            return np.stack(rows)

        with_gradients = lambda f: lambda p, x: (f(p, x), md.vjp(f, p, x)[1](ct))
        agree({rng.choice(JIT)}(with_gradients(piped))(p, x), with_gradients(plain)(p, x), rtol=1e-6)
    """


def experts(rng: random.Random) -> str:
    ranks, tokens = rng.choice([1, 2, 4]), 8
    # A mixture applies an expert to rows: what it sums over is a row's elements.
    expert = rng.choice(PARTIAL).replace("np.sum(v * v)", "np.sum(v * v, -1, keepdims=True)")
    expert = expert.replace("np.sum(v))", "np.sum(v, -1, keepdims=True))")
    expert = expert.replace("np.linalg.norm(v)", "np.linalg.norm(v, axis=-1, keepdims=True)")
    busy = rng.randint(1, 4)  # experts that may get a token
    if rng.random() < 0.5:
        capacity, k = rng.choice([1, 2, tokens]), rng.choice([1, 2])
        options = f"{k}" if capacity < tokens or rng.random() < 0.5 else f"{k}, dropless=True"
        layer = f"lambda p, x: spmd.parallel.mixture_of_experts(one, p, router, x, {capacity}, 'i', {options})"
        plain = f"lambda p, x: one_by_one(p, router, x, {ranks}, {k}, {capacity}, None, one)"
    else:
        assignment = [rng.randrange(busy) for _ in range(tokens)]
        layer = f"lambda p, x: spmd.examples.assigned_experts.assigned_experts(one, p, x, np.array({assignment}), 'i')"
        plain = f"lambda p, x: np.stack([one([p[0][e]], v) for e, v in zip({assignment}, x)])"
    return f"""
        from tests.programs.expert import one_by_one
        one = lambda p, v: p[0] * ({expert})
        mesh = spmd.make_mesh(({ranks},), ('i',), backend='simulated')
        rng = numpy.random.default_rng({rng.randrange(100)})
        p, x, ct = (rng.uniform(1, 2, (8, 1)),), *rng.uniform(0.5, 2, (2, {tokens}, 2))
        router = rng.normal(size=(2, 8)) + numpy.where(numpy.arange(8) < {busy}, 5.0, 0.0)
        layer = spmd.shard_map({layer}, mesh=mesh, in_specs=P('i'), out_specs=P('i'))
        plain = {plain}
        with_gradients = lambda f: lambda p, x: (f(p, x), md.vjp(f, p, x)[1](ct))
        agree({rng.choice(JIT)}(with_gradients(layer))(p, x), with_gradients(plain)(p, x), rtol=1e-6)
    """


# ---------------------------------------------------------------- arrays that change after tracing

#: Functions of x that close over an array W and a view V of it.
CLOSING = [
    "x * W + W * 2",
    "np.sin(W) * x + V",
    "W",
    "(W, x, W.T)",
    "W[::-1] @ x + V",
    "x @ W + np.at(W)[0].set(x[0])",
    "np.where(x > 0, W, V)",
    "md.scan(lambda c, w: (c + w, c * W), x, W)",
    "md.cond(np.sum(x) > 0, lambda x: x * W, lambda x: x - V, x) + np.sum(W)",
    "md.checkpoint(lambda x: np.exp(W) * x)(x) + W",
    "md.vmap(lambda v, w: v * w + W)(x, V)",
    "md.grad(lambda x: np.sum(x ** 3 * W))(x)",
    "md.vjp(lambda x: W * x + np.sum(W), x)[1](W)[0]",
    "md.jit(lambda x: x * W)(x) - V",
    "md.fori_loop(0, 2, lambda k, c: c * W + V, x)",
    "spmd.shard_map(lambda x: x * W + psum(V, 'i'), mesh=mesh, in_specs=P(), out_specs=P(), check_rep=False)(x)",
    "spmd.shard_map(lambda x: x * W[:1] + V[1:], mesh=mesh, in_specs=P('i'), out_specs=P('i'))(x)",
]
RECORDED = [
    "md.jit(f)",
    "md.jit(md.jit(f))",
    "md.make_tape(f)(x)",
    "md.jit(lambda x: md.jvp(f, (x,), (x,))[0])",
    "md.jit(md.checkpoint(f))",
    "md.linearize(f, x)[1]",
]
VIEWS = ["W", "W.T", "W[::-1]", "numpy.broadcast_to(W[0], (2, 2))", "W.T[:, :1]", "W.copy()"]
CHANGES = ["W[:] = 5", "W[0] = -1.0", "W += 1", "W.fill(0)", "W[...] = W.T.copy()", "V.base is not None and W.sort()"]


def closed_over(rng: random.Random) -> str:
    recorded = rng.choice(RECORDED)
    order = rng.choice("CF")
    return f"""
        mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
        W = numpy.array([[1.0, 3.0], [2.0, -4.0]], order='{order}')
        V, x = {rng.choice(VIEWS)}, numpy.array([[0.5, -1.0], [2.0, 3.0]])
        f = lambda x: {rng.choice(CLOSING)}
        g = {recorded}
        expected = md.tree.map(lambda y: numpy.array(y), g(x))
        held = g(x)
        agree(held, expected, rtol=0)
        {rng.choice(CHANGES)}
        agree(g(x), expected, rtol=0, atol=0)
        agree(held, expected, rtol=0, atol=0)
        agree(x, numpy.array([[0.5, -1.0], [2.0, 3.0]]), rtol=0)
    """


# ---------------------------------------------------------------- 16 bits

#: Bodies, of a block x, and what they make of all blocks: in float32, and rounded once.
SUMS = {
    "psum(x, 'i')": "x.sum(0)",
    "pmean(x, 'i')": "x.mean(0)",
    "psum(2 * x, 'i')": "(2 * x).sum(0)",
    "psum_scatter(x, 'i', tiled=True)": "x.sum(0)",
    "broadcast(reduce(x, 'i', root=0), 'i', root=0)": "x.sum(0)",
}


def sums_of_16_bits(rng: random.Random) -> str:
    ranks, dtype = rng.choice([1, 2, 3, 4, 8]), rng.choice(["float16", "bfloat16"])
    body = rng.choice(list(SUMS))
    out = "P('i')" if "scatter" in body else "P()"
    scale = rng.choice(["0.125", "1.0", "500.0", "500.0"])  # sums in float32 are exact in any order
    return f"""
        mesh = spmd.make_mesh(({ranks},), ('i',), backend='simulated')
        rng = numpy.random.default_rng({rng.randrange(1000)})
        x = (rng.integers(-8, 64, ({ranks}, {ranks})) * {scale}).astype({dtype})
        f = spmd.shard_map(lambda x: (lambda x: {body})(x[0]), mesh=mesh, in_specs=P('i'), out_specs={out})
        expected = (lambda x: {SUMS[body]})(x.astype(numpy.float32)).astype({dtype})
        agree(f(x), expected, rtol=0, atol=0)
        agree(md.jit(f)(x), expected, rtol=0, atol=0)
    """


# ---------------------------------------------------------------- compiled loops

#: What NumPy computes to the bit as loops do; of integers and bools, too.
EXACT = [
    *("{a} + {b}", "{a} * {b}", "np.maximum({a}, {b})", "np.minimum({a}, {b})", "np.where({a} > {b}, {a}, {b})"),
    *("({a} > {b}) | ({a} == 1)", "np.where({a} != {b}, {a}, 2)", "np.square({a})", "{a} <= {b}", "np.abs({a})"),
    *("{a}.astype('{dtype}')", "np.logical_xor({a}, {b})", "{a} + 1", "2 * {a}", "np.sign({a} * 1.0)", "{a} / 2"),
    *("np.floor({a} * 0.5)", "np.isnan({a} * 1.0)", "np.sqrt(np.abs({a} * 1.0))", "np.copysign({a} * 1.0, {b})"),
]
#: Smooth functions that do not magnify what rounding changes.
SMOOTH = [
    *(
        "np.tanh({a})",
        "np.sin({a}) * {b}",
        "np.cos({a} + {b})",
        "np.exp(-{a} * {a})",
        "np.log1p({a} * {a})",
        "{a} - {b}",
    ),
    *("np.sqrt(1 + {a} * {a})", "np.arctan({a}) + {b}", "{a} * {b} / (1 + {a} * {a})", "np.expm1(np.tanh({a}))"),
    *(
        "md.nn.sigmoid({a})",
        "md.nn.gelu({a}, approximate=False)",
        "np.arctan2({a}, 2 + {b} * {b})",
        "np.cbrt(2 + {a} * {a})",
    ),
    *(
        "np.hypot({a}, 1.5)",
        "(2 + np.sin({a})) ** np.cos({b})",
        "np.log(2 + {a} * {a})",
        "np.arcsinh({a})",
        "0.5 * {a}",
    ),
    *(
        "np.mean({a} + {b})",
        "np.sum({a} * {b}, {axis}, keepdims=True) / 9",
        "np.logaddexp({a}, {b})",
        "np.cosh(np.sin({a}))",
    ),
]
#: What loops read where it is: each has the shape of {a}.
READS = [
    "np.roll({a}, {n})",
    "np.roll({a}, ({n}, {m}), (-1, 0)) if np.ndim({a}) else {a}",
    "{a}[..., ::-1] if np.ndim({a}) else {a}",
    "np.concatenate([{a}[..., {m}:], {a}[..., :{m}]], -1) if np.ndim({a}) else {a}",
    "np.pad({a}, 1)[(slice(2, None),) * np.ndim({a})] + np.pad({a}, 1)[(slice(None, -2),) * np.ndim({a})]",
    "np.roll({a}, {n}, 0) + np.roll({a}, {m}, -1) if np.ndim({a}) else {a}",
]


def _arrays_of_loops(rng: random.Random, exact: bool) -> list[str]:
    rows, columns = rng.choice([(3, 4), (1, 7), (5, 1), (2, 40), (33, 9)])
    arrays = []
    for _ in range(rng.randrange(1, 4)):
        shape = rng.choice([(rows, columns), (rows, columns), (columns,), (rows, 1), ()])
        text = f"numpy.random.default_rng({rng.randrange(1000)}).normal(size={shape}) * 2"
        if exact:
            kinds = ["float64", "float32", "int64", "int32", "int8", "uint8", "uint16", "bool"]
            text = f"({text} * 3).astype('{rng.choice(kinds)}')"
        layout = rng.choice(["{}", "numpy.asfortranarray({})", "numpy.flip({})", "numpy.repeat({}, 2, -1)[..., ::2]"])
        arrays.append((layout if shape else "{}").format(f"numpy.asarray({text})"))
    return arrays


def _steps_of_loops(rng: random.Random, exact: bool, names: list[str]) -> list[str]:
    """Lines that assign y0, y1 and so on."""
    steps, known = [], [*names]
    for k in range(rng.randrange(2, 9)):
        dtype = rng.choice(["float64", "float32", "int32", "uint8", "bool"])
        step = rng.choice(READS if rng.random() < 0.3 else EXACT if exact else SMOOTH).format(
            a=rng.choice(known),
            b=rng.choice(known),
            dtype=dtype,
            axis=rng.choice([-1, None]),
            n=rng.randrange(-9, 10),
            m=rng.choice([-1, 1, 2]),
        )
        known.append(f"y{k}")
        steps.append(f"y{k} = {step}")
    return steps


def loops(rng: random.Random) -> str:
    """Compiled loops of elementwise operations, sums, and shifted arrays, beside NumPy's; and their derivatives."""
    exact = rng.random() < 0.5
    arrays = _arrays_of_loops(rng, exact)
    names = [f"x{k}" for k in range(len(arrays))]
    steps = _steps_of_loops(rng, exact, names)
    results = [f"y{k}" for k in range(len(steps))]
    last = [y for y in results if rng.random() < 0.5] or results[-1:]
    tolerances = "rtol=0" if exact else "rtol=1e-9, atol=1e-11"
    count, work = rng.choice([(1, 1 << 20), (1, 8), (3, 8)])  # of threads, of a piece
    body = "\n            ".join(steps)
    return f"""
        from unittest import mock
        from minidiff.compiler import kernels, threads
        def f({", ".join(names)}):
            {body}
            return [{", ".join(last)}]
        def total(*xs):
            return sum(np.sum(np.sin(y * 1.0)) for y in f(*xs))
        arrays = [{", ".join(arrays)}]
        real = [k for k, x in enumerate(arrays) if x.dtype.kind == "f"]
        programs = [f, md.value_and_grad(total, real) if real and {not exact} else f]
        if {not exact}:
            programs.append(md.grad(lambda x, *rest: np.sum(np.sin(md.grad(total)(x, *rest)))))
            descend = lambda x, rest: x - 0.1 * md.grad(total)(x, *rest)
            programs.append(lambda x, *rest: md.scan(lambda c, _: (descend(c, rest), np.sum(c)), x, None, 2))
        mesh = spmd.make_mesh((2,), ("i",))
        on_ranks = lambda *xs: [np.asarray(y)[None] for y in f(*[x[0] for x in xs])]
        of_ranks = spmd.shard_map(on_ranks, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        programs.append(lambda *xs: of_ranks(*[np.stack([x, x[()]]) for x in xs]))
        for g in programs:
            limits = mock.patch.multiple(kernels, MIN_ELEMENTS=1, MIN_WORK=1, MIN_COLUMNS=1)
            with limits, mock.patch.object(threads, "PIECE_WORK", {work}):
                found = md.tree.leaves(md.jit(g, threads={count})(*arrays))
            expected = md.tree.leaves(md.jit(g, kernels=False)(*arrays))
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == other.dtype and one.shape == other.shape, (one, other)
                agree(one, other, {tolerances})
    """


ROUTES = {
    f.__name__: f
    for f in (
        *(axis_sizes, branches, pipelines, experts, closed_over, sums_of_16_bits, loops),
        *(sums_by_route, python_carries, list_operands),
        *map(on_simulated_ranks, (masked_functions, uneven_data)),
        *(edges, indices, lengths, odes, reports, ties),
    )
}


def script(route: str, seed: str) -> str:
    """A program of a route; the same one for the same seed."""
    return HEADER + textwrap.dedent(ROUTES[route](random.Random(f"{route}/{seed}"))).strip() + "\n"


def fuzz_routes(seeds: Iterable[str], counts: Counter, routes: Iterable[str] = tuple(ROUTES)) -> Iterator[str]:
    """The scripts of these seeds that end in an error, of all routes in turn; the error is in the first line."""
    for seed in seeds:
        for route in routes:
            text = script(route, seed)
            counts["routes", route] += 1
            with warnings.catch_warnings(), numpy.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                try:
                    exec(compile(text, "<a route's program>", "exec"), {})
                except Exception as error:
                    message = f"{type(error).__name__}: {error}"[:600].replace("\n", "\n# ")
                    yield f"# {route}, seed {seed!r}: {message}\n{text}"
