"""shard_map: what bodies see, what types say, where the backward pass communicates, and what errors teach."""

from functools import partial

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pbroadcast, pmean, psum
from minidiff.compiler import factorizations
from spmd import P
from spmd.shard_map.interpreter import SPMD
from spmd.shard_map.lowering import UNROLLED
from spmd.shard_map.shard_map import without_types
from tests.checks.samples import check_raises, each
from tests.programs.on_blocks import assert_trees_close

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")
MESH2 = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")


def mapped(f, in_specs=P("i"), out_specs=P("i"), mesh=MESH, **options):
    return spmd.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def body_of(f, *args):
    """The body's tape of a function that is one shard_map."""
    (equation,) = md.make_tape(f)(*args).equations
    return equation.params["body"]


def operations(tape):
    return [eqn.primitive.name for eqn in tape.equations]


# ---------------------------------------------------------------- splitting and assembling


def test_trees_in_and_out():
    def f(pair, scale):
        return {"sum": psum(pair[0] * scale, "i"), "kept": [pair[1]]}

    out = mapped(f, (P("i"), P()), {"sum": P(), "kept": P("i")})((np.arange(4.0), np.arange(8)), 2.0)
    np.testing.assert_array_equal(out["sum"], [12.0])
    np.testing.assert_array_equal(out["kept"][0], np.arange(8))
    assert out["kept"][0].dtype == np.arange(8).dtype


def test_sharded_results_go_in_again_as_they_are():
    double = mapped(lambda x: 2 * x)
    y = double(np.arange(8.0))
    np.testing.assert_array_equal(double(y), 4 * np.arange(8.0))
    np.testing.assert_array_equal(mapped(lambda x: x, P(None), P())(y), 2 * np.arange(8.0))


def test_used_as_decorator():
    @partial(spmd.shard_map, mesh=MESH, in_specs=P("i"), out_specs=P())
    def total(x):
        """The total."""
        return psum(x.sum(), "i")

    assert total(np.arange(8.0)) == 28.0
    assert (total.__name__, total.__doc__) == ("total", "The total.")


# ---------------------------------------------------------------- eager bodies


def test_print_shows_ranks_and_coordinates(capsys):
    @partial(spmd.shard_map, mesh=MESH2, in_specs=P("i", "j"), out_specs=P("i", "j"))
    def f(x):
        print(x)
        return x

    f(np.arange(16).reshape(4, 4))
    assert capsys.readouterr().out == (
        "On rank 0 at mesh coordinates (i, j) = (0, 0):\n[[0 1]\n [4 5]]\n\n"
        "On rank 1 at mesh coordinates (i, j) = (0, 1):\n[[2 3]\n [6 7]]\n\n"
        "On rank 2 at mesh coordinates (i, j) = (1, 0):\n[[ 8  9]\n [12 13]]\n\n"
        "On rank 3 at mesh coordinates (i, j) = (1, 1):\n[[10 11]\n [14 15]]\n\n"
    )


def test_print_under_grad(capsys):
    def f(x):
        print("block:", x)
        return psum(x.sum(), "i")

    md.grad(mapped(f, P("i"), P()))(np.arange(4.0))
    assert capsys.readouterr().out.startswith("block: On rank 0 at mesh coordinates (i,) = (0,):\n[0.]\n")


@pytest.mark.parametrize("differentiate", [False, True])
def test_branching_where_all_ranks_agree(differentiate):
    def f(x):
        return psum(x, "i").sum() if psum(x.sum(), "i") > 0 else psum(-x, "i").sum()

    g = mapped(f, P("i"), P())
    if differentiate:
        np.testing.assert_array_equal(md.grad(g)(-np.ones(4)), -np.ones(4))
    assert g(-np.ones(4)) == g(np.ones(4)) == 4.0


def test_branching_where_ranks_may_differ():
    with pytest.raises(md.VarianceError, match=r"bool\[\]\{i\} varies along 'i'.*psum, pmax or pmin.*np.where"):
        mapped(lambda x: x if x.sum() > 0 else -x)(np.ones(4))


def test_axis_index_selects_parts():
    x = np.arange(4.0)
    np.testing.assert_array_equal(mapped(lambda b: np.take(x, axis_index("i")) + b)(np.zeros(4)), x)


def test_gradients_inside_a_body():
    """The parameter is the same on all ranks, and so is its gradient: the types sum it."""
    W, X = np.arange(3.0), np.arange(24.0).reshape(8, 3)

    def loss(w, x):
        return ((x @ w) ** 2).sum()

    inside = mapped(lambda w, x: md.grad(lambda w: psum(loss(w, x), "i"))(w), (P(), P("i")), P())
    np.testing.assert_allclose(inside(W, X), md.grad(loss)(W, X))
    local = mapped(lambda w, x: psum(md.grad(loss)(pbroadcast(w, "i"), x), "i"), (P(), P("i")), P())
    np.testing.assert_allclose(local(W, X), md.grad(loss)(W, X))


# ---------------------------------------------------------------- derivatives


@pytest.mark.parametrize("check_rep", [True, False])
@pytest.mark.parametrize("spec", [P("i"), P(), P(("i", "j")), P(None, "j")])
def test_identity_differentiates_to_identity(spec, check_rep):
    """The boundary is exact, with and without types, mapped and unmapped."""
    x = np.arange(16.0).reshape(4, 4)
    f = mapped(lambda x: x, spec, spec, MESH2, check_rep=check_rep)
    _, pullback = md.vjp(f, x)
    np.testing.assert_allclose(pullback(x)[0], x)
    np.testing.assert_allclose(md.jvp(f, (x,), (x,))[1], x)
    np.testing.assert_allclose(md.linearize(f, x)[1](x), x)
    np.testing.assert_allclose(md.linear_transpose(f, x)(x)[0], x)
    np.testing.assert_allclose(md.linear_transpose(lambda y: md.linear_transpose(f, x)(y)[0], x)(x)[0], x)


def test_scalar_residuals_stay_on_their_ranks():
    """A 0-d value that varies is kept for the backward pass: the block has no dimension to be stacked along."""

    def f(x):
        s = np.sum(x)
        return psum(np.sin(s) * s, "i")

    md.testing.check_grads(mapped(f, P("i"), P()), (np.arange(8.0),), order=3)


def test_a_result_that_does_not_depend_on_the_argument():
    f = mapped(lambda x: (psum(x, "i"), np.ones(2)), P("i"), (P(), P()))
    _, pullback = md.vjp(f, np.arange(4.0))
    np.testing.assert_array_equal(pullback((np.ones(1), np.ones(2)))[0], np.ones(4))
    assert_trees_close(md.jvp(f, (np.arange(4.0),), (np.ones(4),))[1], (np.array([4.0]), np.zeros(2)))


def test_an_unused_argument_has_a_zero_gradient():
    f = mapped(lambda x, y: psum(x.sum(), "i"), (P("i"), P("i")), P())
    np.testing.assert_array_equal(md.grad(f, 1)(np.ones(4), np.ones(8)), np.zeros(8))


def test_integers_are_no_obstacle():
    f = mapped(lambda x, k: psum((x * k).sum(), "i"), (P("i"), P("i")), P())
    np.testing.assert_array_equal(md.grad(f)(np.ones(4), np.arange(4)), np.arange(4.0))


def test_float32_stays():
    f = mapped(lambda x: pmean((x**2).sum(), "i"), P("i"), P())
    value, gradient = md.value_and_grad(f)(np.ones(4, np.float32))
    assert value.dtype == gradient.dtype == np.float32


def test_closures_under_every_transformation():
    x = np.arange(4.0)

    def f(w):
        return mapped(lambda x: psum((x * np.sin(w)).sum(), "i"), P("i"), P())(x)

    def plain(w):
        return (x * np.sin(w)).sum()

    md.testing.check_grads(f, (0.3,), order=3)
    np.testing.assert_allclose(md.vmap(f)(np.arange(3.0)), md.vmap(plain)(np.arange(3.0)))
    np.testing.assert_allclose(md.vmap(md.grad(f))(np.arange(3.0)), md.vmap(md.grad(plain))(np.arange(3.0)))
    np.testing.assert_allclose(md.grad(md.grad(f))(0.3), md.grad(md.grad(plain))(0.3))
    np.testing.assert_allclose(md.make_tape(md.grad(f))(0.3)(0.3)[0], md.grad(plain)(0.3))


def test_closures_at_two_levels():
    """Each derivative is of its own variable, though the body sees both."""

    def f(a):
        def g(b):
            return mapped(lambda x: psum((x * a * b**2).sum(), "i"), P("i"), P())(np.ones(4))

        return md.grad(g)(3.0) * a

    np.testing.assert_allclose(md.grad(f)(2.0), 4 * 2 * 3.0 * 2 * 2.0)


def test_zero_tangents_have_the_type_of_their_result():
    """Also where a linearized function's result does not depend on its argument."""

    def body(x, w):
        _, f_linear = md.linearize(lambda w: (w, x), w)
        tangents = f_linear(w)
        assert [md.typeof(t).variance for t in tangents] == [frozenset(), {"i"}]
        return tangents

    assert_trees_close(mapped(body, (P("i"), P()), (P(), P("i")))(np.ones(4), 2.0), (2.0, np.zeros(4)))


@pytest.mark.parametrize("check_rep", [True, False])
def test_a_gradient_step_inside_is_differentiated_from_outside(check_rep):
    """An inner gradient in the body, of a parameter closed over, differentiated in that and in the step's length."""
    X, Y = np.arange(24.0).reshape(8, 3) / 24, np.cos(np.arange(8.0))

    def error(w, x, y):
        return np.sum((np.tanh(x @ w) - y) ** 2)

    def after_a_step(w, rate, x, y):
        return error(w - rate * md.grad(error)(w, x, y), x, y)

    def sharded(w, rate):
        def body(x, y):
            v = pbroadcast(w, "i")  # each rank takes a step of its own
            return psum(after_a_step(v, rate, x, y), "i")

        return mapped(body, (P("i"), P("i")), P(), check_rep=check_rep)(X, Y)

    def plain(w, rate):
        return sum(after_a_step(w, rate, x, y) for x, y in zip(np.split(X, 4), np.split(Y, 4)))

    args = (np.ones(3), 0.1)
    assert_trees_close(md.value_and_grad(sharded, (0, 1))(*args), md.value_and_grad(plain, (0, 1))(*args))
    md.testing.check_grads(sharded, args, order=2)


# ---------------------------------------------------------------- where the backward pass communicates


def loss_of(parameters, closed_over, use, **options):
    def loss(params, x):
        if closed_over:
            return mapped(lambda x: pmean(use(params, x), "i"), P("i"), P(), **options)(x)
        return mapped(lambda p, x: pmean(use(p, x), "i"), (P(), P("i")), P(), **options)(params, x)

    return loss


PARAMETERS = {"w": np.ones((3, 3)), "b": np.ones(3), "v": np.ones(3)}
INPUTS = np.arange(24.0).reshape(8, 3)


def network(p, x):
    return np.sum(np.tanh(x @ p["w"] + p["b"]) @ p["v"])


@pytest.mark.parametrize("closed_over", [True, False])
def test_one_psum_for_all_parameters_and_none_for_the_cotangent(closed_over):
    typed = spmd.communication(md.grad(loss_of(PARAMETERS, closed_over, network)))(PARAMETERS, INPUTS)
    assert typed.counts == {"psum": 1 + 1}
    untyped = loss_of(PARAMETERS, closed_over, network, check_rep=False)
    assert spmd.communication(md.grad(untyped))(PARAMETERS, INPUTS).counts == {"psum": 2 + len(PARAMETERS)}


TWICE = {
    "twice in products": lambda w, x: np.sum(np.tanh(x @ w) @ w),
    "and its transpose": lambda w, x: np.sum(np.tanh(x @ w) @ w.T),
    "and another shape of it": lambda w, x: np.sum(x @ w) + np.sum(x[0, 0] * w.reshape(9)),
    "and broadcast": lambda w, x: np.sum(x @ w + x @ np.broadcast_to(w, (2, 3, 3))),
}


@pytest.mark.parametrize("closed_over", [True, False])
@pytest.mark.parametrize("use", TWICE)
def test_a_weight_used_twice_costs_one_psum(use, closed_over):
    w = np.arange(9.0).reshape(3, 3) / 9
    loss = loss_of(w, closed_over, TWICE[use])
    assert spmd.communication(md.grad(loss))(w, INPUTS).counts == {"psum": 2}
    md.testing.check_grads(loss, (w, INPUTS / 24), order=2)


def test_second_derivatives_communicate_like_first():
    """The gradient's sums are of a parameter's cotangents again: no all-reduce of what all ranks know."""
    loss = loss_of(PARAMETERS, True, network)
    of_norm = md.grad(lambda p, x: sum(np.sum(g**2) for g in md.tree.leaves(md.grad(loss)(p, x))))
    expected = md.grad(
        lambda p, x: sum(np.sum(g**2) for g in md.tree.leaves(md.grad(lambda p, x: network(p, x) / 4)(p, x)))
    )
    assert_trees_close(of_norm(PARAMETERS, INPUTS), expected(PARAMETERS, INPUTS))


# ---------------------------------------------------------------- errors


ERRORS = {
    "mapped(abs, P('k'))": r"ValueError: in_specs = P\('k'\) names the axis 'k'.*'i' \(4\)",
    "mapped(abs, P('i'), (P(), P('z')))": r"ValueError: out_specs\[1\] = P\('z'\)",
    "mapped(abs, P('i', 'i'))": "ValueError: names the axis 'i' twice",
    "mapped(abs, 'i')": r"TypeError: in_specs is 'i', .* not a partition spec; write P\('i'\)$",
    "mapped(lambda x: x * np.arange(8.0))(np.ones(8))": (
        r"ValueError: multiply of f64\[2\]\{i\} and f64\[8\]\{i\}: their shapes cannot be broadcast.*an "
        "array that the body closes over, is a whole array: split it"
    ),
    "spmd.shard_map(abs, MESH)": r"TypeError: shard_map: in_specs says how.*write in_specs=\(P\('i'\)",
    "spmd.shard_map(MESH, abs, P('i'), P('i'))": r"TypeError: a mesh, in this order; got Mesh\(",
    "mapped(abs, P('i', None))(np.ones(4))": r"ValueError: 2 entries, but args\[0\] has 1",
    "mapped(abs)(np.ones(6))": (
        r"ValueError: args\[0\] has shape \(6,\): dimension 0, of size 6, cannot be split evenly along 'i' \(4\), "
        r".*P\('i'\).*; make it a multiple of 4, or do not split it, with None in its place; "
        r"x, mask = spmd\.pad\(x, mesh, P\('i'\)\) pads an array"
    ),
    "mapped(lambda x, y: x, (P('i'),))(np.ones(4), np.ones(4))": (
        "ValueError: in_specs has 1 entry for 2 values: write one for each, or a single one for all"
    ),
    "mapped(lambda x: x['a'], ({'b': P('i')},))({'a': np.ones(4)})": (
        r"ValueError: in_specs\[0\] has the keys \['b'\] for values with the keys \['a'\]"
    ),
    "mapped(lambda x: x, P('i'), (P('i'), P()))(np.ones(4))": (
        "ValueError: out_specs is a tuple of 2 for a single array"
    ),
    "mapped(lambda x: x.sum())(np.ones(4))": (
        r"ValueError: out_specs = P\('i'\) has 1 entry, but the result has 0 dimensions.*return x\[None\]"
    ),
    "mapped(lambda x: {'loss': x}, P('i'), P())(np.ones(4))": (
        r"VarianceError: the result\['loss'\] has type f64\[1\]\{i\}.*along 'i'.*ways out: map it.*reduce "
        "it.*all_gather_invariant"
    ),
    "mapped(lambda x: mapped(abs)(x))(np.ones(16))": (
        "ValueError: names the axis 'i', but this shard_map maps over {}: the outer one maps over 'i'.*; leave "
        "it out, or"
    ),
    "mapped(lambda x: x.__iadd__(1.0))(np.ones(4))": (
        r"AttributeError: ^a traced value has no attribute '__iadd__'; .* x \+= y makes a new value, as x = x \+ y "
        "does$"
    ),
    "mapped(lambda x: x.wrong)(np.ones(4))": "AttributeError: traced value has no .* 'wrong'$",
    "mapped(lambda x: x.__setitem__(0, 1.0))(np.ones(4))": "TypeError: cannot be written into",
    "mapped(abs)('text')": "TypeError: expected an array or a number, got str",
    "mapped(abs)({'w': {2}})": r"TypeError: shard_map: args\[0\]\['w'\]: expected an array or a number",
    "mapped(abs)(x=np.ones(4))": (
        "TypeError: shard_map: abs takes its arguments by position, since in_specs has .* got x= by name"
    ),
    "mapped(lambda x: psum(x, 'I'))(np.ones(4))": r"UnboundAxisError: \('i',\)\. Did you mean 'i'\?$",
    "mapped(abs, P('ii'))(np.ones(4))": r"ValueError: a dimension that is not split\. Did you mean 'i'\?$",
}


@each("program", ERRORS)
def test_errors(program):
    check_raises(lambda: eval(program, globals()), ERRORS[program])


def test_leaked_values_are_named():
    leaked = []
    mapped(lambda x: leaked.append(x) or x)(np.ones(4))
    for use in (lambda: leaked[0] + 1, lambda: mapped(lambda x: x + leaked[0])(np.ones(4))):
        with pytest.raises(md.LeakedTracerError, match=r"f64\[1\]\{i\} was used outside .*\(shard_map of <lambda>\)"):
            use()


@pytest.mark.parametrize("options", [{}, {"check_rep": False}, {"auto_pbroadcast": False}])
def test_what_is_computed_of_numbers_alone_is_an_array(options):
    x = np.arange(4.0)
    f = spmd.shard_map(lambda x: np.isclose(x, 2.0), mesh=MESH, in_specs=P("i"), out_specs=P("i"), **options)
    np.testing.assert_array_equal(f(x), np.isclose(x, 2.0))


def check_numbers(mesh):
    """Results without dimensions are NumPy's numbers, as its own functions return them."""
    x, axes = np.arange(float(2 * mesh.size)), mesh.axis_names

    def body(x, n):
        return psum(x.sum(), axes), n, psum(x.astype(np.float32).sum(), axes)

    f = spmd.shard_map(body, mesh=mesh, in_specs=(P(axes), P()), out_specs=P())
    for run in (f, md.jit(f)):
        assert [type(y) for y in run(x, np.asarray(3))] == [np.float64, np.int64, np.float32]
    assert type(md.value_and_grad(lambda x: f(x, 3.0)[0])(x)[0]) is np.float64


def test_results_without_dimensions_are_numbers():
    check_numbers(MESH)
    check_numbers(spmd.make_mesh((1,), ("i",), backend="simulated"))


def test_results_of_calls_in_turn_may_have_several_structures():
    f = mapped(lambda x, n: (x, x.sum())[:n] if n else {"a": x}, (P("i"), None), (P("i"), P(sum="i")))
    g = mapped(lambda x, n: [x] * n if n else x, (P("i"), None), P("i"))
    x = np.arange(8.0)
    for n in (2, 3, 0, 2):
        assert [(y.shape, y.spec) for y in md.tree.leaves(g(x, n))] == [((8,), P("i"))] * (n or 1)
        assert type(g(x, n)) is (list if n else spmd.ShardedArray)
    for _ in range(2):
        assert [float(np.sum(y)) for y in f(x, 2)] == [28.0, 28.0]
        with pytest.raises(ValueError, match="out_specs has 2 entries for 1 value"):
            f(x, 1)
        with pytest.raises(ValueError, match="out_specs is a tuple for a dict"):
            f(x, 0)


def test_one_shard_map_in_several_places():
    """The plan for one context is not used in another."""
    total = mapped(lambda x: psum(x, "j"), P(None, "j"), P(), MESH2, axis_names={"j"})
    split = mapped(total, P("i"), P("i"), MESH2, axis_names={"i"})
    x = np.arange(16.0).reshape(4, 4)
    sums = x.reshape(4, 2, 2).sum(1)
    for _ in range(2):
        np.testing.assert_array_equal(total(x), sums)
        np.testing.assert_array_equal(split(x), sums)
        with without_types():
            np.testing.assert_array_equal(total(x), sums)
        np.testing.assert_array_equal(md.vmap(total)(x[None]), sums[None])


@pytest.mark.parametrize("checkpoint", [lambda f: f, md.checkpoint])
def test_long_loops_in_long_loops_are_compiled(checkpoint):
    def steps(f, x, n):
        return md.scan(lambda x, _: (f(x), None), x, None, length=n)[0]

    def body(x):
        inner = checkpoint(lambda x: steps(lambda x: np.sin(x) + psum(x, "i") / 8, x, 20))
        return steps(inner, x, 20)

    mesh = spmd.make_mesh((4,), ("i",), backend="simulated")
    mapped = spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x, f = spmd.distribute(np.linspace(0, 1, 8), mesh, P("i")), md.value_and_grad(lambda x: np.sum(mapped(x)))
    for actual, expected in zip(md.jit(f)(x), f(x)):
        np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-12)


def test_the_step_of_a_long_loop_is_compiled(monkeypatch):
    """Operations around the loop run eagerly; the loop's length does not change them."""
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    processed, process = [], SPMD.process

    def counting(self, primitive, *args):
        processed.append(primitive)
        return process(self, primitive, *args)

    def operations(length):
        def body(x):
            return psum(md.scan(lambda c, _: (np.tanh(c) * psum(c, "i"), None), x, length=length)[0], "i")

        f = md.jit(spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P()))
        np.testing.assert_allclose(f(X), f.f(X))
        processed.clear()
        f(X)
        return len(processed)

    X = np.array([0.1, 0.2])
    monkeypatch.setattr(SPMD, "process", counting)
    assert operations(UNROLLED + 1) == operations(UNROLLED + 30) < 10


def test_bodies_share_factorizations(monkeypatch):
    """Those of a matrix that is the same on all ranks; matrices that differ are a stack, which NumPy factorizes."""
    monkeypatch.setattr(factorizations, "MIN_ROWS", 1)
    rng = numpy.random.default_rng(0)
    k, y = rng.normal(size=(6, 6)) + 6 * numpy.eye(6), rng.normal(size=(6, 8))

    def process(k, y):
        return np.sum(y * np.linalg.solve(k, y)) + np.linalg.slogdet(k)[1]

    def shifted(k, y):
        return process(k + 0.1 * np.sum(y), y)

    for body in (process, shifted):
        loss = mapped(lambda k, y, body=body: psum(body(k, y), "i"), (P(), P(None, "i")), P())
        whole = lambda k, y, body=body: sum(body(k, y[:, i : i + 2]) for i in (0, 2, 4, 6))  # noqa: E731
        assert_trees_close(md.jit(md.grad(loss))(k, y), md.grad(whole)(k, y))


@pytest.mark.parametrize(
    "body, says",
    [
        (lambda a, b, d: a + d, r"args\[2\], whose spec is P\(\), is a whole array: split it like the others"),
        (lambda a, b, d: d.T - b, r"args\[2\], whose spec is P\(\), is a whole array"),
        (lambda a, b, d: a + 2 * d, "an unmapped argument, or an array that the body closes over, is a whole array"),
        (lambda a, b, d: a * np.ones(4), "an unmapped argument, or an array that the body closes over, is a whole"),
    ],
)
def test_shapes_of_blocks_that_do_not_fit(body, says):
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    f = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P("i"), P()), out_specs=P("i"))
    with pytest.raises(
        ValueError, match=f"f64.* cannot be broadcast together.* arguments are a rank's blocks, but {says}"
    ):
        f(np.ones(4), np.ones(4), np.ones(4))
