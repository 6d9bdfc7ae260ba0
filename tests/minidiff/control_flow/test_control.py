"""Control flow against the same program with Python's own: values, derivatives, batches, tapes, ranks, errors."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pmean, psum
from minidiff.compiler.codegen import CompiledTape
from minidiff.control_flow import loops
from spmd import P
from tests.checks.samples import each
from tests.minidiff.refusals import refusals
from tests.programs.control import ARGS, BODIES, RANKS, Unrolled, branch_by_values, on_ranks, stepwise_gradients
from tests.programs.on_blocks import assert_trees_close

# ---------------------------------------------------------------- programs


@dataclass
class Case:
    """`f(lax, *args)`, a program in terms of `md` or of `Unrolled`; `reverse` says whether reverse mode takes it."""

    f: Callable
    args: tuple
    reverse: bool = True

    def of(self, lax: Any) -> Callable:
        return lambda *args: self.f(lax, *args)

    def staged(self) -> Callable:
        """The program run from its tape."""
        structure = None

        def flat(*args):
            nonlocal structure
            leaves, structure = md.tree.flatten(self.f(md, *args))
            return leaves

        tape = md.make_tape(flat)(*self.args)
        tape.check()
        return lambda *args: md.tree.unflatten(structure, tape(*md.tree.leaves(args)))


rng = np.random.default_rng(0)
W = rng.normal(size=(3, 3)) / 2
XS = rng.normal(size=(4, 3))
X = rng.normal(size=3)


def rnn(lax, w, h, xs):
    return lax.scan(lambda h, x: (np.tanh(w @ h + x), h[0] * x), h, xs)


def closed_over(lax, w, h):
    scale = np.sin(w)
    return lax.scan(lambda h, x: (np.tanh(scale @ h) + x * w[0], np.cos(w).sum()), h, XS)


def reverse_scan(lax, h, xs):
    return lax.scan(lambda h, x: (np.sin(h * x["a"]) + x["b"], {"y": h}), h, {"a": xs, "b": xs**2}, reverse=True)


def counting(lax, x):
    """Integer carries, and a carry that passes through."""

    def step(carry, _):
        i, total, saved = carry
        return (i + 1, total * saved[0] + i, saved), i * total

    return lax.scan(step, (0, x.sum(), x), None, length=4)


def empty_carry(lax, xs):
    return lax.scan(lambda carry, x: ((), np.sin(x) * x[0]), (), xs)


def nothing_stacked(lax, x):
    return lax.scan(lambda x, _: (np.sin(x) * x, None), x, None, length=3)


def nested_scans(lax, w, xs):
    def row(total, x):
        inner, _ = lax.scan(lambda c, v: (np.tanh(c * v + w[1]), None), total, x)
        return inner, inner * x

    return lax.scan(row, w[0], xs)


def cond_in_scan(lax, x, xs):
    def step(c, v):
        c = lax.cond(v.sum() > 0, lambda c: np.sin(c) * v, lambda c: c * x, c)
        return c, c.sum()

    return lax.scan(step, x, xs)


def scan_in_cond(lax, x, xs):
    def loop(x):
        return lax.scan(lambda c, v: (np.sin(c) * v, c), x, xs)[0]

    return lax.cond(xs.sum() > 0, loop, lambda x: x**2, x), lax.cond(xs.sum() > 0, lambda x: x * xs[0], loop, x)


def plain_cond(lax, pred, x, y):
    return lax.cond(pred, lambda x, y: (np.sin(x) * y, x), lambda x, y: (x * 2.0, np.exp(y) * x), x, y)


def cond_of_constants(lax, x, y):
    """One branch does not depend on an operand, the other on nothing at all."""
    return lax.cond(x.sum() > 0, lambda: np.sin(y) * y, lambda: np.ones(3)), lax.cond(
        x.sum() > 0, lambda: 1.0, lambda: x.sum()
    )


def switches(lax, k, x):
    branches = [lambda x: np.sin(x), lambda x: x * x, lambda x: np.ones(3), lambda x: x.sum() * x]
    return [lax.switch(k + i, branches, x) for i in range(-1, 4)]


def loop_with_known_bounds(lax, x):
    return lax.fori_loop(1, 4, lambda i, c: np.sin(c) * x + i, x)


def shared_operands(lax, x):
    return lax.cond(x.sum() > 0, lambda a, b: np.sin(a) * b, lambda a, b: a * a * b, x, x)


def newton(lax, x):
    """The square root, to convergence."""
    return lax.while_loop(lambda r: abs(r * r - x).max() > 1e-13, lambda r: (r + x / r) / 2, np.ones(3) * x.sum())


def counted_while(lax, n, x):
    return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, np.sin(s[1]) * x), (0, x))


def loop_with_traced_bounds(lax, n, x):
    return lax.fori_loop(0, n, lambda i, c: np.sin(c) * x + i, x)


def while_in_scan(lax, x, xs):
    def step(c, v):
        return lax.while_loop(lambda c: (c * c).sum() < 3, lambda c: c * 1.5 + x, c * v), None

    return lax.scan(step, x, xs)


CASES = {
    "scan": Case(rnn, (W, X, XS)),
    "closed over": Case(closed_over, (W, X)),
    "reverse": Case(reverse_scan, (X, XS)),
    "integer carry": Case(counting, (X,)),
    "empty carry": Case(empty_carry, (XS,)),
    "no ys": Case(nothing_stacked, (X,)),
    "nested scans": Case(nested_scans, (X, XS)),
    "cond in scan": Case(cond_in_scan, (X, XS)),
    "scan in cond": Case(scan_in_cond, (X, XS)),
    "scan in cond, the other way": Case(scan_in_cond, (X, -XS)),
    "cond, true": Case(plain_cond, (True, X, X + 1)),
    "cond, false": Case(plain_cond, (False, X, X + 1)),
    "cond of a number": Case(plain_cond, (2.0, X, X + 1)),
    "cond of constants": Case(cond_of_constants, (abs(X), X)),
    "cond of constants, false": Case(cond_of_constants, (-abs(X), X)),
    "one operand twice": Case(shared_operands, (X,)),
    "switch": Case(switches, (1, X)),
    "fori_loop": Case(loop_with_known_bounds, (X,)),
    "while_loop": Case(newton, (abs(X) + 0.5,), reverse=False),
    "counted while_loop": Case(counted_while, (3, X), reverse=False),
    "fori_loop with traced bounds": Case(loop_with_traced_bounds, (3, X), reverse=False),
    "while_loop in scan": Case(while_in_scan, (abs(X), abs(XS)), reverse=False),
}
REVERSIBLE = {name: case for name, case in CASES.items() if case.reverse}
BOTH = each("staged", [False, True], ids=["eager", "staged"])


def program(name: str, staged: bool) -> tuple[Callable, Callable, tuple]:
    """The program, its meaning, and arguments; as functions of those arguments that are no integers."""
    case = CASES[name]
    f = case.staged() if staged else case.of(md)
    moving = [i for i, x in enumerate(case.args) if isinstance(x, np.ndarray)]

    def of_moving(f):
        def g(*args):
            full = list(case.args)
            for i, x in zip(moving, args):
                full[i] = x
            return floats(f(*full))

        return g

    return of_moving(f), of_moving(case.of(Unrolled)), tuple(case.args[i] for i in moving)


def floats(out):
    """The results that carry derivatives."""
    return [x for x in md.tree.leaves(out) if md.typeof(x).dtype.kind == "f"]


def random_like(x, seed=7):
    rng = np.random.default_rng(seed)
    return md.tree.map(lambda x: rng.normal(size=np.shape(x)), x)


@BOTH
@each("name", CASES)
def test_values(name, staged):
    case = CASES[name]
    out, expected = (case.staged() if staged else case.of(md))(*case.args), case.of(Unrolled)(*case.args)
    assert md.tree.structure(out) == md.tree.structure(expected)
    assert_trees_close(out, expected)
    for x, y in zip(md.tree.leaves(out), md.tree.leaves(expected), strict=True):
        assert md.typeof(x) == md.typeof(y)


def loss(f):
    """A scalar, not quadratic in anything."""

    def scalar(*args):
        outs = f(*args)
        return sum((np.sin(x) * c).sum() for x, c in zip(outs, random_like([np.zeros(np.shape(x)) for x in outs], 3)))

    return scalar


def gradient(f, t):
    return md.grad(loss(f), tuple(range(len(t))))


def slope(f, t):
    """The derivative of a scalar function in the direction t, by its gradient."""
    return lambda *args: sum((g * v).sum() for g, v in zip(gradient(f, t)(*args), t))


#: Derivatives of f, with tangents t like its arguments.
FORWARD = {
    "jvp": lambda f, t: lambda *args: md.jvp(f, args, t),
    "jvp of jvp": lambda f, t: lambda *args: md.jvp(lambda *args: md.jvp(f, args, t)[1], args, t),
    "linearize": lambda f, t: lambda *args: md.linearize(f, *args)[1](*t),
}
REVERSE = {
    "value_and_grad": lambda f, t: md.value_and_grad(loss(f), tuple(range(len(t)))),
    "forward over reverse": lambda f, t: lambda *args: md.jvp(gradient(f, t), args, t)[1],
    "reverse over reverse": lambda f, t: md.grad(slope(f, t), tuple(range(len(t)))),
    "reverse over forward": lambda f, t: md.grad(lambda *args: md.jvp(loss(f), args, t)[1], tuple(range(len(t)))),
}
RECORDED = {"jvp of jvp", "linearize", "value_and_grad", "reverse over reverse"}


@BOTH
@each("name", CASES)
def test_derivatives(name, staged):
    """Run and recorded; those of second order are one, whichever way they are made."""
    f, meaning, args = program(name, staged)
    t, expected, tapes = random_like(args), {}, {}
    for how, of in (FORWARD | REVERSE if CASES[name].reverse else FORWARD).items():
        order = "second" if "over" in how else how
        if order not in expected:
            expected[order] = of(meaning, t)(*args)
        assert_trees_close(of(f, t)(*args), expected[order])
        if how in RECORDED:
            tapes[how] = md.make_tape(of(f, t))(*args)
            tapes[how].check()
            assert_trees_close(tapes[how](*args), md.tree.leaves(expected[order]))
    if CASES[name].reverse:
        assert tapes["value_and_grad"] == md.make_tape(REVERSE["value_and_grad"](f, t))(*args)


def loop_over(f, *args):
    outs = [f(*[x[i] for x in args]) for i in range(len(args[0]))]
    return md.tree.map(lambda *xs: np.stack(xs), *outs)


@BOTH
@each("name", CASES)
def test_vmap(name, staged):
    f, meaning, args = program(name, staged)
    rng = np.random.default_rng(5)
    many = tuple(x + 0.1 * abs(rng.normal(size=(3, *x.shape))) for x in args)
    assert_trees_close(md.vmap(f)(*many), loop_over(meaning, *many))
    for mapped in range(len(args)):  # each argument alone
        axes = tuple(0 if i == mapped else None for i in range(len(args)))
        batched = tuple(m if i == mapped else x for i, (x, m) in enumerate(zip(args, many)))
        expected = loop_over(
            lambda x, i=mapped: meaning(*[x if i == j else y for j, y in enumerate(args)]), many[mapped]
        )
        assert_trees_close(md.vmap(f, axes)(*batched), expected)
    tape = md.make_tape(md.vmap(f))(*many)
    tape.check()
    assert_trees_close(tape(*many), loop_over(meaning, *many))


@BOTH
@each("name", REVERSIBLE)
def test_vmap_and_grad(name, staged):
    f, meaning, args = program(name, staged)
    numbers = tuple(range(len(args)))
    many = tuple(np.stack([x, x * 1.1]) for x in args)
    expected = loop_over(md.grad(loss(meaning), numbers), *many)
    assert_trees_close(md.vmap(md.grad(loss(f), numbers))(*many), expected)
    assert_trees_close(md.grad(lambda *xs: md.vmap(loss(f))(*xs).sum(), numbers)(*many), expected)
    tape = md.make_tape(md.vmap(md.grad(loss(f), numbers)))(*many)
    tape.check()
    assert_trees_close(tape(*many), md.tree.leaves(expected))


# ---------------------------------------------------------------- on ranks

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")


@BOTH
@each("check_rep", [True, False], ids=["typed", "untyped"])
@each("name", RANKS)
def test_in_a_body(name, staged, check_rep):
    args = ARGS
    f = on_ranks(RANKS[name], md, MESH, check_rep=check_rep)
    meaning = on_ranks(RANKS[name], Unrolled, MESH, check_rep=check_rep)
    if staged:
        f = md.make_tape(f)(*args)
        f.check()
    tangents = random_like(args)
    assert_trees_close(f(*args), md.tree.leaves(meaning(*args)))
    assert_trees_close(md.jit(f)(*args), md.tree.leaves(meaning(*args)))
    assert_trees_close(md.jvp(f, args, tangents), md.tree.leaves(md.jvp(meaning, args, tangents)))
    many = tuple(np.stack([x, 0.9 * x]) for x in args)
    assert_trees_close(md.vmap(f)(*many), md.tree.leaves(loop_over(meaning, *many)))
    if name == "while_loop":
        return
    gradient, expected = md.grad(loss(f), (0, 1)), md.grad(loss(meaning), (0, 1))(*args)
    assert_trees_close(gradient(*args), expected)
    assert_trees_close(md.jit(gradient)(*args), expected)
    tape = md.make_tape(gradient)(*args)
    tape.check()
    assert_trees_close(tape(*args), expected)
    assert_trees_close(md.vmap(gradient)(*many), loop_over(md.grad(loss(meaning), (0, 1)), *many))

    def second(f):
        return md.grad(lambda w, x: (md.grad(loss(f))(w, x) ** 2).sum(), (0, 1))

    assert_trees_close(second(f)(*args), second(meaning)(*args))


def test_a_compiled_body_is_one_program():
    """Choices and loops too, whose predicates ranks agree about: of data, like all that stands around them."""

    def f(x, k):
        total = psum(x.sum(), "i")
        x = md.cond(total > 0, lambda x: x * psum(x, "j"), lambda x: np.sin(x), x)
        x = md.switch(k, [lambda: x, lambda: pmean(x, "i") + x, lambda: x * axis_index("j")])
        return md.while_loop(lambda c: psum(c.sum(), ("i", "j")) < 30, lambda c: c + np.abs(x) + 1, x)

    mapped = spmd.shard_map(f, mesh=MESH, in_specs=(P("i"), P()), out_specs=P(("i", "j")))
    compiled = md.jit(lambda x, k: mapped(x, k))
    for x in (np.arange(4.0), -np.arange(4.0)):
        for k in range(3):
            np.testing.assert_allclose(compiled(x, k).gather(), mapped(x, k).gather())
    body = next(x for x in compiled.program(x, k).source.namespace.values() if isinstance(x, CompiledTape))
    ((source, _),) = body.lowered.values()
    for line in (
        "cond(",
        "switch(",
        "while_loop(",
        "def cond_true_fun",
        "def switch_branches_2",
        "def while_loop_cond",
    ):
        assert line in source.text


def test_a_choice_of_many_compiled():
    f = md.jit(lambda k, x: md.switch(k, [lambda x: x, lambda x: -x, np.cos], x))
    assert [f(k, 0.0) for k in (-1, 1, 7)] == [0.0, 0.0, 1.0]
    gradient = md.jit(md.grad(lambda x, k: f(k, x)))
    assert [gradient(0.0, k) for k in (-1, 1, 7)] == [1.0, -1.0, 0.0]


def test_ranks_that_may_disagree():
    def body(x):
        return md.cond(x.sum() > 0, lambda x: x, lambda x: -psum(x, "i"), x)

    def loop(x):
        return md.while_loop(lambda x: x.sum() < 3, lambda x: x + psum(x, "i"), x)

    for f in (body, loop):
        mapped = spmd.shard_map(f, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
        for run in (mapped, md.make_tape(mapped)):
            with pytest.raises(md.VarianceError, match=r"bool\[\]\{i\}.* varies along 'i'.*has a psum over 'i'"):
                run(np.ones(4))


def types_of(body, *args, in_specs=P("i")):
    """The types of what a body returns, run and recorded: they must be the same."""
    seen = []

    def shown(*blocks):
        seen.append(list(map(str, map(md.typeof, md.tree.leaves(body(*blocks))))))
        return ()

    mapped = spmd.shard_map(shown, mesh=MESH, in_specs=in_specs, out_specs=())
    mapped(*args)
    md.make_tape(mapped)(*args)
    assert seen[0] == seen[1]
    return seen[0]


def test_carries_are_pbroadcast_to_a_fixed_point():
    """A carry that becomes varying only in the third step, through others, is pbroadcast before the loop."""

    def turning(c, x):
        return (x * axis_index("j"), c[0], c[1], psum(c[3] + c[0], ("i", "j"))), c[2]

    def by_scan(x):
        return md.scan(turning, (np.ones(2),) * 4, np.stack([x] * 4))

    def by_while(x):
        step = lambda s: (s[0] + 1, turning(s[1], x)[0])  # noqa: E731
        return md.while_loop(lambda s: s[0] < 3, step, (0, (np.ones(2),) * 4))

    def by_fori(x):
        return md.fori_loop(0, 3, lambda i, c: turning(c, x)[0], (np.ones(2),) * 4)

    varying = ["f64[2]{i,j}"] * 3
    assert types_of(by_scan, np.arange(4.0)) == [*varying, "f64[2]", "f64[4,2]{i,j}"]
    assert types_of(by_while, np.arange(4.0)) == ["i64[]", *varying, "f64[2]"]
    assert types_of(by_fori, np.arange(4.0)) == [*varying, "f64[2]"]
    # one that starts varying stays so, whatever a step makes of it
    assert types_of(lambda x: md.scan(lambda c, _: (psum(c, "i"), c), x, length=2), np.arange(4.0)) == [
        "f64[2]{i}",
        "f64[2,2]{i}",
    ]


def test_branches_are_joined():
    """A result varies where it does in one branch; what it is varying for is summed once, on the way back."""

    def body(x, y):
        w = np.sin(y)
        return md.cond(psum(x.sum(), "i") > 0, lambda: (x * w, w), lambda: (w, w * axis_index("j"))), md.switch(
            psum(1, "i") - 2, [lambda: w, lambda: psum(x, "i")]
        )

    mapped = spmd.shard_map(
        lambda x, y: body(x, y)[0], mesh=MESH, in_specs=(P("i"), P()), out_specs=(P("i"), P(("i", "j")))
    )
    tape = md.make_tape(mapped)(np.arange(4.0), np.ones(2))
    tape.check()
    inner = tape.equations[0].params["body"]
    branches = next(e for e in inner.equations if str(e.primitive) == "cond")
    assert [str(v.type) for v in branches.outputs] == ["f64[2]{i}", "f64[2]{j}"]
    for x in (np.arange(4.0), -np.arange(4.0)):
        gradient = md.grad(lambda x, y: sum(np.sum(z) for z in mapped(x, y)), (0, 1))
        assert_trees_close(md.make_tape(gradient)(x, np.ones(2))(x, np.ones(2)), gradient(x, np.ones(2)))


@pytest.mark.parametrize("total", [1.0, -1.0])
def test_types_do_not_depend_on_the_branch_that_is_run(total):
    x, ones = np.arange(4.0), np.ones(2)
    sign = lambda x: total * psum(x.sum(), "i")  # noqa: E731
    assert types_of(lambda x: branch_by_values(sign(x), x, ones), x) == ["f64[2]{i}", "f64[2]{i}"]
    # of a number, a tree, what is the same in both; inside a loop, under transformations, where a branch chooses again
    of_trees = lambda x: md.cond(sign(x) > 0, lambda: {"a": x.sum(), "b": 1.0}, lambda: {"a": 0.0, "b": 2.0})  # noqa: E731
    assert types_of(of_trees, x) == ["f64[]{i}", "f64[]"]
    loop = lambda x: md.scan(lambda c, _: (c, branch_by_values(sign(x), c, c * x)[0]), ones, length=2)  # noqa: E731
    assert types_of(loop, x) == ["f64[2]", "f64[2,2]{i}"]
    again = lambda x: md.cond(sign(x) > 0, lambda: branch_by_values(sign(x), x, ones)[0], lambda: ones)  # noqa: E731
    assert types_of(again, x) == ["f64[2]{i}"]
    pushed = lambda x: md.jvp(lambda w: branch_by_values(sign(x), x * w, w), (ones,), (ones,))  # noqa: E731
    assert types_of(pushed, x) == ["f64[2]{i}"] * 4
    pulled = lambda x: md.vjp(lambda w: branch_by_values(sign(x), x * w, w)[0], ones)[1](ones)  # noqa: E731
    assert types_of(pulled, x) == ["f64[2]"]
    many = lambda x: md.vmap(lambda w: branch_by_values(sign(x), x * w, w)[0])(np.ones((3, 2)))  # noqa: E731
    assert types_of(many, x) == ["f64[3,2]{i}"]
    # what the program says itself, and not a value, is its own choice
    assert types_of(lambda x: md.cond(True, lambda: ones, lambda: x), x) == ["f64[2]"]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_types_do_not_depend_on_how_often_a_loop_runs(steps):
    def by_while(x):
        going = lambda s: s[0] < psum(0.25 * steps, ("i", "j"))  # noqa: E731
        return md.while_loop(going, lambda s: (s[0] + 1, x, s[1], s[2] * 2), (0.0, *[np.ones(2)] * 3))

    assert types_of(by_while, np.arange(4.0)) == ["f64[]", "f64[2]{i}", "f64[2]{i}", "f64[2]{i}"]

    def turning(x):
        return md.scan(lambda s, _: ((x, s[0], s[1]), s), (np.ones(2),) * 3, length=steps)

    varying = ["f64[2]{i}"] * 3 + [f"f64[{steps},2]{{i}}"] * 3
    assert types_of(turning, np.arange(4.0)) == varying
    assert types_of(lambda x: md.fori_loop(0, steps, lambda i, s: (x, s[0]), (np.ones(2),) * 2), np.arange(4.0)) == [
        "f64[2]{i}",
        "f64[2]{i}",
    ]


def gradient_in_a_body(f):
    """The same as `md.grad`, for a value that ranks share along an axis that the outer shard_map does not map."""
    return lambda v: spmd.shard_map(md.grad(f), in_specs=P(), out_specs=P())(v)


def as_while_loop(step, init, ts):
    state = 0, init
    c = md.while_loop(lambda s: s[0] < len(ts), lambda s: (s[0] + 1, step(s[1], s[0] + 1.0)[0]), state)[1]
    return c, c[0]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(sorted(BODIES)), min_size=2, max_size=4))
@example(["cond", "checkpoint", "scan"])  # what is known of a choice may be zeros, pbroadcast around it
def test_bodies_inside_one_another(names):
    """Innermost first: run, recorded, and compiled, as Python runs them."""
    assume(names.count("vmap") == 0 or not {"cond", "switch"}.intersection(names[: names.index("vmap")]))
    assume(names.count("vmap") < 2)

    def loss(which):
        def body(w, x):
            f = lambda x: np.sin(x) * w + psum(x * w, "i") / 4  # noqa: E731
            for name in names:
                f = BODIES[name][which](f)
            return psum((f(x) * x).sum(), ("i", "j"))

        return spmd.shard_map(body, mesh=MESH, in_specs=(P(), P(("i", "j"))), out_specs=P())

    gradient, meaning = (md.value_and_grad(loss(which), (0, 1)) for which in (0, 1))
    expected = meaning(*ARGS)
    assert_trees_close(gradient(*ARGS), expected)
    assert_trees_close(md.jit(gradient)(*ARGS), expected)
    tape = md.make_tape(gradient)(*ARGS)
    tape.check()
    assert_trees_close(tape(*ARGS), md.tree.leaves(expected))


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
    mapped = spmd.shard_map(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P("i"), axis_names=axes)
    args = np.array([0.5, -0.3]), np.arange(4.0) / 3
    expected = md.make_tape(mapped)(*args)(*args)
    for _ in range(2):
        assert_trees_close(md.tree.leaves(mapped(*args)), expected)


def test_a_step_with_known_types_is_not_recorded():
    """A step is recorded for its types only where they might still change."""
    calls = []

    def by_while(x, w):
        def step(s):
            calls.append(s)
            return s[0] + 1, np.sin(s[1]) * x, s[2] * 2

        return md.while_loop(lambda s: s[0] < psum(0.75, ("i", "j")), step, (0.0, x, w))[2]

    mapped = spmd.shard_map(by_while, mesh=MESH, in_specs=(P("i"), P()), out_specs=P())
    assert_trees_close(mapped(np.arange(4.0), np.ones(2)), 8 * np.ones(2))
    assert len(calls) == 3


def test_a_branch_that_cannot_be_recorded_has_no_say():
    def body(x):
        total = psum(x.sum(), "i")
        return md.cond(total > 0, lambda t: np.ones(2), lambda t: x if float(t) < -1 else -x, total)

    run = lambda spec: spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=spec)  # noqa: E731
    assert_trees_close(run(P())(np.arange(4.0)), np.ones(2))
    with pytest.raises(md.VarianceError):
        run(P())(-np.arange(4.0))


def test_a_branch_that_raises_raises_where_it_is_run():
    def refuse(x):
        raise ValueError("negative")

    def body(x):
        return md.cond(psum(x.sum(), "i") > 0, lambda x: psum(x, "i"), refuse, x)

    mapped = spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P())
    assert_trees_close(mapped(np.arange(4.0)), np.array([2.0, 4.0]))
    for run, x in ((mapped, -np.arange(4.0)), (md.make_tape(mapped), np.arange(4.0))):
        with pytest.raises(ValueError, match="negative"):
            run(x)
    # but where the types of branches disagree as they are written, that is an error whichever is run
    explicit = lambda x, y: md.cond(psum(x.sum(), "i") > 0, lambda: x, lambda: x * y)  # noqa: E731
    mapped = spmd.shard_map(explicit, mesh=MESH, in_specs=(P("i"), P()), out_specs=P("i"), auto_pbroadcast=False)
    with pytest.raises(md.VarianceError, match=r"multiply: operands f64\[2\]\{i\} and f64\[2\] .*pbroadcast\(x, 'i'\)"):
        mapped(np.arange(4.0), np.ones(2))


def test_a_branch_may_call_itself_as_long_as_a_value_says():
    def halved(n, x):
        return md.cond(n > 1, lambda n, x: halved(n / 2, x + n), lambda n, x: x, n, x)

    mapped = spmd.shard_map(lambda n, x: halved(psum(n.sum(), "i"), x), mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    assert_trees_close(mapped(np.ones(4), np.zeros(4)), np.full(4, 6.0))


CONDITIONS = {
    "a carry": (
        lambda x: md.while_loop(
            lambda s: s["n"] < 2, lambda s: {"n": s["n"] + x.sum(), "m": s["m"] * psum(x, "i")}, INIT
        ),
        r"the condition of while_loop, bool\[\]\{i\}, varies along 'i': .* body_fun has a psum over 'i'.*pany\(",
    ),
    "two carries": (
        lambda x: md.while_loop(
            lambda s: psum(s[0], ("i", "j")) + s[0] < s[1], lambda s: (s[0] + x.sum(), s[1] + axis_index("j")), (0.0, 1)
        ),
        r"bool\[\]\{i,j\}, varies along 'i', 'j': .* cond_fun has a psum over \('i', 'j'\)",
    ),
    "closed over": (
        lambda x: md.while_loop(lambda n: n < x.sum(), lambda n: n + psum(x.sum(), "i"), 0.0),
        r"bool\[\]\{i\}, varies along 'i': .* body_fun has a psum over 'i'",
    ),
    "a bound": (
        lambda x: md.fori_loop(0, axis_index("j"), lambda i, x: psum(x, ("i", "j")), x),
        r"the condition of fori_loop, bool\[\]\{j\}, varies along 'j'.* a psum over \('i', 'j'\).*pmax\(upper, 'j'\)",
    ),
    "an index": (
        lambda x: md.switch(axis_index("i"), [lambda: x, lambda: psum(x, "i")]),
        r"the index of switch, i64\[\]\{i\}, varies along 'i'.* branches\[1\] has a psum over 'i'.*psum, pmax or pmin",
    ),
    "a shape": (
        lambda x: md.scan(lambda c, _: ({"a": np.concatenate([c["a"], x])}, None), {"a": np.ones(2)}, length=2),
        r"init\['a'\] has type f64\[2\], but a step returns f64\[4\]\{i\}; convert",
    ),
    "a dtype": (
        lambda x: md.scan(lambda c, _: ({"a": c["a"] * x}, None), {"a": np.ones(2, np.float32)}, length=2),
        r"init\['a'\] has type f32\[2\], but a step returns f64\[2\]\{i\}; convert .*astype",
    ),
}
INIT = {"n": 0.0, "m": np.ones(2)}


@BOTH
@each("name", CONDITIONS)
def test_types_that_cannot_be_pbroadcast(name, staged):
    body, message = CONDITIONS[name]
    f = spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises((md.VarianceError, TypeError), match=message):
        (md.make_tape(f) if staged else f)(np.ones(4))


@BOTH
def test_what_must_be_pbroadcast_by_hand_is_named(staged):
    """Errors name the leaf of the results, and the branch."""

    def body(x):
        chosen = md.cond(psum(x.sum(), "i") > 0, lambda: {"a": x}, lambda: {"a": np.ones(2)})
        return chosen["a"]

    f = spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"), auto_pbroadcast=False)
    message = (
        r"cond: the results at \[...\]\['a'\] f64\[2\]\{i\} of true_fun, f64\[2\] of false_fun disagree in variance"
    )
    with pytest.raises(md.VarianceError, match=message + r": write pbroadcast\(x, 'i'\) for that of false_fun"):
        (md.make_tape(f) if staged else f)(np.ones(4))


@BOTH
def test_python_numbers_all_the_way(staged):
    f = lambda x: md.scan(lambda c, t: ((c[0] + 1.0, c[1] * t), c[0]), (0.0, 1), x)  # noqa: E731
    x = np.array([2.0, 3.0])
    n, product, steps = md.make_tape(f)(x)(x) if staged else md.tree.leaves(f(x))
    assert (n, product, list(steps)) == (2.0, 6.0, [0.0, 1.0])


def test_a_shard_map_in_a_loop():
    double = spmd.shard_map(lambda x: x * psum(x, "i"), mesh=MESH, in_specs=P("i"), out_specs=P("i"))

    def f(lax, x):
        return lax.scan(lambda c, _: (np.sin(double(c)) * 1.0, None), x, None, length=2)[0].sum()

    x = np.arange(4.0)
    expected = md.value_and_grad(lambda x: f(Unrolled, x))(x)
    assert_trees_close(md.value_and_grad(lambda x: f(md, x))(x), expected)
    assert_trees_close(md.make_tape(md.value_and_grad(lambda x: f(md, x)))(x)(x), expected)


# ---------------------------------------------------------------- closures and nesting


@BOTH
def test_every_level_is_differentiated(staged):
    """Inner derivatives in bodies, of variables of the body, of the loop around it, and of the function around that."""

    def f(lax, a, xs):
        def outer(c, x):
            def g(b):
                return lax.scan(lambda d, y: (np.sin(d * a) * b + c * y, None), b, xs)[0]

            slope = md.grad(g)(x) + md.jvp(g, (x,), (1.0,))[1]
            return lax.cond(x > 0, lambda c: c * slope * a, lambda c: c + slope, c), slope

        c, ys = lax.scan(outer, a, xs)
        return c + ys.sum()

    xs = np.array([0.5, -0.3])
    run = md.make_tape(lambda a, xs: f(md, a, xs))(0.7, xs) if staged else lambda a, xs: [f(md, a, xs)]
    value, grads = md.value_and_grad(lambda a, xs: run(a, xs)[0], (0, 1))(0.7, xs)
    expected = md.value_and_grad(lambda a, xs: f(Unrolled, a, xs), (0, 1))(0.7, xs)
    assert_trees_close((value, grads), expected)


def test_vmap_around_and_inside():
    def f(lax, w, xs):
        def step(c, x):
            return md.vmap(lambda v: lax.cond(v > 0, np.sin, lambda v: v * w, v))(c) * x, None

        return lax.scan(step, np.ones(3) * w, xs)[0]

    ws = np.array([0.5, -0.5])
    one_by_one = np.stack([np.array([md.grad(lambda w, k=k: f(md, w, X)[k])(w) for k in range(3)]) for w in ws])

    def by_hand(w):
        c = np.ones(3) * w
        for x in X:
            c = np.where(c > 0, np.sin(c), c * w) * x
        return c

    for w, row in zip(ws, one_by_one):
        assert_trees_close([md.jvp(by_hand, (w,), (1.0,))[1]], [row])
    jacobian = md.vmap(lambda w: md.jvp(lambda w: f(md, w, X), (w,), (1.0,))[1])
    assert_trees_close(jacobian(ws), one_by_one)
    assert_trees_close(md.make_tape(jacobian)(ws)(ws), [one_by_one])


@BOTH
def test_a_linear_loop_is_transposed(staged):
    """Also beside a carry that is not linear."""

    def f(x):
        def step(carry, k):
            n, r, y = carry
            return (n + 1, np.sin(r) + k, y * r * n + y[::-1]), y * 2.0

        (_, _, y), ys = md.scan(step, (1, 0.5, x), np.arange(3.0))
        return md.fori_loop(0, 2, lambda i, c: c * (i + 1), y), md.cond(True, lambda y: -y, lambda y: y, ys)

    g = (lambda x: tuple(md.make_tape(f)(x)(x))) if staged else f
    ct = (X, np.arange(9.0).reshape(3, 3))
    expected = md.vjp(f, X)[1](ct)
    assert_trees_close(md.linear_transpose(g, X)(ct), expected)
    back = md.linear_transpose(lambda ct: md.linear_transpose(g, X)(ct)[0], ct)
    assert_trees_close(back(X)[0], f(X))


def test_predicates_that_are_many_at_once():
    """Both branches are run, and chosen from, element by element."""
    x = np.array([-1.0, 0.0, 2.0])
    f = lambda x: md.cond(x > 0, lambda x: (x * x, x), lambda x: (-x, 1.0), x)  # noqa: E731
    for run in (md.vmap(f), lambda x: tuple(md.make_tape(md.vmap(f))(x)(x)), md.vmap(md.make_tape(f)(1.0))):
        assert_trees_close(run(x), (np.array([1.0, 0.0, 4.0]), np.array([1.0, 1.0, 2.0])))
    g = md.vmap(lambda k, x: md.switch(k, [np.sin, np.cos, lambda x: x], x))
    k, expected = np.array([-3, 1, 7]), np.array([np.sin(-1.0), 1.0, 2.0])
    assert_trees_close(g(k, x), expected)
    assert_trees_close(md.make_tape(g)(k, x)(k, x), [expected])
    slopes = md.vmap(md.grad(lambda x, k: md.switch(k, [np.sin, np.cos, lambda x: x], x)))(x, k)
    assert_trees_close(slopes, np.array([np.cos(-1.0), 0.0, 1.0]))


def test_loops_of_different_lengths_at_once():
    n, x = np.array([0, 5, 2]), np.array([1.1, 1.2, 1.3])
    power = md.vmap(lambda n, x: md.fori_loop(0, n, lambda i, c: c * x, 1.0))
    assert_trees_close(power(n, x), x**n)
    assert_trees_close(md.make_tape(power)(n, x)(n, x), [x**n])
    assert_trees_close(md.jvp(lambda x: power(n, x), (x,), (np.ones(3),))[1], n * x ** (n - 1.0))
    tape = md.make_tape(lambda n, x: md.fori_loop(0, n, lambda i, c: c * x, 1.0))(1, 1.0)
    assert_trees_close(md.vmap(tape)(n, x), [x**n])


# ---------------------------------------------------------------- what is recorded, and kept


def names(tape):
    return [eqn.primitive.name for eqn in tape.equations]


def size(tape):
    return sum(1 + sum(size(b) for b in e.params.values() if isinstance(b, md.Tape)) for e in tape.equations)


def test_a_loop_is_recorded_once():
    def f(w, xs):
        return md.scan(lambda h, x: (np.tanh(w @ h + x), None), X, xs)[0].sum()

    short, long = (md.make_tape(md.grad(f, (0, 1)))(W, np.ones((n, 3))) for n in (2, 200))
    assert size(short) == size(long)
    assert names(long).count("scan") == 2
    forward, backward = (eqn for eqn in long.equations if eqn.primitive.name == "scan")
    assert [eqn.params["reverse"] for eqn in (forward, backward)] == [False, True]
    # Kept of each step: what the product needs of h, and tanh's derivative; never the weights.
    assert sorted(v.type.size for v in forward.outputs) == [3, 600, 600]
    md.make_tape(f)(W, XS).check()


def test_a_tape_of_cond_shows_its_branches():
    tape = md.make_tape(lambda x: md.cond(x > 0, lambda: x, lambda: np.sin(x)))(1.0)
    assert str(tape).splitlines() == [
        "lambda a:f64[]:",
        "  b:bool[] = greater(a, 0)",
        "  c:f64[] = cond(b, a)",
        "    lambda d:f64[]:",
        "      return d",
        "    lambda e:f64[]:",
        "      f:f64[] = sin(e)",
        "      return f",
        "  return c",
    ]


def test_known_predicates_leave_no_trace():
    tape = md.make_tape(lambda x: md.cond(True, np.sin, np.cos, md.switch(0, [np.exp, np.log], x)))(1.0)
    assert names(tape) == ["exp", "sin"]


def test_a_tape_with_branches_run_in_another():
    branch = md.make_tape(lambda p, x: md.cond(p, np.sin, np.cos, x))(True, 1.0)
    for p in (True, False):
        tape = md.make_tape(lambda x, p=p: branch(p, x))(1.0)
        tape.check()
        assert tape(2.0) == branch(p, 2.0) == [np.sin(2.0) if p else np.cos(2.0)]


def test_elements_of_an_array_cost_one_operation():
    """An eager loop takes the array apart once, and its cotangent is put together once."""

    def f(xs):
        return md.scan(lambda c, x: (c + x, c + x), np.zeros(3), xs)[1].sum()

    _, tape = md.core.reverse.engine.linearize_flat(lambda xs: [f(xs)], [XS], [True])
    recorded = names(tape)
    assert recorded.count("unstack") == recorded.count("stack") == 1 and "slice" not in recorded
    np.testing.assert_allclose(md.grad(f)(XS), np.arange(4.0, 0.0, -1.0)[:, None] * np.ones(3))


def test_pbroadcasts_stay_in_their_body():
    """A value pbroadcast in a branch is pbroadcast again outside: the branch may not have been run."""

    def f(w, x):
        def body(x):
            y = md.cond(psum(x.sum(), ("i", "j")) > 0, lambda: x * np.sin(w), lambda: x)
            return psum(y + np.sin(w) * x, ("i", "j"))

        return spmd.shard_map(body, mesh=MESH, in_specs=P(("i", "j")), out_specs=P())(x).sum()

    tape = md.make_tape(md.grad(f))(2.0, np.ones(4))
    tape.check()
    np.testing.assert_allclose(tape(2.0, np.ones(4)), [md.grad(f)(2.0, np.ones(4))])
    np.testing.assert_allclose(md.grad(f)(2.0, np.ones(4)), 8 * np.cos(2.0))


# ---------------------------------------------------------------- several steps at once


class AtOnce:
    """`md`, with loops that are recorded several steps at once."""

    cond, switch, while_loop = map(staticmethod, (md.cond, md.switch, md.while_loop))

    def __init__(self, unroll):
        self.scan = functools.partial(md.scan, unroll=unroll)
        self.unroll = unroll

    def fori_loop(self, lower, upper, body_fun, init_val):
        known = all(isinstance(n, int) for n in (lower, upper))
        return md.fori_loop(lower, upper, body_fun, init_val, unroll=self.unroll if known else None)


@each("unroll", [2, 3, True])
@each("name", CASES)
def test_several_steps_at_once(name, unroll):
    """Values and types, and derivatives of what is recorded."""
    case = CASES[name]
    f, meaning = case.of(AtOnce(unroll)), case.of(Unrolled)
    expected = meaning(*case.args)
    for run in (f, md.jit(f)):
        out = run(*case.args)
        assert md.tree.structure(out) == md.tree.structure(expected)
        for x, y in zip(md.tree.leaves(out), md.tree.leaves(expected), strict=True):
            assert_trees_close(x, y)
            assert md.typeof(x) == md.typeof(y)
    if case.reverse:
        moving = [i for i, x in enumerate(case.args) if isinstance(x, np.ndarray)]
        total = lambda f: lambda *args: sum(np.sum(x * x) for x in floats(f(*args)))  # noqa: E731
        expected = md.grad(total(meaning), moving)(*case.args)
        for gradient in (md.jit(md.grad(total(f), moving)), md.grad(md.jit(total(f)), moving)):
            assert_trees_close(gradient(*case.args), expected)


@each("unroll", [2, True])
@each("name", RANKS)
def test_several_steps_at_once_in_a_body(name, unroll):
    f, meaning = (on_ranks(RANKS[name], lax, MESH) for lax in (AtOnce(unroll), Unrolled))
    assert_trees_close(md.jit(f)(*ARGS), md.tree.leaves(meaning(*ARGS)))
    if name != "while_loop":
        gradient, expected = (md.grad(loss(f), (0, 1)) for f in (f, meaning))
        assert_trees_close(md.jit(gradient)(*ARGS), expected(*ARGS))


@each("reverse", [False, True])
def test_how_many_steps_are_recorded(reverse):
    def lengths(n, unroll):
        f = lambda xs: md.scan(lambda h, x: (np.tanh(h + x), h), 0.0, xs, reverse=reverse, unroll=unroll)  # noqa: E731
        tape = md.make_tape(f)(np.ones(n))
        loops = [eqn for eqn in tape.equations if eqn.primitive.name == "scan"]
        steps = [sum(eqn.primitive.name == "tanh" for eqn in loop.params["body"].equations) for loop in loops]
        return [eqn.params["length"] for eqn in loops], steps, names(tape).count("tanh")

    assert lengths(10, 1) == lengths(10, False) == ([10], [1], 0)
    assert lengths(10, 2) == ([5], [2], 0)
    assert lengths(10, 4) == ([2], [4], 2)
    assert lengths(10, 9) == ([1], [9], 1)
    assert lengths(10, 10) == lengths(10, 11) == lengths(10, True) == ([], [], 10)
    assert lengths(1, 1) == ([1], [1], 0)
    assert lengths(1, True) == ([], [], 1)
    assert lengths(0, True) == ([0], [1], 0)


def test_wrong_numbers_of_steps():
    for unroll in (0, -1):
        with pytest.raises(ValueError, match=f"scan: unroll must be True or the number of steps .* got {unroll}"):
            md.scan(lambda c, x: (c, x), 0.0, np.ones(3), unroll=unroll)
        with pytest.raises(ValueError, match=f"fori_loop: unroll must be True or the number .* got {unroll}"):
            md.fori_loop(0, 3, lambda i, x: x, 0.0, unroll=unroll)
    f = md.jit(lambda n: md.fori_loop(0, n, lambda i, x: x + i, 0.0, unroll=2))
    with pytest.raises(ValueError, match="unroll=2 needs bounds that are Python numbers"):
        f(3)


# ---------------------------------------------------------------- types


@BOTH
def test_python_numbers_take_the_dtype_of_a_step(staged):
    x = np.ones(3, np.float32)

    def f(x):
        a = md.scan(lambda c, v: (c + v, c), 0.0, x)
        b = md.fori_loop(0, 3, lambda i, c: c * x[0], 1)
        c = md.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] + x[0]), (0, 0))[1]
        d = md.cond(x[0] > 0, lambda: 1.0, lambda: x[0])
        e = md.scan(lambda c, v: (0.0, c), x[0], x)
        return a, b, c, d, e

    out = md.tree.leaves(f(x)) if not staged else md.make_tape(f)(x)(x)
    expected = [np.float32] * 7
    if not staged:
        expected[4] = np.float64  # only the branch that was taken is seen, and that is a Python number
    assert [md.typeof(y).dtype for y in out] == expected
    gradient = md.make_tape(md.grad(lambda x: f(x)[0][0]))(x)(x)[0] if staged else md.grad(lambda x: f(x)[0][0])(x)
    assert gradient.dtype == np.float32


@BOTH
def test_a_step_may_treat_numbers_as_arrays(staged):
    f = lambda x: md.scan(lambda c, v: (c.reshape(1)[0] + v, c[None]), 0.0, x)  # noqa: E731
    c, ys = md.make_tape(f)(X)(X) if staged else f(X)
    np.testing.assert_allclose(c, X.sum())
    np.testing.assert_allclose(ys, [[0], [X[0]], [X[0] + X[1]]])


@BOTH
def test_no_steps(staged):
    def f(x, xs):
        c, ys = md.scan(lambda c, x: (np.sin(c) * x, (c, x.sum())), x, xs)
        return md.fori_loop(3, 1, lambda i, c: c * i, c), ys

    def g(x, xs):
        return md.make_tape(f)(x, xs)(x, xs) if staged else md.tree.leaves(f(x, xs))

    c, ys, sums = g(X, np.ones((0, 3)))
    np.testing.assert_array_equal(c, X)
    assert (ys.shape, sums.shape) == ((0, 3), (0,))
    grads = md.grad(lambda x, xs: (g(x, xs)[0] * X).sum() + g(x, xs)[1].sum(), (0, 1))(X, np.ones((0, 3)))
    assert_trees_close(grads, (X, np.ones((0, 3))))
    assert md.vmap(lambda xs: g(X, xs)[2])(np.ones((2, 0, 3))).shape == (2, 0)


@BOTH
def test_nothing_carried_nothing_returned(staged):
    def f(x):
        md.while_loop(lambda s: np.sum(np.zeros(2)) > 1, lambda s: s, ())
        assert md.cond(x.sum() > 0, lambda: None, lambda: None) is None
        return md.scan(lambda c, _: (c, None), (), None, length=3), md.fori_loop(0, 2, lambda i, c: c, {"a": x})

    assert md.tree.structure(f(X)) == md.tree.structure((((), None), {"a": 0}))
    if staged:
        assert_trees_close(md.make_tape(f)(X)(X), [X])


# ---------------------------------------------------------------- errors


CARRIES = {
    "shape": (
        lambda x: md.scan(lambda c, _: ({"h": c["h"][None]}, None), {"h": x}, None, length=2),
        r"scan must keep the types of its carries: init\['h'\] has type f64\[3\], but a step returns f64\[1,3\]",
    ),
    "dtype": (
        lambda x: md.scan(lambda c, _: (c * 0.5, None), np.arange(3), x),
        r"scan .*: init has type i64\[3\], but a step returns f64\[3\]; convert",
    ),
    "structure": (
        lambda x: md.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1], x), (0, x)),
        r"while_loop must keep the structure of its carries: init_val is \(\*, \*\), but a step returns",
    ),
    "later": (
        lambda x: md.fori_loop(0, 3, lambda i, c: c.astype(np.float32), x),
        r"fori_loop must keep the types of its carries: init_val has type f64\[3\], but a step returns f32\[3\]",
    ),
    "no pair": (lambda x: md.scan(lambda c, v: c, x, x), r"scan: a step must return a pair \(carry, y\), got "),
    "not boolean": (
        lambda x: md.while_loop(lambda c: c, lambda c: c + 1, x),
        r"while_loop: cond_fun must return one boolean, got f64\[3\]",
    ),
    "pred": (lambda x: md.cond(x > 0, np.sin, np.cos, x), r"cond: pred must be one boolean or number, got bool\[3\]"),
    "index": (lambda x: md.switch(x[0], [np.sin], x), r"switch: index must be one integer, got f64\[\]"),
    "bounds": (lambda x: md.fori_loop(0, x[0], lambda i, c: c, x), r"fori_loop: lower and upper must be integers, got"),
    "a value for a branch": (
        lambda x: md.cond(x[0] > 0, x, np.cos),
        r"cond: true_fun must be a function, got .*; to choose between values use np.where",
    ),
    "a value among branches": (
        lambda x: md.switch(0, [np.sin, 1.0], x),
        r"switch: branches\[1\] must be a function, got float; to choose between values",
    ),
    "a value for a step": (lambda x: md.scan(1.0, x, x), "scan: f must be a function, got float"),
    "a value for a condition": (
        lambda x: md.while_loop(True, np.sin, x),
        "while_loop: cond_fun must be a function, got bool",
    ),
    "a value for a body": (lambda x: md.fori_loop(0, 3, x, x), "fori_loop: body_fun must be a function, got "),
}
test_types_that_do_not_fit = refusals(CARRIES, lambda f: f(X), error=TypeError)
test_types_that_do_not_fit_on_a_tape = refusals(CARRIES, lambda f: md.make_tape(f)(X), error=TypeError)


LENGTHS = {
    "none": (lambda x: md.scan(lambda c, v: (c, v), x), "scan: without xs, length must say how many steps there are"),
    "differ": (
        lambda x: md.scan(lambda c, v: (c, v), x, {"a": x, "b": x[:2]}),
        r"scan: lengths differ: xs\['a'\]: f64\[3\], xs\['b'\]: f64\[2\]",
    ),
    "length": (lambda x: md.scan(lambda c, v: (c, v), x, x, length=4), r"scan: lengths differ: xs: f64\[3\], length=4"),
    "number": (
        lambda x: md.scan(lambda c, v: (c, v), x, (x, 1.0)),
        r"scan: xs\[1\] has type f64\[\], which has no axis",
    ),
    "negative": (lambda x: md.scan(lambda c, v: (c, v), x, length=-1), "length must be a number of steps, .* got -1"),
    "branches": (lambda x: md.switch(0, [], x), "switch: branches must contain at least one function"),
}
test_lengths_that_do_not_fit = refusals(LENGTHS, lambda f: f(X), error=ValueError)
test_lengths_that_do_not_fit_on_a_tape = refusals(LENGTHS, lambda f: md.make_tape(f)(X), error=ValueError)


def test_what_only_a_value_can_decide_names_the_function():
    def decide(c, v):
        return (c if v > 0 else -c), None

    with pytest.raises(md.TracerError, match=r"bool\[\] is only a name: scan of decide records a program"):
        md.jit(lambda x: md.scan(decide, x, x)[0])(X)
    with pytest.raises(md.TracerError, match=r"the length of scan needs a concrete value"):
        md.jit(lambda n: md.scan(decide, 1.0, None, length=n))(3)


BRANCHES = {
    "type": (
        lambda p, x: md.cond(p, lambda: {"y": x}, lambda: {"y": x[:2]}),
        r"cond: all branches must return the same types, but at \[...\]\['y'\] true_fun returns f64\[3\] and",
    ),
    "dtype": (
        lambda p, x: md.cond(p, lambda: x > 0, lambda: x),
        r"cond: all branches must return the same types, but true_fun returns bool\[3\] and false_fun returns f64\[3\]",
    ),
    "structure": (
        lambda p, x: md.switch(p, [lambda: x, lambda: x, lambda: (x, x)]),
        r"switch: .* trees of one structure, but branches\[0\] returns \* and branches\[2\] returns \(\*, \*\)",
    ),
}


of_many = lambda f: md.vmap(lambda p: f(p, X))(np.array([0, 1]))  # noqa: E731
test_branches_that_differ = refusals(BRANCHES, lambda f: md.make_tape(f)(1, X), error=TypeError)
test_branches_that_differ_under_vmap = refusals(BRANCHES, of_many, error=TypeError)


@BOTH
def test_while_loop_is_not_differentiated_in_reverse(staged):
    f = lambda x: md.while_loop(lambda c: c.max() < 9, lambda c: c * 2.0, x)  # noqa: E731
    g = (lambda x: md.make_tape(f)(X)(x)[0]) if staged else f
    expected = r"while_loop cannot be differentiated in reverse.*Pass max_steps=; or use scan, or fori_loop.*md\.jvp"
    for run in (md.grad(lambda x: g(x).sum()), md.make_tape(md.grad(lambda x: g(x).sum()))):
        with pytest.raises(TypeError, match=expected):
            run(abs(X) + 1)
    # Where no cotangent comes to it, it does not matter.
    np.testing.assert_allclose(md.grad(lambda x: (x * 2).sum() + np.floor(g(x)).sum())(abs(X) + 1), 2 * np.ones(3))


def test_check_finds_bodies_that_do_not_fit():
    tape = md.make_tape(lambda x: md.scan(lambda c, v: (c * v, c), x[0], x))(X)
    (eqn,) = [e for e in tape.equations if e.primitive.name == "scan"]
    for change in ({"length": 4}, {"carry": 2}, {"body": md.make_tape(lambda c, v: (c, v[None]))(1.0, 1.0)}):
        saved = dict(eqn.params)
        eqn.params.update(change)
        with pytest.raises(TypeError, match="scan: "):
            tape.check()
        eqn.params.update(saved)
    tape.check()


def test_a_carry_keeps_its_dtype_where_a_step_returns_a_python_number():
    f = lambda x: md.scan(lambda c, _: (2.0, c), x, length=2)  # noqa: E731
    for run in (f, md.jit(f)):
        last, carries = run(np.float32(1))
        assert (last.dtype, carries.dtype, carries.tolist()) == ("float32", "float32", [1.0, 2.0])


def test_carries_of_a_loop_of_one_step_vary_as_those_of_a_longer_one():
    varying = []

    def body(x):
        for length in (1, 2, 3):
            first, _ = md.scan(lambda c, _: ((c[1], x), None), (np.zeros(2), np.zeros(2)), length=length)[0]
            varying.append(md.typeof(first).variance)
        return x

    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(np.ones(4))
    assert varying == [{"i"}] * 3


@pytest.mark.parametrize("reverse", [False, True])
def test_remaining_steps_of_a_loop_that_runs_several_at_once(reverse):
    f = lambda x: md.scan(lambda c, e: (c * e, c + e), 1.0, x, reverse=reverse, unroll=2)  # noqa: E731
    assert_trees_close(md.jit(f)(XS[:, 0].repeat(2)[:5]), f(XS[:, 0].repeat(2)[:5]))


# ---------------------------------------------------------------- long loops, operation by operation


@pytest.mark.parametrize("steps", [29, 30, 90])
def test_a_long_eager_loop_suggests_jit_once(steps, monkeypatch):
    monkeypatch.setattr(loops, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(loops, "MANY_STEPS", 30)
    programs = {
        "scan": lambda x: md.scan(lambda c, _: (c + 1, c), x, length=steps),
        "while_loop": lambda x: md.while_loop(lambda c: np.max(c) < steps, lambda c: c + 1, x),
    }
    for name, f in programs.items():
        for run, suggests in {f: steps >= 30, md.jit(f, kernels=False): False}.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run(0.0)
                run(numpy.zeros(loops.FEW_NUMBERS + 1))  # the calls do not take most of the time
            assert [str(w.message).split(" took ")[0] for w in caught] == [f"30 steps of this {name}"] * suggests
            assert all(w.filename == __file__ for w in caught)
