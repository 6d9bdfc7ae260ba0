"""`all_to_all` by splits that are known at run time, on simulated and MPI ranks."""

from functools import partial

import numpy
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, all_gather_invariant, all_to_all, axis_index, psum
from collectives.reference import all_to_all_ref
from spmd import P
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close
from tests.checks.whole import whole

ROWS, CAPACITY, WIDTH = 7, 9, 2


def table(n: int, seed: int) -> numpy.ndarray:
    """Return row counts for n ranks, some of them zero, with at most ROWS in a row and CAPACITY in a column."""
    rng = numpy.random.default_rng(seed)
    counts = rng.integers(0, ROWS // n + 2, (n, n))
    while counts.sum(1).max() > ROWS or counts.sum(0).max() > CAPACITY:
        counts[numpy.unravel_index(counts.argmax(), counts.shape)] -= 1
    return counts


TABLES = {"some": lambda n: table(n, 0), "others": lambda n: table(n, 1), "none": lambda n: table(n, 0) * 0}
TABLES["all to the last"] = lambda n: numpy.array([[0] * (n - 1) + [min(ROWS, CAPACITY // n)]] * n)


def exchange(mesh, axis=0, **options):
    """Return the exchange of whole arrays, by a table of which each rank knows its own row."""

    def body(x, row):
        return all_to_all(x, "i", axis, axis, splits=all_gather_invariant(row[0], "i"), capacity=CAPACITY)

    spec = P(*[None] * axis, "i")
    return spmd.shard_map(body, mesh=mesh, in_specs=(spec, P("i")), out_specs=spec, **options)


def expected_of(x, splits, axis=0):
    blocks = all_to_all_ref(numpy.split(x, len(splits), axis), axis, axis, splits=splits.tolist(), capacity=CAPACITY)
    return numpy.concatenate(blocks, axis)


def random(*shape, dtype="float64", seed=0):
    return numpy.random.default_rng(seed).normal(size=shape).astype(dtype)


@shows("reference", "modes", "types")
def check_values(mesh, name, dtype):
    """Values, to the last bit, by eager and compiled programs, of tables and dtypes that differ from call to call."""
    n, splits = mesh.size, TABLES[name](mesh.size)
    for axis, shape in ((0, (n * ROWS, WIDTH)), (0, (n * ROWS,)), (1, (WIDTH, n * ROWS, 1))):
        x, f = random(*shape, dtype=dtype), exchange(mesh, axis)
        for run in (f, f, f, md.jit(f), exchange(mesh, axis, check_rep=False)):
            assert_array_equal(whole(run(x, splits)), expected_of(x, splits, axis))
        assert_array_equal(whole(f(x, splits.astype("int8"))), expected_of(x, splits, axis))


@shows("counts")
def check_messages(mesh):
    """It communicates the counts, and the rows; reports and the backend's counter agree, in both directions."""
    n, splits, f = mesh.size, TABLES["some"](mesh.size), exchange(mesh)
    x = random(n * ROWS, WIDTH)

    def pullback(x):
        y, vjp = md.vjp(lambda x: f(x, splits), x)
        return vjp(y)

    mesh.reset_calls()
    pullback(x)
    there, back = 8 * WIDTH * ROWS, 8 * WIDTH * CAPACITY
    expected = {"all_gather_invariant": (1, 8 * n), "ragged_all_to_all": (2, there + back)} if n > 1 else {}
    assert {name: (count, mesh.bytes[name]) for name, count in mesh.calls.items()} == expected
    rows = spmd.communication(pullback)(x).rows
    assert sum(row.bytes for row in rows) == sum(nbytes for _, nbytes in expected.values())


@shows("derivatives", "adjoint", "modes", "types")
def check_derivatives(mesh):
    """The inner product with the transpose, both modes, and second derivatives, also compiled and without types."""
    n, splits = mesh.size, TABLES["some"](mesh.size)
    x, ct = random(n * ROWS, WIDTH), random(n * CAPACITY, WIDTH, seed=1)
    for f in (exchange(mesh), md.jit(exchange(mesh)), exchange(mesh, check_rep=False)):
        y, vjp = md.vjp(lambda x: f(x, splits), x)  # noqa: B023
        assert_allclose(numpy.vdot(ct, whole(y)), numpy.vdot(whole(vjp(ct)[0]), x), rtol=1e-12)
        assert_array_equal(whole(md.jvp(lambda x: f(x, splits), (x,), (x,))[1]), whole(y))  # noqa: B023
    smooth = exchange(mesh)
    md.testing.check_grads(lambda x: np.sum(np.sin(smooth(np.sin(x), splits))), (x,), order=2)


@shows("derivatives", "modes")
def check_batches(mesh):
    """Under vmap, of rows, of tables, and of both; and of gradients."""
    n, f = mesh.size, exchange(mesh)
    xs, tables = random(3, n * ROWS, WIDTH), numpy.stack([table(n, seed) for seed in range(3)])
    both = [expected_of(x, splits) for x, splits in zip(xs, tables)]
    assert_array_equal(whole(md.vmap(f)(xs, tables)), both)
    assert_array_equal(whole(md.vmap(f, (0, None))(xs, tables[0])), [expected_of(x, tables[0]) for x in xs])
    assert_array_equal(whole(md.vmap(f, (None, 0))(xs[0], tables)), [expected_of(xs[0], splits) for splits in tables])
    loss = lambda x, splits: np.sum(f(x, splits) ** 2)  # noqa: E731
    gradients = md.vmap(md.grad(loss))(xs, tables)
    assert_array_equal(whole(gradients), numpy.stack([whole(md.grad(loss)(x, t)) for x, t in zip(xs, tables)]))


@shows("modes", "errors")
def check_errors(mesh):
    """Counts beyond the room for them are an error on every rank, and the ranks go on."""
    n, f = mesh.size, exchange(mesh)
    x, splits = random(n * ROWS, WIDTH), TABLES["some"](n)
    received = numpy.full((n, n), CAPACITY // n + 1) * (numpy.arange(n) == 0)
    cases = [
        (splits + (ROWS + 1) * last_to_first(n), f"rank {n - 1} sends"),
        (splits - 99 * numpy.eye(n, dtype=int), "is -"),
    ]
    for wrong, message in [*cases, (received, "rank 0 receives")] if received.sum(1).max() <= ROWS else cases:
        for run in (f, md.jit(f)):
            with pytest.raises(ValueError, match=message):
                run(x, wrong)
            assert_array_equal(whole(run(x, splits)), expected_of(x, splits))


def last_to_first(n):
    return (numpy.arange(n) == n - 1)[:, None] * (numpy.arange(n) == 0)


@shows("reference", "derivatives", "modes", "types")
def check_further_axes(mesh):
    """Along another axis of the mesh, each group of ranks has a table of its own, and the rows may be the same."""
    mesh, m, n = spmd.make_mesh((2, 2), ("j", "i"), backend=mesh.backend), 2, 2
    tables = numpy.stack([table(n, seed) for seed in range(m)])
    for vary in (True, False):
        x = random(m if vary else 1, n * ROWS, WIDTH)
        expected = numpy.stack([expected_of(x[k if vary else 0], tables[k]) for k in range(m)])

        def body(x, row, to):
            return all_to_all(x[0], "i", 0, 0, splits=all_gather(row[0, 0], "i", to=to), capacity=CAPACITY)[None]

        for check_rep, to in ((True, "invariant"), (False, "varying")):
            body, specs = partial(body, to=to), (P("j" if vary else None, "i"), P("j", "i"))
            f = spmd.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("j", "i"), check_rep=check_rep)
            for run in (f, f, f, md.jit(f)):
                assert_array_equal(whole(run(x, tables)), expected)
            md.testing.check_grads(lambda x: np.sum(np.sin(f(x, tables))), (x,), order=1, modes=["rev"])  # noqa: B023


@shows("reference", "derivatives", "modes")
def check_vmap_axis(mesh):
    """Over the axis of a vmap, elements are ranks: values and derivatives."""
    n = mesh.size
    splits, x = table(n, 0), random(n, ROWS, WIDTH)

    def one(x, row):
        return all_to_all(x, "i", 0, 0, splits=all_gather(row, "i"), capacity=CAPACITY)

    f = lambda x: md.vmap(one, axis_name="i")(x, splits)  # noqa: E731
    expected = numpy.stack(numpy.split(expected_of(x.reshape(-1, WIDTH), splits), n))
    assert_array_equal(f(x), expected)
    assert_array_equal(md.jit(f)(x), expected)
    md.testing.check_grads(lambda x: np.sum(np.sin(f(x))), (x,), order=2)


@shows("reference", "derivatives", "modes")
def check_loops(mesh):
    """In a scan, whose steps have tables of their own; and in a branch that all ranks take."""
    n = mesh.size
    tables = numpy.stack([table(n, seed) for seed in range(3)])

    def body(x, rows):
        def step(x, row):
            y = all_to_all(x, "i", 0, 0, splits=all_gather_invariant(row, "i"), capacity=CAPACITY)
            return np.sin(x) + np.sum(y), psum(np.sum(y), "i")

        x, sums = md.scan(step, x, rows[0])
        last = all_gather_invariant(rows[0, -1], "i")
        send = lambda x: all_to_all(x, "i", 0, 0, splits=last, capacity=ROWS)  # noqa: E731
        return md.cond(last[0, 0] >= 0, send, lambda x: x, x) * (1.0 + axis_index("i")), sums

    f = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=(P("i"), P()))
    x, rows = random(n * ROWS), numpy.swapaxes(tables, 0, 1)
    loss = lambda x: sum(np.sum(np.sin(y)) for y in f(x, rows))  # noqa: E731
    assert_trees_close([*map(whole, md.jit(f)(x, rows))], [*map(whole, f(x, rows))], atol=1e-12)
    md.testing.check_grads(loss, (x,), order=1)


#: Further checks of a line of ranks.
CHECKS = [check_messages, check_derivatives, check_batches, check_errors, check_loops]
