"""`Tape.check` finds whatever is wrong on a tape: in every place, of every kind, in bodies too."""

import re

import pytest

import collectives as c
import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.core.types import Var
from spmd import P
from tests.checks.collective_cases import one_case_each
from tests.checks.meshes import mapped, mesh
from tests.checks.of_collectives import on_blocks, sample
from tests.checks.samples import each
from tests.checks.whole import whole

MESH = mesh(2, 2)
TYPE = r"(?:f|i|c|bool)\d*\[[\d,]*\](?:\{[^}]*\})?"


def program(x, w, k):
    """Operations, collectives, and operations with bodies, in a body."""
    y = c.all_gather(x * w, "i", tiled=True) + c.ppermute(np.tanh(w @ w), "i", [(0, 1)])[0]
    _, rows = md.scan(lambda s, row: (s + c.psum(row, "i"), row * w[0]), w[0], y)
    z = md.cond(k[0] > 0, lambda rows: np.sin(rows), lambda rows: rows * 2.0, rows)
    z = md.checkpoint(lambda z: np.cos(z) + c.pscatter(w, "j", tiled=True).sum())(z)
    return c.psum(np.sum(z * k), ("i", "j")), x + np.sum(np.linalg.inv(w))


def tape_of_program():
    f = mapped(program, MESH, (P("i"), P(), P()), (P(), P(("i", "j"))))
    return md.make_tape(lambda *args: [2.0 * y for y in f(np.sin(args[0]), *args[1:])])(
        np.ones((4, 2)), np.ones((2, 2)), np.arange(2)
    )


def names_on(tape):
    """All names, in order, each with its equation."""
    yield from ((v, None) for v in tape.inputs)
    for eqn in tape.equations:
        yield from ((v, eqn) for v in eqn.outputs)
        for body in eqn.bodies:
            yield from names_on(body)


def equations_on(tape):
    for eqn in tape.equations:
        yield eqn
        for body in eqn.bodies:
            yield from equations_on(body)


CORRUPTED = {
    "shape": lambda t: t.update(shape=(*t.shape, 7)),
    "dtype": lambda t: t.update(dtype="complex64" if t.dtype.kind in "fc" else "float32"),
    "variance": lambda t: t.update(variance=t.variance ^ {"j"}),
    "another axis": lambda t: t.update(variance={"k"}),
}


@each("kind", CORRUPTED)
def test_a_wrong_type_is_told_with_its_operation_and_both_types(kind):
    tape = tape_of_program()
    operations = {eqn.primitive.name for eqn in equations_on(tape)}
    assert {"scan", "cond", "checkpoint", "psum", "pbroadcast"} <= operations
    for v, eqn in [*names_on(tape)]:
        right, v.type = v.type, CORRUPTED[kind](v.type)
        with pytest.raises(TypeError) as error:
            tape.check()
        text = str(error.value)
        assert text.split(":")[0].split(" over ")[0] in operations and re.search(TYPE, text), text
        if eqn and not eqn.bodies:  # else the error may be in the body, or where its result goes in
            assert text.startswith(f"{eqn.primitive.name}: ")
            assert f"the tape says {v.type}" in text and f"the rules say {right}" in text
        v.type = right
    tape.check()


def test_a_wrong_body_is_found():
    one, two = (md.make_tape(f)(np.ones((2, 2)), np.ones(3)) for f in (lambda x, y: (x, y), lambda x, y: (y, x)))
    tape, bodies = tape_of_program(), 0
    for eqn in equations_on(tape):
        for name, body in [(name, x) for name, x in eqn.params.items() if isinstance(x, md.Tape)]:
            bodies += 1
            for eqn.params[name] in (one, two, md.Tape(body.inputs, body.equations, body.outputs[::-1] * 2)):
                with pytest.raises(TypeError, match=rf"^{eqn.primitive}: .*{TYPE}"):
                    tape.check()
            eqn.params[name] = body
    assert bodies == 6  # shard_map, scan, both branches of cond, checkpoint, and the shard_map that doubles a result
    tape.check()


def test_equations_in_disorder_are_found():
    tape = tape_of_program()
    for part in (tape, *[body for eqn in equations_on(tape) for body in eqn.bodies]):
        if len(part.equations) > 1:
            part.equations.append(part.equations.pop(0))
            with pytest.raises(TypeError, match="is used before it is defined"):
                tape.check()
            part.equations.insert(0, part.equations.pop())


def test_untyped_bodies_are_checked_without_variances():
    """Also a loop's in such a body."""
    f = lambda x: md.scan(lambda s, row: (c.psum(s * row, "i"), row), x[0], x)[1]  # noqa: E731
    tape = md.make_tape(mapped(f, MESH, P("i"), P("i"), check_rep=False))(np.ones((4, 2)))
    tape.check()
    next(e for e in equations_on(tape) if str(e.primitive) == "multiply").outputs[0].type = md.ShapedArray((5,), float)
    with pytest.raises(TypeError):
        tape.check()


# ---------------------------------------------------------------- operands and parameters

BOTH = ("i", "j")


def of_collective(case):
    """A body with a collective over 2 x 2 ranks, and the blocks."""
    blocks = sample(MESH, case, BOTH)
    return on_blocks(MESH, lambda x: case(x, BOTH), blocks.varying), blocks.stacked


COLLECTIVES = {f"{c.name} {'in groups' * c.grouped} {c.shape}": of_collective(c) for c in one_case_each(4)}
COLLECTIVES["partial sums"] = mapped(lambda x: x, MESH, P(BOTH), P(sum=BOTH)), np.ones((4, 2))
X, K = np.arange(8.0).reshape(4, 2) + np.eye(4, 2), np.array([0, 1])
LOCAL = {
    "shapes": lambda x: (x.reshape(2, 4), x.T, np.broadcast_to(x, (2, 4, 2)), np.concatenate([x, x]), np.stack([x, x])),
    "parts": lambda x: (np.split(x, 2), x[1:, ::-1], np.roll(x, 1, 0), np.diagonal(x), [*x], x.at[0].set(1.0), x[K, K]),
    "transposed": lambda x: md.vjp(lambda x: (x[1:], x[K], np.diagonal(x), np.sort(x, 0)), x)[1](
        (x[1:], x[K], np.diagonal(x), x)
    ),
    "reductions": lambda x: (x.sum(0), x.mean(1), np.var(x), np.prod(x, 1), x.max(0), np.any(x, 0), np.argmax(x, 1)),
    "along an axis": lambda x: (np.cumsum(x, 1), np.cumprod(x, 0), np.sort(x, 0), np.argsort(x), np.median(x, 0)),
    "products": lambda x: (x @ x.T, np.einsum("ij,ij->j", x, x), np.tensordot(x, x, 2), np.outer(x[0], x[1])),
    "matrices": lambda x: (np.linalg.inv(x[:2]), np.linalg.solve(x[:2], x.T), np.linalg.qr(x), np.linalg.eigh(x[:2])),
    "spectra": lambda x: (np.fft.fft(x, axis=0), np.fft.rfft(x), np.fft.irfft(x, axis=0)),
}  # fmt: skip


#: (No `while_loop`: one that is not as it was may never end.)
CONTROL = {
    "scan": lambda x: md.scan(lambda c, row: (c + row, c[0] * row), x[0], x, reverse=True),
    "fori_loop": lambda x: md.fori_loop(0, 3, lambda i, c: c * i + x, x),
    "cond": lambda x: md.cond(x[0, 0] > 0, lambda x: np.sin(x), lambda x: 2 * x, x),
    "switch": lambda x: md.switch(np.astype(x[0, 0], int), [lambda x: np.sin(x), lambda x: 2 * x], x),
    "checkpoint": lambda x: md.checkpoint(lambda x: np.sin(x) * x)(x),
}


def others(v):
    """Values that a parameter might have in place of `v`: of its kind, and of another."""
    if isinstance(v, bool):
        yield not v
    elif isinstance(v, int):
        yield from (v + 1, v - 1, -v - 1, v + 100, str(v), None)
    elif isinstance(v, str):
        yield from (v + "x", None)
    elif isinstance(v, (tuple, list)):
        yield from (v[1:], (*v, *v[:1]), tuple(reversed(v)), (), None, 7)
        for k, x in enumerate(v):
            yield from ((*v[:k], y, *v[k + 1 :]) for y in others(x))
    elif isinstance(v, spmd.PartitionSpec):
        yield from (P(), P("i"), P("j"), P("k"), P(None, "i"), P(BOTH), P(sum="i"), P(None, None, None, "i"), "i", None)


def run_if_in_bounds(tape, x):
    """See whether results have the types that it says, unless an index is out of bounds: types do not bound indices."""
    try:
        assert [md.typeof(whole(x)) for x in tape(x)] == tape.out_types
    except IndexError as error:
        assert re.search("out of (bounds|range)|take from an empty ax", str(error))


def with_other_params(eqn):
    """An equation with other parameters: other values, fewer, more. It has each for a while."""
    params = eqn.params
    for key, v in params.items():
        for eqn.params in ({**params, key: other} for other in others(v)):
            yield
        eqn.params = {k: v for k, v in params.items() if k != key}
        yield
    eqn.params = {**params, "another": 1}
    yield
    eqn.params = params


def regular(shape, dtype=float):
    x = np.ones(shape, dtype)
    return x + np.eye(*shape[-2:], dtype=dtype) if x.ndim > 1 else x


def with_other_operands(eqn):
    """An equation with one operand more, or fewer, or another one, for a while."""
    inputs = eqn.inputs
    for k, a in enumerate(inputs):
        shape = np.shape(a) if not isinstance(a, Var) else a.type.shape
        shapes = [(), shape[1:], (2, *shape), (*shape, 3), (0, *shape[1:]), (*shape[:-1], 0)]
        others = [2.0, True, *map(regular, shapes), *(regular(shape, dtype) for dtype in ("f4", "i8", "c16"))]
        # a type stands for a value that a derivative does not read
        for other in ([a, a], [], *([x] for x in (*others, md.ShapedArray((4, 2), float), "x", {}))):
            eqn.inputs = [*inputs[:k], *other, *inputs[k + 1 :]]
            yield
    eqn.inputs = inputs


TAPES = {**COLLECTIVES, **{name: (f, X) for name, f in {**LOCAL, **CONTROL}.items()}}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each("change", [with_other_params, with_other_operands])
@each("name", TAPES)
def test_a_changed_tape_is_refused_or_runs(name, change):
    """A tape that passes the check runs, with the stated types; any other is refused by the name of its operation."""
    f, x = TAPES[name]
    tape, refused = md.make_tape(f)(x), 0
    for eqn in equations_on(tape):
        for _ in change(eqn):
            try:
                tape.check()
            except TypeError as error:
                refused += 1
                assert re.match(rf"{eqn.primitive}(:| over)", str(error)) or eqn.bodies, error
            else:
                run_if_in_bounds(tape, x)
    assert refused > 2
    tape.check()
