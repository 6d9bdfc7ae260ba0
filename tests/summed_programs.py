"""Gradients taken in a body: what each way to write one gives, and which are warned of."""

import warnings

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pbroadcast, pmean, psum, reduced, unreduced
from minidiff import VarianceWarning
from spmd import P

W = numpy.array([1.0, -2.0, 0.5])


def loss(w, block):
    return np.mean((block @ w) ** 2)


def own(w, block):
    """The gradient of a rank's own loss, by hand."""
    return 2 * block.T @ (block @ w) / len(block)


#: What says where the sum is: a body, and which axis of all ranks' own gradients is summed or averaged.
SAID = {
    "psum": (lambda w, x: md.grad(lambda w: psum(loss(w, x), "i"))(w), numpy.sum),
    "pmean": (lambda w, x: md.grad(lambda w: pmean(loss(w, x), "i"))(w), numpy.mean),
    "unreduced": (lambda w, x: md.grad(lambda w: unreduced(loss(w, x), "i"))(w), numpy.sum),
    "reduced": (lambda w, x: psum(md.grad(loss)(reduced(w, "i"), x), "i"), numpy.sum),
    "pbroadcast": (lambda w, x: pmean(md.grad(loss)(pbroadcast(w, "i"), x), "i"), numpy.mean),
    "value": (lambda w, x: md.value_and_grad(lambda w: pmean(loss(w, x), "i"))(w)[1], numpy.mean),
    "jacrev": (lambda w, x: md.jacrev(lambda w: pmean(loss(w, x), "i"))(w), numpy.mean),
    "jacfwd": (lambda w, x: pmean(md.jacfwd(lambda w: loss(w, x))(w), "i"), numpy.mean),
    "vjp": (lambda w, x: md.vjp(lambda w: loss(w, x), w)[1](pbroadcast(1.0, "i"))[0], numpy.sum),
}

#: What does not.
SILENT = {
    "grad": lambda w, x: md.grad(loss)(w, x),
    "closure": lambda w, x: md.grad(lambda w: loss(w, x))(w),
    "value_and_grad": lambda w, x: md.value_and_grad(loss)(w, x)[1],
    "has_aux": lambda w, x: md.grad(lambda w: (loss(w, x), x), has_aux=True)(w)[0],
    "argnums": lambda w, x: md.grad(lambda x, w: loss(w, x), argnums=(1, 0))(x, w)[0],
    "tree": lambda w, x: md.grad(lambda p: loss(p["w"], x))({"w": w})["w"],
    "a pbroadcast in the loss": lambda w, x: md.grad(lambda w: loss(pbroadcast(w, "i"), x))(w),
    "a plain array": lambda w, x: md.grad(loss)(W, x),
    "jacrev": lambda w, x: md.jacrev(loss)(w, x),
    "scan": lambda w, x: md.scan(lambda g, _: (g + md.grad(loss)(w, x), None), 0 * w, None, length=1)[0],
    "cond": lambda w, x: md.cond(w[0] > 0, md.grad(loss), lambda w, x: w, w, x),
    "checkpoint": lambda w, x: md.grad(md.checkpoint(loss))(w, x),
    "vmap": lambda w, x: np.sum(md.vmap(md.grad(loss), in_axes=(None, 0))(w, x[:, None]), 0) / len(x),
}

#: Gradients that need not say anything.
QUIET = {
    "of a rank's own argument": lambda w, x: psum(md.grad(loss, argnums=1)(w, x), "i").sum(),
    "of an argument that is not used": lambda w, x: md.grad(lambda w: np.sum(x))(w).sum(),
    "of a result that is the same": lambda w, x: md.grad(lambda w: np.sum(w**2))(w).sum(),
    "of what varies by its rank": lambda w, x: psum(md.grad(lambda s: np.sum(s * w))(1.0 * axis_index("i")), "i"),
}

AROUND = {
    "as it is": lambda f: f,
    "jit": md.jit,
    "make_tape": lambda f: lambda w, x: md.make_tape(f)(w, x)(w, x)[0],
    "grad": lambda f: lambda w, x: (md.grad(lambda w, x: np.sum(f(w, x)))(w, x), f(w, x))[1],
}


def mapped(mesh, body, **options):
    return spmd.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), **options)


def data(mesh):
    return numpy.random.default_rng(3).normal(size=(2 * mesh.shape["i"], 3))


def gradients(mesh):
    """All ranks' own gradients."""
    return numpy.stack([own(W, block) for block in numpy.split(data(mesh), mesh.shape["i"])])


def warned(call):
    """The variance warnings of a call, as Python shows them by default, and its result."""
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        result = call()
    return [(w.filename, str(w.message)) for w in found if w.category is VarianceWarning], result
