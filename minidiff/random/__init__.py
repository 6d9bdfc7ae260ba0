"""Random numbers that are functions of a key, with the API of `jax.random`.

There is no generator with a state. A function draws the same numbers from the same key, wherever it runs: under `jit`,
`vmap` and `scan`, on one rank or many. `split` and `fold_in` make new keys; use each key once.

Number k of a draw is a hash of key and k, and of nothing else. So a rank can draw its block of a large array without
the rest: pass a `Block` as the shape. The hash is Threefry-2x32 with 20 rounds, as in JAX. It needs only additions,
rotations and exclusive ors of 32-bit words, which NumPy computes for many keys and counters at once.
(`numpy.random.Philox` is faster for one stream, but needs an object for each key, and a block of an array consists of
many pieces of a stream.) Keys, `split` and `bits` equal those of JAX.

A key is a plain array u32[2], with a type like any other. In the body of a `shard_map`, a key that is the same on all
ranks draws the same numbers on all of them. `fold_in(key, axis_index('i'))` varies along `i`, and so do its draws.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3".
"""

import functools
from typing import TYPE_CHECKING

import numpy  # noqa: F401  (examples in docstrings use it)

from minidiff.diagnostics.other_libraries import module_getattr
from minidiff.diagnostics.tracebacks import hide_frames_of
from minidiff.random.distributions import (
    beta,
    cauchy,
    choice,
    dirichlet,
    exponential,
    gamma,
    gumbel,
    laplace,
    loggamma,
    logistic,
    multivariate_normal,
    orthogonal,
    poisson,
    rademacher,
)  # fmt: skip
from minidiff.random.draws import bernoulli, bits, categorical, normal, permutation, randint, truncated_normal, uniform
from minidiff.random.keys import Block, fold_in, key, split

__all__ = [
    "Block", "bernoulli", "beta", "bits", "categorical", "cauchy", "choice", "dirichlet", "exponential", "fold_in",
    "gamma", "gumbel", "key", "laplace", "loggamma", "logistic", "multivariate_normal", "normal", "orthogonal",
    "permutation", "poisson", "rademacher", "randint", "split", "truncated_normal", "uniform",
]  # fmt: skip
__dir__ = functools.partial(sorted, __all__)

hide_frames_of(globals(), __all__)

if not TYPE_CHECKING:  # a type checker would infer from it that every name exists
    __getattr__ = module_getattr(__name__)
