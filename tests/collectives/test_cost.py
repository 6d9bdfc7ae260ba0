"""Formulas of costs equal what is counted; and what is counted is what is run."""

import numpy
import pytest

import minidiff as md
from collectives import algorithms, all_gather, in_flight, ops, ppermute, psum, reductions, rooted
from collectives.cost import ALGORITHMS, PRICED_AS, Cost, Formula, counted, price
from spmd import P
from tests.checks.algorithms import ITEM, call, runs_on, whole_and_block
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each


def tape_of(n, f, shape):
    """The tape of a body over n ranks along 'i', for a block of this shape."""
    g = mapped(lambda b: f(b[0])[None], mesh(n), P("i"), P("i"))
    return md.make_tape(g)(md.ShapedArray((n, *shape), float))


def body_of(tape):
    (eqn,) = (eqn for eqn in tape.equations if eqn.primitive.name == "shard_map")
    return eqn.params["body"]


every = each("name", algorithms.__all__)


def test_every_algorithm_has_formulas():
    assert {*algorithms.__all__, "point_to_point"} == set(ALGORITHMS)
    assert set(PRICED_AS.values()) <= set(ALGORITHMS)


def test_every_collective_that_communicates_has_a_price():
    declared = [
        x
        for module in (ops, reductions, in_flight, rooted)
        for x in vars(module).values()
        if isinstance(x, ops.Collective)
    ]
    assert set(PRICED_AS) == {x.name for x in declared if x.cost is not None}


@every
@each("n", [1, 2, 3, 6, 8])
def test_formulas_are_what_is_counted(name, n):
    assert ALGORITHMS[name](1, 1000) == Cost()
    if not runs_on(name, n):
        return
    shape, whole = whole_and_block(name, n)
    tape, formulas = tape_of(n, call(name), shape), ALGORITHMS[name]
    actual = counted(tape, formulas.ports)
    adds = [
        eqn for eqn in body_of(tape).equations if eqn.primitive.name == "add" and eqn.outputs[0].type.dtype == float
    ]
    reduced = sum(eqn.outputs[0].type.nbytes for eqn in adds)
    assert Cost(actual.steps, actual.bytes, actual.sent, actual.received, reduced) == formulas(n, whole)


@each("name", [name for name in algorithms.__all__ if name.endswith("all_reduce")])
@each("size", [0, 1, 5, 7])
def test_arrays_that_are_filled_up(name, size):
    """For an array that cannot be split evenly, K is its size after padding."""
    n, formulas = 4, ALGORITHMS[name]
    halves = formulas.ports  # of which the first may be the longer one
    filled = (
        -(-size // (n * halves)) * n * halves if "/N" in str(formulas.bytes) or "/P" in str(formulas.bytes) else size
    )
    assert counted(tape_of(n, call(name), (size,)), formulas.ports).bytes == formulas.bytes(n, filled * ITEM)


@every
@each("n", [2, 4])
def test_the_way_back_is_as_dear(name, n):
    """Each message is sent back: as many steps, as many bytes, and ranks that sent most receive most."""
    shape, _ = whole_and_block(name, n)
    f = mapped(lambda b: call(name)(b[0])[None], mesh(n), P("i"), P("i"))
    x = numpy.ones((n, *shape))
    y = numpy.ones(f(x).shape)
    ports = ALGORITHMS[name].ports
    there = counted(md.make_tape(f)(x), ports)
    back = counted(md.make_tape(lambda ct: md.linear_transpose(f, x)(ct)[0])(y), ports)
    assert back == Cost(there.steps, there.bytes, there.received, there.sent)


# ---------------------------------------------------------------- counting


RING2 = [(0, 1), (1, 0)]


def in_turn(x):
    """Three messages, each of which needs the one before."""
    return ppermute(ppermute(ppermute(x, "i", RING2), "i", RING2), "i", RING2)


def fan(x):
    return sum(ppermute(x, "i", [(k, 3)]) for k in range(3))


def looped(x):
    return md.scan(lambda c, _: (ppermute(c, "i", RING2), None), x, None, length=5)[0]


#: A body of 4 numbers on n ranks with so many ports, and its cost: steps, and bytes of steps, sent and received.
COUNTED = {
    "messages in turn": (2, 5, in_turn, Cost(3, 96, 96, 96)),
    "at the same time, one port": (4, 1, fan, Cost(3, 96, 32, 96)),
    "at the same time, two ports": (4, 2, fan, Cost(2, 64, 32, 96)),
    "at the same time, three ports": (4, 3, fan, Cost(1, 32, 32, 96)),
    "the longest of a step": (
        2, 1, lambda x: ppermute(x, "i", [(0, 1)]).sum() + ppermute(x[:1], "i", [(1, 0)]), Cost(1, 32, 32, 32),
    ),
    "to oneself": (2, 1, lambda x: ppermute(x, "i", [(0, 0), (1, 1)]) + ppermute(x, "i", []), Cost()),
    "collectives": (
        4, 1, lambda x: psum(x, "i") + all_gather(x, "i").sum(0), price("psum", 4, 32) + price("all_gather", 4, 32),
    ),
    "steps of a loop": (2, 1, looped, 5 * Cost(1, 32, 32, 32)),
}  # fmt: skip


@each("name", COUNTED)
def test_programs_are_counted(name):
    n, ports, body, expected = COUNTED[name]
    assert counted(tape_of(n, body, (4,)), ports) == expected


def test_messages_along_different_axes_are_not_at_the_same_time():
    body = lambda x: ppermute(x, "i", [(0, 1)]) + ppermute(x, "j", [(1, 0)])  # noqa: E731
    f = mapped(body, mesh(2, 2), P(("i", "j")), P(("i", "j")))
    assert counted(md.make_tape(f)(numpy.ones(4)), ports=2).steps == 2


def test_partial_sums_that_leave_the_body():
    for on, spec, out, n in ((mesh(4), P("i"), P(sum="i"), 4), (mesh(2, 3), P(("i", "j")), P("j", sum="i"), 2)):
        f = mapped(lambda x: x, on, spec, out)
        assert counted(md.make_tape(f)(numpy.ones(2 * on.size))) == price("psum", n, 16)


def test_what_depends_on_values_is_not_counted():
    def body(x):
        return md.cond(psum(x.sum(), "i") > 0, lambda x: ppermute(x, "i", [(0, 1)]), lambda x: x, x)

    with pytest.raises(ValueError, match="cond"):
        counted(tape_of(2, body, (4,)))


# ---------------------------------------------------------------- formulas, prices


def test_formulas():
    assert Formula("2*(N - 1)*K/N")(8, 1000) == 1750
    assert Formula("K/N")(2, 0.5) == 0.25
    values = {text: [Formula(text)(n) for n in (1, 2, 3, 4, 5, 8, 9)] for text in ("P", "C", "log2(C)")}
    assert values == {"P": [1, 2, 2, 4, 4, 8, 8], "C": [1, 2, 4, 4, 8, 8, 16], "log2(C)": [0, 1, 2, 2, 3, 3, 4]}
    assert str(Formula("(N - 1)*K/(2*N)")) == "(N - 1)*K/(2*N)"
    with pytest.raises(ValueError):
        Formula("N")(0)


@each("collective", PRICED_AS)
def test_prices_are_in_proportion_to_bytes(collective):
    once, thrice = price(collective, 6, 100), price(collective, 6, 300)
    assert thrice.steps == once.steps
    assert (thrice.bytes, thrice.reduced) == pytest.approx((3 * once.bytes, 3 * once.reduced))


def test_prices_take_known_names():
    assert price("psum", 4, 100, "tree_all_reduce") == ALGORITHMS["tree_all_reduce"](4, 100)
    assert price("gather", 4, 100) == ALGORITHMS["binomial_tree_gather"](4, 400)
    for wrong in (("sum",), ("psum", "ring"), ("psum", "ring_all_gather"), ("reduce", "ring_all_reduce")):
        with pytest.raises(ValueError):
            price(wrong[0], 4, 100, *wrong[1:])


def test_costs_add_up():
    a, b = Cost(1, 2, 3, 4, 5), Cost(10, 20, 30, 40, 50)
    assert a + b == Cost(11, 22, 33, 44, 55)
    assert a * 3 == 3 * a == a + a + a
    assert a.seconds(1.0, 10.0, 100.0) == 1 + 20 + 500
