"""Programs in 16 bits on ranks: where they add gradients, and steps that all ranks skip."""

import numpy as np

import minidiff as md
import spmd
from collectives import psum
from minidiff.precision import LossScale, Policy, all_finite, select
from spmd import P
from tests.collective_checks import whole

BYTES = {"float32": 4, "bfloat16": 2}


def check_reductions(mesh):
    """A weight's gradient is added in the dtype that the policy says, and is float32 in the end."""
    n = mesh.size
    w, x = np.linspace(-1, 1, 8).reshape(4, 2).astype(np.float32), np.linspace(0, 1, 8 * n).reshape(2 * n, 4)

    def gradient(policy):
        body = lambda w, x: psum(policy.apply(lambda w, x: (np.tanh(x @ w) ** 2).sum())(w, x), "i")  # noqa: E731
        return md.grad(spmd.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P()))

    expected = gradient(Policy("float32"))(w, x)
    for reductions, size in BYTES.items():
        f = gradient(Policy("bfloat16", reductions=reductions))
        report = spmd.communication(f)(w, x)
        assert [row.bytes for row in report.rows if row.direction == "backward"] == [size * w.size]
        for run in (f, md.jit(f)):
            found = whole(run(w, x))
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=0.03, atol=0.03)


def check_skipped_together(mesh):
    """A gradient that is not finite on one rank alone: all skip the step, by one psum of a number."""
    w = spmd.distribute(np.zeros(2 * mesh.size, np.float32), mesh, P("i"))
    x = np.ones(2 * mesh.size, np.float32)
    x[-1] = 4.0  # times 2**14 it is beyond the largest float16

    @md.jit
    def step(scale, w, x):
        _, gradient = scale.value_and_grad(Policy("float16").apply(lambda w, x: (w * x).sum()))(w, x)
        finite = all_finite(gradient)
        return scale.adjust(finite), select(finite, w - gradient, w)

    assert spmd.communication(lambda g: all_finite([g, 2 * g]), optimized=True)(w).counts == {"psum": 1}
    scale, seen = LossScale(2.0**14), []
    for _ in range(2):
        scale, w = step(scale, w, x)
        seen.append((float(scale.scale), whole(w).tolist()))
    assert seen == [(2.0**13, [0.0] * x.size), (2.0**13, (-x).tolist())]
