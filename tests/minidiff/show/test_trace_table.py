"""Trace tables agree with the transformations; `trace_tables.md` shows some."""

import minidiff as md
import minidiff.numpy as np
from collectives import psum
from minidiff.core.primitive import Primitive
from minidiff.show.trace_table import width
from minidiff.values.dtypes import float0
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

W, X = np.linspace(-1.0, 1.0, 6).reshape(3, 2), np.arange(12.0).reshape(4, 3)


class SineAndCosine(Primitive):
    """An operation of several results."""

    multiple_results = True

    def jvp(self, primals, tangents, params):
        s, c = self.bind(*primals)
        return [s, c], [c * tangents[0], -s * tangents[0]]


both = SineAndCosine("both", lambda x: [np.sin(x), np.cos(x)], lambda x: [(x.shape, x.dtype)] * 2)

PROGRAMS = {
    "a constant": (lambda x: (x * 0 + 1.0, 3.0), (2.0,)),
    "trees": (lambda p, x: {"loss": np.sum(np.tanh(x @ p["w"]) ** 2), "most": x.max(axis=0)}, ({"w": W}, X)),
    "integers": (lambda x, n: (x * n, n + 1, np.argmax(x)), (W, 3)),
    "constants": (lambda x: x * np.array([1.0, 2.0]) + np.arange(2), (np.array([3.0, 4.0]),)),
    "one of several results": (lambda x: both.bind(x)[1] * 2, (W,)),
    "single precision": (lambda x: np.exp(-x).sum(), (W.astype(np.float32),)),
    "complex": (lambda z: np.exp(1j * z) / z, (1.0 + 2.0j,)),
    "gradients": (md.grad(lambda x: np.sin(x) * x), (2.0,)),
    "a shard_map": (mapped(lambda x: psum(np.sum(x * x), "i"), mesh(2), P("i"), P()), (np.ones(4),)),
    "empty": (lambda x: x.sum(), (np.ones((0, 3)),)),
}


@each("name", PROGRAMS)
def test_tables_agree_with_the_transformations(name):
    f, args = PROGRAMS[name]
    reverse, forward = md.trace_table(f, *args, mode="reverse"), md.trace_table(f, *args)
    out, pullback = md.vjp(f, *args)
    _agree(reverse.result, out)
    _agree(forward.result, out)
    _agree(reverse.derivative, pullback(md.tree.map(np.ones_like, out)))
    leaves = [np.asarray(x) for x in md.tree.leaves(args)]
    first = next(i for i, x in enumerate(leaves) if x.dtype.kind in "fc")
    seeds = [np.full(x.shape, i == first, x.dtype if x.dtype.kind in "fc" else float0) for i, x in enumerate(leaves)]
    _agree(forward.derivative, md.jvp(f, args, md.tree.unflatten(md.tree.structure(args), seeds))[1])
    for table in (forward, reverse):
        lines = str(table).splitlines()
        assert len({width(line.partition("│")[0]) for line in lines}) == 1


def _agree(actual, expected):
    assert md.tree.structure(actual) == md.tree.structure(expected)
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected)):
        assert np.shape(a) == np.shape(e)
        if np.asarray(e).dtype.kind in "fc":
            np.testing.assert_allclose(a, e, rtol=1e-6)
