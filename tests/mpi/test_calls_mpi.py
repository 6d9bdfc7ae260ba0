"""Calls of MPI: what is counted is what is called; what is on its way is not written into, and is waited for."""

import functools

import numpy as np
import pytest
from mpi4py import MPI

import collectives
import minidiff as md
import spmd
from collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    pbroadcast,
    pmax,
    ppermute,
    ppermute_start,
    psum,
    psum_scatter,
)
from collectives.backends.mpi.short_messages import MAX_POOLS
from collectives.guards.deadlock import COMPARISON
from spmd import P
from tests.checks.all_ranks import check_alike, line
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.checks.rewrites import called, data, data_parallel, lowered, parameters
from tests.checks.samples import each
from tests.checks.whole import whole
from tests.programs.jep_examples import EXAMPLES, check_on

RANKS = MPI.COMM_WORLD.size
few = pytest.mark.parallel([2, 4])
RING = [(k, (k + 1) % RANKS) for k in range(RANKS)]


def mapped(body, in_specs=P("i"), out_specs=P("i"), on=None):
    return spmd.shard_map(body, mesh=on or line(), in_specs=in_specs, out_specs=out_specs)


def check_compiled(f, *args, count=None):
    """Compiled, it gives the same, by at most as many calls of each collective, taken together; or by as many."""
    line().reset_calls()
    expected = md.tree.map(whole, f(*args))
    compiled, most = md.jit(f), sum(line().calls.values())
    for _ in range(3):
        line().reset_calls()
        actual = compiled(*args)
        calls = sum(line().calls.values())
        assert calls <= most if count is None else calls == count
        assert_trees_close(md.tree.map(whole, actual), expected, rtol=1e-10)
    return compiled


# ---------------------------------------------------------------- what is counted is what is called


@pytest.mark.parallel([1, 2])
@each("options", [{}, {"check_rep": False}], ["typed", "untyped"])
@each("name", EXAMPLES)
def test_the_examples_of_the_jep(name, options):
    """The counts are those of the example; and as many calls of MPI were made along the axis."""
    on, comm = line(), line().ranks.along(("i",))
    on.reset_calls()
    before = [comm.begun]

    def calls():
        counted = on.calls
        of_mpi = [m for n, (m, _) in comm.recent_calls().items() if n > before[0] and m != COMPARISON]
        assert len(of_mpi) == (sum(counted.values()) if RANKS > 1 else 0)
        on.reset_calls()
        before[0] = comm.begun
        return counted

    check_on(on, EXAMPLES[name], calls, **options)


@pytest.mark.parallel(2)
@each("body", [
    lambda x: psum(x, "i") * psum(x + 1, "i"),
    lambda x: pmax(x, "i") + psum_scatter(x, "i", tiled=True),
    lambda x: all_gather(x, "i", tiled=True) + all_gather_invariant(x, "i", tiled=True),
    lambda x: all_to_all(x, "i", 0, 0, tiled=True) + ppermute(x, "i", [(0, 0)]) - ppermute(x, "i", []),
])  # fmt: skip
def test_along_an_axis_of_one_rank_mpi_is_not_called(body):
    on = mesh(1, 2, backend="mpi")
    gradient = md.grad(mapped(lambda x: psum(psum((body(x) ** 2).sum(), "i"), "j"), P(("i", "j")), P(), on))
    for run in (gradient, md.jit(gradient)):
        comm = on.ranks.along(("i",))
        before = comm.begun
        on.reset_calls()
        run(np.arange(4.0))
        assert {*on.calls} <= {"psum"} and comm.begun == before


@pytest.mark.parallel(1)
@each("body", [
    lambda x: psum(pbroadcast(psum(x.sum(), "i"), "i") * x, "i"),
    lambda x: ppermute(x, "i", [(0, 0)]) + all_gather(x, "i", tiled=True) + pmax(x, "i"),
])  # fmt: skip
def test_of_one_rank_a_compiled_collective_is_nothing(body):
    f = check_compiled(mapped(lambda x: body(x) * 2), np.arange(3.0), count=0)
    names = called(f, np.arange(3.0))
    assert not {"psum", "pbroadcast", "ppermute", "all_gather", "pmax"}.intersection(names)


# ---------------------------------------------------------------- fewer calls


@few
@each("options, buckets", [({}, 1), ({"bucket_bytes": 200}, None), ({"bucket_bytes": 400}, None)])
def test_gradients_are_one_program_on_all_ranks(options, buckets):
    """The loss and all parameters in one call, or in buckets, in one order on all ranks."""
    args = params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))
    step = md.value_and_grad(data_parallel(line()))
    compiled = md.jit(step, **options)
    check_alike(compiled.source(*args))
    for f, count in ((step, 2), (compiled, buckets)):
        f(*args)
        line().reset_calls()
        assert_trees_close(f(*args), md.value_and_grad(data_parallel(mesh(RANKS)))(params, x))
        assert line().calls["psum"] == count if count else line().calls["psum"] > 1
        assert line().bytes == {"psum": 8 * (1 + sum(leaf.size for leaf in md.tree.leaves(params)))}
        check_alike(line().calls)


@few
@each("dtype", ["float16", "float64", "int8"])
def test_values_of_all_shapes_in_one_call(dtype):
    """Also of none, and a number; the program is one for all ranks."""

    def body(x):
        return psum(x, "i"), psum(x[0], "i"), psum(x[:, :0], "i"), psum(x.sum().astype(x.dtype), "i"), x + x

    x = np.arange(6 * RANKS).reshape(2 * RANKS, 3).astype(dtype)
    compiled = check_compiled(mapped(body, out_specs=(P(), P(), P(), P(), P("i"))), x, count=1)
    check_alike(compiled.source(x))
    total = x.reshape(RANKS, 2, 3).sum(0).astype(dtype)
    for result, expected in zip(compiled(x)[:4], (total, total[0], total[:, :0], x.sum().astype(dtype)), strict=True):
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == dtype


# ---------------------------------------------------------------- what is on its way


def moved(x, dtype):
    y = x.astype(dtype)
    return ppermute(y, "i", RING), ppermute(y[0, 0], "i", RING[:1])[None], ppermute(y * y, "i", RING[:-1])


#: What is started, of which dtype: its memory is MPI's until what it is part of is waited for.
STARTED = {
    "a sum": lambda x: (psum(np.sin(x), "i"),),
    **{f"{t} blocks": functools.partial(moved, dtype=t) for t in ("float16", "float64", "bool")},
}


@pytest.mark.parallel(2)
@each("name", STARTED)
def test_what_is_on_its_way_is_not_written_into(name):
    """A large array, whose memory later results could take."""
    body = lambda x: (STARTED[name](x), np.cos(np.exp(np.tanh(x) * 2) + 1))  # noqa: E731
    f = mapped(body, out_specs=(P() if name == "a sum" else P("i"), P("i")))
    x = np.arange(40 * 100 * RANKS).reshape(-1, 100) % 7 / 2
    assert "_start" in lowered(check_compiled(f, x), x)[0]


@few
@each("name", ["psum", "ppermute"])
def test_an_error_while_something_is_on_its_way(name):
    """All ranks fail: what they have begun ends, and they go on. (Where only one does, its next call ends the job.)"""

    def body(x):
        there = psum(x, "i") if name == "psum" else ppermute(x, "i", RING)
        return np.linalg.inv(x) @ x, there

    f = md.jit(mapped(body, out_specs=(P("i"), P() if name == "psum" else P("i"))))
    x = np.concatenate([np.eye(3) * (k + 1) for k in range(RANKS)])
    expected = x.reshape(RANKS, 3, 3).sum(0) if name == "psum" else np.roll(x, 3, axis=0)
    assert f"{name}_start" in lowered(f, x)[0]
    for _ in range(3):
        with pytest.raises(np.linalg.LinAlgError):
            f(0 * x)
        np.testing.assert_array_equal(whole(f(x)[1]), expected)


@few
def test_mpi_is_called_after_products_while_sums_are_in_flight():
    """MPI libraries move long messages only while they are called."""

    def body(x, w):
        total = psum(x, "i")
        for _ in range(3):
            w = np.tanh(w @ w)
        return total, w

    args = np.arange(6.0 * RANKS).reshape(-1, 2), np.eye(3) / 2
    f = check_compiled(mapped(body, (P("i"), P()), (P(), P())), *args)
    assert sum(name.startswith("progress") for name in called(f, *args)) == 3


@few
def test_sums_in_the_steps_of_a_loop_and_in_branches():
    """Begun in a step, and over at its end; also where a step fails, and where nobody takes a sum."""

    def body(x):
        def step(c, t):
            total = psum(np.sum(c), "i")
            psum(c, "i")  # for nobody
            return np.linalg.inv(np.cos(np.sin(c))) * t + total, None

        c = md.scan(step, x, np.array([1.0, 0.5]))[0]
        some = psum(np.sum(x), "i") > 0  # which is known from the first step
        return md.cond(some, lambda c: psum(np.sum(c), "i") + np.sin(np.cos(c)), lambda c: c, c)

    x = np.concatenate([np.eye(3) + 0.1 * np.arange(9).reshape(3, 3)] * RANKS)
    compiled, expected = check_compiled(mapped(body), x, count=3), mapped(body)(x).gather()
    assert sum(text.count("psum_start") for text in lowered(compiled, x)) == 3
    for _ in range(2):
        with pytest.raises(np.linalg.LinAlgError):
            compiled(0 * x)
        np.testing.assert_allclose(compiled(x).gather(), expected)


@few
def test_a_sum_takes_the_memory_of_what_nothing_else_needs():
    """The argument, an operand that is needed later, and a small one keep their own."""

    def body(x):
        product = x * 2
        return psum(psum(product, "i") * x, "i"), psum(x, "i"), product, psum((x * 3)[:2], "i")

    f, x = mapped(body, out_specs=(P(), P(), P("i"), P())), np.arange(1000.0 * RANKS)
    saved, expected = x.copy(), md.tree.map(whole, f(x))
    compiled = md.jit(f, without=("fuse psums", "overlap communication"))
    assert "_in_place" in lowered(compiled, x)[0]
    for _ in range(3):
        assert_trees_close(md.tree.map(whole, compiled(x)), expected)
        np.testing.assert_array_equal(x, saved)


REDUCTIONS = {"psum": np.add, "pprod": np.multiply, "pmax": np.maximum, "pmin": np.minimum}


@pytest.mark.parallel([2, 3, 4])
@each("name, dtype", [
    *((name, "float64") for name in REDUCTIONS),
    *(("psum", dtype) for dtype in ("float16", "complex128", "int8", "bool")),
    ("pmax", "bool"), ("pprod", "float16"), ("pprod", "complex128"),
])  # fmt: skip
def test_short_reductions(name, dtype):
    """On 2 or 4 ranks they are messages. All ranks get the same bits, whichever order MPI would take."""
    rng, comm = np.random.default_rng(0), line().ranks.along(("i",))
    before, f = comm.begun, mapped(lambda x: getattr(collectives, name)(x[0], "i"), out_specs=P())
    for shape in ((), (2, 0), (5, 4)):
        x = rng.normal(size=(RANKS, *shape)).astype(dtype)
        if dtype == "float64" and x.size:
            x.reshape(RANKS, -1)[:2, 0] = 0.0, -0.0
            x.reshape(RANKS, -1)[-1, -1] = np.nan
        wide = x.astype(int) if dtype == "bool" and name in ("psum", "pprod") else x
        expected = REDUCTIONS[name].reduce(wide.astype("float32") if dtype == "float16" else wide, dtype=None)
        for run in (f, md.jit(f)):
            result = run(x)
            np.testing.assert_allclose(result, expected.astype(result.dtype), rtol=1e-3 if dtype == "float16" else 1e-6)
            check_alike(np.asarray(result).tobytes())
        assert comm.begun > before
        assert any(kind[0] == "all_reduce" for kind, *_ in comm.persistent) == (RANKS.bit_count() == 1)


@few
def test_few_persistent_requests_are_there_and_used_again():
    on = spmd.make_mesh((RANKS,), ("i",), comm=MPI.COMM_WORLD.Dup())
    comm, started = on.ranks.along(("i",)), mapped(lambda x: ppermute_start(x, "i", RING).wait(), on=on)
    for n in (*range(1, 4), 1, 2, *range(4, MAX_POOLS + 3), 1, 2):
        x = np.arange(float(n * RANKS)) ** 2
        np.testing.assert_array_equal(started(x).local, np.roll(x, n)[on.rank * n : (on.rank + 1) * n])
    assert len(comm.persistent) <= MAX_POOLS and {len(sets) for sets in comm.persistent.values()} == {1}


@few
def test_meshes_of_one_shape_share_communicators_if_their_axes_have_the_same_names():
    meshes = [spmd.make_mesh((RANKS,), (name,), comm=MPI.COMM_WORLD) for name in ("same", "same", "other")]
    one, two, other = (on.ranks.along(on.axis_names) for on in meshes)
    assert one is two is not other
