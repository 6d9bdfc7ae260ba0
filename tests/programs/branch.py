"""Programs in which each rank takes a branch of its own, for simulated ranks and real ones.

A program is a function of a weight, a rank's block and the rank's index. Its meaning, `whole`, runs it in Python on one
block after another.
"""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, psum
from spmd import P
from tests.checks.of_whole import check_kinds, check_values
from tests.checks.properties import shows
from tests.programs.control import Unrolled

# ---------------------------------------------------------------- programs of w [2], x [2] and the rank


def rule_of_its_own(w, x):
    f = md.custom_vjp(lambda w, x: np.sin(w) * x)
    f.defvjp(
        lambda w, x: (f(w, x), (w, x)), lambda saved, ct: (ct * np.cos(saved[0]) * saved[1], ct * np.sin(saved[0]))
    )
    return f(w, x)


def counting(lax, w, x, rank):
    """Steps whose counter all ranks share, though not all of them take these steps."""

    def step(c, k):
        return lax.cond(k > 1, lambda c: np.sin(c) * w, lambda c: c * np.cos(k * c), c), k * c

    return lax.cond(x[0] > 0, lambda c: sum(lax.scan(step, c, np.arange(3.0))[1]), lambda c: c * w, x)


def in_a_step(lax, w, x, rank):
    """A carry that all ranks share at first."""

    def step(c, k):
        return lax.switch(rank + k, [lambda c: c * x, lambda c: c + w, lambda c: np.sin(c)], c), k

    return lax.scan(step, w, np.arange(2))[0]


def grad_in_steps(lax, w, x, rank):
    """Steps of a rank's own gradients, in a carry that all ranks share at first."""

    def step(c, k):
        slope = lax.cond(rank > 1, lambda: md.grad(lambda v: (v * v * x).sum())(c), lambda: np.cos(c))
        return c + 0.1 * slope, k

    return lax.scan(step, w, np.arange(2))[0]


def nested(lax, w, x, rank):
    inner = lambda x: lax.cond(x[0] > 0, lambda: np.sqrt(x[0]) * w, lambda: x * np.sin(w))  # noqa: E731
    return lax.cond(rank > 0, inner, lambda x: np.exp(w) * lax.switch(rank, [lambda: x, lambda: w]), x)


PROGRAMS = {
    "operands": lambda lax, w, x, rank: lax.cond(x[0] > 0, lambda x, w: np.sqrt(x[0]) * w, lambda x, w: x, x, w),
    "closed over": lambda lax, w, x, rank: (lambda b: lax.cond(x[0] > 0, lambda: np.cos(b) * w, lambda: x * b))(
        np.sin(w)
    ),
    "switch": lambda lax, w, x, rank: lax.switch(
        rank, [lambda x: np.sin(x) * w, lambda x: w * w, lambda x: np.ones(2), lambda x: np.exp(x)], x
    ),
    "trees": lambda lax, w, x, rank: (lambda out: out["a"] * out["b"][0])(
        lax.cond(rank == 1, lambda: {"a": x, "b": (2.0,)}, lambda: {"a": np.ones(2), "b": (w[0],)})
    ),
    "nested": nested,
    "counting": counting,
    "in a step": in_a_step,
    "in a vmap": lambda lax, w, x, rank: md.vmap(lambda v: lax.cond(rank > 0, lambda: v * w[0], lambda: np.sin(v)))(x),
    "checkpoint": lambda lax, w, x, rank: lax.cond(
        x[0] > 0, lambda: md.checkpoint(lambda x: np.sin(np.sin(x) * w))(x), lambda: w
    ),
    "in a checkpoint": lambda lax, w, x, rank: md.checkpoint(
        lambda x: np.sin(lax.cond(x[0] > 0, lambda: x * w, lambda: np.exp(w)))
    )(x),
    "custom_vjp": lambda lax, w, x, rank: lax.cond(x[0] > 0, rule_of_its_own, lambda w, x: x, w, x),
    "jit": lambda lax, w, x, rank: lax.cond(x[0] > 0, md.jit(lambda: np.sin(x * w)), lambda: x),
    "grad": lambda lax, w, x, rank: lax.cond(
        x[0] > 0, lambda w: md.grad(lambda v: (np.sin(v * w) * x).sum())(w), lambda w: x, w
    ),
    "grad in what all ranks share": lambda lax, w, x, rank: lax.cond(
        x[0] > 0, lambda: md.grad(lambda v: (np.sin(v * v) * x).sum())(w), lambda: w
    ),
    "grad in steps": grad_in_steps,
}

RANKS = 4
X = np.array([0.3, -0.2, -0.7, 0.4, 1.1, 0.5, -0.6, -0.9])
W = np.array([0.5, -0.3])


def on_ranks(program, mesh, **options):
    body = lambda w, x: program(md, w, x, axis_index("i"))  # noqa: E731
    return spmd.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"), **options)


def closing_over(program, mesh):
    """The same, of a weight from outside of the ranks."""
    spec = {"mesh": mesh, "in_specs": P("i"), "out_specs": P("i")}
    return lambda w, x: spmd.shard_map(lambda x: program(md, np.sin(w), x, axis_index("i")), **spec)(x)


def whole(program):
    return lambda w, x: np.concatenate(
        [program(Unrolled, w, block, rank) for rank, block in enumerate(np.split(x, RANKS))]
    )


def loss(f):
    return lambda w, x: (f(w, x) ** 3).sum()


def check(f, expected, *args):
    check_values(f, args, expected)


KINDS = ("value", "grad of grad", "linearize", "jvp of grad", "vmap", "vmap of grad")
REVERSE = ("value", "grad", "grad of grad")
FEW = ("grad",)  # which runs all that a value does


@shows("reference", "derivatives", "types")
def check_program(mesh, program, kinds=KINDS, **options):
    """Each rank takes its branch, or its steps: values and derivatives of these kinds."""
    kinds = REVERSE if program is PROGRAMS["custom_vjp"] and kinds != FEW else kinds
    with np.errstate(all="ignore" if "vmap of grad" in kinds else "warn"):  # elements run both branches
        check_kinds(on_ranks(program, mesh, **options), (W, X), whole(program), kinds)


@shows("reference", "derivatives", "types")
def check_other_axes(mesh, name, kinds=KINDS, typed=True):
    """An axis along which ranks choose alike, or take the same steps."""
    body, meaning, spec, axes = OTHER_AXES[name]
    fresh = spmd.make_mesh(
        (2, 2), ("i", "j"), backend=mesh.backend
    )  # all ranks make its communicators before they choose
    options = {"in_specs": (P(), spec), "out_specs": spec, "axis_names": axes, "check_rep": typed}
    check_kinds(spmd.shard_map(body, mesh=fresh, **options), (W, X), meaning, kinds)


# ---------------------------------------------------------------- collectives over the other axis


def over_the_other_axis(w, x):
    """Ranks along i choose; those along j take the same branch, and sum."""
    first = axis_index("i") == 0
    return md.cond(first, lambda: psum(x * w, "j") * psum(w, "j"), lambda: np.sin(x) - psum(x.sum(), "j"))


def over_the_other_axis_whole(w, x):
    (a, b), (c, d) = (np.split(half, 2) for half in np.split(x, 2))
    rest = np.concatenate([np.sin(c), np.sin(d)]) - (c + d).sum()
    return np.concatenate([np.tile((a + b) * w * 2 * w, 2), rest])


def within(w, x):
    """The sum of a shard_map in a branch: along j alone."""
    total = spmd.shard_map(lambda x: psum(x, "j"), in_specs=P("j"), out_specs=P())
    return md.cond(axis_index("i") == 0, lambda: np.tile(total(x * x), 2) * w[0], lambda: x)


def within_whole(w, x):
    first = x[:4] ** 2
    return np.concatenate([np.tile(first[:2] + first[2:], 2) * w[0], x[4:]])


def steps_along_one_axis(w, x):
    """Ranks along i take their own steps; those along j take the same ones, and sum."""
    return md.while_loop(
        lambda c: np.abs(psum(c, "j")).sum() > 0.5, lambda c: 0.6 * c + 0.1 * w * psum(np.sin(c), "j"), psum(x, "j") + x
    )


def steps_along_one_axis_whole(w, x):
    rows = []
    for row in np.split(x, 2):
        blocks = np.split(row, 2)
        c = [blocks[0] + blocks[1] + b for b in blocks]
        while np.abs(c[0] + c[1]).sum() > 0.5:
            c = [0.6 * b + 0.1 * w * (np.sin(c[0]) + np.sin(c[1])) for b in c]
        rows += c
    return np.concatenate(rows)


BOTH = P(("i", "j"))
OTHER_AXES = {
    "collectives": (over_the_other_axis, over_the_other_axis_whole, BOTH, {"i", "j"}),
    "a shard_map": (within, within_whole, P("i"), {"i"}),
    "steps": (steps_along_one_axis, steps_along_one_axis_whole, BOTH, {"i", "j"}),
}

# ---------------------------------------------------------------- a pipeline

TOKENS, FEATURES, CLASSES = 5, 3, 2


def pipeline_params(stages):
    rng = np.random.default_rng(0)
    return {
        "embedding": rng.normal(size=(TOKENS, FEATURES)),
        "layers": rng.normal(size=(stages, FEATURES, FEATURES)) / 2,
        "head": rng.normal(size=(FEATURES, CLASSES)),
    }


def pipeline_batch(count):
    rng = np.random.default_rng(1)
    return rng.integers(TOKENS, size=(count, 4)), rng.integers(CLASSES, size=(count, 4))


def error(x, labels, head):
    return -np.mean(np.take_along_axis(md.nn.log_softmax(x @ head), labels[:, None], 1))


def pipeline_whole(params, tokens, labels):
    def of_microbatch(tokens, labels):
        x = params["embedding"][tokens]
        for layer in params["layers"]:
            x = np.tanh(x @ layer)
        return error(x, labels, params["head"])

    return sum(map(of_microbatch, tokens, labels)) / len(tokens)


# ---------------------------------------------------------------- elements of a batch that choose

WEIGHT = 1.5


def alone(f):
    """Return the reference for `vmap` of a function of a weight and an element."""

    def all_of_them(w, xs):
        return md.tree.map(lambda *actual: np.stack(actual), *[f(w, x) for x in xs])

    return all_of_them


def batched(f):
    return md.vmap(f, (None, 0))


@md.custom_jvp
def root_by_rule(x):
    return np.sqrt(x)


root_by_rule.defjvps(lambda t, out, x: t / (2 * out))


def in_steps(lax, w, x):
    def step(c, k):
        return lax.cond(c > k, lambda c: w * np.sqrt(c - k), lambda c: c / 2 - 1, c), c

    c, cs = lax.scan(step, x, np.arange(2.0))
    return c + cs[1]


def one_in_another(lax, w, x):
    inner = lambda x: lax.cond(x > 2, lambda: np.sqrt(x - 2) * w, lambda: 1 / (2 - x), *())  # noqa: E731
    return lax.cond(
        x > 0, lambda x: inner(x) + np.log(x), lambda x: lax.switch((-x).astype(int), [np.sin, np.cos], x), x
    )


#: Functions of a weight that elements share and an element, each with branches that are not finite, or raise, at the
#: operands of elements that take another one; or with derivatives that are not.
BY_ELEMENT = {
    "sqrt": lambda lax, w, x: lax.cond(x > 0, lambda x: w * np.sqrt(x), lambda x: 2 * x, x),
    "closed over": lambda lax, w, x: lax.cond(x > 0, lambda: w * np.log(x), lambda: x * w),
    "shared": lambda lax, w, x: lax.cond(x > 0, lambda w: w ** (1 / x), lambda w: np.arctan2(w, x), w),
    "switch": lambda lax, w, x: lax.switch(
        2 * np.sign(x).astype(int) + 1, [lambda x: np.log(-x), lambda x: w * np.cos(x), lambda x: x ** (w - 1)], x
    ),
    "trees": lambda lax, w, x: (lambda out: out["a"] + out["b"][0])(
        lax.cond(x > 0, lambda: {"a": 1 / x, "b": (w,)}, lambda: {"a": x, "b": (x * w,)})
    ),
    "integers": lambda lax, w, x: lax.cond(
        x > 0, lambda n: w / n * x, lambda n: x * w, np.maximum(np.ceil(x), 0).astype(int)
    ),
    "cholesky": lambda lax, w, x: lax.cond(
        x[0, 0] > 0, lambda x: np.sum(np.linalg.cholesky(x)) * w, lambda x: np.sum(x), x
    ),
    "in steps": in_steps,
    "one in another": one_in_another,
    "custom rule": lambda lax, w, x: lax.cond(x > 0, lambda: root_by_rule(w * x), lambda: x),
    "checkpoint": lambda lax, w, x: lax.cond(x > 0, lambda: md.checkpoint(lambda x: np.sqrt(w * x))(x), lambda: x * w),
    "gradient": lambda lax, w, x: lax.cond(x > 0, lambda: md.grad(lambda v: w * np.sqrt(v))(x), lambda: x),
}
_SCALARS = np.array([-1.0, 4.0, 0.0, 0.5])
ELEMENTS = dict.fromkeys(BY_ELEMENT, _SCALARS) | {
    "shared": np.array([-1.0, 4.0, 0.0]),
    "cholesky": np.array([-np.eye(2), 4 * np.eye(2) + 1, np.zeros((2, 2))]),
    "in steps": np.array([-1.0, 9.0, 0.5]),
    "one in another": np.array([-1.5, 4.0, -0.5, 1.0, 2.0 - 1e-3]),
}


@shows("reference", "derivatives")
def check_elements(mesh, name):
    """Each element of a batch as if it were alone, also on ranks of which no element takes a branch."""
    xs = ELEMENTS[name]
    args = WEIGHT, np.concatenate([xs, np.stack([xs[0]] * len(xs))])  # on the second of two ranks one kind alone
    for spec in (P("i"), P()):
        body = lambda w, xs: batched(lambda w, x: BY_ELEMENT[name](md, w, x))(w, xs)  # noqa: E731
        f = spmd.shard_map(body, mesh=mesh, in_specs=(P(), spec), out_specs=spec)
        check_kinds(f, args, alone(lambda w, x: BY_ELEMENT[name](Unrolled, w, x)), ["grad"])
