"""JAX beside this library: its set-up, the names that programs are written over, and the collectives of its traces."""

from __future__ import annotations

import doctest
import os
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import minidiff as md
import minidiff.numpy as np


def jax(devices: int = 1) -> Any:
    """Return JAX in 64 bits, on one thread or with so many devices of the processor; None if it is not installed."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    if devices == 1:
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ.setdefault("NPROC", "1")
    os.environ.setdefault("XLA_FLAGS", flags)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        import jax
    except ImportError:
        return None
    jax.config.update("jax_enable_x64", True)
    return jax


def jax_numpy() -> types.SimpleNamespace:
    """The names of `jax.numpy`, and `at`."""
    import jax

    return types.SimpleNamespace(**{**vars(jax.numpy), "at": lambda x: x.at})


#: What programs take of JAX's `lax`, and of `jax`.
OF_LAX = ("scan", "while_loop", "fori_loop", "cond", "switch", "dynamic_slice", "stop_gradient")
OF_JAX = ("vmap", "grad", "value_and_grad", "tree", "random")


def jax_names() -> types.SimpleNamespace:
    """The names of JAX that programs take of this library's `md`."""
    import jax
    from jax import lax

    def conv(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    nn = types.SimpleNamespace(**{**vars(jax.nn), "logsumexp": jax.scipy.special.logsumexp, "conv": conv})
    names = {name: getattr(lax, name) for name in OF_LAX} | {name: getattr(jax, name) for name in OF_JAX}
    return types.SimpleNamespace(nn=nn, **names)


def run_page(path: Path, **names: Any) -> None:
    """Run the examples of a page by these names, which stand for those that it imports."""
    for example in doctest.DocTestParser().get_examples(path.read_text()):
        if not example.source.startswith(("from ", "import ")):
            exec(example.source, names)


class Library(NamedTuple):
    """The functions that timed programs are written over; those that `jit` makes wait for their results."""

    np: Any
    nn: Any
    scan: Callable
    grad: Callable
    value_and_grad: Callable
    jit: Callable
    array: Callable


def minidiff(**options: Any) -> Library:
    return Library(np, md.nn, md.scan, md.grad, md.value_and_grad, lambda f: md.jit(f, **options), lambda x: x)


def of_jax() -> Library | None:
    if (module := jax()) is None:
        return None
    names = jax_names()

    def compiled(f: Callable) -> Callable:
        run = module.jit(f)
        return lambda *xs: module.block_until_ready(run(*xs))

    return Library(jax_numpy(), names.nn, names.scan, names.grad, names.value_and_grad, compiled, module.numpy.asarray)


def without_dead_code(jaxpr: Any) -> Any:
    from jax._src.interpreters.partial_eval import dce_jaxpr

    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def in_jaxpr(jaxpr: Any, of_equation: Callable[[Any], str | None]) -> Counter:
    """The operations of a jaxpr and of those within it, by the kinds that `of_equation` tells.

    In a loop they count as often as it runs; of branches, those of the longest do.
    """
    actual: Counter = Counter()
    for eqn in jaxpr.eqns:
        values = [x for v in eqn.params.values() for x in (v if isinstance(v, (tuple, list)) else [v])]
        jaxprs = [getattr(x, "jaxpr", x) for x in values]
        inner = [in_jaxpr(x, of_equation) for x in jaxprs if hasattr(x, "eqns")]
        if eqn.primitive.name == "cond" and inner:
            inner = [max(inner, key=Counter.total)]
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for counts in inner:
            actual.update({kind: times * count for kind, count in counts.items()})
        if kind := of_equation(eqn):
            actual[kind] += 1
    return actual
