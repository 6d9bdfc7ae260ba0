"""Small training programs whose values have each of the four states, for this project and for JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core.states import INVARIANT, REDUCED, UNREDUCED, VARYING

from .state_names import Names

C = numpy.sin(numpy.arange(16.0)).reshape(4, 4) + 2
X = numpy.cos(numpy.arange(64.0)).reshape(16, 4) + 3
W = numpy.sin(numpy.arange(16.0)).reshape(4, 4) / 2
WS = numpy.stack([numpy.eye(4) / 2, W, W.T])
XS = numpy.cos(numpy.arange(160.0)).reshape(5, 8, 4)


def layers(m: Names, ws: Any, x: Any) -> Any:
    """A network whose layers are a scan: tanh(x @ w) for each w."""
    return m.scan(lambda x, w: (m.np.tanh(x @ w), None), x, ws)[0]


def squares(m: Names, ws: Any, x: Any) -> Any:
    return m.np.sum(layers(m, ws, x) ** 2)


def on_batch(m: Names, body: Callable, *arrays: Any, out: Any = None) -> tuple:
    """A program whose first array is whole on each rank, the others split along their first dimension."""
    specs = m.P(), *[m.P("i")] * (len(arrays) - 1)
    return m.shard_map(body, specs, m.P() if out is None else out), specs, arrays


def on_microbatches(m: Names, body: Callable, w: Any, out: Any = None) -> tuple:
    """A program of weights and microbatches, whose second dimension is split."""
    specs = m.P(), m.P(None, "i")
    return m.shard_map(body, specs, m.P() if out is None else out), specs, (w, XS)


def differentiated(m: Names, program: tuple) -> tuple:
    f, specs, arrays = program
    return gradient_of(m, f), specs, arrays


def parts_of_zero(m: Names, shape: Any) -> Any:
    return m.pcast(m.pcast(m.np.zeros(shape), VARYING), UNREDUCED)


def pulled(m: Names, f: Callable, w: Any) -> Any:
    """The gradient of a value that varies."""
    return m.vjp(f, w)[1](m.pcast(m.np.ones(()), VARYING))[0]


def sharded_batch(m: Names, reduce_first: bool) -> tuple:
    """Data parallelism: the gradient of a loss summed over a split batch, with plain or reduced weights."""

    def loss(w, x):
        w = m.see("w", m.pcast(w, REDUCED) if reduce_first else w)
        return m.psum(m.see("loss", m.np.sum((x @ w) ** 2)))

    return differentiated(m, on_batch(m, loss, W, X))


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

    return differentiated(m, on_batch(m, loss, W, X, X + 1))


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
                g = pulled(m, lambda w: m.np.sum(squares(m, w, x)), local)
            return total + m.see("gradient", g), None

        zeros = parts_of_zero(m, ws.shape) if state == REDUCED else m.np.zeros(ws.shape)
        total, _ = m.scan(microbatch, zeros, xs)
        m.see("total", total)
        if scatter:
            part = m.collectives.psum_scatter(total, "i", scatter_dimension=1, tiled=True)
            return m.see("part", part)
        return ws - 0.01 * (m.psum(total) if state == REDUCED else total)

    return on_microbatches(m, step, WS, out=m.P(None, "i") if scatter else None)


def one_layer(m: Names) -> tuple:
    """The same, of one layer."""

    def step(w, xs):
        local = m.pcast(w, REDUCED)

        def microbatch(total, x):
            g = m.grad(lambda w: m.np.sum(m.np.tanh(x @ w)))(local)
            return m.see("total", total + m.see("gradient", g)), None

        zeros = parts_of_zero(m, w.shape)
        return w - 0.01 * m.psum(m.scan(microbatch, zeros, xs)[0])

    return on_microbatches(m, step, W)


def one_layer_outside(m: Names) -> tuple:
    """The gradient of the loss that one layer has over microbatches, in a scan."""

    def total(w, xs):
        local = m.pcast(w, REDUCED)
        zero = m.pcast(m.np.sum(0.0 * xs), UNREDUCED)
        step = lambda t, x: (t + m.pcast(m.np.sum(m.np.tanh(x @ local)), UNREDUCED), None)  # noqa: E731
        return m.psum(m.scan(step, zero, xs)[0])

    return differentiated(m, on_microbatches(m, total, W))


def microbatches_outside(m: Names) -> tuple:
    """Reduced weights come in and unreduced gradients leave; the sum is taken outside, by a reshard."""

    def gradients(ws, xs):
        def microbatch(total, x):
            return total + pulled(m, lambda w: squares(m, w, x), ws), None

        zeros = parts_of_zero(m, ws.shape)
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
        zero = parts_of_zero(m, ())
        return m.psum(m.scan(lambda t, x: (t + m.pcast(squares(m, ws, x), UNREDUCED), None), zero, xs)[0])

    return differentiated(m, on_microbatches(m, total, WS))


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
        g = m.see("gradient", pulled(m, lambda w: m.np.sum(m.np.tanh(x @ w)), local))
        part = m.see("part", m.collectives.psum_scatter(g, "i", tiled=True))
        return m.see("step", m.collectives.all_gather(part * 0.1, "i", tiled=True, to=REDUCED))

    return on_batch(m, step, W, X, out=m.P(None, None, reduced={"i"}))


def tied(m: Names, places: int) -> tuple:
    """Tied weights, used by both layers, are cast to reduced in front of none, each, or both of them."""

    def loss(w, x):
        cast = lambda w: m.pcast(w, REDUCED)  # noqa: E731
        first, second = {0: (w, w), 1: (cast(w), cast(w)), 2: [cast(w)] * 2, 3: (cast(w), w)}[places]
        return m.psum(m.np.sum(m.np.tanh(m.np.tanh(x @ first) @ second.T)))

    return differentiated(m, on_batch(m, loss, W, X))


def nested(m: Names, state: str) -> tuple:
    """The gradient of the norm of a gradient, outside of the body."""

    def loss(w, x):
        local = m.pcast(w, REDUCED) if state == REDUCED else w
        return m.psum(m.np.sum(m.np.tanh(x @ local)))

    f, specs, arrays = on_batch(m, loss, W, X)
    return gradient_of(m, lambda w, x: m.np.sum(m.grad(f)(w, x) ** 2)), specs, arrays


def nested_inside(m: Names) -> tuple:
    """The same, of a gradient that is taken inside of the body, and is unreduced until its psum."""

    def norm(w, x):
        def gradient(w):
            local = m.pcast(w, REDUCED)
            return m.psum(m.see("gradient", pulled(m, lambda w: m.np.sum(m.np.tanh(x @ w)), local)))

        return m.grad(lambda w: m.np.sum(gradient(w) ** 2))(w)

    return on_batch(m, norm, W, X)


def gradient_of_parts(m: Names) -> tuple:
    """`grad` of a loss that is unreduced: ranks hold parts of it, and of the gradient."""

    def step(w, x):
        local = m.pcast(w, REDUCED)
        g = m.grad(lambda w: m.see("loss", m.pcast(m.np.sum(m.np.tanh(x @ w)), UNREDUCED)))(local)
        return m.psum(m.see("gradient", g))

    return on_batch(m, step, W, X)


def gradient_of_varying(m: Names) -> tuple:
    """`grad` of a loss that varies, in weights that are reduced."""

    def step(w, x):
        g = m.grad(lambda w: m.np.sum(m.np.tanh(x @ w)))(m.pcast(w, REDUCED))
        return m.psum(m.see("gradient", g))

    return on_batch(m, step, W, X)


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
