"""`md.disable_jit`: jitted functions run op by op, in Python, and see values."""

import threading

import numpy
import pytest
from numpy.testing import assert_allclose

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.core.interpreter import EVALUATE, current_interpreter
from spmd import P


def seeing(x, seen):
    """Note whether Python sees the value of `x`."""
    try:
        seen.append(bool(numpy.asarray(x > 0).any()))
    except TypeError:
        seen.append(None)
    return x


#: Programs `(note, x) -> y`, and how often `note` runs if they run op by op.
PROGRAMS = {
    "operations": (lambda note, x: note(np.sin(note(x))), 2),
    "scan": (lambda note, x: md.scan(lambda c, e: (note(c) * e, None), x, np.arange(1.0, 4.0))[0], 3),
    "map": (lambda note, x: md.map(note, np.stack([x, x])).sum(), 2),
    "while_loop": (lambda note, x: md.while_loop(lambda x: x < 8, lambda x: 2 * note(x), x), 3),
    "fori_loop": (lambda note, x: md.fori_loop(0, 4, lambda i, x: note(x) + i, x), 4),
    "cond": (lambda note, x: md.cond(x > 0, lambda x: 2 * note(x), lambda x: note(x), x), 1),
    "switch": (lambda note, x: md.switch(np.where(x > 0, 1, 0), [note, lambda x: 2 * note(x)], x), 1),
    "checkpoint": (lambda note, x: md.checkpoint(lambda x: np.sin(note(x)))(x), 1),
    "a compiled function": (lambda note, x: md.jit(lambda x: np.sin(note(x)))(x), 1),
    "a branch of Python": (lambda note, x: 2 * note(x) if x > 0 else x, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_python_sees_values(name):
    program, count = PROGRAMS[name]
    seen = []
    f = md.jit(lambda x: program(lambda x: seeing(x, seen), x))
    x, expected = np.float64(1.0), program(lambda x: x, np.float64(1.0))
    if name != "a branch of Python":
        f(x)  # from now on the program is compiled, and runs without Python
        f(x)
        seen.clear()
    with md.disable_jit():
        for _ in range(2):
            assert_allclose(f(x), expected)
    assert seen == [True] * 2 * count


def test_the_fast_paths_are_left():
    """Calls of what was compiled before: of numbers, arrays, keywords and trees."""
    calls = []
    f = md.jit(lambda x, y: (calls.append(1), x * y)[1])
    arguments = [(2.0, 3), (np.arange(3.0), 2.0), (np.arange(3.0), np.ones(3))]
    expected = [f(*args) for args in arguments]
    for args in arguments:
        f(*args)
    calls.clear()
    with md.disable_jit():
        for args, y in zip(arguments, expected):
            numpy.testing.assert_array_equal(f(*args), y)
            numpy.testing.assert_array_equal(f(args[0], y=args[1]), y)
    assert len(calls) == 6
    for args in arguments:
        f(*args)
    assert len(calls) == 6


def test_static_arguments_and_methods():
    class Model:
        @md.jit(static_argnames="n")
        def power(self, x, n):
            return x**n

    with md.disable_jit():
        assert md.jit(lambda x, n: x**n, static_argnums=1)(2.0, 3) == 8.0
        assert md.jit(lambda x, n: x**n, static_argnames="n")(2.0, n=3) == 8.0
        assert Model().power(2.0, n=3) == 8.0


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_under_other_transformations(inside):
    """Wherever the block is, the function itself is traced: its `note` runs in each call."""
    calls = []
    jitted = md.jit(lambda x: (calls.append(1), np.sin(x) * x)[1])

    def f(x):
        with md.disable_jit():
            return jitted(x)

    x, plain = np.float64(2.0), lambda x: np.sin(x) * x
    with md.disable_jit(not inside):
        f = f if inside else jitted
        for transform in (md.grad, md.jacfwd, lambda f: md.grad(md.grad(f)), lambda f: md.grad(md.checkpoint(f))):
            calls.clear()
            for _ in range(2):
                assert_allclose(transform(f)(x), transform(plain)(x))
            assert len(calls) >= 2
        assert_allclose(md.vmap(f)(np.arange(3.0)), plain(np.arange(3.0)))


def test_blocks_in_blocks():
    assert current_interpreter() is EVALUATE
    with md.disable_jit():
        assert current_interpreter() is not EVALUATE
        with md.disable_jit(False):
            assert current_interpreter() is EVALUATE
            calls = []
            f = md.jit(lambda x: (calls.append(1), x)[1])
            assert (f(1.0), f(1.0), len(calls)) == (1.0, 1.0, 1)
        assert current_interpreter() is not EVALUATE
        f(1.0)
        assert len(calls) == 2
    with pytest.raises(ZeroDivisionError), md.disable_jit():
        md.jit(lambda x: 1 // 0)(1.0)
    assert current_interpreter() is EVALUATE
    f(1.0)
    assert len(calls) == 2


def test_of_this_thread_alone():
    calls = []
    f = md.jit(lambda x: (calls.append(1), x)[1])
    f(1.0)
    with md.disable_jit():
        thread = threading.Thread(target=f, args=(1.0,))
        thread.start()
        thread.join()
    assert len(calls) == 1


@pytest.mark.parametrize("outer", [md.debug_nans, md.disable_jit])
def test_beside_debug_nans(outer):
    inner = md.disable_jit if outer is md.debug_nans else md.debug_nans
    calls = []
    f = md.jit(lambda x: (calls.append(1), np.log(x))[1])
    f(1.0)
    with outer(), inner():
        assert f(1.0) == 0.0
        with pytest.raises(FloatingPointError, match="log"):
            f(-1.0)
    assert len(calls) == 3


def test_tapes_have_the_steps_of_loops():
    loop = md.jit(lambda x: md.scan(lambda c, e: (c * e, c), x, np.arange(1.0, 4.0)))
    with md.disable_jit():
        tape = md.make_tape(loop)(2.0)
    names = [eqn.primitive.name for eqn in tape.equations]
    assert "scan" not in names and names.count("multiply") == 3
    assert [eqn.primitive.name for eqn in md.make_tape(loop)(2.0).equations] == ["scan"]


def check_on_ranks(mesh):
    """A jitted `shard_map`, and a jitted body, run op by op on each rank's blocks."""
    seen = []

    def body(w, x):
        loss = psum(np.sum(np.tanh(x * w)), "i")
        seen.append(md.stop_gradient(loss).item())  # a value that is the same on all ranks is one number
        return md.cond(loss > 0, lambda: loss, lambda: -loss)

    specs = {"mesh": mesh, "in_specs": (P(), P("i")), "out_specs": P()}
    args = np.float64(0.5), np.arange(4.0)
    expected = float(spmd.shard_map(body, **specs)(*args))
    for f in (md.jit(spmd.shard_map(body, **specs)), spmd.shard_map(md.jit(body), **specs)):
        seen.clear()
        with md.disable_jit():
            assert_allclose(f(*args), expected)
            assert_allclose(md.grad(f)(*args), md.grad(spmd.shard_map(lambda *xs: body(*xs), **specs))(*args))
        assert_allclose(seen, [expected] * len(seen))
        assert len(seen) >= 2


def test_on_ranks():
    check_on_ranks(spmd.make_mesh((2,), ("i",), backend="simulated"))
