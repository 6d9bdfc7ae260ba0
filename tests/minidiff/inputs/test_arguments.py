"""Arguments and results of transformations: arrays of numbers, in any layout, and nothing else."""

import functools
import re

import ml_dtypes
import numpy
import pytest

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks import samples
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.checks.transformations import NESTED, TRANSFORMATIONS

X = numpy.arange(1.0, 5.0)
LINE, ALL = mesh(2), {**TRANSFORMATIONS, **NESTED}


def total(x):
    return (x * 1.0).sum()


# ---------------------------------------------------------------- values that are not plain arrays


class Foreign:
    """An object that NumPy converts, and that is not an array."""

    def __array__(self, dtype=None, copy=None):
        return X


class Table(Foreign):
    """A class with the interface of a pandas Series or an xarray DataArray."""

    shape, dtype, ndim, size = (4,), numpy.dtype(float), 1, 4

    def to_numpy(self):
        return X


class Sparse:
    """A class like SciPy's sparse matrices: NumPy makes an array of one object of it."""

    shape, dtype, ndim, toarray = (4,), numpy.dtype(float), 1, X.copy


class WithUnit(numpy.ndarray):
    """A subclass of arrays, which may mean more than its numbers."""


NOT_PLAIN = [x for x, _ in samples.NOT_PLAIN.values()]
NOT_PLAIN += [X.view(WithUnit), numpy.datetime64("2024-02-29"), Table(), Sparse(), Foreign(), object()]
#: Refused at entrances; a Python number promotes weakly where it meets a traced value.
ALONE = [X.astype(ml_dtypes.float8_e4m3fn), 10**30]

double = md.custom_vjp(lambda x: 2.0 * x)
double.defvjp(lambda x: (2.0 * x, None), lambda _, ct: (2.0 * ct,))


def with_rule(f):
    f = md.custom_jvp(f)
    f.defjvp(lambda primals, tangents: (f(*primals), f(*tangents)))
    return f


def in_a_body(f, specs=P()):
    return mapped(lambda x: f(), LINE, P(), specs)(X)


#: Transformations whose function returns what is refused.
RESULTS = ["jvp", "vjp", "linearize", "jacrev", "jacfwd", "vmap", "jit", "make_tape", "checkpoint", "scan in jit"]
#: Those that are applied to several of the value, as one array.
STACKED = "vmap|^shard_map$"
#: Where values enter, as an argument, a result, or what a collective or a derivative is applied to.
ENTRANCES = {
    **{name: functools.partial(run, total) for name, run in ALL.items() if not re.search(STACKED, name)},
    **{f"result of {name}": lambda v, run=ALL[name]: run(lambda x: v, X) for name in RESULTS},
    "in a tree": lambda v: md.grad(lambda p: p["a"][0].sum())({"a": [v]}),
    "vmap": lambda v: md.vmap(np.sin)(v),
    "tangent": lambda v: md.jvp(total, (X,), (v,)),
    "tangent of linearize": lambda v: md.linearize(total, X)[1](v),
    "cotangent": lambda v: md.vjp(np.sin, X)[1](v),
    "scan": lambda v: md.scan(lambda c, x: (c, x), 0.0, v),
    "carry": lambda v: md.scan(lambda c, x: (c, x), v, X),
    "fori_loop": lambda v: md.fori_loop(0, 2, lambda i, c: c, v),
    "while_loop": lambda v: md.while_loop(lambda c: False, lambda c: c, v),
    "pred": lambda v: md.cond(v, lambda: 1.0, lambda: 2.0),
    "switch": lambda v: md.switch(0, [total], v),
    "custom_vjp": lambda v: double(v),
    "custom_jvp": lambda v: with_rule(lambda x: 3.0 * x)(v),
    "result of a rule": lambda v: md.grad(with_rule(lambda x: v))(X),
    "stop_gradient": lambda v: md.stop_gradient(v),
    "linear_transpose": lambda v: md.linear_transpose(lambda x: 2.0 * x, X)(v),
    "result of shard_map": lambda v: in_a_body(lambda: v),
    "distribute": lambda v: spmd.distribute(v, LINE, P()),
    "reshard": lambda v: spmd.reshard(v, P()),
    "psum": lambda v: in_a_body(lambda: collectives.psum(v, "i")),
    "all_gather": lambda v: in_a_body(lambda: collectives.all_gather(v, "i"), P("i")),
    "collective of vmap": lambda v: md.vmap(lambda x: collectives.psum(v, "i"), axis_name="i")(X),
    "array": lambda v: md.grad(lambda x: np.array([x, v]).sum())(X),
}
#: What a traced value meets.
MEETINGS = {
    "*": lambda x, v: x * v,
    "@": lambda x, v: x @ v,
    "function": lambda x, v: np.arctan2(x, v),
    "list": lambda x, v: np.stack([x, v]),
    "einsum": lambda x, v: np.einsum("i,i->i", x, v),
    "where": lambda x, v: np.where(x > 1, x, v),
    "at": lambda x, v: x.at[:].set(v),
}


@each("entrance", ENTRANCES)
@each("value", [*NOT_PLAIN, *ALONE], ids=lambda x: type(x).__name__)
def test_values_that_are_not_plain_are_refused(entrance, value):
    with pytest.raises(TypeError, match="expected an array "):
        ENTRANCES[entrance](value)


@each("transformation", TRANSFORMATIONS)
@each("meeting", MEETINGS)
@each("value", NOT_PLAIN, ids=lambda x: type(x).__name__)
def test_traced_values_meet_no_values_that_are_not_plain(transformation, meeting, value):
    with pytest.raises(TypeError, match="expected an array "):
        TRANSFORMATIONS[transformation](lambda x: MEETINGS[meeting](x, value), X)


# ---------------------------------------------------------------- arrays in every layout


def memory_mapped(path):
    numpy.save(path / "x.npy", X)
    return numpy.load(path / "x.npy", mmap_mode="r")


def unaligned(path):
    x = numpy.zeros(4, [("pad", "i1"), ("x", float)])["x"]
    x[:] = X
    return x


LAYOUTS = [
    memory_mapped,
    unaligned,
    lambda path: X.astype(X.dtype.newbyteorder("S")),
    lambda path: numpy.stack([X, X], 1)[:, 0],
    lambda path: X[::-1].copy()[::-1],
]


@each("transformation", TRANSFORMATIONS)
@each("layout", LAYOUTS)
def test_arrays_of_any_layout(transformation, layout, tmp_path):
    x, run = layout(tmp_path), TRANSFORMATIONS[transformation]
    md.tree.map(numpy.testing.assert_array_equal, *[run(lambda y, z=z: np.sin(y) * z, X) for z in (x, X)])
    for f in (md.grad(lambda x: (x * x).sum()), md.jit(lambda x: 2 * x), md.vmap(lambda x: 2 * x)):
        assert type(f(x)) is numpy.ndarray and numpy.array_equal(f(x), 2 * X)
