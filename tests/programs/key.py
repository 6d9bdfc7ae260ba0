"""Programs that use a key once, and others that use it twice, for simulated ranks and for MPI ranks."""

import warnings

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff import random
from spmd import P
from tests.checks.transformations import NESTED, TRANSFORMATIONS

#: (x, key) -> a number. Each draws from each key once.
ONCE = {
    "draw": lambda x, k: x * random.normal(k),
    "split": lambda x, k: x * sum(random.normal(each) for each in random.split(k, 3)),
    "indices": lambda x, k: _of_indices(x, random.split(k), 0, 1),
    "fold": lambda x, k: x * sum(random.normal(random.fold_in(k, i)) for i in (0, 1, 2)) + random.normal(k),
    "clone": lambda x, k: x * random.normal(random.clone(k)) + random.normal(k),
    "carry": lambda x, k: _over_keys(x, k)[0],
    "elements": lambda x, k: md.scan(lambda c, k: (c + x * random.normal(k), None), 0.0, random.split(k, 3))[0],
    "index": lambda x, k: _over_indices(x, random.split(k, 3)),
    "fold of index": lambda x, k: md.fori_loop(0, 3, lambda i, c: c + x * random.normal(random.fold_in(k, i)), 0.0),
    "branches": lambda x, k: md.cond(x > 0, lambda: x * random.normal(k), lambda: random.uniform(k)),
    "operands": lambda x, k: md.cond(x > 0, lambda k: x * random.normal(k), lambda k: random.uniform(k), k),
    "checkpoint": lambda x, k: md.checkpoint(lambda x, k: np.sin(x * random.normal(k)))(x, k),
    "jit": lambda x, k: md.jit(lambda x, k: np.sin(x * random.normal(k)))(x, k),
    "blocks": lambda x, k: x * (_block(k, 0) + _block(k, 2)).sum(),
}

#: Each uses a key twice.
TWICE = {
    "draw": lambda x, k: x * random.normal(k) + random.uniform(k),
    "split": lambda x, k: x * random.normal(random.split(k)[0]) + random.normal(k),
    "after": lambda x, k: x * random.normal(k) + random.normal(random.split(k)[0]),
    "indices": lambda x, k: _of_indices(x, random.split(k), 0, 0),
    "loop": lambda x, k: x * sum(random.normal(k) for _ in range(2)),
    "scan": lambda x, k: md.scan(lambda c, _: (c + x * random.normal(k), None), 0.0, length=3)[0],
    "fori_loop": lambda x, k: md.fori_loop(0, 3, lambda i, c: c + x * random.normal(k), 0.0),
    "while_loop": lambda x, k: md.while_loop(
        lambda c: c < 2, lambda c: c + 1 + 0 * x * random.normal(k), 0.0, max_steps=3
    ),
    "a key of the stack": lambda x, k: _over_indices(x, random.split(k, 3), 1),
    "carry": lambda x, k: _over_keys(x, k)[0] + random.normal(k),
    "branches": lambda x, k: md.cond(x > 0, lambda: x * random.normal(k), lambda: x) + random.normal(k),
    "operands": lambda x, k: md.cond(x > 0, lambda k: x * random.normal(k), lambda k: x, k) + random.normal(k),
    "checkpoint": lambda x, k: md.checkpoint(lambda x, k: np.sin(x * random.normal(k)))(x, k) + random.normal(k),
    "blocks": lambda x, k: x * _block(k, 0).sum() + random.normal(k, 5).sum(),
}


def _of_indices(x, keys, i, j):
    return x * random.normal(keys[i]) + random.normal(keys[j])


def _over_keys(x, key):
    def step(carry, _):
        total, key = carry
        key, used = random.split(key)
        return (total + x * random.normal(used), key), None

    return md.scan(step, (0.0, key), length=3)[0]


def _over_indices(x, keys, same=None):
    return md.fori_loop(0, 3, lambda i, c: c + x * random.normal(keys[i if same is None else same]), 0.0)


def _block(key, start):
    return random.normal(key, random.Block((2,), (start,), (4,)))


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


def check(backend, name):
    """Check that a transformation warns of the programs that use a key twice, and of no other."""
    transform = transformations(backend)[name]
    for program, f in ONCE.items():
        assert not reuses(transform, f, 1.0, random.key(0)), program
    for program, f in TWICE.items():
        assert reuses(transform, f, 1.0, random.key(0)), program
