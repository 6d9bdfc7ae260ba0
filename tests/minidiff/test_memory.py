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
from tests.checks.samples import each

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")


def plain(w, x):
    return np.sum(np.tanh(x @ w) @ w.T)


def sharded(w, x, f=plain):
    on_blocks = spmd.shard_map(lambda x: psum(f(w, x), "i"), mesh=MESH, in_specs=P("i"), out_specs=P())
    return on_blocks(x)


PROGRAMS = {
    "grad": md.grad(plain),
    "vjp": lambda w, x: md.vjp(plain, w, x)[1](1.0),
    "grad of grad": md.grad(lambda w, x: md.grad(plain)(w, x).sum()),
    "make_tape": lambda w, x: str(md.make_tape(md.grad(plain))(w, x)),
    "shard_map": sharded,
    "grad of shard_map": md.grad(sharded),
    "second derivative of shard_map": md.grad(lambda w, x: md.grad(sharded)(w, x).sum()),
    "vmap of shard_map": lambda w, x: md.vmap(sharded, (None, 0))(w, np.stack([x, x])),
    "make_tape of shard_map": lambda w, x: str(md.make_tape(md.grad(sharded))(w, x)),
    "jacobian": lambda w, x: md.hessian(plain)(w, x),
    "checkpoint": md.grad(lambda w, x: md.checkpoint(lambda x: plain(w, x))(x)),
    "checkpoint in shard_map": md.grad(lambda w, x: sharded(w, x, md.checkpoint(plain))),
    "custom_jvp": md.grad(lambda w, x: with_jvp(w, x)),
    "custom_vjp": md.grad(lambda w, x: with_vjp(w, x)),
    "checkpoint with a policy": md.grad(
        lambda w, x: md.checkpoint(plain, lambda op, *_, **__: str(op) == "tanh")(w, x)
    ),
    "second derivative of checkpoint": md.grad(lambda w, x: md.grad(md.checkpoint(plain))(w, x).sum()),
    "scan": md.grad(lambda w, x: md.scan(lambda s, row: (np.tanh(s @ w) + row, s), x[0], x)[1].sum()),
    "scan on a tape": lambda w, x: str(
        md.make_tape(md.grad(lambda w: md.scan(lambda s, row: (np.tanh(s @ w) + row, s), x[0], x)[1].sum()))(w)
    ),
    "fori_loop": md.grad(lambda w, x: md.fori_loop(0, 3, lambda i, y: np.tanh(y @ w), x).sum()),
    "while_loop": lambda w, x: md.jvp(
        lambda w: md.while_loop(lambda y: y.sum() > 1.0, lambda y: 0.1 * np.tanh(y @ w), x), (w,), (w,)
    ),
    "cond": md.grad(lambda w, x: md.cond(x.sum() > 0, lambda: plain(w, x), lambda: plain(w, -x))),
    "cond on a tape": lambda w, x: str(
        md.make_tape(md.grad(lambda w: md.cond(w.sum() > 0, lambda: plain(w, x), lambda: plain(w, -x))))(w)
    ),
    "jit": lambda w, x: md.jit(plain)(w, x),
    "jit of grad": lambda w, x: md.jit(md.grad(plain))(w, x),
    "grad of jit": md.grad(md.jit(plain)),
    "vmap": lambda w, x: md.vmap(plain, (None, 0))(w, x),
    "jvp": lambda w, x: md.jvp(plain, (w, x), (w, x)),
    "linearize": lambda w, x: md.linearize(plain, w, x)[1](w, x),
    "jacrev": lambda w, x: md.jacrev(lambda w: np.tanh(x @ w))(w),
    "jacfwd": lambda w, x: md.jacfwd(lambda w: np.tanh(x @ w))(w),
    "hvp": lambda w, x: md.hvp(plain, (w, x), (w, x)),
    "custom_jvp, batched": lambda w, x: md.vmap(md.grad(with_jvp), (None, 0))(w, np.stack([x, x])),
    "custom_vjp, batched": lambda w, x: md.vmap(md.grad(with_vjp), (None, 0))(w, np.stack([x, x])),
    "an error": lambda w, x: failing(w, x),
    "named vmap": lambda w, x: md.vmap(md.grad(lambda x: psum(np.sin(x), "v").sum()), axis_name="v")(x),
}


def failing(w, x):
    with contextlib.suppress(ValueError):
        md.grad(lambda w: plain(w, x[:, :2]))(w)


with_jvp = md.custom_jvp(plain)
with_jvp.defjvp(lambda primals, tangents: md.jvp(plain, primals, tangents))
with_vjp = md.custom_vjp(plain)
with_vjp.defvjp(lambda w, x: (plain(w, x), (w, x)), lambda wx, ct: md.vjp(plain, *wx)[1](ct))


@each("name", PROGRAMS)
def test_arguments_are_let_go(name):
    w, x = np.ones((3, 3)), np.ones((8, 3))
    held = [weakref.ref(w), weakref.ref(x)]
    gc.disable()
    try:
        PROGRAMS[name](w, x)
        del w, x
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
        md.jit(spmd.shard_map(g, mesh=MESH, in_specs=P("i"), out_specs=P()))(x)

    def left():
        gc.collect()
        return len(gc.get_objects()) + len(linecache.cache)

    for _ in range(3):
        once()
    before = left()
    for _ in range(50):
        once()
    assert left() - before < 50  # not one of a round


@each("plain", [(), ("backward_pass",), ("linearize_flat", "backward_pass")])
def test_the_backward_sweep_lets_go_of_the_tape(plain, monkeypatch):
    """When the first operation is transposed, what later ones needed is gone already."""
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

    f = spmd.shard_map(loss, mesh=MESH, in_specs=(P(), P("i")), out_specs=P())
    gradient = md.jit(md.grad(f), bucket_bytes=1)
    gradient(weights, x)
    MESH.reset_calls()
    tracemalloc.start()
    try:
        gradients = gradient(weights, x)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert MESH.calls["psum"] == layers
    # The gradients themselves; of two layers those of each rank; and some more.
    assert held < (layers + 2 * MESH.size + 1) * weights[0].nbytes < layers * MESH.size * weights[0].nbytes
    np.testing.assert_allclose(
        gradients[-1], md.grad(lambda w: np.sum(np.tanh(activations(weights, x) @ w)))(weights[-1])
    )


def activations(weights, x):
    for w in weights[:-1]:
        x = np.tanh(x @ w)
    return x
