"""Compute long operations that do not need each other at once, in threads: products, factorizations, transforms, sorts.

NumPy lets other threads run while it computes one of these, on one processor. Products and factorizations count only
where BLAS has one thread, as by OMP_NUM_THREADS=1: otherwise it takes all processors for each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Mapping, Sequence
from contextvars import copy_context
from typing import Any

from minidiff.compiler.threads import default_threads, for_each
from minidiff.control_flow.bodies import Call
from minidiff.control_flow.dead_code import has_effects
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import Scope
from minidiff.core.tape import Equation, Tape, evaluate_equation, with_equations
from minidiff.core.tracer import Value
from minidiff.core.types import Var, typeof
from minidiff.ops import decomposition, einsum, fft, linalg, sorting

#: An operation has at least so many multiplications, or as much work, which takes some 150 microseconds or more.
LEAST_WORK = 1 << 22

#: It waits for a second one among so many operations: the order, and the memory, of a program change little.
WINDOW = 64


#: Operations of BLAS and LAPACK, and their work by the types of operands and result. A product of [m, k] and [k, n] is
#: [m, n], and takes m k n multiplications.
OF_BLAS: dict[Primitive, Callable[..., float]] = dict.fromkeys(
    (linalg.matmul_p, einsum.einsum_p), lambda *types: math.sqrt(math.prod(t.size for t in types))
)
for _name in ("pinv", "cholesky", "qr", "eigh", "eigvalsh", "eig", "eigvals", "svd", "svdvals"):
    OF_BLAS[getattr(decomposition, f"{_name}_p")] = lambda x, *_: 4 * x.size * max(x.shape[-2:])

#: NumPy's, which take one processor in any case.
OF_NUMPY: dict[Primitive, Callable[..., float]] = {sorting.argsort_p: lambda x, *_: 400 * x.size}
OF_NUMPY |= {p: lambda x, *_: 200 * x.size for p in (fft.fft_p, fft.ifft_p, fft.rfft_p, fft.irfft_p)}


class AtOnce(Call):
    """An operation whose body has operations that do not need each other."""

    def evaluate(self, args: Sequence[Value], params: dict) -> list[Value]:
        body = params["body"]
        env: dict[Var, Any] = dict(zip(body.inputs, args))
        pieces = [(copy_context(), eqn) for eqn in body.equations]  # with the `numpy.errstate` of this thread
        threads = getattr(body, "options", {}).get("threads") or default_threads()
        for_each(lambda piece: piece[0].run(evaluate_equation, piece[1], env), pieces, threads)
        results = [env[v] for v in body.outputs]
        env.clear()  # another thread may refer to it for a moment
        return results


at_once_p = AtOnce("at_once")


def compute_at_once(tape: Tape, scope: Scope | None, settings: Mapping[str, Any]) -> Tape:
    """Compute long operations that do not need each other at once, as many as there are threads."""
    threads = settings["threads"] or default_threads()
    is_plain = scope is None and not any(v.type.sharding for v in tape.inputs)
    if not (is_plain and settings["kernels"] and threads > 1) or any(map(has_effects, tape.equations)):
        return tape
    one = "1" in map(os.environ.get, ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"))
    work = OF_NUMPY | OF_BLAS if one else OF_NUMPY
    candidates = [e for e in tape.equations if e.primitive in work]
    types = [[typeof(a) for a in (*e.inputs, *e.outputs)] for e in candidates]
    long = {e for e, ts in zip(candidates, types) if work[e.primitive](*ts) >= LEAST_WORK}
    equations, k = [*tape.equations], 0
    while k < len(equations):
        if equations[k] in long:
            before, group, after = _split(equations[k : k + WINDOW], threads, long)
            if len(group) > 1:
                equations[k : k + WINDOW] = [*before, _join(group), *after]
                k += len(before)
        k += 1
    return with_equations(tape, equations)


def _split(window: Sequence[Equation], threads: int, long: Container[Equation]) -> tuple[list, list, list]:
    """Split equations: those that run before a group of long ones, the group, and those that run after it."""
    before, group, after = list[Equation](), list[Equation](), list[Equation]()
    late: set[Var] = set()
    for eqn in window:
        waits = len(group) == threads or any(isinstance(a, Var) and a in late for a in eqn.inputs)
        part = after if waits else group if eqn in long else before
        part.append(eqn)
        if part is not before:
            late.update(eqn.outputs)
    return before, group, after


def _join(group: Sequence[Equation]) -> Equation:
    operands = {a: Var(a.type) for eqn in group for a in eqn.inputs if isinstance(a, Var)}
    results = {v: Var(v.type) for eqn in group for v in eqn.outputs}
    body = [
        Equation(e.primitive, [operands.get(a, a) if isinstance(a, Var) else a for a in e.inputs], e.params,
                 [results[v] for v in e.outputs], e.source)
        for e in group
    ]  # fmt: skip
    tape = Tape([*operands.values()], body, [*results.values()])
    return Equation(at_once_p, [*operands], {"body": tape}, [*results], group[0].source)
