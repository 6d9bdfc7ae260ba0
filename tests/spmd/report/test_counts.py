"""Reports count the calls that the backend is asked for."""

import numpy

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
    programs.check_random_programs(range(4))


def test_vmapped_loops_over_split_elements():
    x, split = programs.sharded(MESH, P(None, "i")), spmd.distribute(numpy.linspace(1, 50, 12), MESH, P("i"))
    assert [str(t) for t in md.make_tape(md.vmap(programs.OF_A_ROW["fori_loop"]))(x).out_types] == [str(md.typeof(x))]
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


BUCKETS = md.jit(md.grad(LOSS), bucket_bytes=2048)
MATRIX = (programs.sharded(MESH, P(None, "i")),)

#: Functions and arguments; how many sums each tool says that they take, and the backend.
SUMS = {
    "jitted": (BUCKETS, ARGS, 3),
    "a static argument": (
        md.jit(lambda k, w, x: md.grad(LOSS)(w, k * x), static_argnums=0, bucket_bytes=2048),
        *((2, *ARGS), 3),
    ),
    "a method": (Model().step, ARGS, 3),
    "donated": (md.jit(md.grad(LOSS), bucket_bytes=2048, donate_argnums=0), ARGS, 3),
    "calls a jitted function": (lambda w, x: [g * 2 for g in BUCKETS(w, x)], ARGS, 3),
    "calls one that fuses sums": (lambda w, x: [g * 2 for g in md.jit(md.grad(LOSS))(w, x)], ARGS, 1),
    "a vmapped loop": (md.vmap(programs.OF_A_ROW["scan"]), MATRIX, 4),
    "the loop by hand": (programs.OF_A_MATRIX["by hand"], MATRIX, 4),
}


@each("name", SUMS)
def test_all_tools_count_the_same(name):
    f, args, count = SUMS[name]
    model = spmd.CostModel(1.0, 0.0)
    report, compared = spmd.communication(f)(*args), spmd.compare(f, *args)
    assert report.counts == compared.typed.counts == {"psum": count} and compared.same
    assert model.predict(f)(*args).costs[2].steps == 2 * count
    if name.startswith("calls"):  # which are compiled together
        return
    priced = spmd.predict(f, spmd.machines.A100)(*args).cost.entries
    assert sum(entry.count for key, entry in priced.items() if key.axes) == count
    if "loop" in name:  # not compiled
        return
    measured = spmd.communication(f, measured=True)(*args)
    assert measured.counts == spmd.communication(f, optimized=True)(*args).counts == {"psum": count}
    assert all(row.seconds > 0 for row in measured.rows)
    lanes = spmd.timeline(f, model, measured=True)(*args)
    assert [x.name for x in lanes.operations].count("psum") == 2 * count  # predicted, and measured
    assert all(numpy.all(w == 1) for w in tree.leaves(args[-2]))  # a report writes into no argument


def test_options_may_be_given_to_a_jitted_function_that_is_rewritten():
    f = md.jit(md.grad(LOSS), without=["fuse psums"])
    assert str(spmd.rewritten(f)(*ARGS)).count("psum(") == 3
    assert str(spmd.rewritten(md.jit(md.grad(LOSS)), bucket_bytes=2048)(*ARGS)).count("psum(") == 3


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
