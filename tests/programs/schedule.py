"""Loops with a schedule of checkpoints in the bodies of shard_maps, whose steps communicate."""

import functools

import numpy as np

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import axis_size, ppermute, psum
from spmd import P
from tests.checks.properties import shows

RNG = np.random.default_rng(0)
W, B, X = RNG.normal(size=(24, 24)) / 5, RNG.normal(size=24), RNG.normal(size=(12, 24))
SCHEDULES = md.revolve(2), md.multistage(1, 2), md.online(2)


def loss(w, b, x, **options):
    """Weights that are the same on all ranks, one of them used twice, and a step that sends carries on."""

    def step(c, k):
        new = mnp.tanh(c @ w) + b * mnp.sin(c @ w)
        n = axis_size("i")
        return new + 0.1 * k * ppermute(c, "i", [(i, (i + 1) % n) for i in range(n)]), mnp.sum(new**2)

    carry, ys = md.scan(step, x, np.arange(7.0), **options)
    return psum(mnp.sum(carry) + mnp.sum(ys), "i")


def shrink(w, b, c):
    return 0.5 * mnp.tanh(c @ w) + 0.2 * mnp.sin(b * c)


def until_small(w, b, x, **options):
    """All ranks take the steps that their sum takes to become small, a number that is not known."""

    def step(c):
        n = axis_size("i")
        return shrink(w, b, c) + 0.1 * ppermute(c, "i", [(i, (i + 1) % n) for i in range(n)])

    last = md.while_loop(lambda c: psum(mnp.sum(c**2), "i") > 1e-2, step, x, 40, **options)
    return psum(mnp.sum(last**2), "i")


def until_its_own_is_small(w, b, x, **options):
    """Each rank takes a number of steps of its own; no step communicates."""
    last = md.while_loop(lambda c: mnp.sum(c**2) > 1e-2, lambda c: shrink(w, b, c), x, 40, **options)
    return psum(mnp.sum(last**2), "i")


#: A loop, and its number of sums; a condition is computed before each step, and after the last one.
LOOPS = {loss: 1, until_small: 3, until_its_own_is_small: 1}


#: Kernels compute functions, and sums of small arrays, by themselves: two programs may leave different ones to NumPy.
MODES = {"eager": lambda f: f, "compiled without kernels": functools.partial(md.jit, kernels=False), "compiled": md.jit}


#: Each mode with each schedule, and with each loop.
CASES = [
    (schedule, list(MODES)[(i + j) % len(MODES)], loop)
    for i, schedule in enumerate(SCHEDULES)
    for j, loop in enumerate(LOOPS)
]


@shows("reference", "derivatives", "counts")
def check_same_bits(mesh, case):
    """Gradients have the bits of those without a schedule, and are summed over ranks once, together with the value."""

    schedule, mode, loop = case

    def gradient(**options):
        f = spmd.shard_map(lambda *args: loop(*args, **options), mesh=mesh, in_specs=(P(), P(), P("i")), out_specs=P())
        return MODES[mode](md.value_and_grad(f, (0, 1, 2)))

    programs = gradient(), gradient(schedule=schedule)
    for a, b in zip(*[md.tree.leaves(f(W, B, X)) for f in programs]):
        a, b = np.asarray(spmd.gather(a)), np.asarray(spmd.gather(b))
        assert a.tobytes() == b.tobytes() or (mode == "compiled" and np.allclose(a, b, rtol=1e-12, atol=1e-12))
    if mode != "eager":
        psums = [spmd.communication(f)(W, B, X).counts.get("psum", 0) for f in programs]
        assert psums == [LOOPS[loop] * (mesh.size > 1)] * 2
