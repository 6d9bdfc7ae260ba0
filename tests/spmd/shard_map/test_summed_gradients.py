"""Gradients in a body, in what does not vary: sums over ranks; and warnings. Programs: `tests/checks/ranks.py`."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.programs.summed import W, data, gradients, loss, split, warned

LINE, PLANE = mesh(4), mesh(2, 2)
X = data(LINE)


def test_without_types_each_rank_has_its_own():
    f = mapped(lambda w, x: md.grad(loss)(w, x), LINE, (P(), P("i")), P("i"), check_rep=False)
    actual, result = warned(lambda: f(W, X))
    assert actual == []
    numpy.testing.assert_allclose(result.reshape(4, 3), gradients(LINE), rtol=1e-12)


@pytest.mark.parametrize(
    "w, x, axes",
    [
        (P(), P("i"), ["'i'"]),
        (P(), P(("i", "j")), ["('i', 'j')"]),
        (P("i"), P(("i", "j")), ["'j'"]),
        (P("i"), P("j"), ["'j'"]),
        (P("i"), P("i"), []),
    ],
)
def test_the_axes_are_those_along_which_the_result_varies_and_the_argument_does_not(w, x, axes):
    def body(w_block, x):
        total = np.sum(md.grad(lambda w: np.sum(w[0] * x))(w_block))
        return psum(total, tuple(w.axes)) if w.axes else total

    texts = [text for _, text in warned(lambda: mapped(body, PLANE, (w, x), P())(numpy.ones(4), numpy.ones(4)))[0]]
    assert [text.split("Return psum(loss, ")[1].split(") to say")[0] for text in texts] == axes


def test_bodies_in_bodies():
    """One says that it is summed along j, not along i; one has copies along j."""
    rows = lambda w, x: md.grad(lambda w: psum(np.sum((x @ w) ** 2), "j"))(w)  # noqa: E731
    body = lambda w, x: spmd.shard_map(rows, in_specs=(P("j"), P(None, "j")), out_specs=P("j"))(w, x)  # noqa: E731
    f = mapped(body, PLANE, (P(), P("i")), P(), axis_names={"i"})
    ((_, text),) = warned(lambda: f(numpy.ones(4), numpy.ones((4, 4))))[0]
    assert "varies along 'i'" in text and "'j'" not in text.replace("{j}", "")
    inner = lambda w, x: spmd.shard_map(lambda x: psum(x, "j"), in_specs=P("j"), out_specs=P("j"))(x)  # noqa: E731
    ((_, text),) = warned(lambda: split(inner, PLANE, axis_names={"i"})(W, numpy.ones((4, 3))))[0]
    assert "the same on all ranks along 'j'" in text
