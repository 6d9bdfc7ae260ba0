"""Control flow against the same program with Python's own: values, derivatives, batches, tapes, ranks, errors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean, ppermute, psum
from spmd import P
from tests.programs import assert_trees_close


class Unrolled:
    """What the functions mean, in Python."""

    @staticmethod
    def cond(pred, true_fun, false_fun, *operands):
        return true_fun(*operands) if pred else false_fun(*operands)

    @staticmethod
    def switch(index, branches, *operands):
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)

    @staticmethod
    def while_loop(cond_fun, body_fun, init_val):
        while cond_fun(init_val):
            init_val = body_fun(init_val)
        return init_val

    @staticmethod
    def fori_loop(lower, upper, body_fun, init_val):
        for i in range(int(lower), int(upper)):
            init_val = body_fun(i, init_val)
        return init_val

    @staticmethod
    def scan(f, init, xs=None, length=None, reverse=False):
        length = md.tree.leaves(xs)[0].shape[0] if xs is not None else length
        ys = []
        for i in reversed(range(length)) if reverse else range(length):
            init, y = f(init, md.tree.map(lambda x, i=i: x[i], xs))
            ys.append(y)
        return init, md.tree.map(lambda *ys: np.stack(ys), *(ys[::-1] if reverse else ys))


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
        i, total, kept = carry
        return (i + 1, total * kept[0] + i, kept), i * total

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
BOTH = pytest.mark.parametrize("staged", [False, True], ids=["eager", "staged"])


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
@pytest.mark.parametrize("name", CASES)
def test_values(name, staged):
    case = CASES[name]
    out, expected = (case.staged() if staged else case.of(md))(*case.args), case.of(Unrolled)(*case.args)
    assert md.tree.structure(out) == md.tree.structure(expected)
    assert_trees_close(out, expected)
    for x, y in zip(md.tree.leaves(out), md.tree.leaves(expected), strict=True):
        assert md.typeof(x) == md.typeof(y)


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_forward_mode(name, staged):
    f, meaning, args = program(name, staged)
    tangents = random_like(args)
    assert_trees_close(md.jvp(f, args, tangents), md.jvp(meaning, args, tangents))

    def second(f):
        return lambda *args: md.jvp(lambda *args: md.jvp(f, args, tangents)[1], args, tangents)

    assert_trees_close(second(f)(*args), second(meaning)(*args))
    tape = md.make_tape(second(f))(*args)
    tape.check()
    assert_trees_close(tape(*args), md.tree.leaves(second(meaning)(*args)))


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_linearize(name, staged):
    f, meaning, args = program(name, staged)
    tangents = random_like(args)
    assert_trees_close(md.linearize(f, *args)[1](*tangents), md.jvp(meaning, args, tangents)[1])
    tape = md.make_tape(lambda *args: md.linearize(f, *args)[1](*tangents))(*args)
    tape.check()
    assert_trees_close(tape(*args), md.jvp(meaning, args, tangents)[1])


def loss(f):
    """A scalar, not quadratic in anything."""

    def scalar(*args):
        outs = f(*args)
        return sum((np.sin(x) * c).sum() for x, c in zip(outs, random_like([np.zeros(np.shape(x)) for x in outs], 3)))

    return scalar


@BOTH
@pytest.mark.parametrize("name", REVERSIBLE)
def test_reverse_mode(name, staged):
    f, meaning, args = program(name, staged)
    numbers = tuple(range(len(args)))
    gradient = md.value_and_grad(loss(f), numbers)
    expected = md.value_and_grad(loss(meaning), numbers)(*args)
    assert_trees_close(gradient(*args), expected)
    tape = md.make_tape(gradient)(*args)
    tape.check()
    assert_trees_close(tape(*args), md.tree.leaves(expected))
    assert tape == md.make_tape(gradient)(*args)


@BOTH
@pytest.mark.parametrize("name", REVERSIBLE)
def test_second_order(name, staged):
    f, meaning, args = program(name, staged)
    numbers, tangents = tuple(range(len(args))), random_like(args)

    def forward_over_reverse(f):
        return lambda *args: md.jvp(md.grad(loss(f), numbers), args, tangents)[1]

    def reverse_over_reverse(f):
        def along(*args):
            grads = md.grad(loss(f), numbers)(*args)
            return sum((g * t).sum() for g, t in zip(grads, tangents))

        return md.grad(along, numbers)

    def reverse_over_forward(f):
        return md.grad(lambda *args: md.jvp(loss(f), args, tangents)[1], numbers)

    expected = forward_over_reverse(meaning)(*args)
    for second in (forward_over_reverse, reverse_over_reverse, reverse_over_forward):
        assert_trees_close(second(f)(*args), expected)
    tape = md.make_tape(reverse_over_reverse(f))(*args)
    tape.check()
    assert_trees_close(tape(*args), expected)


def loop_over(f, *args):
    outs = [f(*[x[i] for x in args]) for i in range(len(args[0]))]
    return md.tree.map(lambda *xs: np.stack(xs), *outs)


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_vmap(name, staged):
    f, meaning, args = program(name, staged)
    rng = np.random.default_rng(5)
    many = tuple(x + 0.1 * abs(rng.normal(size=(3, *x.shape))) for x in args)
    assert_trees_close(md.vmap(f)(*many), loop_over(meaning, *many))
    for mapped in range(len(args)):  # each argument alone
        axes = tuple(0 if i == mapped else None for i in range(len(args)))
        given = tuple(m if i == mapped else x for i, (x, m) in enumerate(zip(args, many)))
        expected = loop_over(
            lambda x, i=mapped: meaning(*[x if i == j else y for j, y in enumerate(args)]), many[mapped]
        )
        assert_trees_close(md.vmap(f, axes)(*given), expected)
    tape = md.make_tape(md.vmap(f))(*many)
    tape.check()
    assert_trees_close(tape(*many), loop_over(meaning, *many))


@BOTH
@pytest.mark.parametrize("name", REVERSIBLE)
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
RING = [(0, 1), (1, 0)]


def ranks_scan(lax, w, x):
    """Collectives in the body; a carry that is invariant at first and varies later."""

    def step(c, k):
        mean = pmean(np.sin(c * x).sum(), "i")
        return c * x + ppermute(c * w, "i", RING) * mean + k, psum(c * x, ("i", "j")).sum()

    c, ys = lax.scan(step, w, np.arange(3.0))
    return psum(c, ("i", "j")), ys


def ranks_cond(lax, w, x):
    total = psum(x.sum(), ("i", "j"))
    y = lax.cond(total > 0, lambda x: np.sin(x) * w + psum(x * x, "i"), lambda x: w, x)
    z = lax.cond(total < 0, lambda x: psum(np.sin(x) * w, ("i", "j")), lambda x: np.ones(3), x)
    return psum(y, ("i", "j")), z


def ranks_nested(lax, w, x):
    def step(c, k):
        c = lax.cond(psum(k, ("i", "j")) > 2, lambda c: psum(c * x, "j") * 0.1, lambda c: np.sin(c) * w, c)
        return c, lax.fori_loop(0, 2, lambda i, c: np.tanh(c + psum(c, "i")) + w * i, c)

    c, ys = lax.scan(step, x, np.arange(3.0))
    return psum(c, ("i", "j")), psum(ys, ("i", "j"))


def ranks_while(lax, w, x):
    def going(state):
        return psum((state[1] ** 2).sum(), ("i", "j")) < 9

    n, c = lax.while_loop(going, lambda s: (s[0] + 1, s[1] * 1.5 + x * w), (0, w))
    return psum(c, ("i", "j")) * n, psum(c * x, ("i", "j")) * w


RANKS = {"scan": ranks_scan, "cond": ranks_cond, "nested": ranks_nested, "while_loop": ranks_while}
SMALL = {"w": X / 4, "x": np.concatenate([XS, 1 - XS]).reshape(-1)[:12] / 4}


def on_ranks(f, lax, **options):
    def mapped(w, x):
        def body(x):
            return f(lax, np.sin(w), x * w)  # closes over w

        out_specs = (P(), P()) if options.get("check_rep", True) else (P(None), P(None))
        return spmd.shard_map(body, mesh=MESH, in_specs=P(("i", "j")), out_specs=out_specs, **options)(x)

    return mapped


@BOTH
@pytest.mark.parametrize("check_rep", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("name", RANKS)
def test_in_a_body(name, staged, check_rep):
    args = tuple(SMALL.values())
    f = on_ranks(RANKS[name], md, check_rep=check_rep)
    meaning = on_ranks(RANKS[name], Unrolled, check_rep=check_rep)
    if staged:
        f = md.make_tape(f)(*args)
        f.check()
    tangents = random_like(args)
    assert_trees_close(f(*args), md.tree.leaves(meaning(*args)))
    assert_trees_close(md.jvp(f, args, tangents), md.tree.leaves(md.jvp(meaning, args, tangents)))
    many = tuple(np.stack([x, 0.9 * x]) for x in args)
    assert_trees_close(md.vmap(f)(*many), md.tree.leaves(loop_over(meaning, *many)))
    if name == "while_loop":
        return
    gradient, expected = md.grad(loss(f), (0, 1)), md.grad(loss(meaning), (0, 1))(*args)
    assert_trees_close(gradient(*args), expected)
    tape = md.make_tape(gradient)(*args)
    tape.check()
    assert_trees_close(tape(*args), expected)
    assert_trees_close(md.vmap(gradient)(*many), loop_over(md.grad(loss(meaning), (0, 1)), *many))

    def second(f):
        return md.grad(lambda w, x: (md.grad(loss(f))(w, x) ** 2).sum(), (0, 1))

    assert_trees_close(second(f)(*args), second(meaning)(*args))


def test_ranks_that_may_disagree():
    def body(x):
        return md.cond(x.sum() > 0, lambda x: x, lambda x: -x, x)

    def loop(x):
        return md.while_loop(lambda x: x.sum() < 3, lambda x: x + 1, x)

    for f in (body, loop):
        mapped = spmd.shard_map(f, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
        for run in (mapped, md.make_tape(mapped)):
            with pytest.raises(md.VarianceError, match=r"bool\[\]\{i\}.* varies along 'i'.*psum, pmax or pmin"):
                run(np.ones(4))


def test_a_shard_map_in_a_loop():
    double = spmd.shard_map(lambda x: x * psum(x, "i"), mesh=MESH, in_specs=P("i"), out_specs=P("i"))

    def f(lax, x):
        return lax.scan(lambda c, _: (np.sin(double(c)) * 1.0, None), x, None, length=2)[0].sum()

    x = np.arange(4.0)
    expected = md.value_and_grad(lambda x: f(Unrolled, x))(x)
    assert_trees_close(md.value_and_grad(lambda x: f(md, x))(x), expected)
    assert_trees_close(md.make_tape(md.value_and_grad(lambda x: f(md, x)))(x)(x), expected)
