"""Masked functions, padded arrays, and data of which ranks have different amounts, beside NumPy and a plain loop."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

#: Functions of an array x of two dimensions and a mask m that broadcasts with it.
MASKED = [
    "np.sum(x, axis={axis}, where=m)",
    "np.mean(x, axis={axis}, where=m)",
    "np.mean(x, axis={axis}, keepdims=True, where=m)",
    "np.var(x, axis={axis}, where=m)",
    "np.std(x, axis={axis}, where=m, ddof=1)",
    "np.prod(x, axis={axis}, where=m)",
    "np.max(x, axis={axis}, where=m, initial=-3.0)",
    "np.min(x, axis={axis}, where=m, initial=3.0)",
    "md.nn.logsumexp(x, axis={axis}, where=m)",
    "md.nn.softmax(x, axis={axis}, where=m)",
    "np.where(m, md.nn.log_softmax(x, axis={axis}, where=m), 0.0)",
    "md.nn.standardize(x, axis={axis}, where=m)",
    "md.nn.layer_norm(x, 2.0, 0.5, axis={axis}, where=m)",
    "md.nn.rms_norm(x, axis={axis}, where=m)",
    "md.nn.group_norm(x, 1, where=m)",
    "md.nn.batch_norm(x, where=m)[0]",
    "md.optim.softmax_cross_entropy(x, numpy.ones(x.shape) / 3, where=np.broadcast_to(m, x.shape))",
    "md.optim.softmax_cross_entropy_with_integer_labels(x, numpy.arange(len(x)) % x.shape[1], where=m)",
]
MASKS = [
    "rng.random((rows, columns)) < {p}",
    "rng.random((rows, 1)) < {p}",
    "rng.random((1, columns)) < {p}",
    "numpy.arange(rows)[:, None] < {n}",
    "numpy.zeros((rows, 1), bool)",
    "numpy.ones((1, 1), bool)",
]
#: What is the same: compiled, recorded, and on ranks, whose blocks are split along either dimension, or both.
PROGRAMS = """
finite = lambda y: np.where(np.isfinite(y), y, 0.0)
total = lambda x, m: np.sum(finite(f(x, m)) * (1 + finite(f(x, m))))
second = lambda x, m: md.grad(lambda x: np.sum(md.grad(total)(x, m) * numpy.linspace(-1, 1, columns)))(x)
left_out = ~numpy.broadcast_to(m, x.shape)
other = numpy.where(left_out, 0.75, x)
with numpy.errstate(all="ignore"), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    programs = [total, md.grad(total)] + [second] * {twice}
    expected = [g(other, m) for g in programs]
    agree(f(x, m), f(other, m))
    for array in expected[1:]:
        assert not numpy.asarray(array)[left_out].any(), array
    for g, want in zip(programs, expected):
        agree(g(x, m), want)
        agree(md.jit(g)(x, m), want)
        sharded, mask = spmd.distribute(x, mesh, {spec}), m
        if {split_mask} and m.shape == x.shape:
            mask = spmd.distribute(m, mesh, {spec})
        agree(g(sharded, mask), want)
        agree(md.jit(g)(sharded, mask), want)
"""


def masked_functions(rng: random.Random) -> str:
    """Values that are left out have no effect and no derivative, on all routes."""
    body = rng.choice(MASKED).format(axis=rng.choice([0, 1, -1, (0, 1)]))
    mask = rng.choice(MASKS).format(p=rng.choice([0.3, 0.7]), n=rng.randrange(9))
    programs = PROGRAMS.format(
        spec=rng.choice(["P('i')", "P(None, 'i')"]), split_mask=rng.random() < 0.5, twice=rng.choice([0, 1])
    )
    return f"""
import warnings
rows, columns = mesh.size * {rng.choice([1, 2, 3])}, mesh.size * {rng.choice([1, 2])}
rng = numpy.random.default_rng({rng.randrange(1000)})
x, m = rng.normal(size=(rows, columns)), {mask}
x = numpy.where(m, x, rng.choice([numpy.nan, numpy.inf, -numpy.inf, 1e300], x.shape))
f = lambda x, m: {body}
{programs}
"""


def uneven_data(rng: random.Random) -> str:
    """Ranks leave together, and see their own data; a masked mean of padded arrays is that of the arrays."""
    lengths = [[rng.choice([0, 1, 2, 3]) for _ in range(rng.randrange(1, 6))] for _ in range(4)]
    rows, columns = rng.randrange(1, 14), rng.randrange(1, 6)
    axis = rng.choice([None, 0, 1])
    return f"""
from tests.programs.batches import check_join
check_join(mesh, [{lengths}[r % 4] for r in range(mesh.size)], {rng.choice(["first", "last"])!r})
x = numpy.random.default_rng({rng.randrange(1000)}).normal(size=({rows}, {columns}))
spec = {rng.choice(["P('i')", "P(None, 'i')"])}
def mean(x):
    padded, mask = spmd.pad(x, mesh, spec, mode={rng.choice(["constant", "edge"])!r})
    out = np.mean(padded, axis={axis}, where=mask)
    return out if {axis} is None else out[: x.shape[1 - {axis or 0}]]
agree(mean(x), x.mean({axis}))
agree(md.jit(mean)(x), x.mean({axis}))
agree(md.grad(lambda x: np.sum(mean(x) ** 2))(x), md.grad(lambda x: np.sum(np.mean(x, {axis}) ** 2))(x))
batch, examples = mesh.size * {rng.choice([1, 2, 3])}, numpy.arange({rows})
steps = spmd.data.batches(examples, mesh, P('i'), batch=batch, seed={rng.randrange(5)}, epochs=2, last='mask')
real = [spmd.gather(y)[spmd.gather(mask)] for y, mask in steps]
assert [*map(len, real)] == 2 * [len(examples[k : k + batch]) for k in range(0, {rows}, batch)]
agree(numpy.sort(numpy.concatenate(real)), numpy.repeat(examples, 2))
"""


def on_simulated_ranks(route: Callable[[random.Random], str]) -> Callable[[random.Random], str]:
    """Return the route with a mesh of 1 to 4 simulated ranks."""

    @functools.wraps(route)
    def simulated(rng: random.Random) -> str:
        mesh = f"mesh = spmd.make_mesh(({rng.randrange(1, 5)},), ('i',), backend='simulated')"
        return f"{mesh}\n{route(rng)}"

    return simulated
