"""Mixtures of experts on three axes: values, gradients and communication, on simulated and real ranks."""

import warnings
from functools import partial

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean
from spmd import P
from spmd.examples import assigned_experts as assigned
from spmd.parallel import expert
from tests.checks.documented import add, check_traffic, communicated, rows, traffic
from tests.checks.meshes import mesh as mesh_of
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close, run_and_count

AXES = "data", "experts", "model"
TOKENS = "data", "experts"
EXPERTS, T, D, HIDDEN = 8, 16, 3, 4
SPECS = P("experts", None, "model"), P("experts", "model"), P("experts", "model"), P("experts")
SHAPES = {1: [(1, 1, 1)], 2: [(1, 2, 1), (2, 1, 1)], 4: [(1, 4, 1), (2, 2, 1), (1, 2, 2)], 8: [(1, 8, 1), (2, 2, 2)]}

RNG = np.random.default_rng(0)
PARAMS = tuple(RNG.normal(size=(EXPERTS, *shape)) for shape in ((D, HIDDEN), (HIDDEN,), (HIDDEN, D), (D,)))
ROUTER, X, WEIGHTS = RNG.normal(size=(D, EXPERTS)), *RNG.normal(size=(2, T, D))
PRIORITIES = np.random.default_rng(3).random(T)

#: (k, capacity, priorities): tokens are dropped in the order of tokens, at random, or not at all.
GATES = [(1, 1, None), (1, 2, PRIORITIES), (2, 1, None), (2, 2, PRIORITIES), (2, T, None)]


def of_experts(params, i):
    return [leaf[i] for leaf in params]


def one_by_one(params, router, x, blocks, k, capacity, priorities, one=expert.feed_forward):
    """Return each token's result; the tokens of a block queue for each expert, first choices before second choices."""
    out, taken = [0 * row for row in x], {}
    probabilities = md.nn.softmax(x @ router)
    ranking = np.argsort(-probabilities, axis=-1)
    order = range(len(x)) if priorities is None else np.argsort(-priorities)
    for choice in range(k):
        for token in map(int, order):
            i = int(ranking[token, choice])
            queue = i, token * blocks // len(x)
            taken[queue] = taken.get(queue, 0) + 1
            among = sum(probabilities[token, int(j)] for j in ranking[token, :k]) if k > 1 else 1.0
            if taken[queue] <= capacity:
                result = one(of_experts(params, i), x[token])
                out[token] = out[token] + probabilities[token, i] / among * result
    return np.stack(out)


def whole_loss(params, router, x, blocks, k, capacity, priorities):
    logits = x @ router
    probabilities = md.nn.softmax(logits)
    chosen = np.bincount(np.argmax(probabilities, axis=-1), minlength=EXPERTS) / T
    balance = EXPERTS * np.sum(chosen * np.mean(probabilities, axis=0))
    z = np.mean(np.log(np.sum(np.exp(logits), axis=-1)) ** 2)
    result = one_by_one(params, router, x, blocks, k, capacity, priorities)
    return np.mean(WEIGHTS * result) + 0.1 * balance + 0.01 * z


def sharded_loss(mesh, k, capacity, priorities):
    def body(params, router, x, weights, priorities):
        one = partial(expert.feed_forward, axis="model")
        result = expert.mixture_of_experts(one, params, router, x, capacity, "experts", k, priorities)
        logits = x @ router
        balance = expert.load_balancing_loss(md.nn.softmax(logits), TOKENS)
        return pmean(np.mean(weights * result), TOKENS) + 0.1 * balance + 0.01 * expert.router_z_loss(logits, TOKENS)

    split = None if priorities is None else P(TOKENS)
    specs = (SPECS, P(), P(TOKENS), P(TOKENS), split)
    mapped = spmd.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
    return lambda params, router, x: mapped(params, router, x, WEIGHTS, priorities)


# ---------------------------------------------------------------- communication


def documented(module, shape, number=0, **names):
    """A table of a module, for a mesh of this shape."""
    sizes = dict(zip(AXES, shape))
    table = (cells for _, *cells in rows(module, number))
    return traffic((c for c in table if np.prod([sizes[axis] for axis in c[2].split(",")]) > 1), names)


# ---------------------------------------------------------------- checks


@shows("reference", "derivatives", "counts", "modes")
def check_mixture(line, shape, gate):
    """Loss and gradients, with balancing losses, are those of one token after the other on whole arrays."""
    (k, capacity, priorities), args = gate, (PARAMS, ROUTER, X)
    mesh = mesh_of(*shape, names=AXES, backend=line.backend)
    gradient = md.value_and_grad(sharded_loss(mesh, k, capacity, priorities), argnums=(0, 1, 2))
    whole_network = partial(whole_loss, blocks=shape[0] * shape[1], k=k, capacity=capacity, priorities=priorities)
    p, q = shape[1:]
    local = sum(leaf.size // (q if "model" in str(spec) else 1) for leaf, spec in zip(PARAMS, SPECS)) // p
    names = {"E": EXPERTS, "C": capacity, "d": D, "params": local}
    expected = documented(expert, shape, **names)
    for key, (count, nbytes) in documented(expert, shape, 1, **names).items():
        add(expected, key, count, nbytes)
    if shape[0] * p > 1:
        add(expected, ("forward", "psum", *TOKENS), 1, 8)  # of the loss itself
    actual = check_traffic(gradient, mesh, expected, *args)
    assert_trees_close(actual, md.value_and_grad(whole_network, argnums=(0, 1, 2))(*args), atol=1e-10)


ROUTED = [(1, "one expert"), (2, "two experts"), (3, "any")]

#: Routers by which tokens are dropless: most go to one expert; several, which leave a rank without tokens; any.
ROUTERS = {
    "one expert": np.where(np.arange(EXPERTS) == 0, 50.0, ROUTER),
    "two experts": np.where(np.arange(EXPERTS) > EXPERTS - 3, 50.0, 0.1 * ROUTER),
    "any": ROUTER,
}


def dropless_loss(mesh, k, capacity):
    def body(params, router, x, weights):
        one = partial(expert.feed_forward, axis="model")
        result = expert.mixture_of_experts(one, params, router, x, capacity, "experts", k, dropless=True)
        return pmean(np.mean(weights * result), TOKENS)

    mapped = spmd.shard_map(body, mesh=mesh, in_specs=(SPECS, P(), P(TOKENS), P(TOKENS)), out_specs=P())
    return lambda params, router, x: mapped(params, router, x, WEIGHTS)


@shows("reference", "derivatives", "counts")
def check_dropless(line, shape, routed):
    """Loss and gradients are those of the product with all experts; communication is the documented one."""
    (k, name), mesh = routed, mesh_of(*shape, names=AXES, backend=line.backend)
    args = PARAMS, ROUTERS[name], np.abs(X)
    p, q, tokens = *shape[1:], T // (shape[0] * shape[1])
    gradient = md.value_and_grad(dropless_loss(mesh, k, tokens), argnums=(0, 1, 2))

    def dense(params, router, x):
        weights = expert.gate_weights(md.nn.softmax(x @ router), k)
        outputs = md.vmap(expert.feed_forward, in_axes=(0, None))(params, x)
        return np.mean(WEIGHTS * np.einsum("ne,end->nd", weights, outputs))

    actual = run_and_count(gradient, mesh, *args)
    assert_trees_close(actual, md.value_and_grad(dense, argnums=(0, 1, 2))(*args), atol=1e-10)
    local = sum(leaf.size // (q if "model" in str(spec) else 1) for leaf, spec in zip(PARAMS, SPECS)) // p
    received = min(EXPERTS * tokens, k * p * tokens)
    expected = documented(expert, shape, 2, E=EXPERTS, T=tokens, k=k, R=received, d=D, params=local)
    if shape[0] * p > 1:
        add(expected, ("forward", "psum", *TOKENS), 1, 8)
    of_experts = {key: n for key, n in communicated(spmd.communication(gradient)(*args)).items() if key[2] != "model"}
    assert of_experts == expected


@shows("modes", "errors")
def check_too_many(line):
    """More tokens than an expert has room for are an error on every rank; with room, the same layer goes on."""
    ranks, message = line.size, "gets 16 tokens and has room for"
    mesh = mesh_of(1, ranks, 1, names=AXES, backend=line.backend)
    message = message if ranks < EXPERTS else "rank 0 receives 16 rows"
    for run in (dropless_loss(mesh, 1, 1), md.jit(dropless_loss(mesh, 1, 1))):
        with pytest.raises(ValueError, match=message):
            run(PARAMS, ROUTERS["one expert"], np.abs(X))
        assert np.isfinite(dropless_loss(mesh, 1, T // ranks)(PARAMS, ROUTERS["one expert"], np.abs(X)))


#: Experts of all tokens: balanced, all on one rank, some idle.
ASSIGNMENTS = [np.arange(T) % EXPERTS, np.full(T, EXPERTS - 1), np.random.default_rng(1).integers(0, 3, T)]


def by_assignment(one, assignment, params, x):
    return assigned.assigned_experts(one, params, x, assignment, "experts")


def with_cotangents(f):
    """The results of a function, and the cotangents of its arguments for those of `WEIGHTS`."""
    return lambda *args: (f(*args), md.vjp(f, *args)[1](WEIGHTS))


def one_after_the_other(one, assignment, params, x):
    return np.stack([one(of_experts(params, i), row) for i, row in zip(map(int, assignment), x)])


@shows("reference", "derivatives", "counts", "modes")
def check_assigned(mesh, assignment):
    """Every token gets its expert's output, of messages that are as long as the assignment says."""
    ranks, args = mesh.size, (PARAMS, X)
    body = partial(by_assignment, expert.feed_forward, assignment)
    layer = spmd.shard_map(body, mesh=mesh, in_specs=P("experts"), out_specs=P("experts"))

    actual = check_traffic(with_cotangents(layer), mesh, None, *args)
    assert_trees_close(
        actual, with_cotangents(partial(one_after_the_other, expert.feed_forward, assignment))(*args), atol=1e-10
    )
    names = {"T": T, "p": ranks, "R": np.bincount(assignment // (EXPERTS // ranks)).max(), "d": D}
    report = spmd.communication(lambda *args: md.vjp(layer, *args)[1](WEIGHTS))(*args)
    assert communicated(report) == documented(assigned, (1, ranks, 1), **names)


#: Experts of tokens with positive features that are not finite at zeros, or their derivatives.
PARTIAL_EXPERTS = {
    "sqrt": lambda p, x: p[0] * np.sqrt(x),
    "log": lambda p, x: np.log(p[0] * x),
    "1/x": lambda p, x: p[0] / x,
    "norm": lambda p, x: p[0] * x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True)),
}


@shows("reference", "derivatives", "modes")
def check_partial_experts(mesh, name):
    """Values and gradients of places that no token takes, of dropped tokens, and of ranks that get no token."""
    one, ranks = PARTIAL_EXPERTS[name], mesh.size
    params, x = (np.linspace(1, 2, EXPERTS)[:, None],), np.abs(X) + 0.1
    router = np.where(np.arange(EXPERTS) == 0, 5.0, ROUTER)  # most tokens go to the first expert
    local = T // ranks
    dropped = np.where((np.arange(T) % local == 1)[:, None], 0.0, x)  # the first token has taken the only place

    def check(layer, meaning, *args):
        specs = P("experts"), *[P()] * (len(args) - 2), P("experts")  # a router is the same on all ranks
        layer = spmd.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("experts"))
        expected = with_cotangents(meaning)(*args)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for f in (with_cotangents(layer), md.jit(with_cotangents(layer))):
                assert_trees_close(f(*args), expected, atol=1e-10)

    for k, capacity, tokens, options in ((1, 1, dropped, {}), (2, T, x, {}), (2, T, x, {"dropless": True})):
        layer = partial(expert.mixture_of_experts, one, capacity=capacity, axis="experts", k=k, **options)
        meaning = partial(one_by_one, blocks=ranks, k=k, capacity=capacity, priorities=None, one=one)
        check(layer, meaning, params, router, tokens)
    for assignment in ASSIGNMENTS:
        check(partial(by_assignment, one, assignment), partial(one_after_the_other, one, assignment), params, x)
