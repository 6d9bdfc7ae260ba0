"""Every transformation, as a row: it runs a function of an array, whose result may be anything."""

import numpy

import minidiff as md
from spmd import P
from tests.checks.meshes import mapped, mesh


def _loss(f):
    return lambda x: numpy.sum(f(x))


def on_blocks(f):
    """Map a function over two ranks, each of which has a part of the array and of the result."""
    return mapped(f, mesh(2), P("i"), P("i"))


def on_copies(f):
    """Map a function over two ranks that have the same array, and the same result."""
    return mapped(f, mesh(2), P(), P())


#: Those under which Python sees the numbers of an array, because a derivative is taken at it.
DERIVATIVES = {
    "jvp": lambda f, x: md.jvp(f, (x,), (x,)),
    "vjp": lambda f, x: md.vjp(f, x)[0],
    "linearize": lambda f, x: md.linearize(f, x)[0],
    "jacrev": lambda f, x: md.jacrev(f)(x),
    "jacfwd": lambda f, x: md.jacfwd(f)(x),
    "grad": lambda f, x: md.grad(_loss(f))(x),
    "grad of grad": lambda f, x: md.grad(_loss(md.grad(_loss(f))))(x),
    "grad of checkpoint": lambda f, x: md.grad(md.checkpoint(_loss(f)))(x),
}
#: Those that map or record a function, which sees an element, a block or a type.
OTHERS = {
    "vmap": lambda f, x: md.vmap(f)(numpy.stack([x, x])),
    "make_tape": lambda f, x: md.make_tape(f)(x)(x),
    "jit": lambda f, x: md.jit(f)(x),
    "shard_map": lambda f, x: on_blocks(lambda y: md.tree.map(lambda z: z[None], f(y[0])))(numpy.stack([x, x])),
}
TRANSFORMATIONS = {**DERIVATIVES, **OTHERS}

#: Those of others, or with a body: programs whose results are the function's, or its derivative's.
NESTED = {
    "jit of grad": lambda f, x: md.jit(md.grad(_loss(f)))(x),
    "grad of jit": lambda f, x: md.grad(md.jit(_loss(f)))(x),
    "jvp of jit": lambda f, x: md.jvp(md.jit(f), (x,), (x,)),
    "vmap of jit": lambda f, x: md.vmap(md.jit(f))(numpy.stack([x, x])),
    "vmap of grad": lambda f, x: md.vmap(md.grad(_loss(f)))(numpy.stack([x, x])),
    "make_tape of grad": lambda f, x: md.make_tape(md.grad(_loss(f)))(x)(x)[0],
    "checkpoint": lambda f, x: md.checkpoint(f)(x),
    "jit of checkpoint": lambda f, x: md.jit(md.checkpoint(f))(x),
    "scan in jit": lambda f, x: md.jit(lambda x: md.scan(lambda c, _: (c, f(x)), 0.0, None, length=1)[1])(x),
    "cond in jit": lambda f, x: md.jit(lambda x: md.cond(numpy.max(x) > -9, f, f, x))(x),
    "jit of shard_map": lambda f, x: md.jit(on_copies(f))(x),
    "shard_map of jit": lambda f, x: on_copies(md.jit(f))(x),
    "grad of shard_map": lambda f, x: md.grad(_loss(on_copies(f)))(x),
}
