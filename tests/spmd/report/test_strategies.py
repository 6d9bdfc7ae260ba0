"""Specs that are searched, against brute force; `specs.md` shows that a plan runs as it says."""

import functools
import itertools
import math

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from spmd.machines import A100
from spmd.prices.machine import link
from spmd.report import strategies
from spmd.report.strategies import limit, minimum
from spmd.sharding.sharded_array import Sharding
from tests.checks.meshes import mesh
from tests.checks.samples import each

#: A machine with a slower link, on which communication takes as long as computation.
SLOW = A100.replace(links=(link("wire", math.inf, latency=2e-6, bandwidth=2e10),))


def t(*shape):
    return md.ShapedArray(shape, "float32")


def planned(f, *types, over=None, machine=A100, **options):
    return spmd.plan(f, machine, search="specs", mesh=over or mesh(4), **options)(*types)


def two_layers(up, down, x):
    return np.tanh(x @ up) @ down


def gradients(up, down, x):
    return md.grad(lambda up, down: np.sum(two_layers(up, down, x) ** 2), (0, 1))(up, down)


# ---------------------------------------------------------------- the minimum


def draw_terms(rng, edges):
    """Terms of one and of two variables, which have two or three options each."""
    sizes = {v: int(rng.integers(2, 4)) for edge in edges for v in edge}
    return [
        (edge, rng.integers(0, 9, [sizes[v] for v in edge]).astype(float)) for edge in [*map(tuple, edges), *zip(sizes)]
    ]


def by_brute_force(terms, fits=lambda options: True):
    sizes = {v: n for variables, cost in terms for v, n in zip(variables, cost.shape)}
    every = (dict(zip(sizes, options)) for options in itertools.product(*map(range, sizes.values())))
    return min(value(terms, options) for options in every if fits(options))


def value(terms, options):
    return sum(cost[tuple(options[v] for v in variables)] for variables, cost in terms)


def bytes_of(nbytes, options):
    return sum(sizes[options[v]] for v, sizes in nbytes.items())


GRAPHS = {
    "a chain": ["ab", "bc", "cd", "de", "ef"],
    "a tree": ["ab", "ac", "ad", "de", "df"],
    "a ring": ["ab", "bc", "cd", "de", "ea"],
    "a ladder": ["ab", "bc", "de", "ef", "ad", "be", "cf"],
    "all pairs": list(map("".join, itertools.combinations("abcde", 2))),
    "two parts": ["ab", "bc", "de"],
}


@each("graph", GRAPHS)
def test_the_minimum_within_a_limit_is_that_of_brute_force(graph):
    for seed in range(5):
        rng = numpy.random.default_rng(seed)
        terms = draw_terms(rng, GRAPHS[graph])
        nbytes = {v: rng.integers(1, 20, cost.size).tolist() for (v, *others), cost in terms if not others}
        used = functools.partial(bytes_of, nbytes)
        least, free = sum(map(min, nbytes.values())), used(minimum(terms))
        assert value(terms, minimum(terms)) == by_brute_force(terms)
        for memory in {least, (least + free) // 2, free}:
            options = minimum([*terms, *limit(memory, nbytes)])
            assert used(options) <= memory
            fits = lambda options, used=used, memory=memory: used(options) <= memory  # noqa: E731
            assert value(terms, options) == by_brute_force(terms, fits)


# ---------------------------------------------------------------- random programs

#: Functions of matrices x, u and w, in which values are used once, or more often.
OF_MATRICES = {
    "a chain": lambda x, u, w: np.tanh(x @ u) @ w,
    "a longer chain": lambda x, u, w: np.sum((np.tanh(x @ u) @ w).T, 0),
    "two results": lambda x, u, w: (np.sum(h := x @ u), h @ w),
    "a fork": lambda x, u, w: np.sum(h := x @ u, 0) + np.mean(h, 0) + w[0, 0],
    "a residual": lambda x, u, w: (x + np.tanh(x @ u) @ w) if u.shape[1] == w.shape[0] else x @ u,
}


def draw_program(seed):
    rng = numpy.random.default_rng(seed)
    a, b, c = rng.choice([8, 256, 2048, 8192], 3)
    name = list(OF_MATRICES)[seed % len(OF_MATRICES)]
    return OF_MATRICES[name], (t(a, b), t(b, c), t(c, b))


def all_seconds(options, moves):
    """The seconds of all assignments, in an array with a dimension for each value and each equation."""
    variables = [x for x in options.of if any(x in pair for pair, _ in moves)]
    total = numpy.zeros([len(options.of[x]) for x in variables])
    for pair, rows in moves:
        cost = numpy.array([[sum(step.seconds for step in steps) for steps in row] for row in rows])
        cost = cost if variables.index(pair[0]) < variables.index(pair[1]) else cost.T
        total += cost.reshape([n if x in pair else 1 for x, n in zip(variables, total.shape)])
    return variables, total


@each("seed", range(10))
def test_no_assignment_of_a_random_program_is_faster(seed):
    f, types = draw_program(seed)
    tape = md.make_tape(f)(*types)
    options = strategies._Options(mesh(2), SLOW, tape, [None] * 3)
    variables, total = all_seconds(options, [*options.moves()])
    plan = planned(f, *types, over=mesh(2), machine=SLOW)
    assert plan.seconds == pytest.approx(total.min(), rel=1e-6)
    memory = (plan.memory + sum(v.type.nbytes // 2 for v in tape.inputs)) // 2  # less than it takes, if it can
    used = [[v.type.nbytes // (1 + bool(spec.axes)) for spec in options.of[v]] for v in tape.inputs]
    used = [numpy.reshape(n, [-1 if x is v else 1 for x in variables]) for v, n in zip(tape.inputs, used)]
    within = planned(f, *types, over=mesh(2), machine=SLOW, memory=memory)
    assert within.memory <= memory
    assert within.seconds == pytest.approx(total[numpy.broadcast_to(sum(used) <= memory, total.shape)].min(), rel=1e-6)


def specs_of(over, shape):
    return [P(), *[P(*[None] * d, axes) for d in range(len(shape)) for axes in over.shape]]


@each("shapes", [(64, 8192, 8192), (8192, 256, 256)])
def test_no_program_of_specs_and_resharding_is_faster(shapes):
    """The public functions alone: each spec of the arguments and of a value between them, priced by `predict`."""
    over, (a, b, c) = mesh(2), shapes
    types = t(a, b), t(b, c), t(c, b)

    def seconds(x, u, w, h):
        f = lambda *args: spmd.reshard(np.tanh(args[0] @ args[1]), h) @ args[2]  # noqa: E731
        sharded = [s.update(sharding=Sharding(over, spec)) for s, spec in zip(types, (x, u, w))]
        try:
            return spmd.predict(f, SLOW, optimized=False, overlap=False)(*sharded).seconds
        except TypeError:  # the value is on no mesh: all arguments are whole
            return math.inf

    every = itertools.product(*[specs_of(over, (1, 1))] * 4)
    plan = planned(OF_MATRICES["a chain"], *types, over=over, machine=SLOW)
    assert plan.seconds == pytest.approx(min(itertools.starmap(seconds, every)), rel=1e-6)


# ---------------------------------------------------------------- plans that are known


#: Two layers are split by columns, then by rows; a big batch of small weights is data parallel; sums of large weights'
#: gradients and of a batch's results take about as long, which two axes share; each sort is an argsort and a
#: permutation, between which nothing is resharded.
KNOWN = {
    "two layers": (two_layers, [(4096, 16384), (16384, 4096), (64, 4096)], {}),
    "a big batch": (gradients, [(256, 1024), (1024, 256), (65536, 256)], {}),
    "two axes": (gradients, [(4096, 16384), (16384, 4096), (32768, 4096)], {"over": mesh(2, 2), "machine": SLOW}),
    "used twice": (lambda x: np.sort(np.sort(x, 0), 1), [(8192, 8192)], {}),
}


def test_the_tables(golden):
    plans = {name: planned(f, *[t(*shape) for shape in shapes], **ways) for name, (f, shapes, ways) in KNOWN.items()}
    golden("plan_of_specs", "\n\n".join(f"{name}:\n{plan}" for name, plan in plans.items()))


# ---------------------------------------------------------------- errors


ON_A_MESH = {"search": "specs", "mesh": mesh(4)}
REFUSED = [
    *({"search": "specs"}, {"search": "specs", "mesh": 3}, {"mesh": mesh(4)}, {"search": "colors"}),
    *({**ON_A_MESH, "zero": [1]}, {**ON_A_MESH, "devices": 4}, {**ON_A_MESH, "overlap": False}),
]


@each("options", REFUSED)
def test_a_mesh_is_for_specs_and_other_options_are_not(options):
    with pytest.raises(TypeError):
        spmd.plan(two_layers, A100, **options)


def test_specs_that_depend_on_each_other_are_limited():
    pairs = [(pair, numpy.zeros((9, 9))) for pair in itertools.combinations(range(9), 2)]
    with pytest.raises(ValueError, match="387,420,489 combinations of specs are too many"):
        minimum(pairs)


def test_arguments_are_like_those_of_the_plan():
    plan = planned(two_layers, t(8, 8), t(8, 8), t(8, 8))
    with pytest.raises(ValueError, match="spec"):
        plan(numpy.ones((8, 8)))
