"""Gradients taken in a body: what each way to write one gives, and which are warned of."""

import warnings

import numpy
import pytest

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


# ---------------------------------------------------------------- on any backend: rank 0 warns, for all


def check_silent(mesh, name, around):
    """The sum is warned of once, in the user's line, with the ways to say it."""
    found, result = warned(lambda: AROUND[around](mapped(mesh, SILENT[name]))(W, data(mesh)))
    assert [file for file, _ in found] == ([__file__] if mesh.rank == 0 else [])
    for _, text in found:
        assert "varies along 'i', and argument " in text and " f64[3], does not" in text
        assert "psum(loss, 'i')" in text and "pmean(loss, 'i')" in text and "pbroadcast(w, 'i')" in text
    numpy.testing.assert_allclose(result, gradients(mesh).sum(0), rtol=1e-12)


def check_said(mesh, name, around):
    """What says where the sum is, is not warned of."""
    body, over_ranks = SAID[name]
    found, result = warned(lambda: AROUND[around](mapped(mesh, body))(W, data(mesh)))
    assert found == []
    numpy.testing.assert_allclose(result, over_ranks(gradients(mesh), axis=0), rtol=1e-12)


def check_quiet(mesh, name):
    assert warned(lambda: mapped(mesh, QUIET[name])(W, data(mesh)))[0] == []


def check_filters(mesh):
    """Python's filters work: on all ranks, one that makes an error of it does so; and they go on together."""
    f = mapped(mesh, SILENT["grad"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", VarianceWarning)
        with pytest.raises(VarianceWarning, match="the gradient of the sum of the results over 'i'"):
            f(W, data(mesh))
        warnings.simplefilter("ignore", VarianceWarning)
        f(W, data(mesh))


#: What each rank has, once for each rank, and other results that are split.
COPIES = {
    "a sum": lambda w, x: psum(x.sum(0), "i"),
    "an argument": lambda w, x: w,
    "computed": lambda w, x: np.sin(w) * 2,
}
NO_COPIES = {
    "each rank's own": lambda w, x: w * x[0],
    "meant": lambda w, x: pbroadcast(w, "i"),
    "a constant": lambda w, x: np.zeros(3),
    "a constant like a traced value": lambda w, x: np.zeros_like(w),
}


def split(body, mesh, **options):
    return spmd.shard_map(body, mesh, in_specs=(P(), P("i")), out_specs=P("i"), **options)


def check_copies(mesh, name, around):
    """A result is split along an axis along which it does not vary."""
    f = AROUND[around](split(COPIES[name], mesh))
    found, result = warned(lambda: f(W, data(mesh)))
    texts = {text for _, text in found}  # one line for each call in the program
    expected = (
        "the result has type f64[3]: it is the same on all ranks along 'i', but its out_specs entry P('i') splits it "
        "there: so the whole has the same block once for each of them, one after another. Leave 'i' out of the entry "
        "for one block; or return pbroadcast(x, 'i') to say that you mean all"
    )
    assert texts == ({expected} if mesh.rank == 0 else set())
    whole = spmd.gather(result)
    numpy.testing.assert_array_equal(whole, numpy.tile(whole[:3], mesh.size))


def check_no_copies(mesh, name, around):
    assert warned(lambda: AROUND[around](split(NO_COPIES[name], mesh))(W, data(mesh)))[0] == []
