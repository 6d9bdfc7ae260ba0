"""Checks of passes over the tapes of bodies: fewer collectives, of the same types, values and derivatives."""

from collections import Counter
from itertools import pairwise

import numpy as np

import minidiff as md
import spmd
from collectives import psum
from minidiff.compiler.codegen import CompiledTape
from minidiff.compiler.program import rewrites
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close, equations

ALONE = ("fuse psums", "fuse shard maps")  # without these, each psum is for itself
IJ = ("i", "j")
MESH = mesh(2, 2)


def mapped(body, in_specs=P(IJ), out_specs=P(IJ), mesh=MESH, **options):
    return spmd.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def data(dtype, shape=(16, 3), seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "i":
        return rng.integers(-5, 5, shape).astype(dtype)
    x = rng.normal(size=shape)
    return (x + 1j * rng.normal(size=shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def close(dtype):
    return {"rtol": 1e-4, "atol": 1e-4} if dtype in ("float32", "complex64") else {"rtol": 1e-9, "atol": 1e-11}


def communicating(tape):
    """Return the number of calls of each collective along axes of several ranks."""
    return dict(Counter(eqn.primitive.name for eqn in equations(tape) if eqn.primitive.sends(eqn.params)))


def fused(tape):
    """Return the number of operands of each psum of a tape."""
    return [len(eqn.inputs) for eqn in equations(tape) if eqn.primitive.name == "psum"]


def check_derivatives(tape, other, x, dtype):
    cts = [data(y.dtype, np.shape(y), seed=7) for y in tape(x)]

    def gradients(t):
        value, pull = md.vjp(lambda x: [np.asarray(1) * 1.0 * y for y in t(x)], x)
        return pull([np.asarray(c, md.typeof(v).dtype) for c, v in zip(cts, value)])

    def tangents(t):
        return md.jvp(lambda x: list(t(x)), (x,), (x,))[1]

    assert_trees_close(gradients(other), gradients(tape), **close(dtype))
    assert_trees_close(tangents(other), tangents(tape), **close(dtype))


def check_rewrite(name, body, before, after, dtype="float64", **options):
    """A pass has its effect alone, and none where it is left out; types, values and derivatives stay.

    `before` and `after` are the numbers of calls of collectives.
    """
    x, f = data(dtype), mapped(body, **options)
    tape = md.make_tape(f)(x)
    tape.check()
    none, apart = (spmd.rewritten(f, without=names)(x) for names in (tuple(rewrites()), (name, *ALONE)))
    alone = spmd.rewritten(f, without=[n for n in rewrites() if n != name])(x)
    result = spmd.rewritten(f, without=() if name in ALONE else ALONE)(x)
    assert communicating(tape) == communicating(none) == before
    assert communicating(result) == after
    if before != after:
        assert str(alone) != str(none) and str(apart) != str(result)
    expected = list(tape(x))
    for other in (none, apart, alone, result):
        other.check()
        assert other.out_types == tape.out_types
        assert_trees_close(list(other(x)), expected, **close(dtype))
        if dtype != "int64":
            check_derivatives(tape, other, x, dtype)
    assert_trees_close(md.tree.leaves(md.jit(f)(x)), expected, **close(dtype))


# ---------------------------------------------------------------- compiled programs


def lowered(compiled, *args):
    """The sources that ran on the ranks' data."""
    compiled(*args)
    bound = compiled.program(*args).source.namespace.values()
    programs = [p for t in bound if isinstance(t, CompiledTape) for p in t.lowered.values() if p]
    for source, _ in programs:
        source.tape.check()
    return [source.text for source, _ in programs]


def called(compiled, *args):
    """The names of the functions that the one source calls, line by line."""
    (text,) = lowered(compiled, *args)
    lines = [line.split("#")[0].split(" = ")[-1].strip() for line in text.splitlines()[1:]]
    return ["matmul" if " @ " in line else line.split("(")[0] for line in lines]


# ---------------------------------------------------------------- a network that is trained on ranks


def network(params, x):
    for w, b in params:
        x = np.tanh(x @ w + b)
    return x


def parameters(*sizes):
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(n, m)) / n, rng.normal(size=m)) for n, m in pairwise(sizes)]


def data_parallel(mesh, **options):
    def loss(params, x):
        on_block = lambda params, x: psum((network(params, x) ** 2).sum(), "i")  # noqa: E731
        return mapped(on_block, (P(), P("i")), P(), mesh, **options)(params, x)

    return loss
