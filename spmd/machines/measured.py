"""The speed of the machine that this runs on, measured by all ranks of a mesh at the same time."""

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
from minidiff.compiler.mathematics import FUNCTIONS
from spmd.checks.ranges import COUNT, check_ranges
from spmd.mesh.mesh import Mesh
from spmd.prices.calibrate import calibrate, maximum, seconds_of
from spmd.prices.forecast import CostModel
from spmd.prices.machine import Efficiency, Link, Machine
from spmd.prices.work import ProductSize, Work, work_of_equation

_REPEAT_SECONDS = 0.002
_MATRIX_SIZES = (16, 32, 64, 128, 256, 512)  # of matrices that are multiplied
_MESSAGE_SIZES = tuple(1024 * 4**k for k in range(7))  # bytes
_OPERAND_SETS = 2  # sets of operands and results, which take turns
_TERMS = 16  # of a polynomial
_SIDE = 512  # of the matrix of which functions are taken: it is larger than a processor's own cache
_ARRAY_LENGTHS = tuple(1 << k for k in (12, 15, 17, 18, 19, 20, 22))  # of arrays that are added
_FUNCTIONS: tuple[Callable, ...] = (
    *(np.exp, np.exp2, np.expm1, np.log, np.log1p, np.log2, np.log10, np.sqrt, np.cbrt, np.sin, np.cos, np.tan),
    *(np.sinh, np.cosh, np.tanh, np.arcsin, np.arccos, np.arctan, np.sum, np.max, np.absolute, np.square),
    *(nn.erf, nn.sigmoid, nn.silu, nn.relu, nn.gelu, functools.partial(nn.gelu, approximate=False)),
    *(nn.softmax, nn.log_softmax, nn.logsumexp),
    *(lambda x, f=f: f(x, x) for f in (np.divide, np.power, np.arctan2, np.hypot, np.maximum, np.logaddexp)),
)


def this_machine(mesh: Mesh, *, repeats: int = 20) -> Machine:
    """Measure the machine that this runs on, on all ranks of a mesh at the same time.

    Products of matrices of several sizes give the peak and the efficiency, a sum of long arrays the bandwidth of
    memory, shorter ones that of caches: each of other arrays than the one before, as those of a program are. A compiled
    polynomial gives the operations of a fused loop, and that of one number what starting an operation takes. Functions
    (exp, tanh, softmax, ...) are measured by themselves and, if compiled loops have them, in a loop. What arithmetic
    takes is the rest after moving the bytes, since one thread waits for memory. Each time is that of the slowest rank,
    since ranks wait for each other. The link is a `spmd.calibrate` of the mesh. All ranks must call it, and all get the
    same machine.

    Args:
        mesh: the mesh on whose ranks it is measured. A mesh of one rank has a link that is never used.
        repeats: each time is measured over 2 * `repeats` milliseconds, so that ranks that share a processor take turns.

    >>> import spmd
    >>> machine = this_machine(spmd.make_mesh((2,), ('i',), backend='simulated'), repeats=1)
    >>> machine.name, sorted(machine.flops), machine.links[0].name
    ('this machine', ['float32', 'float64'], 'messages')
    """

    check_ranges("this_machine", {"repeats": COUNT}, {"repeats": repeats})

    def measure(call: Callable[[], Any]) -> float:
        call()  # compiles
        calls = max(1, int(repeats * _REPEAT_SECONDS / max(seconds_of(call), 1e-9)))
        maximum(mesh, numpy.zeros(1))  # all ranks begin together
        return float(maximum(mesh, numpy.array([seconds_of(call, calls)]))[0])

    launch = measure(functools.partial(jit(_polynomial), numpy.ones(1))) / (2 * _TERMS)
    sums = [measure(_in_turns(numpy.add, (n,))) for n in _ARRAY_LENGTHS]
    bandwidths = [24 * n / max(t - launch, t / 2) for n, t in zip(_ARRAY_LENGTHS, sums)]
    nearest = [24 * math.sqrt(n * longer) for n, longer in itertools.pairwise(_ARRAY_LENGTHS)]
    several = mesh.size > 1
    model = calibrate(mesh, mesh.axis_names, sizes=_MESSAGE_SIZES, repeats=repeats) if several else CostModel(0.0, 0.0)
    machine = Machine(
        "this machine",
        flops={},
        elementwise=math.inf,
        bandwidth=bandwidths[-1],
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / mesh.size,
        launch=launch,
        links=(Link("messages", math.inf, model, model.source),),
        caches=tuple(zip(nearest, bandwidths)),
        hides_memory=False,
        overlap=False,
        fuses=frozenset() if native.is_available() else None,
        sources={"flops": f"measured on {mesh.size} {mesh.backend} ranks at the same time"},
    )

    def arithmetic(call: Callable[[], Any], nbytes: int) -> float:
        """Return the seconds of a call without those of launching it and of moving so many bytes."""
        seconds = measure(call)
        return max(seconds - machine.seconds(Work(0, nbytes), None), seconds / 2)

    rates = {
        dtype: [2 * n**3 / arithmetic(_in_turns(numpy.matmul, (n, n), dtype), 3 * size * n**2) for n in _MATRIX_SIZES]
        for dtype, size in (("float32", 4), ("float64", 8))
    }
    return machine.replace(
        flops={dtype: max(speeds) for dtype, speeds in rates.items()},
        efficiency=_efficiency(rates["float64"]),
        **_elementwise(arithmetic),
    )


def _in_turns(function: Callable, shape: tuple[int, ...], dtype: str = "float64") -> Callable[[], Any]:
    """Return a call of a function on two arrays that writes to a third, on other arrays than the time before."""
    arrays = itertools.cycle([[*each] for each in numpy.ones((_OPERAND_SETS, 3, *shape), dtype)])
    return lambda: function(*next(arrays))


def _polynomial(x: Any) -> Any:
    return functools.reduce(lambda y, _: y * x + 1.0, range(_TERMS), x)


def _elementwise(arithmetic: Callable[[Callable, int], float]) -> dict[str, Any]:
    """Measure the speed of a loop, and each function in its operations: alone and, if loops have it, in a loop."""
    x = numpy.linspace(0.1, 0.9, _SIDE**2).reshape(_SIDE, _SIDE)
    elementwise = 2 * _TERMS * x.size / arithmetic(functools.partial(jit(_polynomial), x), 2 * x.nbytes)

    def in_loop(function: Callable) -> float:
        return arithmetic(functools.partial(jit(lambda x: (function(x) * x + 1.0) * x), x), 2 * x.nbytes)

    alone: dict[str, float] = {}
    in_loops: dict[str, float] = {}
    square = in_loop(np.square)
    for function in _FUNCTIONS:
        (eqn,) = make_tape(function)(x).equations
        name, work = eqn.primitive.name, work_of_equation(eqn)
        seconds = arithmetic(functools.partial(jit(function), x), work.bytes)
        alone[name] = max(elementwise * seconds / work.flops, 1.0)
        if name in FUNCTIONS:
            in_loops[name] = max(elementwise * (in_loop(function) - square) / work.flops, 1.0)
    return {"elementwise": elementwise, "steps": alone, "steps_in_loops": in_loops}


def _efficiency(rates: Sequence[float]) -> Efficiency:
    """Return the curve nearest to the rates of products of `_MATRIX_SIZES`, by the sum of |log|."""

    def off(curve: Efficiency) -> float:
        return sum(
            abs(math.log(curve.of(ProductSize(1, n, n, n)) * max(rates) / r)) for n, r in zip(_MATRIX_SIZES, rates)
        )

    return min((Efficiency(1.0, half, power) for half in range(0, 200, 4) for power in (0.5, 1.0, 1.5, 2.0)), key=off)
