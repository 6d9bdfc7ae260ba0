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
from spmd.parallel import DecoderConfig, decoder_loss, init_decoder
from spmd.parallel.transformer import embed
from tests.checks.properties import shows
from tests.checks.samples import check_each
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
def check_parts_of_a_decoder(mesh):
    """Routers and the residual stream in float32 beside products in bfloat16; the gradients are float32."""
    config = DecoderConfig(vocabulary=8, features=8, heads=2, layers=2, hidden=8, experts=2)
    text = np.arange(4 * mesh.size * 5).reshape(-1, 5) % 8
    params = md.tree.map(lambda p: p.astype(np.float32), init_decoder(md.random.key(0), config))
    batch = text[:, :-1], text[:, 1:]
    kinds = "bfloat16", "float32"
    for router in kinds:
        for residual in kinds:
            policy = Policy("bfloat16", router=router, residual=residual)
            loss = decoder_loss(mesh, config, policy=policy)
            actual, gradients = md.value_and_grad(loss)(params, batch)
            exact = decoder_loss(mesh, config)(params, batch)
            assert abs(float(whole(actual)) - float(whole(exact))) < 0.05
            assert {x.dtype for x in md.tree.leaves(gradients)} == {np.dtype(np.float32)}
            program = str(md.make_tape(loss)(params, batch))
            sums = re.findall(r":(bf16|f32)\[\d+,4,8\]\S* = add\(", program)
            assert {"float32": "f32", "bfloat16": "bf16"}[residual] in sums and len({*sums}) == 1
            softmaxes = re.findall(r":(bf16|f32)\[[\d,]+,2\]\S* = softmax", program)
            assert {*softmaxes} == {{"float32": "f32", "bfloat16": "bf16"}[router]}


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
def check_sums_round_once(mesh):
    """Sums over ranks are those in float32, rounded once: none overflows on the way, or rounds its parts."""
    n = mesh.size
    grid = spmd.make_mesh((n // 2, 2), IJ, backend=mesh.backend)

    def check(f, expected, dtype, x):
        with np.errstate(over="ignore"):  # a sum itself may be too large
            expected = np.asarray(expected(x.astype(np.float32)), np.float32).astype(dtype)
            for run in (f, md.jit(f)):
                actual = whole(run(x))
                assert actual.dtype == dtype
                np.testing.assert_array_equal(actual.reshape(-1).astype(float), expected.astype(float))

    def checks():
        for dtype in HALF:
            x = large(n, dtype)
            for name, (body, expected) in SUMS.items():
                out = P(IJ) if name in SCATTERED else P()
                f = spmd.shard_map(lambda x, b=body: b(x[0]), mesh=grid, in_specs=P(IJ), out_specs=out)
                yield f"{name} of {dtype}", lambda f=f, e=expected, x=x, dtype=dtype: check(f, e, dtype, x)
            for name, g in OF_SHARDED.items():
                f = lambda x, g=g: g(spmd.distribute(x, grid, P(IJ)))  # noqa: E731
                yield f"{name} of {dtype}", lambda f=f, e=g, x=x, dtype=dtype: check(f, e, dtype, x)

    check_each(checks())


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


@shows("reference", "modes")
def check_signs_of_zero(mesh):
    """Moved values keep their sign, and a sum of only -0.0 is -0.0."""
    n = mesh.size
    x = np.full(n, -0.0)

    def check(f, *args):
        for run in (f, md.jit(f)):
            for actual in md.tree.leaves(run(*args)):
                assert np.signbit(whole(actual)).all(), actual

    def checks():
        for dtype in (np.float64, np.float16):
            for name, body in MOVES.items():
                f = spmd.shard_map(lambda x, b=body: b(x).reshape(-1), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
                yield f"{name} of {np.dtype(dtype)}", lambda f=f, dtype=dtype: check(f, x.astype(dtype))
        sharded = spmd.distribute(x, mesh, P("i"))
        for index in (1, [n - 1, 0], slice(0, 1), np.array([[0], [1]])):
            yield f"[{index}]", lambda index=index: check(lambda x: x[index], sharded)
        yield "a traced index", lambda: check(lambda x, i: x[i], sharded, np.array(1))
        tape = md.make_tape(lambda x: np.sin(x) * np.float64(2.0))(1.0)
        yield "partition_tape", lambda: check(partition_tape(tape, [n - 1, 0], mesh), -0.0)

    check_each(checks())


OF_EVEN_RANKS = [check_reductions, check_skipped_together, check_sums_round_once, check_ranges]
OF_FEW_RANKS = [check_signs_of_zero, check_tf32]
