"""Bodies that run eagerly: what they print, where they may branch, and the types that they see."""

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped, mesh

LINE, PLANE = mesh(4), mesh(2, 2)
X = np.arange(16.0).reshape(4, 4)


def columns(f, in_specs=P(None, "j"), out_specs=P(None, "j")):
    return spmd.shard_map(f, in_specs=in_specs, out_specs=out_specs)


def rows(f, out_specs=P("i")):
    return mapped(f, PLANE, P("i"), out_specs, axis_names={"i"})


def show(x):
    print(x)
    return x


def test_printed_values_say_whose_they_are(capsys, golden):
    mapped(show, PLANE, P("i", "j"), P("i", "j"))(X)
    md.grad(mapped(lambda x: psum(show(x).sum(), "i"), LINE, P("i"), P()))(X[0])
    rows(columns(lambda x: show(2 * x)))(X)
    rows(show)(spmd.distribute(X, PLANE, P("i", "j")))  # split along an axis that is not mapped over
    golden("prints_of_bodies", capsys.readouterr().out)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bodies_branch_where_all_ranks_agree(sign):
    f = mapped(lambda x: sign * psum(x, "i").sum() if psum(x.sum(), "i") * sign > 0 else 0.0, LINE, P("i"), P())
    np.testing.assert_array_equal(md.grad(f)(sign * np.ones(4)), sign * np.ones(4))
    z = columns(lambda y: sign * psum(y.sum(), ("i", "j")), out_specs=P())
    for x in (X, spmd.distribute(X, PLANE, P("i", "j"))):
        np.testing.assert_array_equal(rows(lambda x: x if z(x) > 0 else -x)(x), sign * X)
    np.testing.assert_array_equal(rows(lambda x: x * float(psum(x, "i")[0, 0]))(X), X * 8)
