"""`md.pure_callback` in all transformations, against functions of NumPy; `callbacks.md` shows single calls."""

import numpy
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, psum
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.samples import check_each, each

METHODS = ("sequential", "expand_dims", "broadcast_all")


def sin_of(method="sequential"):
    """`np.sin` by a callback, with a rule in which the cosine is one too."""

    def by_callback(f):
        return md.custom_jvp(lambda x: md.pure_callback(f, md.typeof(x), x, vmap_method=method))

    sin, cos = by_callback(numpy.sin), by_callback(numpy.cos)
    sin.defjvps(lambda t, out, x: t * cos(x))
    cos.defjvps(lambda t, out, x: -t * sin(x))
    return sin


X = numpy.linspace(-1.0, 2.0, 6).reshape(2, 3)
XS = numpy.stack([X, -X])

#: Programs `(sin, x) -> y`.
PROGRAMS = {
    "once": lambda sin, x: 2 * sin(x * x),
    "twice": lambda sin, x: sin(sin(x)) + sin(x),
    "in a scan": lambda sin, x: md.scan(lambda c, row: (sin(c + row), sin(row)), x[0], x),
    "in a map": lambda sin, x: md.map(sin, x),
    "in a map of batches": lambda sin, x: md.map(sin, x.reshape(-1), batch_size=4),
    "in a fori_loop": lambda sin, x: md.fori_loop(0, 3, lambda i, x: sin(x + i), x),
    "in a branch": lambda sin, x: md.cond(x[0, 0] < 0, sin, lambda x: -sin(x), x),
    "in a checkpoint": lambda sin, x: md.checkpoint(lambda x: sin(sin(x)))(x),
    "in a compiled function": lambda sin, x: md.jit(lambda x: sin(sin(x)))(x),
    "under vmap": lambda sin, x: md.vmap(sin)(x),
    "under vmaps": lambda sin, x: md.vmap(md.vmap(lambda x: sin(x)), in_axes=1)(x),
    "of a gradient": lambda sin, x: md.vmap(md.grad(lambda row: np.sum(sin(row) * row)))(x),
}


def total(f):
    return lambda x: sum(np.sum(y * y) for y in md.tree.leaves(f(x)))


#: Transformations of a function of `X`.
USES = {
    "values": lambda f: f(X),
    "jit": lambda f: md.jit(f)(X),
    "tape": lambda f: md.make_tape(f)(X)(X),
    "jvp": lambda f: md.jvp(f, (X,), (numpy.cos(X),)),
    "jit of grad": lambda f: md.jit(md.grad(total(f)))(X),
    "grad of jit": lambda f: md.grad(md.jit(total(f)))(X),
    "hessian": lambda f: md.grad(lambda x: np.sum(md.grad(total(f))(x) ** 2))(X),
}
BATCHES = {
    "vmap": lambda f: md.vmap(f)(XS),
    "jit of vmap": lambda f: md.jit(md.vmap(f, in_axes=2))(numpy.moveaxis(XS, 0, 2)),
    "vmap of grad": lambda f: md.vmap(md.grad(total(f)))(XS),
}


def assert_same(actual, expected):
    for x, y in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        assert_allclose(spmd.gather(x), spmd.gather(y), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_numpy(name):
    uses = [(use, "sequential") for use in (USES | BATCHES).values()]
    if "vmap" in name or name == "once":
        uses += [(use, method) for method in METHODS[1:] for use in (USES | BATCHES).values()]
    program, cases = PROGRAMS[name], []
    for use, method in uses:
        by_callback, by_numpy = (lambda x, sin=sin: program(sin, x) for sin in (sin_of(method), np.sin))
        cases.append((method, lambda use=use, f=by_callback, g=by_numpy: assert_same(use(f), use(g))))
    check_each(cases)


# ---------------------------------------------------------------- errors

NUMBER = md.ShapedArray((), float)
no_rule = lambda x: np.sum(md.pure_callback(numpy.sin, md.typeof(x), x))  # noqa: E731
closes = lambda a: np.sum(md.pure_callback(lambda x: a * x, NUMBER, 1.0))  # noqa: E731
differs = lambda x: md.pure_callback(lambda x: {"y": x}, {"y": md.ShapedArray((4,), float)}, x)  # noqa: E731
#: Calls that are refused; their messages are in `tests/messages/operations.md`.
REFUSED = [
    *(lambda f=f, t=t: t(f)(1.0) for f in (no_rule, closes) for t in (md.grad, md.jacfwd)),
    *(lambda f=f: md.jit(md.grad(f))(1.0) for f in (no_rule, closes)),
    *(lambda f=f: md.grad(md.jit(f))(1.0) for f in (no_rule, closes)),
    *(lambda f=f: md.vmap(md.grad(f))(numpy.ones(2)) for f in (no_rule, closes)),
    *(lambda run=run: run(differs)(numpy.ones(3)) for run in (lambda f: f, md.jit)),
    lambda: md.map(differs, numpy.ones((1, 3))),
]


@each("call", REFUSED)
def test_what_is_refused_is_refused_in_all_transformations(call):
    with pytest.raises(TypeError):
        call()


@each("kind", [ValueError, TypeError, AttributeError, KeyError])
@each("run", [lambda f: f, md.jit, md.vmap, md.checkpoint])
def test_its_own_errors_are_left_as_they_are(kind, run):
    def fails(x):
        raise kind("of a callback")

    with pytest.raises(kind) as caught:
        run(lambda x: md.pure_callback(fails, md.typeof(x), x))(numpy.ones(3))
    assert type(caught.value) is kind
    assert caught.value.args == ("of a callback",)
    assert "fails" in [entry.name for entry in caught.traceback]


# ---------------------------------------------------------------- on ranks


def check_on_ranks(mesh, check_rep=True):
    """Each rank calls it with its own block: values, derivatives, in loops and compiled, against NumPy's."""
    x, w = numpy.linspace(-1.0, 2.0, 3 * mesh.size), numpy.float64(0.7)

    def loss(sin):
        def body(w, x):
            y, _ = md.scan(lambda c, e: (sin(c + e), None), sin(w * x), x)
            y = md.vmap(sin)(y)
            y = md.cond(axis_index("i") == 0, sin, lambda y: 2 * y, y) if check_rep else y
            return psum(np.sum(y * sin(w)), "i")

        return spmd.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_rep=check_rep)

    for f, run in ((sin_of("expand_dims"), lambda f: f), (sin_of(), md.jit)):
        for use in (lambda f: md.value_and_grad(f, (0, 1)), lambda f: lambda *xs: md.jvp(f, xs, xs)):
            assert_same(run(use(loss(f)))(w, x), use(loss(np.sin))(w, x))


def check_calls_of_ranks(mesh):
    """Whatever the vmap_method: of a varying value one call a rank, of one that is the same on all ranks, one."""
    n, calls = mesh.size, []

    def noted(x):
        calls.append(numpy.shape(x))
        return numpy.sum(x)

    for method in METHODS[:2]:
        call = lambda x: md.pure_callback(noted, NUMBER, x, vmap_method=method)  # noqa: B023, E731
        body = lambda x, w: (call(x)[None], call(w))  # noqa: B023, E731
        f = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=(P("i"), P()))
        for run in (f, md.jit(f), md.jit(f)):
            calls.clear()
            sums, whole = run(numpy.arange(2.0 * n), numpy.ones((3, 1)))
            assert sorted(calls) == [(2,)] * (n if mesh.backend == "simulated" else 1) + [(3, 1)]
            assert_array_equal(spmd.gather(sums), numpy.arange(2.0 * n).reshape(n, 2).sum(1))
            assert whole == 3.0


def check_sharded(mesh):
    """Outside of bodies, it takes whole arrays."""
    x = numpy.arange(2.0 * mesh.size)
    for run in (lambda f: f, md.jit):
        f = run(lambda x: md.pure_callback(numpy.cumsum, md.typeof(x), x))
        assert_array_equal(spmd.gather(f(spmd.distribute(x, mesh, P("i")))), numpy.cumsum(x))


@pytest.mark.parametrize("check_rep", [True, False], ids=["typed", "untyped"])
def test_on_ranks(check_rep):
    check_on_ranks(mesh(2), check_rep)


@each("check", [check_calls_of_ranks, check_sharded])
def test_calls_on_ranks(check):
    check(mesh(2))
