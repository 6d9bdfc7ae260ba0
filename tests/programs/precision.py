"""Programs in 16 bits on ranks: where they add gradients, and steps that all ranks skip."""

import re

import ml_dtypes
import numpy as np

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import algorithms, axis_index, axis_size, broadcast, pmax, pmean, psum, psum_scatter, reduce, unreduced
from minidiff.precision import LossScale, Policy, all_finite, ranges, select
from spmd import P
from spmd.examples.dlrm import lookup_by_rows
from spmd.examples.placement import partition_tape
from spmd.parallel import DecoderConfig, decoder_loss, decoder_mesh, init_decoder
from spmd.parallel.transformer import embed
from tests.checks.meshes import mesh as spmd_mesh
from tests.checks.properties import shows
from tests.checks.whole import whole

BYTES = {"float32": 4, "bfloat16": 2}


@shows("derivatives", "modes", "counts", "types")
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
            actual = whole(run(w, x))
            assert actual.dtype == np.float32
            np.testing.assert_allclose(actual, expected, rtol=0.03, atol=0.03)


@shows("reference", "derivatives", "modes")
def check_tf32(mesh):
    """Each rank rounds the operands of its products; the sum of gradients over ranks is in float32."""
    w, x = np.linspace(-1, 1, 8).reshape(4, 2).astype(np.float32), np.linspace(0, 1, 8 * mesh.size, dtype=np.float32)
    loss = Policy("tf32").apply(lambda w, x: (mnp.tanh(x.reshape(-1, 4) @ w) ** 2).sum())
    body = lambda w, x: psum(loss(w, x), "i")  # noqa: E731
    gradient = md.grad(spmd.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P()))
    for run in (gradient, md.jit(gradient)):
        np.testing.assert_allclose(whole(run(w, x)), md.grad(loss)(w, x), rtol=1e-5)
    assert abs(whole(gradient(w, x)) - md.grad(Policy("float32").apply(loss.__wrapped__))(w, x)).max() > 1e-5


@shows("modes", "counts")
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
        with np.errstate(over="ignore", invalid="ignore"):
            scale, w = step(scale, w, x)
        seen.append((float(scale.scale), whole(w).tolist()))
    assert seen == [(2.0**13, [0.0] * x.size), (2.0**13, (-x).tolist())]


@shows("reference")
def check_ranges(mesh):
    """In the body of a `shard_map`, each process reports the numbers of its ranks; sums are the same on all."""
    n = mesh.size
    total = spmd.shard_map(lambda x: psum(x**2, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    rows = {row.operation: row for row in ranges(total)(np.array([1e-9] * (n - 1) + [300.0]))}
    assert rows["psum"].overflow == 1.0 and rows["psum"].largest == 9e4
    assert 0 <= rows["square"].overflow <= 1 and rows["square"].overflow + rows["square"].underflow == 1


@shows("derivatives", "types")
def check_parts_of_a_decoder(mesh, router, residual):
    """Routers and the residual stream in another dtype than products in bfloat16; the gradients are float32."""
    over = decoder_mesh(data=mesh.size, backend=mesh.backend)
    config = DecoderConfig(vocabulary=8, features=8, heads=2, layers=2, hidden=8, experts=2)
    text = np.arange(4 * mesh.size * 5).reshape(-1, 5) % 8
    params = md.tree.map(lambda p: p.astype(np.float32), init_decoder(md.random.key(0), config))
    batch = text[:, :-1], text[:, 1:]
    loss = decoder_loss(over, config, policy=Policy("bfloat16", router=router, residual=residual))
    actual, gradients = md.value_and_grad(loss)(params, batch)
    assert abs(float(whole(actual)) - float(whole(decoder_loss(over, config)(params, batch)))) < 0.05
    assert {x.dtype for x in md.tree.leaves(gradients)} == {np.dtype(np.float32)}
    program, short = str(md.make_tape(loss)(params, batch)), {"float32": "f32", "bfloat16": "bf16"}
    assert {*re.findall(r":(bf16|f32)\[\d+,4,8\]\S* = add\(", program)} == {short[residual]}
    assert {*re.findall(r":(bf16|f32)\[[\d,]+,2\]\S* = softmax", program)} == {short[router]}


# ---------------------------------------------------------------- sums over ranks round once

HALF = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
IJ = ("i", "j")

#: Bodies, of the block [n] of each of n ranks along i and j, and what each gives: of the stacked blocks, in float32.
SUMS = {
    "psum": (lambda x: psum(x, IJ), lambda x: x.sum(0)),
    "psum, axis by axis": (lambda x: psum(unreduced(unreduced(x, "i"), "j"), IJ), lambda x: x.sum(0)),
    "pmean": (lambda x: pmean(x, IJ), lambda x: x.mean(0)),
    "pmean of a tree": (lambda x: sum(pmean([x, x], IJ)) / 2, lambda x: x.mean(0)),
    "pmean of what varies along one axis": (
        lambda x: pmean(pmax(x, "i"), IJ),
        lambda x: x.reshape(-1, 2, len(x)).max(0).mean(0),
    ),
    "psum_scatter": (lambda x: psum_scatter(x, IJ, tiled=True), lambda x: x.sum(0)),
    "reduce": (lambda x: psum(reduce(x, IJ), IJ), lambda x: x.sum(0)),
    "psums that are added": (lambda x: psum(x, IJ) - psum(-x, IJ), lambda x: 2 * x.sum(0)),
    "derivative of pmax": (lambda x: md.jvp(lambda y: pmax(y, IJ), (0 * x,), (x,))[1], lambda x: x.mean(0)),
    **{
        name: (lambda x, name=name: pmax(getattr(algorithms, name)(x, IJ), IJ), lambda x: x.sum(0))
        for name in algorithms.__all__
        if name.endswith("all_reduce")
    },
    "ring_reduce_scatter": (lambda x: algorithms.ring_reduce_scatter(x, IJ, tiled=True), lambda x: x.sum(0)),
    "binomial_tree_reduce": (lambda x: psum(algorithms.binomial_tree_reduce(x, IJ), IJ), lambda x: x.sum(0)),
}
SCATTERED = {"psum_scatter", "ring_reduce_scatter"}

#: Functions of an array [n, n] that is split along its rows, and what each gives in float32.
OF_SHARDED = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "matmul": lambda x: mnp.ones(len(x), x.dtype) @ x,
    "einsum": lambda x: mnp.einsum("ij->j", x),
}


def large(n, dtype):
    """Numbers [n, n] of 16 bits, whose partial sums overflow; in float32 all their sums are exact."""
    step = 32 if dtype == np.float16 else 256
    x = np.random.default_rng(n).integers(30000 // step, 60000 // step, (n, n)) * step
    x[1::2] *= -1
    x[:, 0] = 30000 // step * step
    return x.astype(np.float32).astype(dtype)


@shows("reference", "modes")
def check_sum_rounds_once(mesh, name, dtype):
    """A sum over ranks is that in float32, rounded once: none overflows on the way, or rounds its parts."""
    grid = spmd_mesh(mesh.size // 2, 2, backend=mesh.backend)
    x, rows = large(mesh.size, dtype), P(IJ)
    f = expected = OF_SHARDED.get(name)
    if name in SUMS:
        body, expected = SUMS[name]
        out = rows if name in SCATTERED else P()
        f = spmd.shard_map(lambda x: body(x[0]), mesh=grid, in_specs=rows, out_specs=out)
    with np.errstate(over="ignore"):  # a sum itself may be too large
        expected = np.asarray(expected(x.astype(np.float32)), np.float32).astype(dtype)
        for run in (f, md.jit(f)):
            actual = whole(run(spmd.distribute(x, grid, rows)))
            assert actual.dtype == dtype
            np.testing.assert_array_equal(actual.reshape(-1).astype(float), expected.astype(float))


# ---------------------------------------------------------------- signs of zero

#: Bodies, of a block of -0.0 on each rank, that move or add it: all ranks have -0.0 again.
MOVES = {
    "psum": lambda x: psum(x, "i"),
    "pmean": lambda x: pmean(x, "i"),
    "psum_scatter": lambda x: psum_scatter(x * np.ones(axis_size("i")), "i", tiled=True),
    "reduce": lambda x: broadcast(reduce(x, "i", root=1), "i", root=1),
    **{
        name: lambda x, name=name: getattr(algorithms, name)(x, "i")
        for name in algorithms.__all__
        if name.endswith("all_reduce")
    },
    "binomial_tree_reduce": lambda x: broadcast(algorithms.binomial_tree_reduce(x, "i"), "i"),
    "vocabulary": lambda x: embed(x[None] * np.ones((2, 1)), np.arange(3), "i"),
    "table": lambda x: lookup_by_rows(x[None, None], axis_index("i")[None, None], "i"),
}


#: Functions of an array of -0.0 that is split: look-ups.
PLACES = {
    "an index": lambda x: x[1],
    "indices": lambda x: x[[x.size - 1, 0]],
    "a slice": lambda x: x[:1],
    "an array of indices": lambda x: x[np.array([[0], [1]])],
}


@shows("reference", "modes")
def check_sign_of_zero(mesh, name, dtype):
    """Moved values keep their sign, and a sum of only -0.0 is -0.0."""
    f, x = PLACES.get(name), spmd.distribute(np.full(mesh.size, -0.0, dtype), mesh, P("i"))
    if name in MOVES:
        f = spmd.shard_map(lambda x: MOVES[name](x).reshape(-1), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    for run in (f, md.jit(f)):
        assert np.signbit(whole(run(x))).all()


@shows("reference", "modes")
def check_signs_of_traced_places(mesh):
    tape = md.make_tape(lambda x: np.sin(x) * np.float64(2.0))(1.0)
    x = spmd.distribute(np.full(mesh.size, -0.0), mesh, P("i"))
    assert np.signbit(whole(md.jit(lambda x, i: x[i])(x, np.array(1))))
    assert all(np.signbit(whole(y)).all() for y in partition_tape(tape, [mesh.size - 1, 0], mesh)(-0.0))
