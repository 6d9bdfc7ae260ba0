"""The memory report: peaks computed by hand, and measured; tests/mpi/test_memory_mpi.py measures networks on ranks."""

import re
import tracemalloc

import matplotlib
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, axis_index, pmean, psum
from minidiff.compiler import kernels
from spmd import P
from spmd.examples import wave
from spmd.parallel import data_parallel, fully_sharded, init_params
from tests.checks.meshes import mapped, mesh
from tests.programs.memory import peak_of, reported_and_measured

MESH = mesh(4)
X = np.ones(1000)  # 8000 bytes
K = 8000


@pytest.fixture
def no_loops(monkeypatch):
    """Compiled programs run NumPy's operations, one by one: a loop keeps fewer results."""
    monkeypatch.setattr(kernels, "MIN_WORK", 1 << 30)


def dynamic(use):
    return max(moment.dynamic for moment in use.moments)


def on_ranks(f, **specs):
    return spmd.shard_map(f, mesh=MESH, **{"in_specs": P("i"), "out_specs": P("i"), **specs})


BLOCKS = spmd.distribute(np.ones(4000), MESH, P("i"))  # blocks of 8000 bytes

#: name -> function, argument, peak of what it allocates: eager, compiled
BY_HAND = {
    "one result": (np.sin, X, K, K),
    "the result of a ufunc in the memory of its operand": (lambda x: np.sin(np.cos(x)) * 2, X, 2 * K, K),
    "an operand that is used again": (lambda x: (c := np.cos(x)) * np.sin(c), X, 3 * K, 2 * K),
    "a result that is not used": (lambda x: (np.sin(x), np.cos(x))[0], X, 2 * K, K),
    "views": (lambda x: x.reshape(10, 100).T[:5].sum(), X, 8, 8),
    "a view holds its memory": (lambda x: np.cos(np.sin(x).reshape(10, 100)[:5]).sum(), X, 1.5 * K, 1.5 * K),
    "a scan holds elements, and what they are stacked into": (
        lambda x: md.scan(lambda c, _: (c, np.sin(x)), 0.0, length=4)[1],
        X,
        2 * 4 * K,
        5 * K,
    ),
    "a scan holds two carries, or writes over one": (
        lambda x: md.fori_loop(0, 9, lambda i, x: np.sin(x), x),
        X,
        2 * K,
        K,
    ),
    "the branch that takes most": (
        lambda x: md.cond(x[0] > 0, lambda: np.sin(x).sum(), lambda: np.concatenate([x, x, x]).sum()),
        X,
        3 * K,
        3 * K,
    ),
    "blocks": (on_ranks(lambda x: np.sin(np.cos(x))), BLOCKS, 2 * K, K),
    "a gathered array": (on_ranks(lambda x: all_gather(x, "i", tiled=True).sum()[None]), BLOCKS, 4 * K + 8, 4 * K + 8),
    "a checkpointed function lets its values go": (
        lambda x: md.checkpoint(lambda x: np.exp(np.cos(np.sin(x))))(x),
        X,
        2 * K,
        K,
    ),
    "residuals": (md.grad(lambda x: np.sum(np.sin(np.sin(x)))), X, 2 * K, 2 * K),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_peaks_by_hand(no_loops, name):
    f, x, *expected = BY_HAND[name]
    assert [dynamic(spmd.memory(f, optimized=flag)(x)) // K for flag in (False, True)] == [n // K for n in expected]


def test_the_table_names_the_line_of_the_peak(golden):
    def f(x):
        y = np.sin(x)
        y = np.concatenate([y, y])
        return y.sum()

    use = spmd.memory(f)(X)
    golden("memory", re.sub(r":\d+:", ":", f"{use}\n\n{use.lines}"))  # without numbers of lines
    assert "concatenate" in use._repr_html_() and str(spmd.memory(md.make_tape(f)(X))) == str(use)


def test_kinds(no_loops):
    """One line each, as `MemoryUse` describes them."""
    c, x, w = np.full(1000, 2.0), spmd.distribute(np.ones((4, 1000)), MESH, P("i")), np.ones(1000)
    loss = on_ranks(lambda w, x: psum(np.sum(np.sin(c * w * x)), "i"), in_specs=(P(), P("i")), out_specs=P())

    def update(w, x):
        value, gradient = md.value_and_grad(loss)(w, x)
        return value, w - 0.1 * gradient

    for optimized in (False, True):
        highest = spmd.memory(update, optimized=optimized)(w, x).highest
        assert highest["arguments"] == 2 * K and highest["constants"] == K  # w, a block of x; c
        assert highest["gradients"] == K and highest["results"] // K == 1  # of w; the new w
        assert highest["residuals"] // K == 1 and highest["temporaries"] >= K  # c * w * x
    parts = on_ranks(lambda x: psum(x, "i") * 2, out_specs=P())
    assert spmd.memory(parts)(BLOCKS).highest["communication"] == K


def layers(ws, x):
    return np.sum(md.scan(lambda x, w: (np.tanh(x @ w), None), x, ws)[0] ** 2)


def unrolled(ws, x, layer=lambda x, w: np.tanh(x @ w)):
    for w in ws:
        x = layer(x, w)
    return np.sum(x**2)


WEIGHTS, INPUTS = [np.eye(256)] * 8, np.ones((512, 256))
ROWS = np.linspace(0.1, 0.9, 200_000).reshape(200, 1000)
WIDE = {
    "tile": (md.grad(lambda x: np.sum(np.tile(x, 20) ** 2)), ROWS[:, :500].copy()),
    "repeat": (md.grad(lambda x: np.sum(np.repeat(x, 20) ** 2)), ROWS[:50].copy()),
    "gelu": (md.nn.gelu, ROWS),
    "softmax": (md.nn.softmax, ROWS),
    "logsumexp": (md.nn.logsumexp, ROWS),
    "std": (np.std, ROWS),
    "cumprod": (md.grad(lambda x: np.sum(np.cumprod(x, axis=1))), ROWS),
}


def of_waves():
    """Ranks compile the steps of this loop alone, since they communicate."""
    grid = spmd.make_mesh((1, 1), wave.AXES, backend="simulated")
    field = spmd.distribute(np.ones((256, 256)), grid, wave.FIELD)
    record = spmd.distribute(np.ones((15, 256 // wave.SENSORS, 256)), grid, P(None, *wave.AXES))
    return md.grad(wave.misfit(grid, 4)), field, record


def of_branches():
    """Each branch runs on the blocks of all ranks, and what they return is selected."""
    body = lambda x: md.cond(axis_index("i") == 0, lambda x: np.sin(np.cos(x) * x), lambda x: x, x)  # noqa: E731
    return mapped(body, mesh(2), P("i"), P("i")), spmd.distribute(np.ones((2, 100_000)), mesh(2), P("i"))


def in_a_checkpoint(ws, x):
    return np.sum(md.checkpoint(lambda ws, x: md.scan(lambda x, w: (np.sin(x @ w), None), x, ws)[0])(ws, x) ** 2)


def until_large(x):
    """The condition depends on the argument, so all 20 steps are counted, and taken."""
    return np.sum(md.while_loop(lambda x: np.max(x) < 2.0**19.5, lambda x: x + np.abs(x), x, 20))


#: Functions and arguments, whether they are compiled, and options; the report's word is what is measured.
MEASURED = {
    **{f"{name}-{compiled}": (*WIDE[name], compiled) for name in WIDE for compiled in (False, True)},
    **{
        f"{name}-{compiled}": (md.grad(f), weights, INPUTS, compiled)
        for name, f, weights in (
            ("layers", unrolled, WEIGHTS),
            ("checkpointed layers", lambda ws, x: unrolled(ws, x, md.checkpoint(lambda x, w: np.tanh(x @ w))), WEIGHTS),
            ("a scan", layers, np.stack(WEIGHTS)),
            (
                "a scan of a checkpointed step",
                lambda ws, x: np.sum(
                    md.scan(md.checkpoint(lambda x, w: (np.tanh(np.sin(x @ w)), None)), x, ws)[0] ** 2
                ),
                np.stack(WEIGHTS),
            ),
        )
        for compiled in (False, True)
    },
    "a loop in a checkpoint": (md.grad(in_a_checkpoint), np.stack(WEIGHTS), INPUTS, False),
    "a loop of unknown length": (md.grad(until_large), INPUTS, False),
    "a carry that steps write into": (
        lambda x: md.scan(lambda c, k: (c.at[k].set(np.sin(c[k - 1])), None), 2 * x, np.arange(30))[0],
        *(INPUTS, True),
    ),
    "a body, operation by operation": (*of_waves(), True),
    "branches of simulated ranks": (*of_branches(), False),
}


@pytest.mark.parametrize("name", MEASURED)
def test_peaks_are_those_measured(name):
    f, *args, compiled = MEASURED[name]
    run = md.jit(f) if compiled else f
    run(*args)
    actual = peak_of(run, *args)
    expected = dynamic(spmd.memory(f, optimized=compiled, every_rank=True)(*args))
    # Python's objects take some kilobytes; an array, a thousand.
    assert expected == pytest.approx(actual, rel=0.1 if "in a checkpoint" in name else 0.05, abs=8192)


#: Programs of simulated ranks, or of none, and whether they are compiled. Gathered arrays are there once for all ranks,
#: some are views, and cutting blocks out of arguments may copy; loops hold the states of their schedules.
IN_THIS_PROCESS = [
    *(("data_parallel", 2, False), ("tensor_parallel", 2, True), ("zero", 2, False), ("zero", 2, True)),
    *(("grid", 2, False), ("square", 2, True), ("matmul", 2, False), ("dlrm", 2, True)),
    *(("sequence", 2, False), ("convolution", 2, True), ("transformer", 2, False)),
    *(("scheduled", 2, True), ("loop scan plain 1", 2, True), ("loop scan plain 3", 0, False)),
    *(("loop scan revolve 1", 0, True), ("loop scan revolve 2", 0, False), ("loop scan revolve 3", 2, False)),
    *(("loop scan revolve 3", 2, True), ("loop scan multistage 1", 0, False), ("loop scan online 3", 0, True)),
    *(("loop while_loop plain 2", 0, True), ("loop while_loop revolve 1", 0, False)),
    *(("loop while_loop online 1", 0, False), ("loop while_loop online 1", 2, True)),
]


@pytest.mark.parametrize("name, ranks, compiled", IN_THIS_PROCESS)
def test_a_process_that_simulates_all_ranks_holds_their_blocks(name, ranks, compiled):
    reported, actual = reported_and_measured(name, ranks, "simulated", compiled)
    assert reported == pytest.approx(actual, rel=0.05)


def test_a_call_in_a_body_leaves_nothing_behind():
    f = on_ranks(md.checkpoint(np.sin))
    f(LARGE)
    tracemalloc.start()
    for _ in range(3):
        md.grad(lambda x: np.sum(f(x) ** 2))(LARGE)
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert left < LARGE.nbytes


def test_what_checkpoint_policies_keep():
    policies = md.checkpoint_policies

    def residuals(policy):
        layer = md.checkpoint(lambda x, w: np.sin(np.sin(x @ w)), policy)
        return spmd.memory(md.grad(lambda ws, x: unrolled(ws, x, layer)))(WEIGHTS, INPUTS).highest["residuals"]

    everything, dots, nothing = map(residuals, [policies.everything_saveable, policies.dots_saveable, None])
    assert nothing == 8 * INPUTS.nbytes < dots == 2 * nothing < everything


def test_what_sharding_saves():
    """Parameters and gradients are whole in data parallelism; fully sharded, a rank has a fourth of them."""
    params, batch = init_params(np.random.default_rng(0), (128,) * 9), (np.ones((64, 128)),) * 2
    inputs = spmd.distribute(batch, MESH, P("i"))
    whole = spmd.memory(md.grad(data_parallel(MESH)))(params, inputs)
    split = spmd.memory(md.grad(fully_sharded(MESH)))(spmd.distribute(params, MESH, P("i")), inputs)
    size, block = sum(x.nbytes for x in md.tree.leaves(params)), sum(x.nbytes for x in batch) // 4
    assert (whole.highest["arguments"], split.highest["arguments"]) == (size + block, size // 4 + block)
    assert (whole.highest["gradients"], split.highest["gradients"]) == (size, size // 4)
    assert split.peak.total < whole.peak.total * 2 / 3
    saved = spmd.memory(md.grad(fully_sharded(MESH, checkpoint=lambda f: f)))(params, batch)  # gathered arrays, too
    assert saved.highest["residuals"] - split.highest["residuals"] == 7 * 128 * 128 * 8
    (note,) = saved.notes
    assert f"{3 * (size + 4 * block) // 4:,} bytes" in note and not (whole.notes or split.notes)


def test_a_branch_that_is_not_known():
    def notes(*branches):
        return spmd.memory(lambda x: md.switch(x[0].astype(int), branches, x))(X).notes

    assert "which branch" in notes(np.sum, lambda x: np.sin(x).sum())[0] and not notes(np.sum, np.mean)


def test_plots():
    matplotlib.use("Agg")
    use = spmd.memory(md.grad(fully_sharded(MESH)))(
        init_params(np.random.default_rng(0), (8, 8)), (np.ones((4, 8)),) * 2
    )
    along = use.plot()
    kinds = {kind for kind, highest in use.highest.items() if highest}
    assert {area.get_label() for area in along.collections} == kinds
    assert along.get_xlim()[1] == len(use.moments) and "operation" in along.get_xlabel()


@pytest.mark.parametrize("optimized", [False, True])
def test_the_branches_of_different_ranks_are_not_added_up(optimized):
    """The first rank holds three blocks; if it took the last rank's branch too, it would hold eight."""

    def body(x):
        def first(x):
            three = np.concatenate([x, x, x])
            more = md.cond(axis_index("i") == 3, lambda x: np.concatenate([x] * 5).sum(), lambda x: x.sum(), x)
            return three.sum() + more + three[0]

        return md.cond(axis_index("i") == 0, first, lambda x: x.sum(), x)[None]

    assert dynamic(spmd.memory(on_ranks(body), optimized=optimized)(BLOCKS)) // K == 3


def test_types_are_enough_for_a_compiled_function():
    f = md.jit(lambda x: np.sin(x) * 2, donate_argnums=0)
    assert str(spmd.memory(f)(md.ShapedArray(X.shape, X.dtype))) == str(spmd.memory(f)(X))


def test_an_operand_of_a_contraction_may_be_a_constant():
    x, w = np.ones((32, 64)), np.ones((64, 8))
    product = lambda x, w: np.einsum("ij,jk->ik", np.sin(x), w)  # noqa: E731
    of_arguments, of_a_constant = spmd.memory(product)(x, w), spmd.memory(lambda x: product(x, w))(x)
    assert of_a_constant.peak.total == of_arguments.peak.total == x.nbytes + w.nbytes + x.nbytes + 32 * 8 * 8


LARGE = spmd.distribute(np.ones(80_000), MESH, P("i"))


def steps_with_sums(x, n, schedule=None):
    step = lambda u, _: (u + pmean(np.sin(u), "i"), None)  # noqa: E731
    return on_ranks(lambda x: md.scan(step, x, length=n, schedule=schedule)[0])(x)


def test_bodies_hold_no_casts_of_steps_that_are_over():
    peaks = [peak_of(lambda n=n: steps_with_sums(LARGE, n)) for n in (5, 50)]
    assert peaks[1] < 1.3 * peaks[0]
    gradient = md.grad(lambda x: np.sum(steps_with_sums(x, 40, md.revolve(5)) ** 2))
    assert peak_of(gradient, LARGE) < 20 * LARGE.nbytes  # 12 arrays, where 40 steps would hold 60
