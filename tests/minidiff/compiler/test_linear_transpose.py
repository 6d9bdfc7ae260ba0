"""Transposition of tapes: it is its own inverse, tapes do not grow, and it is what the inner product says.

`transposes.md` shows functions of several `shard_map`s.
"""

import functools

import hypothesis.strategies as st
from hypothesis import given, settings

import minidiff as md
import minidiff.numpy as np
from collectives import all_gather_invariant, pbroadcast, psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import check_each, each
from tests.programs import linear as linear_programs
from tests.table import LINEAR, TABLE

X, V, W = np.arange(6.0).reshape(2, 3), np.arange(3.0), np.arange(9.0).reshape(3, 3) + 1
Z = X + 1j
LINE, PLANE = mesh(4), mesh(2, 2)


def on_ranks(f, in_specs=P("i"), out_specs=P("i"), over=LINE, **options):
    return mapped(f, over, in_specs, out_specs, **options)


def inner(xs, ys):
    """Numbers are paired by their real parts: what a complex one stands for is two."""
    return sum(np.real(np.sum(np.asarray(x) * np.asarray(y))) for x, y in zip(xs, ys, strict=True))


def equations(tape):
    """Return the number of equations, including those of bodies."""
    return sum(1 + sum(map(equations, eqn.bodies)) for eqn in tape.equations)


def random_of(types, seed):
    rng = np.random.default_rng(seed)
    parts = [(rng.normal(size=t.shape), rng.normal(size=t.shape)) for t in types]
    return [np.asarray(x + 1j * y if t.dtype.kind == "c" else x, t.dtype) for (x, y), t in zip(parts, types)]


def check(f, *args, linear=None, back=True):
    """The inner-product identity of the tape of `f`, linear in its arguments from `linear[0]` to `linear[-1]`.

    Returns the tape, its transpose, and the transpose of that; from there on nothing grows any more.
    """
    tape = md.make_tape(f)(*args)
    linear = range(len(args)) if linear is None else linear
    first, last = linear[0], linear[-1] + 1
    count = len(tape.outputs)
    transposed = md.transpose(tape, linear)
    assert transposed.in_types == [*tape.in_types[:first], *tape.out_types, *tape.in_types[last:]]
    assert transposed.out_types == tape.in_types[first:last]
    xs, ys = random_of(tape.in_types[first:last], 0), random_of(tape.out_types, 1)
    left = inner(tape(*args[:first], *xs, *args[last:]), ys)
    np.testing.assert_allclose(left, inner(transposed(*args[:first], *ys, *args[last:]), xs), rtol=1e-6, atol=1e-6)

    if not back:
        return None
    back = md.transpose(transposed, range(first, first + count))
    assert_trees_close(back(*args), tape(*args), rtol=1e-6)
    twice = lambda tape: md.transpose(md.transpose(tape, linear), range(first, first + count))  # noqa: E731
    final = twice(back)
    if "recompute(" in str(back):  # of which some pbroadcasts are written down once more
        assert equations(twice(final)) <= equations(final)
    else:
        assert equations(final) <= equations(back)
    return tape, transposed, back


# ---------------------------------------------------------------- properties

seeds = st.integers(0, 10**6)


@settings(deadline=None, max_examples=40)
@given(seeds)
def test_transposing_twice_gives_the_function(seed):
    f, args = linear_programs.program(seed)
    check(f, *args)


@settings(deadline=None, max_examples=10)
@given(seeds, seeds, st.booleans())
def test_several_shard_maps(one, two, shared):
    """One beside the other, with sums outside; and a value that goes into both."""
    (f, xs), (g, ys) = linear_programs.program(one), linear_programs.program(two)

    def both(*args):
        out = f(*args)
        total = np.sum(out) + np.sum(args[0])
        return [out, g(*[total * y if shared else np.sum(args[-1]) * y for y in ys])]

    check(both, *xs)


# ---------------------------------------------------------------- operations


def linear_rows(rows):
    """The functions of the table of operations with the arguments in which they are linear jointly."""
    for row in rows:
        for group in LINEAR[row.function] or [tuple(range(len(row.args)))]:
            group = [i for i in group if i in row.active]

            def f(*xs, row=row, group=group):
                at = dict(zip(group, xs))
                return row.f(*[at.get(i, x) for i, x in enumerate(row.args)])

            yield row.key, functools.partial(check, f, *[row.args[i] for i in group])


def test_operations_come_back_and_do_not_grow():
    rows = [row for row in TABLE if row.function in LINEAR]
    check_each(linear_rows(rows))


#: Programs, their arguments, and in which they are linear.
PROGRAMS = {
    "matmul with an argument": (lambda x, w: (x @ w) @ w.T + x @ w, (X, W), (0,)),
    "size 1": (lambda x: (x[:, :1] + x, x[:1] - x[:, :1], x[:1, :1].sum(1), x.reshape(1, 6).sum(0)), (X,)),
    "0-d": (lambda s, x: (s * x, s + s, x.sum() * s - s, s.reshape(1, 1).sum()), (2.0, X), (0,)),
    "sums of one number": (lambda s, x: (0 + np.sum(s), np.sum(x[0, 0]) * s), (2.0, X), (0,)),
    "reshapes shared": (lambda x: (x.reshape(6).reshape(3, 2) + x.reshape(6).reshape(3, 2) * 2.0, x.reshape(6)), (X,)),
    "scan": (lambda x: md.scan(lambda c, a: (c + a, 2.0 * c), 0 * x[0], x), (X,)),
    "scan with a factor": (lambda x, w: md.scan(lambda c, a: (c * w + a, c), 0 * x[0], x), (X, 2.0), (0,)),
    "scan with shared values": (lambda x, v: md.scan(lambda c, a: (c + a - v, c + v.sum()), v, x), (X, V)),
    "fori_loop": (lambda v, u, w: md.fori_loop(0, 3, lambda i, c: w * c + u - v, u * w), (V, V, V), (0, 1)),
    "cond": (lambda x, p: md.cond(p > 0, lambda x: 2 * x, lambda x: -x, x), (X, 1.0), (0,)),
    "checkpoint": (lambda x: md.checkpoint(lambda x: 2 * x + x)(x), (X,)),
    "linearized": (lambda x, t: md.linearize(lambda x: np.tanh(x) @ W, x)[1](t), (X, X), (1,)),
    "reverse mode": (lambda ct: md.vjp(lambda x: np.sin(x) @ W, X)[1](ct)[0], (X,)),
    "zeros": (lambda x: (x, 0.0, np.zeros(3), x + np.zeros(3)), (X,)),
    "the same twice": (lambda x: (x, x, 2 * x, 2 * x, x + x), (X,)),
    "nothing needs it": (lambda x: (2 * x, np.sin(x), x * x)[0], (X,)),
    "unstack": (lambda x: sum(x), (X,)),
    "a real part of sums": (lambda z, x: np.real(z) + np.imag(z * 2.0) - z * x, (Z, X), (0,)),
    "numbers of two kinds": (lambda z, x: (z * x, x / 2.0), (Z, X), (1,)),
    "complex": (lambda z: (np.conj(z), z * 2j, np.fft.fft(z)), (Z,)),
    "where, broadcast": (lambda v, x: np.where(X > 2, v, x), (V, X)),
}

#: What comes back as other operations of the same function: as the sum of several in place of one of several operands,
#: as a conversion, or without sums over axes of size 1.
OTHERWISE = {
    *("a real part of sums", "numbers of two kinds", "where, broadcast", "zeros", "size 1", "0-d", "unstack"),
    *("sums of one number", "fori_loop", "scan with shared values"),
}


@each("name", PROGRAMS)
def test_programs_come_back(name):
    f, args, *linear = PROGRAMS[name]
    tape, _, back = check(f, *args, linear=linear[0] if linear else None)
    assert name in OTHERWISE or back == tape


# ---------------------------------------------------------------- shard_map


def sine_of_sum(x):
    s = np.sum(x)
    return psum(np.sin(s) * s, "i")


def weight_twice(w, x):
    return psum(np.sum(x @ np.outer(w, V) + x[0] * w), "i")


def result(body, out_specs=P(), **options):
    """A function of two arrays, linear in the second, of which a body computes with the first."""
    return lambda x, y: on_ranks(body, (P("i"), P("i")), out_specs, **options)(x, y)


#: Functions of two arrays that are linear in the second.
BODIES = {
    "a scalar residual": lambda x, t: md.linearize(on_ranks(sine_of_sum, out_specs=P()), x)[1](t),
    "a weight used twice": lambda x, w: on_ranks(weight_twice, (P(), P("i")), P())(w[:3], np.stack([x, x, x], axis=1)),
    "a 0-d block": lambda x, s: on_ranks(lambda s, x: psum(s * x.sum(), "i"), (P(), P("i")), P())(s.sum(), x),
    "a result that does not depend on it": result(lambda x, y: (psum(y, "i"), np.zeros(2))),
    "a result twice": result(lambda x, y: (psum(x * y, "i"),) * 2),
    "a result both mapped and not": result(lambda x, y: (psum(y, "i"),) * 2, (P(), P("i"))),
    "two axes at once": lambda x, y: on_ranks(lambda x, y: psum(x * y, ("j", "i")), (P("i"), P("j")), P(), PLANE)(x, y),
    "unmapped in, mapped out": lambda x, y: on_ranks(lambda y: y, P(), P("i"))(y),
    "closed over": lambda x, y: on_ranks(lambda x: x * y[:2].sum())(x),
}
NOT_EQUAL = ("a weight used twice", "a result that does not depend on it")


@each("name", BODIES)
def test_bodies(name):
    tape, _, back = check(BODIES[name], np.arange(8.0), np.ones(8), linear=(1,))
    assert back == tape or name in NOT_EQUAL


IN_BODIES = {
    "scan": (lambda x, w: md.scan(lambda c, row: (c * w + psum(row, "i"), row * w), psum(x[0], "i"), x), (P(), P("i"))),
    "cond": (lambda x, w: md.cond(w > 0, lambda x: psum(x, "i") * w, lambda x: psum(-x, "i"), x), P()),
    "checkpoint": (lambda x, w: md.checkpoint(lambda x: psum(x, "i") * w)(x), P()),
    "gathered": (lambda x, w: all_gather_invariant(x, "i") * w + pbroadcast(w, "i") * 0.0 * x, P("i")),
}


@each("check_rep", [True, False])
@each("body, out_specs", IN_BODIES.values(), IN_BODIES)
def test_operations_with_bodies_in_bodies(body, out_specs, check_rep):
    f = on_ranks(body, (P("i"), P()), out_specs, check_rep=check_rep)
    check(f, np.ones((8, 3)), 2.0, linear=(0,), back=check_rep)


# ---------------------------------------------------------------- the order of inputs


def test_cotangents_take_the_places_of_linear_inputs():
    f32, f64, i64 = (md.ShapedArray((), t) for t in ("f4", "f8", "i8"))

    def tape(count):
        return md.make_tape(lambda x, n, y, m: [x * np.float32(2), y * 3.0, y * 4.0][:count])(f32, i64, f64, i64)

    inputs = {k: md.transpose(tape(k), (0, 2)).in_types for k in (0, 1, 2, 3)}
    assert inputs == {0: [i64, i64], 1: [f32, i64, i64], 2: [f32, i64, f64, i64], 3: [f32, i64, f64, f64, i64]}
    assert md.transpose(md.transpose(tape(2), (0, 2)), (0, 2)) == tape(2)
    assert md.transpose(tape(2), [2, 0]) == md.transpose(tape(2), (0, 2))


# ---------------------------------------------------------------- with other transformations


def test_transposes_are_functions_like_any_other():
    tape = md.make_tape(lambda x, w: np.sin(w) * x)(X, X)
    transposed = md.transpose(tape, 0)
    use = lambda y, w: transposed(y, w)[0]  # noqa: E731
    np.testing.assert_allclose(md.grad(lambda w: use(X, w).sum())(X), np.cos(X) * X)
    np.testing.assert_allclose(md.vmap(use)(np.stack([X, X]), np.stack([X, -X]))[1], np.sin(-X) * X)
    np.testing.assert_allclose(md.jit(use)(X, X), np.sin(X) * X)


def test_tapes_with_values_that_are_differentiated_or_vectorized():
    f = lambda w: md.transpose(md.make_tape(lambda x: np.sin(w) * x)(X))(X)[0]  # noqa: E731
    np.testing.assert_allclose(md.grad(lambda w: f(w).sum())(X), np.cos(X) * X)
    np.testing.assert_allclose(md.vmap(f)(np.stack([X, -X])), np.stack([np.sin(X), np.sin(-X)]) * X)


def test_in_a_body():
    """Both the types of the ranks' values and the sums that they make necessary."""

    def body(x, w):
        x_bar, w_bar = md.linear_transpose(lambda x, w: (x + w, psum(x, "i")), x, w)((x, w))
        return psum(x_bar, "i"), w_bar

    x = np.arange(4.0)
    x_bar, w_bar = on_ranks(body, (P("i"), P()), P())(x, np.ones(1))
    np.testing.assert_allclose(x_bar, [x.sum() + 4])
    np.testing.assert_allclose(w_bar, [x.sum()])


def test_zeros_belong_to_the_caller():
    f_t = md.linear_transpose(lambda x, y: y, X, X)
    zero, _ = f_t(X)
    zero += 1
    assert not f_t(X)[0].any()
