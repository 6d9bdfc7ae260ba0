"""Results share memory with nothing: neither each other, nor arguments, nor what is kept for the next call."""

import weakref
from collections.abc import Callable

import numpy as np
import pytest

import minidiff as md
from collectives import pmax
from minidiff.compiler.program import optimize
from spmd import P, make_mesh, shard_map
from tests.checks.aliasing import arrays, check_apart
from tests.checks.samples import each
from tests.minidiff.ops.test_ops import check_values_and_memory
from tests.table import indexing, rearranging, replaced, shape


@pytest.mark.parametrize(
    "family", [shape, rearranging, indexing, replaced], ids=lambda x: x.__name__.rpartition(".")[2]
)
def test_operations_on_arrays_in_fortran_order(family):
    """Those that return views, and share memory with other operands than in C order, which `test_ops` has."""
    failures = {}
    for row in family.ROWS:
        if "order='A'" in row.key or "order='K'" in row.key:  # of traced values these are "C": see `reshape`
            continue
        try:
            check_values_and_memory(row, "F")
        except AssertionError as error:
            failures[row.key] = error
    assert not failures


# ---------------------------------------------------------------- copies

COPIES = {
    "np.copy": np.copy,
    "np.array": md.numpy.array,
    "flatten": lambda x: x.flatten(),
    "astype": lambda x: x.astype(x.dtype),
    "tile": lambda x: np.tile(x, 1),
    "repeat": lambda x: np.repeat(x, 1),
    "+x": lambda x: +x,
    "copy": lambda x: x.copy(),
    "index": lambda x: np.squeeze(x[:1])[()],
    "flip": lambda x: np.flip(np.squeeze(x[:1]), ()),
    "reduce": lambda x: np.hypot.reduce(x.reshape(1, -1)),
    "full": lambda x: np.full_like(x, x[0]),
    "meshgrid": lambda x: np.meshgrid(x, x),
}
ONE = make_mesh((1,), ("i",))

TRANSFORMATIONS: dict[str, Callable] = {
    "jit": lambda f, x: md.jit(f)(x),
    "vmap": lambda f, x: md.vmap(f, axis_size=2, in_axes=None)(x),
    "jvp": lambda f, x: md.jvp(f, (x,), (x,)),
    "vjp": lambda f, x: md.vjp(f, x)[0],
    "linearize": lambda f, x: md.linearize(f, x)[0],
    "make_tape": lambda f, x: md.make_tape(f)(x)(x),
    "checkpoint": lambda f, x: md.checkpoint(f)(x),
    "jit(checkpoint)": lambda f, x: md.jit(md.checkpoint(f))(x),
    "cond": lambda f, x: md.cond(True, f, f, x),
    "scan": lambda f, x: md.scan(lambda c, _: (c, f(x)), 0.0, None, length=1)[1],
    "jit(jvp)": lambda f, x: md.jit(lambda x: md.jvp(f, (x,), (x,)))(x),
    "shard_map": lambda f, x: md.tree.map(np.asarray, shard_map(f, ONE, in_specs=P(), out_specs=P())(x)),
}


@each("copying", COPIES)
@each("transformation", TRANSFORMATIONS)
@each("size", [1, 3])
def test_what_numpy_copies_is_a_copy(copying, transformation, size):
    x = np.arange(1.0, 1.0 + size)
    check_apart(TRANSFORMATIONS[transformation](COPIES[copying], x), x)


def test_imaginary_parts_of_real_intermediates_can_be_written_into():
    f = lambda x: np.copy(np.imag(x + 1))  # noqa: E731
    for g in (f, md.jit(f), lambda x: optimize(md.make_tape(f)(x))(x)[0]):
        assert g(np.ones(3)).flags.writeable


@pytest.mark.parametrize(
    "f", [np.nan_to_num, np.linalg.norm, lambda x: np.mean(x, dtype="u1"), lambda x: np.select([x > 1], [x]).max()]
)
def test_results_without_axes_are_scalars(f):
    """Arrays could be shared, and written into."""
    x = np.float64(1.5)
    for out in (md.jvp(f, (x,), (x,))[0], md.vjp(f, x)[0], *md.make_tape(f)(x)(x)):
        assert isinstance(out, np.generic)


def test_a_snapshot_stays():
    @md.jit
    def step(w):
        return np.copy(w), w - 1.0

    w = np.ones(3)
    snapshot, new = step(w)
    w[...] = new
    assert snapshot.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("body, spec", [(lambda x: x, P("i")), (lambda x: x, P()), (lambda x: pmax(x, "i"), P())])
def test_results_of_shard_map_are_not_its_arguments(ranks, body, spec):
    x = np.arange(4.0)
    result = shard_map(body, make_mesh((ranks,), ("i",)), in_specs=spec, out_specs=spec)(x)
    x[...] = 7.0
    assert np.asarray(result).tolist() == [0.0, 1.0, 2.0, 3.0]


# ---------------------------------------------------------------- each other


def test_each_gradient_is_an_array_of_its_own():
    x, y = np.ones(3), np.ones(3)
    for f in (lambda x, y: (x + y).sum(), lambda x, y: (x * y + np.sin(x)).mean()):
        for g in (md.grad(f, argnums=(0, 1)), md.jit(md.grad(f, argnums=(0, 1)))):
            check_apart(g(x, y), x, y)


def test_gradients_of_sums_can_be_written_into():
    for f in (np.sum, np.mean, lambda x: x.reshape(-1).sum(), lambda x: x.T.sum()):
        check_apart(md.grad(f)(np.ones((2, 3))))


def test_results_of_a_compiled_checkpoint_share_no_memory():
    x = np.linspace(0.0, 1.0, 4)
    for f in (lambda x: (np.sin(x), np.sin(x)), lambda x: (x, x + 0, x * 1), lambda x: (x.T, x[1:], x)):
        check_apart(md.jit(md.checkpoint(f))(x), x)
        check_apart(md.jit(lambda x, f=f: md.cond(x[0] < 1.0, f, f, x))(x), x)
        check_apart(md.jit(lambda x, f=f: md.scan(lambda c, _: (c, f(c)), x, None, length=2))(x), x)


def test_results_of_a_rule_are_not_what_it_keeps():
    f = md.custom_vjp(lambda x: x * 2.0)
    f.defvjp(lambda x: (x * 2.0, x), lambda x, ct: (x,))
    x = np.arange(3.0)
    check_apart(md.grad(lambda x: f(x).sum())(x), x)
    pullback = md.vjp(f, x)[1]
    pullback(x)[0][...] = 7.0
    assert pullback(x)[0].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("apply", [md.jit, lambda f: lambda x: md.jvp(md.jit(f), (x,), (x,))[0], md.vmap])
def test_results_are_not_the_constants_of_programs(apply):
    f = md.jit(lambda x: (x, np.zeros(3), np.ones((2, 2)).T))
    g = apply(f)
    for x in arrays(g(np.ones(3))):
        x[...] = 7.0
    for x, e in zip(md.tree.leaves(f(np.ones(3))), (1.0, 0.0, 1.0), strict=True):
        assert np.all(x == e)
    tape = md.make_tape(lambda x: np.zeros(3))(1.0)
    tape(1.0)[0][...] = 7.0
    assert tape(1.0)[0].tolist() == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------- pullbacks that outlive the call


def programs(c: np.ndarray) -> dict[str, Callable]:
    loop = lambda x: md.scan(lambda a, k: (a * k, a * c), x, c, length=3)[0]  # noqa: E731
    return {
        "argument": lambda x: x * x,
        "closed over": lambda x: x * c,
        "views": lambda x: x[::-1] * c.reshape(1, 3)[0].T,
        "result": np.exp,
        "matrix": lambda x: np.outer(x, c) @ x,
        "gather": lambda x: x[np.arange(3)] * c,
        "checkpoint": md.checkpoint(lambda x: np.sin(x * c) * c),
        "jit": md.jit(lambda x: np.sin(x * c)),
        "scan": loop,
        "cond": lambda x: md.cond(True, lambda x: x * c, lambda x: x, x),
        "of a derivative": md.grad(lambda x: (x * x * x * c).sum()),
    }


@pytest.mark.parametrize("name", programs(np.ones(3)))
def test_derivatives_survive_writing_in_place(name):
    c, x, ct = np.arange(1.0, 4.0), np.linspace(0.5, 1.0, 3), np.ones(3)
    f = programs(c)[name]
    value, pullback = md.vjp(f, x)
    other, f_linear = md.linearize(f, x)
    expected = [np.copy(pullback(ct)[0]), np.copy(f_linear(ct))]
    for a in (x, c, value, other):
        a[...] = 100.0
    for _ in range(2):
        results = [pullback(ct)[0], f_linear(ct)]
        np.testing.assert_array_equal(results, expected)
        for a in results:
            a[...] = 100.0
    assert np.all(ct == 1.0)


def test_memory_that_is_no_arrays_is_copied_too():
    data = bytearray(np.arange(3.0).tobytes())
    pullback = md.vjp(lambda x: x * np.frombuffer(data), np.ones(3))[1]
    data[:] = bytes(len(data))
    assert pullback(np.ones(3))[0].tolist() == [0.0, 1.0, 2.0]


def test_what_nobody_else_has_is_not_copied():
    def stored(f, x):
        tape = md.core.reverse.engine.linearize_flat(lambda x: [f(x)], [x], [True])[1]
        before = {id(a) for e in tape.equations for a in e.inputs if isinstance(a, np.ndarray)}
        md.api.derivatives.keep_residuals(tape)
        return sum(id(a) in before for e in tape.equations for a in e.inputs if isinstance(a, np.ndarray))

    x = np.ones(3)
    assert stored(lambda x: np.sin(np.sin(x)), x) == 1  # the inner sine; x is copied
    assert stored(lambda x: np.tanh(np.tanh(np.tanh(x))) * 2.0, x) == 3


def test_limits_that_no_integer_reaches_give_a_copy():
    x = np.array([7, 6], "u4")
    check_apart(md.make_tape(lambda x: np.clip(x, 0, 2**40))(x)(x), x)


# ---------------------------------------------------------------- constants of recorded programs


def recordings(f: Callable, x: np.ndarray) -> dict[str, Callable]:
    """Functions like `f` that have recorded it for arguments like x, or will at their first call."""
    mesh = make_mesh((2,), ("i",), backend="simulated")
    loss = lambda x: (f(x) ** 2).sum()  # noqa: E731
    compiled, mapped = md.jit(f), shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())
    first = lambda tape: lambda x: tape(x)[0]  # noqa: E731
    return {
        "jit": md.jit(f),
        "make_tape": first(md.make_tape(f)(x)),
        "make_tape of jit": first(md.make_tape(md.jit(f))(x)),
        "make_tape of grad": first(md.make_tape(md.grad(loss))(x)),
        "jit of grad": md.jit(md.grad(loss)),
        "grad of jit": md.grad(md.jit(loss)),
        "jvp of jit": lambda x: md.jvp(compiled, (x,), (x,))[1],
        "vmap of jit": lambda x: md.vmap(compiled)(x[None]),
        "jit of shard_map": md.jit(mapped),
        "shard_map of jit": shard_map(md.jit(f), mesh=mesh, in_specs=P(), out_specs=P()),
        "make_tape of shard_map": first(md.make_tape(mapped)(x)),
        "scan": md.jit(lambda x: md.scan(lambda c, _: (f(c), None), x, None, length=2)[0]),
        "while_loop": md.jit(lambda x: md.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x))[1]),
        "cond": md.jit(lambda x: md.cond(x[0] > 0, f, f, x)),
        "checkpoint": first(md.make_tape(md.grad(md.checkpoint(loss)))(x)),
        "a body in a loop": md.jit(lambda x: md.fori_loop(0, 2, lambda _, c: mapped(c), x)),
    }


@each("how", recordings(np.copy, np.ones(2)))
@each(
    "use, shape",
    [
        (lambda x, w: x * w + w * 2, 2),
        (lambda x, w: x * w[::-1] + w[:1], 2),
        (lambda x, w: x * w, ()),
        (lambda x, w: x * np.broadcast_to(w, (2,)), 1),
        (lambda x, w: x[w.astype(int)], 2),
        (lambda x, w: x + np.take(w, [1, 0]), 2),
    ],
    ids=["whole", "views", "0-d", "broadcast", "an index", "computed"],
)
def test_constants_are_values_when_the_program_is_recorded(how, use, shape):
    w, x = np.ones(shape), np.array([2.0, 3.0])
    f = recordings(lambda x: use(x, w), x)[how]
    expected = np.copy(f(x))
    w[...] = 0.0
    np.testing.assert_array_equal(f(x), expected)


PAIR = make_mesh((2,), ("i",), backend="simulated")


def scratch(x):
    """The sum of 1x, 2x and 3x, of which each is computed in the same memory."""
    w, total = np.empty(x.shape), 0.0
    for n in (1.0, 2.0, 3.0):
        w[:] = n
        total = total + x * w
    return total


@each("record", [md.jit, lambda f: lambda x: md.make_tape(f)(x)(x)[0]])
@each(
    "f",
    [
        scratch,
        lambda x: md.cond(x[0] > 0, scratch, scratch, x),
        *[shard_map(scratch, mesh=PAIR, in_specs=spec, out_specs=spec) for spec in (P(), P("i"))],
    ],
)
def test_constants_are_values_when_the_function_uses_them(record, f):
    np.testing.assert_array_equal(record(f)(np.ones(4)), [6.0] * 4)


def test_a_program_that_a_body_calls_has_constants_of_its_own():
    """It is recorded once, though its constants vary in the body because its arguments do."""
    w, count = np.arange(2.0), 0

    @md.jit
    def f(x):
        nonlocal count
        count += 1
        return x * w

    mapped = shard_map(lambda x: f(x) + f(x + 1), mesh=PAIR, in_specs=P("i"), out_specs=P("i"))
    for _ in range(2):
        assert mapped(np.arange(2.0)[:, None]).gather().tolist() == [[0.0, 1.0], [0.0, 3.0]]
        w[...] = 5.0
    assert count == 1


def test_an_array_is_one_constant():
    w = np.arange(4.0)
    tapes = [md.make_tape(f)(np.ones(4)) for f in (lambda x: x * w + w - w * (x / w), lambda x: x + w)]
    (c,) = tapes[0].constants
    assert [d is c for d in tapes[1].constants] == [True]  # also that of several programs
    assert c is not w and not c.flags.writeable
    w[0] = -0.0  # equal, and another value
    (d,) = md.make_tape(lambda x: x * w)(np.ones(4)).constants
    assert d is not c and np.signbit(d[0])


def test_what_nobody_can_write_into_is_not_copied():
    w, wide = np.arange(4.0), np.broadcast_to(np.ones(1), (1 << 30, 1 << 10))
    w.flags.writeable = False
    assert md.make_tape(lambda x: x * w)(1.0).constants[0] is w
    read_only_view = np.broadcast_to(np.ones(2), (3, 2))
    assert md.values.aliasing.read_only_copy(read_only_view) is not read_only_view
    assert md.values.aliasing.read_only_copy(wide).strides == (0, 0)  # and not of a terabyte


def test_copies_of_constants_go_with_their_programs():
    before = len(md.values.aliasing._copies)

    def program(w):
        return md.make_tape(lambda x: x * w)(1.0)

    w = np.ones(3)
    tape = program(w)
    assert len(md.values.aliasing._copies) == before + 1
    reference = weakref.ref(tape.constants[0])
    del tape
    assert reference() is None
    del w
    assert len(md.values.aliasing._copies) == before
