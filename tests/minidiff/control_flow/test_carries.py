"""Types of what loops carry and branches return: on ranks by the program, not by the values that it meets."""

import pytest

import minidiff as md
import minidiff.numpy as np
from collectives import axis_index, psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs.control import branch_by_values, stepwise_gradients

ONES = np.ones(2)


def turning(c, x):
    """A carry that becomes varying only in the third step, through others."""
    return (x * axis_index("j"), c[0], c[1], psum(c[3] + c[0], ("i", "j"))), c[2]


def counted(steps):
    """A loop whose length is no Python number, though ranks share it."""

    def loop(step, init):
        going = lambda s: s[0] < psum(0.25 * steps, ("i", "j"))  # noqa: E731
        return md.while_loop(going, lambda s: (s[0] + 1, step(s[1])), (0.0, init))[1]

    return loop


#: Programs of a block f64[2]{i}, and a number whose sign branches depend on -> the types of their results.
TYPES = {
    "scan": (lambda x, total: md.scan(turning, (ONES,) * 4, np.stack([x] * 4)), "{i,j} {i,j} {i,j} - 4{i,j}"),
    "while_loop": (lambda x, total: counted(3)(lambda s: turning(s, x)[0], (ONES,) * 4), "{i,j} {i,j} {i,j} -"),
    **{
        f"{steps} steps": (
            lambda x, total, n=steps: (
                counted(n)(lambda s: (x, s[0], s[1] * 2), (ONES,) * 3),
                md.scan(lambda s, _: ((x, s[0], s[1]), s[2]), (ONES,) * 3, length=n),
                md.fori_loop(0, n, lambda i, s: (x, s[0]), (ONES,) * 2),
            ),
            " ".join(["{i}"] * 6 + [f"{n}{{i}}", "{i} {i}"]),
        )
        for n, steps in [(n, n) for n in (0, 1, 3)]
    },
    "choices": (lambda x, total: branch_by_values(total, x, ONES), "{i} {i}"),
    "choices of trees": (
        lambda x, total: md.cond(total > 0, lambda: {"a": x, "b": ONES}, lambda: {"a": ONES, "b": 2 * ONES}),
        "{i} -",
    ),
    "choices in a loop": (
        lambda x, total: md.scan(lambda c, _: (c, branch_by_values(total, c, c * x)[0]), ONES, length=2),
        "- 2{i}",
    ),
    "jvp of choices": (
        lambda x, total: md.jvp(lambda w: branch_by_values(total, x * w, w), (ONES,), (ONES,)),
        "{i} {i} {i} {i}",
    ),
    "vjp of choices": (lambda x, total: md.vjp(lambda w: branch_by_values(total, x * w, w)[0], ONES)[1](ONES), "-"),
    "vmap of choices": (
        lambda x, total: md.vmap(lambda w: branch_by_values(total, x * w, w)[0])(np.ones((3, 2))),
        "3{i}",
    ),
    "what the program says itself": (lambda x, total: md.cond(True, lambda: ONES, lambda: x), "-"),
}


def types_of(body, *args):
    """The types of what a body returns, run and recorded: they must be the same."""
    seen = []

    def shown(x):
        seen.append([str(md.typeof(y)) for y in md.tree.leaves(body(x))])
        return ()

    for run in (lambda f: f, md.make_tape):
        run(mapped(shown, mesh(2, 2), P("i"), ()))(*args)
    assert seen[0] == seen[-1]
    return seen[0]


@each("name", TYPES)
@each("sign", [1.0, -1.0])
def test_types_do_not_depend_on_values(name, sign):
    body, expected = TYPES[name]
    types = [t.replace("-", "") for t in expected.split()]
    shapes = [f"f64[{n},2]{t[len(n) :]}" if (n := t.partition("{")[0]) else f"f64[2]{t}" for t in types]
    assert types_of(lambda x: body(x, sign * psum(x.sum(), "i")), np.arange(4.0)) == shapes


def as_while_loop(step, init, ts):
    state = 0, init
    c = md.while_loop(lambda s: s[0] < len(ts), lambda s: (s[0] + 1, step(s[1], s[0] + 1.0)[0]), state)[1]
    return c, c[0]


def gradient_in_a_body(f):
    """The same as `md.grad`, for a value that ranks share along an axis that the outer shard_map does not map."""
    return lambda v: mapped(md.grad(f), None, P(), P())(v)


@pytest.mark.parametrize("turns", [(0, 1, 2), (1, 0, 1)], ids=["straight", "turning"])
@pytest.mark.parametrize("how", ["scan", "while_loop", "jit", "shard_map"])
@pytest.mark.filterwarnings("ignore:.*the gradient of the sum of the results")  # which is what is tested
def test_derivatives_in_steps_are_of_the_types_that_stay(how, turns):
    """A cotangent is the sum over ranks of what they share: so values depend on types, and these are as recorded."""
    loop = as_while_loop if how == "while_loop" else md.scan
    jitted = md.jit(lambda v, x: md.grad(lambda v: (v * v * x).sum())(v))  # recorded in the first loop that uses it

    def body(w, x):
        ways = {"jit": lambda _: lambda v: jitted(v, x), "shard_map": gradient_in_a_body}
        return md.tree.map(lambda y: y[None], stepwise_gradients(loop, ways.get(how, md.grad), w, x, turns))

    axes = {"i"} if how == "shard_map" else {"i", "j"}
    f = mapped(body, mesh(2, 2), (P(), P("i")), P("i"), axis_names=axes)
    args = np.array([0.5, -0.3]), np.arange(4.0) / 3
    expected = md.make_tape(f)(*args)(*args)
    for _ in range(2):
        assert_trees_close(md.tree.leaves(f(*args)), expected)


# ---------------------------------------------------------------- dtypes


@each("staged", [False, True])
def test_python_numbers_take_the_dtype_of_a_step(staged):
    def f(x):
        return (
            md.scan(lambda c, v: (c + v, c), 0.0, x),
            md.fori_loop(0, 3, lambda i, c: c * x[0], 1),
            md.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] + x[0]), (0, 0))[1],
            md.scan(lambda c, v: (0.0, c), x[0], x),
        )

    x = np.ones(3, np.float32)
    run = md.jit(f) if staged else f
    assert {md.typeof(y).dtype for y in md.tree.leaves(run(x))} == {np.dtype(np.float32)}
    assert md.grad(lambda x: run(x)[0][0])(x).dtype == np.float32


@each("run", [lambda f: f, md.jit])
def test_no_steps(run):
    def f(x, xs):
        c, ys = md.scan(lambda c, x: (np.sin(c) * x, (c, x.sum())), x, xs)
        return md.fori_loop(3, 1, lambda i, c: c * i, c), ys

    x, none = np.arange(3.0), np.ones((0, 3))
    assert_trees_close(run(f)(x, none), (x, (none, np.ones(0))))
    grads = md.grad(lambda x, xs: (run(f)(x, xs)[0] * x).sum() + run(f)(x, xs)[1][1].sum(), (0, 1))(x, none)
    assert_trees_close(grads, (2 * x, none))
    assert md.vmap(lambda xs: run(f)(x, xs)[1][1])(np.ones((2, 0, 3))).shape == (2, 0)
