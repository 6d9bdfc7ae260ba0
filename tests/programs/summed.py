"""Gradients taken in a body: what each way to write one gives, and which are warned of."""

import warnings

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pbroadcast, pmax, pmean, pmin, psum, reduced, unreduced
from minidiff import VarianceWarning
from spmd import P
from tests.checks.properties import shows

W = numpy.array([1.0, -2.0, 0.5])


def loss(w, block):
    return np.mean((block @ w) ** 2)


def local(w, block):
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
    "value_and_grad": lambda w, x: md.value_and_grad(loss)(w, x)[1],
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
    return numpy.stack([local(W, block) for block in numpy.split(data(mesh), mesh.shape["i"])])


def warned(call):
    """The variance warnings of a call, as Python shows them by default, and its result."""
    with warnings.catch_warnings(record=True) as actual:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        result = call()
    return [(w.filename, str(w.message)) for w in actual if w.category is VarianceWarning], result


# ---------------------------------------------------------------- on any backend: rank 0 warns, for all


@shows("errors")
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


# ---------------------------------------------------------------- sums and means of what is the same already


@md.custom_vjp
def of_a_rule(w):
    return np.sum(w**2)


of_a_rule.defvjp(lambda w: (np.sum(w**2), w), lambda w, ct: (psum(2 * w * ct, "i"),))


@md.custom_jvp
def of_a_tangent(w):
    return np.sum(w**2)


of_a_tangent.defjvp(lambda primals, tangents: (of_a_tangent(*primals), psum(np.sum(2 * primals[0] * tangents[0]), "i")))

#: Sums of a traced value that is the same on all ranks, and the value.
TWICE = {
    "a gradient": (lambda w, x: psum(md.grad(lambda w: np.sum(np.sin(w)))(w), "i"), numpy.cos(W)),
    "an argument": (lambda w, x: psum(w, "i"), W),
    "a sum": (lambda w, x: psum(psum(0 * x.sum(0), "i") + w, "i"), W),
    "a tree": (lambda w, x: psum({"a": w, "b": w[0]}, "i")["a"], W),
    "vmap": (lambda w, x: md.vmap(lambda v: psum(v, "i"))(w), W),
    "a rule of custom_vjp": (lambda w, x: md.grad(of_a_rule)(w), 2 * W),
    "a rule of custom_jvp": (lambda w, x: md.jvp(of_a_tangent, (w,), (w,))[1], 2 * numpy.sum(W**2)),
}
#: What is not warned of, and the result for n ranks. Nothing is sent.
NOT_SENT = {
    "a count": (lambda w, x: w * psum(1, "i"), lambda n: n * W),
    "a constant": (lambda w, x: w * psum(np.ones(3), "i"), lambda n: n * W),
    "pmean": (lambda w, x: pmean(w, "i"), lambda n: W),
    "pmean of a constant": (lambda w, x: w * pmean(np.full(3, 200, np.uint8), "i"), lambda n: 200 * W),
    "pmean of a number": (lambda w, x: w * pmean(3, "i"), lambda n: 3 * W),
    "pmax": (lambda w, x: pmax(w, "i"), lambda n: W),
    "pmin": (lambda w, x: pmin(w, "i"), lambda n: W),
}


#: Bodies, the entry of their out_specs, what is warned of, and the result, if that says more: of all ranks' gradients.
PROGRAMS = {
    **{f"not said, {name}": (body, P(), "sum", lambda gs: gs.sum(0)) for name, body in SILENT.items()},
    **{f"said, {name}": (body, P(), None, lambda gs, over=over: over(gs, 0)) for name, (body, over) in SAID.items()},
    **{f"quiet, {name}": (body, P(), None, None) for name, body in QUIET.items()},
    **{f"copies, {name}": (body, P("i"), "copies", None) for name, body in COPIES.items()},
    **{f"no copies, {name}": (body, P("i"), None, None) for name, body in NO_COPIES.items()},
    **{f"twice, {name}": (body, P(), "twice", lambda gs, x=x: len(gs) * x) for name, (body, x) in TWICE.items()},
    **{f"not sent, {name}": (body, P(), None, lambda gs, f=of: f(len(gs))) for name, (body, of) in NOT_SENT.items()},
}


@shows("reference", "counts", "errors")
def check_program(mesh, name, around):
    """Results, and warnings of what is not said: once, in the user's line."""
    body, spec, warning, expected = PROGRAMS[name]
    f = spmd.shard_map(body, mesh, in_specs=(P(), P("i")), out_specs=spec)
    actual, result = warned(lambda: AROUND[around](f)(W, data(mesh)))
    says = warning and mesh.rank == 0 and (warning != "twice" or mesh.size > 1)
    assert len({text for _, text in actual}) == bool(says)
    if warning != "copies":  # which are warned of in each line of the program
        assert [file for file, _ in actual] == [__file__] * bool(says)
    result = spmd.gather(result)
    if expected is not None:
        numpy.testing.assert_allclose(result, expected(gradients(mesh)), rtol=1e-12)
    if warning == "copies":
        numpy.testing.assert_array_equal(result, numpy.tile(result[:3], mesh.size))
    if name.startswith("not sent"):
        assert spmd.communication(f)(W, data(mesh)).counts == {}


INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@shows("reference", "modes", "types")
def check_mean_of_integers(mesh, dtype, compiled):
    """It is NumPy's, for numbers whose sum the dtype does not have."""
    largest = True if dtype == "bool" else numpy.iinfo(dtype).max // 8 * 7
    x = numpy.full((mesh.size, 2), largest, dtype)
    x[0, 0] = 0
    bodies = [
        lambda x: pmean(x, "i"),
        lambda x: pmean(pmean(x, "i"), "i"),
        lambda x: pmean(x, "i", axis_index_groups=[[*range(mesh.size)]]),
        lambda x: md.vmap(lambda v: pmean(v, ("i", "v")), axis_name="v")(x[:, :1])[0],
    ]
    for k, body in enumerate(bodies):
        f = spmd.shard_map(body, mesh, in_specs=P("i"), out_specs=P("i"), check_rep=False)
        result = spmd.gather((md.jit(f) if compiled else f)(x))
        assert result.dtype == numpy.float64, body
        expected = x.mean(0)[:1] if k == 3 else x.mean(0)
        numpy.testing.assert_allclose(result.reshape(-1, len(expected)), [expected] * mesh.size, rtol=1e-15)


# ---------------------------------------------------------------- directions that vary, of a point that does not


@md.custom_jvp
def cubes(w):
    return np.sum(w**3)


cubes.defjvp(lambda primals, tangents: (cubes(*primals), np.sum(3 * primals[0] ** 2 * tangents[0])))

#: Derivatives at w in the direction a, which is each rank's own.
DIRECTIONS = {
    "jvp": lambda w, a: md.jvp(lambda w: np.sin(w) * np.sum(w), (w,), (a,))[1],
    "jvp of a mean": lambda w, a: md.jvp(lambda w: pmean(w**2, "i"), (w,), (a,))[1] + a,
    "jvp of a rule": lambda w, a: md.jvp(cubes, (w,), (a,))[1] + a,
    "jvp of a jvp": lambda w, a: md.jvp(lambda w: md.jvp(np.sin, (w,), (a,))[1], (w,), (a,))[1],
    "jvp in a vmap": lambda w, a: md.vmap(lambda a: md.jvp(lambda w: w**3, (w[0],), (a,))[1])(a),
    "linearize": lambda w, a: md.linearize(lambda w: np.sin(w) * np.sum(w), w)[1](a),
    "linearize a mean": lambda w, a: md.linearize(lambda w: pmean(w**2, "i"), w)[1](a) + a,
    "hvp": lambda w, a: md.hvp(lambda w: np.sum(w**3), (w,), (a,)),
}


@shows("derivatives", "errors")
def check_direction(mesh, name, around):
    """It is that at the pbroadcast of the point."""
    f = DIRECTIONS[name]
    body, written = (lambda w, x: f(w, x[0])), (lambda w, x: f(pbroadcast(w, "i"), x[0]))
    inputs = W, data(mesh)
    for program in (body, written):
        results = [spmd.gather(AROUND[around](split(p, mesh))(*inputs)) for p in (program, written)]
        numpy.testing.assert_allclose(results[0], results[1], rtol=1e-12)


@shows("derivatives", "types")
def check_direction_by_hand(mesh, typed):
    f = lambda w, x: md.jvp(lambda w: np.sin(w), (w,), (x[0],))[1]  # noqa: E731
    result = spmd.gather(split(f, mesh, check_rep=typed)(W, data(mesh)))
    numpy.testing.assert_allclose(result, (numpy.cos(W) * data(mesh)[::2]).ravel(), rtol=1e-12)
