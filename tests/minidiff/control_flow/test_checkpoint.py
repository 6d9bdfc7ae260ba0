"""checkpoint: the same derivatives, wherever it stands; `checkpoints.md` shows what is kept and what is not."""

import functools

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import all_gather, psum
from spmd import P
from spmd.parallel.transformer import Config, block, init_transformer
from tests.checks.meanings import MIXED, check_meaning
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs import sharded_network

X = np.array([0.3, -0.7, 1.1])
Y = X**2
same = lambda f, policy=None: f  # noqa: E731
policies = md.checkpoint_policies
POLICIES = {
    "nothing": None,
    "everything": policies.everything_saveable,
    "products": policies.dots_saveable,
    "a name": policies.save_only_these_names("a"),
    "sines": lambda op, *_, **__: str(op) == "sin",
}

# ---------------------------------------------------------------- programs × properties


def f(x, y):
    for _ in range(2):
        x = np.sin(x) * y + np.tanh(x @ x)
    return x


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


def on_ranks(body, in_specs=(P("i"), P("i")), **options):
    return mapped(lambda *args: psum(body(*args), "i"), mesh(3), in_specs, P(), **options)


def scan_sharded(c):
    step = lambda y: c(lambda h, z: (np.tanh(h * y) * z + psum(np.sin(h), "i"), h.sum()))  # noqa: E731
    return on_ranks(lambda x, y: sum(z.sum() for z in md.scan(step(y), x, np.linspace(0.5, 1.5, 3))))


def sharded(c):
    return on_ranks(lambda x, y: (c(lambda x, y: f(all_gather(x, "i", tiled=True), y[0]))(x, y) ** 2).sum())


def closing_sharded(c, check_rep=True):
    """The checkpointed function closes over a value of the body, over one of the program, and over a plain array."""

    def body(x, y):
        z = np.sin(x)
        return c(lambda x: f(psum(x * z, "i") * y, y) + z * X[0])(x).sum()

    return lambda x, y: on_ranks(lambda x: body(x, y), P("i"), check_rep=check_rep)(x)


# A program of a checkpoint `c`: with a function that does nothing in its place it must be the same.
PROGRAMS = {
    "itself": lambda c: c(f),
    "of one argument": lambda c: lambda x, y: c(f)(x, Y) * y,
    "constant": lambda c: lambda x, y: c(f)(X, X) * x,
    "nested": lambda c: lambda x, y: c(lambda x, y: c(f)(c(f)(x, y), y) * x)(x, y),
    "tape": lambda c: lambda x, y: md.make_tape(c(f))(x, y)(x, y)[0],
    "vmap": lambda c: lambda x, y: md.vmap(c(f), (0, None))(mnp.stack([x, y]), y),
    "named vmap": lambda c: md.vmap(c(lambda x, y: psum(np.sin(x * y), "v") * x), axis_name="v"),
    "gradient in named vmap": lambda c: md.vmap(
        md.grad(lambda x, y: c(lambda x: psum(np.sin(x * y), "v") * x)(x)), axis_name="v"
    ),
    "closing over": lambda c: lambda x, y: c(lambda z: f(z, y) * x)(x),
    "closing over all": lambda c: lambda x, y: c(lambda: f(x, y))(),
    "closing over the result": lambda c: lambda x, y: c(lambda x: (x, y))(x)[1],
    "closing over, nested": lambda c: lambda x, y: c(lambda z: c(lambda u: f(u, y) * x)(z * y).sum() * z)(x),
    "closing over, in vmap": lambda c: lambda x, y: md.vmap(lambda z: c(lambda u: f(u * z, y))(x))(y),
    "closing over a batch": lambda c: md.vmap(lambda x, y: c(lambda z: np.sin(z * y) * x)(x)),
    "with a name": lambda c: c(lambda x, y: np.sin(md.checkpoint_name(np.exp(x), "a") * y)),
    "with a rule inside": lambda c: c(with_rule),
    "of a gradient": lambda c: c(md.grad(lambda x, y: f(x, y).sum())),
    "in a scan": lambda c: in_scan(c(f)),
    "in a scan, closing over": lambda c: in_scan(lambda z, y: c(lambda z: f(z, y) * np.cos(y))(z)),
    "in a scan, nested": lambda c: in_scan(c(lambda x, y: c(f)(x * y, y))),
    "in a scan, of a scan": lambda c: in_scan(c(in_scan(c(f)))),
    "in a scan, of a branch": lambda c: in_scan(c(lambda x, y: md.cond(x[0] > 0, f, lambda x, y: x * y, x, y))),
    "in a branch": lambda c: lambda x, y: md.cond(x[0] > 0, c(f), c(np.multiply), x, y),
    "in a scan in shard_map": scan_sharded,
    "in shard_map": sharded,
    "closing over, in shard_map": closing_sharded,
    "closing over, without types": functools.partial(closing_sharded, check_rep=False),
    "around shard_map": lambda c: c(sharded(same)),
    "around shard_map, closing over": lambda c: lambda x, y: c(lambda z: closing_sharded(same)(z, y) * x.sum())(x),
    "with a rule around": rule_around,
}


#: Kinds of derivatives; of a rule around a checkpoint, which has no forward mode, the first ones.
KINDS = ("value", "grad", "pullbacks", "vmap of grad", "jvp", "linearize", "grad of grad", *MIXED)


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_changes(name):
    f, meaning = (PROGRAMS[name](c) for c in (md.checkpoint, same))
    check_meaning(f, meaning, (X, Y), KINDS[: 4 if name == "with a rule around" else None], rtol=1e-10)
    check_meaning(f, meaning, (X, Y), ["grad"], ["tape", "jit"])


@each("policy", list(POLICIES)[1:])
@each("name", PROGRAMS)
def test_policies_change_nothing(name, policy):
    f = PROGRAMS[name](functools.partial(md.checkpoint, policy=POLICIES[policy]))
    check_meaning(f, PROGRAMS[name](same), (X, Y), ["grad"], rtol=1e-10)


# ---------------------------------------------------------------- what is kept on ranks, and of a layer


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_sent_and_what_is_kept(ranks):
    sharded_network.check(mesh(ranks))


def test_a_sum_at_the_end_is_not_sent_again():
    body = lambda x: md.checkpoint(lambda x: psum(np.sin(x), "i"))(x).sum()  # noqa: E731
    assert spmd.communication(md.grad(mapped(body, mesh(3), P("i"), P())))(X).counts == {"psum": 1}


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
