"""Transformations of programs that may use a key twice, for simulated ranks and for MPI ranks."""

import warnings

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff import random
from spmd import P
from tests.checks.transformations import NESTED, TRANSFORMATIONS


def transformations(backend):
    """Return functions (f, x, key) -> a result, by name, for a mesh of this backend."""
    mesh = spmd.make_mesh((-1,), ("i",), backend=backend) if backend == "mpi" else spmd.make_mesh((2,), ("i",), backend)
    on_ranks = lambda f: spmd.shard_map(f, mesh, in_specs=P(), out_specs=P())  # noqa: E731
    runs = {**TRANSFORMATIONS, **NESTED}
    names = ("grad", "jvp", "vmap", "jit", "jit of grad", "grad of jit")
    return {
        "Python": lambda f, x, k: f(x, k),
        **{name: lambda f, x, k, run=runs[name]: run(lambda x: f(x, k), x) for name in names},
        "vmap of keys": lambda f, x, k: md.vmap(f)(np.stack([x, x]), random.split(random.clone(k))),
        "shard_map": lambda f, x, k: on_ranks(f)(x, k),
        "grad of shard_map": lambda f, x, k: md.grad(on_ranks(f))(x, k),
        "jit of shard_map": lambda f, x, k: md.jit(on_ranks(f))(x, k),
        "grad in shard_map": lambda f, x, k: on_ranks(md.grad(f))(x, k),
    }


def reuses(run, *args):
    """Return the messages of the reused keys that a program warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*args)
    return [str(w.message) for w in caught if w.category is md.KeyReuseWarning]


def reused(f):
    """Print whether a function of a number and a key is warned of: always, never, or under which transformations."""
    runs = transformations("simulated")
    warned = [name for name, run in runs.items() if reuses(run, f, 1.0, random.key(0))]
    print({0: "never", len(runs): "always"}.get(len(warned), warned))
