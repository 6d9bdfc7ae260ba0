"""A transformation's memory is free when it ends, without waiting for the garbage collector."""

import contextlib
import gc
import linecache
import tracemalloc
import weakref

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.core import reverse
from minidiff.core.reverse import transpose_values
from minidiff.ops.base import Linear
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.samples import each
from tests.programs.stacks import BASES, LAYERS


def failing(x, c):
    with contextlib.suppress(ValueError):
        md.grad(lambda x: (x @ c[:2]).sum())(x)


STACKS = {name: layer(BASES["matrix"]) for name, (layer, _) in LAYERS.items()}
#: Functions of two arrays that end, by an error or not.
PROGRAMS = {
    **STACKS,
    **{f"grad of {k}": md.grad(lambda x, c, f=f: f(x, c).sum()) for k, f in STACKS.items() if k != "while_loop"},
    "an error": failing,
    "a tape's text": lambda x, c: str(md.make_tape(md.grad(lambda x: BASES["matrix"](x, c).sum()))(x)),
}


@each("program", PROGRAMS.values(), PROGRAMS)
def test_arguments_are_let_go(program):
    x, c = np.array([0.3, -0.5, 0.8]), np.array([0.7, 0.4, -0.2])
    held = [weakref.ref(x), weakref.ref(c)]
    gc.disable()
    try:
        program(x, c)
        del x, c
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_functions_that_are_dropped_leave_nothing():
    """Programs, their sources, keys, locations and constants go with the function that they were compiled from."""
    x = np.linspace(1.0, 2.0, 4)

    def once():
        w = np.ones(4)
        f = lambda x: np.sum(np.sin(x) * w)  # noqa: E731
        g = lambda x: psum(x * w[0], "i")  # noqa: E731
        md.jit(f)(x), md.jit(md.grad(f))(x), md.grad(md.jit(f))(x), md.make_tape(f)(x)
        md.vmap(md.jit(g), axis_name="i")(x)
        md.jit(spmd.shard_map(g, mesh=mesh(4), in_specs=P("i"), out_specs=P()))(x)

    def left():
        gc.collect()
        return len(gc.get_objects()) + len(linecache.cache)

    for _ in range(3):
        once()
    before = left()
    for _ in range(12):
        once()
    assert left() - before < 12  # not one of a round


@each("plain", [(), ("backward_pass",), ("linearize_flat", "backward_pass")])
def test_the_backward_sweep_lets_go_of_the_tape(plain, monkeypatch):
    """When the first operation is transposed, what later ones needed is gone already, also by the core's functions."""
    for name in plain:
        monkeypatch.setattr(reverse.engine, name, getattr(reverse, name))
    residual = []
    results = []

    def look(ct, operands):
        results.append(residual[0]())
        return [ct]

    probe = Linear("probe", np.copy, lambda x: (x.shape, x.dtype), look, None)

    def f(x):
        y = np.exp(probe.bind(x))  # the result is what its derivative needs
        residual.append(weakref.ref(y.primal))
        return np.sum(y)

    np.testing.assert_array_equal(md.grad(f)(np.zeros(3)), np.ones(3))
    assert results == [None]


def test_a_value_that_no_derivative_reads_is_not_kept():
    operand = []

    def f(x):
        y = x + 1.0
        operand.append(weakref.ref(y.primal))
        return np.exp(y)  # its derivative reads the result alone

    _, pull_back = md.vjp(f, np.ones(3))
    assert operand[0]() is None
    np.testing.assert_array_equal(pull_back(np.ones(3))[0], np.exp([2.0, 2.0, 2.0]))


def test_what_a_transpose_computes_first_is_free_after_its_last_use():
    seen = []

    def run(x):
        seen.append((weakref.ref(x), [ref() is None for ref, _ in seen]))
        return x.copy()

    probe = Linear("probe", run, lambda x: (x.shape, x.dtype), lambda ct, x: [ct], None)
    tape = md.make_tape(lambda c, x: x * probe.bind(np.exp(probe.bind(np.exp(c)))))(np.ones(3), np.ones(3))
    (ct,) = transpose_values(tape, [False, True], [np.zeros(3), None], [np.ones(3)])
    assert [gone for _, gone in seen] == [[], [True]]
    np.testing.assert_allclose(ct, np.exp(np.exp(np.zeros(3))))


def test_simulated_ranks_add_up_at_once():
    """Compiled, and each by itself: what all ranks have is held for one at a time."""
    layers, side = 8, 100
    weights, x = [np.ones((side, side)) / side] * layers, np.ones((4, side))

    def loss(weights, x):
        for w in weights:
            x = np.tanh(x @ w)
        return psum(np.sum(x), "i")

    f = spmd.shard_map(loss, mesh=mesh(4), in_specs=(P(), P("i")), out_specs=P())
    gradient = md.jit(md.grad(f), bucket_bytes=1)
    gradient(weights, x)
    mesh(4).reset_calls()
    tracemalloc.start()
    try:
        gradients = gradient(weights, x)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mesh(4).calls["psum"] == layers
    # The gradients themselves; of two layers those of each rank; and some more.
    assert held < (layers + 2 * mesh(4).size + 1) * weights[0].nbytes < layers * mesh(4).size * weights[0].nbytes
    np.testing.assert_allclose(gradients[-1], md.grad(f)(weights, x)[-1])
