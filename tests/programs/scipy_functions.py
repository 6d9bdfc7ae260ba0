"""`minidiff.scipy` in the bodies of a `shard_map` and on sharded arrays, against the same programs on whole arrays."""

import numpy as np
import scipy.special

import minidiff as md
import spmd
from minidiff.scipy import integrate, linalg, optimize, signal, special, stats
from spmd import P
from tests.checks.of_whole import check_agree
from tests.checks.properties import shows

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


@shows("reference", "derivatives", "modes")
def check_body(mesh, name):
    """Each rank has its rows, and the weights' cotangents are summed."""
    f = PROGRAMS[name]
    on_ranks = spmd.shard_map(f, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    check_agree(on_ranks, f, examples(mesh), rtol=1e-6, atol=1e-8)


@shows("reference", "derivatives")
def check_sharded(mesh, name):
    """The same program on arrays whose rows are split over the ranks."""
    f, (x, w) = PROGRAMS[name], examples(mesh)
    check_agree(f, f, (x, w), (spmd.distribute(x, mesh, P("i")), w), rtol=1e-6, atol=1e-8)
