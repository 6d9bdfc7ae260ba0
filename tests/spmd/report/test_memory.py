"""The memory report beside what is measured; `memory.md` shows it by hand, `tests/mpi/test_memory_mpi.py` on ranks."""

import tracemalloc

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pmean
from spmd import P
from spmd.examples import wave
from tests.checks.meshes import mapped, mesh
from tests.programs.memory import peak_of, reported_and_measured

MESH = mesh(4)


def dynamic(use):
    return max(moment.dynamic for moment in use.moments)


def on_ranks(f, **specs):
    return spmd.shard_map(f, mesh=MESH, **{"in_specs": P("i"), "out_specs": P("i"), **specs})


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


LARGE = spmd.distribute(np.ones(80_000), MESH, P("i"))


def steps_with_sums(x, n, schedule=None):
    step = lambda u, _: (u + pmean(np.sin(u), "i"), None)  # noqa: E731
    return on_ranks(lambda x: md.scan(step, x, length=n, schedule=schedule)[0])(x)


def test_bodies_hold_no_casts_of_steps_that_are_over():
    peaks = [peak_of(lambda n=n: steps_with_sums(LARGE, n)) for n in (5, 50)]
    assert peaks[1] < 1.3 * peaks[0]
    gradient = md.grad(lambda x: np.sum(steps_with_sums(x, 40, md.revolve(5)) ** 2))
    assert peak_of(gradient, LARGE) < 20 * LARGE.nbytes  # 12 arrays, where 40 steps would hold 60
