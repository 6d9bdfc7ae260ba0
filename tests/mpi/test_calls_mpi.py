"""Calls of MPI: the functions, the numbers of entries, their order, and no request left behind.

Communicators are wrapped in one that takes note of their calls. What the mesh counts is what MPI is called for, what a
compiled program has started is waited for, also where it fails, and compiled programs call no more than others.
"""

import contextlib
import functools
from collections import Counter

import numpy as np
import pytest
from mpi4py import MPI

import collectives
import minidiff as md
import spmd
from collectives import (
    algorithms,
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_index,
    broadcast,
    pbroadcast,
    pmax,
    pmean,
    ppermute,
    ppermute_start,
    pscatter,
    psum,
    psum_scatter,
)
from collectives.backends.mpi import short_messages
from collectives.cost import ALGORITHMS
from collectives.passes import SETTINGS
from spmd import P
from tests.checks.algorithms import run_divisible, runs_on
from tests.checks.rewrites import data, data_parallel, lowered, parameters
from tests.checks.samples import each
from tests.checks.whole import whole
from tests.programs.jep_examples import EXAMPLES, check_on
from tests.programs.on_blocks import assert_trees_close
from tests.programs.rewrite import INSTRUCTIONS

RANKS = MPI.COMM_WORLD.size
few = pytest.mark.parallel([2, 4])


class WatchedComm:
    """A communicator that takes note of the calls of its methods: names and arguments."""

    def __init__(self, comm, calls):
        self._comm = comm
        self._calls = calls

    def __getattr__(self, name):
        result = getattr(self._comm, name)
        if not callable(result) or name.startswith("Get_"):  # which asks for nothing but its state
            return result

        def call(*args, **options):
            self._calls.append((name, args))
            return result(*args, **options)

        return call


@functools.cache
def line():
    return spmd.make_mesh((RANKS,), ("i",), backend="mpi")


@pytest.fixture
def watched(monkeypatch):
    """A mesh of all ranks, and the calls of MPI along its axis and on its ranks."""
    mesh, calls = line(), []
    along = mesh.ranks.along
    along(("i",))  # communicators are made at first use, which is no collective of the program's
    monkeypatch.setattr(mesh.ranks, "along", lambda axes: WatchedComm(along(axes), calls), raising=False)
    monkeypatch.setattr(mesh.ranks, "comm", WatchedComm(mesh.ranks.comm, calls))
    monkeypatch.setattr(mesh.ranks, "plans", {})  # those made with the communicators themselves
    mesh.reset_calls()
    return mesh, calls


REDUCING = ("Allreduce", "Iallreduce", "Reduce_scatter_block")


def reductions(calls):
    """The reductions among these calls, with their numbers of entries."""
    return [(name, args[1].size) for name, args in calls if name in REDUCING]


def entries(calls):
    return [n for _, n in reductions(calls)]


def the_same_on_all(x):
    everywhere = MPI.COMM_WORLD.allgather(x)
    assert all(y == everywhere[0] for y in everywhere)


def mapped(body, in_specs=P("i"), out_specs=P("i")):
    return spmd.shard_map(body, mesh=line(), in_specs=in_specs, out_specs=out_specs)


# ---------------------------------------------------------------- what is counted is what is called

#: How MPI's names of collective operations begin -> the collective that they are called for.
CALLED_FOR = {
    "allreduce": {"psum"},
    "allgather": {"all_gather", "all_gather_invariant"},
    "reduce_scatter": {"psum_scatter"},
}


@pytest.mark.parallel([1, 2, 4])
@each("options", [{}, {"check_rep": False}], ["typed", "untyped"])
@each("name", EXAMPLES)
def test_the_examples_of_the_jep(name, options, watched):
    mesh, created = watched

    def calls():
        """Return the mesh's counts, after checking them against the calls of MPI."""
        counted, called = mesh.calls, Counter(name.lower().removeprefix("i") for name, _ in created)
        mesh.reset_calls()
        created.clear()
        assert sum(called.values()) == sum(counted.values())
        for mpi_name in called:
            (wanted,) = [c for prefix, c in CALLED_FOR.items() if mpi_name.startswith(prefix)]
            assert called[mpi_name] == sum(counted.get(c, 0) for c in wanted)
        return counted

    check_on(mesh, EXAMPLES[name], calls, **options)


@pytest.mark.parallel([2, 3, 4])
@each("name", algorithms.__all__)
def test_formulas_of_algorithms_are_what_is_sent(name, watched):
    mesh, calls = watched
    if not runs_on(name, mesh.size):
        return
    calls.clear()
    size, formulas = run_divisible(name, mesh), ALGORITHMS[name]
    assert mesh.calls == {"ppermute": formulas.steps(mesh.size) * formulas.ports}
    sent = [sum(args[0][0].nbytes for called, args in calls if called == way) for way in ("Isend", "Irecv")]
    most = tuple(map(max, zip(*MPI.COMM_WORLD.allgather(sent))))
    assert most == (formulas.sent(mesh.size, size), formulas.received(mesh.size, size))


@pytest.mark.parallel(2)
def test_along_an_axis_of_one_rank_mpi_is_not_called(monkeypatch):
    mesh, calls = spmd.make_mesh((1, 2), ("i", "j")), []
    along = mesh.ranks.along
    monkeypatch.setattr(mesh.ranks, "along", lambda axes: calls.append(axes) or along(axes), raising=False)
    each = {"axis_name": "i", "tiled": True}
    bodies = [
        lambda x: psum(x, "i") * psum(x + 1, "i"),
        lambda x: pmax(x, "i") + psum_scatter(x, **each),
        lambda x: all_gather(x, **each) + all_gather_invariant(x, **each),
        lambda x: all_to_all(x, "i", 0, 0, tiled=True) + ppermute(x, "i", [(0, 0)]) - ppermute(x, "i", []),
    ]
    for body in bodies:
        loss = lambda x, body=body: psum(psum((body(x) ** 2).sum(), "i"), "j")  # noqa: E731
        f = spmd.shard_map(loss, mesh=mesh, in_specs=P(("i", "j")), out_specs=P())
        for run in (md.grad(f), md.jit(md.grad(f))):
            run(np.arange(4.0))
    assert calls and all(mesh.ranks.size(axes) > 1 for axes in calls)


@pytest.mark.parallel(1)
def test_of_one_rank_a_compiled_collective_is_nothing():
    mesh = line()
    bodies = [
        lambda x: psum(pbroadcast(psum(x.sum(), "i"), "i") * x, "i"),
        lambda x: ppermute(x, "i", [(0, 0)]) + all_gather(x, "i", tiled=True) + pmax(x, "i"),
    ]
    for body in bodies:
        f = spmd.shard_map(lambda x, body=body: body(x) * 2, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        (text,) = lowered(md.jit(f), np.arange(3.0))
        assert not any(name in text for name in ("psum", "pbroadcast", "ppermute", "gather", "pmax"))
        np.testing.assert_allclose(md.jit(f)(np.arange(3.0)).gather(), f(np.arange(3.0)).gather())
    assert mesh.calls == {}


@pytest.mark.parallel(1)
@each("name", ["psum", "pmax", "ppermute", "all_gather", "all_to_all"])
@each("jit", [False, True])
def test_the_result_of_one_rank_is_not_its_operand(name, jit):
    body = {
        "psum": lambda x: psum(x, "i"),
        "pmax": lambda x: pmax(x, "i"),
        "ppermute": lambda x: psum(ppermute(x, "i", [(0, 0)]), "i"),
        "all_gather": lambda x: all_gather_invariant(x, "i", tiled=True),
        "all_to_all": lambda x: psum(all_to_all(x, "i", 0, 0, tiled=True), "i"),
    }[name]
    f = spmd.shard_map(body, mesh=line(), in_specs=P("i"), out_specs=P())
    f, x = md.jit(f) if jit else f, np.arange(3.0)
    for inputs in (x, spmd.distribute(x, line(), P("i"))):
        for _ in range(2):
            out = f(inputs)
            assert out.tolist() == [0.0, 1.0, 2.0]
            out[...] = -1
    assert x.tolist() == [0.0, 1.0, 2.0]


@few
@each("jit", [False, True])
def test_a_broadcast_leaves_the_operand_of_the_root(jit):
    """Compiled programs write into what nothing else needs."""
    f = mapped(lambda x: (broadcast(x, "i") + x, 2 * x), out_specs=(P("i"), P("i")))
    f, x = md.jit(f) if jit else f, np.arange(1000.0 * RANKS)
    for _ in range(2):
        summed, doubled = f(x)
        np.testing.assert_array_equal(whole(summed), x + np.tile(np.arange(1000.0), RANKS))
        np.testing.assert_array_equal(whole(doubled), 2 * np.arange(1000.0 * RANKS))
    np.testing.assert_array_equal(x, np.arange(1000.0 * RANKS))


# ---------------------------------------------------------------- fewer calls


def network_gradient(**options):
    """The loss and gradient of a data-parallel network, its arguments, and what they are without ranks."""
    params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))

    def loss(params, x):
        for w, b in params:
            x = np.tanh(x @ w + b)
        return (x**2).sum()

    return md.value_and_grad(data_parallel(line(), **options)), (params, x), md.value_and_grad(loss)(params, x)


ENTRIES = 1 + 5 * 7 + 7 + 7 * 6 + 6 + 6 * 3 + 3  # of the loss and of all parameters


@few
def test_one_all_reduce_for_the_loss_and_all_parameters(watched):
    step, args, expected = network_gradient()
    assert_trees_close(step(*args), expected)
    assert reductions(watched[1]) == [("Allreduce", 1), ("Allreduce", ENTRIES - 1)]  # without jit, the loss goes before
    compiled = md.jit(step)
    for _ in range(3):
        watched[1].clear()
        assert_trees_close(compiled(*args), expected)
    assert entries(watched[1]) == [ENTRIES]


@few
@each("size", [200, 400, 600])
def test_buckets_are_on_their_way_at_once(size, watched):
    """Several, none larger than it may be; begun before any is waited for, in one order on all ranks."""
    step, args, expected = network_gradient()
    compiled = md.jit(step, bucket_bytes=size)
    (text,) = lowered(compiled, *args)
    watched[1].clear()
    assert_trees_close(compiled(*args), expected)
    calls, largest = reductions(watched[1]), max(w.size for w, _ in args[0])
    assert len(calls) >= 2 and {"Iallreduce"} <= {name for name, _ in calls} <= {"Iallreduce", "Allreduce"}
    assert all(n * 8 <= size or n <= largest for _, n in calls)
    the_same_on_all((calls, text))
    assert not line().ranks._in_flight


@few
@each("size, buckets", [(1, 6), (400, 3), (None, 1)])
def test_buckets_of_a_gradient_that_is_not_compiled(size, buckets, watched):
    """Summed at the end, one call for each."""
    step, args, expected = network_gradient()
    watched[1].clear()
    with pytest.MonkeyPatch.context() as patch:
        if size is not None:
            patch.setitem(SETTINGS, "bucket_bytes", size)
        assert_trees_close(step(*args), expected)
    calls = reductions(watched[1])
    assert [name for name, _ in calls] == ["Allreduce"] * (1 + buckets) and sum(n for _, n in calls) == ENTRIES
    the_same_on_all(calls)
    assert not line().ranks._in_flight


@few
@each("dtype", ["float16", "float32", "float64", "complex128", "int32", "int8"])
def test_values_of_all_dtypes(dtype, watched):
    def body(x):
        return psum(x, "i"), psum(x[0], "i"), psum(x[:, :0], "i"), psum(x.sum().astype(x.dtype), "i"), x + x

    x = np.arange(6 * RANKS).reshape(2 * RANKS, 3).astype(dtype)
    compiled = md.jit(mapped(body, out_specs=(P(), P(), P(), P(), P("i"))))
    compiled(x)
    watched[1].clear()
    *outs, _ = compiled(x)
    assert len(reductions(watched[1])) == 1
    total = x.reshape(RANKS, 2, 3).sum(0).astype(dtype)
    for result, expected in zip(outs, (total, total[0], total[:, :0], x.sum().astype(dtype)), strict=True):
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == dtype


@few
def test_each_instruction():
    """Redundant work on ranks: compiled programs have the same values, and make no more calls."""
    mesh, x, w = line(), data("float64", (12 * RANKS, 2)), data("float64", (12, 2), 1)
    for name, instruction in INSTRUCTIONS.items():

        def body(x, w, instruction=instruction):
            return instruction(instruction(x, w, ("i",), RANKS) + np.cos(x), np.sin(w), ("i",), RANKS)

        f = mapped(body, (P("i"), P()))
        for g in (f, md.grad(lambda x, w, f=f: (f(x, w) ** 2).sum(), (0, 1))):
            check_compiled(g, mesh, x, w, name=name)


def check_compiled(f, mesh, *args, name=""):
    """Compiled, it gives the same, by at most as many calls of each collective, taken together."""
    mesh.reset_calls()
    expected = md.tree.map(whole, f(*args))
    eager, compiled = sum(mesh.calls.values()), md.jit(f)
    for _ in range(2):
        mesh.reset_calls()
        assert_trees_close(md.tree.map(whole, compiled(*args)), expected, rtol=1e-10)
        assert sum(mesh.calls.values()) <= eager, name


def loss(w, x):
    return psum((np.tanh(x @ w) ** 2).sum(), "i") + psum(x.sum(), "i")


def rotated(w, x):
    return ppermute(x, "i", perm=[(0, 1), (1, 0)]) @ w * (axis_index("i") + md.typeof(w).shape[0])


def loop(w, x):
    return psum(md.scan(lambda c, _: (np.tanh(c @ w), None), x, None, length=20)[0].sum(), "i")


@few
@each("body", [loss, rotated, loop])
def test_compiled_programs_are_one_for_all_ranks(body):
    f = mapped(body, (P(), P("i")), P("i") if body is rotated else P())
    args = np.arange(9.0).reshape(3, 3) / 9, np.ones((8, 3))
    the_same_on_all(md.jit(f).source(*args))
    for g in (f, *((md.grad(f), md.value_and_grad(f, (0, 1))) if body is not rotated else ())):
        check_compiled(g, line(), *args)


@few
def test_the_loss_that_nobody_asked_for_is_not_summed():
    gradient, mesh = md.jit(md.grad(mapped(loss, (P(), P("i")), P()))), line()
    for _ in range(2):
        mesh.reset_calls()
        gradient(np.eye(3), np.ones((8, 3)))
    assert mesh.calls == {"psum": 1}


@few
def test_one_function_in_vmaps_of_other_sizes():
    f = md.jit(lambda x: psum(pmean(x, "v"), "i"))
    for n in (2, 3):
        call = mapped(lambda w, x: md.vmap(f, axis_name="v")(x[0] * w), (P(), P("i")), P())
        x = np.arange(float(RANKS))
        np.testing.assert_array_equal(call(np.arange(float(n)), x), [x.sum() * np.arange(n).mean()] * n)


def product(x):
    return np.sin(x) * x


@few
def test_pullbacks_leave_bodies_and_programs():
    make = mapped(lambda w, x: md.vjp(product, w * x)[1], (P(), P("i")))
    apply = mapped(lambda pullback, ct: pullback(ct)[0])
    x, w = np.arange(1.0, RANKS + 1), 0.5
    for wrapped in (lambda f: f, md.jit):
        result = wrapped(apply)(wrapped(make)(w, x), x).gather()
        np.testing.assert_allclose(result, (np.cos(w * x) * w * x + np.sin(w * x)) * x)


@few
def test_a_rule_in_a_body_keeps_a_pullback():
    f = md.custom_vjp(product)
    f.defvjp(lambda x: md.vjp(product, x), lambda pullback, ct: pullback(ct))
    total = mapped(lambda w, x: psum(f(w * x).sum(), "i"), (P(), P("i")), P())
    x = np.arange(1.0, RANKS + 1)
    for gradient in (md.grad(total), md.jit(md.grad(total))):
        np.testing.assert_allclose(gradient(1.0, x), ((np.cos(x) * x + np.sin(x)) * x).sum())


@few
@each("of_weights", [lambda w: w, np.cos], ["as they are", "computed in each step"])
def test_a_loop_over_layers_sums_its_weights_once(of_weights, watched):
    """Weights are broadcast before the loop: so MPI is called once for all layers, not for each."""
    _, w, ws = args = data("float64", (8, 3)), np.ones(3) / 3, data("float64", (5, 3), 1)

    def network(x, w, ws):
        return md.scan(lambda x, v: (np.tanh(x * v) + of_weights(w), None), x, ws)[0]

    body = lambda x, w, ws: pmean(np.mean(network(x, w, ws) ** 2), "i")  # noqa: E731
    gradient = md.grad(mapped(body, (P("i"), P(), P()), P()), (0, 1, 2))
    expected = md.grad(lambda *args: np.mean(network(*args) ** 2), (0, 1, 2))(*args)
    together, computed = [w.size + ws.size], of_weights is np.cos
    for run, sizes in (
        (gradient, [1, *together]),
        (md.make_tape(gradient)(*args), [1, *([w.size, ws.size] if computed else together)]),
        (md.jit(gradient), together),
    ):
        watched[1].clear()
        assert_trees_close(list(run(*args)), list(expected))
        assert entries(watched[1]) == sizes


@few
def test_this_ranks_slice_of_a_sum_is_reduced_and_scattered(watched):
    x = data("float64", (2 * RANKS * RANKS, 3))
    compiled = md.jit(mapped(lambda x: pscatter(psum(x, "i"), "i", tiled=True)))
    compiled(x)
    watched[1].clear()
    out = compiled(x)
    assert reductions(watched[1]) == [("Reduce_scatter_block", 6)]
    np.testing.assert_allclose(out.gather(), x.reshape(RANKS, 2 * RANKS, 3).sum(0))


# ---------------------------------------------------------------- what is on its way


def ring(by=0):
    return [(k, (k + 1) % RANKS) for k in range(RANKS - by)]


def moved(x, dtype):
    y = x.astype(dtype)
    return ppermute(y, "i", ring()), ppermute(y[0, 0], "i", ring()[:1])[None], ppermute(y * y, "i", ring(1))


#: What is started, of which dtype: its memory is MPI's until what it is part of is waited for.
STARTED = {
    "a sum": lambda x: (psum(np.sin(x), "i"),),
    **{
        f"blocks of {t}": functools.partial(moved, dtype=t)
        for t in ("float16", "float64", "complex128", "int8", "bool")
    },
}


@few
@each("name", STARTED)
def test_what_is_on_its_way_is_not_written_into(name):
    """A large array, whose memory later results could take."""
    body = lambda x: (STARTED[name](x), np.cos(np.exp(np.tanh(x) * 2) + 1))  # noqa: E731
    f = mapped(body, out_specs=(P() if name == "a sum" else P("i"), P("i")))
    x = np.arange(400 * 100 * RANKS).reshape(-1, 100) % 7 / 2
    compiled, expected = md.jit(f), [whole(out) for out in md.tree.leaves(f(x))]
    assert "_start" in lowered(compiled, x)[0]
    for _ in range(3):
        for actual, e in zip(md.tree.leaves(compiled(x)), expected, strict=True):
            assert actual.dtype == e.dtype
            np.testing.assert_allclose(whole(actual), e, rtol=1e-12)
        assert not line().ranks._in_flight


@few
@each("name", ["psum", "ppermute"])
def test_an_error_while_something_is_on_its_way(name):
    """All ranks fail: what they have begun ends, and they go on. (Where only one does, its next call ends the job.)"""
    start = {"psum": lambda x: psum(x, "i"), "ppermute": lambda x: ppermute(x, "i", ring())}[name]

    def body(x):
        there = start(x)
        return np.linalg.inv(x) @ x, there

    f = md.jit(mapped(body, out_specs=(P("i"), P() if name == "psum" else P("i"))))
    x = np.concatenate([np.eye(3) * (k + 1) for k in range(RANKS)])
    expected = x.reshape(RANKS, 3, 3).sum(0) if name == "psum" else np.roll(x, 3, axis=0)
    assert f"{name}_start" in lowered(f, x)[0]
    for _ in range(3):
        with pytest.raises(np.linalg.LinAlgError):
            f(0 * x)
        assert not line().ranks._in_flight
        np.testing.assert_array_equal(whole(f(x)[1]), expected)


@few
def test_mpi_is_called_after_products_while_sums_are_in_flight(monkeypatch):
    """MPI libraries move long messages only while they are called."""

    def body(x, w):
        total = psum(x, "i")
        for _ in range(3):
            w = np.tanh(w @ w)
        return total, w

    f = md.jit(mapped(body, in_specs=(P("i"), P()), out_specs=(P(), P())))
    x, w = np.arange(6.0 * RANKS).reshape(-1, 2), np.eye(3) / 2
    called = []
    progress = type(line().ranks).progress
    monkeypatch.setattr(type(line().ranks), "progress", lambda self, s: called.append(s) or progress(self, s))
    total, product = f(x, w)
    assert len(called) == 3 and len({*map(id, called)}) == 1
    for _ in range(3):
        w = np.tanh(w @ w)
    np.testing.assert_allclose(whole(total), x.reshape(RANKS, 3, 2).sum(0))
    np.testing.assert_allclose(product, w)
    (text,) = lowered(f, x, np.eye(3) / 2)
    names = [row.split("#")[0].split(" = ")[-1].split("(")[0].strip() for row in text.splitlines()]
    assert sum(name.startswith("progress") for name in names) == 3


@few
def test_sums_in_the_steps_of_a_loop_and_in_branches(watched):
    """Begun in a step, and over at its end; also where a step fails, and where nobody takes a sum."""

    def body(x):
        def step(c, t):
            total = psum(np.sum(c), "i")
            psum(c, "i")  # for nobody
            return np.linalg.inv(np.cos(np.sin(c))) * t + total, None

        c = md.scan(step, x, np.array([1.0, 0.5]))[0]
        some = psum(np.sum(x), "i") > 0  # which is known from the first step
        return md.cond(some, lambda c: psum(np.sum(c), "i") + np.sin(np.cos(c)), lambda c: c, c)

    f = mapped(body)
    x = np.concatenate([np.eye(3) + 0.1 * np.arange(9).reshape(3, 3)] * RANKS)
    compiled, expected = md.jit(f), f(x).gather()
    assert sum(text.count("psum_start") for text in lowered(compiled, x)) == 3
    watched[1].clear()
    np.testing.assert_allclose(compiled(x).gather(), expected)
    assert [name for name, _ in reductions(watched[1])] == ["Iallreduce"] * 3
    for _ in range(2):
        with pytest.raises(np.linalg.LinAlgError):
            compiled(0 * x)
        assert not line().ranks._in_flight
        np.testing.assert_allclose(compiled(x).gather(), expected)


@few
def test_a_sum_takes_the_memory_of_what_nothing_else_needs(watched):
    """The argument, an operand that is needed later, and a small one keep their own."""

    def body(x):
        product = x * 2
        return psum(psum(product, "i") * x, "i"), psum(x, "i"), product, psum((x * 3)[:2], "i")

    f = mapped(body, out_specs=(P(), P(), P("i"), P()))
    x = np.arange(1000.0 * RANKS)
    saved, compiled, expected = x.copy(), md.jit(f, without=("fuse psums", "overlap communication")), f(x)
    assert "_in_place" in lowered(compiled, x)[0]
    for _ in range(3):
        assert_trees_close(md.tree.map(whole, compiled(x)), md.tree.map(whole, expected))
        np.testing.assert_array_equal(x, saved)
    watched[1].clear()
    compiled(x)
    assert sum(args[0] is MPI.IN_PLACE for name, args in watched[1] if name in REDUCING) == 1


@few
def test_messages_of_one_kind_that_are_on_their_way_at_once():
    """The second one is sent by requests of its own."""

    def body(x):
        one, other = ppermute(x, "i", ring()), ppermute(x + 1, "i", ring())
        return one * np.cos(x) - other, ppermute(one, "i", ring())

    f = mapped(body, out_specs=(P("i"), P("i")))
    x = np.arange(3.0 * RANKS)
    compiled, expected = md.jit(f), f(x)
    assert lowered(compiled, x)[0].count("ppermute_start") >= 2
    for _ in range(3):
        assert_trees_close(md.tree.map(whole, compiled(x)), md.tree.map(whole, expected))


@few
def test_a_long_loop_is_part_of_the_program():
    """One that scans no array: its steps then run without an interpreter."""
    steps = lambda x: md.scan(lambda c, _: (c + ppermute(c, "i", ring()) / 2, None), x, None, length=20)[0]  # noqa: E731
    f = mapped(lambda x: np.sin(steps(x)))
    x = np.arange(3.0 * RANKS)
    assert "scan(" in lowered(md.jit(f), x)[0]
    for g in (f, md.grad(lambda x: f(x).sum())):
        np.testing.assert_allclose(whole(md.jit(g)(x)), whole(g(x)))


REDUCTIONS = {"psum": np.add, "pprod": np.multiply, "pmax": np.maximum, "pmin": np.minimum}


@pytest.mark.parallel([2, 3, 4])
@each("jit", [False, True])
@each("name", REDUCTIONS)
def test_short_reductions(name, jit):
    """On 2 or 4 ranks they are messages. All ranks get the same bits, whichever order MPI would take."""
    rng, comm = np.random.default_rng(0), line().ranks.along(("i",))
    before, in_messages = comm.begun, RANKS.bit_count() == 1
    f = mapped(lambda x: getattr(collectives, name)(x[0], "i"), out_specs=P())
    f = md.jit(f) if jit else f
    for dtype in ("float16", "float32", "float64", "complex128", "int8", "bool"):
        if dtype == "complex128" and name in ("pmax", "pmin"):
            continue
        for shape in ((), (2, 0), (5, 4)):
            x = rng.normal(size=(RANKS, *shape)).astype(dtype)
            if dtype == "float64" and x.size:
                x.reshape(RANKS, -1)[:2, 0] = 0.0, -0.0
                x.reshape(RANKS, -1)[-1, -1] = np.nan
            result = f(x)
            wide = x.astype(int) if dtype == "bool" and name in ("psum", "pprod") else x
            expected = REDUCTIONS[name].reduce(wide.astype("float32") if dtype == "float16" else wide, dtype=None)
            np.testing.assert_allclose(result, expected.astype(result.dtype), rtol=1e-3 if dtype == "float16" else 1e-6)
            the_same_on_all(np.asarray(result).tobytes())
    assert comm.begun > before
    assert any(kind[0] == "all_reduce" for kind, *_ in comm.persistent) == in_messages


@few
def test_requests_of_started_permutations_are_used_again():
    mesh = spmd.make_mesh((RANKS,), ("i",), comm=MPI.COMM_WORLD.Dup())
    ring = [(k, (k + 1) % RANKS) for k in range(RANKS)]
    f = spmd.shard_map(lambda x: ppermute_start(x, "i", ring).wait(), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x = np.arange(float(RANKS))
    for _ in range(4):
        np.testing.assert_array_equal(f(x).gather(), np.roll(x, 1))
    assert {len(sets) for sets in mesh.ranks.along(("i",)).persistent.values()} == {1}


@few
def test_meshes_of_one_shape_share_communicators_if_their_axes_have_the_same_names():
    meshes = [spmd.make_mesh((RANKS,), (name,), comm=MPI.COMM_WORLD) for name in ("same", "same", "other")]
    one, two, other = (mesh.ranks.along(mesh.axis_names) for mesh in meshes)
    assert one is two is not other


@few
def test_a_short_sum_that_overflows_is_over_after_it():
    f = mapped(lambda x: psum(x[0], "i"), out_specs=P())
    large = np.where(np.arange(RANKS) < 2, 3e38, 5).astype("f4")
    for x in (np.ones(RANKS, "f4"), large, np.ones(RANKS, "f4")):
        with np.errstate(over="raise"), pytest.raises(FloatingPointError) if x is large else contextlib.nullcontext():
            assert f(x) == RANKS


@few
def test_few_persistent_requests_are_kept(monkeypatch):
    """They are made anew when they are needed again."""
    monkeypatch.setattr(short_messages, "MAX_POOLS", 2)
    mesh = spmd.make_mesh((RANKS,), ("i",), comm=MPI.COMM_WORLD.Dup())
    ring = [(k, (k + 1) % RANKS) for k in range(RANKS)]
    f = md.jit(spmd.shard_map(lambda x: ppermute(x, "i", ring), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    for n in (1, 2, 3, 1, 2, 3):
        x = np.arange(float(n * RANKS)) ** 2
        np.testing.assert_array_equal(f(x).gather(), np.roll(x, n))
        assert len(mesh.ranks.along(("i",)).persistent) <= 2
