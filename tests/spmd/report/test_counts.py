"""Reports count the calls that the backend is asked for."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff import tree
from spmd import P
from tests.checks.samples import each
from tests.programs import report as programs

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")


@each("name", [*programs.OF_A_ROW, *programs.OF_A_MATRIX])
def test_programs_over_sharded_arrays(name):
    programs.check_array_program(MESH, name)


@each("name", programs.OPTIONS)
def test_options_of_jitted_functions(name):
    programs.check_options(MESH, name)


def test_a_loop_of_unknown_length_is_counted_for_a_step():
    programs.check_while_loops(MESH)


@each("name", programs.LONG_LOOPS)
def test_steps_of_long_loops_are_counted_as_they_are_compiled(name):
    programs.check_long_loop(MESH, name)


def test_random_programs():
    programs.check_random_programs(MESH, range(6))


def test_a_vmapped_loop_says_what_a_loop_by_hand_says():
    x = programs.sharded(MESH, P(None, "i"))
    vmapped, by_hand = md.vmap(programs.OF_A_ROW["scan"]), programs.OF_A_MATRIX["by hand"]
    assert spmd.communication(vmapped)(x).counts == spmd.communication(by_hand)(x).counts == {"psum": 4}
    assert spmd.compare(vmapped, x).typed.counts == {"psum": 4}
    entries = spmd.predict(vmapped, spmd.machines.A100)(x).cost.entries
    sent = {key.operation: entry.count for key, entry in entries.items() if key.axes}
    assert sent == {"psum": 4}
    timed = spmd.timeline(vmapped, spmd.CostModel(1.0, 0.0))(x)
    assert timed.seconds == pytest.approx(8.0, rel=1e-3)  # four sums of two steps each
    out_types = md.make_tape(md.vmap(programs.OF_A_ROW["fori_loop"]))(x).out_types
    shardings = [str(t.sharding and t.sharding.spec) for t in out_types]
    assert shardings == ["P(None, 'i')"]
    split = spmd.distribute(numpy.linspace(1, 50, 12), MESH, P("i"))
    report = spmd.communication(lambda v: md.while_loop(lambda s: np.sum(s) < 100.0, lambda s: s + v, v))(split)
    assert report.counts["psum"] >= 1 and "how many steps" in report.notes[0]
    loop = md.vmap(lambda v: md.while_loop(lambda s: s < 100.0, lambda s: s + v, v))
    assert spmd.communication(loop)(split).counts == {}  # each rank takes the steps of its own elements


def body(weights, x):
    for w in weights:
        x = np.tanh(x @ w)
    return psum(x.sum(), "i")


LOSS = spmd.shard_map(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P())
ARGS = [numpy.ones((16, 16))] * 3, numpy.ones((8, 16))


class Model:
    @md.jit(static_argnums=0, bucket_bytes=2048)
    def step(self, weights, x):
        return md.grad(LOSS)(weights, x)


JITTED = {
    "jitted": (md.jit(md.grad(LOSS), bucket_bytes=2048), ARGS),
    "a static argument": (
        md.jit(lambda k, w, x: md.grad(LOSS)(w, k * x), static_argnums=0, bucket_bytes=2048),
        (2, *ARGS),
    ),
    "a method": (Model().step, ARGS),
    "donated": (md.jit(md.grad(LOSS), bucket_bytes=2048, donate_argnums=0), ARGS),
}


@each("name", JITTED)
def test_reports_of_a_jitted_function_have_its_options(name):
    f, args = JITTED[name]
    assert spmd.communication(f)(*args).counts == {"psum": 3}
    assert spmd.communication(f, optimized=True)(*args).counts == {"psum": 3}
    measured = spmd.communication(f, measured=True)(*args)
    assert measured.counts == {"psum": 3} and all(row.seconds > 0 for row in measured.rows)
    model = spmd.CostModel(1e-5, 1e-8)
    lanes = spmd.timeline(f, model, measured=True)(*args)
    assert len([x for x in lanes.operations if x.name == "psum"]) == 6  # predicted, and measured
    assert spmd.compare(f, *args).typed.counts == {"psum": 3} and spmd.compare(f, *args).same
    prediction = spmd.predict(f, spmd.machines.A100)(*args)
    assert sum(entry.count for key, entry in prediction.cost.entries.items() if key.axes) == 3
    assert {"weights", "x"} <= {*prediction.memory} or {"w", "x"} <= {*prediction.memory}
    assert all(numpy.all(w == 1) for w in tree.leaves(args[-2]))  # a report writes into no argument
    assert model.predict(f)(*args).costs[2].steps == 3 * 2


def test_options_may_be_given_to_a_jitted_function_that_is_rewritten():
    f = md.jit(md.grad(LOSS), without=["fuse psums"])
    assert str(spmd.rewritten(f)(*ARGS)).count("psum(") == 3
    assert str(spmd.rewritten(md.jit(md.grad(LOSS)), bucket_bytes=2048)(*ARGS)).count("psum(") == 3


def test_a_function_that_calls_a_jitted_one_runs_its_program():
    f, args = JITTED["jitted"]
    assert spmd.communication(lambda w, x: [g * 2 for g in f(w, x)])(*args).counts == {"psum": 3}
    fused = md.jit(md.grad(LOSS))
    assert spmd.communication(lambda w, x: [g * 2 for g in fused(w, x)])(*args).counts == {"psum": 1}
    compiled = spmd.communication(lambda w, x: [g * 2 for g in f(w, x)], optimized=True)(*args)
    assert compiled.counts == {"psum": 1}  # compiled as a part of it


def test_what_a_compiled_body_leaves_out_is_not_counted():
    def last_is_unused(x):
        return md.scan(lambda c, _: (psum(c, "i") * x, c), x, length=3)[1]

    f = md.jit(spmd.shard_map(last_is_unused, mesh=MESH, in_specs=P("i"), out_specs=P(None, "i")))
    x = numpy.ones(4)
    f(x)
    MESH.reset_calls()
    f(x)
    assert spmd.communication(f)(x).counts == MESH.calls == {"psum": 2}


CALLERS = {
    "called": lambda f, x: f(x) * 2,
    "in a loop": lambda f, x: md.scan(lambda c, _: (f(c) / 9, None), x, length=2)[0],
    "in a branch": lambda f, x: md.cond(np.sum(x) > 0, f, np.sin, x),
    "in a jitted function": lambda f, x: md.jit(lambda x: f(x) * 2)(x),
    "twice": lambda f, x: f(f(x)),
}


@each("name", CALLERS)
def test_a_called_program_is_counted_as_it_is_compiled(name):
    calls = CALLERS[name]
    thrice = lambda v: np.sum(md.map(lambda k: psum(np.sum(v), "i") * v * k, np.arange(3.0)), 0)  # noqa: E731
    f = md.jit(spmd.shard_map(thrice, mesh=MESH, in_specs=P("i"), out_specs=P("i")))  # compiled, it sums once
    check = lambda f, x: programs.check_op_by_op(MESH, lambda x: calls(f, x), x)  # noqa: E731
    check(f, numpy.linspace(-0.1, 0.3, 8))
    check(md.jit(np.sort), spmd.distribute(numpy.linspace(-0.1, 0.3, 8), MESH, P("i")))
    whole = md.jit(lambda x: md.jit(np.sort)(x) * 1, without=["fuse shard maps", "overlap communication"])
    if name != "in a loop":  # which reshards its carry before the first step
        check(whole, spmd.distribute(numpy.linspace(-0.1, 0.3, 8), MESH, P("i")))
    tape = md.make_tape(lambda x: calls(f, x))(numpy.ones(8))  # has no programs, but what they are compiled from
    MESH.reset_calls()
    tape(numpy.ones(8))
    assert spmd.communication(tape).counts == MESH.calls


def test_kernels_are_a_part_of_predictions():
    machine = spmd.machines.A100.replace(fuses=frozenset(), launch=1.0)
    step = lambda x: np.sin(np.tanh(x) * x + 1)  # noqa: E731
    t = md.ShapedArray((1 << 22,), "float64")
    alone, fused = (spmd.predict(md.jit(step, kernels=k), machine)(t).seconds for k in (False, True))
    assert alone >= fused and alone > 3


def test_small_numbers_have_units_that_suit_them():
    text = str(spmd.predict(md.grad(LOSS), spmd.machines.A100)(*ARGS))
    assert "GiB of 80" not in text and "e-0" not in text
    assert " KiB of 80 GiB: fits (weights 6 KiB, x 512 bytes, " in text
