"""A gradient in a body, of a result that varies, in an argument that does not: a sum over ranks, and a warning."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.programs import summed as programs
from tests.programs.summed import SILENT, W, data, gradients, loss, mapped, split, warned

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")
PLANE = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
X = data(MESH)


def test_without_types_each_rank_has_its_own():
    f = spmd.shard_map(
        lambda w, x: md.grad(loss)(w, x), MESH, in_specs=(P(), P("i")), out_specs=P("i"), check_rep=False
    )
    actual, result = warned(lambda: f(W, X))
    assert actual == []
    numpy.testing.assert_allclose(result.reshape(4, 3), gradients(MESH), rtol=1e-12)


def test_the_message_names_function_argument_types_and_axes():
    def error(x, params):
        return np.sum(params["w"] * x)

    ((_, text),) = warned(lambda: mapped(MESH, lambda w, x: md.grad(error, argnums=1)(x, {"w": w})["w"])(W, X))[0]
    assert text == (
        "grad: the result of error, f64[]{i}, varies along 'i', but argument 1['w'] of error, f64[3], does not: so "
        "this is the gradient of the sum of the results over 'i'. Return psum(loss, 'i') to say so; the gradient is "
        "the same. For that of the mean, return pmean(loss, 'i'); for each rank's own, pass pbroadcast(w, 'i') as the "
        "argument"
    )


@pytest.mark.parametrize("size", [1, 2])
def test_a_mesh_of_one_rank_too(size):
    """Types do not depend on sizes: the program means the same on more ranks."""
    mesh = spmd.make_mesh((size,), ("i",), backend="simulated")
    assert len(warned(lambda: mapped(mesh, SILENT["grad"])(W, data(mesh)))[0]) == 1


def test_the_axes_are_those_along_which_the_result_varies_and_the_argument_does_not():
    def axes_of(w_spec, x_spec):
        def body(w, x):
            g = md.grad(lambda w: np.sum(w[0] * x))(w)
            return psum(np.sum(g), tuple(w_spec.axes)) if w_spec.axes else np.sum(g)

        f = spmd.shard_map(body, PLANE, in_specs=(w_spec, x_spec), out_specs=P())
        return [text.split("Return psum(loss, ")[1].split(") to say")[0] for _, text in warned(lambda: f(W4, W4))[0]]

    W4 = numpy.ones(4)
    assert axes_of(P(), P("i")) == ["'i'"]
    assert axes_of(P(), P(("i", "j"))) == ["('i', 'j')"]
    assert axes_of(P("i"), P(("i", "j"))) == ["'j'"]
    assert axes_of(P("i"), P("j")) == ["'j'"]
    assert axes_of(P("i"), P("i")) == []


def test_bodies_in_bodies():
    def rows(w, x):
        return md.grad(lambda w: psum(np.sum((x @ w) ** 2), "j"))(w)  # says that it is summed along j, not along i

    def body(w, x):
        return spmd.shard_map(rows, in_specs=(P("j"), P(None, "j")), out_specs=P("j"))(w, x)

    f = spmd.shard_map(body, PLANE, in_specs=(P(), P("i")), out_specs=P(), axis_names={"i"})
    ((_, text),) = warned(lambda: f(numpy.ones(4), numpy.ones((4, 4))))[0]
    assert "varies along 'i'" in text and "'j'" not in text.replace("{j}", "")


def test_an_axis_of_vmap_has_no_types():
    f = md.vmap(lambda w, x: md.grad(loss)(w, x), in_axes=(None, 0), axis_name="i")
    assert warned(lambda: f(W, X.reshape(4, 2, 3)))[0] == []


# ---------------------------------------------------------------- the same block several times


def test_copies_without_types():
    assert warned(lambda: split(programs.COPIES["a sum"], MESH, check_rep=False)(W, X))[0] == []


def test_copies_in_a_body_in_a_body():
    inner = lambda w, x: spmd.shard_map(lambda x: psum(x, "j"), in_specs=P("j"), out_specs=P("j"))(x)  # noqa: E731
    ((_, text),) = warned(lambda: split(inner, PLANE, axis_names={"i"})(W, numpy.ones((4, 3))))[0]
    assert "the same on all ranks along 'j', but its out_specs entry P('j')" in text
