"""Compare the four states along a mesh axis with JAX's: `python -m tests.benchmarks.jax_states [--differences]`.

Every operation is applied to operands in each of the four states, and differentiated in the body; every example is a
small training program. Where JAX is installed, the same source runs on both: it is written over the names of `Names`.
Compared are the types of the values, whether the program is accepted, how often it reduces and gathers (a JAX program
by its trace, ours operation by operation and as `jit` compiles it), and its results.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.core.states import INVARIANT, REDUCED, UNREDUCED, VARYING, AxisStates

RANKS = 4
SHORT = {INVARIANT: "I", VARYING: "V", UNREDUCED: "U", REDUCED: "R"}
#: Our collectives and JAX's, by what they send.
KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "unreduced_psum": "all-reduce",
    "pmax": "all-reduce",
    "psum_scatter": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "ppermute": "ppermute",
    "all_to_all": "all-to-all",
}
Counts = Counter  # of the kinds of collectives


@dataclasses.dataclass
class Names:
    """The names that programs are written over: this project's, or JAX's."""

    np: Any
    collectives: Any  # psum, psum_scatter, all_gather, pcast, ...
    scan: Callable
    vjp: Callable
    grad: Callable
    P: Callable
    shard_map: Callable  # (f, in_specs, out_specs)
    put: Callable  # (array, spec) -> the array, with this sharding
    reshard: Callable  # (array, spec)
    states: Callable[[Any], AxisStates]
    counts: Callable[..., list[Counts]]  # of a function and its arguments
    run: Callable[..., Any]

    def __post_init__(self):
        self.seen: dict[str, str] = {}

    def see(self, label: str, x: Any) -> Any:
        """Note the type of an intermediate value."""
        self.seen.setdefault(label, str(self.states(x)))
        return x

    def pcast(self, x: Any, to: str) -> Any:
        return self.collectives.pcast(x, "i", to=to)

    def psum(self, x: Any) -> Any:
        return self.collectives.psum(x, "i")


def our_names() -> Names:
    mesh = spmd.make_mesh((RANKS,), ("i",), backend="simulated")

    def counts(f, *args):
        reports = spmd.communication(f)(*args), spmd.communication(f, optimized=True)(*args)
        return [_by_kind(report.counts) for report in reports]

    def states(x):
        t = md.typeof(x)
        return t.sharding[1].states if t.sharding else t.states

    return Names(
        np=np,
        collectives=collectives,
        scan=md.scan,
        vjp=md.vjp,
        grad=md.grad,
        P=spmd.P,
        shard_map=lambda f, i, o: spmd.shard_map(f, mesh=mesh, in_specs=i, out_specs=o),
        put=lambda x, spec: spmd.distribute(x, mesh, spec),
        reshard=lambda x, spec: spmd.distribute(x, mesh, spec),
        states=states,
        counts=counts,
        run=lambda f, *args: f(*args),
    )


def jax_names() -> Names:
    import jax
    from jax import lax
    from jax.sharding import NamedSharding

    mesh = jax.make_mesh((RANKS,), ("i",))  # whose axis is explicit
    jax.set_mesh(mesh)

    def states(x):
        t = jax.typeof(x)
        outside = t.sharding.spec if t.sharding.mesh.are_all_axes_explicit else jax.P()
        sharded = {a for entry in outside.partitions for a in (entry if isinstance(entry, tuple) else (entry,)) if a}
        return AxisStates.of(
            t.mat.varying | sharded, t.mat.unreduced | outside.unreduced, t.mat.reduced | outside.reduced
        )

    return Names(
        np=jax.numpy,
        collectives=lax,
        scan=lax.scan,
        vjp=jax.vjp,
        grad=jax.grad,
        P=jax.P,
        shard_map=lambda f, i, o: jax.shard_map(f, mesh=mesh, in_specs=i, out_specs=o),
        put=lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
        reshard=jax.reshard,
        states=states,
        counts=lambda f, *args: _in_trace(jax.make_jaxpr(f)(*args).jaxpr),
        run=lambda f, *args: jax.jit(f)(*args),
    )


def _by_kind(counts: dict[str, int]) -> Counts:
    actual: Counts = Counts()
    for name, count in counts.items():
        actual[KINDS.get(name, name)] += count
    return actual


def _in_trace(jaxpr: Any) -> list[Counts]:
    """The collectives of a jaxpr, and those of it without dead code."""
    from jax._src.interpreters.partial_eval import dce_jaxpr

    return [_in_jaxpr(j) for j in (jaxpr, dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])]


def _in_jaxpr(jaxpr: Any) -> Counts:
    """The collectives of a jaxpr and of those within it; in a loop as often as it runs."""
    actual: Counts = Counts()
    for eqn in jaxpr.eqns:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for x in value if isinstance(value, (tuple, list)) else [value]:
                if hasattr(getattr(x, "jaxpr", x), "eqns"):
                    inner = _in_jaxpr(getattr(x, "jaxpr", x))
                    actual.update({kind: times * count for kind, count in inner.items()})
        if eqn.primitive.name in KINDS:
            actual[KINDS[eqn.primitive.name]] += 1
        if eqn.primitive.name == "reshard":
            (before,), (after,) = ([v.aval.sharding.spec for v in vs] for vs in (eqn.invars, eqn.outvars))
            if before.unreduced - after.unreduced:
                split = any(after.partitions[d] for d in range(len(after.partitions)))
                actual["reduce-scatter" if split else "all-reduce"] += 1
            elif any(before.partitions) and not any(after.partitions):
                actual["all-gather"] += 1
    return actual


# ---------------------------------------------------------------- one operation, in each state of its operands


def _stacked(m: Names, x: Any, y: Any) -> Any:
    return m.np.concatenate([x, y])


UNARY: dict[str, Callable] = {
    "pcast varying": lambda m, x: m.pcast(x, "varying"),
    "pcast reduced": lambda m, x: m.pcast(x, "reduced"),
    "pcast unreduced": lambda m, x: m.pcast(x, "unreduced"),
    "psum": lambda m, x: m.psum(x),
    "psum_scatter": lambda m, x: m.collectives.psum_scatter(x, "i", tiled=True),
    "all_gather": lambda m, x: m.collectives.all_gather(x, "i", tiled=True),
    "all_gather reduced": lambda m, x: m.collectives.all_gather(x, "i", tiled=True, to="reduced"),
    "ppermute": lambda m, x: m.collectives.ppermute(x, "i", [(0, 1), (1, 0)]),
    "all_to_all": lambda m, x: m.collectives.all_to_all(x, "i", 0, 0, tiled=True),
    "pmax": lambda m, x: m.collectives.pmax(x, "i"),
    "negative": lambda m, x: -x,
    "tanh": lambda m, x: m.np.tanh(x),
    "x ** 2": lambda m, x: x**2,
    "x * x": lambda m, x: x * x,
    "x - x": lambda m, x: x - x,
    "2 * x": lambda m, x: 2.0 * x,
    "x / 2": lambda m, x: x / 2.0,
    "2 / x": lambda m, x: 2.0 / x,
    "x + 1": lambda m, x: x + 1.0,
    "x + 0": lambda m, x: x + 0.0,
    "x * array": lambda m, x: x * numpy.full((4, 4), 2.0),
    "sum": lambda m, x: m.np.sum(x),
    "mean": lambda m, x: m.np.mean(x, axis=0),
    "max": lambda m, x: m.np.max(x),
    "cumsum": lambda m, x: m.np.cumsum(x, axis=0),
    "reshape": lambda m, x: x.reshape(2, 8),
    "transpose": lambda m, x: x.T,
    "slice": lambda m, x: x[1:3],
    "broadcast_to": lambda m, x: m.np.broadcast_to(x, (2, 4, 4)),
    "flip": lambda m, x: m.np.flip(x, 0),
    "astype": lambda m, x: x.astype("float32"),
    "split": lambda m, x: m.np.split(x, 2)[1],
    "pad": lambda m, x: m.np.pad(x, 1),
    "where x or 0": lambda m, x: m.np.where(numpy.eye(4, dtype=bool), x, 0.0),
}
BINARY: dict[str, Callable] = {
    "add": lambda m, x, y: x + y,
    "subtract": lambda m, x, y: x - y,
    "multiply": lambda m, x, y: x * y,
    "divide": lambda m, x, y: x / y,
    "matmul": lambda m, x, y: x @ y,
    "maximum": lambda m, x, y: m.np.maximum(x, y),
    "concatenate": _stacked,
    "where": lambda m, x, y: m.np.where(numpy.eye(4, dtype=bool), x, y),
    "scalar multiply": lambda m, x, y: x * y[0, 0],
}

#: What the operands are made of: `c` is the same on all ranks, `x` varies.
OPERAND = {
    INVARIANT: lambda m, c, x: c,
    VARYING: lambda m, c, x: x,
    UNREDUCED: lambda m, c, x: m.pcast(x, UNREDUCED),
    REDUCED: lambda m, c, x: m.pcast(c, REDUCED),
}


def state_of(m: Names, x: Any) -> str:
    return m.states(x).along("i")


def cotangent_like(m: Names, y: Any) -> Any:
    """A cotangent of `y`, in the state that it has to have."""
    ones = m.np.ones(y.shape, y.dtype)
    state = {UNREDUCED: REDUCED, REDUCED: UNREDUCED}.get(state_of(m, y), state_of(m, y))
    if state == INVARIANT:
        return ones
    ones = m.pcast(ones, REDUCED if state == REDUCED else VARYING)
    return m.pcast(ones, UNREDUCED) if state == UNREDUCED else ones


def result(m: Names, y: Any) -> Any:
    """A value of any state as a result that varies."""
    state = state_of(m, y)
    y = m.psum(y) if state == UNREDUCED else y
    y = m.pcast(y, VARYING) if state != VARYING else y
    return y.reshape(1, -1)


def operation(name: str, op: Callable, states: Sequence[str], gradient: bool) -> Callable:
    """A program that applies `op` to operands in these states, and pulls a cotangent back."""

    def program(m: Names):
        def body(c, x):
            operands = [OPERAND[state](m, c + k, x - k) for k, state in enumerate(states)]
            if not gradient:
                return [result(m, m.see("result", op(m, *operands)))]
            y, pull = m.vjp(lambda *xs: op(m, *xs), *operands)
            gradients = pull(cotangent_like(m, y))
            return [result(m, m.see(f"ct {k}", g)) for k, g in enumerate(gradients)]

        one = m.P("i")
        outs = len(states) if gradient else 1
        return m.shard_map(body, (m.P(), one), [one] * outs), (m.P(), one), (C, X)

    return program


C = numpy.sin(numpy.arange(16.0)).reshape(4, 4) + 2
X = numpy.cos(numpy.arange(64.0)).reshape(16, 4) + 3


def operations() -> Iterator[tuple[str, Callable]]:
    table = [(name, op, 1) for name, op in UNARY.items()] + [(name, op, 2) for name, op in BINARY.items()]
    for name, op, arity in table:
        for states in itertools.product(OPERAND, repeat=arity):
            for gradient in (False, True):
                title = f"{'grad ' if gradient else ''}{name}({', '.join(SHORT[s] for s in states)})"
                yield title, operation(name, op, states, gradient)
    for inputs, named in itertools.product(OPERAND, repeat=2):
        if named != UNREDUCED:  # of which JAX makes no NumPy array
            yield f"{SHORT[inputs]} returned as {SHORT[named]}", returned(inputs, named, False)
        yield f"grad {SHORT[inputs]} returned as {SHORT[named]}", returned(inputs, named, True)


def returned(inputs: str, named: str, gradient: bool) -> Callable:
    """A program whose body returns a value in one state, where `out_specs` names another."""

    def program(m: Names):
        specs = {
            INVARIANT: m.P(None, None),
            VARYING: m.P("i", None),
            UNREDUCED: m.P(None, None, unreduced={"i"}),
            REDUCED: m.P(None, None, reduced={"i"}),
        }
        inner = (m.P(None, None), m.P("i", None))
        f = m.shard_map(lambda c, x: OPERAND[inputs](m, c, x), inner, specs[named])

        def whole(c, x):
            y = m.see("result", f(c, x))
            return m.np.sum((m.reshard(y, m.P(None, None)) if named in (VARYING, UNREDUCED) else y) ** 2)

        return gradient_of(m, whole) if gradient else f, inner, (C, X)

    return program


# ---------------------------------------------------------------- examples


def layers(m: Names, ws: Any, x: Any) -> Any:
    """A network whose layers are a scan: tanh(x @ w) for each w."""
    return m.scan(lambda x, w: (m.np.tanh(x @ w), None), x, ws)[0]


def squares(m: Names, ws: Any, x: Any) -> Any:
    return m.np.sum(layers(m, ws, x) ** 2)


def sharded_batch(m: Names, reduce_first: bool) -> tuple:
    """Data parallelism: the gradient of a loss summed over a split batch, with plain or reduced weights."""

    def loss(w, x):
        w = m.see("w", m.pcast(w, REDUCED) if reduce_first else w)
        return m.psum(m.see("loss", m.np.sum((x @ w) ** 2)))

    f = m.shard_map(loss, (m.P(), m.P("i")), m.P())
    return gradient_of(m, f), (m.P(), m.P("i")), (W, X)


def gradient_of(m: Names, f: Callable) -> Callable:
    """The value and the gradient in the first argument, outside of a shard_map."""

    def both(*args):
        value, pull = m.vjp(lambda w: f(w, *args[1:]), args[0])
        (ct,) = pull(value * 0.0 + 1.0)
        return value, m.see("gradient", ct)

    return both


def two_uses(m: Names, state: str) -> tuple:
    """The weights are used twice: their cotangents are added, and summed over ranks once."""

    def loss(w, x, z):
        w = m.pcast(w, state) if state != INVARIANT else w
        return m.psum(m.np.sum(m.np.tanh(x @ w)) + m.np.sum(m.np.cos(z @ w)))

    f = m.shard_map(loss, (m.P(), m.P("i"), m.P("i")), m.P())
    return gradient_of(m, f), (m.P(), m.P("i"), m.P("i")), (W, X, X + 1)


def partial_matmul(m: Names, add: bool) -> tuple:
    """A matmul whose contracted dimension is split gives parts of a sum; two are added before the sum is taken."""

    def body(a, b):
        c = m.see("parts", m.pcast(m.see("local", a @ b), UNREDUCED))
        return m.see("sum of parts", c + m.pcast((2.0 * a) @ b, UNREDUCED)) if add else c

    f = m.shard_map(body, (m.P(None, "i"), m.P("i")), m.P(None, None, unreduced={"i"}))
    whole = lambda a, b: m.reshard(m.see("outside", f(a, b)), m.P())  # noqa: E731
    return whole, (m.P(None, "i"), m.P("i")), (X.T, X)


def partial_matmul_gradient(m: Names) -> tuple:
    forward, specs, args = partial_matmul(m, add=False)
    return gradient_of(m, lambda a, b: m.np.sum(forward(a, b) ** 2)), specs, args


def low_rank(m: Names) -> tuple:
    """x @ W + (x @ A) @ B with split features, where one all-reduce takes both sums."""

    def body(x, w, a, b):
        first = m.pcast(x @ w, UNREDUCED)
        second = m.see("x @ A", m.pcast(x @ a, UNREDUCED)) @ m.see("B", m.pcast(b, REDUCED))
        return m.psum(m.see("sum", first + second))

    specs = (m.P(None, "i"), m.P("i"), m.P("i"), m.P())
    f = m.shard_map(body, specs, m.P())
    return f, specs, (X.T, X, X[:, :2], C[:2])


def low_rank_local(m: Names) -> tuple:
    """The same, as JAX accepts it: B multiplies each rank's part before it is called a part."""

    def body(x, w, a, b):
        return m.psum(m.pcast(x @ w, UNREDUCED) + m.pcast((x @ a) @ m.pcast(b, REDUCED), UNREDUCED))

    specs = (m.P(None, "i"), m.P("i"), m.P("i"), m.P())
    f = m.shard_map(body, specs, m.P())

    def both(b, x, w, a):
        return gradient_of(m, lambda b: m.np.sum(f(x, w, a, b) ** 2))(b)

    return both, (m.P(), m.P(None, "i"), m.P("i"), m.P("i")), (C[:2], X.T, X, X[:, :2])


def microbatches(m: Names, state: str, scatter: bool = False) -> tuple:
    """Gradients of layers in a scan, added up in a scan over microbatches, then summed over ranks once."""

    def step(ws, xs):
        local = m.pcast(ws, state) if state != INVARIANT else ws

        def microbatch(total, x):
            if state == INVARIANT:
                g = m.grad(lambda w: m.psum(squares(m, w, x)))(local)
            else:
                g = m.vjp(lambda w: m.np.sum(squares(m, w, x)), local)[1](m.pcast(m.np.ones(()), VARYING))[0]
            return total + m.see("gradient", g), None

        zeros = m.np.zeros(ws.shape)
        if state == REDUCED:
            zeros = m.pcast(m.pcast(zeros, VARYING), UNREDUCED)
        total, _ = m.scan(microbatch, zeros, xs)
        m.see("total", total)
        if scatter:
            part = m.collectives.psum_scatter(total, "i", scatter_dimension=1, tiled=True)
            return m.see("part", part)
        return ws - 0.01 * (m.psum(total) if state == REDUCED else total)

    f = m.shard_map(step, (m.P(), m.P(None, "i")), m.P(None, "i") if scatter else m.P())
    return f, (m.P(), m.P(None, "i")), (WS, XS)


def one_layer(m: Names) -> tuple:
    """The same, of one layer."""

    def step(w, xs):
        local = m.pcast(w, REDUCED)

        def microbatch(total, x):
            g = m.grad(lambda w: m.np.sum(m.np.tanh(x @ w)))(local)
            return m.see("total", total + m.see("gradient", g)), None

        zeros = m.pcast(m.pcast(m.np.zeros(w.shape), VARYING), UNREDUCED)
        return w - 0.01 * m.psum(m.scan(microbatch, zeros, xs)[0])

    f = m.shard_map(step, (m.P(), m.P(None, "i")), m.P())
    return f, (m.P(), m.P(None, "i")), (W, XS)


def one_layer_outside(m: Names) -> tuple:
    """The gradient of the loss that one layer has over microbatches, in a scan."""

    def total(w, xs):
        local = m.pcast(w, REDUCED)
        zero = m.pcast(m.np.sum(0.0 * xs), UNREDUCED)
        step = lambda t, x: (t + m.pcast(m.np.sum(m.np.tanh(x @ local)), UNREDUCED), None)  # noqa: E731
        return m.psum(m.scan(step, zero, xs)[0])

    f = m.shard_map(total, (m.P(), m.P(None, "i")), m.P())
    return gradient_of(m, f), (m.P(), m.P(None, "i")), (W, XS)


def microbatches_outside(m: Names) -> tuple:
    """Reduced weights come in and unreduced gradients leave; the sum is taken outside, by a reshard."""

    def gradients(ws, xs):
        def microbatch(total, x):
            _, pull = m.vjp(lambda w: squares(m, w, x), ws)
            return total + pull(m.pcast(m.np.ones(()), VARYING))[0], None

        zeros = m.pcast(m.pcast(m.np.zeros(ws.shape), VARYING), UNREDUCED)
        return m.scan(microbatch, zeros, xs)[0]

    specs = (m.P(reduced={"i"}), m.P(None, "i"))
    f = m.shard_map(gradients, specs, m.P(None, None, None, unreduced={"i"}))

    def step(ws, xs):
        gs = m.see("gradients", f(m.see("weights", m.reshard(ws, m.P(None, None, None, reduced={"i"}))), xs))
        return ws - 0.01 * m.reshard(gs, m.P())

    return step, (m.P(), m.P(None, "i")), (WS, XS)


def scanned_loss(m: Names) -> tuple:
    """The gradient outside of a loss that is added up over microbatches in a scan."""

    def total(ws, xs):
        ws = m.pcast(ws, REDUCED)
        zero = m.pcast(m.pcast(m.np.zeros(()), VARYING), UNREDUCED)
        return m.psum(m.scan(lambda t, x: (t + m.pcast(squares(m, ws, x), UNREDUCED), None), zero, xs)[0])

    f = m.shard_map(total, (m.P(), m.P(None, "i")), m.P())
    return gradient_of(m, f), (m.P(), m.P(None, "i")), (WS, XS)


def reduced_in(m: Names) -> tuple:
    """A layer that takes reduced weights: their gradient is unreduced, and nothing is sent for it."""
    f = m.shard_map(lambda w, x: m.np.tanh(x @ w), (m.P(None, None, reduced={"i"}), m.P("i")), m.P("i"))

    def both(w, x):
        y, pull = m.vjp(lambda w: f(w, x), w)
        (g,) = pull(2.0 * y)
        return m.reshard(m.see("gradient", g), m.P()), m.see("y", y)

    return both, (m.P(None, None, reduced={"i"}), m.P("i")), (W, X)


def reduced_outside(m: Names, back: bool) -> tuple:
    """A reduced array outside of any body: the gradient of its own sum, or of its values made invariant again."""

    def loss(w):
        return m.np.sum(m.np.tanh(m.reshard(w, m.P(None, None)) if back else w))

    def gradient(w):
        return m.reshard(m.see("gradient", m.grad(loss)(w)), m.P(None, None))

    return gradient, (m.P(None, None, reduced={"i"}),), (W,)


def gathered_weights(m: Names, to: str) -> tuple:
    """Split weights are gathered for the forward pass; their gradient is reduced and scattered (ZeRO-3)."""

    def loss(w, x):
        w = m.see("w", m.collectives.all_gather(w, "i", tiled=True, to=to))
        return m.psum(m.np.sum(m.np.tanh(x @ w)))

    f = m.shard_map(loss, (m.P("i"), m.P("i")), m.P())
    return gradient_of(m, f), (m.P("i"), m.P("i")), (W, X)


def zero_2(m: Names) -> tuple:
    """A gradient is reduced and scattered, the update is local, the new weights are gathered."""

    def step(w, x):
        local = m.pcast(w, REDUCED)
        pull = m.vjp(lambda w: m.np.sum(m.np.tanh(x @ w)), local)[1]
        g = m.see("gradient", pull(m.pcast(m.np.ones(()), VARYING))[0])
        part = m.see("part", m.collectives.psum_scatter(g, "i", tiled=True))
        return m.see("step", m.collectives.all_gather(part * 0.1, "i", tiled=True, to=REDUCED))

    f = m.shard_map(step, (m.P(), m.P("i")), m.P(None, None, reduced={"i"}))
    return f, (m.P(), m.P("i")), (W, X)


def tied(m: Names, places: int) -> tuple:
    """Tied weights, used by both layers, are cast to reduced in front of none, each, or both of them."""

    def loss(w, x):
        cast = lambda w: m.pcast(w, REDUCED)  # noqa: E731
        first, second = {0: (w, w), 1: (cast(w), cast(w)), 2: [cast(w)] * 2, 3: (cast(w), w)}[places]
        return m.psum(m.np.sum(m.np.tanh(m.np.tanh(x @ first) @ second.T)))

    f = m.shard_map(loss, (m.P(), m.P("i")), m.P())
    return gradient_of(m, f), (m.P(), m.P("i")), (W, X)


def nested(m: Names, state: str) -> tuple:
    """The gradient of the norm of a gradient, outside of the body."""

    def loss(w, x):
        local = m.pcast(w, REDUCED) if state == REDUCED else w
        return m.psum(m.np.sum(m.np.tanh(x @ local)))

    f = m.shard_map(loss, (m.P(), m.P("i")), m.P())
    return gradient_of(m, lambda w, x: m.np.sum(m.grad(f)(w, x) ** 2)), (m.P(), m.P("i")), (W, X)


def nested_inside(m: Names) -> tuple:
    """The same, of a gradient that is taken inside of the body, and is unreduced until its psum."""

    def norm(w, x):
        def gradient(w):
            local = m.pcast(w, REDUCED)
            pull = m.vjp(lambda w: m.np.sum(m.np.tanh(x @ w)), local)[1]
            return m.psum(m.see("gradient", pull(m.pcast(m.np.ones(()), VARYING))[0]))

        return m.grad(lambda w: m.np.sum(gradient(w) ** 2))(w)

    f = m.shard_map(norm, (m.P(), m.P("i")), m.P())
    return f, (m.P(), m.P("i")), (W, X)


def gradient_of_parts(m: Names) -> tuple:
    """`grad` of a loss that is unreduced: ranks hold parts of it, and of the gradient."""

    def step(w, x):
        local = m.pcast(w, REDUCED)
        g = m.grad(lambda w: m.see("loss", m.pcast(m.np.sum(m.np.tanh(x @ w)), UNREDUCED)))(local)
        return m.psum(m.see("gradient", g))

    f = m.shard_map(step, (m.P(), m.P("i")), m.P())
    return f, (m.P(), m.P("i")), (W, X)


def gradient_of_varying(m: Names) -> tuple:
    """`grad` of a loss that varies, in weights that are reduced."""

    def step(w, x):
        g = m.grad(lambda w: m.np.sum(m.np.tanh(x @ w)))(m.pcast(w, REDUCED))
        return m.psum(m.see("gradient", g))

    f = m.shard_map(step, (m.P(), m.P("i")), m.P())
    return f, (m.P(), m.P("i")), (W, X)


W = numpy.sin(numpy.arange(16.0)).reshape(4, 4) / 2
WS = numpy.stack([numpy.eye(4) / 2, W, W.T])
XS = numpy.cos(numpy.arange(160.0)).reshape(5, 8, 4)

EXAMPLES: dict[str, Callable[[Names], tuple]] = {
    "a split batch, plain weights": lambda m: sharded_batch(m, False),
    "a split batch, reduced weights": lambda m: sharded_batch(m, True),
    "weights used twice, plain": lambda m: two_uses(m, INVARIANT),
    "weights used twice, pcast varying": lambda m: two_uses(m, VARYING),
    "weights used twice, reduced": lambda m: two_uses(m, REDUCED),
    "a matmul's parts, summed outside": lambda m: partial_matmul(m, False),
    "two matmuls' parts, summed outside": lambda m: partial_matmul(m, True),
    "a matmul's parts, differentiated": partial_matmul_gradient,
    "LoRA, unreduced @ reduced": low_rank,
    "LoRA, local products, grad in B": low_rank_local,
    "microbatches, plain weights": lambda m: microbatches(m, INVARIANT),
    "microbatches, reduced weights": lambda m: microbatches(m, REDUCED),
    "microbatches, one layer, reduced": one_layer,
    "microbatches, one layer, grad": one_layer_outside,
    "microbatches, reduced, scattered": lambda m: microbatches(m, REDUCED, scatter=True),
    "microbatches, summed outside": microbatches_outside,
    "microbatches, grad of the scan": scanned_loss,
    "a layer of reduced weights": reduced_in,
    "a reduced array's sum, outside": lambda m: reduced_outside(m, False),
    "a reduced array, resharded to P()": lambda m: reduced_outside(m, True),
    "ZeRO-3, all_gather": lambda m: gathered_weights(m, VARYING),
    "ZeRO-3, all_gather to reduced": lambda m: gathered_weights(m, REDUCED),
    "ZeRO-2": zero_2,
    "tied weights, no cast": lambda m: tied(m, 0),
    "tied weights, a cast at each use": lambda m: tied(m, 1),
    "tied weights, one cast": lambda m: tied(m, 2),
    "tied weights, a cast at one use": lambda m: tied(m, 3),
    "a gradient's gradient, plain": lambda m: nested(m, INVARIANT),
    "a gradient's gradient, reduced": lambda m: nested(m, REDUCED),
    "a gradient's gradient, inside": nested_inside,
    "grad of an unreduced loss": gradient_of_parts,
    "grad of a varying loss": gradient_of_varying,
}


# ---------------------------------------------------------------- in JAX's explicit mode


def _explicit_two_uses(m: Names, state: str) -> tuple:
    def loss(w, x, z):
        w = m.reshard(w, m.P(None, None, reduced={"i"})) if state == REDUCED else w
        return m.np.sum(m.np.tanh(x @ w)) + m.np.sum(m.np.cos(z @ w))

    return gradient_of(m, loss), (m.P(None, None), m.P("i", None), m.P("i", None)), (W, X, X + 1)


def _explicit_step(m: Names, state: str) -> tuple:
    spec = m.P(None, None, None, reduced={"i"}) if state == REDUCED else m.P()

    def step(ws, xs):
        def microbatch(total, x):
            return total + m.see("gradient", m.grad(lambda ws: squares(m, ws, x))(ws)), None

        zeros = m.np.zeros(ws.shape)
        zeros = m.reshard(zeros, m.P(None, None, None, unreduced={"i"})) if state == REDUCED else zeros
        total, _ = m.scan(microbatch, zeros, xs)
        return m.reshard(ws, m.P()) - 0.01 * m.reshard(total, m.P())

    return step, (spec, m.P(None, "i", None)), (WS, XS)


#: JAX's programs without a shard_map, each beside the example that it is compared with.
EXPLICIT: dict[str, Callable[[Names], tuple]] = {
    "weights used twice, plain": lambda m: _explicit_two_uses(m, INVARIANT),
    "weights used twice, reduced": lambda m: _explicit_two_uses(m, REDUCED),
    "microbatches, plain weights": lambda m: _explicit_step(m, INVARIANT),
    "microbatches, reduced weights": lambda m: _explicit_step(m, REDUCED),
}


def explicit(ours: Names, theirs: Names) -> Iterator[str]:
    """The all-reduces of what XLA compiles, by the operation that they come from; and ours, compiled."""
    import jax

    for name, program in EXPLICIT.items():
        theirs.seen.clear()
        f, specs, arrays = program(theirs)
        args = [theirs.put(x, spec) for x, spec in zip(arrays, specs)]
        text = jax.jit(f).lower(*args).compile().as_text()
        lines = [line for line in text.splitlines() if re.search(r"all-reduce(-start)?\(", line)]
        places = [re.sub(r"^jit\(\w+\)/", "", re.search(r'op_name="([^"]*)"', line).group(1)) for line in lines]
        values = jax.tree.leaves(jax.jit(f)(*args))
        local_value = outcome(ours, EXAMPLES[name])
        equal = all(map(numpy.allclose, local_value.values, values))
        yield f"{name}: values {'agree' if equal else 'DIFFER'}"
        yield f"    ours  {local_value.shown()}\n    XLA   {len(lines)}: {places}"


# ---------------------------------------------------------------- the report


@dataclasses.dataclass
class Outcome:
    """The outcome of a program: its values' types, its collectives and its results, or why it was rejected."""

    types: dict[str, str] = dataclasses.field(default_factory=dict)
    counts: list[Counts] = dataclasses.field(default_factory=list)
    values: list[numpy.ndarray] = dataclasses.field(default_factory=list)
    error: str = ""

    def shown(self) -> str:
        if self.error:
            return f"rejected: {self.error}"
        counts = [", ".join(f"{n} {kind}" for kind, n in sorted(c.items())) or "-" for c in self.counts]
        types = " ".join(f"{label}:{t}" for label, t in self.types.items())
        return f"{types} | {' / '.join(dict.fromkeys(counts))}"


def outcome(m: Names, program: Callable) -> Outcome:
    m.seen.clear()
    try:
        f, specs, arrays = program(m)
        args = [m.put(x, spec) for x, spec in zip(arrays, specs)]
        counts = m.counts(f, *args)
        values = m.run(f, *args)
        flat = values if isinstance(values, (list, tuple)) else [values]
        return Outcome(dict(m.seen), counts, [numpy.asarray(x) for x in flat])
    except Exception as error:  # whatever it is: it is reported
        return Outcome(error=f"{type(error).__name__}: {str(error).splitlines()[0][:110]}")


def differences(ours: Outcome, theirs: Outcome) -> list[str]:
    if ours.error or theirs.error:
        if ours.error and theirs.error:
            return []
        return ["ours rejects" if ours.error else "JAX rejects"]
    actual = [f"types of {k}" for k in ours.types if ours.types[k] != theirs.types.get(k)]
    for how, local_value, other in zip(("by operation", "compiled"), ours.counts, theirs.counts):
        if local_value != other:
            actual.append(f"{'ours' if local_value <= other else 'JAX'} sends less, {how}")
    close = len(ours.values) == len(theirs.values) and all(map(numpy.allclose, ours.values, theirs.values))
    return actual if close else [*actual, "VALUES"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--differences", action="store_true", help="print only where JAX differs")
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={RANKS}")
    os.environ.setdefault("JAX_ENABLE_X64", "1")
    ours, theirs = our_names(), None
    try:
        theirs = jax_names()
    except ImportError:
        print("JAX is not installed: only this project's column")
    actual: dict[str, list[str]] = {}
    compared = 0
    for name, program in [*operations(), *EXAMPLES.items()]:
        if options.only not in name:
            continue
        local_value, other = outcome(ours, program), outcome(theirs, program) if theirs else None
        different = differences(local_value, other) if other else []
        compared += 1
        for subject in different:
            actual.setdefault(subject, []).append(name)
        if different or not options.differences:
            print(
                f"{name}\n    ours  {local_value.shown()}", *([f"    JAX   {other.shown()}"] if other else []), sep="\n"
            )
            if different:
                print(f"    differs: {', '.join(different)}")
    if theirs:
        print("\nBeside JAX's explicit mode", *explicit(ours, theirs), sep="\n")
    print(f"\n{compared} programs; {sum(map(len, actual.values()))} differences")
    for subject, names in actual.items():
        print(f"\n{subject} ({len(names)}):", textwrap.fill("; ".join(names), 118), sep="\n")


if __name__ == "__main__":
    main()
