"""A body with Python's own `if` and `while`, of which each rank takes its branch and as many steps as it needs."""
# ruff: noqa: SIM108 (they are there for their statements)

import numpy

import minidiff as md
import spmd
from collectives import psum
from spmd import P


@md.autograph(max_steps=60)
def body(x, w):
    y = x.sum()
    if y > 2:
        y = y * w
    else:
        y = y + w
    n = 0
    while y < 50:
        y = y * 2
        n += 1
    return psum(y, "i"), psum(n, "i")


def total(x, w, ranks):
    y, n = 0.0, 0
    for block in numpy.split(x, ranks):
        y_block, n_block = block.sum(), 0
        y_block = y_block * w if y_block > 2 else y_block + w
        while y_block < 50:
            y_block, n_block = y_block * 2, n_block + 1
        y, n = y + y_block, n + n_block
    return y, n


def check_body(mesh):
    """Values and derivatives of the body, run and compiled, are those of a loop over blocks."""
    (ranks,) = mesh.shape.values()
    f = spmd.shard_map(body, mesh, in_specs=(P("i"), P()), out_specs=P())
    x = numpy.linspace(-1, 5, 12)
    for g in (f, md.jit(f)):
        numpy.testing.assert_allclose(g(x, 3.0), total(x, 3.0, ranks))
    slope = (total(x, 3.0 + 1e-6, ranks)[0] - total(x, 3.0 - 1e-6, ranks)[0]) / 2e-6
    for g in (md.grad, lambda h: md.jit(md.grad(h))):
        numpy.testing.assert_allclose(g(lambda w: f(x, w)[0])(3.0), slope, rtol=1e-6)
