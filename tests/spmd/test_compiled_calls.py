"""The plan of a compiled shard_map's first call is used by later ones, only where it still applies."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, psum
from minidiff.compiler.codegen import CompiledTape
from spmd import P
from spmd.shard_map.compiled import CompiledBodies
from tests.programs.on_blocks import assert_trees_close

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")
OTHER = spmd.make_mesh((4,), ("i",), backend="simulated")
X = numpy.linspace(0.5, 2.0, 8)


def mapped(f, in_specs=P("i"), out_specs=P("i"), mesh=MESH):
    return spmd.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def body(x):
    return psum(np.sin(x).sum(), "i"), x * axis_index("i")


def both(mesh=MESH):
    return mapped(body, out_specs=(P(), P("i")), mesh=mesh)


def test_a_program_takes_what_is_sharded_otherwise():
    """A program in which a function is compiled before its operands' sharding is known: a loop's step."""
    expected = both()(X)
    sharded = [spmd.distribute(X, mesh, spec) for mesh in (MESH, OTHER) for spec in (P("i"), P())]
    for first in (X, *sharded):
        run = md.jit(both()).program(first).source.results
        for x in (first, X, *sharded, first):
            assert_trees_close(run(x), expected)


def test_a_cast_along_an_axis_of_one_rank_runs_nothing(monkeypatch):
    mesh = spmd.make_mesh((2, 1), ("i", "j"), backend="simulated")
    f = mapped(lambda x, y: np.sin(x) * y, (P("i"), P(("i", "j"))), P(("i", "j")), mesh)
    assert "pbroadcast(" in str(md.make_tape(f)(X, X))
    monkeypatch.setattr(type(mesh.ranks), "plan", None)
    assert_trees_close(md.jit(f)(X, X), numpy.sin(X) * X)
    with pytest.raises(TypeError, match="not callable"):
        md.jit(mapped(lambda x, y: np.sin(x) * y, (P(), P("i")), mesh=mesh))(X[:4], X)


def test_a_program_is_made_after_one_that_was_interrupted(monkeypatch):
    f = md.jit(both())
    with monkeypatch.context() as patch:
        patch.setitem(CompiledBodies.program.__globals__, "lower", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            f(X)
    assert_trees_close(f(X), both()(X))
    (tape,) = [t for t in f.program(X).source.namespace.values() if isinstance(t, CompiledTape)]
    assert None not in tape.lowered.values()


def test_each_sharding_has_its_program():
    f = md.jit(lambda x: (2.0 * x, both()(x)))
    for _ in range(3):
        for x in (X, *[spmd.distribute(X, MESH, spec) for spec in (P("i"), P())]):
            twice, actual = f(x)
            assert getattr(twice, "spec", P()) == getattr(x, "spec", P())
            assert_trees_close(actual, both()(X))


def test_a_function_that_is_compiled_is_still_differentiated_and_vmapped():
    f = md.jit(mapped(lambda x: psum(np.sin(x).sum(), "i"), out_specs=P()))
    x = spmd.distribute(X, MESH, P("i"))
    for _ in range(2):
        f(x)
        numpy.testing.assert_allclose(md.grad(f)(x).gather(), numpy.cos(X))
        numpy.testing.assert_allclose(md.vmap(f)(numpy.stack([X, -X])), [numpy.sin(X).sum(), numpy.sin(-X).sum()])


def test_debug_nans_looks_into_a_program_that_has_run_without_it():
    f = md.jit(mapped(lambda x: np.log(x)))
    f(X)
    with md.debug_nans(), pytest.raises(FloatingPointError, match="log"), numpy.errstate(all="ignore"):
        f(-X)
    with numpy.errstate(all="ignore"):
        assert numpy.isnan(f(-X).gather()).all()


def test_results_share_no_memory_with_arguments():
    one = spmd.make_mesh((1,), ("i",), backend="simulated")
    for mesh in (MESH, one):
        for spec, out in ((P(), P()), (P("i"), P("i")), (P(), P("i"))):
            f = md.jit(mapped(lambda x: (x, x[:1] * 2, x), spec, out, mesh))
            for x in (X.copy(), spmd.distribute(X, mesh, spec)):
                for _ in range(2):
                    for result in f(x):
                        whole = result.gather() if isinstance(result, spmd.ShardedArray) else result
                        assert whole.flags.writeable
                        whole[...] = -1.0
                        if isinstance(x, numpy.ndarray):
                            assert isinstance(result, spmd.ShardedArray) <= (not numpy.shares_memory(result.data, x))
                            assert (x == X).all()
                assert_trees_close(x.gather() if isinstance(x, spmd.ShardedArray) else x, X)


def test_an_error_in_a_program_leaves_it_as_it_was():
    def fails_once(x):
        return md.pure_callback(lambda x: answers.pop()(x), x, x)

    answers = [numpy.sin, lambda x: 1 / 0, numpy.sin]
    one = spmd.make_mesh((1,), ("i",), backend="simulated")
    f = md.jit(mapped(lambda x: psum(fails_once(x), "i"), out_specs=P(), mesh=one))
    expected = numpy.sin(X)
    numpy.testing.assert_allclose(f(X), expected)
    with pytest.raises(ZeroDivisionError):
        f(X)
    numpy.testing.assert_allclose(f(X), expected)


def test_what_is_decided_is_in_the_place_of_what_decides():
    f = md.jit(both())
    f(X)
    (tape,) = [x for x in f.program(X).source.namespace.values() if isinstance(x, CompiledTape)]
    ((source, _),) = tape.lowered.values()
    functions = source.results.__globals__
    decided = {name: run for name, run in functions.items() if name.startswith("psum_")}
    assert len(decided) == 2 and "first" not in [run.__name__ for run in decided.values()]
    f(X)
    assert all(functions[name] is run for name, run in decided.items())


def test_results_are_written_over_donated_blocks():
    """So they are over plain arrays that the body takes whole; a block that another array shows is copied first."""
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    body = lambda w, x: (w - 0.5 * psum((w * x).sum(0), "i"), np.sin(x) * 2)  # noqa: E731
    step = spmd.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=(P(), P("i")))
    run = md.jit(step, donate_argnums=(0, 1))
    inputs = np.linspace(0, 1, 1000), np.linspace(0, 1, 8000).reshape(8, 1000)
    expected = step(*inputs)
    for shown in (False, True):
        w, x = inputs[0].copy(), spmd.distribute(inputs[1], mesh, P("i"))
        address, views = x.data.ctypes.data, x.local if shown else None
        new_w, new_x = run(w, x)
        assert_trees_close((new_w, new_x), expected)
        assert new_w is w and (new_x.data.ctypes.data == address) is not shown
        assert not shown or np.array_equal(views[0], inputs[1][:4])


def test_donated_blocks_that_are_returned_too_stay():
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    f = spmd.shard_map(lambda block: np.at(block)[0].set(9.0), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    run, whole = md.jit(lambda x: (f(x), x), donate_argnums=0), np.arange(4096.0).reshape(64, 64)
    for _ in range(2):
        changed, same = run(spmd.distribute(whole, mesh, P("i")))
        np.testing.assert_array_equal(same.gather(), whole)
        assert (changed.gather()[::32] == 9.0).all()


def test_operations_on_plain_results_are_fused():
    total = mapped(lambda x: psum(x * x, "i"), out_specs=P())
    x = numpy.linspace(0.0, 1.0, 1 << 14)
    f = md.jit(lambda x: np.tanh(total(x) + 1.0) * 2.0)
    for argument in (x, spmd.distribute(x, MESH, P("i"))):
        numpy.testing.assert_allclose(f(argument), numpy.tanh((x * x).reshape(4, -1).sum(0) + 1.0) * 2.0)
        (kernel,) = [e for e in f.program(argument).tape.equations if e.primitive.name == "fused"]
        assert kernel.outputs[0].type.shape == (1 << 12,)
    split = md.jit(lambda x: np.tanh(mapped(lambda x: x * x)(x) + 1.0) * 2.0)
    assert "fused" not in {e.primitive.name for e in split.program(x).tape.equations}
