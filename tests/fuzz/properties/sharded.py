"""Properties of functions on ranks: they are functions of whole arrays, of one rank after the other, or of rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index
from spmd import P
from spmd.examples.assigned_experts import assigned_experts
from spmd.mesh.launch import launcher_size
from tests.checks.meshes import mesh
from tests.fuzz.properties.agree import agree, not_jitted, with_gradients
from tests.programs.batches import check_join
from tests.programs.expert import one_by_one


def named_axes(f: Callable, around: Callable, shape: tuple, sizes: Sequence[int]) -> None:
    """An axis that `vmap` names is a mesh axis, of any size; compiled once, and its gradient."""
    loss = lambda v: np.sum(f(v) ** 2)  # noqa: E731
    g, gradient = around(f), md.jit(md.grad(loss))
    for n in sizes:
        x = numpy.random.default_rng(n).normal(size=(n, *shape))
        ranks = spmd.make_mesh((n,), ("i",), backend="simulated")
        mapped = spmd.shard_map(
            lambda b: np.asarray(f(b[0]))[None], mesh=ranks, in_specs=P("i"), out_specs=P("i"), check_rep=False
        )
        agree(md.vmap(g, axis_name="i")(x), mapped(x))
        agree(md.vmap(gradient, axis_name="i")(x), md.vmap(md.grad(loss), axis_name="i")(x))


def vmap_is_a_loop(f: Callable, k: numpy.ndarray, x: numpy.ndarray, outer: Callable, inner: Callable) -> None:
    """A batch of branches is a loop over its rows, and so are derivatives: nothing comes from a branch not taken."""

    def loop(f: Callable) -> numpy.ndarray:
        return numpy.stack([f(*row) for row in zip(k, x)])

    ct = numpy.array([3.0, -2.0])
    cts, g = numpy.broadcast_to(ct, x.shape), inner(f)
    pulled = lambda f: lambda k, v: md.vjp(lambda v: f(k, v), v)[1](ct)[0]  # noqa: E731
    pushed = lambda f: lambda k, v: md.jvp(lambda v: f(k, v), (v,), (ct,))[1]  # noqa: E731
    for wrap in (not_jitted, pushed, pulled):
        agree(outer(md.vmap(wrap(g)))(k, x), loop(wrap(f)))
    agree(outer(lambda x: md.vjp(lambda x: md.vmap(g)(k, x), x)[1](cts)[0])(x), loop(pulled(f)))


def pipelined(f: Callable, ranks: int, batches: int, seed: int, run: Callable) -> None:
    """A pipeline of layers is one layer after the other."""
    rng = numpy.random.default_rng(seed)
    p, x, ct = rng.uniform(0.5, 1, ranks), *rng.uniform(1, 2, (2, ranks * batches, 2))
    body = lambda p, x: spmd.parallel.pipeline(f, p, x, "i")  # noqa: E731
    layers = spmd.shard_map(body, mesh=mesh(ranks), in_specs=P("i"), out_specs=P("i"))

    def plain(p: Any, x: Any) -> Any:
        rows = list(x)
        for one in p:
            rows = [f(one, v) for v in rows]
        return np.stack(rows)

    agree(run(with_gradients(layers, ct))(p, x), with_gradients(plain, ct)(p, x), rtol=1e-6)


def experts(f: Callable, ranks: int, busy: int, capacity: int, k: int, seed: int, run: Callable) -> None:
    """A layer of experts is one token after the other: 8 tokens of which `busy` experts get some.

    No token is dropped if there is no capacity; and without k, experts are assigned.
    """
    rng = numpy.random.default_rng(seed)
    p, x, ct = (rng.uniform(1, 2, (8, 1)),), *rng.uniform(0.5, 2, (2, 8, 2))
    router = rng.normal(size=(2, 8)) + numpy.where(numpy.arange(8) < busy, 5.0, 0.0)
    assignment, options = rng.integers(0, busy, 8), {} if capacity else {"dropless": True}

    def layer(p: Any, x: Any) -> Any:
        if k:
            return spmd.parallel.mixture_of_experts(f, p, router, x, capacity or 8, "i", k, **options)
        return assigned_experts(f, p, x, assignment, "i")

    def plain(p: Any, x: Any) -> Any:
        if k:
            return one_by_one(p, router, x, ranks, k, capacity or 8, None, f)
        return np.stack([f([p[0][e]], v) for e, v in zip(map(int, assignment), x)])

    layer = spmd.shard_map(layer, mesh=mesh(ranks), in_specs=P("i"), out_specs=P("i"))
    agree(run(with_gradients(layer, ct))(p, x), with_gradients(plain, ct)(p, x), rtol=1e-6)


# ---------------------------------------------------------------- masks, and data of which ranks have different amounts


def hidden(m: numpy.ndarray, rows: int, columns: int, seed: int) -> numpy.ndarray:
    """Return an array that is not finite where a mask leaves it out."""
    rng = numpy.random.default_rng(seed)
    wrong = rng.choice([numpy.nan, numpy.inf, -numpy.inf, 1e300], (rows, columns))
    return numpy.where(m, rng.normal(size=(rows, columns)), wrong)


def masked(f: Callable, x: numpy.ndarray, m: numpy.ndarray, mesh: spmd.Mesh, spec: P, split: bool, twice: bool) -> None:
    """Values that are left out have no effect and no derivative: op by op, compiled, and on sharded arrays."""
    finite = lambda y: np.where(np.isfinite(y), y, 0.0)  # noqa: E731
    total = lambda x, m: np.sum(finite(f(x, m)) * (1 + finite(f(x, m))))  # noqa: E731
    weights = numpy.linspace(-1, 1, x.shape[1])
    second = lambda x, m: md.grad(lambda x: np.sum(md.grad(total)(x, m) * weights))(x)  # noqa: E731
    left_out = ~numpy.broadcast_to(m, x.shape)
    other = numpy.where(left_out, 0.75, x)
    agree(f(x, m), f(other, m))
    sharded = spmd.distribute(x, mesh, spec)
    mask = spmd.distribute(m, mesh, spec) if split and m.shape == x.shape else m
    for g in (total, md.grad(total), *[second] * twice):
        expected = g(other, m)
        assert g is total or not numpy.asarray(expected)[left_out].any(), expected
        for h in (g, md.jit(g)):
            agree((h(x, m), h(sharded, mask)), (expected, expected))


def uneven(mesh: spmd.Mesh, seed: int, axis: int | None, spec: P, mode: str, until: str) -> None:
    """Ranks leave together, and see their own data; a masked mean of padded arrays is that of the arrays."""
    draw = random.Random(seed)
    lengths = [[draw.randrange(4) for _ in range(draw.randrange(1, 6))] for _ in range(4)]
    check_join(mesh, [lengths[r % 4] for r in range(mesh.size)], until)
    rows, columns, steps = draw.randrange(1, 14), draw.randrange(1, 6), draw.choice([1, 2, 3])
    x = numpy.random.default_rng(seed).normal(size=(rows, columns))

    def mean(x: Any) -> Any:
        padded, mask = spmd.pad(x, mesh, spec, mode=mode)
        out = np.mean(padded, axis=axis, where=mask)
        return out if axis is None else out[: x.shape[1 - axis]]

    slope = lambda f: md.grad(lambda x: np.sum(f(x) ** 2))(x)  # noqa: E731
    agree((mean(x), md.jit(mean)(x), slope(mean)), (x.mean(axis), x.mean(axis), slope(lambda x: np.mean(x, axis))))
    batch, examples = mesh.size * steps, numpy.arange(rows)
    batches = spmd.data.batches(examples, mesh, P("i"), batch=batch, seed=seed, epochs=2, last="mask")
    real = [spmd.gather(y)[spmd.gather(mask)] for y, mask in batches]
    assert [*map(len, real)] == 2 * [len(examples[k : k + batch]) for k in range(0, rows, batch)]
    agree(numpy.sort(numpy.concatenate(real)), numpy.repeat(examples, 2))


# ---------------------------------------------------------------- sharded arrays, and loops of ranks


def indexed(f: Callable, mesh: spmd.Mesh, rows: int, columns: int, spec: P, seed: int) -> None:
    """Functions of sharded arrays, and gradients, are those of whole arrays; reports have what is sent, or say why not.

    Op by op, values decide what is sent where a program computes its indices from other arrays.
    """
    draw = numpy.random.default_rng(seed)
    x = draw.uniform(-1, 2, (rows, columns))
    args = x, draw.integers(0, rows, rows), draw.integers(0, columns, x.shape)
    split = [spmd.distribute(y, mesh, s) for y, s in zip(args, (spec, P("i"), spec))]
    expected = f(*args)
    for g in (f, md.jit(f)):
        agree(g(*split), expected)
        mesh.reset_calls()
        g(*split)
        report = spmd.communication(g, optimized=g is not f)(*split)
        assert report.notes or (mesh.calls, sum(mesh.bytes.values())) == (report.counts, report.bytes), report
    gradient = md.grad(lambda x, *rest: np.sum(f(x, *rest) ** 2))
    expected = gradient(*args)
    agree((gradient(*split), md.jit(gradient)(*split)), (expected, expected), rtol=1e-7)


def lengths(f: Callable, w: numpy.ndarray, x: numpy.ndarray, size: int, run: Callable) -> None:
    """Loops of which each rank takes as many steps as it needs are those of one rank after the other."""

    def on(ranks: spmd.Mesh, index: Callable) -> Callable:
        body = lambda w, x: f(w, x, index())  # noqa: E731
        return spmd.shard_map(body, mesh=ranks, in_specs=(P(), P("i")), out_specs=P("i"))

    def alone(w: Any, x: Any) -> numpy.ndarray:
        blocks = [on(mesh(1), lambda k=k: k)(w, b) for k, b in enumerate(numpy.split(x, size))]
        return numpy.concatenate([b.gather() for b in blocks])

    g, index, expected = on(mesh(size), lambda: axis_index("i")), lambda: axis_index("i"), alone(w, x)
    agree((g(w, x), md.jit(g)(w, x)), (expected, expected))
    if launcher_size():
        launched = on(spmd.make_mesh((size,), ("i",)), index)
        agree([h(launched)(w, x) for h in (not_jitted, md.jit)], [h(g)(w, x) for h in (not_jitted, md.jit)], rtol=1e-13)
        return
    pushed = lambda w, x: md.jvp(g, (w, x), (numpy.ones_like(w), numpy.ones_like(x)))[1]  # noqa: E731
    agree(md.jit(pushed)(w, x), pushed(w, x))
    shifted = lambda t: (alone(w + t, x + t) - alone(w - t, x - t)) / (2 * t)  # noqa: E731
    if numpy.allclose(shifted(1e-6), shifted(1e-7), rtol=1e-3, atol=1e-3):  # no other number of steps is near
        agree(pushed(w, x), shifted(1e-6), rtol=1e-2, atol=1e-2)
    many = numpy.stack([w, 0.5 * w, -w])
    agree(run(md.vmap(g, (0, None)))(many, x), numpy.stack([alone(v, x) for v in many]))
