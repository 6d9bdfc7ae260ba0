"""The memory report: peaks computed by hand, and measured; tests/mpi/test_memory_mpi.py measures networks on ranks."""

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
from tests.programs.memory import peak_of, reported_and_measured

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")
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


def test_the_table_names_the_line_of_the_peak():
    def f(x):
        y = np.sin(x)
        y = np.concatenate([y, y])
        return y.sum()

    use = spmd.memory(f)(X)
    place = f"test_memory.py:{f.__code__.co_firstlineno + 2}: y = np.concatenate([y, y])"
    assert str(use).splitlines() == [
        "bytes per rank  at the peak  highest",
        "--------------  -----------  -------",
        "arguments             8,000    8,000",
        "results                   0        8",
        "temporaries          24,000   24,000",
        "--------------  -----------  -------",
        "total                32,000",
        f"the peak: concatenate, forward, {place}",
    ]
    totals = [8 * 1000, 16 * 1000, 32 * 1000, 24 * 1000 + 8]
    assert [moment.total for moment in use.moments] == totals
    assert [f"{total:,}" in row for row, total in zip(str(use.lines).splitlines()[2:], totals)] == [True] * 4
    assert place in str(use.lines) and "concatenate" in use._repr_html_()
    assert str(spmd.memory(md.make_tape(f)(X))) == str(use)


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


def measured(f, *args):
    """The peak of what f allocates."""
    f(*args)
    return peak_of(f, *args)


def layers(ws, x):
    return np.sum(md.scan(lambda x, w: (np.tanh(x @ w), None), x, ws)[0] ** 2)


def unrolled(ws, x, layer=lambda x, w: np.tanh(x @ w)):
    for w in ws:
        x = layer(x, w)
    return np.sum(x**2)


WEIGHTS, INPUTS = [np.eye(256)] * 8, np.ones((512, 256))
PLAIN = {
    "layers": (unrolled, WEIGHTS),
    "checkpointed layers": (lambda ws, x: unrolled(ws, x, md.checkpoint(lambda x, w: np.tanh(x @ w))), WEIGHTS),
    "a scan": (layers, np.stack(WEIGHTS)),
    "a scan of a checkpointed step": (
        lambda ws, x: np.sum(md.scan(md.checkpoint(lambda x, w: (np.tanh(np.sin(x @ w)), None)), x, ws)[0] ** 2),
        np.stack(WEIGHTS),
    ),
}


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_peaks_are_those_measured(name, optimized):
    f, ws = PLAIN[name]
    gradient = md.grad(f)
    expected = dynamic(spmd.memory(gradient, optimized=optimized)(ws, INPUTS))
    actual = measured(md.jit(gradient) if optimized else gradient, ws, INPUTS)
    assert expected == pytest.approx(actual, rel=0.05)


#: Loops with a schedule and without, by form, schedule and number of carries.
LOOPS = ["scan plain 1", "scan plain 3", "scan revolve 1", "scan revolve 2", "scan revolve 3", "scan multistage 1",
         "scan online 3", "while_loop plain 2", "while_loop revolve 1", "while_loop online 1"]  # fmt: skip


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_hold_the_states_of_their_schedules(name, ranks, optimized):
    """Steps of whole arrays, and of the blocks of simulated ranks."""
    reported, actual = reported_and_measured(f"loop {name}", ranks, "simulated", optimized)
    assert reported == pytest.approx(actual, rel=0.05)


def test_a_loop_whose_length_is_not_known_takes_its_largest_number_of_steps():
    """The condition depends on the argument: until it is large, which takes 20 steps."""

    def loss(x):
        return np.sum(md.while_loop(lambda x: np.max(x) < 2.0**19.5, lambda x: x + np.abs(x), x, 20))

    gradient = md.grad(loss)
    assert dynamic(spmd.memory(gradient)(INPUTS)) == pytest.approx(measured(gradient, INPUTS), rel=0.05)


def test_a_call_in_a_body_leaves_nothing_behind():
    f = on_ranks(md.checkpoint(np.sin))
    f(LARGE)
    tracemalloc.start()
    for _ in range(3):
        md.grad(lambda x: np.sum(f(x) ** 2))(LARGE)
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert left < LARGE.nbytes


def test_a_carry_that_a_step_writes_into_is_counted_once():
    f = lambda x: md.scan(lambda c, k: (c.at[k].set(np.sin(c[k - 1])), None), 2 * x, np.arange(30))[0]  # noqa: E731
    expected = dynamic(spmd.memory(f, optimized=True)(INPUTS))
    assert expected == pytest.approx(measured(md.jit(f), INPUTS), rel=0.05)
    assert expected < 6 * INPUTS.nbytes


def test_a_body_that_runs_operation_by_operation_frees_its_values():
    """Ranks compile the steps of this loop alone, since they communicate."""
    mesh = spmd.make_mesh((1, 1), wave.AXES, backend="simulated")
    field = spmd.distribute(np.ones((256, 256)), mesh, wave.FIELD)
    record = spmd.distribute(np.ones((15, 256 // wave.SENSORS, 256)), mesh, P(None, *wave.AXES))
    gradient = md.grad(wave.misfit(mesh, 4))
    expected = dynamic(spmd.memory(gradient, optimized=True)(field, record))
    assert expected == pytest.approx(measured(md.jit(gradient), field, record), rel=0.05)


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


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("name", WIDE)
def test_what_one_operation_allocates_is_counted(name, optimized):
    """Reshaped views that are copied, and what an implementation allocates beside its result."""
    f, x = WIDE[name]
    expected = dynamic(spmd.memory(f, optimized=optimized)(x))
    # Python's objects take some kilobytes; an array, a thousand.
    assert expected == pytest.approx(measured(md.jit(f) if optimized else f, x), rel=0.05, abs=8192)


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


def test_compiled_layers_are_gathered_one_at_a_time():
    """And their gradients are summed before those of the next layer: on real ranks as in the report."""
    params, batch = init_params(np.random.default_rng(0), (128,) * 9), (np.ones((64, 128)),) * 2
    args = spmd.distribute((params, batch), MESH, P("i"))
    eager, compiled = [spmd.memory(md.grad(fully_sharded(MESH)), optimized=flag)(*args) for flag in (False, True)]
    size = sum(x.nbytes for x in md.tree.leaves(params))
    assert dynamic(compiled) < dynamic(eager) and dynamic(compiled) < size / 4 + 4 * size / 8


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
@pytest.mark.parametrize(
    "name",
    ["data_parallel", "tensor_parallel", "zero 3", "grid 2d", "square summa", "matmul all_gather", "dlrm rows",
     "sequence ring_attention", "convolution", "transformer sequence", "scheduled gpipe"],
)  # fmt: skip
def test_a_process_that_simulates_all_ranks_holds_their_blocks(name, optimized):
    """Gathered arrays are there once for all ranks, some are views, and cutting blocks out of arguments may copy."""
    reported, actual = reported_and_measured(name, 2, "simulated", optimized)
    assert reported == pytest.approx(actual, rel=0.05)


def test_branches_of_simulated_ranks():
    """Ranks take different branches: each branch runs on the blocks of all, and what they return is selected."""
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")

    def body(x):
        return md.cond(axis_index("i") == 0, lambda x: np.sin(np.cos(x) * x), lambda x: x, x)

    f = spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x = spmd.distribute(np.ones((2, 100_000)), mesh, P("i"))
    reported = dynamic(spmd.memory(f, every_rank=True)(x))
    assert reported == pytest.approx(measured(f, x), rel=0.05) == 8 * 800_000


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


def test_loops_in_a_checkpoint_are_recorded_as_they_run():
    def loss(ws, x):
        return np.sum(md.checkpoint(lambda ws, x: md.scan(lambda x, w: (np.sin(x @ w), None), x, ws)[0])(ws, x) ** 2)

    gradient, ws = md.grad(loss), np.stack(WEIGHTS)
    reported = dynamic(spmd.memory(gradient)(ws, INPUTS))
    assert reported == pytest.approx(measured(gradient, ws, INPUTS), rel=0.1)


def test_a_compiled_loop_holds_each_stacked_element_once():
    gradient = md.jit(md.grad(lambda ws, x: np.sum(md.scan(lambda x, w: (np.sin(x @ w), None), x, ws)[0] ** 2)))
    ws = np.stack(WEIGHTS)
    saved = 3 * len(ws) * INPUTS.nbytes  # of each step
    taken = measured(gradient, ws, INPUTS)
    assert saved < taken < 1.2 * saved and dynamic(spmd.memory(gradient)(ws, INPUTS)) == pytest.approx(taken, rel=0.05)


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
