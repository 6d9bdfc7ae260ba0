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
from collectives import psum
from minidiff.errors.other_libraries import suggestions
from spmd import P
from tests.checks.samples import each

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
X = numpy.array([1.0, 2.0, 3.0, 4.0])
INSTEAD = suggestions("keywords")

#: Each with options that it needs, or that are not those by default.
TRANSFORMATIONS = {
    "jit": (md.jit, {"static_argnums": 1}),
    "grad": (md.grad, {"argnums": (0,)}),
    "value_and_grad": (md.value_and_grad, {"argnums": (0,)}),
    "jacfwd": (md.jacfwd, {"argnums": (0,)}),
    "jacrev": (md.jacrev, {"argnums": (0,)}),
    "hessian": (md.hessian, {"argnums": (0,)}),
    "vmap": (md.vmap, {"in_axes": (0, None)}),
    "checkpoint": (md.checkpoint, {"policy": md.checkpoint_policies.nothing_saveable}),
    "shard_map": (spmd.shard_map, {"mesh": MESH, "in_specs": (P("i"), P()), "out_specs": P("i")}),
}
OTHERS = {
    "make_tape": md.make_tape,
    "scan": md.scan,
    "fori_loop": md.fori_loop,
    "while_loop": md.while_loop,
    "cond": md.cond,
    "switch": md.switch,
    "make_mesh": spmd.make_mesh,
    "cg": md.scipy.sparse.linalg.cg,
    "gmres": md.scipy.sparse.linalg.gmres,
}
FUNCTIONS = {**{name: f for name, (f, _) in TRANSFORMATIONS.items()}, **OTHERS}


def energy(x, n=2):
    """The energy of x."""
    return (x**n).sum() if np.ndim(x) else x**n


def same(a, b):
    md.tree.map(numpy.testing.assert_array_equal, a, b)


def arguments_of(name):
    return (X[:, None], 2) if name == "shard_map" else (X, 2.0 if name == "vmap" else 2)


def for_ranks(name):
    return (lambda x, n=2: x**n) if name == "shard_map" else energy


# ---------------------------------------------------------------- decorators


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_decorators_with_and_without_options(name):
    transform, options = TRANSFORMATIONS[name]
    f, args = for_ranks(name), arguments_of(name)
    expected = transform(f, **options)(*args)
    same(transform(**options)(f)(*args), expected)
    same(functools.partial(transform, **options)(f)(*args), expected)
    if name != "shard_map":
        same(transform()(energy)(X), transform(energy)(X))


def test_decorators_as_they_are_written():
    @spmd.shard_map(mesh=MESH, in_specs=P("i"), out_specs=P())
    def total(x):
        """The sum over ranks."""
        return psum(x.sum(), "i")

    @md.jit(static_argnums=1)
    def power(x, n):
        return x**n if n > 0 else x

    @md.jit
    @md.grad
    def slope(x):
        return (x**3).sum()

    assert (total(X), total.__name__, total.__doc__) == (10.0, "total", "The sum over ranks.")
    assert (power(3.0, 2), power.__name__) == (9.0, "power")
    same(slope(X), 3 * X**2)
    assert slope.__name__ == "slope"


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_the_name_the_docstring_and_the_signature_are_kept(name):
    transform, options = TRANSFORMATIONS[name]
    f = transform(energy, **options)
    assert (f.__name__, f.__qualname__, f.__module__) == ("energy", "energy", __name__)
    assert (f.__doc__, inspect.signature(f)) == ("The energy of x.", inspect.signature(energy))
    assert transform(energy, **options) is not f and energy.__name__ == "energy"


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_callables_that_are_no_functions(name):
    class Model:
        def __call__(self, x, n=2):
            return for_ranks(name)(x, n)

    transform, options = TRANSFORMATIONS[name]
    args = arguments_of(name)
    expected = transform(for_ranks(name), **options)(*args)
    for f in (Model(), functools.partial(for_ranks(name))):
        same(transform(f, **options)(*args), expected)
    assert callable(transform(numpy.sin, **options))


def test_make_tape_keeps_the_name():
    f = md.make_tape(energy)
    assert (f.__name__, inspect.signature(f)) == ("energy", inspect.signature(energy))
    assert str(md.make_tape()(energy)(X)) == str(f(X))


def test_attributes_of_a_function_stay_its_own():
    @md.custom_jvp
    def f(x):
        return x

    assert not hasattr(md.jit(f), "defjvp") and not hasattr(md.jit(f), "jvp")
    assert md.jit(md.jit(energy)).programs == {}


# ---------------------------------------------------------------- jit


def test_repr_of_a_jit_says_what_it_is():
    f = md.jit(energy, static_argnames="n")
    text = "<jit of energy, static_argnums=(1,), static_argnames=('n',): {} compiled>"
    assert repr(f) == text.format("0 programs")
    f(X)
    assert repr(f) == text.format("1 program")
    assert repr(md.jit(md.grad(energy))) == "<jit of energy: 0 programs compiled>"


@md.jit(static_argnames="n")
def decorated(x, n=2):
    return x**n


class Holder:
    @md.jit
    def method(self, x):
        return x


@md.grad
def decorated_gradient(x):
    return x**2


def test_pickles():
    for f in (decorated, Holder.method, decorated_gradient):
        assert pickle.loads(pickle.dumps(f)) is f
        assert copy.deepcopy(f) is f
    for f in (md.jit(energy), md.jit(energy, static_argnums=1)):
        for _ in range(2):  # the second time it has compiled something
            again = pickle.loads(pickle.dumps(f))
            assert again is not f and again.__name__ == "energy" and again.static == f.static
            same(again(X), f(X))
            same(copy.deepcopy(f)(X), f(X))


def powered(x, n, *, mode="power"):
    """Python branches on what must be static."""
    return x**n if mode == "power" and n > 1 else x


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.sets(st.sampled_from([1, -1])),
    names=st.sets(st.sampled_from(["n", "mode"])),
    by_name=st.sets(st.sampled_from(["x", "n"])),
    n=st.integers(1, 3),
    mode=st.sampled_from([None, "power", "none"]),
)
def test_static_arguments_by_position_and_by_name(numbers, names, by_name, n, mode):
    """However they are declared, and however they are passed."""
    if "x" in by_name:
        by_name.add("n")  # no argument by position follows one by name
    numbers = numbers if "n" in names or numbers else {1}
    f = md.jit(powered, tuple(numbers), tuple(names | {"mode"}))
    given_, value = {"x": X, "n": n}, {} if mode is None else {"mode": mode}
    args = [x for name, x in given_.items() if name not in by_name]
    named = {name: given_[name] for name in by_name}
    same(f(*args, **named, **value), powered(X, n, **value))
    same(f(*args, **named, **value), powered(X, n, **value))
    assert len(f.programs) == 1
    same(md.grad(lambda x: f(x, n, **value).sum())(X), md.grad(lambda x: powered(x, n, **value).sum())(X))


def test_static_arguments_of_other_signatures():
    with pytest.raises(TypeError, match="static_argnums must be an int or a tuple of ints, got 'n'"):
        md.jit(energy, static_argnums="n")
    assert md.jit(lambda x, **settings: x * settings["k"], static_argnames="k")(2.0, k=3) == 6.0
    assert md.jit(energy, static_argnums=1)(X) == 30.0  # by default


# ---------------------------------------------------------------- keywords


def keywords_of(f):
    parameters = inspect.signature(f).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def test_the_table_is_of_functions_that_exist():
    assert set(INSTEAD) <= set(FUNCTIONS)
    for name, rows in INSTEAD.items():
        assert not set(rows) & set(keywords_of(FUNCTIONS[name])), name


@each("name, keyword", [(name, keyword) for name, rows in INSTEAD.items() for keyword in rows])
def test_keywords_of_other_libraries_are_refused_with_what_to_write(name, keyword):
    advice = INSTEAD[name][keyword]
    for call in (
        lambda: FUNCTIONS[name](energy, **{keyword: 1}),
        lambda: FUNCTIONS[name](**{keyword: 1})(energy),
    ):
        with pytest.raises(TypeError, match=re.escape(f"{name} takes no {keyword}=: {advice}")):
            call()
    for written in re.findall(r"write (\w+)=", advice):
        assert written in keywords_of(FUNCTIONS[name])


@each("name", FUNCTIONS)
def test_misspelled_keywords_name_the_nearest(name):
    for keyword in keywords_of(FUNCTIONS[name]):
        if len(keyword) > 4:
            with pytest.raises(
                TypeError, match=rf"{name} takes no {keyword}s?=, .*{keyword}=.* Did you mean '{keyword}'"
            ):
                FUNCTIONS[name](energy, **{f"{keyword}s": 1})


def test_unknown_keywords_are_refused_at_once():
    """By the decorator, and where they are settings, too."""
    with pytest.raises(TypeError, match="jit takes no device=: it has no counterpart"):
        md.jit(device=0)(energy)
    with pytest.raises(TypeError, match=r"Did you mean 'bucket_bytes'\?"):
        md.jit(energy, bucket_byte=1)


def test_what_the_table_advises_is_so():
    same(md.vjp(lambda n, x: n * x, 3, 2.0)[1](1.0), (numpy.zeros((), md.values.dtypes.float0), 3.0))
    assert md.jacrev(lambda z: z**2, holomorphic=True)(1j) == 2j
    assert md.make_tape(energy)(X).out_types == [md.typeof(1.0)]
    split = spmd.distribute(numpy.ones((4, 3)), MESH, P("i"))
    assert md.vmap(np.sin)(split).spec == P("i")
    assert md.jit(np.sin)(split).spec == P("i")
