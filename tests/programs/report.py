"""Programs over sharded arrays and in bodies, whose reports are held against what the backend counts."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.fuzz.findings import failures, program_of
from tests.fuzz.properties.reports import asked_for, check_reports, check_steps, counts_of

#: Functions of a row v, which `md.vmap` maps over.
OF_A_ROW: dict[str, Callable] = {
    "scan": lambda v: md.scan(lambda c, _: (c + np.sum(v), None), 0.0, length=4)[0],
    "scan over elements": lambda v: md.scan(lambda c, r: (c + r, c * r), 0.0, v)[1],
    "a sharded carry": lambda v: md.scan(lambda c, _: (np.tanh(c) * np.sum(v), c), v, length=3)[1],
    "fori_loop": lambda v: md.fori_loop(0, 3, lambda i, c: np.tanh(c * np.mean(v)), v),
    "a jvp of a loop": lambda v: md.jvp(OF_A_ROW["scan"], (v,), (v,))[1],
    "a gradient of a loop": md.grad(lambda v: np.sin(OF_A_ROW["scan"](v))),
    "checkpoint": md.checkpoint(lambda v: np.sum(v) * v),
    "after a loop": lambda v: np.sum(md.scan(lambda c, _: (c * 2, None), v, length=3)[0]),
}
#: Functions of a matrix x.
OF_A_MATRIX: dict[str, Callable] = {
    "by hand": lambda x: md.scan(lambda c, _: (c + np.sum(x, 1), None), np.zeros(x.shape[0]), length=4)[0],
    "a gradient": md.grad(lambda x: np.sum(md.vmap(OF_A_ROW["scan"])(x) ** 2)),
    "branches split in other ways": lambda x: (
        md.cond(x[0, 0] > 9, lambda x: 0 * x.T, lambda x: np.ones((12, 12)), x) * x
    ),
    "closes over a sharded array": lambda x: md.vmap(
        lambda v: md.scan(lambda c, _: (np.tanh(x @ c), None), v, length=3)[0]
    )(x),
    "a branch in a loop, differentiated": md.grad(
        lambda x: np.sum(
            md.map(lambda r: r * md.cond(np.sum(x) > 9, lambda v: v, lambda v: np.sin(v @ x) * 2, x[0]), x[0])
        )
    ),
    "a loop over columns in a loop": md.vmap(
        lambda v: np.sum(md.map(lambda k: OF_A_ROW["scan over elements"](np.tanh(v)) * k, np.arange(3.0)), 0),
        in_axes=1,
        out_axes=1,
    ),
    "a sharded tangent": lambda x: md.jvp(OF_A_ROW["scan over elements"], (numpy.ones(12),), (x[0],))[1],
}


def _repeated(v: Any) -> Any:
    """Sum blocks in each of three steps; compiled, once."""
    return np.sum(md.map(lambda k: psum(v, "i") * k / 99, np.arange(3.0)), 0)


def _long(f: Callable) -> Callable:
    return lambda v: md.scan(lambda c, k: (np.tanh(f(c) * k), None), v, np.arange(1.0, 13.0))[0]


#: Functions of a block v, with loops over arrays that are too long to be recorded. Compiled, steps send less.
LONG_LOOPS: dict[str, Callable] = {
    "repeated sums": _long(_repeated),
    "repeated sums, a gradient": _long(_repeated),
    "an unused sum": _long(lambda v: md.scan(lambda c, _: (psum(c, "i") * v, c), v, length=3)[1].sum(0)),
    "a branch in a step": _long(lambda v: md.cond(psum(np.sum(v), "i") > 0, _repeated, np.sin, v)),
    "in a branch": lambda v: md.cond(psum(np.sum(v), "i") > 0, _long(_repeated), np.sin, v),
    "beside a short loop": lambda v: _long(np.sin)(v) + _repeated(v),
}
OPTIONS = {"bucket_bytes": {"bucket_bytes": 64}, "without": {"without": ["fuse psums"]}, "kernels": {"kernels": False}}


def sharded(mesh: Any, spec: P) -> Any:
    return spmd.distribute(numpy.linspace(-0.1, 0.2, 144).reshape(12, 12), mesh, spec)


def check_array_program(mesh: Any, name: str) -> None:
    """Check the reports of a program, over rows and over columns that are split."""
    for spec in (P("i"), P(None, "i")):
        f = OF_A_MATRIX.get(name) or md.vmap(OF_A_ROW[name])
        check_reports(mesh, f, (sharded(mesh, spec),), {}, eager=False)


def check_options(mesh: Any, name: str) -> None:
    """Check the reports of a jitted gradient of layers in a body."""

    def body(weights: Any, x: Any) -> Any:
        for w in weights:
            x = np.tanh(x @ w)
        return psum(x.sum(), "i")

    loss = spmd.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    check_reports(mesh, md.grad(loss), ([numpy.ones((4, 4))] * 3, numpy.ones((12, 4))), OPTIONS[name], eager=False)


def check_long_loop(mesh: Any, name: str) -> None:
    """Check the reports of a loop in a body that is too long to be unrolled."""
    f = spmd.shard_map(LONG_LOOPS[name], mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    g = md.grad(lambda x: np.sum(f(x) ** 2)) if "gradient" in name else f
    x = numpy.linspace(0.1, 0.3, 36)
    check_reports(mesh, g, (x,), {}, eager=False)
    check_op_by_op(mesh, lambda x: md.jit(g)(x) * 2, x)  # of branches, the one that sends most is taken


def check_op_by_op(mesh: Any, f: Callable, *args: Any) -> None:
    """Check that reports of a function, which runs op by op, have what it asks the backend for."""
    asked = asked_for(mesh, lambda: f(*args))
    assert asked, "nothing is sent"
    assert counts_of(spmd.communication(f)(*args)) == counts_of(spmd.compare(f, *args).typed) == asked


def check_while_loops(mesh: Any) -> None:
    """Check that a loop of unknown length is counted for a step, alone and for rows."""
    loop = lambda v, k: md.while_loop(lambda s: s[1] < k, lambda s: (s[0] + np.sum(v), s[1] + 1), (v, 0 * k))[0]  # noqa: E731
    x = sharded(mesh, P(None, "i"))
    check_steps(mesh, loop, x)
    check_steps(mesh, lambda x, k: md.vmap(lambda v: loop(v, k))(x), x)


def check_random_programs(seeds: range) -> None:
    for seed in seeds:
        for failure in failures(program_of("reports", f"{seed}"), Counter(), "reports"):
            raise failure.error
