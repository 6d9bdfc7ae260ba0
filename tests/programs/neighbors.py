"""Programs whose slices no mesh divides: compiled, ranks exchange edges, or sum, instead of gathering arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.whole import whole

ROWS, COLUMNS = 48, 3
_rng = numpy.random.default_rng(0)
X, V, W = _rng.normal(size=(ROWS, COLUMNS)), 2 + _rng.random(ROWS), _rng.normal(size=(COLUMNS, COLUMNS))
LABELS = numpy.arange(ROWS) % COLUMNS
ONE_SUM, ONE_EDGE, TWO_EDGES = {"psum": 1}, {"ppermute": 1}, {"ppermute": 2}
GATHER = {"all_gather_invariant": 1}


class Program(NamedTuple):
    """A function, its arguments, and the collectives that the compiled one runs on ranks, forward and backward."""

    f: Callable
    args: tuple
    forward: dict | None
    backward: dict | None = None


def heat(x: Any) -> Any:
    return np.at(x)[1:-1].add(0.1 * (x[2:] - 2 * x[1:-1] + x[:-2]))


def jacobi(x: Any) -> Any:
    return np.at(x)[1:-1].set(0.5 * (x[2:] + x[:-2]))


def laplace(x: Any) -> Any:
    """In two dimensions, of which the second is whole."""
    neighbors = x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2]
    return np.at(x)[1:-1, 1:-1].set(neighbors / 4)


def steps(x: Any) -> Any:
    return md.fori_loop(0, 3, lambda k, x: heat(x), x)


def squares(x: Any) -> Any:
    return np.sum((x[1:] - x[:-1]) ** 2)


def predicted(w: Any, x: Any) -> Any:
    """The loss of predicting each row from the one before it."""
    return np.mean((x[1:] - np.tanh(x[:-1] @ w)) ** 2)


def next_label(w: Any, x: Any) -> Any:
    logp = md.nn.log_softmax(x[:-1] @ w)
    return -np.mean(np.sum(logp * md.nn.one_hot(LABELS[1:], COLUMNS), 1))


def slopes(v: Any) -> Any:
    """Divide by differences: outside of the array they would be 0."""
    return np.sum(1 / (v[1:] - v[:-1]))


def of_columns(x: Any) -> Any:
    return md.scan(lambda total, u: (total + squares(u), None), 0.0, x.T)[0]


def with_all(x: Any) -> Any:
    """An array that is also needed whole is gathered, and its edges are not sent besides."""
    return squares(x) + np.sum(np.sort(x, axis=0)[1:])


PROGRAMS = {
    "squares of differences": Program(squares, (X,), ONE_EDGE | ONE_SUM, TWO_EDGES),
    "second differences": Program(
        lambda x: np.sum((x[2:] - 2 * x[1:-1] + x[:-2]) ** 2), (X,), TWO_EDGES | ONE_SUM, {"ppermute": 4}
    ),
    "heat": Program(heat, (X,), TWO_EDGES),
    "jacobi": Program(jacobi, (X,), TWO_EDGES),
    "laplace": Program(laplace, (X,), TWO_EDGES),
    "a loop of steps": Program(steps, (X,), {"ppermute": 6}),
    "a loop over columns": Program(of_columns, (X,), {"ppermute": 3, "psum": 3}),
    "trapezoid": Program(lambda v: np.trapezoid(v, np.arange(ROWS) ** 2.0), (V,), ONE_EDGE | ONE_SUM),
    "autocorrelation": Program(lambda v: v[1:] @ v[:-1], (V,), ONE_EDGE | ONE_SUM, TWO_EDGES),
    "slopes": Program(slopes, (V,), ONE_EDGE | ONE_SUM, TWO_EDGES),
    "prediction": Program(predicted, (W, X), ONE_EDGE | ONE_SUM),
    "next label": Program(next_label, (W, X), ONE_SUM, ONE_SUM),
    "padded differences": Program(lambda x: x + np.pad(np.diff(x, axis=0), ((1, 0), (0, 0))), (X,), ONE_EDGE, None),
    "half precision": Program(lambda x: squares(x), (X.astype(numpy.float16),), GATHER),
    "needed whole": Program(with_all, (_rng.normal(size=(ROWS, 5)),), GATHER),
    "a wide halo": Program(lambda x: np.sum((x[-1:] - x[:1]) ** 2), (X,), {"broadcast": 2}),
    "longer than the blocks": Program(lambda x: np.sum(np.pad(x, ((2, 3), (0, 0))) ** 2), (X[:, :1],), GATHER),
    "blocks of another length": Program(lambda x: x[:36] * np.exp(x[1:])[3:39], (X,), None),
    "ends with a whole array": Program(lambda x: np.pad(np.diff(x, axis=0), ((1, 0), (0, 0))), (X,), GATHER),
}


def check(program: Program, mesh: spmd.Mesh) -> None:
    """Compare a compiled program on split rows with that on whole arrays, and count what it sends; so its gradient."""
    args = [spmd.distribute(x, mesh, P(mesh.axis_names[-1])) if len(x) == ROWS else x for x in program.args]
    argnum = len(args) - 1
    gradient = md.grad(lambda *args: np.sum(program.f(*args)), argnum if program.f is not next_label else 0)
    cases = [(program.f, program.forward), (gradient, program.backward)]
    for f, counts in cases if args[argnum].dtype == float else cases[:1]:
        expected, compiled = f(*program.args), md.jit(f)
        actual = compiled(*args)
        rtol = 1e-2 if args[argnum].dtype == numpy.float16 else 1e-9
        numpy.testing.assert_allclose(whole(actual), expected, rtol=rtol, atol=1e-12)
        mesh.reset_calls()
        compiled(*args)
        report = spmd.communication(compiled)(*args)
        assert {name: n for name, n in mesh.calls.items() if n} == report.counts
        assert sum(mesh.bytes.values()) == report.bytes
        if counts is not None:
            assert report.counts == counts, report
