"""Loops of small steps, compiled here, without kernels, and by JAX if it is installed: microseconds a step, and ratios.

    python -m tests.benchmarks.steps
    python -m tests.benchmarks.steps --rounds 25 --only pendulum --steps 1000

A row's results agree before its times are taken. Each library takes its turn in each round; a ratio is the median over
rounds, with its quartiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy

from . import measure
from .libraries import Library, minidiff, of_jax

# ---------------------------------------------------------------- steps


def pendulum(np, y, h=0.01):
    """A step of the classical Runge-Kutta method for a double pendulum of equal masses and lengths."""

    def slope(y):
        t1, w1, t2, w2 = y[0], y[1], y[2], y[3]
        d, gravity = t1 - t2, 9.81
        below = 3.0 - np.cos(2 * d)
        pull = w2 * w2 + w1 * w1 * np.cos(d)
        first = (-3 * gravity * np.sin(t1) - gravity * np.sin(t1 - 2 * t2) - 2 * np.sin(d) * pull) / below
        swing = 2 * w1 * w1 + 2 * gravity * np.cos(t1) + w2 * w2 * np.cos(d)
        return np.stack([w1, first, w2, 2 * np.sin(d) * swing / below])

    k1 = slope(y)
    k2 = slope(y + h / 2 * k1)
    k3 = slope(y + h / 2 * k2)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(y + h * k3))


def trajectory(np, scan, y, xs):
    return scan(lambda y, _: (pendulum(np, y), y), y, xs)


def adaptive(np, scan, y, xs):
    """An embedded pair of orders 2 and 3 for the oscillator of van der Pol: a step is rejected by `where`."""
    slope = lambda y: np.stack([y[1], 5.0 * (1 - y[0] * y[0]) * y[1] - y[0]])  # noqa: E731

    def step(carry, _):
        t, y, h = carry
        k1 = slope(y)
        k2 = slope(y + h * 0.5 * k1)
        k3 = slope(y + h * 0.75 * k2)
        new = y + h / 9 * (2 * k1 + 3 * k2 + 4 * k3)
        error = h * (-5 / 72 * k1 + 1 / 12 * k2 + 1 / 9 * k3 - 0.125 * slope(new))
        scaled = error / (1e-6 + 1e-4 * np.maximum(np.abs(y), np.abs(new)))
        size = np.sqrt(np.mean(scaled * scaled))
        factor = np.clip(0.9 * (size + 1e-10) ** (-1 / 3), 0.2, 5.0)
        t, y = np.where(size <= 1.0, t + h, t), np.where(size <= 1.0, new, y)
        return (t, y, h * factor), t

    return scan(step, (numpy.float64(0.0), y[:2] + 1.0, numpy.float64(0.01)), xs)


def kalman(np, scan, y, xs):
    """A filter of four states and two measurements, and its likelihood."""
    move = numpy.eye(4) + 0.1 * numpy.diag([1.0, 0.0, 1.0], 1)
    see = numpy.eye(4)[::2]

    def step(carry, z):
        x, cov = carry
        x, cov = move @ x, move @ cov @ move.T + 0.01 * numpy.eye(4)
        s = see @ cov @ see.T + 0.1 * numpy.eye(2)
        det = s[0, 0] * s[1, 1] - s[0, 1] * s[1, 0]
        inverse = np.stack([np.stack([s[1, 1], -s[0, 1]]), np.stack([-s[1, 0], s[0, 0]])]) / det
        gain, r = cov @ see.T @ inverse, z - see @ x
        return (x + gain @ r, cov - gain @ see @ cov), np.log(det) + r @ inverse @ r

    return scan(step, (y, numpy.eye(4)), np.stack([np.sin(xs), np.cos(xs)], axis=1))


def lstm(np, scan, y, xs, n=8):
    """A cell of eight hidden units."""
    w, u = (numpy.random.default_rng(0).normal(size=(2, n, 4 * n)) / n)[:]
    squash = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731

    def step(carry, x):
        h, c = carry
        z = x @ w + h @ u
        c = squash(z[n : 2 * n]) * c + squash(z[:n]) * np.tanh(z[3 * n :])
        h = squash(z[2 * n : 3 * n]) * np.tanh(c)
        return (h, c), h

    zero = numpy.zeros(n)
    return scan(step, (zero + y[0], zero), np.sin(xs[:, None] * numpy.arange(1.0, n + 1)))


LOOPS: dict[str, Callable] = {"pendulum": trajectory, "adaptive": adaptive, "kalman": kalman, "lstm": lstm}


# ---------------------------------------------------------------- libraries


def libraries() -> dict[str, Library]:
    """minidiff, the same without kernels, and JAX if it is installed."""
    known = {"minidiff": minidiff(), "no kernels": minidiff(kernels=False)}
    jax = of_jax()
    return known if jax is None else {**known, "JAX": jax}


def programs(name: str, lib: Library) -> dict[str, Callable]:
    """A loop and the gradient of the sum of squares of its results, compiled; of a pendulum one step, too."""
    loop = lambda y, xs: LOOPS[name](lib.np, lib.scan, y, xs)  # noqa: E731
    rows = {"loop": lib.jit(loop), "gradient": lib.jit(lib.grad(lambda y, xs: lib.np.sum(loop(y, xs)[1] ** 2)))}
    return rows if name != "pendulum" else {**rows, "step": lib.jit(lambda y, xs: pendulum(lib.np, y))}


def rows(only: Sequence[str], steps: int) -> Iterator[tuple[str, dict[str, Callable], int]]:
    y, xs = numpy.array([1.0, 0.0, 2.0, 0.5]), numpy.linspace(0.0, 1.0, steps)
    known = libraries()
    for name in measure.chosen(LOOPS, only):
        compiled = {library: programs(name, lib) for library, lib in known.items()}
        for kind in compiled["minidiff"]:
            runs = {library: lambda f=kinds[kind]: f(y, xs) for library, kinds in compiled.items()}
            measure.check(name, runs, rtol=1e-4, atol=1e-6)  # a gradient multiplies roundings
            yield f"{name}, a step, {kind}", runs, 1 if kind == "step" else steps


def main(argv: Sequence[str] | None = None) -> None:
    options = measure.options(__doc__, argv, only=(), steps=1000, rounds=9, seconds=0.02, json="")
    measure.compared(rows(options.only, options.steps), options)


if __name__ == "__main__":
    main()
