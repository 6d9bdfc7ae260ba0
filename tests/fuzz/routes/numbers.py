"""Numbers of few bits and numbers of Python: sums of 16-bit floats, carries of loops, operands written as lists."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

# ---------------------------------------------------------------- sums of 16-bit floats

#: Functions of x, an array of positive numbers [m, n], that add many of them.
SUMS = [
    "np.sum(x)",
    "np.sum(x, axis={axis})",
    "np.sum(x, initial=3.0)",
    "np.sum(x, where=x > 0.5)",
    "np.add.reduce(x, axis={axis})",
    "np.add.accumulate(x, axis={axis})",
    "np.add.reduceat(x, [0, 1], axis=0)",
    "np.logaddexp.reduce(x, axis={axis})",
    "np.cumsum(x)",
    "np.cumsum(x, axis={axis})",
    "np.nancumsum(x, axis={axis})",
    "np.cumprod(x, axis={axis})",
    "np.prod(x, axis={axis})",
    "np.mean(x)",
    "np.mean(x, axis={axis}, keepdims=True)",
    "np.mean(x, axis={axis}, where=x > 0.1)",
    "np.nanmean(x, axis={axis})",
    "np.average(x, weights=x)",
    "np.average(x, axis=1, weights=x[0])",
    "np.var(x)",
    "np.var(x, axis={axis}, ddof=1)",
    "np.std(x, axis={axis})",
    "np.nanvar(x, axis={axis})",
    "np.linalg.norm(x)",
    "np.linalg.norm(x, axis={axis})",
    "np.linalg.norm(x, ord=1, axis={axis})",
    "np.linalg.norm(x, ord=3, axis={axis})",
    "np.linalg.norm(x, ord='fro')",
    "np.trapezoid(x, axis={axis})",
    "np.trace(x[:, : len(x)])",
    "np.einsum('ij->', x)",
    "np.einsum('ij->j', x)",
    "np.einsum('ij,kj->ik', x, x)",
    "np.einsum('ij,ij', x, x)",
    "np.einsum('ij,kj,kl->il', x, x, x)",
    "np.dot(x, x.T)",
    "np.matmul(x, x[0])",
    "np.matmul(x[:1], x.T)",
    "np.inner(x, x)",
    "np.vdot(x, x)",
    "np.tensordot(x, x, 2)",
    "np.vecdot(x, x)",
    "np.linalg.multi_dot([x, x.T, x])",
    "np.convolve(x[0], x[1], 'same')",
    "np.correlate(x[0], x[1], 'valid')",
    "np.at(x[0])[np.arange(x.size) % 3].add(np.ravel(x))",
    "np.at(x[0])[np.zeros(x.size, int)].subtract(np.ravel(x))",
    "md.nn.softmax(x)",
    "md.nn.softmax(x, axis=0)",
    "md.nn.log_softmax(x, axis={axis})",
    "md.nn.logsumexp(x, axis={axis})",
    "md.nn.logsumexp(x, b=0.5, axis={axis})",
    "md.nn.layer_norm(x)",
    "md.nn.rms_norm(x, axis={axis})",
    "md.nn.standardize(x, axis={axis})",
    "md.nn.batch_norm(x)[0]",
    "md.nn.avg_pool(x[..., None], (x.shape[1],))",
    "md.nn.conv(x[..., None], x[1][:, None, None], padding=3)",
    "md.nn.dot_product_attention(x.T[:, None, :], x.T[:, None, :], x.T[:, None, :])",
    "md.optim.softmax_cross_entropy(x, x[::-1])",
    "md.optim.softmax_cross_entropy_with_integer_labels(x, np.arange(len(x)) % x.shape[1])",
]
#: How a function runs: all of these give the same sums.
WAYS = {
    "on arrays": "f(x)",
    "jit": "md.jit(f)(x)",
    "jit, without kernels": "md.jit(f, kernels=False)(x)",
    "jvp": "md.jvp(f, (x,), (x,))[0]",
    "vjp": "md.vjp(f, x)[0]",
    "vmap": "md.vmap(f)(numpy.stack([x, x]))[1]",
    "jit of vmap": "md.jit(md.vmap(f))(numpy.stack([x, x]))[0]",
    "a body": "spmd.shard_map(f, MESH, in_specs=P(), out_specs=P(None))(x)"
    " if f(x).ndim else spmd.shard_map(f, MESH, in_specs=P(), out_specs=P())(x)",
    "checkpoint": "md.checkpoint(f)(x)",
    "scan": "md.scan(lambda c, _: (c, f(c)), x, None, length=2)[1][0]",
}


def sums_by_route(rng: random.Random) -> str:
    """Compare sums of 16-bit floats, and their derivatives, with sums in float64 that are rounded once."""
    m, n = rng.choice([(2, 3000), (3, 900), (60, 40), (5, 7)])
    expression = rng.choice(SUMS).format(axis=rng.choice([0, 1]))
    low, high = (0.95, 1.05) if "prod" in expression else rng.choice([(0.1, 1), (0.1, 1), (50, 100)])
    if "norm(" in expression or "standardize" in expression:  # of large numbers whose variance may be 0 by rounding
        low, high = 0.1, 1
    return f"""
        MESH = spmd.make_mesh((2,), ('i',), backend='simulated')
        f = lambda x: {expression}
        dtype = numpy.dtype({rng.choice(["float16", "bfloat16"])})
        eps = 2.0 ** -10 if dtype == float16 else 2.0 ** -7
        x = numpy.random.default_rng({rng.randrange(1000)}).uniform({low}, {high}, ({m}, {n})).astype(dtype)
        wide = x.astype(numpy.float64)
        expected, pullback = md.vjp(f, wide)
        ct = numpy.random.default_rng(1).uniform(0.5, 1, expected.shape).astype(dtype)
        scale = max(1e-3, numpy.max(abs(expected)))
        with numpy.errstate(over='ignore'):
            found = {WAYS[rng.choice(list(WAYS))]}
            assert found.dtype == dtype, found.dtype
            agree(found, expected.astype(dtype), rtol=eps, atol=eps * scale / 64)
            slope = pullback(ct.astype(numpy.float64))[0]
            # Differences of rounded cotangents may cancel, as in softmax where one entry has all the weight.
            scale = max(1e-3, numpy.max(abs(slope)), numpy.max(abs(ct)) * numpy.max(abs(expected)) / 4)
            {rng.choice(["found = md.vjp(f, x)[1](ct)[0]", "found = md.jit(lambda x: md.vjp(f, x)[1](ct)[0])(x)"])}
            assert found.dtype == dtype, found.dtype
            agree(found, slope.astype(dtype), rtol=4 * eps, atol=4 * eps * scale)
    """


# ---------------------------------------------------------------- carries that begin as Python numbers

#: Steps of three carries a, b, c and an element x of float32.
STEPS = {
    "a": ["a + x", "a + 1", "a * 0.5", "b", "x", "a", "np.maximum(a, x)", "2", "-a", "a + 0.5"],
    "b": ["b + a", "b + x * a", "b", "c + a", "np.where(x > 0.5, a + x, b)", "b - 1", "a"],
    "c": ["c + b", "c * 0.5 + a", "c", "a + b + c", "np.minimum(b, c)", "c + numpy.float64(1)", "b"],
}
LOOPS = {
    "scan": "md.scan(lambda c, x: (step(c, x), None), init, xs)[0]",
    "jit of scan": "md.jit(lambda init, xs: md.scan(lambda c, x: (step(c, x), None), init, xs)[0])(init, xs)",
    "unrolled": "md.jit(lambda xs: md.scan(lambda c, x: (step(c, x), None), init, xs, unroll=2)[0])(xs)",
    "fori_loop": "md.fori_loop(0, len(xs), lambda i, c: step(c, xs[i]), init)",
    "jit of fori_loop": "md.jit(lambda xs: md.fori_loop(0, len(xs), lambda i, c: step(c, xs[i]), init))(xs)",
    "while_loop": "md.while_loop(lambda s: s[0] < len(xs), lambda s: (s[0] + 1, step(s[1], xs[s[0]])), (0, init))[1]",
    "vjp": "md.vjp(lambda xs: md.scan(lambda c, x: (step(c, x), None), init, xs)[0], xs)[0]",
    "jvp": "md.jvp(lambda xs: md.scan(lambda c, x: (step(c, x), None), init, xs)[0], (xs,), (xs,))[0]",
    "vmap": "md.tree.map(lambda y: y[1], md.vmap(lambda xs: md.scan(lambda c, x: (step(c, x), None), init, xs)[0])"
    "(numpy.stack([-xs, xs])))",
    "a body": "spmd.shard_map(lambda xs: md.scan(lambda c, x: (step(c, x), None), init, xs)[0], MESH, in_specs=P(),"
    " out_specs=(P(), P(), P()))(xs)",
}


def python_loop(step: Callable, init: tuple, xs: Iterable) -> list[tuple]:
    """The carries of a loop, of which Python numbers have one kind in all steps: a float, if one of them is."""
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
            carries.append(of_one_kind(step(carries[-1], x)))
        if kinds == before:
            return carries


def python_carries(rng: random.Random) -> str:
    """Compare loops whose carries begin as Python numbers with a Python loop: values and dtypes."""
    steps = ", ".join(rng.choice(choices) for choices in STEPS.values())
    return f"""
        from tests.fuzz.routes.numbers import python_loop
        MESH = spmd.make_mesh((2,), ('i',), backend='simulated')

        def step(carry, x):
            a, b, c = carry
            return {steps}

        init, xs = ({", ".join(rng.choice(["0", "1", "0.0", "1.5", "-1"]) for _ in STEPS)}), \\
            numpy.random.default_rng({rng.randrange(1000)}).uniform(0, 1, 7).astype(numpy.float32)
        expected = python_loop(step, init, xs)
        dtypes = [[numpy.asarray(v).dtype for v in c] for c in expected]
        try:
            found = {LOOPS[rng.choice(list(LOOPS))]}
        except TypeError as error:  # of a carry whose dtype changes for ever, or from a float to an array of integers
            assert 'must keep the types' in str(error), error
            assert dtypes[-1] != dtypes[-2] or any(a.kind > b.kind for a, b in zip(dtypes[-1], dtypes[0])), error
        else:
            if dtypes[-1] == dtypes[-2] == dtypes[-3]:
                agree(found, expected[-1], rtol=1e-5, atol=1e-5)
    """


# ---------------------------------------------------------------- operands written as lists

OPERATORS = ["+", "-", "*", "/", "**", "%", "//", "<"]
FUNCTIONS = [
    *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "fmax", "fmin", "hypot", "arctan2"),
    *("logaddexp", "copysign", "fmod", "heaviside", "float_power", "nextafter", "dot", "inner", "convolve", "vdot"),
]


def list_operands(rng: random.Random) -> str:
    """Compare gradients of operations on lists and tuples with those of operations on arrays."""
    shape = rng.choice(["(2,)", "(2,)", "(3, 2)"])
    name = rng.choice([*OPERATORS, *FUNCTIONS, "@", "where", "einsum"])
    other = rng.choice(
        ["[0.5, 2.0]", "(2, 3)", "range(1, 3)", "[[1.0, 2.0], [3.0, 0.5]]", "((2, 1),)", "[x[0] + 1, 2]"]
    )
    if name in ("dot", "inner", "convolve", "vdot", "@", "einsum"):
        shape, other = "(2,)", rng.choice(["[0.5, 2.0]", "(2, 3)", "[x[0] + 1, 2.0]"])
    elif shape == "(3, 2)":
        other = rng.choice(["[0.5, 2.0]", "(2, 3)", "[[1.0], [2.0], [3.0]]"])
    pair = ["x", "y"] if rng.random() < 0.5 else ["y", "x"]
    if name in (*OPERATORS, "@"):
        call = f" {name} ".join(pair)
    elif name == "where":
        call = f"np.where([True, False], {', '.join(pair)})"
    elif name == "einsum":
        call = f"np.einsum('i,i', {', '.join(pair)})"
    else:
        call = f"np.{name}({', '.join(pair)})"
    ways = ["md.grad(f)(x)", "md.jit(md.grad(f))(x)", "md.jacfwd(f)(x)", "md.vmap(md.grad(f))(numpy.stack([x, x]))[1]"]
    return f"""
        x = numpy.random.default_rng({rng.randrange(1000)}).uniform(0.2, 1.4, {shape})
        f = lambda x: np.sum((lambda y: {call})({other}) * 1.0)
        plain = lambda x: np.sum((lambda y: {call})(np.array({other})) * 1.0)
        agree({rng.choice(ways)}, md.grad(plain)(x))
    """
