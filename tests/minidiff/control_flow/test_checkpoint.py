"""checkpoint: the same derivatives with less kept, wherever it stands."""

import functools
import tracemalloc

import numpy as np
import pytest

import minidiff as md
import spmd
from collectives import all_gather, psum
from minidiff.checks.testing import check_grads
from spmd import P
from spmd.parallel.transformer import Config, block, init_transformer
from tests.checks.samples import each
from tests.programs import sharded_network
from tests.programs.on_blocks import assert_trees_close

X = np.array([0.3, -0.7, 1.1])
MESH = spmd.make_mesh((3,), ("i",), backend="simulated")
same = lambda f, policy=None: f  # noqa: E731
policies = md.checkpoint_policies


def f(x, y):
    for _ in range(2):
        x = np.sin(x) * y + np.tanh(x @ x)
    return x


POLICIES = {
    "nothing": None,
    "everything": policies.everything_saveable,
    "products": policies.dots_saveable,
    "sines": lambda op, *_, **__: str(op) == "sin",
}

# A program of a checkpoint `c`: with a function that does nothing in its place it must be the same.
PROGRAMS = {
    "value": lambda c: c(f),
    "grad": lambda c: md.grad(lambda x, y: (c(f)(x, y) ** 2).sum(), (0, 1)),
    "grad in one": lambda c: md.grad(lambda x, y: (c(f)(x, y) ** 2).sum(), 1),
    "constant": lambda c: md.grad(lambda x, y: (c(f)(X, X) * x).sum(), (0, 1)),
    "second derivative": lambda c: md.grad(lambda x, y: md.grad(lambda x: c(f)(x, y).sum())(x) @ y, (0, 1)),
    "third derivative": lambda c: md.jacrev(md.hessian(lambda x, y: c(f)(x, y).sum()), 1),
    "hessian": lambda c: md.hessian(lambda x, y: c(f)(x, y).sum(), (0, 1)),
    "reverse over forward": lambda c: md.grad(lambda x, y: md.jvp(c(f), (x, y), (y, x))[1].sum(), (0, 1)),
    "jvp": lambda c: lambda x, y: md.jvp(c(f), (x, y), (y, x)),
    "jvp in one": lambda c: lambda x, y: md.jvp(lambda x: c(f)(x, y), (x,), (y,)),
    "jacobians": lambda c: lambda x, y: (md.jacfwd(c(f))(x, y), md.jacrev(c(f))(x, y)),
    "linearize": lambda c: lambda x, y: md.linearize(c(f), x, y)[1](y, x),
    "vjp twice": lambda c: lambda x, y: [md.vjp(c(f), x, y)[1](ct) for ct in (x, y)],
    "vmap": lambda c: lambda x, y: md.vmap(c(f), (0, None))(np.stack([x, y]), y),
    "vmap of grad": lambda c: lambda x, y: md.vmap(md.grad(lambda x: c(f)(x, y).sum()))(np.stack([x, y])),
    "grad of vmap": lambda c: md.grad(lambda x, y: md.vmap(c(f), (0, None))(np.sin(x)[:, None] + y, y).sum(), (0, 1)),
    "grad of named vmap": lambda c: md.grad(
        lambda x, y: (md.vmap(c(lambda x, y: psum(np.sin(x * y), "v") * x), axis_name="v")(x, y) ** 2).sum(), (0, 1)
    ),
    "vmap of named grad": lambda c: md.vmap(
        md.grad(lambda x, y: c(lambda x: psum(np.sin(x * y), "v") * x)(x), (0, 1)), axis_name="v"
    ),
    "staged": lambda c: lambda x, y: md.make_tape(c(f))(x, y)(x, y),
    "staged grad": lambda c: lambda x, y: md.make_tape(md.grad(lambda x, y: c(f)(x, y).sum(), (0, 1)))(x, y)(x, y),
    "grad of a tape": lambda c: (
        lambda x, y: md.grad(lambda x, y, tape=None: (tape or md.make_tape(c(f))(X, X))(x, y)[0].sum(), (0, 1))(x, y)
    ),
    "nested": lambda c: md.grad(lambda x, y: c(lambda x, y: c(f)(c(f)(x, y), y) * x)(x, y).sum(), (0, 1)),
    "nested, second": lambda c: md.hessian(lambda x, y: c(lambda x, y: c(f)(np.sin(x), y) * x)(x, y).sum(), (0, 1)),
    "closing over": lambda c: md.grad(lambda x, y: c(lambda z: f(z, y) * x)(x).sum(), (0, 1)),
    "closing over all": lambda c: md.grad(lambda x, y: c(lambda: f(x, y))().sum(), (0, 1)),
    "closing over the result": lambda c: md.grad(lambda x, y: (c(lambda x: (x, y))(x)[1] ** 2).sum(), (0, 1)),
    "closing over, nested": lambda c: md.hessian(
        lambda x, y: c(lambda z: c(lambda u: f(u, y) * x)(z * y).sum() * z)(x).sum(), (0, 1)
    ),
    "closing over, vmap": lambda c: md.grad(
        lambda x, y: md.vmap(lambda z: c(lambda u: f(u * z, y))(x))(y).sum(), (0, 1)
    ),
    "closing over a batch": lambda c: md.vmap(
        md.grad(lambda x, y: c(lambda z: np.sin(z * y) * x)(x), (0, 1)),
    ),
    "closing over, forward": lambda c: lambda x, y: md.jvp(lambda x, y: c(lambda z: f(z, y) * x)(x), (x, y), (y, x)),
    "closing over, reverse over forward": lambda c: md.grad(
        lambda x, y: md.jvp(lambda z: c(lambda z: f(z, y) * x)(z), (x,), (y,))[1].sum(), (0, 1)
    ),
    "with a rule inside": lambda c: md.hessian(lambda x, y: c(with_rule)(x, y).sum(), (0, 1)),
    "with a rule around": lambda c: md.grad(lambda x, y: rule_around(c)(x, y).sum(), (0, 1)),
    "of a gradient": lambda c: md.grad(lambda x, y: c(md.grad(lambda x, y: f(x, y).sum()))(x, y) @ y, (0, 1)),
    "in a scan": lambda c: md.grad(lambda x, y: in_scan(c(f))(x, y).sum(), (0, 1)),
    "in a scan, staged": lambda c: (
        lambda x, y: md.make_tape(md.grad(lambda *a: in_scan(c(f))(*a).sum(), (0, 1)))(x, y)(x, y)
    ),
    "in a scan, compiled": lambda c: md.jit(md.grad(lambda x, y: in_scan(c(f))(x, y).sum(), (0, 1))),
    "in a scan, forward": lambda c: lambda x, y: md.jvp(in_scan(c(f)), (x, y), (y, x)),
    "in a scan, second derivative": lambda c: md.hessian(lambda x, y: in_scan(c(f))(x, y).sum(), (0, 1)),
    "in a scan, vmap": lambda c: lambda x, y: md.vmap(md.grad(lambda x: in_scan(c(f))(x, y).sum()))(np.stack([x, y])),
    "in a scan, closing over": lambda c: md.grad(
        lambda x, y: in_scan(lambda z, y: c(lambda z: f(z, y) * x)(z))(x, y).sum(), (0, 1)
    ),
    "in a scan, nested": lambda c: md.grad(lambda x, y: in_scan(c(lambda x, y: c(f)(x * y, y)))(x, y).sum(), (0, 1)),
    "in a scan, of a scan": lambda c: md.grad(lambda x, y: in_scan(c(in_scan(c(f))))(x, y).sum(), (0, 1)),
    "in a scan, of a branch": lambda c: md.grad(
        lambda x, y: in_scan(c(lambda x, y: md.cond(x[0] > 0, f, lambda x, y: x * y, x, y)))(x, y).sum(), (0, 1)
    ),
    "in a branch": lambda c: (
        lambda x, y: md.make_tape(md.grad(lambda x, y: md.cond(x[0] > 0, c(f), c(np.multiply), x, y).sum(), (0, 1)))(
            x, y
        )(x, y)
    ),
    "in a scan in shard_map": lambda c: md.grad(scan_sharded(c), (0, 1)),
    "in shard_map": lambda c: sharded(c),
    "grad of shard_map": lambda c: md.grad(sharded(c), (0, 1)),
    "second derivative of shard_map": lambda c: md.grad(lambda x, y: md.grad(sharded(c))(x, y) @ y, (0, 1)),
    "vmap of grad of shard_map": lambda c: (
        lambda x, y: md.vmap(md.grad(sharded(c), (0, 1)), (0, None))(np.stack([x, y]), y)
    ),
    "staged grad of shard_map": lambda c: lambda x, y: md.make_tape(md.grad(sharded(c), (0, 1)))(x, y)(x, y),
    "closing over, in shard_map": lambda c: md.grad(closing_sharded(c), (0, 1)),
    "closing over, staged in shard_map": lambda c: (
        lambda x, y: md.make_tape(md.grad(closing_sharded(c), (0, 1)))(x, y)(x, y)
    ),
    "closing over, without types": lambda c: md.grad(closing_sharded(c, check_rep=False), (0, 1)),
    "around shard_map": lambda c: md.grad(c(sharded(same)), (0, 1)),
    "around shard_map, closing over": lambda c: md.grad(
        lambda x, y: c(lambda z: closing_sharded(same)(z, y) * x.sum())(x), (0, 1)
    ),
    "around shard_map, staged": lambda c: lambda x, y: md.make_tape(md.grad(c(sharded(same)), (0, 1)))(x, y)(x, y),
}


@md.custom_jvp
def with_rule(x, y):
    return np.sin(x) * y


with_rule.defjvps(lambda t, out, x, y: np.cos(x) * y * t, lambda t, out, x, y: np.sin(x) * t)


def rule_around(c):
    g = md.custom_vjp(lambda x, y: c(f)(x, y))
    g.defvjp(lambda x, y: (md.vjp(c(f), x, y)[0], (x, y)), lambda r, ct: md.vjp(c(f), *r)[1](ct))
    return g


def in_scan(g):
    """Three steps of g, which take an element each."""

    def run(x, y):
        carry, ys = md.scan(lambda x, z: (g(x, y) * z, x), x, np.linspace(0.5, 1.5, 3))
        return carry + ys.sum(0)

    return run


def scan_sharded(c):
    def body(x, y):
        step = c(lambda h, z: (np.tanh(h * y) * z + psum(np.sin(h), "i"), h.sum()))
        h, sums = md.scan(step, x, np.linspace(0.5, 1.5, 3))
        return psum(h.sum() + sums.sum(), "i")

    return spmd.shard_map(body, mesh=MESH, in_specs=(P("i"), P("i")), out_specs=P())


def sharded(c):
    def body(x, y):
        return psum((c(lambda x, y: f(all_gather(x, "i", tiled=True), y[0]))(x, y) ** 2).sum(), "i")

    return spmd.shard_map(body, mesh=MESH, in_specs=(P("i"), P("i")), out_specs=P())


def closing_sharded(c, check_rep=True):
    """The checkpointed function closes over a value of the body, over one of the program, and over a plain array."""

    def program(x, y):
        def body(x):
            z = np.sin(x)
            return psum(c(lambda x: f(psum(x * z, "i") * y, y) + z * X[0])(x).sum(), "i")

        return spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P(), check_rep=check_rep)(x)

    return program


@each("policy", POLICIES)
@each("name", PROGRAMS)
def test_nothing_changes(name, policy):
    program = PROGRAMS[name]
    expected = program(same)(X, X**2)
    actual = program(functools.partial(md.checkpoint, policy=POLICIES[policy]))(X, X**2)
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-10, atol=1e-12)


def test_derivatives_are_right():
    check_grads(md.checkpoint(f), (X, X**2))


# ---------------------------------------------------------------- what is kept, and what computed again


def operations(tape):
    for eqn in tape.equations:
        yield eqn.primitive.name
        for body in eqn.params.values():
            if isinstance(body, md.Tape):
                yield from operations(body)


def counts(policy, function, *args):
    """Return how often a gradient runs each operation."""
    g = md.checkpoint(function, policy=policy)
    names = list(operations(md.make_tape(md.grad(lambda *xs: g(*xs).sum()))(*args)))
    return {name: names.count(name) for name in names}


def test_the_tape_of_a_gradient_shows_what_is_computed_again():
    def g(w, x):
        return np.sin(np.exp(x @ w) @ w)

    assert [counts(policies.everything_saveable, g, np.eye(3), X)[n] for n in ("exp", "sin", "cos")] == [1, 1, 1]
    # The last sine is not computed again: its derivative does not need it.
    assert [counts(None, g, np.eye(3), X)[n] for n in ("exp", "sin", "cos")] == [2, 1, 1]
    products = [counts(policy, g, np.eye(3), X)["matmul"] for policy in (None, policies.dots_saveable)]
    assert products[0] - products[1] == 2


def test_names_are_saved():
    def g(x):
        return np.sin(md.checkpoint_name(np.exp(x), "a") * md.checkpoint_name(np.tanh(x), "b"))

    for names, expected in [((), (2, 2)), (("a",), (1, 2)), (("b",), (2, 1)), (("a", "b"), (1, 1))]:
        counted = counts(policies.save_only_these_names(*names), g, X)
        assert (counted["exp"], counted["tanh"]) == expected
    np.testing.assert_allclose(md.jacrev(g)(X), md.jacfwd(g)(X))
    np.testing.assert_array_equal(md.vmap(lambda x: md.checkpoint_name({"x": x}, "a"))(X)["x"], X)


#: Products of arrays of these shapes, and whether they are not batches of products, as JAX's policy says.
PRODUCTS = [
    (np.matmul, (2, 3), (3, 4), True),
    (np.matmul, (3,), (3,), True),
    (np.matmul, (5, 2, 3), (3, 4), True),
    (np.matmul, (2, 3), (5, 3, 4), True),
    (np.matmul, (5, 2, 3), (5, 3, 4), False),
    (np.matmul, (1, 2, 3), (5, 3, 4), True),
    (np.matmul, (5, 2, 3), (1, 3, 4), True),
    (np.matmul, (1, 2, 3), (1, 3, 4), True),
    (np.matmul, (5, 1, 2, 3), (6, 3, 4), True),
    (np.matmul, (5, 6, 2, 3), (6, 3, 4), False),
    (np.matmul, (5, 2, 3), (3,), True),
    (functools.partial(np.einsum, "ij,jk->ik"), (2, 3), (3, 4), True),
    (functools.partial(np.einsum, "bij,bjk->bik"), (5, 2, 3), (5, 3, 4), False),
    (functools.partial(np.einsum, "bij,jk->bik"), (5, 2, 3), (3, 4), True),
    (functools.partial(np.einsum, "bi,bi->b"), (5, 2), (5, 2), False),
    (functools.partial(np.einsum, "i,j->ij"), (2,), (3,), True),
]


@each("product", PRODUCTS)
def test_products_that_are_not_batches(product):
    function, left, right, expected = product
    asked = []

    def policy(primitive, *types, **params):
        if policies.dots_saveable(primitive, *types, **params):
            asked.append(policies.dots_with_no_batch_dims_saveable(primitive, *types, **params))
        return False

    md.grad(md.checkpoint(lambda x, y: np.sum(function(x, y)), policy=policy))(np.ones(left), np.ones(right))
    assert asked == [expected]


def test_products_of_a_batch_are_computed_again():
    def attention(w, x):
        return np.exp(np.einsum("bij,bkj->bik", x @ w, x) @ x)

    x = np.ones((4, 2, 3)) / 8
    every, none, weights = (
        counts(policy, attention, np.eye(3), x)
        for policy in (policies.dots_saveable, None, policies.dots_with_no_batch_dims_saveable)
    )
    products = [counted["matmul"] + counted["einsum"] for counted in (every, weights, none)]
    assert products == [products[0], products[0] + 2, products[0] + 3]


def test_policies_by_names():
    def g(x):
        return np.sin(np.cosh(md.checkpoint_name(np.exp(x), "a") * md.checkpoint_name(np.tanh(x), "b")))

    def counted(policy):
        by_name = counts(policy, g, X)
        return [by_name[name] for name in ("exp", "tanh", "cosh")]

    both = policies.save_from_both_policies
    again = counted(None)
    assert counted(policies.save_any_names_but_these()) == counted(policies.save_only_these_names("a", "b"))
    assert counted(policies.save_any_names_but_these("b")) == counted(policies.save_only_these_names("a"))
    assert counted(policies.save_any_names_but_these("a", "b")) == again == [2, 2, 2]
    only = [policies.save_only_these_names(name) for name in "ab"]
    assert counted(both(*only)) == counted(policies.save_only_these_names("a", "b")) == [1, 1, 2]
    assert counted(both(only[0], policies.nothing_saveable)) == counted(only[0]) == [1, 2, 2]
    assert counted(policies.save_anything_except_these_names("a")) == counted(policies.everything_saveable) == [1, 1, 1]
    asked = policies.save_anything_except_these_names("a")
    name_p = md.make_tape(lambda x: md.checkpoint_name(x, "a"))(X).equations[0].primitive
    assert [asked(name_p, name=name) for name in "ab"] == [False, True]
    for policy in (policies.save_any_names_but_these, policies.save_anything_except_these_names):
        gradient = md.grad(lambda x: md.checkpoint(g, policy=policy("a"))(x).sum())  # noqa: B023
        np.testing.assert_allclose(md.jit(gradient)(X), md.grad(lambda x: g(x).sum())(X))
        with pytest.raises(TypeError, match=rf"{policy.__name__}: names must be strings.*got \['a'\]"):
            policy(["a"])


def test_the_names_are_those_of_jax_and_megatron():
    names = """everything_saveable nothing_saveable dots_saveable checkpoint_dots dots_with_no_batch_dims_saveable
        checkpoint_dots_with_no_batch_dims save_only_these_names save_any_names_but_these
        save_anything_except_these_names save_from_both_policies selective full"""
    assert sorted(name for name in vars(policies) if not name.startswith("_")) == sorted(names.split())
    assert policies.checkpoint_dots is policies.dots_saveable


def test_static_arguments():
    seen = []

    def g(x, kind, y, *, scale=1.0):
        seen.append(kind)
        return {"sin": np.sin, "cos": np.cos}[kind](x) * y * scale

    for numbers, args in ((1, (X, "sin", X)), ((1,), (X, "sin", X)), (-2, (X, "sin", X)), ((0, 1), (X, "sin", X))):
        for run in (lambda f: f, md.jit, lambda f: md.grad(lambda y: f(y).sum())):
            remat = md.checkpoint(g, static_argnums=numbers)
            counted = run(lambda y, f=remat, args=args: f(*args[:2], y, scale=2.0))(args[2])
            expected = run(lambda y, args=args: g(*args[:2], y, scale=2.0))(args[2])
            np.testing.assert_allclose(counted, expected)
    assert set(seen) == {"sin"}
    with pytest.raises(TypeError, match="checkpoint: static_argnums names argument 3, but g was called with 2"):
        md.checkpoint(g, static_argnums=3)(X, "sin")


def test_policies_are_asked_with_types_and_parameters():
    asked = []

    def policy(primitive, *types, **params):
        asked.append((str(primitive), [str(t) for t in types], params))
        return False

    md.grad(md.checkpoint(lambda x: np.sin(x * 2.0).sum(), policy=policy))(X)
    assert asked == [
        ("multiply", ["f64[3]", "f64[]"], {}),
        ("sin", ["f64[3]"], {}),
        ("sum", ["f64[3]"], {"axes": (0,)}),
    ]


def kept_of_a_step(checkpoint):
    """Return the number of residuals of each step of a loop, and the number of sines that the steps compute."""
    step = checkpoint(lambda h, _: (np.tanh(np.sin(h) * h) * np.exp(h), None))
    tape = md.make_tape(md.grad(lambda x: md.scan(step, x, None, length=5)[0].sum()))(X)
    forward, backward = (eqn for eqn in tape.equations if eqn.primitive.name == "scan")
    stacked = {v for v in forward.outputs if v.type.shape == (5, 3)}
    return len(stacked & set(backward.inputs)), list(operations(tape)).count("sin")


def test_a_loop_keeps_of_a_step_what_the_policy_says():
    counted = {name: kept_of_a_step(functools.partial(md.checkpoint, policy=p)) for name, p in POLICIES.items()}
    assert counted["nothing"] == (1, 2)  # the carry alone
    assert counted["sines"] == (2, 1)
    assert counted["everything"] == kept_of_a_step(same)
    assert counted["everything"][0] > 3


def test_the_function_runs_once():
    runs = []

    @md.checkpoint
    def g(x):
        runs.append(1)
        return np.sin(x)

    md.grad(g)(1.0)
    assert len(runs) == 1


def chain(checkpoint, segments=8, length=8):
    def segment(x):
        for _ in range(length):
            x = np.tanh(x) * x
        return x

    def run(x):
        for _ in range(segments):
            x = checkpoint(segment)(x)
        return x.sum()

    return run


def peak(function, x):
    """The greatest number of arrays like x that are held at once."""
    tracemalloc.start()
    function(x)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return held / x.nbytes


def test_memory():
    x = np.ones(20000)
    assert peak(md.grad(chain(same)), x) > 120  # two for each of the 64 steps
    assert peak(md.grad(chain(md.checkpoint)), x) < 8 + 2 * 8 + 12  # one for each segment, and those of one segment
    nested = md.grad(lambda x: md.checkpoint(chain(md.checkpoint))(x))
    assert peak(nested, x) < 8 + 2 * 8 + 12
    everything = functools.partial(md.checkpoint, policy=policies.everything_saveable)
    assert peak(md.grad(chain(everything)), x) > 100


def test_memory_on_ranks():
    def program(checkpoint):
        loss = spmd.shard_map(lambda x: psum(chain(checkpoint)(x), "i"), mesh=MESH, in_specs=P("i"), out_specs=P())
        return md.grad(loss)

    x = np.ones(30000)
    assert peak(program(same), x) > 120
    assert peak(program(md.checkpoint), x) < 8 + 2 * 8 + 20


# ---------------------------------------------------------------- ranks


def fsdp(checkpoint):
    """The tutorial's fully sharded network: weights are gathered just before their use."""

    @checkpoint
    def predict(params, inputs):
        for w, b in params:
            w = all_gather(w, "i", tiled=True)
            b = all_gather(b, "i", tiled=True)
            inputs = np.maximum(inputs @ w + b, 0.0)
        return inputs

    def loss(params, inputs):
        return psum((predict(params, inputs) ** 2).sum(), "i")

    return spmd.shard_map(loss, mesh=MESH, in_specs=(P("i"), P("i")), out_specs=P())


def test_gathered_weights_are_gathered_again():
    rng = np.random.default_rng(0)
    params = [(rng.standard_normal((6, 6)), rng.standard_normal(6)) for _ in range(3)]
    inputs = rng.standard_normal((6, 6))
    tutorial = functools.partial(md.checkpoint, policy=lambda op, *_, **__: str(op) != "all_gather")
    expected = md.grad(fsdp(same))(params, inputs)
    for checkpoint, gathers in [
        (same, 6),
        # Gradients need every weight but the first (the inputs have no gradient), and no bias.
        (tutorial, 6 + 2),
        (md.checkpoint, 6 + 6),
        (functools.partial(md.checkpoint, policy=policies.everything_saveable), 6),
        (functools.partial(md.checkpoint, policy=lambda op, *_, **__: str(op) == "all_gather"), 6),
    ]:
        gradient = md.grad(fsdp(checkpoint))
        for a, e in zip(md.tree.leaves(gradient(params, inputs)), md.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(e))
        assert spmd.communication(gradient)(params, inputs).counts["all_gather"] == gathers


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_sent_and_what_is_kept(ranks):
    sharded_network.check(spmd.make_mesh((ranks,), ("i",), backend="simulated"))


def test_a_sum_at_the_end_is_not_sent_again():
    def body(x):
        return md.checkpoint(lambda x: psum(np.sin(x), "i"))(x).sum()

    g = md.grad(spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P()))
    assert spmd.communication(g)(X).counts == {"psum": 1}


# ---------------------------------------------------------------- how it is used


def test_it_is_a_decorator_and_takes_trees():
    @functools.partial(md.remat, policy=policies.dots_saveable)
    def g(p, *, scale):
        """Return the effect."""
        return {"y": p["w"] * scale, "n": p["n"]}

    assert md.grad(lambda p: g({"w": p, "n": 3}, scale=2.0)["y"])(1.0) == 2.0
    assert (g.__name__, g.__doc__) == ("g", "Return the effect.")


def test_python_sees_values():
    shown = []

    @md.checkpoint
    def g(x):
        shown.append((str(x[0]), f"{x[1]:.1f}", md.stop_gradient(x[2]).item()))
        return x**2 if x[0] > 0 else -x

    assert md.grad(lambda x: g(x).sum())(X).tolist() == (2 * X).tolist()
    assert shown == [("0.3", "-0.7", 1.1)]


def test_tapes_show_the_body():
    tape = md.make_tape(md.checkpoint(np.sin, policy=policies.dots_saveable))(1.0)
    tape.check()
    assert str(tape).splitlines()[1:3] == [
        "  b:f64[] = checkpoint(a, policy=dots_saveable)",
        "    lambda c:f64[]:",
    ]


def test_what_cannot_be_an_argument():
    with pytest.raises(TypeError, match=r"checkpoint takes a function, got float: write checkpoint\(f\)\(x\)"):
        md.checkpoint(1.0)
    with pytest.raises(TypeError, match=r"policy must be a function of .*, got 'dots'; md\.checkpoint_policies has"):
        md.checkpoint(np.sin, policy="dots")


#: Policy -> bytes per token and feature that a layer keeps, in 16 bits, for r = scores per token and feature.
#: Korthikanti et al. have 34 + 5 r, 34 and 2. Here scores and norms are in float32, and no weight is dropped.
KEPT = {None: lambda r: 34 + 8 + 4 + 6 * r, policies.selective: lambda r: 34, policies.full: lambda r: 2}


@each("policy", KEPT, ids=["none", "selective", "full"])
def test_a_layer_keeps_what_megatron_says(policy):
    batch, tokens, features, heads = 2, 64, 64, 4
    config = Config(8, features, heads, layers=1, hidden=4 * features, layer_norm=True, swiglu=False, dropout=0.1)
    params = md.tree.map(np.float16, init_transformer(np.random.default_rng(0), config)["layers"][0])
    x = np.random.default_rng(1).normal(size=(batch, tokens, features)).astype(np.float16)

    def loss(params, x, layers, policy=policy):
        layer = functools.partial(block, config, key=md.random.key(0))
        for _ in range(layers):
            x = (md.checkpoint(layer, policy) if policy else layer)(params, x)
        return x.astype(np.float32).sum()

    of = [functools.partial(loss, layers=layers) for layers in (1, 2)]
    saved = [spmd.memory(md.grad(f))(params, x).highest["residuals"] for f in of]
    expected = KEPT[policy](heads * tokens / features)
    assert (saved[1] - saved[0]) / x.size == pytest.approx(expected, rel=0.01)
    assert_trees_close(md.grad(loss)(params, x, 2), md.grad(loss)(params, x, 2, policy=None), rtol=0)
