"""`Tape.check` finds whatever is wrong on a tape: in every place, of every kind, in bodies too."""

import re

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    at_root,
    axis_index,
    broadcast,
    broadcast_varying,
    gather,
    pmax,
    ppermute,
    pscan,
    pscatter,
    psum,
    psum_scatter,
    reduce,
    scatter,
)
from minidiff.core.tape import Equation
from minidiff.core.types import Var, typeof
from spmd import P
from tests.checks.samples import each

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
TYPE = r"(?:f|i|c|bool)\d*\[[\d,]*\](?:\{[^}]*\})?"


def program(x, w, k):
    """Operations, collectives, and operations with bodies, in a body."""
    y = all_gather(x * w, "i", tiled=True) + ppermute(np.tanh(w @ w), "i", [(0, 1)])[0]
    _, rows = md.scan(lambda c, row: (c + psum(row, "i"), row * w[0]), w[0], y)
    z = md.cond(k[0] > 0, lambda rows: np.sin(rows), lambda rows: rows * 2.0, rows)
    z = md.checkpoint(lambda z: np.cos(z) + pscatter(w, "j", tiled=True).sum())(z)
    return psum(np.sum(z * k), ("i", "j")), x + np.sum(np.linalg.inv(w))


def tape_of_program():
    specs = P("i"), P(), P()
    f = spmd.shard_map(program, mesh=MESH, in_specs=specs, out_specs=(P(), P(("i", "j"))))
    return md.make_tape(lambda *args: [2.0 * y for y in f(np.sin(args[0]), *args[1:])])(
        np.ones((4, 2)), np.ones((2, 2)), np.arange(2)
    )


def names_on(tape):
    """All names, in order."""
    yield from tape.inputs
    for eqn in tape.equations:
        yield from eqn.outputs
        for body in eqn.bodies:
            yield from names_on(body)


def equations_on(tape):
    for eqn in tape.equations:
        yield eqn
        for body in eqn.bodies:
            yield from equations_on(body)


CORRUPTED = {
    "shape": lambda t: t.update(shape=(*t.shape, 7)),
    "a size": lambda t: t.update(shape=(t.shape[0] + 1, *t.shape[1:]) if t.shape else (3,)),
    "dtype": lambda t: t.update(dtype="complex64" if t.dtype.kind in "fc" else "float32"),
    "variance": lambda t: t.update(variance=t.variance ^ {"j"}),
    "another axis": lambda t: t.update(variance={"k"}),
}


@pytest.mark.parametrize("kind", CORRUPTED)
def test_a_wrong_type_is_found_in_every_place(kind):
    tape = tape_of_program()
    tape.check()
    places = list(names_on(tape))
    operations = {eqn.primitive.name for eqn in equations_on(tape)}
    assert len(places) > 50 and {"scan", "cond", "checkpoint", "psum", "pbroadcast"} <= operations
    for v in places:
        right, v.type = v.type, CORRUPTED[kind](v.type)
        with pytest.raises(TypeError) as error:
            tape.check()
        text = str(error.value)
        assert text.split(":")[0].split(" over ")[0] in operations, text
        assert re.search(TYPE, text), text
        v.type = right
    tape.check()


def test_the_error_names_the_operation_and_both_types():
    tape = tape_of_program()
    for eqn in equations_on(tape):
        for v in eqn.outputs:
            right = v.type
            for corrupt in CORRUPTED.values():
                v.type = corrupt(right)
                with pytest.raises(TypeError) as error:
                    tape.check()
                text = str(error.value)
                if not eqn.bodies:  # else the error may be found in the body, or where its result goes in
                    assert text.startswith(f"{eqn.primitive.name}: ") and f"the tape says {v.type}" in text
                    assert f"the rules say {right}" in text
            v.type = right


def test_a_wrong_body_is_found():
    one, two = (md.make_tape(f)(np.ones((2, 2)), np.ones(3)) for f in (lambda x, y: (x, y), lambda x, y: (y, x)))
    bodies = 0
    tape = tape_of_program()
    for eqn in equations_on(tape):
        for name, body in list(eqn.params.items()):
            if isinstance(body, md.Tape):
                bodies += 1
                for wrong in (one, two, md.Tape(body.inputs, body.equations, body.outputs[::-1] * 2)):
                    eqn.params[name] = wrong
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
    tape.equations.append(tape.equations[0])
    with pytest.raises(TypeError, match=r"sin: its result of type f64\[4,2\] is defined twice"):
        tape.check()
    tape.equations.pop()
    tape.outputs = [Var(md.ShapedArray((2,), float))]
    with pytest.raises(TypeError, match=r"returns a value of type f64\[2\] that it does not define"):
        tape.check()


def test_rules_that_do_not_fit_are_reported_with_the_operands():
    x, y = Var(md.ShapedArray((3,), float)), Var(md.ShapedArray((4,), float))
    (eqn,) = md.make_tape(np.add)(np.ones(3), np.ones(3)).equations
    wrong = md.Tape([x, y], [Equation(eqn.primitive, [x, y], {}, eqn.outputs)], eqn.outputs)
    with pytest.raises(TypeError, match=r"^add: the rules do not allow operands of types f64\[3\], f64\[4\]: "):
        wrong.check()


def test_untyped_bodies_are_checked_without_variances():
    """Also a loop's in such a body."""
    f = spmd.shard_map(
        lambda x: md.scan(lambda c, row: (psum(c * row, "i"), row), x[0], x)[1],
        mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_rep=False,
    )  # fmt: skip
    tape = md.make_tape(f)(np.ones((4, 2)))
    tape.check()
    (shard_map,) = tape.equations
    body = shard_map.params["body"]
    (loop,) = [eqn for eqn in body.equations if eqn.primitive.name == "scan"]
    (product, _) = loop.params["body"].equations
    product.outputs[0].type = md.ShapedArray((5,), float)
    with pytest.raises(TypeError, match=r"^multiply: the tape says f64\[5\], the rules say f64\[2\]"):
        tape.check()


# ---------------------------------------------------------------- operands and parameters

BOTH = ("i", "j")
BLOCKS = np.arange(32.0).reshape(16, 2)
#: Bodies with every collective, on 2 x 2 ranks that have 4 rows each; and the specs, where they are not P(("i", "j")).
COLLECTIVES = {
    "psum": (lambda x: psum(x, "i") + psum(x, BOTH), P("j")),
    "pmax": (lambda x: pmax(x, BOTH), P()),
    "pbroadcast": (lambda x: x + psum(x, "i"),),
    "all_gather": (lambda x: all_gather(x, "i", tiled=True)[:4] + all_gather(x, "j", axis=1)[:, 0],),
    "all_gather_invariant": (lambda x: all_gather_invariant(x, "i"), P(None, "j")),
    "psum_scatter": (lambda x: psum_scatter(x, BOTH) + psum_scatter(x, "i", tiled=True)[0],),
    "pscatter": (lambda x: pscatter(x, "i", tiled=True), P("i"), P()),
    "all_to_all": (lambda x: all_to_all(all_to_all(x, "i", 0, 1, tiled=True), "j", 0, 0),),
    "ragged_all_to_all": (lambda x: all_to_all(x, "i", 0, 0, splits=[[1, 2], [3, 1]]),),
    "ppermute": (lambda x: ppermute(x, "i", [(0, 1)]),),
    "pscan": (lambda x: pscan(x, "i") + pscan(x, BOTH, reverse=True, exclusive=True),),
    "broadcast": (lambda x: broadcast(x, "i", 1) + broadcast_varying(x, "i", 1) + reduce(x, BOTH, 3),),
    "gather": (lambda x: gather(x, BOTH, 3)[0] + scatter(x, BOTH, 2)[None],),
    "at_root": (lambda x: at_root(x, "i", 1), P("i"), P()),
    "in groups": (lambda x: psum(x, BOTH, axis_index_groups=[[0, 3], [1, 2]]),),
    "axis_index": (lambda x: x * axis_index(BOTH),),
    "partial sums": (lambda x: x, P(sum=BOTH)),
}


def tape_of_collective(name):
    body, *specs = COLLECTIVES[name]
    out_specs, in_specs = [*specs, *[P(BOTH)] * (2 - len(specs))]
    return md.make_tape(spmd.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs))(BLOCKS)


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


def run_as_typed(tape, args):
    """Run a tape, and see whether results have the types that it says."""
    outs = [x.gather() if isinstance(x, spmd.ShardedArray) else x for x in tape(*args)]
    assert [md.typeof(x) for x in outs] == tape.out_types


def run_if_in_bounds(tape, args):
    """Run as `run_as_typed` does, unless an index is out of bounds: types do not bound indices."""
    try:
        run_as_typed(tape, args)
    except IndexError as error:
        assert re.search("out of (bounds|range)|take from an empty ax", str(error))


def with_others(eqn):
    """An equation with other parameters: other values, fewer, more. It is given each for a while."""
    params = eqn.params
    for key, v in params.items():
        for other in others(v):
            eqn.params = {**params, key: other}
            yield
        eqn.params = {k: v for k, v in params.items() if k != key}
        yield
    eqn.params = {**params, "another": 1}
    yield
    eqn.params = params


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each("name", [*COLLECTIVES, *LOCAL, *CONTROL])
def test_with_other_parameters_a_tape_is_refused_or_runs(name):
    """A tape that passes the check runs, with the stated types; any other is refused by the name of its operation."""
    of = {**LOCAL, **CONTROL}.get(name)
    tape, args = (tape_of_collective(name), [BLOCKS]) if of is None else (md.make_tape(of)(X), [X])
    refused = 0
    for eqn in equations_on(tape):
        for _ in with_others(eqn):
            try:
                tape.check()
            except TypeError as error:
                refused += 1
                assert re.match(rf"{eqn.primitive}(:| over)", str(error)), error
            else:
                run_if_in_bounds(tape, args)
    assert refused > (30 if name in COLLECTIVES else 2)
    tape.check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each("name", [*LOCAL, *CONTROL])
def test_with_more_operands_or_fewer_a_tape_is_refused_or_runs(name):
    """NumPy takes one operand too many for the array that it is to write into."""
    tape = md.make_tape({**LOCAL, **CONTROL}[name])(X)
    refused = 0
    for eqn in equations_on(tape):
        inputs = eqn.inputs
        for k, a in enumerate(inputs):
            others = [a, 2.0, np.ones(2), np.ones((3, 4, 5)), np.ones((4, 2), "f4"), True]
            for eqn.inputs in (
                [*inputs, a], [*inputs[:k], *inputs[k + 1 :]], *[[*inputs[:k], b, *inputs[k + 1 :]] for b in others],
            ):  # fmt: skip
                try:
                    tape.check()
                except TypeError as error:
                    refused += 1
                    assert str(error).startswith(f"{eqn.primitive}: ") or eqn.bodies, error
                else:
                    run_if_in_bounds(tape, [X])
        eqn.inputs = inputs
    assert refused > 10


@pytest.mark.parametrize("missing", ["true_fun", "false_fun"])
def test_a_missing_branch_is_found(missing):
    tape = md.make_tape(CONTROL["cond"])(X)
    eqn = next(eqn for eqn in tape.equations if eqn.primitive.name == "cond")
    eqn.params = {k: v for k, v in eqn.params.items() if k != missing}
    with pytest.raises(TypeError, match=r"^cond: the rules do not allow operands of types .*: a branch is missing$"):
        tape.check()


NO_VALUES = (md.ShapedArray((4, 2), float), "x", {})


@pytest.mark.parametrize("no_value", NO_VALUES, ids=str)
def test_a_non_value_is_refused(no_value):
    """A type may stand for a value that a derivative does not read, and nowhere else."""
    tape = md.make_tape(lambda x: np.sin(x) + 1.0)(X)
    message = rf"{re.escape(repr(no_value))}, which is neither an array nor a number$"
    for eqn in tape.equations:
        inputs = eqn.inputs
        for k in range(len(inputs)):
            eqn.inputs = [*inputs[:k], no_value, *inputs[k + 1 :]]
            with pytest.raises(TypeError, match=rf"^{eqn.primitive}: an operand is {message}"):
                tape.check()
        eqn.inputs = inputs
    tape.outputs = [no_value]
    with pytest.raises(TypeError, match=rf"^the tape returns {message}"):
        tape.check()


def test_a_sharding_other_than_the_tapes_is_found():
    """An operation on it would assume the wrong sharding."""
    twice = lambda x: spmd.shard_map(lambda x: 2 * x, mesh=MESH, in_specs=P("i"), out_specs=P("i"))(x)  # noqa: E731
    tape = md.make_tape(lambda x: twice(twice(x)))(X)
    tape.check()
    tape.equations[0].outputs[0].type.sharding = None
    with pytest.raises(TypeError, match=r"^shard_map: .* f64\[4,2\] has the sharding None, the rules say"):
        tape.check()


def variants(t):
    """Types like `t`, but for a size, an axis more or less, or the dtype."""
    for d, n in enumerate(t.shape):
        yield from (t.update(shape=(*t.shape[:d], m, *t.shape[d + 1 :])) for m in {n + 1, 1, 0, 2 * n} - {n})
    yield from (t.update(shape=shape) for shape in [(*t.shape, 3), (2, *t.shape), t.shape[1:], t.shape[:-1]])
    yield from (t.update(dtype=dtype) for dtype in ("f4", "i8", "bool", "c16") if t.dtype != dtype)


def value_of(t):
    """A value of a type, which may be computed with: indices stay in bounds, and matrices are regular."""
    x = np.zeros(t.shape) if t.dtype.kind in "ib" else np.ones(t.shape) + np.arange(t.size).reshape(t.shape) ** 2
    return np.asarray(x + 2 * np.eye(*t.shape[-2:]) if t.ndim > 1 and t.dtype.kind in "fc" else x, t.dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of means of nothing
@pytest.mark.parametrize("name", LOCAL)
def test_with_operands_of_other_types_an_operation_is_refused_or_runs(name):
    tape = md.make_tape(LOCAL[name])(X)
    tape.check()
    refused = 0
    for eqn in tape.equations:
        for k, a in enumerate(eqn.inputs):
            if not isinstance(a, Var):
                continue
            for t in variants(a.type):
                inputs = [Var(b.type) if isinstance(b, Var) else b for b in eqn.inputs]
                inputs[k] = Var(t)
                operands = [b for b in inputs if isinstance(b, Var)]
                try:  # the type of the result is that of the rules, if they have one
                    outputs = [Var(u) for u in eqn.primitive.typecheck([*map(typeof, inputs)], eqn.params)]
                    alone = md.Tape(operands, [Equation(eqn.primitive, inputs, eqn.params, outputs)], outputs)
                    alone.check()
                except (TypeError, ValueError, IndexError):
                    refused += 1
                else:
                    run_if_in_bounds(alone, [value_of(v.type) for v in operands])
    assert refused > 5


#: What docs/errors.md does not show: groups of several ranks, a dimension that is not there, a spec that is no spec.
MISFITS = {
    "groups": ("in groups", "psum", {"groups": ((0, 3), (1,))}, "rank 2 is in no group; for a group of its own"),
    "no dimension": ("all_gather_invariant", "all_gather_invariant", {"axis": 3}, "f64[4,2]{i,j} has no axis 3"),
    "no spec": ("pmax", "shard_map", {"in_specs": ("i",)}, "in_specs[0] is 'i', which is not a partition spec"),
}  # fmt: skip


@each("case", MISFITS)
def test_parameters_that_do_not_fit_are_named(case):
    name, operation, changes, message = MISFITS[case]
    tape = tape_of_collective(name)
    eqn = next(eqn for eqn in equations_on(tape) if eqn.primitive.name == operation)
    eqn.params = {**eqn.params, **changes}
    with pytest.raises(TypeError, match=rf"^{operation}: the rules do not allow operands .*: {re.escape(message)}"):
        tape.check()
