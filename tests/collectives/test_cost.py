"""Formulas of costs equal what is counted; and what is counted is what is run."""

import doctest

import numpy
import pytest

import minidiff as md
from collectives import algorithms, all_gather, cost, in_flight, ops, ppermute, psum, reductions, rooted
from collectives.cost import ALGORITHMS, PRICED_AS, Cost, Formula, counted, price
from spmd import P
from tests.checks.algorithms import ITEM, call, run_divisible, runs_on, whole_and_block
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


def test_all_variants_of_a_gather_have_one_price():
    prices = {price(f"all_gather{variant}", 4, 100) for variant in ("", "_invariant", "_reduced")}
    assert prices == {ALGORITHMS["ring_all_gather"](4, 400)}


def test_every_collective_that_communicates_has_a_price():
    declared = [
        x
        for module in (ops, reductions, in_flight, rooted)
        for x in vars(module).values()
        if isinstance(x, ops.Collective)
    ]
    assert set(PRICED_AS) == {x.name for x in declared if x.cost is not None}


@every
@each("n", [1, 2, 3, 4, 5, 6, 7, 8])
def test_formulas_are_what_is_counted(name, n):
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


@every
def test_formulas_are_what_is_run(name):
    """On ranks: each `ppermute` is a message in a step of its own, where there is one port."""
    whole, formulas = run_divisible(name, mesh(4)), ALGORITHMS[name]
    assert mesh(4).calls == {"ppermute": formulas.steps(4) * formulas.ports}
    assert mesh(4).bytes == {"ppermute": formulas.bytes(4, whole) * formulas.ports}


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


def test_messages_that_depend_on_each_other_take_steps():
    def chain(x):
        for _ in range(3):
            x = ppermute(x, "i", [(0, 1), (1, 0)])
        return x

    assert counted(tape_of(2, chain, (4,)), ports=5) == Cost(3, 96, 96, 96)


@pytest.mark.parametrize(("ports", "steps"), [(1, 3), (2, 2), (3, 1)])
def test_messages_at_the_same_time(ports, steps):
    def fan(x):
        return sum(ppermute(x, "i", [(k, 3)]) for k in range(3))

    assert counted(tape_of(4, fan, (4,)), ports) == Cost(steps, 32 * steps, 32, 96)


def test_a_step_takes_as_long_as_its_longest_message():
    def both(x):
        return ppermute(x, "i", [(0, 1)]).sum() + ppermute(x[:1], "i", [(1, 0)])

    assert counted(tape_of(2, both, (4,))) == Cost(1, 32, 32, 32)


def test_nothing_is_sent_to_oneself():
    assert counted(tape_of(2, lambda x: ppermute(x, "i", [(0, 0), (1, 1)]), (4,))) == Cost()
    assert counted(tape_of(2, lambda x: ppermute(x, "i", [(0, 0)]) + ppermute(x, "i", []), (4,))) == Cost()


def test_messages_along_different_axes_are_not_at_the_same_time():
    body = lambda x: ppermute(x, "i", [(0, 1)]) + ppermute(x, "j", [(1, 0)])  # noqa: E731
    f = mapped(body, mesh(2, 2), P(("i", "j")), P(("i", "j")))
    assert counted(md.make_tape(f)(numpy.ones(4)), ports=2).steps == 2


def test_other_collectives_are_priced():
    def body(x):
        return psum(x, "i") + all_gather(x, "i").sum(0)

    assert counted(tape_of(4, body, (4,))) == price("psum", 4, 32) + price("all_gather", 4, 32)


def test_loops_count_each_step():
    def body(x):
        def step(carry, _):
            return ppermute(carry, "i", [(0, 1), (1, 0)]), None

        return md.scan(step, x, None, length=5)[0]

    assert counted(tape_of(2, body, (4,))) == 5 * Cost(1, 32, 32, 32)


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
    assert Formula("K/N")(3, 1) == pytest.approx(1 / 3)
    assert Formula("K/N")(2, 0.5) == 0.25
    assert [Formula("P")(n) for n in (1, 2, 3, 4, 7, 8)] == [1, 2, 2, 4, 4, 8]
    assert [Formula("C")(n) for n in (1, 2, 3, 4, 7, 8)] == [1, 2, 4, 4, 8, 8]
    assert [Formula("log2(C)")(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    with pytest.raises(ValueError):
        Formula("N")(0)


def test_formulas_print_as_written():
    assert str(Formula("(N - 1)*K/(2*N)")) == "(N - 1)*K/(2*N)"


@every
def test_one_rank_costs_nothing(name):
    assert ALGORITHMS[name](1, 1000) == Cost()


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


def test_ring_against_server():
    """Bandwidth: a ring's bytes hardly grow with ranks, a server's do in proportion."""
    ring, server = ALGORITHMS["ring_all_reduce"], ALGORITHMS["parameter_server_all_reduce"]
    assert ring.sent(1024, 1e6) < 2e6
    assert server.sent(1024, 1e6) == 1023e6


def test_examples():
    assert doctest.testmod(cost).failed == 0
