"""`minidiff.scipy` in the bodies of a `shard_map` and on sharded arrays, against the same programs on whole arrays."""

import numpy as np
import scipy.special

import minidiff as md
import spmd
from collectives import psum
from minidiff.scipy import integrate, linalg, optimize, signal, special, stats
from spmd import P
from tests.checks.properties import shows
from tests.checks.whole import whole

TIMES = np.array([0.0, 0.4, 1.0])


def rates(y, t, a):
    return np.stack([a * y[1], -y[0]])


def states(x, w):
    """Initial value problems, one for each row; the solver takes other steps for each."""
    return md.vmap(lambda y: integrate.odeint(rates, y, TIMES, (w[0],), rtol=1e-9, atol=1e-9)[-1])(x)


def roots(x, w):
    return md.vmap(lambda y: optimize.root(lambda z: z**3 + w * z - y, np.ones(2), tol=1e-13).x)(x)


#: Functions of examples x [n, 2] and weights w [2]; each row of the result is one example's.
PROGRAMS = {
    "special": lambda x, w: special.gammaln(1 + x**2) + special.i0(x * w) + scipy.special.erf(x + w),
    "stats": lambda x, w: stats.gamma.logpdf(x**2, a=1 + w**2) + stats.norm.logcdf(x, w, 1.5),
    "linalg": lambda x, w: (
        linalg.expm(x[:, :, None] * w)[:, 0] + linalg.solve_triangular(np.eye(2) + w, x[..., None])[..., 0]
    ),
    "signal": lambda x, w: md.vmap(lambda y: signal.convolve(y, w, "same"))(x),
    "integrate": states,
    "optimize": roots,
}


def examples(mesh):
    return np.linspace(0.3, 1.5, 4 * mesh.size).reshape(2 * mesh.size, 2), np.array([0.7, 1.2])


def loss_of(f):
    return lambda x, w: (np.sin(f(x, w)) ** 2).sum()


@shows("reference", "derivatives", "modes")
def check_body(name, mesh):
    """The loss of all examples, and its gradients: each rank has its rows, and the weights' cotangents are summed."""
    f, (x, w) = PROGRAMS[name], examples(mesh)
    loss = spmd.shard_map(lambda x, w: psum(loss_of(f)(x, w), "i"), mesh=mesh, in_specs=(P("i"), P()), out_specs=P())
    value, expected = md.value_and_grad(loss, argnums=(0, 1)), md.value_and_grad(loss_of(f), argnums=(0, 1))(x, w)
    for g in (value, md.jit(value)):
        for actual, e in zip(md.tree.leaves(g(x, w)), md.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(whole(actual), e, rtol=1e-6, atol=1e-8)


@shows("reference", "derivatives")
def check_sharded(name, mesh):
    """The same program on arrays whose rows are split over the ranks."""
    f, (x, w) = PROGRAMS[name], examples(mesh)
    rows = spmd.distribute(x, mesh, P("i"))
    np.testing.assert_allclose(whole(f(rows, w)), f(x, w), rtol=1e-7, atol=1e-9)
    actual, expected = (md.grad(loss_of(f))(y, w) for y in (rows, x))
    np.testing.assert_allclose(whole(actual), expected, rtol=1e-6, atol=1e-8)
