"""`debug_nans` raises at the operation that makes a NaN or an infinity; `disable_jit.md` shows what runs op by op."""

import os
import subprocess
import sys

import numpy
import pytest
from numpy.testing import assert_allclose

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum, psum_scatter
from minidiff.core.interpreter import EVALUATE, current_interpreter
from spmd import P
from tests import PATIENCE
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.checks.transformations import NESTED, TRANSFORMATIONS, on_blocks

X = numpy.array([1.0, 0.0, 2.0, 3.0])
Y = numpy.array([1.0, 2.0, 3.0, 0.0])  # rank 1 has the zero
INF, NAN = "produced an infinity, and all operands are finite", "produced a NaN, and no operand has one"


def log_of_zero(x):
    return np.log(np.sin(x) * 1.0).sum()


def root_of_zero(x):
    return np.sqrt(x).sum()  # its derivative is not finite


def difference_of_infinities(x):
    y = np.where(False, x, -numpy.inf)
    return (y - np.max(y)).sum()


def growing(x):
    return md.scan(lambda c, _: (np.square(c), None), 10 * x[3], None, length=12)[0]


ALL = {**TRANSFORMATIONS, **NESTED}
del ALL["checkpoint"]  # of a plain array, NumPy alone is called
FORWARD = {
    **{name: (lambda x, run=run: run(log_of_zero, x), "log", "np.log") for name, run in ALL.items()},
    "jvp of root": (lambda x: md.jvp(root_of_zero, (x,), (x + 1,)), "the derivative of sqrt", "np.sqrt"),
    "scan": (md.grad(growing), "square", "np.square"),
    "scan in jit": (md.jit(growing), "square", "np.square"),
    "NaN": (md.grad(difference_of_infinities), "subtract", "np.max"),
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
    check_told(name, lambda x: BACKWARD[name](root_of_zero, x), f"{INF}: in the backward pass", r"np\.sqrt")


def masked(x):
    scores = np.where(x > 0, x, -numpy.inf)
    weights = np.exp(scores - np.max(scores))
    return (x * weights / weights.sum()).sum() + np.maximum(x, -numpy.inf).sum() + np.min(x, initial=numpy.inf)


@each("transformation", [lambda f: f, md.jit, md.grad, lambda f: md.jit(md.grad(f)), md.checkpoint])
def test_what_enters_as_a_constant_is_no_error(transformation):
    with md.debug_nans():
        results = transformation(masked)(X)
    assert_allclose(results, transformation(masked)(X))


def test_nans_alone():
    with md.debug_nans(inf=False):
        assert numpy.isinf(md.grad(root_of_zero)(X)[1]) and numpy.log(X)[1] == -numpy.inf
        with pytest.raises(FloatingPointError, match=NAN):
            md.jit(difference_of_infinities)(X)


def test_plain_arrays():
    """NumPy alone reports errors outside of this library."""
    with md.debug_nans(), pytest.raises(FloatingPointError, match="divide by zero encountered in log"):
        np.log(X)
    with md.debug_nans(), pytest.raises(FloatingPointError, match=rf"subtract of f64\[4\] and f64\[\] {NAN}"):
        md.jit(lambda x, c: x - c)(numpy.full(4, numpy.inf), numpy.inf)


def test_sums_are_compared_with_the_operands_of_all_ranks():
    total = mapped(lambda x: psum(x, "i"), mesh(2), P("i"), P())
    parts = mapped(lambda x: psum_scatter(x[0], "i")[None], mesh(2), P("i"), P("i"))
    with md.debug_nans():
        assert numpy.isinf(total(numpy.float16([numpy.inf, 1.0])))
        assert numpy.isinf(parts(numpy.array([[1.0, 2.0], [3.0, numpy.inf]]))[1])
        for x in ([6e4, 6e4], [numpy.inf, -numpy.inf]):
            with pytest.raises(FloatingPointError, match=r"psum of f16\[1\]{i} produced .*, on rank 0 .*, rank 1 "):
                total(numpy.float16(x))


def test_it_is_off_again():
    for _ in range(2):
        with pytest.raises(FloatingPointError), md.debug_nans():
            md.grad(log_of_zero)(X)
        with numpy.errstate(all="ignore"):
            assert numpy.isinf(md.grad(root_of_zero)(X)[1]) and md.jit(log_of_zero)(X) == -numpy.inf
    assert current_interpreter() is EVALUATE


def test_leaked_values_are_told():
    saved = []
    md.grad(lambda x: saved.append(x) or x)(1.0)
    with md.debug_nans(), pytest.raises(md.LeakedTracerError):
        np.sin(saved[0])


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
