"""Transformations as decorators: options, names, signatures, and keywords that are not there."""

import copy
import functools
import inspect
import pickle
import re

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.errors.other_libraries import suggestions
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.samples import each

X = numpy.array([1.0, 2.0, 3.0, 4.0])
INSTEAD = suggestions("keywords")


def energy(x, n=2):
    """The energy of x."""
    return (x**n).sum() if np.ndim(x) else x**n


#: Each with options that it needs, or that are not those by default, and arguments of the resulting function.
TRANSFORMATIONS = {
    "jit": (md.jit, {"static_argnums": 1}, (X, 2)),
    "grad": (md.grad, {"argnums": (0,)}, (X, 2)),
    "value_and_grad": (md.value_and_grad, {"argnums": (0,)}, (X, 2)),
    "jacfwd": (md.jacfwd, {"argnums": (0,)}, (X, 2)),
    "jacrev": (md.jacrev, {"argnums": (0,)}, (X, 2)),
    "hessian": (md.hessian, {"argnums": (0,)}, (X, 2)),
    "vmap": (md.vmap, {"in_axes": (0, None)}, (X, 2.0)),
    "checkpoint": (md.checkpoint, {"policy": md.checkpoint_policies.nothing_saveable}, (X, 2)),
    "make_tape": (md.make_tape, {}, (X, 2)),
    "shard_map": (spmd.shard_map, {"mesh": mesh(2), "in_specs": P(), "out_specs": P()}, (numpy.float64(2.0), 2)),
}
OTHERS = (md.scan, md.fori_loop, md.while_loop, md.cond, md.switch, spmd.make_mesh)
OTHERS += (md.scipy.sparse.linalg.cg, md.scipy.sparse.linalg.gmres)
FUNCTIONS = {**{name: f for name, (f, *_) in TRANSFORMATIONS.items()}, **{f.__name__: f for f in OTHERS}}


def same(a, b):
    md.tree.map(lambda x, y: numpy.testing.assert_array_equal(*map(str, (x, y))), a, b)


class Model:
    def __call__(self, x, n=2):
        return energy(x, n)


# ---------------------------------------------------------------- decorators


@each("name", TRANSFORMATIONS)
def test_decorators_with_and_without_options(name):
    transform, options, args = TRANSFORMATIONS[name]
    expected = transform(energy, **options)(*args)
    for make in (transform(**options), functools.partial(transform, **options)):
        for f in (energy, Model(), functools.partial(energy)):
            same(make(f)(*args), expected)
    assert callable(transform(numpy.sin, **options))


@each("name", TRANSFORMATIONS)
def test_the_name_the_docstring_and_the_signature_stay(name):
    transform, options, _ = TRANSFORMATIONS[name]
    f = transform(energy, **options)
    assert (f.__name__, f.__qualname__, f.__module__) == ("energy", "energy", __name__)
    assert (f.__doc__, inspect.signature(f)) == ("The energy of x.", inspect.signature(energy))
    assert f is not energy and energy.__name__ == "energy"


# ---------------------------------------------------------------- jit


class Holder:
    @md.jit(static_argnames="n")
    def method(self, x, n=2):
        return x**n


@md.grad
def decorated_gradient(x):
    return x**2


@each("f", [Holder.method, decorated_gradient, md.jvp, md.scan, md.nn.relu, spmd.make_mesh, np.dot])
def test_functions_of_modules_are_pickled_by_name(f):
    assert pickle.loads(pickle.dumps(f)) is f is copy.deepcopy(f)


@each("f", [md.jit(energy), md.jit(energy, static_argnums=1)])
def test_pickles(f):
    for _ in range(2):  # the second time it has compiled something
        for again in (pickle.loads(pickle.dumps(f)), copy.deepcopy(f)):
            assert again is not f and again.__name__ == "energy" and again.static == f.static and again(X) == f(X)


def powered(x, n, *, mode="power"):
    """Python branches on what must be static."""
    return x**n if mode == "power" and n > 1 else x


@settings(max_examples=25)
@given(
    numbers=st.sets(st.sampled_from([1, -1])),
    names=st.sets(st.sampled_from(["n", "mode"])),
    by_name=st.sampled_from([(), ("n",), ("x", "n")]),  # no argument by position follows one by name
    n=st.integers(1, 3),
    mode=st.sampled_from([{}, {"mode": "power"}, {"mode": "none"}]),
)
def test_static_arguments_by_position_and_by_name(numbers, names, by_name, n, mode):
    """However they are declared, and however they are passed."""
    f = md.jit(powered, tuple(numbers if "n" in names or numbers else {1}), tuple(names | {"mode"}))
    values = {"x": X, "n": n}
    args, named = [values[k] for k in values if k not in by_name], {k: values[k] for k in by_name}
    for _ in range(2):
        assert (f(*args, **named, **mode) == powered(X, n, **mode)).all()
    assert len(f.programs) == 1
    loss = lambda f: md.grad(lambda x: f(x, n, **mode).sum())(X)  # noqa: E731
    assert (loss(f) == loss(powered)).all()


# ---------------------------------------------------------------- keywords


def keywords_of(f):
    parameters = inspect.signature(f).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


@each("name, keyword", [(name, keyword) for name, rows in INSTEAD.items() for keyword in rows], ids=str)
def test_keywords_of_other_libraries_are_refused_with_advice(name, keyword):
    assert keyword not in keywords_of(FUNCTIONS[name])
    for call in (lambda **k: FUNCTIONS[name](energy, **k), lambda **k: FUNCTIONS[name](**k)(energy)):
        with pytest.raises(TypeError, match=re.escape(f"{name} takes no {keyword}=: {INSTEAD[name][keyword]}")):
            call(**{keyword: 1})
    assert {*re.findall(r"write (\w+)=", INSTEAD[name][keyword])} <= {*keywords_of(FUNCTIONS[name])}


@each("name", FUNCTIONS)
def test_misspelled_keywords_name_the_nearest(name):
    for keyword in keywords_of(FUNCTIONS[name]):
        if len(keyword) > 4:
            with pytest.raises(TypeError, match=f"{name} takes no {keyword}s=, .*Did you mean '{keyword}'"):
                FUNCTIONS[name](energy, **{f"{keyword}s": 1})
