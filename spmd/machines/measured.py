"""The machine that this runs on, measured."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff.numpy as np
from minidiff import jit, make_tape, nn
from minidiff.compiler import native
from minidiff.ops.costs import ProductSize, work_of_equation
from spmd.machines.machine import Efficiency, Link, Machine
from spmd.mesh.mesh import Mesh
from spmd.report.calibrate import calibrate, maximum, seconds_of
from spmd.report.forecast import CostModel

_LASTING = 0.001  # seconds for which an operation is repeated
_SIZES = (16, 32, 64, 128, 256, 512)  # of matrices that are multiplied
_LENGTHS = tuple(1 << k for k in (12, 15, 17, 19, 22))  # of arrays that are added
_FUNCTIONS: tuple[Callable, ...] = (
    *(np.exp, np.exp2, np.expm1, np.log, np.log1p, np.log2, np.log10, np.sqrt, np.cbrt, np.sin, np.cos, np.tan),
    *(np.sinh, np.cosh, np.tanh, np.arcsin, np.arccos, np.arctan, np.sum, np.max, np.absolute, np.square),
    *(nn.erf, nn.sigmoid, nn.silu, nn.relu, nn.gelu, functools.partial(nn.gelu, approximate=False)),
    *(nn.softmax, nn.log_softmax, nn.logsumexp),
    *(lambda x, f=f: f(x, x) for f in (np.divide, np.power, np.arctan2, np.hypot, np.maximum, np.logaddexp)),
)


def this_machine(mesh: Mesh, *, repeats: int = 20) -> Machine:
    """The machine that this runs on, measured on all ranks of a mesh at the same time.

    Products of matrices of several sizes give the peak and the efficiency, a sum of long arrays the bandwidth of
    memory, shorter ones that of caches and the other operations, one of a few numbers what starting an operation takes:
    each the mean of `repeats` times a millisecond, of the rank that is slowest each time, since ranks wait for each
    other. Functions (exp, tanh, softmax, ...) are compared with a sum. The link is a `spmd.calibrate` of the mesh. All
    ranks must call it, and all get the same machine. A mesh of one rank has a link that is never used.

    >>> import spmd
    >>> machine = this_machine(spmd.make_mesh((2,), ('i',), backend='simulated'), repeats=1)
    >>> machine.name, sorted(machine.flops), machine.links[0].name
    ('this machine', ['float32', 'float64'], 'messages')
    """

    def measure(call: Callable[[], Any]) -> float:
        calls = max(1, int(_LASTING / max(seconds_of(call), 1e-9)))
        maximum(mesh, numpy.zeros(1))  # all ranks begin together
        times = numpy.array([seconds_of(call, calls) for _ in range(repeats)])
        return float(maximum(mesh, times).mean())

    products = []
    for dtype, n in itertools.product(("float32", "float64"), _SIZES):
        a, out = numpy.ones((n, n), dtype), numpy.empty((n, n), dtype)
        products.append(measure(functools.partial(numpy.matmul, a, a, out)))
    singles, doubles = products[: len(_SIZES)], products[len(_SIZES) :]
    pairs = [(numpy.ones(n), numpy.empty(n)) for n in (1, *_LENGTHS)]
    launch, *sums = (measure(functools.partial(numpy.add, x, x, y)) for x, y in pairs)
    elementwise, *_ = rates_of_sums = [n / max(t - launch, 1e-12) for n, t in zip(_LENGTHS, sums)]
    steps = {name: max(elementwise * t, 1.0) for name, t in (_time_function(f, measure) for f in _FUNCTIONS)}
    rates = [[2 * n**3 / t for n, t in zip(_SIZES, times)] for times in (singles, doubles)]
    model = calibrate(mesh, mesh.axis_names, repeats=repeats) if mesh.size > 1 else CostModel(0.0, 0.0)
    return Machine(
        "this machine",
        flops=dict(zip(("float32", "float64"), map(max, rates))),
        elementwise=elementwise,
        bandwidth=24 * rates_of_sums[-1],
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / mesh.size,
        launch=launch,
        links=(Link("messages", math.inf, model, model.source),),
        efficiency=_efficiency(rates[1]),
        caches=tuple((24 * n, 24 * rate) for n, rate in zip(_LENGTHS[:-1], rates_of_sums)),
        overlap=False,
        fuses=frozenset() if native.is_available() else None,
        steps=steps,
        sources={"flops": f"measured on {mesh.size} {mesh.backend} ranks at the same time"},
    )


def _time_function(function: Callable, measure: Callable[[Callable], float]) -> tuple[str, float]:
    """The operation that a function runs, and the seconds of each operation that it counts in a long array."""
    x = numpy.linspace(0.1, 0.9, 1 << 16).reshape(1 << 8, 1 << 8)
    (eqn,) = make_tape(function)(x).equations
    long, short = (functools.partial(jit(function), each) for each in (x, x[:1]))
    return eqn.primitive.name, max(measure(long) - measure(short), 0.0) / work_of_equation(eqn).flops


def _efficiency(rates: Sequence[float]) -> Efficiency:
    """The curve nearest to the rates of products of `_SIZES`, by the sum of |log|."""

    def off(curve: Efficiency) -> float:
        return sum(abs(math.log(curve.of(ProductSize(1, n, n, n)) * max(rates) / r)) for n, r in zip(_SIZES, rates))

    return min((Efficiency(1.0, half, power) for half in range(0, 200, 4) for power in (0.5, 1.0, 1.5, 2.0)), key=off)
