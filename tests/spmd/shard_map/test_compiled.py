"""Compiled calls: the plan of a first call is used by later ones, only where it still applies."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, psum
from minidiff.compiler.codegen import CompiledTape
from spmd import P
from spmd.shard_map.compiled import CompiledBodies
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.whole import whole

LINE, TWO, ONE = mesh(4), mesh(2), mesh(1)
X = numpy.linspace(0.5, 2.0, 8)


def on_line(f, out_specs=P("i"), over=LINE):
    return mapped(f, over, P("i"), out_specs)


def both(over=LINE):
    return on_line(lambda x: (psum(np.sin(x).sum(), "i"), x * axis_index("i")), (P(), P("i")), over)


def compiled_tape(f, x):
    (tape,) = [t for t in f.program(x).source.namespace.values() if isinstance(t, CompiledTape)]
    return tape


def test_each_sharding_has_its_program():
    f = md.jit(lambda x: (2.0 * x, both()(x)))
    for _ in range(3):
        for x in (X, *[spmd.distribute(X, LINE, spec) for spec in (P("i"), P())]):
            twice, actual = f(x)
            assert spmd.spec_of(twice) == spmd.spec_of(x)
            assert_trees_close(actual, both()(X))


def test_a_program_is_made_after_one_that_was_interrupted(monkeypatch):
    f = md.jit(both())
    with monkeypatch.context() as patch:
        patch.setitem(CompiledBodies.program.__globals__, "lower", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            f(X)
    assert_trees_close(f(X), both()(X))
    assert None not in compiled_tape(f, X).lowered.values()


def test_an_error_in_a_program_leaves_it_as_it_was():
    answers = [numpy.sin, lambda x: 1 / 0, numpy.sin]
    f = md.jit(on_line(lambda x: psum(md.pure_callback(lambda x: answers.pop()(x), x, x), "i"), P(), ONE))
    for error in (None, ZeroDivisionError, None):
        if error is None:
            numpy.testing.assert_allclose(f(X), numpy.sin(X))
        else:
            with pytest.raises(error):
                f(X)


def test_debug_nans_looks_into_a_program_that_has_run_without_it():
    f = md.jit(on_line(np.log))
    f(X)
    with numpy.errstate(all="ignore"):
        with md.debug_nans(), pytest.raises(FloatingPointError, match="log"):
            f(-X)
        assert numpy.isnan(f(-X).gather()).all()


@pytest.mark.parametrize("spec, out", [(P(), P()), (P("i"), P("i")), (P(), P("i"))])
@pytest.mark.parametrize("over", [LINE, ONE], ids=str)
def test_results_share_no_memory_with_arguments(over, spec, out):
    f = md.jit(mapped(lambda x: (x, x[:1] * 2, x), over, spec, out))
    for x in (X.copy(), spmd.distribute(X, over, spec)):
        for result in (*f(x), *f(x)):
            assert not isinstance(x, numpy.ndarray) or not numpy.shares_memory(getattr(result, "data", result), x)
            whole(result)[...] = -1.0
        assert_trees_close(x, X)


@pytest.mark.parametrize("shown", [False, True])
def test_results_are_written_over_donated_blocks(shown):
    """So they are over plain arrays that the body takes whole; a block that another array shows is copied first."""
    body = lambda w, x: (w - 0.5 * psum((w * x).sum(0), "i"), np.sin(x) * 2)  # noqa: E731
    step = mapped(body, TWO, (P(), P("i")), (P(), P("i")))
    inputs = np.linspace(0, 1, 1000), np.linspace(0, 1, 8000).reshape(8, 1000)
    w, x = inputs[0].copy(), spmd.distribute(inputs[1], TWO, P("i"))
    address, views = x.data.ctypes.data, x.local if shown else None
    new_w, new_x = md.jit(step, donate_argnums=(0, 1))(w, x)
    assert_trees_close((new_w, new_x), step(*inputs))
    assert new_w is w and (new_x.data.ctypes.data == address) is not shown
    assert not shown or np.array_equal(views[0], inputs[1][:4])


def test_donated_blocks_that_are_returned_too_stay():
    f = on_line(lambda block: np.at(block)[0].set(9.0), over=TWO)
    run, array = md.jit(lambda x: (f(x), x), donate_argnums=0), np.arange(4096.0).reshape(64, 64)
    for _ in range(2):
        changed, same = run(spmd.distribute(array, TWO, P("i")))
        np.testing.assert_array_equal(same, array)
        assert (changed.gather()[::32] == 9.0).all()


def test_operations_on_plain_results_are_fused():
    x, after = numpy.linspace(0.0, 1.0, 1 << 14), lambda y: np.tanh(y + 1.0) * 2.0
    f = md.jit(lambda x: after(on_line(lambda x: psum(x * x, "i"), P())(x)))
    for argument in (x, spmd.distribute(x, LINE, P("i"))):
        numpy.testing.assert_allclose(f(argument), after((x * x).reshape(4, -1).sum(0)))
        (kernel,) = [e for e in f.program(argument).tape.equations if e.primitive.name == "fused"]
        assert kernel.outputs[0].type.shape == (1 << 12,)
    split = md.jit(lambda x: after(on_line(lambda x: x * x)(x)))
    assert "fused" not in {e.primitive.name for e in split.program(x).tape.equations}
