"""`debug_nans` in all transformations; `debug_nans.md` shows what counts, and `disable_jit.md` what runs op by op."""

import os
import subprocess
import sys

import numpy
import pytest
from numpy.testing import assert_allclose

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.core.interpreter import EVALUATE, current_interpreter
from spmd import P
from tests import PATIENCE
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.checks.transformations import NESTED, TRANSFORMATIONS, on_blocks

X = numpy.array([1.0, 0.0, 2.0, 3.0])
Y = numpy.array([1.0, 2.0, 3.0, 0.0])  # rank 1 has the zero


def log_of_zero(x):
    return np.log(np.sin(x) * 1.0).sum()


def root_of_zero(x):
    return np.sqrt(x).sum()  # its derivative is not finite


def growing(x):
    return md.scan(lambda c, _: (np.square(c), None), 10 * x[3], None, length=12)[0]


ALL = {**TRANSFORMATIONS, **NESTED}
del ALL["checkpoint"]  # of a plain array, NumPy alone is called
FORWARD = {
    **{name: (lambda x, run=run: run(log_of_zero, x), "log", "np.log") for name, run in ALL.items()},
    "jvp of root": (lambda x: md.jvp(root_of_zero, (x,), (x + 1,)), "the derivative of sqrt", "np.sqrt"),
    "scan": (md.grad(growing), "square", "np.square"),
    "scan in jit": (md.jit(growing), "square", "np.square"),
    "of rank 1": (on_blocks(lambda x: np.log(x)), "log", "np.log"),
    "of rank 1, untyped": (mapped(lambda x: np.log(x), mesh(2), P("i"), P("i"), check_rep=False), "log", "np.log"),
}
BACKWARD = {
    **{name: lambda f, x, run=run: run(f, x) for name, run in ALL.items() if "grad" in name and name != "grad of grad"},
    "vjp": lambda f, x: md.vjp(f, x)[1](1.0),
    "cond": lambda f, x: md.grad(lambda x: md.cond(x[0] > 0, f, np.sum, x))(x),
    "scan": lambda f, x: md.grad(lambda x: md.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0])(x),
    "of rank 1": lambda f, x: on_blocks(md.grad(f))(x),
    "of rank 1, around it": lambda f, x: md.grad(lambda x: on_blocks(lambda x: np.stack([f(x)]))(x).sum())(x),
    "of rank 1, sharded": lambda f, x: md.grad(f)(spmd.distribute(x, mesh(2), P("i"))),
}


def check_told(name, f, expected, line):
    """The error names the operation, the line, and on ranks, the rank."""
    where, x = (r", on rank 1 at mesh coordinates \(i,\) = \(1,\)$", Y) if "rank 1" in name else ("", X)
    with (
        md.debug_nans(),
        pytest.raises(FloatingPointError, match=rf"{expected} of test_debug\.py:\d+: .*{line}.*{where}"),
    ):
        f(x)


@each("name", FORWARD)
def test_forward(name):
    f, operation, line = FORWARD[name]
    check_told(name, f, rf"{operation} of f64.* produced .*: in the forward pass", line)


@each("name", BACKWARD)
def test_backward(name):
    message = "produced an infinity, and all operands are finite: in the backward pass"
    check_told(name, lambda x: BACKWARD[name](root_of_zero, x), message, r"np\.sqrt")


def test_it_is_off_again():
    for _ in range(2):
        with pytest.raises(FloatingPointError), md.debug_nans():
            md.grad(log_of_zero)(X)
        with numpy.errstate(all="ignore"):
            assert numpy.isinf(md.grad(root_of_zero)(X)[1]) and md.jit(log_of_zero)(X) == -numpy.inf
    assert current_interpreter() is EVALUATE


PROGRAM = """
import threading, minidiff as md, minidiff.numpy as np
thread = threading.Thread(target=lambda: print(md.grad(np.sqrt)(0.0)))
thread.start()
thread.join()
"""


def test_environment_variable_for_all_threads():
    env = {**os.environ, "MINIDIFF_DEBUG_NANS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert "FloatingPointError: the derivative of sqrt" in done.stderr


# ---------------------------------------------------------------- disable_jit


def check_on_ranks(on):
    """A jitted `shard_map`, and a jitted body, run op by op on each rank's blocks."""
    seen = []

    def body(w, x):
        loss = psum(np.sum(np.tanh(x * w)), "i")
        seen.append(md.stop_gradient(loss).item())  # a value that is the same on all ranks is one number
        return md.cond(loss > 0, lambda: loss, lambda: -loss)

    for f in (md.jit(mapped(body, on, (P(), P("i")), P())), mapped(md.jit(body), on, (P(), P("i")), P())):
        seen.clear()
        with md.disable_jit():
            assert_allclose(md.value_and_grad(f)(0.5, np.ones(4)), (4 * np.tanh(0.5), 4 - 4 * np.tanh(0.5) ** 2))
        assert_allclose(seen, [4 * np.tanh(0.5)] * len(seen))
        assert seen


def test_disable_jit_on_ranks():
    check_on_ranks(mesh(2))
