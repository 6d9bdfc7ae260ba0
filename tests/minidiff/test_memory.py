"""A transformation's memory is free when it ends, without waiting for the garbage collector."""

import contextlib
import gc
import linecache
import tracemalloc
import weakref

import minidiff as md
import minidiff.numpy as np
from collectives import psum
from minidiff.core import reverse
from minidiff.ops.base import Linear
from spmd import P
from tests.checks.meshes import mapped, mesh
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
        md.jit(mapped(g, mesh(4), P("i"), P()))(x)

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

    md.grad(f)(np.zeros(3))
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


def test_simulated_ranks_add_up_at_once():
    """Compiled, and each by itself: what all ranks have is held for one at a time."""
    weights, x = [np.ones((100, 100)) / 100] * 8, np.ones((4, 100))

    def loss(weights, x):
        for w in weights:
            x = np.tanh(x @ w)
        return psum(np.sum(x), "i")

    gradient = md.jit(md.grad(mapped(loss, mesh(4), (P(), P("i")), P())), bucket_bytes=1)
    gradient(weights, x)
    tracemalloc.start()
    try:
        gradients = gradient(weights, x)
        held = tracemalloc.get_traced_memory()[1] / weights[0].nbytes
    finally:
        tracemalloc.stop()
    assert held < len(gradients) + 2 * 4 + 1 < len(gradients) * 4  # of two layers those of each rank; and some more
