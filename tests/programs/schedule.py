"""Scans with a schedule of checkpoints in the bodies of shard_maps, whose steps communicate."""

import numpy as np

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import axis_size, ppermute, psum
from spmd import P

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


def check_same_bits(mesh, schedule, jit):
    """Gradients have the bits of those without a schedule, and are summed over ranks once, together with the value.

    A compiled loop adds up the numbers of a matrix product in an order of its own.
    """

    def gradient(**options):
        f = spmd.shard_map(lambda *args: loss(*args, **options), mesh=mesh, in_specs=(P(), P(), P("i")), out_specs=P())
        gradient = md.value_and_grad(f, (0, 1, 2))
        return md.jit(gradient) if jit else gradient

    expected, actual = (f(W, B, X) for f in (gradient(), gradient(schedule=schedule)))
    for a, b in zip(md.tree.leaves(expected), md.tree.leaves(actual)):
        a, b = np.asarray(spmd.gather(a)), np.asarray(spmd.gather(b))
        assert a.tobytes() == b.tobytes() or (jit and np.allclose(a, b, rtol=1e-12, atol=1e-12))
    if jit:
        assert spmd.communication(gradient(schedule=schedule))(W, B, X).counts.get("psum", 0) == (mesh.size > 1)
