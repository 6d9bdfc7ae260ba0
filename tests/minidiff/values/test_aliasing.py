"""Results share memory with nothing: neither each other, nor arguments, nor what is kept for the next call.

`constants.md` shows which arrays are constants.
"""

import functools

import numpy as np
import pytest

import minidiff as md
from tests.checks.aliasing import arrays, check_apart
from tests.checks.samples import check_each, each
from tests.checks.transformations import NESTED, TRANSFORMATIONS, on_copies
from tests.minidiff.ops.test_ops import check_values_and_memory
from tests.table import indexing, rearranging, replaced, shape

X = np.arange(1.0, 4.0)


@pytest.mark.parametrize("family", [shape, rearranging, indexing, replaced])
def test_operations_on_arrays_in_fortran_order(family):
    """Those that return views, and share memory with other operands than in C order, which `test_ops` has."""
    # order="A" and "K" are "C" for traced values: see `reshape`
    rows = [row for row in family.ROWS if "order='A'" not in row.key and "order='K'" not in row.key]
    check_each((row.key, functools.partial(check_values_and_memory, row, "F")) for row in rows)


# ---------------------------------------------------------------- copies

COPIES = {
    "np.array": md.numpy.array,
    "flatten": lambda x: x.flatten(),
    "astype": lambda x: x.astype(x.dtype),
    "repeat": lambda x: np.repeat(x, 1),
    "+x": lambda x: +x,
    "copy": lambda x: x.copy(),
    "imaginary part": lambda x: np.copy(np.imag(x + 1)),
    "index": lambda x: np.squeeze(x[:1])[()],
    "flip": lambda x: np.flip(np.squeeze(x[:1]), ()),
    "reduce": lambda x: np.hypot.reduce(x.reshape(1, -1)),
    "full": lambda x: np.full_like(x, x[0]),
    "meshgrid": lambda x: np.meshgrid(x, x),
}
#: Those that return what the function returns.
DIRECT = {name: run for name, run in {**TRANSFORMATIONS, **NESTED}.items() if "grad" not in name and "jac" not in name}
DIRECT["vmap of nothing"] = lambda f, x: md.vmap(lambda _: f(x))(np.zeros(2))


@each("copying", COPIES)
@each("transformation", DIRECT)
@each("size", [1, 3])
def test_what_numpy_copies_is_a_copy(copying, transformation, size):
    x = np.arange(1.0, 1.0 + size)
    check_apart(md.tree.map(np.asarray, DIRECT[transformation](COPIES[copying], x)), x)


@each("f", [np.nan_to_num, np.linalg.norm, lambda x: np.mean(x, dtype="u1"), lambda x: np.select([x > 1], [x]).max()])
def test_results_without_axes_are_scalars(f):
    """Arrays could be shared, and written into."""
    x = np.float64(1.5)
    for out in (md.jvp(f, (x,), (x,))[0], md.vjp(f, x)[0], *md.make_tape(f)(x)(x)):
        assert isinstance(out, np.generic)


def several(x):
    return np.sin(x), np.sin(x), x, x + 0, x.T, x[1:], x * 1


def with_rule():
    f = md.custom_vjp(lambda x: x * 2.0)
    f.defvjp(lambda x: (x * 2.0, x), lambda x, ct: (x,))  # the cotangent is what the rule keeps
    return f


RULE = md.vjp(with_rule(), X)[1]
#: Functions of an array whose results share no memory with each other or the array.
SEPARATE = {
    "gradients": lambda x: md.grad(lambda x, y: (x + y).sum(), (0, 1))(x, x.copy()),
    "compiled gradients": lambda x: md.jit(md.grad(lambda x, y: (x + y).mean(), (0, 1)))(x, x.copy()),
    "gradient of sum": md.grad(np.sum),
    "gradient of a view's sum": md.grad(lambda x: x.reshape(-1).sum() + x.T.sum()),
    "several of a scan": md.jit(lambda x: md.scan(lambda c, _: (c, several(c)), x, X)),
    "custom rule": md.grad(lambda x: with_rule()(x).sum()),
    "residual of a rule": lambda x, pullback=RULE: [pullback(X)[0], pullback(X)[0]],
    "clip of integers": lambda x: md.make_tape(lambda x: np.clip(x, 0, 2**40))(x.astype("u4"))(x.astype("u4")),
    **{
        name: functools.partial(NESTED[name], several)
        for name in ("jit of checkpoint", "cond in jit", "shard_map of jit")
    },
}


@each("name", SEPARATE)
def test_results_are_apart(name):
    check_apart(md.tree.map(np.asarray, SEPARATE[name](X)), X)


@each("apply", [md.jit, lambda f: functools.partial(NESTED["jvp of jit"], f), md.vmap, lambda f: md.make_tape(f)(X)])
def test_results_are_not_the_constants_of_programs(apply):
    f = apply(md.jit(lambda x: (x, np.zeros(3), np.ones((2, 2)).T)))
    expected = md.tree.map(np.copy, f(np.ones(3)))
    for x in arrays(f(np.ones(3))):
        x[...] = 7.0
    md.tree.map(np.testing.assert_array_equal, f(np.ones(3)), expected)


# ---------------------------------------------------------------- pullbacks that outlive the call

#: Functions of an array x that close over an array c.
CLOSURES = {
    "argument": lambda x, c: x * x,
    "views": lambda x, c: x[::-1] * c.reshape(1, 3)[0].T,
    "a buffer": lambda x, c: x * np.frombuffer(c),
    "result": lambda x, c: np.exp(x),
    "matrix": lambda x, c: np.outer(x, c) @ x,
    "gather": lambda x, c: x[np.arange(3)] * c,
    "checkpoint": lambda x, c: md.checkpoint(lambda x: np.sin(x * c) * c)(x),
    "jit": lambda x, c: md.jit(lambda x: np.sin(x * c))(x),
    "cond": lambda x, c: md.cond(True, lambda x: x * c, lambda x: x, x),
    "of a derivative": lambda x, c: md.grad(lambda x: (x * x * x * c).sum())(x),
}


@each("name", CLOSURES)
def test_derivatives_survive_writing_in_place(name):
    c, x, ct = X.copy(), np.linspace(0.5, 1.0, 3), np.ones(3)
    f = functools.partial(CLOSURES[name], c=c)
    (value, pullback), (other, f_linear) = md.vjp(f, x), md.linearize(f, x)
    expected = [np.copy(pullback(ct)[0]), np.copy(f_linear(ct))]
    for a in (x, c, value, other):
        a[...] = 100.0
    for _ in range(2):
        results = [pullback(ct)[0], f_linear(ct)]
        np.testing.assert_array_equal(results, expected)
        for a in results:
            a[...] = 100.0
    assert np.all(ct == 1.0)


# ---------------------------------------------------------------- constants of recorded programs


def first(tape):
    return lambda x: tape(x)[0]


def of_square(f):
    return lambda x: (f(x) ** 2).sum()


#: Functions like f that record it for an array like x, when they are made or at their first call.
RECORDINGS = {
    "jit": lambda f, x: md.jit(f),
    "make_tape of jit": lambda f, x: first(md.make_tape(md.jit(f))(x)),
    "make_tape": lambda f, x: first(md.make_tape(f)(x)),
    "jvp of jit": lambda f, x: functools.partial(TRANSFORMATIONS["jvp"], md.jit(f)),
    "vmap of jit": lambda f, x: functools.partial(TRANSFORMATIONS["vmap"], md.jit(f)),
    "grad of jit": lambda f, x: md.grad(md.jit(of_square(f))),
    "jit of shard_map": lambda f, x: md.jit(on_copies(f)),
    "shard_map of jit": lambda f, x: on_copies(md.jit(f)),
    "scan": lambda f, x: md.jit(lambda x: md.scan(lambda c, _: (f(c), None), x, None, length=2)[0]),
    "while_loop": lambda f, x: md.jit(
        lambda x: md.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x))[1]
    ),
    "cond": lambda f, x: md.jit(lambda x: md.cond(x[0] > 0, f, f, x)),
    "a body in a loop": lambda f, x: md.jit(lambda x: md.fori_loop(0, 2, lambda _, c: on_copies(f)(c), x)),
}
#: Of derivatives, constants have the values when the function returns.
OF_DERIVATIVES = {
    "make_tape of grad": lambda f, x: first(md.make_tape(md.grad(of_square(f)))(x)),
    "jit of grad": lambda f, x: md.jit(md.grad(of_square(f))),
    "checkpoint": lambda f, x: md.jit(md.grad(md.checkpoint(of_square(f)))),
}
#: Functions of an array and a constant, and the shape of the constant.
USES = {
    "views": (lambda x, w: x * w[::-1] + w[:1], 2),
    "0-d": (lambda x, w: x * w, ()),
    "broadcast": (lambda x, w: x * np.broadcast_to(w, (2,)), 1),
    "an index": (lambda x, w: x[w.astype(int)], 2),
    "computed": (lambda x, w: x + np.take(w, [1, 0]), 2),
}


@each("how", {**RECORDINGS, **OF_DERIVATIVES}.values(), [*RECORDINGS, *OF_DERIVATIVES])
@each("use, shape", USES.values(), USES)
def test_constants_are_values_when_the_program_is_recorded(how, use, shape):
    w, x = np.ones(shape), np.array([2.0, 3.0])
    f = how(lambda x: use(x, w), x)
    expected = np.copy(f(x))
    w[...] = 0.0
    np.testing.assert_array_equal(f(x), expected)


def scratch(x):
    """The sum of 1x, 2x and 3x, of which each is computed in the same memory."""
    w, total = np.empty(x.shape), 0.0
    for n in (1.0, 2.0, 3.0):
        w[:] = n
        total = total + x * w
    return total


@each("how", RECORDINGS.values(), RECORDINGS)
def test_constants_are_values_when_the_function_uses_them(how):
    x = np.array([2.0, 3.0])
    np.testing.assert_allclose(how(scratch, x)(x), how(lambda x: x + x * 2 + x * 3, x)(x), 1e-15)
