"""The four states of a value along a mesh axis: how operations combine them, and how collectives change them."""

import itertools

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, pbroadcast, pcast, psum, psum_scatter, reduced, unreduced
from minidiff.errors import VarianceError
from spmd import P
from tests.samples import check_each

RANKS = 4
MESH = spmd.make_mesh((RANKS,), ("i",), backend="simulated")
BLOCKS = numpy.random.default_rng(0).normal(size=(RANKS, 3, 3))
SAME = numpy.random.default_rng(1).normal(size=(3, 3)) + 4

# ---------------------------------------------------------------- every kind of operation, on all states

#: A state's letter: its name, and the spec that takes it out of a body.
STATES = {"I": "invariant", "V": "varying", "U": "unreduced", "R": "reduced"}
SPECS = {"I": P(), "V": P("i"), "U": P(unreduced={"i"}), "R": P(reduced={"i"})}

MASK = numpy.eye(3, dtype=bool)
OPERATIONS = {
    "nonlinear": [np.tanh, np.square, np.sort, np.max, np.linalg.inv, lambda x: x > 0, lambda x: MASK & x.astype(bool)],
    "linear": [
        np.negative,
        lambda x: np.sum(x, axis=0),
        lambda x: np.mean(x, axis=1, keepdims=True),
        lambda x: np.reshape(x, (9, 1)),
        np.transpose,
        lambda x: x.astype("float32"),
        lambda x: x[1:, ::2],
        lambda x: x[numpy.array([0, 0, 2])],
        lambda x: np.cumsum(x, axis=1),
        lambda x: np.pad(x, 1),
        lambda x: np.real(np.fft.ifft(np.fft.fft(x) * np.fft.fft(numpy.eye(3)))),
    ],
    "sum": [
        np.add,
        np.subtract,
        lambda x, y: np.where(MASK, x, y),
        lambda x, y: np.concatenate([x, y]),
        lambda x, y: np.stack([x, y], axis=1),
    ],
    "product": [np.multiply, np.matmul, lambda x, y: np.einsum("ij,kj->ik", x, y), np.kron],
    "quotient": [np.divide],
    "other": [np.maximum, np.less, np.hypot, lambda x, y: np.where(x > y, x, y)],
}
WITH_NUMBERS = (np.add, np.subtract, np.multiply, np.divide, np.maximum, np.less, np.hypot)


def result_state(kind, states):
    """The rules, a second time: the letter of the result's state, or None for an error. `#` is a Python number."""
    if "U" not in states:
        return next(s for s in "VRI" if s in states)
    parts = [s == "U" for s in states]
    linear = {
        "linear": True,
        "sum": all(parts),
        "product": sum(parts) == 1,
        "quotient": parts == [True, False],
    }
    return "U" if linear.get(kind, False) and "V" not in states else None


def cast_to_write(states):
    """What `auto_pbroadcast=False` asks for where operands disagree; None where they agree, numbers left out."""
    given = set(states) - {"#"}
    if "V" in given and len(given) > 1:
        return "pbroadcast(x, 'i')"
    return "reduced(x, 'i')" if "I" in given and len(given) > 1 else None


def in_state(state, block, same):
    """An operand in a state, made in a body from a rank's block and from what all ranks have."""
    made = {"V": lambda: block, "U": lambda: unreduced(block, "i"), "R": lambda: reduced(same, "i")}
    return 2.0 if state == "#" else made.get(state, lambda: same)()


def run(f, states, seen, **options):
    """`f` of operands in these states, as a function of global values; `seen` gets the type of its result."""

    def body(blocks, sames):
        y = f(*[in_state(s, x, same) for s, x, same in zip(states, blocks[0], sames)])
        seen.append(md.typeof(y))
        return y[None] if seen[-1].variance else y

    state = next((s for s in "VUR" if s in states and (s != "R" or "V" not in states)), "I")
    return spmd.shard_map(body, mesh=MESH, in_specs=(P("i"), P()), out_specs=SPECS[state], **options)


def global_value(y):
    return y.gather() if isinstance(y, spmd.ShardedArray) else numpy.asarray(y)


def check_operation(kind, f, states):
    blocks = numpy.stack([numpy.roll(BLOCKS, k) for k in range(len(states))], axis=1)
    sames = numpy.stack([SAME * (k + 1) for k in range(len(states))])
    expected, seen = result_state(kind, states), []
    g, written = (run(f, states, seen, **options) for options in ({}, {"auto_pbroadcast": False}))
    if expected is None:
        for make in (g, md.make_tape(g), written):
            with pytest.raises(VarianceError, match=r"hold parts of a sum; write psum\(x, 'i'\) first"):
                make(blocks, sames)
        return
    global_values = {"V": blocks, "U": blocks.sum(0), "#": [2.0, 2.0]}
    on_rank = [
        [global_values["V"][r, k] if s == "V" else global_values.get(s, sames)[k] for k, s in enumerate(states)]
        for r in range(RANKS)
    ]
    whole = numpy.asarray([f(*xs) for xs in on_rank] if expected == "V" else f(*on_rank[0]))
    tape = md.make_tape(g)(blocks, sames)
    tape.check()
    rtol = 1e-5 if whole.dtype == "float32" else 1e-9
    for y in (g(blocks, sames), tape(blocks, sames)[0], md.jit(g)(blocks, sames)):
        assert global_value(y).dtype == whole.dtype
        numpy.testing.assert_allclose(global_value(y), whole, rtol, rtol)
    assert {STATES[expected]} == {t.states.along("i") for t in seen}
    if missing := cast_to_write(states):
        with pytest.raises(VarianceError) as error:
            written(blocks, sames)
        assert missing in str(error.value)
    else:
        numpy.testing.assert_allclose(global_value(written(blocks, sames)), whole, rtol, rtol)


@pytest.mark.parametrize("kind", OPERATIONS)
def test_operations_on_states(kind):
    """The type of the result or the error, eagerly and on a tape, and the global value."""
    cases = []
    for k, f in enumerate(OPERATIONS[kind]):
        for states in itertools.product("IVUR#", repeat=1 if kind in ("nonlinear", "linear") else 2):
            if "#" not in states or (f in WITH_NUMBERS and states != ("#", "#")):
                cases.append((f"{k} {''.join(states)}", lambda f=f, states=states: check_operation(kind, f, states)))
    check_each(cases)

# ---------------------------------------------------------------- the table of collectives

MESH2 = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")

#: Name: the collective of a value and axes, the states before and after, and the operation that it transposes to.
ROWS = {
    "psum": (psum, "UI", "reduced"),
    "psum_scatter": (lambda x, a: psum_scatter(x, a, tiled=True), "UV", "all_gather_reduced"),
    "all_gather": (lambda x, a: all_gather(x, a, tiled=True, to="reduced"), "VR", "psum_scatter"),
    "pbroadcast": (pbroadcast, "RV", "unreduced"),
    "reduced": (reduced, "IR", "psum"),
    "unreduced": (unreduced, "VU", "pbroadcast"),
    "pcast to varying": (lambda x, a: pcast(x, a, to="varying"), "RV", "unreduced"),
    "pcast to reduced": (lambda x, a: pcast(x, a, to="reduced"), "IR", "psum"),
    "pcast to unreduced": (lambda x, a: pcast(x, a, to="unreduced"), "VU", "pbroadcast"),
    "psum of varying": (psum, "VI", "pbroadcast"),
    "pbroadcast of invariant": (pbroadcast, "IV", "psum"),
}
SWAPPED = dict(zip("IVUR", "IVRU"))


def spec_of_states(states):
    """The spec of a matrix in these states along axes, such as {"i": "V", "j": "U"}: V splits the first dimension."""
    along = {letter: {a for a in states if states[a] == letter} for letter in "VUR"}
    return P(tuple(sorted(along["V"])) or None, unreduced=along["U"], reduced=along["R"])


def array_of(spec, seed, shape=(4, 3)):
    """An array of any values with this spec on MESH2, outside of any body."""
    rows = shape[0] // spmd.partition.part_count(spec.axes, MESH2.shape)
    seeds = [[seed, *[k for a, k in zip("ij", at) if a in spec.held]] for at in numpy.ndindex(2, 2)]
    return spmd.from_local([numpy.random.default_rng(s).normal(size=(rows, *shape[1:])) for s in seeds], MESH2, spec)


def inner(x, y):
    return float(numpy.sum(global_value(x) * global_value(y)))


def check_row(name, axes, beside):
    """<f(x), ct> = <x, f_t(ct)>, of the global values; f_t is one operation, and has the types that it should."""
    collective, (before, after), transpose = ROWS[name]
    specs = [spec_of_states({"i": beside, "j": beside} | dict.fromkeys(axes, s)) for s in (before, after)]
    f = spmd.shard_map(lambda x: collective(x, axes), mesh=MESH2, in_specs=specs[0], out_specs=specs[1])
    x = array_of(specs[0], 1)
    y = f(x)
    ct = array_of(specs[1].transposed(), 2, y.shape)
    tape = md.make_tape(f)(x)
    f_t = md.transpose(tape)
    f_t.check()
    (x_t,) = f_t(ct)
    numpy.testing.assert_allclose(inner(y, ct), inner(x, x_t))
    assert md.typeof(x_t) == md.typeof(x).cotangent and spmd.spec_of(x_t) == specs[0].transposed()
    (equation,) = f_t.equations
    assert [e.primitive.name for e in equation.params["body"].equations] == [transpose]
    for g in (md.vjp(f, x)[1], md.linear_transpose(f, x), md.jit(lambda ct: md.vjp(f, x)[1](ct))):
        (again,) = g(ct)
        numpy.testing.assert_array_equal(global_value(again), global_value(x_t))
        assert spmd.spec_of(again) == specs[0].transposed()
    assert md.transpose(f_t) == tape
    numpy.testing.assert_allclose(global_value(md.jvp(f, (x,), (x,))[1]), global_value(y))


@pytest.mark.parametrize("name", ROWS)
def test_transposes_by_the_inner_product(name):
    """Along one axis, with any state along the other, and along two axes."""
    cases = [(("i",), s) for s in "IVUR"] + [(("j",), s) for s in "IVUR"] + [(("i", "j"), "I")]
    check_each((f"{axes} {beside}", lambda a=axes, b=beside: check_row(name, a, b)) for axes, beside in cases)
